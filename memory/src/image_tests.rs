// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images of guest RAM: contents, what is shared, what is refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;

use super::*;
use crate::config::{HugePageSize, RamConfig};
use crate::layout::RamLayout;
use crate::ram::{GuestRam, RamError, RamSources};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 4 * MIB / PAGE_BYTES;
/// The image's memory begins here in the file.
const OFFSET: u64 = 3 * PAGE_BYTES;
const GPA: u64 = 0;
/// A page as an array has it.
const PAGE: usize = 4096;

/// A file with `OFFSET` other bytes and then 4 MiB, of which only the pages in `data` are there, each filled with its
/// number.
fn file(data: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory");
    let file = std::fs::File::create_new(&path).unwrap();
    file.set_len(OFFSET + 4 * MIB).unwrap();
    file.write_all_at(&[0xEE; PAGE], 0).unwrap();
    for &page in data {
        let bytes = [page; PAGE];
        file.write_all_at(&bytes, OFFSET + u64::from(page) * PAGE_BYTES).unwrap();
    }
    (directory, path)
}

fn image(path: &std::path::Path) -> RamImage {
    let file = Arc::new(OpenOptions::new().read(true).open(path).unwrap());
    let range = ImageRange { gpa: GPA, len_bytes: 4 * MIB, offset_bytes: OFFSET };
    RamImage::new(file, vec![range]).unwrap()
}

fn zone(change: impl FnOnce(&mut ZoneSpec)) -> RamConfig {
    let mut zone = ZoneSpec::new("z", 4 * MIB);
    change(&mut zone);
    RamConfig { zones: vec![zone] }
}

fn mapped(config: &RamConfig, image: RamImage) -> Result<GuestRam, RamError> {
    let sources = RamSources { image: Some(image), ..RamSources::default() };
    GuestRam::with_sources(config, RamLayout::default(), &sources)
}

fn page(ram: &GuestRam, number: u64) -> Vec<u8> {
    let mut bytes = vec![0xAA; PAGE];
    ram.regions()[0].read_page_range(number * PAGE_BYTES, &mut bytes).unwrap();
    bytes
}

#[test]
fn copies_have_the_same_contents_and_each_its_own_writes() {
    let (_directory, path) = file(&[1, 7]);
    let before = std::fs::read(&path).unwrap();
    let make = || mapped(&zone(|_| {}), image(&path)).unwrap();
    let (one, other) = (make(), make());
    assert_eq!(one.regions()[0].kind(), ZoneKind::PrivateFile);
    assert!(!one.starts_zero());
    for (number, byte) in [(0, 0), (1, 1), (7, 7), (PAGES - 1, 0)] {
        assert!(page(&one, number).iter().all(|&found| found == byte), "page {number}");
    }
    one.regions()[0].write_range(7 * PAGE_BYTES, &[9; 16]).unwrap();
    one.regions()[0].write_range(8 * PAGE_BYTES, &[9; 16]).unwrap();
    assert_eq!(page(&one, 7)[..17], [&[9; 16][..], &[7]].concat());
    assert!(page(&other, 7).iter().all(|&found| found == 7));
    assert!(page(&other, 8).iter().all(|&found| found == 0));
    drop((one, other));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn what_may_hold_data_is_the_file_s_and_what_was_written() {
    let (_directory, path) = file(&[1, 2, 7]);
    let ram = mapped(&zone(|_| {}), image(&path)).unwrap();
    let region = &ram.regions()[0];
    region.write_range(100 * PAGE_BYTES, &[1]).unwrap();
    // Written, so that it has a page of its own; it may not be left out although the file has it, too.
    region.write_range(2 * PAGE_BYTES, &[1]).unwrap();
    // Between what the file has.
    region.write_range(5 * PAGE_BYTES, &[1]).unwrap();
    let runs = region.populated_runs(&(0..4 * MIB)).unwrap();
    let holds = |page: u64| runs.iter().any(|run| run.contains(&(page * PAGE_BYTES)));
    for page in [1, 2, 5, 7, 100] {
        assert!(holds(page), "page {page} is not in {runs:?}");
    }
    // Blocks of a file system may be larger than pages, and reads go ahead.
    assert!(!holds(PAGES - 1) && !holds(500), "{runs:?}");
    assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "{runs:?}");
}

#[test]
fn what_is_discarded_reads_as_zero_and_not_as_the_file() {
    let (_directory, path) = file(&[1]);
    let ram = mapped(&zone(|_| {}), image(&path)).unwrap();
    ram.regions()[0].zero_pages(&(PAGE_BYTES..2 * PAGE_BYTES)).unwrap();
    assert!(page(&ram, 1).iter().all(|&found| found == 0));
    // A balloon leaves it as it is: the file's page would come back.
    let discarded = ram.discard(GPA..GPA + 4 * MIB);
    assert_eq!(discarded.len_bytes(), 0);
    assert!(page(&ram, 1).iter().all(|&found| found == 0));
}

#[test]
fn a_file_that_another_process_may_write_is_refused() {
    let (_directory, path) = file(&[1]);
    let write = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let writer = write();
    file_lock::lock(&writer, FileUse::Written).unwrap();
    let reader = || Arc::new(OpenOptions::new().read(true).open(&path).unwrap());
    let refused = RamImage::new(reader(), Vec::new()).unwrap_err();
    assert!(matches!(refused, ImageError::InUse { .. }), "{refused}");
    drop(writer);
    let made = mapped(&zone(|_| {}), image(&path)).unwrap();
    assert!(
        !file_lock::is_free(&write(), FileUse::Written)
            && file_lock::is_free(&write(), FileUse::Read)
    );
    drop(made);
    assert!(file_lock::is_free(&write(), FileUse::Written));
}

#[test]
fn only_pages_of_its_own_take_memory_of_the_host() {
    let (_directory, path) = file(&[1, 2, 7]);
    let ram = mapped(&zone(|_| {}), image(&path)).unwrap();
    let region = &ram.regions()[0];
    // All that the file has is in the page tables, and none of it is this process's.
    for number in 0..PAGES {
        page(&ram, number);
    }
    assert_eq!(region.private_bytes(), 0);
    for number in [2, 3, 500] {
        region.write_range(number * PAGE_BYTES, &[1]).unwrap();
    }
    // Kernels before 6.7 do not tell.
    let own = region.own_runs(&(0..4 * MIB));
    if own.is_empty() {
        test_skip::skip!("this kernel does not scan page tables");
        return;
    }
    let pages = |from: u64, to: u64| from * PAGE_BYTES..to * PAGE_BYTES;
    assert_eq!(own, [pages(2, 4), pages(500, 501)]);
    assert_eq!(region.private_bytes(), 3 * PAGE_BYTES);
}

#[test]
fn a_file_without_room_for_its_holes_is_refused_in_memory_only() {
    let shm = std::path::Path::new("/dev/shm");
    let made = tempfile::tempdir_in(shm).ok().filter(|folder| {
        let file = File::create_new(folder.path().join("memory"));
        file.is_ok_and(|file| is_in_memory(&file) && free_bytes(&file).is_some())
    });
    let Some(folder) = made else {
        test_skip::skip!("there is no /dev/shm with a limit");
        return;
    };
    let path = folder.path().join("memory");
    let file = || Arc::new(OpenOptions::new().read(true).write(true).open(&path).unwrap());
    let free = free_bytes(&file()).unwrap();
    let of = |len_bytes: u64| {
        file().set_len(len_bytes).unwrap();
        RamImage::new(file(), vec![ImageRange { gpa: GPA, len_bytes, offset_bytes: 0 }])
    };
    let too_large = of((free + (1 << 30)).next_multiple_of(PAGE_BYTES));
    assert!(matches!(too_large, Err(ImageError::NoRoom { .. })), "{too_large:?}");
    let small = of(4 * MIB).unwrap();
    // Only there is a node that of the file.
    let here = small.backing(&ZoneSpec { host_numa_node: Some(0), ..ZoneSpec::new("z", 4 * MIB) });
    assert!(here.is_err_and(|error| error.to_string().contains("tmpfs")));
    small.backing(&ZoneSpec::new("z", 4 * MIB)).unwrap();
}

#[test]
fn parts_of_runs() {
    let runs = [2..4, 6..9, 12..13];
    let within = |range: Range<u64>| runs_within(&runs, &range).collect::<Vec<_>>();
    assert_eq!(within(0..20), runs);
    assert_eq!(within(3..7), [3..4, 6..7]);
    assert_eq!(within(4..6), []);
    assert_eq!(within(1..8), [2..4, 6..8]);
    assert_eq!(within(13..20), []);
}

#[test]
fn other_memory_and_other_layouts_are_refused_by_name() {
    let (_directory, path) = file(&[]);
    let of = |change: fn(&mut ZoneSpec)| match mapped(&zone(change), image(&path)).unwrap_err() {
        RamError::Image(error) => error.to_string(),
        other => panic!("{other}"),
    };
    for (change, words) in [
        ((|z| z.shared = true) as fn(&mut ZoneSpec), "shared"),
        (|z| z.block_bytes = Some(2 * MIB), "plugs"),
        (|z| z.backing = Backing::Memfd, "memfd"),
        (|z| z.backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 }, "huge"),
        (|z| z.backing = Backing::File("/nowhere".into()), "file of its own"),
    ] {
        let said = of(change);
        assert!(said.contains("'z'") && said.contains(words), "{said}");
    }
    let longer = of(|z| z.size_bytes = 8 * MIB);
    assert!(longer.contains("0x800000"), "{longer}");
    let file = Arc::new(OpenOptions::new().read(true).open(&path).unwrap());
    let odd = ImageRange { gpa: GPA, len_bytes: 4 * MIB, offset_bytes: 512 };
    let odd = mapped(&zone(|_| {}), RamImage::new(file, vec![odd]).unwrap()).unwrap_err();
    assert!(matches!(odd, RamError::Image(ImageError::Layout { .. })), "{odd}");
}
