// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VHDX images, seen from the disk, from their tables, and by `qemu-img`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::TempDir;

use super::layout::{self, HEADER_BYTES, HEADER_OFFSETS, checksum};
use crate::virtio::block::image::Disk;
use crate::virtio::block::request::Range;
use crate::virtio::block::tests::specification::Loop;
use crate::virtio::block::{BlockConfig, DiskError, DiskFormat, DiskLock, LockGranularity};

const BLOCK: u64 = 1 << 20;
const SIZE: u64 = 5 * BLOCK + 4096;
const METADATA: usize = 3 << 20;
const TABLE: usize = 2 << 20;

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn seal(image: &mut [u8], at: usize, len: usize) {
    layout::seal(&mut image[at..at + len]);
}

/// An empty image: headers, log, table and metadata, a mebibyte each.
fn sample(size_bytes: u64, sector_bytes: u32) -> Vec<u8> {
    let mut image = vec![0; 4 << 20];
    put(&mut image, 0, b"vhdxfile");
    for (number, at) in HEADER_OFFSETS.into_iter().enumerate() {
        let at = usize::try_from(at).unwrap();
        put(&mut image, at, b"head");
        put(&mut image, at + 8, &u64::try_from(number).unwrap().to_le_bytes());
        put(&mut image, at + 66, &1_u16.to_le_bytes());
        put(&mut image, at + 68, &(1_u32 << 20).to_le_bytes());
        put(&mut image, at + 72, &(1_u64 << 20).to_le_bytes());
        seal(&mut image, at, HEADER_BYTES);
    }
    for at in [192 << 10, 256 << 10] {
        put(&mut image, at, b"regi");
        put(&mut image, at + 8, &2_u32.to_le_bytes());
        for (entry, (guid, offset)) in
            [(layout::BAT_REGION, TABLE), (layout::METADATA_REGION, METADATA)]
                .into_iter()
                .enumerate()
        {
            let at = at + 16 + 32 * entry;
            put(&mut image, at, &guid);
            put(&mut image, at + 16, &u64::try_from(offset).unwrap().to_le_bytes());
            put(&mut image, at + 24, &(1_u32 << 20).to_le_bytes());
            put(&mut image, at + 28, &1_u32.to_le_bytes());
        }
        seal(&mut image, at, 64 << 10);
    }
    put(&mut image, METADATA, b"metadata");
    put(&mut image, METADATA + 10, &5_u16.to_le_bytes());
    let block_bytes = u32::try_from(BLOCK).unwrap().to_le_bytes();
    let parameters = [block_bytes, [0; 4]].concat();
    let items = [
        (layout::FILE_PARAMETERS, parameters),
        (layout::DISK_SIZE, size_bytes.to_le_bytes().to_vec()),
        (layout::LOGICAL_SECTOR, sector_bytes.to_le_bytes().to_vec()),
        (layout::OTHER_ITEMS[0], 4096_u32.to_le_bytes().to_vec()),
        (layout::OTHER_ITEMS[1], vec![0x11; 16]),
    ];
    for (number, (guid, value)) in items.into_iter().enumerate() {
        let (entry, offset) = (METADATA + 32 + 32 * number, (64 << 10) + 64 * number);
        put(&mut image, entry, &guid);
        put(&mut image, entry + 16, &u32::try_from(offset).unwrap().to_le_bytes());
        put(&mut image, entry + 20, &u32::try_from(value.len()).unwrap().to_le_bytes());
        put(&mut image, entry + 24, &6_u32.to_le_bytes());
        put(&mut image, METADATA + offset, &value);
    }
    image
}

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
    let (path, format) = (path.to_owned(), DiskFormat::Vhdx);
    BlockConfig { path, format, ..BlockConfig::default() }
}

fn open(config: &BlockConfig) -> Result<DiskLock, DiskError> {
    let disk = Arc::new(Disk::open_as(config)?);
    let lock = DiskLock { disk, granularity: LockGranularity::default() };
    lock.lock()?;
    lock.load()?;
    Ok(lock)
}

fn contents(lock: &DiskLock) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(lock.disk.capacity_sectors() * 512).unwrap()];
    lock.disk.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[derive(Clone, Debug)]
enum Step {
    Write(u8),
    Discard,
    Zero { free: bool },
    Flush,
    Reload,
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64, u64)>> {
    let sectors = SIZE / 512;
    let place = (0..sectors, prop_oneof![1..8_u64, 1..3000_u64]);
    let place =
        place.prop_map(move |(sector, count)| (sector * 512, count.min(sectors - sector) * 512));
    let step = prop_oneof![
        6 => (1..=255_u8).prop_map(Step::Write),
        1 => Just(Step::Discard),
        2 => any::<bool>().prop_map(|free| Step::Zero { free }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reload),
    ];
    let step = (step, place).prop_map(|(step, (offset, len_bytes))| (step, offset, len_bytes));
    proptest::collection::vec(step, 1..24)
}

fn run(lock: &DiskLock, flat: &mut [u8], steps: &[(Step, u64, u64)]) {
    let formatted = lock.disk.formatted().unwrap();
    for (step, offset, len_bytes) in steps {
        let (offset, len_bytes) = (*offset, *len_bytes);
        let at = usize::try_from(offset).unwrap();
        let flat = &mut flat[at..at + usize::try_from(len_bytes).unwrap()];
        let range = Range { offset, len_bytes, unmap: true };
        match step {
            Step::Write(byte) => {
                flat.fill(*byte);
                lock.disk.write_all_at(flat, offset).unwrap();
            }
            Step::Discard => {
                formatted.discard(range).unwrap();
                let before = flat.to_vec();
                lock.disk.read_exact_at(flat, offset).unwrap();
                assert!(flat.iter().zip(before).all(|(now, old)| *now == 0 || *now == old));
            }
            Step::Zero { free } => {
                formatted.write_zeroes(range, *free).unwrap();
                flat.fill(0);
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

/// What `qemu-img` reads from an image, where it is installed.
fn check_with_qemu(images: &Images, expected: &[u8]) {
    let directory = images.0.path();
    let qemu_img = |arguments: &[&str]| {
        let mut command = Command::new("qemu-img");
        command.args(arguments).current_dir(directory).stdin(Stdio::null()).output()
    };
    let checked = match qemu_img(&["check", "-f", "vhdx", "a"]) {
        Ok(checked) => checked,
        Err(error) => return test_skip::skip!("qemu-img cannot be run: {error}"),
    };
    assert!(checked.status.success(), "{checked:?}");
    let converted = qemu_img(&["convert", "-f", "vhdx", "-O", "raw", "a", "flat"]).unwrap();
    assert!(converted.status.success(), "{converted:?}");
    assert!(fs::read(images.path("flat")).unwrap() == expected, "qemu-img reads something else");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn an_image_is_like_a_flat_disk(steps in steps(), direct: bool) {
        let images = Images::new();
        let path = images.add("a", sample(SIZE, 512));
        let config = BlockConfig { direct, ..config(&path) };
        let mut flat = vec![0; usize::try_from(SIZE).unwrap()];
        let lock = open(&config).unwrap();
        run(&lock, &mut flat, &steps);
        prop_assert!(contents(&lock) == flat);
        lock.unlock().unwrap();
        drop(lock);
        prop_assert!(contents(&open(&config).unwrap()) == flat);
        check_with_qemu(&images, &flat);
    }

    #[test]
    fn any_change_of_an_image_is_survived(
        changes in proptest::collection::vec((0..5_usize, 0..640_usize, any::<u64>()), 1..6),
    ) {
        let images = Images::new();
        let path = images.add("a", sample(SIZE, 512));
        {
            let lock = open(&config(&path)).unwrap();
            lock.disk.write_all_at(&vec![1; 3 << 20], 4096).unwrap();
            lock.unlock().unwrap();
        }
        let mut image = fs::read(&path).unwrap();
        for (place, at, number) in changes {
            let start = [64 << 10, 192 << 10, TABLE, METADATA, METADATA + (64 << 10)][place];
            // States and places of blocks now and then.
            let number = if number % 2 == 0 { (number % 8) << 20 | 6 } else { number };
            put(&mut image, start + at / 8 * 8, &number.to_le_bytes());
        }
        seal(&mut image, 64 << 10, HEADER_BYTES);
        seal(&mut image, 192 << 10, 64 << 10);
        fs::write(&path, image).unwrap();
        let Ok(lock) = open(&config(&path)) else { return Ok(()) };
        let mut buffer = vec![0; 65536];
        for offset in [0, BLOCK - 4096, 4 * BLOCK, SIZE - 65536, u64::MAX - 100] {
            let _ = lock.disk.read_exact_at(&mut buffer, offset);
            let _ = lock.disk.write_all_at(&buffer, offset);
            let range = Range { offset, len_bytes: 65536, unmap: true };
            let _ = lock.disk.formatted().unwrap().discard(range);
            let _ = lock.disk.formatted().unwrap().write_zeroes(range, offset == 0);
        }
        let _ = lock.write_back();
    }
}

#[test]
fn what_is_made_by_qemu_is_read_and_changed() {
    for form in ["subformat=dynamic,block_size=1M", "subformat=dynamic", "subformat=fixed"] {
        let images = Images::new();
        let mut flat: Vec<u8> =
            (0..SIZE).map(|at| u8::try_from((at / 512) % 255 + 1).unwrap()).collect();
        let empty = usize::try_from(BLOCK).unwrap()..usize::try_from(3 * BLOCK).unwrap();
        flat[empty].fill(0);
        images.add("source", &flat);
        let arguments = ["convert", "-f", "raw", "-O", "vhdx", "-o", form, "source", "a"];
        let made = Command::new("qemu-img").args(arguments).current_dir(images.0.path()).output();
        match made {
            Ok(made) => assert!(made.status.success(), "{made:?}"),
            Err(error) => return test_skip::skip!("qemu-img cannot be run: {error}"),
        }
        let lock = open(&config(&images.path("a"))).unwrap();
        // The library that made it may round the size up.
        let mut found = contents(&lock);
        assert!(found.split_off(flat.len()).iter().all(|byte| *byte == 0));
        assert!(found == flat, "{form}");
        let steps = [(Step::Write(9), 2 * BLOCK - 512, 1024), (Step::Discard, 0, 4096)];
        run(&lock, &mut flat, &steps);
        lock.unlock().unwrap();
        let len = usize::try_from(lock.disk.capacity_sectors() * 512).unwrap();
        drop(lock);
        flat.resize(len, 0);
        check_with_qemu(&images, &flat);
    }
}

#[test]
fn sectors_of_4_kib_are_the_blocks_of_the_disk() {
    let images = Images::new();
    let lock = open(&config(&images.add("a", sample(SIZE, 4096)))).unwrap();
    assert_eq!(lock.disk.topology().logical_block_bytes, 4096);
    assert_eq!(lock.disk.capacity_sectors(), SIZE / 512);
}

#[test]
fn what_a_failed_write_left_is_in_no_block() {
    let images = Images::new();
    let path = images.add("a", sample(SIZE, 512));
    let lock = open(&config(&path)).unwrap();
    let end = fs::metadata(&path).unwrap().len().next_multiple_of(1 << 20);
    // The file grows, and the host writes a part of the data.
    lock.disk.refusal.set_after(1, libc::ENOSPC);
    lock.disk.write_all_at(&[7; 8192], 0).unwrap_err();
    lock.disk.refusal.set_after(0, 0);
    fs::File::options().write(true).open(&path).unwrap().write_all_at(&[7; 4096], end).unwrap();
    lock.disk.write_all_at(&[8; 512], 2 * BLOCK + 4096).unwrap();
    let mut found = [1; 4096];
    lock.disk.read_exact_at(&mut found, 2 * BLOCK).unwrap();
    assert_eq!(found, [0; 4096]);
}

#[test]
fn an_image_that_grows_is_only_read_on_a_block_device() {
    let image = tempfile::NamedTempFile::new().unwrap();
    fs::write(image.path(), sample(SIZE, 512)).unwrap();
    let Some(device) = Loop::over(image) else {
        test_skip::skip!("no loop devices here");
        return;
    };
    let path = PathBuf::from(&device.path);
    let error = open(&config(&path)).err().unwrap();
    let text = error_text::chain(&error);
    assert!(text.contains("on a block device: use readonly=on"), "{text}");
    let lock = open(&BlockConfig { readonly: true, ..config(&path) }).unwrap();
    assert!(contents(&lock).iter().all(|byte| *byte == 0));
}

#[test]
fn what_was_flushed_is_there_after_a_crash() {
    let images = Images::new();
    let lock = open(&config(&images.add("a", sample(SIZE, 512)))).unwrap();
    lock.disk.write_all_at(&[7; 4096], 2 * BLOCK).unwrap();
    // Not in the table yet: what would be there after a crash now is an image without it.
    let early = images.add("early", fs::read(images.path("a")).unwrap());
    lock.disk.flush().unwrap();
    let late = images.add("late", fs::read(images.path("a")).unwrap());
    let mut found = [1; 4096];
    open(&config(&early)).unwrap().disk.read_exact_at(&mut found, 2 * BLOCK).unwrap();
    assert_eq!(found, [0; 4096]);
    open(&config(&late)).unwrap().disk.read_exact_at(&mut found, 2 * BLOCK).unwrap();
    assert_eq!(found, [7; 4096]);
}

#[test]
fn an_image_that_is_opened_for_writing_says_so_and_a_reader_changes_nothing() {
    let images = Images::new();
    let path = images.add("a", sample(SIZE, 512));
    let before = fs::read(&path).unwrap();
    drop(open(&BlockConfig { readonly: true, ..config(&path) }).unwrap());
    assert!(fs::read(&path).unwrap() == before);
    drop(open(&config(&path)).unwrap());
    let after = fs::read(&path).unwrap();
    for at in HEADER_OFFSETS {
        let at = usize::try_from(at).unwrap();
        let guids = at + 16..at + 48;
        assert_ne!(before[guids.clone()], after[guids]);
        assert!(layout_is_whole(&after[at..at + HEADER_BYTES]));
    }
}

fn layout_is_whole(header: &[u8]) -> bool {
    header[4..8] == checksum(header).to_le_bytes()
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let images = Images::new();
    let refused = |change: &dyn Fn(&mut Vec<u8>), why: &str| {
        let mut image = sample(SIZE, 512);
        change(&mut image);
        let path = images.add("a", image);
        let refusal = error_text::chain(&open(&config(&path)).map(drop).unwrap_err());
        assert!(refusal.contains(why), "{refusal}");
    };
    let both = |image: &mut Vec<u8>, at: usize, bytes: &[u8]| {
        for header in HEADER_OFFSETS {
            let header = usize::try_from(header).unwrap();
            put(image, header + at, bytes);
            seal(image, header, HEADER_BYTES);
        }
    };
    let parameters = METADATA + (64 << 10);
    refused(&|image| image[0] = 0, "not a VHDX image");
    let broken = |image: &mut Vec<u8>| {
        for header in HEADER_OFFSETS {
            image[usize::try_from(header).unwrap() + 100] ^= 1;
        }
    };
    refused(&broken, "no header that is whole");
    refused(&|image| both(image, 48, &[1; 16]), "its log is to be carried out");
    refused(&|image| both(image, 66, &[2]), "version 2");
    refused(&|image| both(image, 72, &(2_u64 << 20).to_le_bytes()), "a region at");
    refused(&|image| put(image, parameters + 4, &[2]), "a parent image");
    refused(&|image| put(image, parameters, &[1]), "its blocks have");
    refused(&|image| put(image, parameters + 64, &[0xff; 8]), "its disk has");
    refused(&|image| put(image, parameters + 128, &[1]), "its sectors have");
    refused(&|image| put(image, METADATA, b"x"), "have no table");
    refused(&|image| put(image, TABLE, &[7]), "parts of blocks");
    refused(&|image| put(image, TABLE, &[4]), "in the state 4");
    for place in [0, 1, 2, 3, 4, 1 << 40] {
        let entry = (place << 20 | 6_u64).to_le_bytes();
        refused(&|image| put(image, TABLE, &entry), "it has a block at");
    }
    let twice = |image: &mut Vec<u8>| {
        image.resize(6 << 20, 0);
        for block in 0..2 {
            put(image, TABLE + 8 * block, &(4_u64 << 20 | 6).to_le_bytes());
        }
    };
    refused(&twice, "it has a block at");
}
