// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages about memory that a passed-through device is ready to reach: their form on the wire.
//!
//! Owns encoding and decoding, and the rule by which regions are cut into the pieces that are mapped. Must never know what an IOMMU is: the numbers of its objects are passed on.
//!
//! ```text
//!   TakePinned     devices u8 | zones u8 | regions u8 | 0 | for each device: its address
//!                  | for each zone: size u64 | pages u8 | 0 x 3 | node u32
//!                  | for each region: gpa u64 | length u64
//!   Release        size u64 | pages u8 | 0 x 3 | node u32 | 0 x 16 | address of the device | 0 u32
//!   GrantedPinned  zones u8 | regions u8 | 0 u16 | address of the device | device u32 | space u32 | table u32 | 0 u32
//!                  | piece u64 | for each zone: size u64 | pages u8 | 0 x 7
//!                  | for each region: gpa u64 | length u64
//!   address        segment u16 | bus u8 | device and function u8
//! ```
//!
//! Regions hold the zones one after another: where one of them begins in a memfd follows from those before. For each
//! zone a descriptor comes with the answer, its memfd, then the iommufd and the device: the first with the header, each
//! other one with as many bytes after it, and the last with the rest.
//!
//! Release is how earlier versions asked for memory of one zone. Their VMMs still send it, and it is the one message by
//! which their pools release a device: who asks for a single page is refused the slot, and finds its device free.

use pci_address::Bdf;

use crate::frame::{HEADER_BYTES, Kind, ProtocolError, check_zero, field, message, split};
use crate::pages::{ANY_NODE, PagesWanted, SlotPages, known};

/// Zones of a VM whose memory is mapped in advance: hosts have fewer NUMA nodes.
pub const ZONES_MAX: usize = 16;
/// Regions of that memory: one for each zone, and one more for each hole that cuts a zone.
const REGIONS_MAX: usize = ZONES_MAX + 2;
/// Devices of a VM that a request names.
pub const DEVICES_MAX: usize = 32;
const REGION_BYTES: usize = 16;
const ZONE_BYTES: usize = 16;
const DEVICE_BYTES: usize = 4;
/// The smallest page of the host, and so the smallest piece.
const PAGE_BYTES: u64 = 4096;
const TAKE_BYTES_FIXED: usize = 4;
const GRANT_BYTES_FIXED: usize = 32;
const RELEASE_BYTES: usize = 40;
/// Where the address is in it.
const RELEASE_ADDRESS_AT: usize = 32;
/// Longest message of these: a request.
pub(crate) const PINNED_BYTES: usize =
    HEADER_BYTES + 4 + 4 * DEVICES_MAX + 16 * ZONES_MAX + 16 * REGIONS_MAX;

/// What earlier versions ask with. Number 5 was the answer that granted it.
pub(crate) const RELEASE: Kind = Kind { number: 4, has_length: |len| len == RELEASE_BYTES };
pub(crate) const TAKE_PINNED: Kind = Kind {
    number: 6,
    has_length: |len| (TAKE_BYTES_FIXED..=PINNED_BYTES - HEADER_BYTES).contains(&len),
};
pub(crate) const GRANTED_PINNED: Kind = Kind {
    number: 7,
    has_length: |len| (GRANT_BYTES_FIXED..=PINNED_BYTES - HEADER_BYTES).contains(&len),
};

/// A zone of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneWanted {
    /// Its size; exactly so much.
    pub size_bytes: u64,
    /// Of such pages.
    pub pages: PagesWanted,
    /// On this NUMA node of the host.
    pub node: Option<u32>,
}

/// Asks for the memory of a VM, ready for one of its devices, and for that device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakePinned {
    /// The devices that the VM is to have. The memory is that of the first for which there is such memory; the
    /// others are to be free.
    pub devices: Vec<Bdf>,
    /// All memory that the VM has; none for a VM that has its memory, and asks for all devices to be free.
    pub zones: Vec<ZoneWanted>,
    /// Where the VM has it, in ascending order.
    pub regions: Vec<PinnedRegion>,
}

/// A part of the memory, and where the device finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedRegion {
    /// The zone that it is of.
    pub zone: usize,
    /// First guest physical address.
    pub gpa: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Where in the zone's memfd it begins.
    pub offset: u64,
}

/// The memory of a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedZone {
    /// How long the memfd is: what was asked for.
    pub size_bytes: u64,
    /// What it consists of.
    pub pages: SlotPages,
}

/// What comes with memory that a device is ready to reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedGrant {
    /// Which device, of those that were asked for.
    pub device: Bdf,
    /// The zones, as they were asked for.
    pub zones: Vec<PinnedZone>,
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
        (len_bytes > 0).then_some(PinnedRegion { gpa, len_bytes, offset, ..region })
    })
}

/// What a body lists.
struct Lists<'a> {
    devices: &'a [u8],
    zones: &'a [u8],
    regions: &'a [u8],
}

impl<'a> Lists<'a> {
    /// What follows the first `fixed` bytes: so many entries each, and nothing more.
    fn of_body(
        kind: u16,
        body: &'a [u8],
        fixed: usize,
        [devices, zones, regions]: [u8; 3],
    ) -> Result<Self, ProtocolError> {
        for (what, count, most) in [
            ("number of devices", devices, DEVICES_MAX),
            ("number of zones", zones, ZONES_MAX),
            ("number of regions", regions, REGIONS_MAX),
        ] {
            if usize::from(count) > most {
                return Err(ProtocolError::Value { kind, what, value: count.into() });
            }
        }
        let lens = [
            usize::from(devices) * DEVICE_BYTES,
            usize::from(zones) * ZONE_BYTES,
            usize::from(regions) * REGION_BYTES,
        ];
        let whole = fixed + lens.iter().sum::<usize>();
        let rest = body.get(fixed..whole).filter(|_| body.len() == whole);
        let Some(rest) = rest else {
            let len_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
            return Err(ProtocolError::Length { kind, len_bytes });
        };
        let [devices_len, zones_len, _] = lens;
        let (devices, rest) = rest.split_at(devices_len);
        let (zones, regions) = rest.split_at(zones_len);
        Ok(Self { devices, zones, regions })
    }

    /// The regions, which have to hold zones of these sizes once, at addresses that rise.
    fn regions(&self, kind: u16, sizes: &[u64]) -> Result<Vec<PinnedRegion>, ProtocolError> {
        let wrong = |what, value| Err(ProtocolError::Value { kind, what, value });
        let mut total_bytes = 0_u64;
        for size_bytes in sizes {
            match total_bytes.checked_add(*size_bytes) {
                Some(sum) if *size_bytes > 0 => total_bytes = sum,
                _ => return wrong("size", *size_bytes),
            }
        }
        let (mut all, mut next_gpa) = (Vec::new(), 0);
        let (mut zone, mut offset) = (0, 0);
        for bytes in self.regions.chunks_exact(REGION_BYTES) {
            let [gpa, len_bytes] = [0, 8].map(|at| u64::from_le_bytes(field(bytes, at)));
            let end = gpa.checked_add(len_bytes);
            let (Some(end), true) = (end, gpa >= next_gpa && len_bytes > 0) else {
                return wrong("address of a region", gpa);
            };
            let left_bytes = sizes.get(zone).map_or(0, |size_bytes| size_bytes - offset);
            if len_bytes > left_bytes {
                return wrong("length of a region", len_bytes);
            }
            all.push(PinnedRegion { zone, gpa, len_bytes, offset });
            (next_gpa, offset) = (end, offset + len_bytes);
            if len_bytes == left_bytes {
                (zone, offset) = (zone + 1, 0);
            }
        }
        if zone != sizes.len() || sizes.is_empty() {
            return wrong("number of zones in regions", zone as u64);
        }
        Ok(all)
    }
}

fn count(len: usize) -> u8 {
    // More than a message may have is refused by who reads it.
    u8::try_from(len).unwrap_or(u8::MAX)
}

fn address_bytes(device: Bdf) -> [u8; DEVICE_BYTES] {
    let [low, high] = device.segment().to_le_bytes();
    // The bus, then the device and the function in one byte.
    let [bus, function] = device.routing_id().to_be_bytes();
    [low, high, bus, function]
}

fn address_of(bytes: [u8; DEVICE_BYTES]) -> Bdf {
    let [low, high, bus, function] = bytes;
    Bdf::from_routing_id(u16::from_le_bytes([low, high]), u16::from_be_bytes([bus, function]))
}

fn push_regions(body: &mut Vec<u8>, regions: &[PinnedRegion]) {
    for region in regions {
        body.extend(region.gpa.to_le_bytes());
        body.extend(region.len_bytes.to_le_bytes());
    }
}

/// The message that has a device released.
pub(crate) fn release(device: Bdf) -> Vec<u8> {
    let mut body = PAGE_BYTES.to_le_bytes().to_vec();
    body.extend([PagesWanted::Small as u8, 0, 0, 0]);
    body.extend(ANY_NODE.to_le_bytes());
    body.resize(RELEASE_ADDRESS_AT, 0);
    body.extend(address_bytes(device));
    body.resize(RELEASE_BYTES, 0);
    message(&RELEASE, &body)
}

/// The device of such a message. The memory that comes with it in those of earlier versions cannot be had.
pub(crate) fn device_to_release(body: &[u8]) -> Bdf {
    address_of(field(body, RELEASE_ADDRESS_AT))
}

impl TakePinned {
    /// As it goes over the wire.
    pub fn encode(&self) -> Vec<u8> {
        let Self { devices, zones, regions } = self;
        let mut body = vec![count(devices.len()), count(zones.len()), count(regions.len()), 0];
        body.extend(devices.iter().flat_map(|device| address_bytes(*device)));
        for zone in zones {
            body.extend(zone.size_bytes.to_le_bytes());
            body.extend([zone.pages as u8, 0, 0, 0]);
            body.extend(zone.node.unwrap_or(ANY_NODE).to_le_bytes());
        }
        push_regions(&mut body, regions);
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
        let [devices, zones, regions, rest] = field(body, 0);
        check_zero(kind, &[rest])?;
        let lists = Lists::of_body(kind, body, TAKE_BYTES_FIXED, [devices, zones, regions])?;
        let devices: Vec<_> = lists
            .devices
            .chunks_exact(DEVICE_BYTES)
            .map(|bytes| address_of(field(bytes, 0)))
            .collect();
        if devices.is_empty() {
            return Err(ProtocolError::Value { kind, what: "number of devices", value: 0 });
        }
        let zones = lists.zones.chunks_exact(ZONE_BYTES).map(|bytes| {
            let size_bytes = u64::from_le_bytes(field(bytes, 0));
            let [pages, rest @ ..] = field::<4>(bytes, 8);
            check_zero(kind, &rest)?;
            let node = u32::from_le_bytes(field(bytes, 12));
            let pages = known(&PagesWanted::ALL, kind, pages)?;
            let node = (node != ANY_NODE).then_some(node);
            Ok(ZoneWanted { size_bytes, pages, node })
        });
        let zones = zones.collect::<Result<Vec<_>, _>>()?;
        let sizes: Vec<_> = zones.iter().map(|zone| zone.size_bytes).collect();
        let regions = if sizes.is_empty() && lists.regions.is_empty() {
            Vec::new()
        } else {
            lists.regions(kind, &sizes)?
        };
        Ok(Some((Self { devices, zones, regions }, whole)))
    }
}

impl PinnedGrant {
    /// Descriptors that come with it.
    pub fn descriptors_count(&self) -> usize {
        self.zones.len() + 2
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = vec![count(self.zones.len()), count(self.regions.len()), 0, 0];
        body.extend(address_bytes(self.device));
        for number in [self.device_id, self.space_id, self.table_id, 0] {
            body.extend(number.to_le_bytes());
        }
        body.extend(self.piece_bytes.to_le_bytes());
        for zone in &self.zones {
            body.extend(zone.size_bytes.to_le_bytes());
            body.extend([zone.pages as u8, 0, 0, 0, 0, 0, 0, 0]);
        }
        push_regions(&mut body, &self.regions);
        message(&GRANTED_PINNED, &body)
    }

    pub(crate) fn of_body(kind: u16, body: &[u8]) -> Result<Self, ProtocolError> {
        let [zones, regions, rest @ ..] = field::<4>(body, 0);
        check_zero(kind, &rest)?;
        let device = address_of(field(body, 4));
        let [device_id, space_id, table_id] =
            [8, 12, 16].map(|at| u32::from_le_bytes(field(body, at)));
        check_zero(kind, &field::<4>(body, 20))?;
        let piece_bytes = u64::from_le_bytes(field(body, 24));
        if !piece_bytes.is_power_of_two() || piece_bytes < PAGE_BYTES {
            return Err(ProtocolError::Value { kind, what: "piece", value: piece_bytes });
        }
        let lists = Lists::of_body(kind, body, GRANT_BYTES_FIXED, [0, zones, regions])?;
        let zones = lists.zones.chunks_exact(ZONE_BYTES).map(|bytes| {
            let size_bytes = u64::from_le_bytes(field(bytes, 0));
            let [pages, rest @ ..] = field::<8>(bytes, 8);
            check_zero(kind, &rest)?;
            Ok(PinnedZone { size_bytes, pages: known(&SlotPages::ALL, kind, pages)? })
        });
        let zones = zones.collect::<Result<Vec<_>, _>>()?;
        let sizes: Vec<_> = zones.iter().map(|zone| zone.size_bytes).collect();
        let regions = lists.regions(kind, &sizes)?;
        Ok(Self { device, zones, piece_bytes, device_id, space_id, table_id, regions })
    }
}

#[cfg(test)]
#[path = "pinned_tests.rs"]
mod tests;
