// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where memory is mapped for a device, and in which pieces, up to sizes that no machine of the tests has: the IOMMU is
//! made up, and only the last test has memory.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeMap;
use std::fs;

use parking_lot::Mutex;

use super::*;
use crate::slot::ZeroingOptions;
use crate::sys::Users;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const AMD: &str = "0x00000000fee00000 0x00000000feefffff msi\n\
                   0x000000fd00000000 0x000000ffffffffff reserved\n";
const INTEL: &str = "0x00000000fee00000 0x00000000feefffff msi\n";

/// A device's directory, behind an IOMMU with these reserved regions.
fn reach(regions: &str) -> HostReach {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("iommu_group")).unwrap();
    fs::write(folder.path().join("iommu_group/reserved_regions"), regions).unwrap();
    HostReach::in_sysfs(folder.path())
}

fn device(high_hole: Option<HighHole>) -> SlotDevice {
    SlotDevice { address: "0000:65:00.0".parse().unwrap(), users: Vec::new(), high_hole }
}

fn zone(size_bytes: u64, pages: SlotPages) -> SlotZone {
    SlotZone { size_bytes, pages, node: None }
}

/// Zone, first address, length and offset in the memfd, in GiB.
fn in_gib(regions: &[PinnedRegion]) -> Vec<(usize, u64, u64, u64)> {
    let gib = |region: &PinnedRegion| {
        let PinnedRegion { zone, gpa, len_bytes, offset } = *region;
        (zone, gpa / GIB, len_bytes / GIB, offset / GIB)
    };
    regions.iter().map(gib).collect()
}

#[test]
fn memory_is_where_a_vm_has_it_around_what_the_iommu_keeps() {
    let placed = |size_bytes, kept: &str, choice| {
        let reach = reach(kept);
        let zones = [zone(size_bytes, SlotPages::Huge1Gib)];
        let regions = regions(&zones, high_hole(&device(choice), &reach)).unwrap();
        (in_gib(&regions), reach.check(&ranges(&regions)).is_ok())
    };
    let below = vec![(0, 0, 3, 0), (0, 4, 1008, 3)];
    let at_tib = |len| [&below[..], &[(0, 1024, len, 1011)]].concat();
    let whole = |len| vec![(0, 0, 3, 0), (0, 4, len, 3)];
    for (size_bytes, kept, choice, expected, reaches) in [
        (512 * GIB, AMD, None, whole(509), true),
        (1011 * GIB, AMD, None, below.clone(), true),
        (1012 * GIB, AMD, None, at_tib(1), true),
        (TIB, AMD, None, at_tib(13), true),
        (2 * TIB, AMD, None, at_tib(1037), true),
        (4 * TIB, AMD, None, at_tib(3085), true),
        (TIB, INTEL, None, whole(1021), true),
        (4 * TIB, INTEL, None, whole(4093), true),
        // As a guest has it that came from elsewhere, or is to go there.
        (4 * TIB, INTEL, Some(HighHole::HyperTransport), at_tib(3085), true),
        (1011 * GIB, AMD, Some(HighHole::Off), below.clone(), true),
        (TIB, AMD, Some(HighHole::Off), whole(1021), false),
    ] {
        let named = format!("{} GiB, {kept:?}, {choice:?}", size_bytes / GIB);
        assert_eq!(placed(size_bytes, kept, choice), (expected, reaches), "{named}");
    }
}

#[test]
fn zones_follow_each_other_around_what_the_iommu_keeps() {
    let zones = [
        zone(2 * TIB, SlotPages::Huge1Gib),
        zone(TIB, SlotPages::Huge2Mib),
        zone(TIB, SlotPages::Small),
    ];
    let hole = high_hole(&device(None), &reach(AMD));
    let regions = regions(&zones, hole).unwrap();
    let expected = [
        (0, 0, 3, 0),
        (0, 4, 1008, 3),
        (0, 1024, 1037, 1011),
        (1, 2061, 1024, 0),
        (2, 3085, 1024, 0),
    ];
    assert_eq!(in_gib(&regions), expected);
    // The layout of the crate `memory` is that of its default but for the hole.
    assert_eq!(hole, Some(RamHole { start: 1012 * GIB, end: TIB }));
    let cut = [zone(2 * MIB, SlotPages::Huge2Mib), zone(4 * GIB, SlotPages::Huge1Gib)];
    assert!(matches!(super::regions(&cut, None), Err(LayoutError::CutPage { .. })));
    assert!(
        shown(&regions).starts_with("0x0-0xc0000000, 0x100000000-0xfd00000000, 0x10000000000-")
    );
}

/// An order that is being carried out.
fn begun() -> PinOrder {
    let order = PinOrder::new(Vec::new());
    order.begin().unwrap();
    order
}

/// What an IOMMU was told, by address.
type Told = Mutex<BTreeMap<u64, PinnedRegion>>;

fn two() -> NonZeroUsize {
    NonZeroUsize::MIN.saturating_add(1)
}

#[test]
fn four_tib_are_mapped_once_in_pieces_of_whole_pages() {
    for (pages, expected) in
        [(SlotPages::Small, 65536), (SlotPages::Huge2Mib, 65536), (SlotPages::Huge1Gib, 4096)]
    {
        let zones = vec![zone(TIB, pages); 4];
        let regions = regions(&zones, high_hole(&device(None), &reach(AMD))).unwrap();
        let told = Told::default();
        let map = |piece: &PinnedRegion| {
            assert_eq!(told.lock().insert(piece.gpa, *piece), None, "mapped twice");
            Ok::<(), ()>(())
        };
        assert_eq!(map_pieces(&zones, &regions, two(), &begun(), map), Ok(true));
        let told = told.into_inner();
        assert_eq!(told.len(), expected, "{pages:?}");
        // In ascending order they are the regions.
        let mut told = told.into_values();
        for region in regions {
            let mut done = 0;
            while done < region.len_bytes {
                let piece = told.next().unwrap();
                assert_eq!(
                    (piece.zone, piece.gpa, piece.offset),
                    (region.zone, region.gpa + done, region.offset + done)
                );
                assert!(piece.len_bytes.is_multiple_of(page_bytes(pages)));
                done += piece.len_bytes;
            }
            assert_eq!(done, region.len_bytes);
        }
        assert_eq!(told.next(), None);
    }
}

#[test]
fn mapping_ends_early_with_an_error_and_when_it_is_stopped() {
    let zones = [zone(4 * TIB, SlotPages::Small)];
    let regions = regions(&zones, None).unwrap();
    let (calls, order) = (AtomicUsize::new(0), begun());
    let failing = |_: &PinnedRegion| {
        if calls.fetch_add(1, Ordering::Relaxed) < 10 { Ok(()) } else { Err("no memory") }
    };
    assert_eq!(map_pieces(&zones, &regions, two(), &order, failing), Err("no memory"));
    assert!(calls.swap(0, Ordering::Relaxed) <= 12);
    let stopping = |_: &PinnedRegion| {
        if calls.fetch_add(1, Ordering::Relaxed) == 10 {
            assert!(order.stop().is_none());
        }
        Ok::<(), ()>(())
    };
    assert_eq!(map_pieces(&zones, &regions, NonZeroUsize::MIN, &order, stopping), Ok(false));
    assert_eq!(calls.load(Ordering::Relaxed), 11);
}

#[test]
fn an_order_that_was_taken_back_is_not_begun() {
    let order = PinOrder::new(Vec::new());
    assert!(!order.is_begun());
    assert!(order.stop().is_some(), "the memory is lost");
    assert!(order.begin().is_none());
    let order = begun();
    assert!(order.is_begun() && !order.is_stopped());
    assert!(order.stop().is_none(), "a worker has the memory");
    assert!(order.is_begun() && order.is_stopped(), "it may have the device");
}

#[test]
fn what_iommufd_has_of_the_memory_keeps_it_from_being_used_again() {
    let memory = SlotMemory::build(&zone(4 * MIB, SlotPages::Small), &ZeroingOptions::unlimited());
    let memory = memory.unwrap();
    let file = memory.lease().unwrap();
    assert_eq!(memory.users(), Users::Others);
    drop(file);
    assert_eq!(memory.users(), Users::OnlyUs);
}
