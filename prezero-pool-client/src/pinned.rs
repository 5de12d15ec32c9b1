// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages about memory that a passed-through device is ready to reach: their form on the wire.
//!
//! Owns encoding and decoding, and the rule by which regions are cut into the pieces that are mapped. Must never know what an IOMMU is: the numbers of its objects are passed on.
//!
//! ```text
//!   TakePinned     size u64 | pages u8 | 0 x 3 | node u32 | start of the hole u64 | its end u64
//!                  | segment u16 | bus u8 | device and function u8 | 0 u32
//!   GrantedPinned  size u64 | pages u8 | 0 x 7 | piece u64 | device u32 | space u32 | table u32
//!                  | regions u32 | for each region: gpa u64 | length u64 | offset in the memfd u64
//! ```
//!
//! Three descriptors come with the answer, one each with its header, its next bytes and its rest: the
//! memfd, the iommufd, the device.

use pci_address::Bdf;

use crate::frame::{Kind, ProtocolError, check_zero, field, message, split};
use crate::pages::{ANY_NODE, PagesWanted, SlotPages, known};

/// Regions of a VM's memory: below the hole for devices and above it, and a few to spare.
const REGIONS_MAX: usize = 8;
const REGION_BYTES: usize = 24;
/// The smallest page of the host, and so the smallest piece.
const PAGE_BYTES: u64 = 4096;
const GRANT_BYTES_FIXED: usize = 40;
const TAKE_BYTES: usize = 40;

pub(crate) const TAKE_PINNED: Kind = Kind { number: 4, has_length: |len| len == TAKE_BYTES };
pub(crate) const GRANTED_PINNED: Kind = Kind { number: 5, has_length: is_grant_length };

/// Asks for the memory of a VM, ready for a device, and for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakePinned {
    /// All memory that the VM has; exactly so much.
    pub size_bytes: u64,
    /// Of such pages.
    pub pages: PagesWanted,
    /// On this NUMA node of the host.
    pub node: Option<u32>,
    /// First guest physical address that has no memory, below 4 GiB.
    pub hole_start: u64,
    /// Where memory continues.
    pub hole_end: u64,
    /// Which device.
    pub device: Bdf,
}

/// A part of the memory, and where the device finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedRegion {
    /// First guest physical address.
    pub gpa: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Where in the memfd it begins.
    pub offset: u64,
}

/// What comes with memory that a device is ready to reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedGrant {
    /// How long the memfd is: what was asked for.
    pub size_bytes: u64,
    /// What it consists of.
    pub pages: SlotPages,
    /// Each mapping has this length (or that of a page, if it is longer), but for the last of a region.
    pub piece_bytes: u64,
    /// The device's number in the iommufd.
    pub device_id: u32,
    /// The address space's number there.
    pub space_id: u32,
    /// The number there of the page table that is filled.
    pub table_id: u32,
    /// What is mapped, in ascending order.
    pub regions: Vec<PinnedRegion>,
}

/// The pieces in which a region is mapped, of pages of `page_bytes`, as regions of their own.
pub fn pieces(
    region: PinnedRegion,
    piece_bytes: u64,
    page_bytes: u64,
) -> impl Iterator<Item = PinnedRegion> {
    let step = piece_bytes.max(page_bytes).max(1);
    let mut at = 0;
    std::iter::from_fn(move || {
        let len_bytes = step.min(region.len_bytes - at);
        let (gpa, offset) = (region.gpa.checked_add(at)?, region.offset.checked_add(at)?);
        at += len_bytes;
        (len_bytes > 0).then_some(PinnedRegion { gpa, len_bytes, offset })
    })
}

impl TakePinned {
    /// As it goes over the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = self.size_bytes.to_le_bytes().to_vec();
        body.extend([self.pages as u8, 0, 0, 0]);
        body.extend(self.node.unwrap_or(ANY_NODE).to_le_bytes());
        body.extend(self.hole_start.to_le_bytes());
        body.extend(self.hole_end.to_le_bytes());
        body.extend(self.device.segment().to_le_bytes());
        // The bus, then the device and the function in one byte.
        body.extend(self.device.routing_id().to_be_bytes());
        body.extend([0; 4]);
        message(&TAKE_PINNED, &body)
    }

    /// The request at the start of `bytes` and its length; `None` if it is not all there.
    ///
    /// # Errors
    /// What is there is no such request.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        let Some((kind, body, whole)) = split(bytes, &[&TAKE_PINNED])? else {
            return Ok(None);
        };
        let size_bytes = u64::from_le_bytes(field(body, 0));
        let [pages, rest @ ..] = field::<4>(body, 8);
        check_zero(kind, &rest)?;
        let node = u32::from_le_bytes(field(body, 12));
        let pages = known(&PagesWanted::ALL, kind, pages)?;
        let (hole_start, hole_end) =
            (u64::from_le_bytes(field(body, 16)), u64::from_le_bytes(field(body, 24)));
        let segment = u16::from_le_bytes(field(body, 32));
        let device = Bdf::from_routing_id(segment, u16::from_be_bytes(field(body, 34)));
        check_zero(kind, &field::<4>(body, 36))?;
        for (what, value, is_good) in [
            ("size", size_bytes, size_bytes > 0),
            ("end of the hole", hole_end, hole_start <= hole_end),
        ] {
            if !is_good {
                return Err(ProtocolError::Value { kind, what, value });
            }
        }
        let node = (node != ANY_NODE).then_some(node);
        Ok(Some((Self { size_bytes, pages, node, hole_start, hole_end, device }, whole)))
    }
}

fn is_grant_length(len: usize) -> bool {
    len.checked_sub(GRANT_BYTES_FIXED).is_some_and(|regions| {
        regions.is_multiple_of(REGION_BYTES) && regions <= REGIONS_MAX * REGION_BYTES
    })
}

impl PinnedGrant {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = self.size_bytes.to_le_bytes().to_vec();
        body.extend([self.pages as u8, 0, 0, 0, 0, 0, 0, 0]);
        body.extend(self.piece_bytes.to_le_bytes());
        let count = u32::try_from(self.regions.len()).unwrap_or(u32::MAX);
        for number in [self.device_id, self.space_id, self.table_id, count] {
            body.extend(number.to_le_bytes());
        }
        for region in &self.regions {
            for number in [region.gpa, region.len_bytes, region.offset] {
                body.extend(number.to_le_bytes());
            }
        }
        message(&GRANTED_PINNED, &body)
    }

    pub(crate) fn of_body(kind: u16, body: &[u8]) -> Result<Self, ProtocolError> {
        let size_bytes = u64::from_le_bytes(field(body, 0));
        let [pages, rest @ ..] = field::<8>(body, 8);
        check_zero(kind, &rest)?;
        let pages = known(&SlotPages::ALL, kind, pages)?;
        let piece_bytes = u64::from_le_bytes(field(body, 16));
        let [device_id, space_id, table_id, count] =
            [24, 28, 32, 36].map(|at| u32::from_le_bytes(field(body, at)));
        let wrong = |what, value| Err(ProtocolError::Value { kind, what, value });
        if !piece_bytes.is_power_of_two() || piece_bytes < PAGE_BYTES {
            return wrong("piece", piece_bytes);
        }
        let rest = body.get(GRANT_BYTES_FIXED..).unwrap_or_default();
        let regions: Vec<_> = rest
            .chunks_exact(REGION_BYTES)
            .map(|bytes| {
                let [gpa, len_bytes, offset] =
                    [0, 8, 16].map(|at| u64::from_le_bytes(field(bytes, at)));
                PinnedRegion { gpa, len_bytes, offset }
            })
            .collect();
        if usize::try_from(count) != Ok(regions.len()) {
            return wrong("number of regions", count.into());
        }
        // All of the memory, once, at addresses that rise.
        let (mut next_gpa, mut next_offset) = (0, 0);
        for region in &regions {
            let end = region.gpa.checked_add(region.len_bytes);
            let (Some(end), true) = (end, region.gpa >= next_gpa && region.len_bytes > 0) else {
                return wrong("address of a region", region.gpa);
            };
            if region.offset != next_offset || region.len_bytes > size_bytes - next_offset {
                return wrong("offset of a region", region.offset);
            }
            (next_gpa, next_offset) = (end, next_offset + region.len_bytes);
        }
        if next_offset != size_bytes || size_bytes == 0 {
            return wrong("size", size_bytes);
        }
        Ok(Self { size_bytes, pages, piece_bytes, device_id, space_id, table_id, regions })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;
    use crate::protocol::{MESSAGE_BYTES_MAX, Reply, Request};

    const GIB: u64 = 1 << 30;

    fn take() -> TakePinned {
        TakePinned {
            size_bytes: 4 * GIB,
            pages: PagesWanted::Small,
            node: Some(1),
            hole_start: 3 * GIB,
            hole_end: 4 * GIB,
            device: "0000:65:1f.7".parse().unwrap(),
        }
    }

    fn grant() -> PinnedGrant {
        let region = |gpa, len_bytes, offset| PinnedRegion { gpa, len_bytes, offset };
        PinnedGrant {
            size_bytes: 4 * GIB,
            pages: SlotPages::Huge2Mib,
            piece_bytes: 64 << 20,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: vec![region(0, 3 * GIB, 0), region(4 * GIB, GIB, 3 * GIB)],
        }
    }

    #[test]
    fn the_device_is_segment_bus_and_devfn_on_the_wire() {
        let device = "10af:65:1f.7".parse().unwrap();
        let bytes = TakePinned { device, ..take() }.encode();
        let at = crate::HEADER_BYTES + 32;
        assert_eq!(bytes[at..at + 8], [0xaf, 0x10, 0x65, 0xff, 0, 0, 0, 0]);
    }

    #[test]
    fn both_survive_the_wire_and_are_awaited_to_their_last_byte() {
        let bytes = Request::TakePinned(take()).encode();
        for len in 0..bytes.len() {
            assert_eq!(Request::decode(&bytes[..len]), Ok(None), "{len} bytes");
        }
        assert_eq!(Request::decode(&bytes), Ok(Some((Request::TakePinned(take()), bytes.len()))));
        let bytes = Reply::GrantedPinned(grant()).encode();
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        for len in 0..bytes.len() {
            assert_eq!(Reply::decode(&bytes[..len]), Ok(None), "{len} bytes");
        }
        let there = Reply::decode(&bytes).unwrap();
        assert_eq!(there, Some((Reply::GrantedPinned(grant()), bytes.len())));
    }

    #[test]
    fn regions_that_are_not_the_memory_are_refused() {
        let refused = |change: fn(&mut PinnedGrant)| {
            let mut grant = grant();
            change(&mut grant);
            Reply::decode(&grant.encode()).is_err()
        };
        assert!(!refused(|_| ()));
        assert!(refused(|grant| grant.regions.clear()));
        assert!(refused(|grant| grant.regions[1].gpa = GIB), "one in the other");
        assert!(refused(|grant| grant.regions[1].gpa = u64::MAX));
        assert!(refused(|grant| grant.regions[1].offset = 0), "the same memory twice");
        assert!(refused(|grant| grant.regions[1].len_bytes = 2 * GIB), "more than there is");
        assert!(refused(|grant| grant.size_bytes = 5 * GIB), "a part of the memory left out");
        assert!(refused(|grant| grant.piece_bytes = 0));
        assert!(refused(|grant| grant.regions = vec![grant.regions[0]; 9]));
    }

    #[test]
    fn a_hole_that_ends_before_it_begins_is_refused() {
        let wrong = TakePinned { hole_end: 2 * GIB, ..take() };
        assert!(Request::decode(&wrong.encode()).is_err());
        assert!(Request::decode(&TakePinned { size_bytes: 0, ..take() }.encode()).is_err());
    }

    proptest! {
        #[test]
        fn pieces_are_the_region(
            gpa in 0_u64..1 << 40, pages in 1_u64..5000, piece in 12_u32..30, offset in 0_u64..1 << 40,
        ) {
            let region = PinnedRegion { gpa, len_bytes: pages * 4096, offset };
            let mut next = 0;
            for part in pieces(region, 1 << piece, 4096) {
                prop_assert_eq!((part.gpa, part.offset), (gpa + next, offset + next));
                prop_assert!(part.len_bytes > 0 && part.len_bytes <= 1 << piece);
                next += part.len_bytes;
                prop_assert!(next == region.len_bytes || next.is_multiple_of(1 << piece));
            }
            prop_assert_eq!(next, region.len_bytes);
        }

        #[test]
        fn an_altered_grant_is_refused_or_is_the_memory(at in 16_usize..104, value: u8) {
            let mut bytes = Reply::GrantedPinned(grant()).encode();
            bytes[at] = value;
            if let Ok(Some((Reply::GrantedPinned(grant), _))) = Reply::decode(&bytes) {
                let all: u64 = grant.regions.iter().map(|region| region.len_bytes).sum();
                prop_assert_eq!(all, grant.size_bytes);
            }
        }
    }
}
