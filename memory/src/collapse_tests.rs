// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The collapse of memory on this kernel: what becomes huge, what stays, and when it ends.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::fs::File;
use std::io::pipe;
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::host::testing::{HugePagesTurn, smaps_bytes};
use crate::{Backing, GuestRam, RamConfig, RamLayout, ZoneSpec};

const MIB: u64 = 1 << 20;

fn ram(thp: bool) -> GuestRam {
    let zone =
        ZoneSpec { thp, shared: true, backing: Backing::Memfd, ..ZoneSpec::new("t", 32 * MIB) };
    GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap()
}

/// Writes `data` in small pages, as contents that arrive behind a running guest come.
fn arrive(region: &RamRegion, parts: &[(u64, &[u8])]) {
    region.use_small_pages(true);
    for (at, data) in parts {
        region.write_range(*at, data).unwrap();
    }
    region.use_small_pages(false);
}

fn bytes(len: u32) -> Vec<u8> {
    (0..len / 4).flat_map(u32::to_le_bytes).collect()
}

#[test]
fn full_blocks_become_huge_and_keep_what_they_hold_while_others_stay() {
    let Some(turn) = HugePagesTurn::new(6 * MIB) else { return };
    let ram = ram(true);
    let region = &ram.regions()[0];
    let data = bytes(6 << 20);
    arrive(region, &[(0, &data), (8 * MIB, &data[..1 << 20])]);
    let before = region.populated_runs(&(0..32 * MIB)).unwrap();
    // On each host, whatever it does with memory that nothing has asked small pages for.
    let collapse = Collapse::start(ram.regions(), 1).unwrap().unwrap();
    let end = collapse.end();
    assert!(end.within(Duration::from_secs(20)), "its end is told");
    let blocks = collapse.wait();
    if !turn.has_given(blocks, Collapsed { huge: 3, sparse: 13, refused: 0 }) {
        return;
    }
    assert_eq!(region.populated_runs(&(0..32 * MIB)).unwrap(), before);
    let mut found = vec![0; data.len()];
    region.io_slice(&(0..6 * MIB)).unwrap().copy_to(&mut found[..]);
    assert!(found == data);
}

#[test]
fn the_mapping_of_the_vcpus_is_huge_as_well() {
    let Some(turn) = HugePagesTurn::new(4 * MIB) else { return };
    let ram = ram(true);
    let region = &ram.regions()[0];
    region.map_for_vcpus().unwrap();
    let data = bytes(4 << 20);
    arrive(region, &[(0, &data)]);
    let blocks = Collapse::start(ram.regions(), 1).unwrap().unwrap().wait();
    if !turn.has_given(blocks, Collapsed { huge: 2, sparse: 14, refused: 0 }) {
        return;
    }
    let huge = |start: *mut u8| smaps_bytes(start, "ShmemPmdMapped");
    assert_eq!(huge(region.as_ptr()), 4 * MIB);
    assert_eq!(huge(region.vcpus_ptr().unwrap()), 4 * MIB);
}

#[test]
fn memory_that_is_to_have_small_pages_is_left_alone() {
    let ram = ram(false);
    ram.regions()[0].use_small_pages(true);
    assert!(Collapse::start(ram.regions(), 1).unwrap().is_none());
}

/// Takes a reference to the page at `start`, for as long as the pipe exists.
fn in_use(start: *mut u8) -> (File, File) {
    let (reader, writer) = pipe().unwrap();
    let page = libc::iovec { iov_base: start.cast(), iov_len: 4096 };
    // SAFETY: the page is mapped, and its contents may be read at any time from the pipe.
    let done = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const page, 1, 0) };
    assert_eq!(done, 4096);
    let file = |fd: std::os::fd::OwnedFd| File::from(fd);
    (file(reader.into()), file(writer.into()))
}

/// So much memory after the first pass, in which a page of its first block was in use, as it is until the pipe goes; with
/// the blocks to be tried again.
fn with_a_block_in_use(
    (turn, ram): (&HugePagesTurn, &GuestRam),
    mib: u32,
) -> Option<(Work, (File, File), Vec<Block>)> {
    let region = &ram.regions()[0];
    arrive(region, &[(0, &bytes(mib << 20))]);
    let used = in_use(region.as_ptr());
    let work = Work::new(ram.regions().to_vec(), 1);
    let again = work.first_pass().unwrap_or_default();
    let full = u64::from(mib) / 2;
    let expected = Collapsed { huge: full - 1, sparse: 16 - full, refused: 1 };
    turn.has_given((work.so_far(), &again[..]), (expected, &[(0, 0..2 * MIB)]))
        .then_some((work, used, again))
}

#[test]
fn a_block_in_use_holds_up_no_other_and_is_collapsed_when_it_is_free() {
    let Some(turn) = HugePagesTurn::new(32 * MIB) else { return };
    let ram = ram(true);
    let Some((work, used, again)) = with_a_block_in_use((&turn, &ram), 32) else { return };
    work.later_passes(again.clone());
    if !turn.has_given(work.so_far(), Collapsed { huge: 15, sparse: 0, refused: 1 }) {
        return;
    }
    drop(used);
    work.later_passes(again);
    let _ = turn.has_given(work.so_far(), Collapsed { huge: 16, sparse: 0, refused: 0 });
}

#[test]
fn a_block_that_is_returned_before_it_is_tried_again_stays_returned() {
    let Some(turn) = HugePagesTurn::new(4 * MIB) else { return };
    let ram = ram(true);
    let region = &ram.regions()[0];
    let Some((work, _used, again)) = with_a_block_in_use((&turn, &ram), 4) else { return };
    ram.discard_in_region(0, &(0..MIB)).unwrap();
    work.later_passes(again);
    assert_eq!(work.so_far(), Collapsed { huge: 1, sparse: 15, refused: 0 });
    let left = region.populated_runs(&(0..32 * MIB)).unwrap();
    let [run] = &left[..] else { panic!("{left:?}") };
    assert_eq!(*run, MIB..4 * MIB);
}

#[test]
fn a_range_that_is_being_returned_is_waited_for() {
    let ram = ram(true);
    let region = &ram.regions()[0];
    arrive(region, &[(0, &bytes(4 << 20))]);
    let discard = region.begin_discard(&(0..MIB));
    let work = Work::new(ram.regions().to_vec(), 1);
    thread::scope(|scope| {
        let (over, is_over) = mpsc::channel();
        let work = &work;
        scope.spawn(move || over.send(work.first_pass()));
        let held_up = is_over.recv_timeout(Duration::from_millis(500));
        assert!(held_up.is_err() && work.so_far() == Collapsed::default());
        drop(discard);
        is_over.recv().unwrap();
    });
    assert_ne!(work.so_far(), Collapsed::default());
}

#[test]
fn a_zone_that_cannot_be_collapsed_ends_soon_and_keeps_no_other_from_it() {
    let Some(turn) = HugePagesTurn::new(32 * MIB) else { return };
    let (file, memfd) = (ram(true), ram(true));
    for ram in [&file, &memfd] {
        arrive(&ram.regions()[0], &[(0, &bytes(32 << 20))]);
    }
    // The kernel collapses none of a mapping that is to have small pages.
    file.regions()[0].use_small_pages(true);
    let regions = vec![Arc::clone(&file.regions()[0]), Arc::clone(&memfd.regions()[0])];
    let work = Work::new(regions, 1);
    work.collapse_all();
    let [cannot, can] = [0, 1].map(|index: usize| work.regions[index].1.so_far());
    assert_eq!(cannot, Collapsed { huge: 0, sparse: 0, refused: IMPOSSIBLE_MAX });
    let _ = turn.has_given(can, Collapsed { huge: 16, sparse: 0, refused: 0 });
}

#[test]
fn it_ends_when_it_is_told_to() {
    let Some(turn) = HugePagesTurn::new(RUN_BYTES_MAX) else { return };
    let ram = ram(true);
    ram.regions()[0].fill(&(0..32 * MIB)).unwrap();
    let work = Work::new(ram.regions().to_vec(), 1);
    work.stop.tell();
    assert!(!work.end.within(Duration::ZERO));
    work.collapse_all();
    assert!(work.end.within(Duration::ZERO));
    let blocks = work.so_far();
    let begun = blocks.huge + blocks.sparse + blocks.refused;
    // All at once, or more than one run.
    let _ = turn.has_given(begun * THP_BYTES, RUN_BYTES_MAX);
}
