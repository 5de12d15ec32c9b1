// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tables: how they grow, which of them are in memory, and the mark of an image whose tables may not be in it.

use super::*;

#[test]
fn a_refcount_table_grows() {
    let images = Images::new();
    let sample = Sample { cluster_bits: 9, size_bytes: 16 << 20, ..Sample::default() };
    let path = images.add("a", sample.image());
    let lock = open(&config(&path)).unwrap();
    let flat = pattern(10 << 20);
    lock.disk.write_all_at(&flat, 0).unwrap();
    lock.unlock().unwrap();
    assert!(big_endian(&fs::read(&path).unwrap(), 56, 4) > 1);
    check_counts(&path);
    assert!(contents(&open(&config(&path)).unwrap())[..flat.len()] == flat);
}

#[test]
fn tables_that_are_lost_when_the_lock_is_released_are_an_error() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    lock.disk.write_all_at(&[1; 512], 0).unwrap();
    lock.disk.refusal.set(libc::ENOSPC);
    assert!(matches!(lock.unlock(), Err(DiskError::NotStable { .. })));
    assert!(!lock.is_held());
    lock.disk.refusal.set(0);
    lock.check_stable().unwrap_err();
    let refusal = refusal(open(&config(&path)));
    assert!(refusal.contains("was not closed"), "{refusal}");
}

/// The library has room for 128 L2 tables in use.
#[test]
fn operations_beyond_the_tables_in_memory_wait() {
    let images = Images::new();
    let lock = open(&config(&images.add("a", small().image()))).unwrap();
    let formatted = lock.disk.formatted().unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    std::thread::scope(|scope| {
        let held = formatted.hold();
        for _ in 0..80 {
            scope.spawn(|| lock.disk.read_exact_at(&mut [0; 512], 0).unwrap());
        }
        while !formatted.is_busy() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        let is_busy = formatted.is_busy();
        drop(held);
        assert!(is_busy, "80 operations began at a time");
    });
}

/// Clears the mark of an image whose refcounts are right, as a repair does.
pub(super) fn repair(path: &Path) {
    let mut image = fs::read(path).unwrap();
    assert_eq!(big_endian(&image, 72, 8), 1, "it is marked");
    image[79] = 0;
    fs::write(path, image).unwrap();
}

/// A process that dies leaves an image that has to be repaired, and says so; one that was written back is as good as new.
#[test]
fn an_image_is_marked_from_the_first_write_until_it_is_written_back() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let mark = || big_endian(&fs::read(&path).unwrap(), 72, 8);
    let lock = open(&config(&path)).unwrap();
    let written: [&dyn Fn(u64); 4] = [
        &|offset| lock.disk.write_all_at(&[1; 512], offset).unwrap(),
        &|offset| {
            let range = Range { offset, len_bytes: 8192, unmap: false };
            lock.disk.formatted().unwrap().discard(range).unwrap();
        },
        &|offset| {
            let range = Range { offset, len_bytes: 8192, unmap: false };
            lock.disk.formatted().unwrap().write_zeroes(range, false).unwrap();
        },
        &|offset| {
            let range = Range { offset, len_bytes: 8192, unmap: true };
            lock.disk.formatted().unwrap().write_zeroes(range, true).unwrap();
        },
    ];
    for (number, write) in (0..).zip(written) {
        contents(&lock);
        assert_eq!(mark(), 0);
        // In another L2 table each time, which is published at once.
        write(number << 20);
        let died = images.add("died", fs::read(&path).unwrap());
        let refusal = refusal(open(&config(&died)));
        assert!(refusal.contains("was not closed"), "{refusal}");
        assert!(refusal.contains("qemu-img check -r all"), "{refusal}");
        // Another host may prepare to take it over.
        unloaded(&config(&died)).unwrap().check_format().unwrap();
        lock.disk.flush().unwrap();
        assert_eq!(mark(), 1);
        lock.write_back().unwrap();
        assert_eq!(mark(), 0);
        open(&config(&images.add("copy", fs::read(&path).unwrap()))).unwrap();
    }
    lock.disk.write_all_at(&[1; 512], 0).unwrap();
    assert_eq!(mark(), 1);
    lock.unlock().unwrap();
    assert_eq!(mark(), 0);
}
