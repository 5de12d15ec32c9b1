// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A persistent memory device, seen from its driver and from its file.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;

use tempfile::NamedTempFile;

use super::{PMEM_ALIGN_BYTES, Pmem, PmemConfig, PmemFile, PmemMapping};
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::{BORDER, Buffer, DATA, Driver, readable, writable};

const LEN: u64 = 2 * PMEM_ALIGN_BYTES as u64;
const GPA: u64 = 0x1_4020_0000;

fn file(len_bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(len_bytes).unwrap();
    file
}

fn config(path: &Path) -> PmemConfig {
    PmemConfig { path: path.to_owned(), ..PmemConfig::default() }
}

fn error(config: &PmemConfig) -> String {
    let error = PmemFile::open(config, None).map(drop).unwrap_err();
    error_text::chain(&error)
}

/// Writes to a mapping as a guest does.
fn poke(mapping: &PmemMapping, offset: u64, byte: u8) {
    let at = std::ptr::with_exposed_provenance_mut::<u8>(
        usize::try_from(mapping.host_addr() + offset).unwrap(),
    );
    // SAFETY: a byte within the mapping, which outlives the call and to which no reference exists.
    unsafe { at.write_volatile(byte) };
}

fn byte_at(file: &NamedTempFile, offset: u64) -> u8 {
    let mut byte = [0];
    file.as_file().read_exact_at(&mut byte, offset).unwrap();
    byte[0]
}

#[test]
fn what_the_guest_writes_is_in_the_file_unless_it_is_to_be_discarded() {
    for discard_writes in [false, true] {
        let backing = file(LEN);
        backing.as_file().write_all_at(&[7], LEN - 1).unwrap();
        let config = PmemConfig { discard_writes, ..config(backing.path()) };
        let open = PmemFile::open(&config, None).unwrap();
        assert_eq!(open.len_bytes(), LEN);
        assert_eq!(open.mapping().host_addr() % PMEM_ALIGN_BYTES as u64, 0);
        poke(open.mapping(), 0, 1);
        poke(open.mapping(), LEN - 1, 2);
        let expected = if discard_writes { (0, 7) } else { (1, 2) };
        assert_eq!((byte_at(&backing, 0), byte_at(&backing, LEN - 1)), expected);
        assert_eq!(open.lock().is_writable(), !discard_writes);
    }
}

#[test]
fn the_whole_range_is_mapped_and_unmapped() {
    let is_mapped = |addr: u64| {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(&format!("{addr:x}-"))
    };
    let backing = file(LEN);
    let open = PmemFile::open(&config(backing.path()), None).unwrap();
    let addr = open.mapping().host_addr();
    assert!(is_mapped(addr));
    let kept = open.mapping().clone();
    drop(open);
    assert!(is_mapped(addr), "a share keeps it");
    drop(kept);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(&backing.path().display().to_string()), "{maps}");
}

#[test]
fn a_directory_gives_a_temporary_file() {
    let dir = tempfile::tempdir().unwrap();
    let why = error(&config(dir.path()));
    assert!(why.contains("size="), "{why}");
    let sized = PmemConfig { size_bytes: Some(LEN), ..config(dir.path()) };
    let open = PmemFile::open(&sized, None).unwrap();
    assert_eq!(open.len_bytes(), LEN);
    assert!(open.is_temporary());
    poke(open.mapping(), LEN - 1, 1);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "it has no name");
    // The machine after a reboot has the same file.
    let again = PmemFile::open(&sized, Some(open.lock())).unwrap();
    let mut byte = [0];
    again.lock().file().read_exact_at(&mut byte, LEN - 1).unwrap();
    assert_eq!(byte, [1]);
    let why = error(&PmemConfig { discard_writes: true, ..sized });
    assert!(why.contains("discard_writes"), "{why}");
}

#[test]
fn sizes_that_are_not_possible_are_refused_by_name() {
    for (len_bytes, size_bytes, why) in [
        (LEN + 4096, None, "multiple of 2 MiB"),
        (0, None, "multiple of 2 MiB"),
        (LEN, Some(0), "multiple of 2 MiB"),
        (LEN, Some(LEN - 4096), "multiple of 2 MiB"),
        (LEN, Some(2 * LEN), "fewer than size="),
        (LEN, Some(u64::MAX - (PMEM_ALIGN_BYTES as u64 - 1)), "fewer than size="),
    ] {
        let backing = file(len_bytes);
        let config = PmemConfig { size_bytes, ..config(backing.path()) };
        let said = error(&config);
        let path = backing.path().display().to_string();
        assert!(said.contains(why) && said.contains(&path), "{len_bytes} {size_bytes:?}: {said}");
    }
    let backing = file(LEN);
    let front = PmemConfig { size_bytes: Some(LEN / 2), ..config(backing.path()) };
    assert_eq!(PmemFile::open(&front, None).unwrap().len_bytes(), LEN / 2);
}

#[test]
fn files_that_cannot_be_opened_are_named() {
    let why = error(&config(Path::new("/nonexistent/pmem")));
    assert!(why.contains("/nonexistent/pmem") && !why.contains("discard_writes"), "{why}");
    let why = error(&config(Path::new("/dev/null")));
    assert!(why.contains("neither a regular file nor a block device"), "{why}");
    let backing = file(LEN);
    fs::set_permissions(backing.path(), Permissions::from_mode(0o400)).unwrap();
    // The superuser may write it all the same.
    if let Err(refused) = PmemFile::open(&config(backing.path()), None).map(drop) {
        assert!(refused.to_string().contains("discard_writes=on"), "{refused}");
    }
}

#[test]
fn one_machine_writes_a_file() {
    let backing = file(LEN);
    let open = |discard_writes| {
        let config = PmemConfig { discard_writes, ..config(backing.path()) };
        PmemFile::open(&config, None).unwrap().lock()
    };
    let (one, two, reader) = (open(false), open(false), open(true));
    one.lock().unwrap();
    assert!(two.lock().is_err() && reader.lock().is_err());
    one.unlock().unwrap();
    reader.lock().unwrap();
    assert!(two.lock().is_err());
    open(true).lock().unwrap();
}

fn device(backing: &NamedTempFile) -> (Pmem, PmemFile) {
    let file = PmemFile::open(&config(backing.path()), None).unwrap();
    (Pmem::new("pmem".to_owned(), &file, GPA), file)
}

/// The answer to a request.
fn ask(driver: &mut Driver, request: u32, response: Buffer) -> u32 {
    driver.write(DATA, &request.to_le_bytes());
    driver.write(response.0, &[0xff; 4]);
    let head = driver.queues[0].add(&[readable(DATA, 4), response]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (head, 4));
    u32::from_le_bytes(driver.read(response.0, 4).try_into().unwrap())
}

#[test]
fn the_configuration_names_the_range() {
    let backing = file(LEN);
    let (device, _file) = device(&backing);
    let mut bytes = [0; 16];
    device.read_config(0, &mut bytes);
    assert_eq!(bytes[..8], GPA.to_le_bytes());
    assert_eq!(bytes[8..], LEN.to_le_bytes());
    assert_eq!(device.device_id(), 27);
}

#[test]
fn a_flush_is_answered_and_other_requests_fail() {
    let backing = file(LEN);
    let (mut device, file) = device(&backing);
    let mut driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    driver.track_writes();
    assert_eq!(ask(&mut driver, 0, writable(BORDER - 2, 4)), 0);
    assert!(driver.was_written(BORDER) && driver.was_written(BORDER - 2));
    assert_eq!(ask(&mut driver, 1, writable(DATA + 64, 4)), 1);
    assert_eq!(ask(&mut driver, u32::MAX, writable(DATA + 64, 4)), 1);
    assert_eq!(ask(&mut driver, 0, writable(DATA + 64, 4)), 0);
    file.lock().fail_flushes();
    assert_eq!(ask(&mut driver, 0, writable(DATA + 64, 4)), 1);
    assert!(!driver.interrupt.is_broken());
}

#[test]
fn a_flush_of_discarded_writes_succeeds() {
    let backing = file(LEN);
    let config = PmemConfig { discard_writes: true, ..config(backing.path()) };
    let file = PmemFile::open(&config, None).unwrap();
    let mut device = Pmem::new("pmem".to_owned(), &file, GPA);
    let mut driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    assert_eq!(ask(&mut driver, 0, writable(DATA + 64, 4)), 0);
}

#[test]
fn chains_that_are_no_requests_need_a_reset() {
    for chain in [
        &[readable(DATA, 4)][..],
        &[writable(DATA, 4)],
        &[readable(DATA, 3), writable(DATA + 64, 4)],
        &[readable(DATA, 4), writable(DATA + 64, 3)],
        &[readable(GPA, 4), writable(DATA + 64, 4)],
        &[readable(DATA, 4), writable(GPA, 4)],
    ] {
        let backing = file(LEN);
        let (mut device, _file) = device(&backing);
        let mut driver = Driver::new(1, 16);
        driver.activate_all(&mut device);
        driver.queues[0].add(chain);
        driver.queues[0].kick();
        driver.interrupt.wait_broken();
    }
}

#[test]
fn a_state_of_another_place_is_refused() {
    let backing = file(LEN);
    let (device, file) = device(&backing);
    let saved = device.save();
    let mut elsewhere = Pmem::new("pmem".to_owned(), &file, GPA + (2 << 20));
    let why = elsewhere.restore(&saved).unwrap_err().to_string();
    assert!(why.contains("0x140200000") && why.contains("0x140400000"), "{why}");
    let shorter = PmemConfig { size_bytes: Some(LEN / 2), ..config(backing.path()) };
    let shorter = PmemFile::open(&shorter, None).unwrap();
    assert!(Pmem::new("pmem".to_owned(), &shorter, GPA).restore(&saved).is_err());
    Pmem::new("pmem".to_owned(), &file, GPA).restore(&saved).unwrap();
}
