// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Flushes that fail, and images that go from one device to the next.

use std::io;

use super::*;

fn fail_a_flush(fixture: &Fixture) {
    let failed = Err(io::Error::from_raw_os_error(libc::EIO));
    fixture.device.lock().disk.note_flush(failed).unwrap_err();
}

#[test]
fn a_flush_that_failed_fails_for_ever() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
        let lock = fixture.device.lock();
        lock.write_back().unwrap();
        fail_a_flush(&fixture);
        for _ in 0..2 {
            assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, IO_ERROR);
            let refused = lock.write_back().unwrap_err();
            assert!(matches!(refused, DiskError::NotStable { .. }));
            assert!(refused.to_string().contains(fixture.image.path().to_str().unwrap()));
        }
        assert!(lock.check_stable().is_err());
        // The rest continues: the guest may still read what there is.
        let read = [writable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 7, &read).0, OK);

        // A VM that takes over the open image takes over its failure; opening it anew clears it.
        let next = Block::over(config(&fixture.image), &lock).unwrap();
        assert!(next.lock().check_stable().is_err());
        Block::new(config(&fixture.image)).unwrap().lock().check_stable().unwrap();
    });
}

#[test]
fn a_write_through_that_failed_counts_as_a_flush_where_others_may_be_lost_with_it() {
    for (direct, is_lost) in [(false, true), (true, false)] {
        let Ok(disk) = Disk::open(image().path(), false, direct) else {
            test_skip::skip!("no direct I/O here");
            continue;
        };
        disk.note_failed_through(&io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(disk.check_stable().is_err(), is_lost, "direct: {direct}");
        // One that the host has not seen.
        let disk = Disk::open(image().path(), false, direct).unwrap();
        disk.note_failed_through(&io::ErrorKind::UnexpectedEof.into());
        disk.check_stable().unwrap();
    }
}

#[test]
fn a_writeback_that_failed_while_the_image_is_read_anew_is_a_flush_that_failed() {
    // The host tells of it once: the next flush would succeed.
    let disk = Disk::open(image().path(), false, false).unwrap();
    disk.drop_cache().unwrap();
    let failed = disk.drop_cache_after(|_| Err(io::Error::from_raw_os_error(libc::EIO)));
    assert!(matches!(failed, Err(DiskError::Cache { .. })), "{failed:?}");
    assert!(disk.check_stable().is_err());
    assert!(disk.flush().is_err());
    // What is there can be read, as after any flush that failed.
    disk.drop_cache().unwrap();
    assert!(disk.check_stable().is_err());
    let reader = Disk::open(image().path(), true, false).unwrap();
    reader.drop_cache_after(|_| panic!("there is nothing to write")).unwrap();
}

#[test]
fn a_read_only_disk_is_never_flushed() {
    let mut fixture = Fixture::new(|config| config.readonly = true);
    fail_a_flush(&fixture);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
    assert!(!fixture.device.lock().is_writable());
}

#[test]
fn an_open_image_passes_to_the_next_device_with_its_lock() {
    let image = image();
    let first = Block::new(config(&image)).unwrap();
    let kept = first.lock();
    kept.lock().unwrap();
    assert!(kept.fits(&config(&image)));
    assert!(!kept.fits(&BlockConfig { direct: true, ..config(&image) }));
    drop(first);
    let stranger = Block::new(config(&image)).unwrap().lock();
    assert!(matches!(stranger.lock(), Err(DiskError::InUse { .. })));
    // It has grown, and the lock grows with it.
    image.as_file().set_len((SECTORS + 8) * 512).unwrap();
    let next = Block::over(config(&image), &kept).unwrap();
    drop(kept);
    assert!(next.lock().is_held());
    next.lock().lock().unwrap();
    assert!(matches!(stranger.lock(), Err(DiskError::InUse { .. })));
    next.lock().unlock().unwrap();
    assert!(!next.lock().is_held());
    stranger.lock().unwrap();
}
