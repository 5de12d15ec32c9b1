// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Transfers that go straight to the file.

use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use super::*;

/// Writes past the driver, if that can be.
pub(super) fn write(disk: &Disk, bytes: &[u8], offset: u64) -> bool {
    let formatted = disk.formatted().unwrap();
    let Some(transfer) = formatted.begin_transfer(offset, bytes.len() as u64, true) else {
        return false;
    };
    // The file of the disk itself may be for direct I/O.
    let file = fs::OpenOptions::new().write(true).open(disk.path()).unwrap();
    file.write_all_at(bytes, transfer.place.offset).unwrap();
    true
}

/// Reads past the driver, if that can be.
pub(super) fn read(disk: &Disk, offset: u64, len: usize) -> Option<Vec<u8>> {
    let formatted = disk.formatted().unwrap();
    let transfer = formatted.begin_transfer(offset, len as u64, false)?;
    let mut bytes = vec![0; len];
    let file = fs::File::open(disk.path()).unwrap();
    file.read_exact_at(&mut bytes, transfer.place.offset).unwrap();
    Some(bytes)
}

#[test]
fn only_what_is_in_one_piece_and_changes_nothing_else_goes_there() {
    let images = Images::new();
    let base = images.add("base", pattern(SIZE));
    let backing = Some(("base".to_owned(), Some("raw".to_owned())));
    let path = images.add("a", Sample { backing, ..small() }.image());
    let lock = open(&config(&path)).unwrap();
    let (disk, at) = (&lock.disk, 7 * CLUSTER);
    // What the backing file has.
    assert_eq!(read(disk, at, 512), None);
    assert!(!write(disk, &[1; 512], at));
    disk.write_all_at(&vec![2; 2 * 4096], at).unwrap();
    disk.write_all_at(&[3; 512], at - CLUSTER).unwrap();
    assert!(write(disk, &[4; 512], at + 512));
    let mut found = [0; 1536];
    disk.read_exact_at(&mut found, at).unwrap();
    assert_eq!(found, [[2; 512], [4; 512], [2; 512]].concat()[..]);
    assert_eq!(read(disk, at + CLUSTER - 512, 1024), Some(vec![2; 1024]));
    // Next to each other on the disk, and not in the file.
    assert_eq!(read(disk, at - 512, 1024), None);
    assert_eq!(read(disk, at + CLUSTER, 8192), None, "the second one is the backing file's");
    // The header says no longer that the image is in use.
    disk.formatted().unwrap().close().unwrap();
    assert!(!write(disk, &[5; 512], at));
    assert_eq!(read(disk, at, 512), Some(vec![2; 512]));
    disk.write_all_at(&[5; 512], at).unwrap();
    assert!(write(disk, &[6; 512], at));
    lock.unlock().unwrap();
    assert_eq!(read(disk, at, 512), None, "the tables are not in memory");
    assert_eq!(fs::read(base).unwrap(), pattern(SIZE));
}

#[test]
fn an_image_that_is_only_read_is_read_there_as_well() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    lock.disk.write_all_at(&[2; 4096], 0).unwrap();
    lock.unlock().unwrap();
    let lock = open(&BlockConfig { readonly: true, ..config(&path) }).unwrap();
    assert_eq!(read(&lock.disk, 0, 4096), Some(vec![2; 4096]));
    assert!(lock.disk.formatted().unwrap().begin_transfer(0, 512, true).is_none());
}

#[test]
fn what_moves_data_waits_for_transfers_and_they_for_nothing() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    lock.disk.write_all_at(&[2; 4096], 0).unwrap();
    let formatted = lock.disk.formatted().unwrap();
    let transfer = formatted.begin_transfer(0, 4096, true).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            formatted.discard(Range { offset: 0, len_bytes: 4096, unmap: true }).unwrap();
            tell.send(()).unwrap();
        });
        // Once it waits, no other transfer begins.
        while formatted.begin_transfer(0, 512, false).is_some() {
            std::thread::yield_now();
        }
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
        drop(transfer);
        told.recv().unwrap();
    });
    assert!(formatted.begin_transfer(0, 512, false).is_none(), "it is not there any more");
}
