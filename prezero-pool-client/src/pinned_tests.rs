// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages about memory that is mapped for a device, of VMs of any size.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;
use crate::protocol::{MESSAGE_BYTES_MAX, Reply, Request};

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

fn region(zone: usize, gpa: u64, len_bytes: u64, offset: u64) -> PinnedRegion {
    PinnedRegion { zone, gpa, len_bytes, offset }
}

/// Two zones, the first of which is cut by the hole below 4 GiB.
fn regions() -> Vec<PinnedRegion> {
    vec![region(0, 0, 3 * GIB, 0), region(0, 4 * GIB, GIB, 3 * GIB), region(1, 5 * GIB, 2 * GIB, 0)]
}

fn take() -> TakePinned {
    let zone = |size_bytes, node| ZoneWanted { size_bytes, pages: PagesWanted::Small, node };
    TakePinned {
        devices: vec!["0000:65:1f.7".parse().unwrap(), "0001:02:00.0".parse().unwrap()],
        zones: vec![zone(4 * GIB, Some(1)), zone(2 * GIB, None)],
        regions: regions(),
    }
}

fn grant() -> PinnedGrant {
    let zone = |size_bytes| PinnedZone { size_bytes, pages: SlotPages::Huge2Mib };
    PinnedGrant {
        device: "0001:02:00.0".parse().unwrap(),
        zones: vec![zone(4 * GIB), zone(2 * GIB)],
        piece_bytes: 64 << 20,
        device_id: 1,
        space_id: 2,
        table_id: 3,
        regions: regions(),
    }
}

fn survives(take: &TakePinned, grant: &PinnedGrant) {
    let bytes = Request::TakePinned(take.clone()).encode();
    assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{} bytes", bytes.len());
    for len in 0..bytes.len() {
        assert_eq!(Request::decode(&bytes[..len]), Ok(None), "{len} bytes");
    }
    let there = Request::decode(&bytes);
    assert_eq!(there, Ok(Some((Request::TakePinned(take.clone()), bytes.len()))));
    let bytes = Reply::GrantedPinned(grant.clone()).encode();
    assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{} bytes", bytes.len());
    // Each descriptor goes with bytes of its own.
    assert!(bytes.len() > HEADER_BYTES * (grant.descriptors_count() - 1));
    for len in 0..bytes.len() {
        assert_eq!(Reply::decode(&bytes[..len]), Ok(None), "{len} bytes");
    }
    let there = Reply::decode(&bytes).unwrap();
    assert_eq!(there, Some((Reply::GrantedPinned(grant.clone()), bytes.len())));
}

#[test]
fn a_device_is_segment_bus_and_devfn_on_the_wire() {
    let device = "10af:65:1f.7".parse().unwrap();
    let bytes = TakePinned { devices: vec![device], ..take() }.encode();
    assert_eq!(bytes[HEADER_BYTES + 4..HEADER_BYTES + 8], [0xaf, 0x10, 0x65, 0xff]);
}

/// As VMMs asked for 4 GiB on node 1, with their hole from 3 to 4 GiB.
#[test]
fn what_earlier_vmms_ask_names_the_device() {
    let mut body = (4 * GIB).to_le_bytes().to_vec();
    body.extend([0, 0, 0, 0, 1, 0, 0, 0]);
    body.extend([3 * GIB, 4 * GIB].map(u64::to_le_bytes).concat());
    body.extend([0xaf, 0x10, 0x65, 0xff, 0, 0, 0, 0]);
    let mut bytes = b"GPZ1\x04\0\0\0\x28\0\0\0\0\0\0\0".to_vec();
    bytes.extend(body);
    let device = "10af:65:1f.7".parse().unwrap();
    assert_eq!(Request::decode(&bytes), Ok(Some((Request::Release(device), 56))));
    for len in 0..bytes.len() {
        assert_eq!(Request::decode(&bytes[..len]), Ok(None), "{len} bytes");
    }
}

#[test]
fn both_survive_the_wire_and_are_awaited_to_their_last_byte() {
    survives(&take(), &grant());
}

#[test]
fn the_largest_vm_fits_in_a_message() {
    // 4 TiB of 16 nodes around both holes, behind an IOMMU of AMD's.
    let quarter = TIB / 4;
    let mut regions =
        vec![region(0, 0, 3 * GIB, 0), region(0, 4 * GIB, quarter - 3 * GIB, 3 * GIB)];
    regions.extend((1..3).map(|zone| region(zone, GIB + zone as u64 * quarter, quarter, 0)));
    let left = 1012 * GIB - (GIB + 3 * quarter);
    regions.push(region(3, GIB + 3 * quarter, left, 0));
    regions.push(region(3, TIB, quarter - left, left));
    let after = TIB + quarter - left;
    regions
        .extend((4..16).map(|zone| region(zone, after + (zone as u64 - 4) * quarter, quarter, 0)));
    assert_eq!(
        (regions.len(), regions.last().unwrap().gpa),
        (REGIONS_MAX, 4 * TIB + 13 * GIB - quarter)
    );
    let devices = (0..32).map(|bus| Bdf::from_routing_id(0, bus << 8)).collect();
    let zone = |size_bytes| ZoneWanted { size_bytes, pages: PagesWanted::Huge1Gib, node: Some(15) };
    let take = TakePinned { devices, zones: vec![zone(quarter); 16], regions: regions.clone() };
    let zones = vec![PinnedZone { size_bytes: quarter, pages: SlotPages::Huge1Gib }; 16];
    let grant = PinnedGrant { zones, regions, ..grant() };
    survives(&take, &grant);
    assert_eq!(take.encode().len(), MESSAGE_BYTES_MAX, "no message is longer");
    let count = |pages_bytes| {
        let pieces = grant.regions.iter().map(|part| pieces(*part, 64 << 20, pages_bytes).count());
        pieces.sum::<usize>()
    };
    assert_eq!((count(4096), count(GIB)), (65536, 4096));

    let mut more = take.clone();
    more.devices.push(take.devices[0]);
    assert!(Request::decode(&more.encode()).is_err());
    let mut more = grant.clone();
    more.zones.push(grant.zones[0]);
    more.regions.push(region(16, 8 * TIB, quarter, 0));
    assert!(Reply::decode(&more.encode()).is_err());
}

#[test]
fn regions_that_are_not_the_memory_are_refused() {
    let refused = |change: fn(&mut PinnedGrant)| {
        let mut grant = grant();
        change(&mut grant);
        let mut take = take();
        take.regions.clone_from(&grant.regions);
        for (zone, granted) in take.zones.iter_mut().zip(&grant.zones) {
            zone.size_bytes = granted.size_bytes;
        }
        take.zones.truncate(grant.zones.len());
        let refused = Reply::decode(&grant.encode()).is_err();
        assert!(Request::decode(&take.encode()).is_err() == refused || grant.piece_bytes == 0);
        refused
    };
    assert!(!refused(|_| ()));
    assert!(refused(|grant| grant.regions.clear()));
    assert!(refused(|grant| grant.zones.clear()));
    assert!(refused(|grant| grant.regions[1].gpa = GIB), "one in the other");
    assert!(refused(|grant| grant.regions[1].gpa = u64::MAX));
    assert!(refused(|grant| grant.regions[1].len_bytes = 2 * GIB), "more than the zone has");
    assert!(refused(|grant| grant.regions[1].len_bytes = GIB / 2), "a part of the zone left out");
    assert!(refused(|grant| grant.zones[1].size_bytes = 5 * GIB), "a part of the zone left out");
    assert!(refused(|grant| grant.zones[1].size_bytes = 0));
    assert!(refused(|grant| grant.zones[1].size_bytes = u64::MAX));
    assert!(refused(|grant| grant.zones.truncate(1)), "a region of no zone");
    assert!(refused(|grant| grant.regions.truncate(2)), "a zone without a region");
    assert!(refused(|grant| grant.piece_bytes = 0));
    assert!(refused(|grant| grant.regions = vec![grant.regions[0]; 19]));
}

#[test]
fn devices_may_be_named_without_memory() {
    let alone = TakePinned { zones: Vec::new(), regions: Vec::new(), ..take() };
    let bytes = alone.encode();
    assert_eq!(TakePinned::decode(&bytes), Ok(Some((alone.clone(), bytes.len()))));
    let nowhere = TakePinned { regions: Vec::new(), ..take() };
    assert!(Request::decode(&nowhere.encode()).is_err(), "a zone without a region");
    // There is no slot without memory.
    let grant = PinnedGrant { zones: Vec::new(), regions: Vec::new(), ..grant() };
    assert!(Reply::decode(&Reply::GrantedPinned(grant).encode()).is_err());
}

#[test]
fn a_request_for_no_device_is_refused() {
    let wrong = TakePinned { devices: Vec::new(), ..take() };
    assert!(Request::decode(&wrong.encode()).is_err());
}

proptest! {
    #[test]
    fn pieces_are_the_region(
        gpa in 0_u64..1 << 40, pages in 1_u64..5000, piece in 12_u32..30, offset in 0_u64..1 << 40,
    ) {
        let region = region(3, gpa, pages * 4096, offset);
        let mut next = 0;
        for part in pieces(region, 1 << piece, 4096) {
            prop_assert_eq!((part.zone, part.gpa, part.offset), (3, gpa + next, offset + next));
            prop_assert!(part.len_bytes > 0 && part.len_bytes <= 1 << piece);
            next += part.len_bytes;
            prop_assert!(next == region.len_bytes || next.is_multiple_of(1 << piece));
        }
        prop_assert_eq!(next, region.len_bytes);
    }

    #[test]
    fn an_altered_grant_is_refused_or_is_the_memory(at in 16_usize..128, value: u8) {
        let mut bytes = Reply::GrantedPinned(grant()).encode();
        bytes[at] = value;
        if let Ok(Some((Reply::GrantedPinned(grant), _))) = Reply::decode(&bytes) {
            let all: u64 = grant.regions.iter().map(|region| region.len_bytes).sum();
            prop_assert_eq!(all, grant.zones.iter().map(|zone| zone.size_bytes).sum::<u64>());
        }
    }
}
