// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Placement of zones in the guest's physical address space.
//!
//! Owns the rule: zones one after another from address 0, cut at the hole for devices below
//! 4 GiB, and at a second one above, if there is one. Must never depend on the host, or a migrated guest would
//! find its memory elsewhere.

use std::ops::Range;

use crate::PAGE_BYTES;
use crate::config::{Backing, ZoneSpec};

/// Alignment of memory that is added later, unless a layout has another one: the largest unit in which a 64-bit guest adds memory, so
/// that all of it is usable.
pub const LATER_ALIGN_BYTES: u64 = 2 << 30;

/// A range of guest physical addresses without RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamHole {
    /// First address.
    pub start: u64,
    /// First address at which RAM continues.
    pub end: u64,
}

/// Guest physical addresses for RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamLayout {
    /// First guest physical address that is kept free for devices.
    pub hole_start: u64,
    /// First guest physical address at which RAM continues.
    pub hole_end: u64,
    /// A second range without RAM, above the first.
    pub high_hole: Option<RamHole>,
    /// No RAM at or above this guest physical address.
    pub end: u64,
    /// What the start of each zone that is added later is a multiple of.
    pub later_align_bytes: u64,
}

impl Default for RamLayout {
    /// A hole from 3 to 4 GiB and an address space of 52 bits, the most that x86-64 has.
    fn default() -> Self {
        Self {
            hole_start: 0xC000_0000,
            hole_end: 0x1_0000_0000,
            high_hole: None,
            end: 1 << 52,
            later_align_bytes: LATER_ALIGN_BYTES,
        }
    }
}

/// A part of a zone that is contiguous in guest physical addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Index of the zone in the configuration.
    pub zone: usize,
    /// Its guest physical address.
    pub gpa: u64,
    /// Its bytes of the zone.
    pub bytes: Range<u64>,
}

/// Why RAM cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// More RAM than guest physical addresses.
    #[error(
        "memory zone '{id}' does not fit: it would end at guest address {end:#x}, and the guest's \
         address space ends at {limit:#x}"
    )]
    TooLarge {
        /// The zone that exceeds the address space.
        id: String,
        /// Its end (the highest address, if that overflows).
        end: u64,
        /// The end of the address space.
        limit: u64,
    },
    /// The hole would cut a huge page.
    #[error(
        "memory zone '{id}' would be cut at its byte {at:#x} by guest addresses that are kept free of \
         memory, which is not a multiple of its page size, {page_bytes} bytes: put smaller zones \
         behind it"
    )]
    CutPage {
        /// The zone.
        id: String,
        /// Offset of the cut in the zone.
        at: u64,
        /// The zone's page size.
        page_bytes: u64,
    },
    /// The hole is invalid.
    #[error(
        "the guest addresses without memory, {start:#x}..{end:#x}, are not an ordered, page-aligned \
         range above those before"
    )]
    BadHole {
        /// Start of the hole.
        start: u64,
        /// End of the hole.
        end: u64,
    },
}

/// The properties of a zone that determine its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ZoneExtent<'a> {
    pub id: &'a str,
    pub size_bytes: u64,
    pub page_bytes: u64,
    /// It is added block by block: placed after all other zones, aligned for the guest.
    pub comes_later: bool,
}

impl RamLayout {
    /// The ranges without RAM, in order.
    fn holes(&self) -> impl Iterator<Item = RamHole> {
        let low = RamHole { start: self.hole_start, end: self.hole_end };
        std::iter::once(low).chain(self.high_hole)
    }

    fn check_holes(&self) -> Result<(), LayoutError> {
        let mut free_from = 0;
        for RamHole { start, end } in self.holes() {
            let is_of_pages = start.is_multiple_of(4096) && end.is_multiple_of(4096);
            if start < free_from || start > end || !is_of_pages {
                return Err(LayoutError::BadHole { start, end });
            }
            free_from = end;
        }
        Ok(())
    }

    /// The first address from `gpa` on that may be RAM, and how many bytes there are from it to the next hole.
    fn room_from(&self, gpa: u64) -> (u64, u64) {
        let mut gpa = gpa;
        for hole in self.holes() {
            if (hole.start..hole.end).contains(&gpa) {
                gpa = hole.end;
            }
        }
        let next = self.holes().map(|hole| hole.start).find(|start| gpa < *start);
        (gpa, next.map_or(u64::MAX, |start| start - gpa))
    }

    /// Where the parts of zones are, by ascending guest address, without a look at the host: hugetlb pages of its
    /// default size are taken for small ones.
    ///
    /// # Errors
    /// They do not fit, or a page would be cut.
    pub fn place_zones(&self, zones: &[ZoneSpec]) -> Result<Vec<Placement>, LayoutError> {
        let page_bytes = |index: usize| match zones.get(index).map(|zone| &zone.backing) {
            Some(Backing::Hugetlb { page_size }) => page_size.bytes().unwrap_or(PAGE_BYTES),
            _ => PAGE_BYTES,
        };
        self.place(&extents(zones, page_bytes))
    }

    pub(crate) fn place(&self, zones: &[ZoneExtent<'_>]) -> Result<Vec<Placement>, LayoutError> {
        self.check_holes()?;
        let mut placed = Vec::new();
        let mut gpa = 0;
        let (later, now): (Vec<_>, Vec<_>) =
            zones.iter().enumerate().partition(|(_, zone)| zone.comes_later);
        for (index, zone) in now {
            gpa = self.place_zone(index, zone, gpa, &mut placed)?;
        }
        for (index, zone) in later {
            let start = self.place_of_later(zone, gpa).unwrap_or(u64::MAX);
            gpa = self.place_zone(index, zone, start, &mut placed)?;
        }
        Ok(placed)
    }

    /// Where a zone that is added later begins: in one piece, as one device gives it to the guest.
    fn place_of_later(&self, zone: &ZoneExtent<'_>, after_gpa: u64) -> Option<u64> {
        let aligned = |gpa: u64| gpa.checked_next_multiple_of(self.later_align_bytes);
        let (gpa, room) = self.room_from(aligned(after_gpa.max(self.hole_end))?);
        let fits = room >= zone.size_bytes && gpa.is_multiple_of(self.later_align_bytes);
        if fits { Some(gpa) } else { aligned(gpa.max(self.high_hole?.end)) }
    }

    /// Places one zone from `gpa` on; returns where the next one begins.
    fn place_zone(
        &self,
        index: usize,
        zone: &ZoneExtent<'_>,
        mut gpa: u64,
        placed: &mut Vec<Placement>,
    ) -> Result<u64, LayoutError> {
        let mut at = 0;
        while at < zone.size_bytes {
            let left = zone.size_bytes - at;
            let (start, room) = self.room_from(gpa);
            gpa = start;
            let len = left.min(room);
            if len < left && !(at + len).is_multiple_of(zone.page_bytes) {
                let (id, page_bytes) = (zone.id.to_owned(), zone.page_bytes);
                return Err(LayoutError::CutPage { id, at: at + len, page_bytes });
            }
            let end = gpa.checked_add(len);
            if end.is_none_or(|end| end > self.end) {
                let (id, end) = (zone.id.to_owned(), end.unwrap_or(u64::MAX));
                return Err(LayoutError::TooLarge { id, end, limit: self.end });
            }
            placed.push(Placement { zone: index, gpa, bytes: at..at + len });
            gpa += len;
            at += len;
        }
        Ok(gpa)
    }
}

/// The properties of zones, whose pages have `page_bytes` each.
pub(crate) fn extents(
    zones: &[ZoneSpec],
    page_bytes: impl Fn(usize) -> u64,
) -> Vec<ZoneExtent<'_>> {
    let mut extents = Vec::new();
    for (index, zone) in zones.iter().enumerate() {
        let (size_bytes, page_bytes) = (zone.size_bytes, page_bytes(index));
        let comes_later = zone.block_bytes.is_some();
        extents.push(ZoneExtent { id: &zone.id, size_bytes, page_bytes, comes_later });
    }
    extents
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;
    use crate::HugePageSize;

    const GIB: u64 = 1 << 30;

    fn zone(id: &str, size_bytes: u64, page_bytes: u64) -> ZoneExtent<'_> {
        ZoneExtent { id, size_bytes, page_bytes, comes_later: false }
    }

    #[test]
    fn one_zone_is_cut_at_the_hole() {
        let placed = RamLayout::default().place(&[zone("a", 8 * GIB, 4096)]).unwrap();
        let low = Placement { zone: 0, gpa: 0, bytes: 0..3 * GIB };
        let high = Placement { zone: 0, gpa: 4 * GIB, bytes: 3 * GIB..8 * GIB };
        assert_eq!(placed, [low, high]);
    }

    #[test]
    fn a_zone_that_ends_at_the_hole_is_not_cut() {
        let zones = [zone("a", 3 * GIB, GIB), zone("b", 4096, 4096)];
        let placed = RamLayout::default().place(&zones).unwrap();
        let first = Placement { zone: 0, gpa: 0, bytes: 0..3 * GIB };
        let second = Placement { zone: 1, gpa: 4 * GIB, bytes: 0..4096 };
        assert_eq!(placed, [first, second]);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let layout = RamLayout { end: 16 * GIB, ..RamLayout::default() };
        let error = layout.place(&[zone("a", GIB, 4096), zone("big", 15 * GIB, 4096)]).unwrap_err();
        assert!(error.to_string().contains("'big'"), "{error}");
        let all = layout.place(&[zone("a", u64::MAX - 4095, 4096)]);
        assert!(matches!(all, Err(LayoutError::TooLarge { .. })));
        assert!(layout.place(&[zone("a", 15 * GIB, 4096)]).is_ok());
        assert!(layout.place(&[zone("a", 15 * GIB + 4096, 4096)]).is_err());
    }

    #[test]
    fn huge_pages_are_not_cut() {
        let zones = [zone("a", 4096, 4096), zone("b", 4 * GIB, 2 << 20)];
        let error = RamLayout::default().place(&zones).unwrap_err();
        assert!(matches!(error, LayoutError::CutPage { ref id, .. } if id == "b"), "{error}");
    }

    #[test]
    fn what_comes_later_is_aligned_as_the_layout_says() {
        let layout = RamLayout { later_align_bytes: 128 << 20, ..RamLayout::default() };
        let later = ZoneExtent { comes_later: true, ..zone("later", GIB, 4096) };
        let now = zone("now", 3 * GIB + (200 << 20), 4096);
        let placed = layout.place(&[now, later]).unwrap();
        assert_eq!(placed.last().unwrap().gpa, 4 * GIB + (256 << 20));
    }

    #[test]
    fn what_comes_later_lies_behind_everything_and_aligned() {
        let later = |id| ZoneExtent { comes_later: true, ..zone(id, GIB, 4096) };
        let zones = [zone("a", GIB, 4096), later("l"), zone("b", 5 * GIB, 4096), later("m")];
        let placed = RamLayout::default().place(&zones).unwrap();
        let at: Vec<_> = placed.iter().map(|piece| (piece.zone, piece.gpa / GIB)).collect();
        assert_eq!(at, [(0, 0), (2, 1), (2, 4), (1, 8), (3, 10)]);
        let small = RamLayout::default().place(&[zone("a", GIB, 4096), later("l")]).unwrap();
        assert_eq!(small.last().map(|piece| piece.gpa), Some(4 * GIB));
        let layout = RamLayout { end: 9 * GIB, ..RamLayout::default() };
        assert!(layout.place(&zones).is_err());
    }

    #[test]
    fn a_mad_hole_is_refused() {
        for (hole_start, hole_end) in [(2, 4096), (8192, 4096), (4096, 8193)] {
            let layout = RamLayout { hole_start, hole_end, ..RamLayout::default() };
            assert!(matches!(layout.place(&[]), Err(LayoutError::BadHole { .. })));
        }
        for (start, end) in [(2 * GIB, 8 * GIB), (8 * GIB, 7 * GIB), (8 * GIB + 1, 9 * GIB)] {
            let layout =
                RamLayout { high_hole: Some(RamHole { start, end }), ..RamLayout::default() };
            assert!(matches!(layout.place(&[]), Err(LayoutError::BadHole { .. })), "{start:#x}");
        }
    }

    /// As on hosts with AMD's IOMMU: the last 12 GiB below 1 TiB.
    const HIGH_HOLE: RamHole = RamHole { start: 1012 * GIB, end: 1024 * GIB };

    fn split() -> RamLayout {
        RamLayout { high_hole: Some(HIGH_HOLE), ..RamLayout::default() }
    }

    /// Where a zone of so many GiB is: first address and length of each part, in GiB.
    fn parts(layout: RamLayout, size_gib: u64) -> Vec<(u64, u64)> {
        let placed = layout.place(&[zone("a", size_gib * GIB, GIB)]).unwrap();
        let part = |part: &Placement| (part.gpa / GIB, (part.bytes.end - part.bytes.start) / GIB);
        placed.iter().map(part).collect()
    }

    #[test]
    fn memory_that_reaches_the_high_hole_continues_behind_it() {
        let (whole, split) = (RamLayout::default(), split());
        assert_eq!(parts(whole, 512), [(0, 3), (4, 509)]);
        assert_eq!(parts(split, 512), [(0, 3), (4, 509)]);
        // One GiB is missing below 4 GiB, so 1011 GiB fit below.
        assert_eq!(parts(split, 1011), [(0, 3), (4, 1008)]);
        assert_eq!(parts(whole, 1012), [(0, 3), (4, 1009)]);
        assert_eq!(parts(split, 1012), [(0, 3), (4, 1008), (1024, 1)]);
        assert_eq!(parts(whole, 1024), [(0, 3), (4, 1021)]);
        assert_eq!(parts(split, 1024), [(0, 3), (4, 1008), (1024, 13)]);
        assert_eq!(parts(whole, 4096), [(0, 3), (4, 4093)]);
        assert_eq!(parts(split, 4096), [(0, 3), (4, 1008), (1024, 3085)]);
    }

    #[test]
    fn zones_are_placed_as_memory_of_them_is_made() {
        let huge = |id: &str, size_gib: u64, page_size| {
            let backing = Backing::Hugetlb { page_size };
            ZoneSpec { backing, ..ZoneSpec::new(id, size_gib * GIB) }
        };
        let zones = [
            huge("a", 2048, HugePageSize::Gib1),
            huge("b", 1024, HugePageSize::Mib2),
            ZoneSpec::new("c", 1024 * GIB),
        ];
        let placed = split().place_zones(&zones).unwrap();
        let at = placed.iter().map(|part| (part.zone, part.gpa / GIB, part.bytes.start / GIB));
        let expected = [(0, 0, 0), (0, 4, 3), (0, 1024, 1011), (1, 2061, 0), (2, 3085, 0)];
        assert_eq!(at.collect::<Vec<_>>(), expected);
        let end = placed.last().map(|part| part.gpa + part.bytes.end - part.bytes.start);
        assert_eq!(end, Some((4096 + 1 + 12) * GIB));
        let cut = [ZoneSpec::new("small", 2 << 20), huge("huge", 4, HugePageSize::Gib1)];
        let error = split().place_zones(&cut).unwrap_err();
        assert!(matches!(error, LayoutError::CutPage { ref id, .. } if id == "huge"), "{error}");
    }

    #[test]
    fn zones_follow_each_other_around_the_high_hole() {
        let zones = [zone("a", 1011 * GIB, GIB), zone("b", 512 * GIB, GIB)];
        let placed = split().place(&zones).unwrap();
        let at: Vec<_> = placed.iter().map(|piece| (piece.zone, piece.gpa / GIB)).collect();
        assert_eq!(at, [(0, 0), (0, 4), (1, 1024)]);
        let odd = split().place(&[zone("a", 4096, 4096), zone("b", 1024 * GIB, 4096)]).unwrap();
        assert_eq!(odd.last().map(|piece| piece.gpa), Some(HIGH_HOLE.end));
        let zones = [zone("a", 3 * GIB + 4096, 4096), zone("huge", 1024 * GIB, 2 << 20)];
        let error = split().place(&zones).unwrap_err();
        assert!(matches!(error, LayoutError::CutPage { ref id, .. } if id == "huge"), "{error}");
        let small = RamLayout { end: 1 << 40, ..split() };
        let error = small.place(&[zone("a", 1012 * GIB, GIB)]).unwrap_err();
        assert!(matches!(error, LayoutError::TooLarge { end, .. } if end == 1025 * GIB), "{error}");
    }

    #[test]
    fn what_comes_later_is_never_cut() {
        let later =
            |id, size_gib: u64| ZoneExtent { comes_later: true, ..zone(id, size_gib * GIB, GIB) };
        let at = |layout: RamLayout, zones: &[ZoneExtent<'_>]| -> Vec<(usize, u64)> {
            let placed = layout.place(zones).unwrap();
            placed.iter().map(|piece| (piece.zone, piece.gpa / GIB)).collect()
        };
        let zones = [zone("a", GIB, GIB), later("l", 1000), later("m", 12), later("n", 2)];
        assert_eq!(at(RamLayout::default(), &zones), [(0, 0), (1, 4), (2, 1004), (3, 1016)]);
        assert_eq!(at(split(), &zones), [(0, 0), (1, 4), (2, 1024), (3, 1036)]);
        // It ends where the hole begins, and the next begins inside.
        let zones = [zone("a", GIB, GIB), later("l", 1008), later("m", 1)];
        assert_eq!(at(split(), &zones), [(0, 0), (1, 4), (2, 1024)]);
        let zones = [zone("a", GIB, GIB), later("l", 2048)];
        assert_eq!(at(split(), &zones), [(0, 0), (1, 1024)]);
    }

    proptest! {
        #[test]
        fn pieces_cover_each_zone_once_and_never_the_hole(
            pages in prop::collection::vec(1..40_u64, 1..8),
            hole in (0..100_u64, 0..50_u64),
            high in prop::option::of((0..100_u64, 0..50_u64)),
        ) {
            let hole = hole.0 * 4096..(hole.0 + hole.1) * 4096;
            let high_hole = high.map(|(after, pages)| {
                let start = hole.end + after * 4096;
                RamHole { start, end: start + pages * 4096 }
            });
            let layout = RamLayout {
                hole_start: hole.start,
                hole_end: hole.end,
                high_hole,
                ..RamLayout::default()
            };
            let zones: Vec<_> = pages.iter().map(|n| zone("z", n * 4096, 4096)).collect();
            let placed = layout.place(&zones).unwrap();
            let mut next_gpa = 0;
            let mut sizes = vec![0; zones.len()];
            for piece in &placed {
                let len = piece.bytes.end - piece.bytes.start;
                prop_assert!(len > 0 && piece.gpa >= next_gpa);
                next_gpa = piece.gpa + len;
                for hole in layout.holes().filter(|hole| hole.start < hole.end) {
                    prop_assert!(next_gpa <= hole.start || piece.gpa >= hole.end);
                }
                prop_assert_eq!(piece.bytes.start, sizes[piece.zone]);
                sizes[piece.zone] += len;
            }
            let wanted: Vec<u64> = zones.iter().map(|zone| zone.size_bytes).collect();
            prop_assert_eq!(sizes, wanted);
        }
    }
}
