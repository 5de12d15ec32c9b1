// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which backing a zone gets, and what files go through.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use super::*;

const MIB: u64 = 1 << 20;
const SMALL_SHMEM: HugePagePolicy = HugePagePolicy { private: true, shared: false };
const HUGE_SHMEM: HugePagePolicy = HugePagePolicy { private: true, shared: true };
const NO_HUGE: HugePagePolicy = HugePagePolicy { private: false, shared: false };

fn zone(change: impl FnOnce(&mut ZoneSpec)) -> ZoneSpec {
    let mut zone = ZoneSpec::new("z", 4 * MIB);
    change(&mut zone);
    zone
}

fn create(zone: &ZoneSpec) -> Result<ZoneBacking, BackingError> {
    ZoneBacking::create(zone, &Host::real(), SMALL_SHMEM, InitialContents::AsFound, None)
}

fn kind(policy: HugePagePolicy, change: impl FnOnce(&mut ZoneSpec)) -> ZoneKind {
    let (host, start) = (Host::real(), InitialContents::AsFound);
    ZoneBacking::create(&zone(change), &host, policy, start, None).unwrap().kind
}

fn file_zone(path: &Path, shared: bool) -> ZoneSpec {
    zone(|z| {
        z.backing = Backing::File(path.to_owned());
        z.shared = shared;
    })
}

#[test]
fn left_to_choose_huge_pages_decide() {
    use ZoneKind::{PrivateAnonymous, Shared};
    assert_eq!(kind(SMALL_SHMEM, |_| {}), PrivateAnonymous);
    assert_eq!(kind(SMALL_SHMEM, |z| z.thp = false), Shared);
    assert_eq!(kind(SMALL_SHMEM, |z| z.shared = true), Shared);
    assert_eq!(kind(SMALL_SHMEM, |z| z.backing = Backing::Memfd), Shared);
    assert_eq!(kind(HUGE_SHMEM, |_| {}), Shared);
    assert_eq!(kind(NO_HUGE, |_| {}), Shared);
    assert_eq!(kind(HUGE_SHMEM, |z| z.mergeable = true), PrivateAnonymous);
    assert_eq!(kind(HUGE_SHMEM, |z| z.backing = Backing::Anonymous), PrivateAnonymous);
}

#[test]
fn a_memfd_is_named_after_its_zone_and_cannot_be_cut() {
    let backing = create(&zone(|z| z.shared = true)).unwrap();
    let file = backing.file.unwrap();
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    assert!(link.to_str().unwrap().starts_with("/memfd:ram-z"), "{link:?}");
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
    let cut = file.set_len(MIB).unwrap_err();
    assert_eq!(cut.raw_os_error(), Some(libc::EPERM));
}

#[test]
fn a_file_is_created_with_its_size_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    let backing = create(&file_zone(&path, false)).unwrap();
    assert_eq!(backing.kind, ZoneKind::Shared);
    assert!(!backing.holds_data);
    assert_eq!(fs::metadata(&path).unwrap().len(), 4 * MIB);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    drop(backing);
    // Longer files are never truncated.
    fs::File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    create(&file_zone(&path, true)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 8 * MIB);
}

#[test]
fn a_directory_gets_a_file_without_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let backing = create(&file_zone(dir.path(), false)).unwrap();
    assert_eq!(backing.kind, ZoneKind::Shared);
    assert_eq!(backing.file.unwrap().metadata().unwrap().len(), 4 * MIB);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn data_in_a_file_is_safe_from_an_unshared_zone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    fs::write(&path, vec![7; 4 << 20]).unwrap();
    let private = create(&file_zone(&path, false)).unwrap();
    assert!(private.holds_data && private.kind == ZoneKind::PrivateFile);
    drop(private);
    let shared = create(&file_zone(&path, true)).unwrap();
    assert!(shared.holds_data && shared.kind == ZoneKind::Shared);
    drop(shared);

    fs::write(&path, b"short").unwrap();
    let error = create(&file_zone(&path, false)).unwrap_err();
    assert!(matches!(error, BackingError::ShortPrivateFile { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"short");
}

#[test]
fn unusable_paths_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("no/such/dir");
    let error = create(&file_zone(&nowhere, false)).unwrap_err();
    assert!(error.to_string().contains("no/such/dir"), "{error}");
    let error = create(&file_zone(Path::new("/dev/null"), true)).unwrap_err();
    assert!(matches!(error, BackingError::NotAFile { .. }), "{error}");
    let text = dir.path().join("text");
    fs::write(&text, "").unwrap();
    let error = create(&file_zone(&text.join("below"), false)).unwrap_err();
    assert!(error.to_string().contains("text/below"), "{error}");
}

#[test]
fn a_file_that_was_made_in_vain_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge");
    let error = create(&zone(|z| {
        z.backing = Backing::File(path.clone());
        z.size_bytes = 1 << 62;
        z.reserve = true;
    }))
    .unwrap_err();
    assert!(error.to_string().contains("huge"), "{error}");
    assert!(!path.exists());
}

#[test]
fn files_handed_over_are_examined() {
    let named = tempfile::NamedTempFile::new().unwrap();
    let of_file = zone(|z| z.backing = Backing::File(named.path().to_owned()));
    let provided = |spec: &ZoneSpec, file: File| {
        ZoneBacking::from_provided(spec, Arc::new(file), ProvidedContent::Unknown)
    };
    let refused = |spec: &ZoneSpec, file: File, why: &str| {
        let error = provided(spec, file).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    };
    let file = named.reopen().unwrap();
    file.set_len(4 * MIB - 4096).unwrap();
    refused(&of_file, file.try_clone().unwrap(), "shorter");
    file.set_len(4 * MIB).unwrap();
    assert_eq!(provided(&of_file, file.try_clone().unwrap()).unwrap().kind, ZoneKind::Shared);
    // The zone's file exempts that file and no other.
    let memfd = super::memfd("given", 0).unwrap();
    memfd.set_len(4 * MIB).unwrap();
    let elsewhere = tempfile::tempfile().unwrap();
    elsewhere.set_len(4 * MIB).unwrap();
    refused(&of_file, memfd, "shrinking");
    refused(&of_file, elsewhere.try_clone().unwrap(), "shrinking");
    // A zone with a directory has an unnamed file in it.
    let dir = std::env::temp_dir();
    provided(&zone(|z| z.backing = Backing::File(dir.clone())), elsewhere).unwrap();
    // The length of a file that can still be truncated is not checked.
    let cut = super::memfd("given", 0).unwrap();
    refused(&zone(|_| {}), cut, "shrinking");
    // A zone with a memfd takes no file that another process could truncate.
    refused(&zone(|_| {}), file.try_clone().unwrap(), "shrinking");
    refused(&zone(|z| z.backing = Backing::Anonymous), file.try_clone().unwrap(), "private");
    let huge = Backing::Hugetlb { page_size: HugePageSize::HostDefault };
    refused(&zone(|z| z.backing = huge), file, "huge pages");
    refused(&of_file, File::open("/dev/null").unwrap(), "not a memfd");
    named.as_file().set_len(4 * MIB).unwrap();
    refused(&of_file, File::open(named.path()).unwrap(), "reading and writing");
}

#[test]
fn memfds_handed_over_must_keep_their_size_and_be_writable() {
    let sealed = |seals: libc::c_int| {
        let file = super::memfd("given", 0).unwrap();
        file.set_len(4 * MIB).unwrap();
        // SAFETY: takes and returns numbers; the descriptor is open.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        ZoneBacking::from_provided(&zone(|_| {}), Arc::new(file), ProvidedContent::Unknown)
    };
    let ours = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    assert_eq!(sealed(ours).unwrap().kind, ZoneKind::Shared);
    for seals in [0, libc::F_SEAL_GROW, libc::F_SEAL_SHRINK | libc::F_SEAL_FUTURE_WRITE] {
        assert!(matches!(sealed(seals), Err(BackingError::ProvidedFile { .. })), "{seals:#x}");
    }
    // A memfd of this process can be handed over.
    let host = Host::real();
    let memfd = zone(|z| z.backing = Backing::Memfd);
    let own = ZoneBacking::create(&memfd, &host, NO_HUGE, InitialContents::AsFound, None).unwrap();
    ZoneBacking::from_provided(&zone(|_| {}), own.file.unwrap(), ProvidedContent::Unknown).unwrap();
}

#[test]
fn huge_pages_of_an_odd_or_missing_size_are_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let host = Host::pretended(root.path());
    let spec = |size_bytes| {
        zone(|z| {
            z.backing = Backing::Hugetlb { page_size: HugePageSize::HostDefault };
            z.size_bytes = size_bytes;
        })
    };
    let create_on =
        |spec: &ZoneSpec| ZoneBacking::create(spec, &host, NO_HUGE, InitialContents::AsFound, None);
    let missing = create_on(&spec(4 * MIB)).unwrap_err();
    assert!(matches!(missing, BackingError::NoSuchHugePages { .. }), "{missing}");
    fs::create_dir_all(root.path().join("proc")).unwrap();
    fs::write(root.path().join("proc/meminfo"), "Hugepagesize: 1048576 kB\n").unwrap();
    let odd = create_on(&spec(4 * MIB)).unwrap_err();
    assert!(odd.to_string().contains("not a multiple of its page size"), "{odd}");
}
