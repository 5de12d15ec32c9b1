// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! qcow2 images, seen from the disk and from their tables.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod backing;
mod hostile;
mod placed;
mod qemu;
mod tables;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::TempDir;

use super::Sample;
use crate::virtio::block::image::Disk;
use crate::virtio::block::request::Range;
use crate::virtio::block::{
    Block, BlockConfig, DiskError, DiskFormat, DiskLock, FormatError, LockGranularity,
};

/// Clusters of 4 KiB, so that a small disk has several L2 tables.
const CLUSTER_BITS: u32 = 12;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Three L2 tables and a part of a cluster.
const SIZE: u64 = 5 * (1 << 20) + 512;

fn small() -> Sample {
    Sample { cluster_bits: CLUSTER_BITS, size_bytes: SIZE, ..Sample::default() }
}

/// Images in a directory of their own.
struct Images(TempDir);

impl Images {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn add(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }
}

fn config(path: &Path) -> BlockConfig {
    let (path, format) = (path.to_owned(), DiskFormat::Qcow2);
    BlockConfig { path, format, backing_files: true, ..BlockConfig::default() }
}

/// An image that is locked and loaded.
fn open(config: &BlockConfig) -> Result<DiskLock, DiskError> {
    let lock = unloaded(config)?;
    lock.lock()?;
    lock.load()?;
    Ok(lock)
}

fn unloaded(config: &BlockConfig) -> Result<DiskLock, DiskError> {
    let disk = Arc::new(Disk::open_as(config)?);
    Ok(DiskLock { disk, granularity: LockGranularity::default() })
}

fn contents(lock: &DiskLock) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(lock.disk.capacity_sectors() * 512).unwrap()];
    lock.disk.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn refusal(result: Result<DiskLock, DiskError>) -> String {
    error_text::chain(&result.map(drop).unwrap_err())
}

fn big_endian(bytes: &[u8], at: u64, len: usize) -> u64 {
    let at = usize::try_from(at).unwrap();
    let bytes = bytes.get(at..at + len).unwrap();
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Compares the reference counts of an image with its references, of which each cluster has one.
#[track_caller]
fn check_counts(path: &Path) {
    let image = fs::read(path).unwrap();
    let (bits, number) = (big_endian(&image, 20, 4), |at| big_endian(&image, at, 8));
    let mut used = BTreeMap::new();
    let mut refer = |offset: u64| {
        if offset != 0 {
            assert_eq!(offset % (1 << bits), 0);
            *used.entry(offset >> bits).or_insert(0_u64) += 1;
        }
    };
    let offset_of = |entry: u64| entry & 0x00ff_ffff_ffff_fe00;
    let clusters = |at: u64, len_bytes: u64| (at..at + len_bytes).step_by(1 << bits);
    let (l1, entries) = (number(40), big_endian(&image, 36, 4));
    let (table, table_bytes) = (number(48), big_endian(&image, 56, 4) << bits);
    refer(1 << bits);
    for at in clusters(l1, entries * 8).chain(clusters(table, table_bytes)) {
        refer(at);
    }
    // The header's is at 0, where no reference leads.
    let mut counts = BTreeMap::new();
    for (block, at) in (table..table + table_bytes).step_by(8).enumerate() {
        let offset = number(at);
        refer(offset);
        for entry in (0..(1_u64 << bits) / 2).filter(|_| offset != 0) {
            let count = big_endian(&image, offset + 2 * entry, 2);
            if count != 0 {
                counts.insert(u64::try_from(block).unwrap() * ((1 << bits) / 2) + entry, count);
            }
        }
    }
    for at in (l1..l1 + entries * 8).step_by(8) {
        let l2 = offset_of(number(at));
        refer(l2);
        for at in (l2..l2 + (1 << bits)).step_by(8).filter(|_| l2 != 0) {
            refer(offset_of(number(at)));
        }
    }
    // The reference to cluster 1 with which this begins stands for the header.
    *used.get_mut(&1).unwrap() -= 1;
    used.retain(|_, count| *count > 0);
    used.insert(0, 1);
    assert_eq!(counts, used);
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len_bytes: u64, byte: u8 },
    Discard { offset: u64, len_bytes: u64 },
    Zero { offset: u64, len_bytes: u64, free: bool },
    Flush,
    Reload,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let sectors = SIZE / 512;
    // Mostly near each other, so that they meet in clusters.
    let place = (prop_oneof![0..64_u64, 0..sectors], prop_oneof![1..8_u64, 1..200_u64]);
    let place =
        place.prop_map(move |(sector, count)| (sector * 512, count.min(sectors - sector) * 512));
    let step = prop_oneof![
        6 => (place.clone(), 1..=255_u8)
            .prop_map(|((offset, len_bytes), byte)| Step::Write { offset, len_bytes, byte }),
        2 => place.clone().prop_map(|(offset, len_bytes)| Step::Discard { offset, len_bytes }),
        2 => (place, any::<bool>())
            .prop_map(|((offset, len_bytes), free)| Step::Zero { offset, len_bytes, free }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reload),
    ];
    proptest::collection::vec(step, 1..40)
}

/// Does the same to an image and to a flat copy; what was discarded must read as zeros or as before.
fn run(lock: &DiskLock, flat: &mut [u8], steps: &[Step]) {
    let formatted = lock.disk.formatted().unwrap();
    let place = |offset: u64, len_bytes: u64| {
        usize::try_from(offset).unwrap()..usize::try_from(offset + len_bytes).unwrap()
    };
    let range = |offset, len_bytes, unmap| Range { offset, len_bytes, unmap };
    for step in steps {
        match *step {
            Step::Write { offset, len_bytes, byte } => {
                let bytes = vec![byte; usize::try_from(len_bytes).unwrap()];
                if !placed::write(&lock.disk, &bytes, offset) {
                    lock.disk.write_all_at(&bytes, offset).unwrap();
                }
                if let Some(found) = placed::read(&lock.disk, offset, bytes.len()) {
                    assert_eq!(found, bytes, "at {offset:#x}");
                }
                flat[place(offset, len_bytes)].copy_from_slice(&bytes);
            }
            Step::Discard { offset, len_bytes } => {
                formatted.discard(range(offset, len_bytes, false)).unwrap();
                let flat = &mut flat[place(offset, len_bytes)];
                let mut now = vec![0; flat.len()];
                lock.disk.read_exact_at(&mut now, offset).unwrap();
                for (now, before) in now.iter().zip(flat.iter()) {
                    assert!(*now == 0 || now == before);
                }
                flat.copy_from_slice(&now);
            }
            Step::Zero { offset, len_bytes, free } => {
                formatted.write_zeroes(range(offset, len_bytes, free), free).unwrap();
                flat[place(offset, len_bytes)].fill(0);
            }
            Step::Flush => lock.write_back().unwrap(),
            Step::Reload => {
                lock.write_back().unwrap();
                lock.unlock().unwrap();
                lock.lock().unwrap();
                lock.drop_cache().unwrap();
                lock.load().unwrap();
            }
        }
    }
}

fn check_like_flat(config: &BlockConfig, mut flat: Vec<u8>, steps: &[Step]) {
    let lock = open(config).unwrap();
    run(&lock, &mut flat, steps);
    assert!(contents(&lock) == flat, "the image differs from the flat disk");
    lock.write_back().unwrap();
    drop(lock);
    check_counts(&config.path);
    let lock = open(config).unwrap();
    assert!(contents(&lock) == flat, "the image differs after it was opened anew");
}

/// Bytes that differ from sector to sector.
fn pattern(len_bytes: u64) -> Vec<u8> {
    (0..len_bytes).map(|at| u8::try_from((at / 512) % 255 + 1).unwrap()).collect()
}

fn empty() -> Vec<u8> {
    vec![0; usize::try_from(SIZE).unwrap()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn an_image_is_like_a_flat_disk(steps in steps(), direct: bool, version in 2..=3_u32) {
        let images = Images::new();
        let path = images.add("a", Sample { version, ..small() }.image());
        check_like_flat(&BlockConfig { direct, ..config(&path) }, empty(), &steps);
    }

    #[test]
    fn an_image_over_others_is_like_a_flat_disk_and_leaves_them_alone(steps in steps()) {
        let images = Images::new();
        // The raw one ends early, in a cluster.
        let raw_bytes = 3 * (1 << 20) + 1536;
        let raw = images.add("raw", pattern(raw_bytes));
        let over = |name: &str, format: &str| {
            Sample { backing: Some((name.into(), Some(format.into()))), ..small() }.image()
        };
        let middle = images.add("middle", over("raw", "raw"));
        {
            let lock = open(&config(&middle)).unwrap();
            lock.disk.write_all_at(&[0xee; 4096], 6144).unwrap();
            lock.unlock().unwrap();
        }
        let before = fs::read(&middle).unwrap();
        let mut flat = pattern(raw_bytes);
        flat.resize(usize::try_from(SIZE).unwrap(), 0);
        flat[6144..6144 + 4096].fill(0xee);
        check_like_flat(&config(&images.add("top", over("middle", "qcow2"))), flat, &steps);
        prop_assert!(fs::read(&middle).unwrap() == before);
        prop_assert!(fs::read(&raw).unwrap() == pattern(raw_bytes));
    }
}

/// Threads write to sectors of their own, which share clusters, while others flush and free clusters.
#[test]
fn requests_of_several_threads_do_not_harm_each_other() {
    const THREADS: u64 = 6;
    const ROUNDS: u64 = 300;
    let images = Images::new();
    let base = images.add("base", pattern(SIZE));
    let backing = Some(("base".to_owned(), Some("raw".to_owned())));
    let path = images.add("a", Sample { backing, ..small() }.image());
    let lock = open(&config(&path)).unwrap();
    let disk = &lock.disk;
    // Nothing but these threads has to do with the last mebibyte.
    let sectors = 4 * (1 << 20) / 512;
    let freed = Range { offset: 4 << 20, len_bytes: 1 << 20, unmap: true };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut found = [0; 512];
                for round in 0..ROUNDS {
                    let number = (round * 7919 + thread * 31) % (sectors / THREADS);
                    let offset = (number * THREADS + thread) * 512;
                    let byte = u8::try_from(round % 250).unwrap() + 1;
                    if round % 2 == 0 || !placed::write(disk, &[byte; 512], offset) {
                        disk.write_all_at(&[byte; 512], offset).unwrap();
                    }
                    disk.read_exact_at(&mut found, offset).unwrap();
                    assert_eq!(found, [byte; 512], "thread {thread}, round {round}");
                }
            });
        }
        scope.spawn(|| {
            for round in 0..40_u8 {
                let bytes = vec![round; 65536];
                disk.write_all_at(&bytes, (4 << 20) + 4096).unwrap();
                assert!(placed::write(disk, &bytes[..512], (4 << 20) + 4096));
                disk.formatted().unwrap().write_zeroes(freed, round % 2 == 0).unwrap();
                lock.write_back().unwrap();
            }
        });
    });
    let mut flat = pattern(SIZE);
    for thread in 0..THREADS {
        for round in 0..ROUNDS {
            let number = (round * 7919 + thread * 31) % (sectors / THREADS);
            let at = usize::try_from((number * THREADS + thread) * 512).unwrap();
            flat[at..at + 512].fill(u8::try_from(round % 250).unwrap() + 1);
        }
    }
    flat[4 << 20..5 << 20].fill(0);
    assert!(contents(&lock) == flat);
    lock.unlock().unwrap();
    drop(lock);
    check_counts(&path);
    assert!(contents(&open(&config(&path)).unwrap()) == flat);
    assert!(fs::read(base).unwrap() == pattern(SIZE));
}

/// One thread clears a part of a cluster that was never written, while another writes the rest of it.
#[test]
fn a_write_beside_a_range_that_is_cleared_is_kept() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    let disk = &lock.disk;
    let start = std::sync::Barrier::new(2);
    let clusters = SIZE / CLUSTER;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for cluster in 0..clusters {
                start.wait();
                disk.write_all_at(&[7; 512], cluster * CLUSTER).unwrap();
            }
        });
        scope.spawn(|| {
            for cluster in 0..clusters {
                let (offset, len_bytes) = (cluster * CLUSTER + 512, CLUSTER - 512);
                let rest = Range { offset, len_bytes, unmap: false };
                start.wait();
                disk.formatted().unwrap().write_zeroes(rest, false).unwrap();
            }
        });
    });
    let found = contents(&lock);
    for (cluster, found) in found.chunks_exact(4096).enumerate() {
        assert!(found[..512] == [7; 512], "the write to cluster {cluster} is lost");
    }
}

#[test]
fn the_disk_has_the_size_that_the_header_says() {
    let images = Images::new();
    let path = images.add("a", Sample { size_bytes: 1 << 40, ..Sample::default() }.image());
    let device = Block::new(config(&path)).unwrap();
    assert_eq!(device.lock().disk.capacity_sectors(), (1 << 40) / 512);
    let path = images.add("b", small().image());
    assert_eq!(unloaded(&config(&path)).unwrap().disk.capacity_sectors(), SIZE / 512);
}

#[test]
fn nothing_reaches_the_file_outside_of_the_lock() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = unloaded(&config(&path)).unwrap();
    let disk = &lock.disk;
    let write = |byte| disk.write_all_at(&[byte; 512], 0);
    write(1).unwrap_err();
    disk.read_exact_at(&mut [0; 512], 0).unwrap_err();
    lock.lock().unwrap();
    lock.load().unwrap();
    write(2).unwrap();
    lock.unlock().unwrap();
    let released = fs::read(&path).unwrap();
    write(3).unwrap_err();
    disk.formatted()
        .unwrap()
        .discard(Range { offset: 0, len_bytes: 8192, unmap: false })
        .unwrap_err();
    lock.write_back().unwrap();
    drop(lock);
    assert!(fs::read(&path).unwrap() == released);
}

/// What a migration does with storage that both sides share.
#[test]
fn an_image_goes_from_one_vm_to_the_next_and_back_with_its_tables() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let [here, there] = [(); 2].map(|()| unloaded(&config(&path)).unwrap());
    here.lock().unwrap();
    here.load().unwrap();
    for round in 1..=6_u8 {
        let (from, to) = if round % 2 == 1 { (&here, &there) } else { (&there, &here) };
        // In another L2 table each time.
        let offset = u64::from(round) * 700 * 1024;
        from.disk.write_all_at(&[round; 8192], offset).unwrap();
        assert!(matches!(to.lock(), Err(DiskError::InUse { .. })));
        from.write_back().unwrap();
        // The other side looks before the lock is its own.
        to.drop_cache().unwrap();
        to.check_format().unwrap();
        from.unlock().unwrap();
        to.lock().unwrap();
        to.drop_cache().unwrap();
        to.load().unwrap();
        for before in 1..=round {
            let mut found = [0; 8192];
            to.disk.read_exact_at(&mut found, u64::from(before) * 700 * 1024).unwrap();
            assert_eq!(found, [before; 8192], "of round {before} in round {round}");
        }
    }
    here.write_back().unwrap();
    drop((here, there));
    check_counts(&path);
}

/// The library writes an entry of the first table once, and never again if that fails.
#[test]
fn a_flush_after_a_failed_write_keeps_its_promise_or_fails() {
    let mut failed = 0;
    for changes in 0..8 {
        let images = Images::new();
        let path = images.add("a", small().image());
        let lock = open(&config(&path)).unwrap();
        lock.disk.write_all_at(&[1; 512], 0).unwrap();
        lock.disk.refusal.set_after(changes, libc::ENOSPC);
        let first = lock.disk.write_all_at(&[7; 4096], 3 << 20);
        lock.disk.refusal.set(0);
        if first.is_err() {
            lock.disk.write_all_at(&[7; 4096], 3 << 20).unwrap();
        }
        if lock.write_back().is_err() {
            failed += 1;
            lock.disk.flush().unwrap_err();
            continue;
        }
        let copy = images.add("copy", fs::read(&path).unwrap());
        let mut found = [0; 4096];
        let copy = open(&config(&copy)).unwrap();
        copy.disk.read_exact_at(&mut found, 3 << 20).unwrap();
        assert_eq!(found, [7; 4096], "after {changes} changes");
    }
    assert_eq!(failed, 1, "only what is not repeated is lost");
}

#[test]
fn a_flush_brings_the_tables_with_it() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    lock.disk.write_all_at(&[7; 4096], 1 << 20).unwrap();
    lock.disk.flush().unwrap();
    // What a host that has crashed now finds.
    let copy = images.add("copy", fs::read(&path).unwrap());
    check_counts(&copy);
    tables::repair(&copy);
    let mut found = [0; 4096];
    open(&config(&copy)).unwrap().disk.read_exact_at(&mut found, 1 << 20).unwrap();
    assert_eq!(found, [7; 4096]);
}

#[test]
fn what_is_discarded_goes_back_to_the_host() {
    let images = Images::new();
    let path = images.add("a", Sample { size_bytes: 16 << 20, ..Sample::default() }.image());
    let lock = open(&config(&path)).unwrap();
    lock.disk.write_all_at(&vec![1; 4 << 20], 0).unwrap();
    lock.write_back().unwrap();
    let blocks = || fs::metadata(&path).unwrap().blocks();
    let full = blocks();
    // A part of a cluster at both ends stays.
    let range = Range { offset: 4096, len_bytes: (4 << 20) - 8192, unmap: false };
    lock.disk.formatted().unwrap().discard(range).unwrap();
    lock.write_back().unwrap();
    if punches_holes(&images) {
        assert!(blocks() < full / 8, "{} of {full}", blocks());
    } else {
        test_skip::skip!("the file system of temporary files punches no holes");
    }
    let mut edge = [0; 8192];
    lock.disk.read_exact_at(&mut edge, 0).unwrap();
    assert_eq!(edge, [1; 8192]);
    // The clusters are used again.
    let len_bytes = fs::metadata(&path).unwrap().len();
    lock.disk.write_all_at(&vec![2; 3 << 20], 8 << 20).unwrap();
    lock.write_back().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), len_bytes);
    drop(lock);
    check_counts(&path);
}

fn punches_holes(images: &Images) -> bool {
    let path = images.add("scratch", vec![1; 1 << 20]);
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    let full = file.metadata().unwrap().blocks();
    let raw = Disk::open(&path, false, false).unwrap();
    let range = Range { offset: 0, len_bytes: 1 << 20, unmap: false };
    crate::virtio::block::synchronous::discard(&raw, &[range]).unwrap()
        && file.metadata().unwrap().blocks() < full
}

/// As after another host has had it: what this one had in memory is not used.
#[test]
fn an_image_whose_cache_was_dropped_is_read_anew() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let lock = open(&config(&path)).unwrap();
    let before = fs::read(&path).unwrap();
    lock.disk.write_all_at(&[3; 4096], 0).unwrap();
    lock.drop_cache().unwrap();
    fs::write(&path, before).unwrap();
    lock.load().unwrap();
    assert!(contents(&lock).iter().all(|byte| *byte == 0));
}

#[test]
fn a_read_only_disk_changes_nothing() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let before = fs::read(&path).unwrap();
    let config = BlockConfig { readonly: true, ..config(&path) };
    let (first, second) = (open(&config).unwrap(), open(&config).unwrap());
    first.disk.write_all_at(&[1; 512], 0).unwrap_err();
    assert!(contents(&second).iter().all(|byte| *byte == 0));
    assert!(matches!(open(&self::config(&path)), Err(DiskError::InUse { .. })));
    drop((first, second));
    assert!(fs::read(&path).unwrap() == before);
}
