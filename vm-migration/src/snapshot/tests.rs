// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Snapshots of fake memory: a restore yields exactly the saved contents, and damaged files are refused.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use tempfile::TempDir;

use super::block::{Span, present_runs, spans};
use super::geometry::{CHUNK_PAGES, Geometry};
use super::index::{Entry, Index, IndexFault};
use super::manifest::{Manifest, Sealed};
use super::{
    CONFIG_FILE, FillEnd, Filling, INDEX_FILE, MANIFEST_FILE, MEMORY_FILE, Opened, STATE_FILE,
    Saved, SnapshotError, copy_in, save,
};
use crate::cancel::Cancel;
use crate::layout::{Backing, Layout, PAGE_BYTES, PageRun, RegionInfo, to_usize};
use crate::ram::GuestMemoryMap as _;
use crate::testing::FakeMemory;
use crate::uffd;
use crate::vm::STATE_BYTES_MAX;

/// A region that ends in the middle of a chunk, and one of several blocks.
const REGIONS: [(u64, u64); 2] = [(0, 77), (1 << 32, 2500)];
const SAVED: Saved<'_> = Saved { config_json: b"{\"a\":1}", state_json: b"[1,2,3]" };

fn memory(backing: Backing) -> Arc<FakeMemory> {
    FakeMemory::new(&REGIONS, backing, PAGE_BYTES).unwrap()
}

fn write(memory: &FakeMemory, region: usize, page: u64, value: u64) {
    memory.word(region, page, page % 512).store(value, Ordering::Relaxed);
}

fn read(memory: &FakeMemory, region: usize, page: u64) -> u64 {
    memory.word(region, page, page % 512).load(Ordering::Relaxed)
}

/// Scattered pages: a run across the end of a chunk, single pages, and the last one.
fn written() -> Vec<(usize, u64)> {
    let mut pages: Vec<(usize, u64)> = (10..40).map(|page| (0, page)).collect();
    pages.extend([(0, 76), (1, 0), (1, 5), (1, 14), (1, 1023), (1, 1024), (1, 2499)]);
    pages.extend((2000..2300).map(|page| (1, page)));
    pages
}

fn filled(backing: Backing) -> Arc<FakeMemory> {
    let memory = memory(backing);
    for (region, page) in written() {
        write(&memory, region, page, page + 7);
    }
    memory
}

fn taken(memory: &FakeMemory) -> TempDir {
    let folder = TempDir::with_prefix("snapshot-").unwrap();
    save(folder.path(), SAVED, memory, 3, &Cancel::new().unwrap()).unwrap();
    folder
}

fn restored(folder: &Path) -> Result<Arc<FakeMemory>, SnapshotError> {
    let memory = memory(Backing::Shared);
    let snapshot = Opened::open(folder)?;
    copy_in(&snapshot, &*memory, 3, &Cancel::new().unwrap())?;
    Ok(memory)
}

/// Asserts that every page is as in [`filled`].
fn assert_same(memory: &FakeMemory) {
    let written = written();
    for (region, (_, pages)) in REGIONS.iter().enumerate() {
        for page in 0..*pages {
            let expected = if written.contains(&(region, page)) { page + 7 } else { 0 };
            assert_eq!(read(memory, region, page), expected, "page {page} of region {region}");
        }
    }
}

#[test]
fn what_was_saved_comes_back_and_holes_stay_holes() {
    for backing in [Backing::Shared, Backing::Anonymous] {
        let folder = taken(&filled(backing));
        let snapshot = Opened::open(folder.path()).unwrap();
        assert_eq!(snapshot.config_json(), SAVED.config_json);
        assert_eq!(snapshot.state_json(), SAVED.state_json);
        let memory = restored(folder.path()).unwrap();
        let populated: u64 = (0..2).map(|region| memory.populated_bytes(region).unwrap()).sum();
        assert_eq!(populated, written().len() as u64 * PAGE_BYTES, "{backing:?}");
        assert_same(&memory);
    }
}

#[test]
fn memory_that_devices_have_mapped_keeps_its_pages() {
    for backing in [Backing::Shared, Backing::Anonymous] {
        let folder = taken(&filled(backing));
        let (snapshot, memory) = (Opened::open(folder.path()).unwrap(), memory(backing));
        memory.pin().unwrap();
        copy_in(&snapshot, &*memory, 3, &Cancel::new().unwrap()).unwrap();
        assert_same(&memory);
        let populated: u64 = (0..2).map(|region| memory.populated_bytes(region).unwrap()).sum();
        assert_eq!(populated, (77 + 2500) * PAGE_BYTES, "{backing:?}");
    }
}

#[test]
fn never_populated_memory_is_not_populated_and_takes_no_room() {
    let memory = memory(Backing::Shared);
    write(&memory, 1, 1500, 1);
    // A populated page of zeros.
    write(&memory, 1, 1501, 0);
    let folder = taken(&memory);
    assert_eq!(memory.populated_bytes(0).unwrap(), 0);
    assert_eq!(memory.populated_bytes(1).unwrap(), 2 * PAGE_BYTES);
    let metadata = folder.path().join(MEMORY_FILE).metadata().unwrap();
    assert_eq!(metadata.len(), (77 + 2500) * PAGE_BYTES);
    assert!(metadata.blocks() * 512 <= 64 << 10, "{} blocks", metadata.blocks());
}

#[test]
fn on_demand_shows_what_was_saved_to_each_access() {
    for backing in [Backing::Shared, Backing::Anonymous] {
        let folder = taken(&filled(Backing::Shared));
        let memory = memory(backing);
        if let Err(error) = uffd::check(memory.layout().regions()) {
            test_skip::skip!("{error}");
            return;
        }
        let snapshot = Opened::open(folder.path()).unwrap();
        let filling = Filling::start(snapshot, &memory, Cancel::new().unwrap()).unwrap();
        filling.commit().unwrap();
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let memory = Arc::clone(&memory);
                std::thread::spawn(move || assert_same(&memory))
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        let FillEnd::Complete(report) = filling.wait().unwrap() else { panic!("not complete") };
        assert_eq!(report.data_bytes, written().len() as u64 * PAGE_BYTES);
        assert_same(&memory);
    }
}

/// A file in memory that gets huge pages wherever a mapping does not refuse them, whatever the host's
/// settings are; `None` where this process may not create one.
fn huge_file(len_bytes: u64) -> Option<fs::File> {
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
    const SET_STRING: libc::c_uint = 1;
    const CREATE: libc::c_uint = 6;
    let owned = |fd: libc::c_long| {
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
        // SAFETY: the kernel has just made this descriptor for us.
        fd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    };
    // SAFETY: the strings are C strings that live during the calls, and the descriptors are open. The mount
    // is in no directory and goes with its last descriptor.
    let file = unsafe {
        let fs = owned(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0)).filter(|fs| {
            let fd = fs.as_raw_fd();
            let (key, value) = (c"huge".as_ptr(), c"always".as_ptr());
            let none = std::ptr::null::<libc::c_char>();
            libc::syscall(libc::SYS_fsconfig, fd, SET_STRING, key, value, 0) == 0
                && libc::syscall(libc::SYS_fsconfig, fd, CREATE, none, none, 0) == 0
        });
        let mount = fs.and_then(|fs| owned(libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), 0, 0)));
        mount.and_then(|mount| {
            let flags = libc::O_TMPFILE | libc::O_RDWR | libc::O_CLOEXEC;
            owned(libc::openat(mount.as_raw_fd(), c".".as_ptr(), flags, 0o600).into())
        })
    };
    let Some(file) = file.map(fs::File::from) else {
        test_skip::skip!("no file system with huge pages may be mounted here");
        return None;
    };
    file.set_len(len_bytes).unwrap();
    Some(file)
}

#[test]
fn on_demand_brings_each_page_where_the_host_makes_huge_ones() {
    let folder = taken(&filled(Backing::Shared));
    let layout = memory(Backing::Shared).layout().clone();
    if let Err(error) = uffd::check(layout.regions()) {
        test_skip::skip!("{error}");
        return;
    }
    let files = layout.regions().iter().map(|info| huge_file(info.len_bytes));
    let Some(files) = files.collect::<Option<Vec<_>>>() else { return };
    let memory = FakeMemory::over(&layout, files).unwrap();
    let snapshot = Opened::open(folder.path()).unwrap();
    let filling = Filling::start(snapshot, &memory, Cancel::new().unwrap()).unwrap();
    filling.commit().unwrap();
    assert!(memory.wants_small_pages());
    let FillEnd::Complete(_) = filling.wait().unwrap() else { panic!("not complete") };
    assert_same(&memory);
    assert!(!memory.wants_small_pages(), "the zone gets its huge pages back");
}

#[test]
fn on_demand_ends_when_the_host_has_what_it_needs_to_stop_watching() {
    let folder = taken(&filled(Backing::Shared));
    let memory = memory(Backing::Shared);
    if uffd::check(memory.layout().regions()).is_err() {
        test_skip::skip!("no userfaultfd");
        return;
    }
    let snapshot = Opened::open(folder.path()).unwrap();
    let filling = Filling::start(snapshot, &memory, Cancel::new().unwrap()).unwrap();
    filling.commit().unwrap();
    uffd::SHORT_OF_MEMORY.set(3);
    assert!(matches!(filling.wait(), Ok(FillEnd::Complete(_))));
    assert_eq!(uffd::SHORT_OF_MEMORY.get(), 0);
    assert_same(&memory);
}

#[test]
fn on_demand_can_be_ended_early() {
    let folder = taken(&filled(Backing::Shared));
    let memory = memory(Backing::Shared);
    if uffd::check(memory.layout().regions()).is_err() {
        test_skip::skip!("no userfaultfd");
        return;
    }
    let stop = Cancel::new().unwrap();
    let snapshot = Opened::open(folder.path()).unwrap();
    let filling = Filling::start(snapshot, &memory, stop.clone()).unwrap();
    stop.cancel();
    assert!(matches!(filling.wait(), Ok(FillEnd::Cancelled)));
}

#[test]
fn on_demand_never_shows_damaged_pages() {
    let folder = taken(&filled(Backing::Shared));
    let file = fs::OpenOptions::new().write(true).open(folder.path().join(MEMORY_FILE)).unwrap();
    let at = (77 + 2200) * PAGE_BYTES;
    file.write_all_at(&[0xee; 4096], at).unwrap();
    let memory = memory(Backing::Shared);
    if uffd::check(memory.layout().regions()).is_err() {
        test_skip::skip!("no userfaultfd");
        return;
    }
    let snapshot = Opened::open(folder.path()).unwrap();
    let filling = Filling::start(snapshot, &memory, Cancel::new().unwrap()).unwrap();
    let error = if let Err(error) = filling.commit() {
        // The threads found the damage first.
        error
    } else {
        let stuck = filling.wait().unwrap_err();
        // The guest's mapping has no page there, even if the page cache has one.
        assert!(!is_mapped(&memory, 1, 2200));
        assert!(!is_mapped(&memory, 1, 2207));
        stuck.error
    };
    let text = error.to_string();
    assert!(text.contains(MEMORY_FILE) && text.contains("0x100890000"), "{text}");
}

/// True when the guest's mapping has a page table entry for a page.
fn is_mapped(memory: &FakeMemory, region: usize, page: u64) -> bool {
    let address = memory.main(region).expose_provenance() as u64 + page * PAGE_BYTES;
    let pagemap = fs::File::open("/proc/self/pagemap").unwrap();
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, address / PAGE_BYTES * 8).unwrap();
    u64::from_ne_bytes(entry) >> 63 != 0
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed_and_the_file_named() {
    let folder = taken(&filled(Backing::Shared));
    for name in [CONFIG_FILE, STATE_FILE, INDEX_FILE, MANIFEST_FILE, MEMORY_FILE] {
        let path = folder.path().join(name);
        let whole = fs::read(&path).unwrap();
        let positions: Vec<usize> = if name == MEMORY_FILE {
            vec![10 << 12, (39 << 12) + 4095, (77 + 2499) << 12]
        } else {
            // The newline after the manifest is not verified.
            (0..whole.len() - usize::from(name == MANIFEST_FILE)).step_by(7).collect()
        };
        for at in positions {
            let mut spoiled = whole.clone();
            spoiled[at] ^= 1;
            fs::write(&path, &spoiled).unwrap();
            let error = restored(folder.path()).expect_err(&format!("{name} at {at}"));
            assert!(error.to_string().contains(name), "{name} at {at}: {error}");
        }
        for len in [0, 1, whole.len() / 2, whole.len() - 2] {
            fs::write(&path, &whole[..len]).unwrap();
            let error = restored(folder.path()).expect_err(&format!("{name} cut at {len}"));
            assert!(error.to_string().contains(name), "{name} cut at {len}: {error}");
        }
        fs::remove_file(&path).unwrap();
        let error = restored(folder.path()).expect_err(name);
        assert!(error.to_string().contains(name), "{name} missing: {error}");
        fs::write(&path, &whole).unwrap();
    }
    assert_same(&restored(folder.path()).unwrap());
}

#[test]
fn memory_of_another_machine_is_refused() {
    let folder = taken(&filled(Backing::Shared));
    let other = FakeMemory::new(&[(0, 77), (1 << 32, 2501)], Backing::Shared, PAGE_BYTES).unwrap();
    let snapshot = Opened::open(folder.path()).unwrap();
    let error = copy_in(&snapshot, &*other, 1, &Cancel::new().unwrap()).unwrap_err();
    assert!(matches!(error, SnapshotError::Layout(_)), "{error}");
}

#[test]
fn a_second_snapshot_is_refused_and_the_first_unharmed() {
    let folder = taken(&filled(Backing::Shared));
    let cancel = Cancel::new().unwrap();
    let error = save(folder.path(), SAVED, &*memory(Backing::Shared), 1, &cancel).unwrap_err();
    assert!(matches!(error, SnapshotError::Exists(_)), "{error}");
    assert_same(&restored(folder.path()).unwrap());
}

#[test]
fn two_snapshots_at_once_into_one_directory_are_refused() {
    let folder = TempDir::with_prefix("snapshot-").unwrap();
    let _first = super::draft::Draft::begin(folder.path()).unwrap();
    let error = super::draft::Draft::begin(folder.path()).unwrap_err();
    assert!(matches!(error, SnapshotError::Busy(_)), "{error}");
}

#[test]
fn a_cancelled_snapshot_leaves_nothing() {
    let folder = TempDir::with_prefix("snapshot-").unwrap();
    let cancel = Cancel::new().unwrap();
    cancel.cancel();
    let error = save(folder.path(), SAVED, &*filled(Backing::Shared), 2, &cancel).unwrap_err();
    assert!(matches!(error, SnapshotError::Cancelled), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A process that died after any of the steps: nothing can be restored, and the next snapshot succeeds.
#[test]
fn whatever_a_crash_leaves_is_no_snapshot_and_no_refusal() {
    let names = [MEMORY_FILE, INDEX_FILE, CONFIG_FILE, STATE_FILE];
    for renamed in 0..=names.len() {
        let folder = taken(&filled(Backing::Shared));
        let hidden = |name: &str| super::draft::partial(folder.path(), name);
        fs::rename(folder.path().join(MANIFEST_FILE), hidden(MANIFEST_FILE)).unwrap();
        for name in &names[renamed..] {
            fs::rename(folder.path().join(name), hidden(name)).unwrap();
        }
        let error = restored(folder.path()).unwrap_err();
        assert!(matches!(error, SnapshotError::NotFinished(_)), "{error}");
        let cancel = Cancel::new().unwrap();
        save(folder.path(), SAVED, &*filled(Backing::Shared), 2, &cancel).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
        assert_same(&restored(folder.path()).unwrap());
    }
}

#[test]
fn a_foreign_directory_is_neither_restored_nor_touched() {
    let folder = TempDir::with_prefix("snapshot-").unwrap();
    for name in [CONFIG_FILE, STATE_FILE, MEMORY_FILE] {
        fs::write(folder.path().join(name), "theirs").unwrap();
    }
    let error = restored(folder.path()).unwrap_err();
    assert!(matches!(error, SnapshotError::NotASnapshot(_)), "{error}");
    let cancel = Cancel::new().unwrap();
    let error = save(folder.path(), SAVED, &*filled(Backing::Shared), 1, &cancel).unwrap_err();
    assert!(matches!(error, SnapshotError::Exists(_)), "{error}");
    assert_eq!(fs::read(folder.path().join(STATE_FILE)).unwrap(), b"theirs");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
}

#[test]
fn a_manifest_that_is_too_long_is_not_read() {
    let folder = taken(&filled(Backing::Shared));
    let manifest = fs::OpenOptions::new().write(true).open(folder.path().join(MANIFEST_FILE));
    // A hole behind what it says.
    manifest.unwrap().set_len((2 << 20) + 1).unwrap();
    let error = restored(folder.path()).unwrap_err();
    assert!(error.to_string().contains("2097152 are the most"), "{error}");
}

fn geometry() -> (Layout, Geometry) {
    let region = |(gpa, pages): (u64, u64)| RegionInfo {
        name: "r".into(),
        gpa,
        len_bytes: pages * PAGE_BYTES,
        host_page_bytes: PAGE_BYTES,
        backing: Backing::Shared,
    };
    let layout = Layout::new(REGIONS.map(region).into()).unwrap();
    let geometry = Geometry::new(&layout);
    (layout, geometry)
}

fn index_of(entries: &[(u32, u16)]) -> Index {
    let (_, geometry) = geometry();
    let mut all = Vec::new();
    for (region, place) in geometry.regions().iter().enumerate() {
        for chunk in 0..place.pages.div_ceil(CHUNK_PAGES) {
            let (crc, present) = entries.get(all.len()).copied().unwrap_or((0, 0));
            let pages = geometry.chunk(region, chunk).count;
            let present = if pages < 16 { present & ((1 << pages) - 1) } else { present };
            all.push(Entry { crc: if present == 0 { 0 } else { crc }, present });
        }
    }
    Index::new(all)
}

#[test]
fn newer_formats_are_named_as_such() {
    let (layout, geometry) = geometry();
    let mut bytes = index_of(&[]).encode();
    bytes[8] = 2;
    assert_eq!(Index::decode(&bytes, &geometry), Err(IndexFault::Newer(2)));
    let seal = Sealed::of(b"x");
    let mut manifest = Manifest::new(seal.clone(), seal.clone(), seal, &layout, &geometry);
    manifest.version = 7;
    let path = Path::new("manifest.json");
    let mut text = String::from_utf8(manifest.encode().unwrap()).unwrap();
    // Unknown fields and a wrong checksum do not hide the version.
    text = text.replace("\"config\"", "\"configuration\"");
    let error = Manifest::decode(text.as_bytes(), path).unwrap_err();
    assert!(matches!(error, SnapshotError::Newer { found: 7, .. }), "{error}");
}

#[test]
fn a_pipe_in_the_directory_is_refused_and_not_waited_for() {
    use std::os::unix::ffi::OsStrExt as _;
    for name in [MANIFEST_FILE, CONFIG_FILE, STATE_FILE, INDEX_FILE, MEMORY_FILE] {
        let folder = taken(&filled(Backing::Shared));
        let path = folder.path().join(name);
        fs::remove_file(&path).unwrap();
        let text = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: `text` is a C string that lives during the call.
        assert_eq!(unsafe { libc::mkfifo(text.as_ptr(), 0o600) }, 0);
        let error = Opened::open(folder.path()).unwrap_err();
        assert!(matches!(error, SnapshotError::Foreign(_)), "{name}: {error}");
    }
}

#[test]
fn an_index_is_no_longer_than_the_machines_memory_needs() {
    let memory = filled(Backing::Shared);
    let folder = taken(&memory);
    // Sparse: half a terabyte, too much to read into memory. The memory file has the length in the
    // manifest.
    let long = fs::File::options().write(true).open(folder.path().join(INDEX_FILE)).unwrap();
    long.set_len(1 << 39).unwrap();
    let path = folder.path().join(MANIFEST_FILE);
    let mut manifest = Manifest::decode(&fs::read(&path).unwrap(), &path).unwrap();
    manifest.index.len_bytes = 1 << 39;
    fs::write(&path, manifest.encode().unwrap()).unwrap();
    let opened = Opened::open(folder.path()).unwrap();
    let error = opened.index_for(memory.layout()).unwrap_err();
    assert!(matches!(error, SnapshotError::Malformed { .. }), "{error}");
    // A memory file of the length for such an index does not help: it does not match this machine.
    manifest.memory_len_bytes = 1 << 52;
    fs::write(&path, manifest.encode().unwrap()).unwrap();
    assert!(matches!(Opened::open(folder.path()), Err(SnapshotError::Length { .. })));
}

proptest! {
    #[test]
    fn an_index_is_read_as_it_was_written(entries: Vec<(u32, u16)>) {
        let (_, geometry) = geometry();
        let index = index_of(&entries);
        prop_assert_eq!(Index::decode(&index.encode(), &geometry), Ok(index));
    }

    #[test]
    fn a_spoiled_index_is_refused_or_means_what_it_says(
        entries: Vec<(u32, u16)>, at: prop::sample::Index, bit in 0u8..8
    ) {
        let (_, geometry) = geometry();
        let mut bytes = index_of(&entries).encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        if let Ok(index) = Index::decode(&bytes, &geometry) {
            prop_assert_eq!(index.encode(), bytes);
        }
    }

    #[test]
    fn arbitrary_bytes_are_no_manifest_and_no_index(bytes: Vec<u8>) {
        super::fuzz_manifest(&bytes);
        super::fuzz_index(&bytes);
    }

    #[test]
    fn runs_of_a_mask_are_its_bits(present: u16, first in 0u64..1000) {
        let chunk = PageRun { region: 0, first: first * CHUNK_PAGES, count: CHUNK_PAGES };
        let mut mask = 0u16;
        for run in present_runs(chunk, present) {
            for page in run.first..run.end() {
                prop_assert_eq!(mask >> (page - chunk.first) & 1, 0);
                mask |= 1 << (page - chunk.first);
            }
        }
        prop_assert_eq!(mask, present);
    }

    #[test]
    fn spans_cover_exactly_the_present_pages_and_bridge_small_gaps_only(
        masks in prop::collection::vec(any::<u16>(), 64)
    ) {
        let (_, geometry) = geometry();
        let block = PageRun { region: 1, first: 0, count: 1024 };
        let first_chunk = 5;
        let all = spans(&geometry, block, |chunk| masks[chunk - first_chunk]);
        let mut pages = Vec::new();
        let mut last_end = None;
        for Span { runs } in &all {
            let gap = last_end.map(|end| runs[0].first - end);
            prop_assert!(gap.is_none_or(|gap| gap > 7));
            for pair in runs.windows(2) {
                prop_assert!((1..=7).contains(&(pair[1].first - pair[0].end())));
            }
            pages.extend(runs.iter().flat_map(|run| run.first..run.end()));
            last_end = runs.last().map(PageRun::end);
        }
        let expected: Vec<u64> = (0..1024u64)
            .filter(|page| masks[usize::try_from(page / 16).unwrap()] >> (page % 16) & 1 != 0)
            .collect();
        prop_assert_eq!(pages, expected);
    }

    #[test]
    fn blocks_are_all_of_memory_once(sizes in prop::collection::vec(1u64..5000, 1..6)) {
        let regions = sizes.iter().enumerate().map(|(index, pages)| RegionInfo {
            name: "r".into(),
            gpa: (index as u64) << 32,
            len_bytes: pages * PAGE_BYTES,
            host_page_bytes: PAGE_BYTES,
            backing: Backing::Shared,
        });
        let geometry = Geometry::new(&Layout::new(regions.collect()).unwrap());
        let mut at = vec![0; sizes.len()];
        let mut chunk_at = 0;
        for block in (0..geometry.blocks()).map(|block| geometry.block(block)) {
            prop_assert_eq!(block.first, at[block.region]);
            at[block.region] = block.end();
            for (number, _) in geometry.chunks_of(block) {
                prop_assert_eq!(number, chunk_at);
                chunk_at += 1;
            }
        }
        prop_assert_eq!(at, sizes);
        prop_assert_eq!(chunk_at as u64, geometry.chunks());
    }
}

#[test]
fn what_could_not_be_read_again_is_not_written() {
    let long = vec![b' '; to_usize(STATE_BYTES_MAX) + 1];
    let folder = TempDir::with_prefix("snapshot-").unwrap();
    let saved = Saved { state_json: &long, ..SAVED };
    let refused = save(folder.path(), saved, &*filled(Backing::Shared), 1, &Cancel::new().unwrap());
    assert!(
        matches!(refused, Err(SnapshotError::TooLong { what: "the state", .. })),
        "{refused:?}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a draft was begun");
}
