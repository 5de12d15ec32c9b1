// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks of memory files, and what happens to the contents of a file.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::FileExt as _;

use super::*;
use crate::{
    Backing, GuestRam, InitialContents, RamConfig, RamError, RamLayout, RamSources, ZoneKind,
    ZoneSpec,
};

const MIB: u64 = 1 << 20;
const DATA: [u8; 4096] = [0xA5; 4096];

fn zone(path: &Path, shared: bool) -> ZoneSpec {
    ZoneSpec { backing: Backing::File(path.to_owned()), shared, ..ZoneSpec::new("z", 4 * MIB) }
}

fn made(zones: Vec<ZoneSpec>, sources: &RamSources) -> Result<GuestRam, RamError> {
    GuestRam::with_sources(&RamConfig { zones }, RamLayout::default(), sources)
}

fn ram(path: &Path, shared: bool) -> Result<GuestRam, RamError> {
    made(vec![zone(path, shared)], &RamSources::default())
}

/// Guest RAM whose contents are to arrive.
fn arriving(path: &Path, shared: bool) -> Result<GuestRam, RamError> {
    let sources = RamSources { contents: InitialContents::Nothing, ..RamSources::default() };
    made(vec![zone(path, shared)], &sources)
}

/// A file of `len_bytes` with data in each page.
fn old_file(dir: &Path, len_bytes: u64) -> PathBuf {
    let path = dir.join("ram");
    let file = File::create(&path).unwrap();
    for at in (0..len_bytes).step_by(DATA.len()) {
        file.write_all_at(&DATA, at).unwrap();
    }
    path
}

fn all_is_zero(ram: &GuestRam) -> bool {
    let region = &ram.regions()[0];
    (0..region.len_pages()).all(|page| region.page_is_zero(page).unwrap())
}

#[track_caller]
fn refused(result: Result<GuestRam, RamError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, RamError::Backing(BackingError::InUse { .. })), "{error}");
    error.to_string()
}

#[test]
fn a_file_that_a_vm_writes_is_refused_to_others_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = old_file(dir.path(), 2 * MIB);
    let first = ram(&path, true).unwrap();
    let before = fs::read(&path).unwrap();
    for refusal in [ram(&path, true), ram(&path, false), arriving(&path, true)] {
        let text = refused(refusal);
        assert!(text.contains("'z'") && text.contains(path.to_str().unwrap()), "{text}");
        assert!(text.contains(&format!("process {} (", std::process::id())), "{text}");
    }
    let longer = ZoneSpec { size_bytes: 8 * MIB, ..zone(&path, true) };
    refused(made(vec![longer], &RamSources::default()));
    assert!(fs::read(&path).unwrap() == before, "neither emptied nor made longer");
    let handle = first.guest_memory();
    drop(first);
    refused(ram(&path, true));
    drop(handle);
    ram(&path, true).unwrap();
}

#[test]
fn many_may_read_what_none_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = old_file(dir.path(), 4 * MIB);
    let (first, second) = (ram(&path, false).unwrap(), ram(&path, false).unwrap());
    refused(ram(&path, true));
    refused(arriving(&path, true));
    drop((first, second));
    let writer = ram(&path, true).unwrap();
    refused(ram(&path, false));
    drop(writer);
}

#[test]
fn of_those_that_come_at_once_to_an_empty_file_one_gets_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    for _ in 0..50 {
        File::create(&path).unwrap();
        let start = std::sync::Barrier::new(4);
        let got = std::thread::scope(|scope| {
            let come = || {
                start.wait();
                ram(&path, false)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(come)).collect();
            let results: Vec<_> =
                threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            results.iter().filter(|result| result.is_ok()).count()
        });
        assert_eq!(got, 1);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn what_arrives_finds_nothing() {
    let dir = tempfile::tempdir().unwrap();
    // Longer than the zone, which does not own the rest.
    let path = old_file(dir.path(), 6 * MIB);
    let ram = arriving(&path, true).unwrap();
    assert!(ram.starts_zero() && all_is_zero(&ram));
    let region = &ram.regions()[0];
    assert_eq!((region.kind(), region.zero().data_count()), (ZoneKind::Shared, 0));
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, 6 * MIB);
    let (mine, behind) = bytes.split_at(4 << 20);
    assert!(mine.iter().all(|byte| *byte == 0) && behind.iter().all(|byte| *byte == 0xA5));
    assert!(fs::metadata(&path).unwrap().blocks() * 512 < 3 * MIB, "its room was returned");
}

#[test]
fn what_is_not_to_be_written_is_left_out_of_what_arrives() {
    let dir = tempfile::tempdir().unwrap();
    let path = old_file(dir.path(), 4 * MIB);
    let before = fs::read(&path).unwrap();
    let ram = arriving(&path, false).unwrap();
    assert_eq!(ram.regions()[0].kind(), ZoneKind::PrivateAnonymous);
    assert!(all_is_zero(&ram) && ram.starts_zero());
    ram.regions()[0].write_range(0, &[1; 4096]).unwrap();
    assert!(fs::read(&path).unwrap() == before);
}

#[test]
fn a_boot_is_told_what_it_finds() {
    let dir = tempfile::tempdir().unwrap();
    let path = old_file(dir.path(), 4 * MIB);
    for shared in [true, false] {
        assert!(!ram(&path, shared).unwrap().starts_zero());
    }
    assert!(ram(&dir.path().join("new"), true).unwrap().starts_zero());
    assert!(ram(dir.path(), true).unwrap().starts_zero());
}

#[test]
fn a_held_file_goes_to_the_next_machine_and_to_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    for shared in [true, false] {
        let first = ram(&path, shared).unwrap();
        first.regions()[0].write_range(0, &DATA).unwrap();
        let locked = first.locked_files();
        drop(first);
        refused(ram(&path, shared));
        let sources = RamSources { locked, ..RamSources::default() };
        let next = made(vec![zone(&path, shared)], &sources).unwrap();
        // Its contents are the VM's own, so they may be written.
        assert_eq!((next.regions()[0].kind(), next.starts_zero()), (ZoneKind::Shared, false));
        drop(sources);
        refused(ram(&path, shared));
        drop(next);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_held_file_that_is_not_at_its_path_any_more_is_let_be() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    let first = ram(&path, true).unwrap();
    let sources = RamSources { locked: first.locked_files(), ..RamSources::default() };
    drop(first);
    fs::rename(&path, dir.path().join("elsewhere")).unwrap();
    let next = made(vec![zone(&path, true)], &sources).unwrap();
    refused(ram(&path, true));
    drop((next, sources));
}

#[test]
fn a_file_that_only_an_arriving_configuration_names_is_not_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let path = old_file(dir.path(), MIB);
    let contents = InitialContents::MustBeEmpty;
    let sources = RamSources { contents, ..RamSources::default() };
    let error = made(vec![zone(&path, true)], &sources).unwrap_err();
    assert!(matches!(error, RamError::Backing(BackingError::HoldsData { .. })), "{error}");
    let data = fs::read(&path).unwrap();
    assert_eq!(data.len() as u64, MIB, "not even its length is changed");
    assert!(data.chunks(DATA.len()).all(|page| page == DATA));
    // A file without data, and one that does not exist yet.
    File::create(&path).unwrap().set_len(4096).unwrap();
    assert!(all_is_zero(&made(vec![zone(&path, true)], &sources).unwrap()));
    fs::remove_file(&path).unwrap();
    assert!(all_is_zero(&made(vec![zone(&path, true)], &sources).unwrap()));
    // A file that the zone does not write stays as it is, and the guest does not see it.
    let path = old_file(dir.path(), 2 * MIB);
    assert!(all_is_zero(&made(vec![zone(&path, false)], &sources).unwrap()));
    assert!(fs::read(&path).unwrap().chunks(DATA.len()).all(|page| page == DATA));
}

#[test]
fn a_file_that_another_program_may_use_has_to_be_new() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let contents = InitialContents::MustBeNew;
    let sources = RamSources { contents, ..RamSources::default() };
    let error = made(vec![zone(&path, true)], &sources).unwrap_err();
    assert!(matches!(error, RamError::Backing(BackingError::NotNew { .. })), "{error}");
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB);
    File::create(&path).unwrap();
    assert!(all_is_zero(&made(vec![zone(&path, true)], &sources).unwrap()));
    fs::remove_file(&path).unwrap();
    assert!(all_is_zero(&made(vec![zone(&path, true)], &sources).unwrap()));
}

#[test]
fn a_file_that_is_handed_over_stays_locked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    let source = ram(&path, true).unwrap();
    let file = Arc::new(source.regions()[0].file().unwrap().try_clone().unwrap());
    file.write_all_at(&DATA, 0).unwrap();
    let provided = vec![crate::ProvidedFile::file("z", file)];
    let sources =
        RamSources { provided, contents: InitialContents::Nothing, ..RamSources::default() };
    let destination = made(vec![zone(&path, true)], &sources).unwrap();
    drop((source, sources));
    refused(ram(&path, true));
    assert!(!all_is_zero(&destination), "it is the source's memory as it is");
    drop(destination);
    let other = ram(&path, true).unwrap();
    let theirs = File::options().read(true).write(true).open(&path).unwrap();
    let provided = vec![crate::ProvidedFile::file("z", Arc::new(theirs))];
    let sources = RamSources { provided, ..RamSources::default() };
    refused(made(vec![zone(&path, true)], &sources));
    drop(other);
}

#[test]
fn two_zones_of_one_vm_in_one_file_are_no_matter_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    let second = ZoneSpec { id: "y".to_owned(), ..zone(&path, true) };
    let error = made(vec![zone(&path, true), second], &RamSources::default()).unwrap_err();
    assert!(matches!(error, RamError::SameFile { .. }), "{error}");
    ram(&path, true).unwrap();
}

#[test]
fn a_directory_without_unnamed_files_gets_one_that_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    named_then_removed(dir.path(), &options()).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn where_there_are_no_holes_a_file_is_cut_but_not_what_is_behind_the_zone() {
    let why = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&DATA, 0).unwrap();
    cut_and_extend(&file, 4096, why()).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4096);
    assert!(!holds_data(&file, 4096, false).unwrap());
    file.write_all_at(&DATA, 4096).unwrap();
    assert!(cut_and_extend(&file, 4096, why()).is_err());
    assert!(holds_data(&file, 8192, false).unwrap());
}
