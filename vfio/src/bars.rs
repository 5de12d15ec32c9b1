// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The BARs of a host function: which a guest sees, and which parts it reaches without an exit.
//!
//! Owns the arithmetic. Every access to an I/O BAR leaves the guest: ports cannot be mapped.

use std::ops::Range;

use super::capabilities::double_word;
use super::config::MsixLayout;
use super::host::{HostBar, HostFunction};
use pci::ENTRY_LEN_BYTES;
use pci::{BAR_PORTS_LENS, BARS_COUNT, register};
use pci::{BarDescription, BarKind};

/// Granularity of memory slots and of host mappings.
const PAGE_BYTES: u64 = 4096;
const BAR_IS_IO: u32 = 1;
const BAR_TYPE_MASK: u32 = 0b110;
const BAR_TYPE_64: u32 = 0b100;
const BAR_PREFETCHABLE: u32 = 1 << 3;

/// The BARs of a function, from its configuration space and from VFIO's region sizes.
pub fn describe(config: &[u8], host: &dyn HostFunction) -> Vec<BarDescription> {
    let mut bars = Vec::new();
    let mut index = 0;
    while index < BARS_COUNT {
        let flags = double_word(config, register::BAR0 + u16::from(index) * 4).unwrap_or(0);
        let kind = match flags & (BAR_IS_IO | BAR_TYPE_MASK) {
            BAR_TYPE_64 if index + 1 < BARS_COUNT => BarKind::Memory64,
            flags if flags & BAR_IS_IO != 0 => BarKind::Ports,
            _ => BarKind::Memory32,
        };
        let len_bytes = host.bar(index).map_or(0, |bar| bar.len_bytes);
        // An I/O BAR larger than PCI allows is left out, as the function is usable without it.
        let is_shown = kind != BarKind::Ports
            || len_bytes.is_power_of_two() && BAR_PORTS_LENS.contains(&len_bytes);
        if len_bytes > 0 && is_shown {
            let prefetchable = kind != BarKind::Ports && flags & BAR_PREFETCHABLE != 0;
            bars.push(BarDescription { index, kind, prefetchable, len_bytes });
        }
        index += kind.registers_count();
    }
    bars
}

/// The parts of BARs that hold the MSI-X table and pending bits; trapped, to whole pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsixRanges {
    /// BAR and byte range of the table.
    pub table: (u8, Range<u64>),
    /// BAR and byte range of the pending bits.
    pub pending: (u8, Range<u64>),
}

impl MsixRanges {
    /// The ranges of a layout; `None` if they are outside the BARs or overlap.
    pub fn of(layout: &MsixLayout, bars: &[BarDescription]) -> Option<Self> {
        let count = u64::from(layout.count);
        let range = |bar: u8, offset: u32, len_bytes: u64| {
            let description = bars.iter().find(|description| description.index == bar)?;
            let range = u64::from(offset)..u64::from(offset) + len_bytes;
            (range.end <= description.len_bytes).then_some((bar, range))
        };
        let table = range(layout.table_bar, layout.table_offset, count * ENTRY_LEN_BYTES)?;
        let pending = range(layout.pending_bar, layout.pending_offset, count.div_ceil(64) * 8)?;
        let apart = table.0 != pending.0
            || table.1.end <= pending.1.start
            || pending.1.end <= table.1.start;
        apart.then_some(Self { table, pending })
    }

    fn of_bar(&self, index: u8) -> impl Iterator<Item = &Range<u64>> {
        [&self.table, &self.pending]
            .into_iter()
            .filter_map(move |(bar, range)| (*bar == index).then_some(range))
    }
}

/// The parts of a BAR that the guest can access directly: what the host can map, except the pages with
/// MSI-X structures. Ordered, disjoint, whole pages.
pub fn direct_areas(index: u8, bar: &HostBar, msix: Option<&MsixRanges>) -> Vec<Range<u64>> {
    let mut areas: Vec<Range<u64>> = Vec::new();
    let mut mappable: Vec<Range<u64>> = bar
        .mappable
        .iter()
        .map(|area| area.start.next_multiple_of(PAGE_BYTES)..area.end.min(bar.len_bytes))
        .map(|area| area.start..area.end - area.end % PAGE_BYTES)
        .filter(|area| area.start < area.end)
        .collect();
    mappable.sort_by_key(|area| area.start);
    for area in mappable {
        let start = areas.last().map_or(area.start, |last| area.start.max(last.end));
        if start < area.end {
            areas.push(start..area.end);
        }
    }
    for trapped in msix.into_iter().flat_map(|msix| msix.of_bar(index)) {
        let trapped = trapped.start - trapped.start % PAGE_BYTES
            ..trapped.end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(trapped.end);
        areas = areas
            .into_iter()
            .flat_map(|area| {
                let before = area.start..area.end.min(trapped.start);
                let after = area.start.max(trapped.end)..area.end;
                [before, after]
            })
            .filter(|area| area.start < area.end)
            .collect();
    }
    areas
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "lists of one range are what is tested")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bars() -> Vec<BarDescription> {
        [(0, 0x4000), (3, 0x1000)]
            .map(|(index, len_bytes)| BarDescription {
                index,
                kind: BarKind::Memory32,
                prefetchable: false,
                len_bytes,
            })
            .to_vec()
    }

    fn layout(count: u16, table: (u8, u32), pending: (u8, u32)) -> MsixLayout {
        MsixLayout {
            offset: 0x50,
            count,
            table_bar: table.0,
            table_offset: table.1,
            pending_bar: pending.0,
            pending_offset: pending.1,
        }
    }

    #[test]
    fn the_pages_of_msix_are_kept_back() {
        let msix = MsixRanges::of(&layout(65, (0, 0x2000), (0, 0x3000)), &bars());
        let bar = HostBar { len_bytes: 0x4000, mappable: vec![0..0x4000] };
        assert_eq!(direct_areas(0, &bar, msix.as_ref()), [0..0x2000]);
        assert_eq!(direct_areas(3, &bar, msix.as_ref()), [0..0x4000], "another BAR");
        assert_eq!(direct_areas(0, &bar, None), [0..0x4000]);
        let msix = MsixRanges::of(&layout(4, (0, 0x1010), (3, 0)), &bars());
        assert_eq!(direct_areas(0, &bar, msix.as_ref()), [0..0x1000, 0x2000..0x4000]);
    }

    #[test]
    fn impossible_places_of_msix_are_refused() {
        for bad in [
            layout(65, (1, 0), (0, 0x3000)),
            layout(65, (3, 0xff0), (0, 0)),
            layout(65, (0, 0), (0, 0x3ff8)),
            layout(65, (0, 0), (0, 0x400)),
            layout(2048, (3, 0), (0, 0)),
            layout(1, (0, !7), (0, 0)),
        ] {
            assert_eq!(MsixRanges::of(&bad, &bars()), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn areas_are_mappable_pages_and_never_msix(
            mappable in prop::collection::vec((0_u64..0x6000, 0_u64..0x3000), 0..4),
            table in 0_u32..0x4000,
            pending in 0_u32..0x4000,
            count in 1_u16..200,
        ) {
            let mappable: Vec<_> = mappable.into_iter().map(|(start, len)| start..start + len).collect();
            let bar = HostBar { len_bytes: 0x4000, mappable: mappable.clone() };
            let msix = MsixRanges::of(&layout(count, (0, table & !7), (0, pending & !7)), &bars());
            let areas = direct_areas(0, &bar, msix.as_ref());
            for area in &areas {
                prop_assert!(area.start < area.end && area.end <= bar.len_bytes);
                prop_assert!(area.start % PAGE_BYTES == 0 && area.end % PAGE_BYTES == 0);
                for page in area.clone().step_by(0x1000) {
                    prop_assert!(mappable.iter().any(|m| m.start <= page && page + PAGE_BYTES <= m.end));
                }
                for range in msix.iter().flat_map(|msix| msix.of_bar(0)) {
                    prop_assert!(range.end <= area.start || area.end <= range.start);
                }
            }
            prop_assert!(areas.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
