// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses of BARs, in the guest and in this process: huge pages need both to agree. Two functions on a
//! bus, with everything around them made up.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(clippy::single_range_in_vec_init, reason = "a BAR has one range that can be mapped")]

use std::ops::Range;
use std::sync::Arc;

use devices::bus::BusDevice as _;
use pci::fakes::{FakeMapper, FakeMsiSource};
use pci::{
    DeviceNumber, MmioRange, MmioWindows, PciDevice, PciEcam, PciSegment, PciSegmentOptions,
};

use crate::fakes::{FakeFunction, FakeP2p, FakeSlots};
use crate::{DmaGate, HostBar, P2pBars, VfioPciDevice, VfioWiring};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const BELOW: u64 = 0xc000_0000;
/// As after RAM of some size; no multiple of large BARs.
const ABOVE: u64 = 257 * GIB;
const ABOVE_LEN_BYTES: u64 = 1 << 42;

struct Rig {
    iommu: Arc<FakeP2p>,
    slots: Arc<FakeSlots>,
    gate: Arc<DmaGate>,
    devices: Vec<Arc<VfioPciDevice>>,
    ecam: PciEcam,
    _segment: Arc<PciSegment>,
}

impl Rig {
    /// Two functions with this BAR 0, which has MSI-X structures from byte 0x2000 to 0x4000.
    fn new(bar: &HostBar) -> Self {
        let windows = MmioWindows {
            below_4g: MmioRange { start_gpa: BELOW, len_bytes: 16 * MIB },
            above_4g: MmioRange { start_gpa: ABOVE, len_bytes: ABOVE_LEN_BYTES },
        };
        let gate = Arc::new(DmaGate::default());
        let slots = Arc::new(FakeSlots::default());
        let iommu = Arc::new(FakeP2p::new(slots.clone(), gate.clone()));
        let mapper = Arc::new(FakeMapper::new(vec![windows.below_4g, windows.above_4g]));
        let segment = PciSegment::new(PciSegmentOptions { segment: 0, windows }, mapper).unwrap();
        let peers = P2pBars::new(iommu.clone());
        let plug = |number: u8| {
            let host = FakeFunction::new(FakeFunction::config(), gate.clone()).unwrap();
            host.set_bar(0, bar.clone());
            let wiring = VfioWiring {
                msi_source: &FakeMsiSource::new(64),
                slots: slots.clone(),
                gate: gate.clone(),
                intx: None,
                trapped_bars: Vec::new(),
                has_ports: true,
                gpudirect_clique: None,
                peers: Some(peers.clone()),
            };
            let device = VfioPciDevice::new(format!("gpu{number}"), host, wiring).unwrap();
            let device = Arc::new(device);
            let on_bus: Arc<dyn PciDevice> = device.clone();
            segment.add_device(&on_bus, DeviceNumber::new(number).ok()).unwrap();
            device
        };
        let devices = vec![plug(1), plug(2)];
        let ecam = PciEcam::new(&segment);
        let rig = Self { iommu, slots, gate, devices, ecam, _segment: segment };
        rig.gate.open();
        // Memory decode and Bus Master Enable.
        for number in [1, 2] {
            rig.write(number, 4, &[6, 0]);
        }
        rig
    }

    fn write(&self, number: u64, offset: u64, data: &[u8]) {
        self.ecam.write(number << 15 | offset, data);
    }

    /// Where the guest has BAR 0 of a function.
    fn bar(&self, number: usize) -> u64 {
        self.devices[number - 1].bar_decode().gpas[0].1
    }

    /// The parts of BAR 0 of a function: offsets, and the host address of each.
    fn parts(&self, number: usize, len_bytes: u64) -> Vec<(Range<u64>, u64)> {
        let base = self.bar(number);
        let inside = self
            .slots
            .shown_at()
            .into_iter()
            .filter(|(range, _)| (base..base + len_bytes).contains(&range.start));
        inside.map(|(range, host)| (range.start - base..range.end - base, host)).collect()
    }

    /// Checks that BAR 0 of both functions lies at a multiple of its length, and that these parts of it, and
    /// no others, are mapped at host addresses that agree with the guest's modulo this number of bytes, in the
    /// guest and for the other function's DMA.
    fn check(&self, len_bytes: u64, parts: &[(Range<u64>, u64)]) {
        for number in [1, 2] {
            let base = self.bar(number);
            assert_eq!(base % len_bytes, 0, "function {number} at {base:#x}");
            let shown = self.parts(number, len_bytes);
            let offsets: Vec<_> = shown.iter().map(|(range, _)| range.clone()).collect();
            let expected: Vec<_> = parts.iter().map(|(range, _)| range.clone()).collect();
            assert_eq!(offsets, expected);
            for ((range, host), (_, modulus)) in shown.iter().zip(parts) {
                let gpa = base + range.start;
                assert_eq!((gpa ^ host) % modulus, 0, "{range:#x?} at {gpa:#x} and {host:#x}");
                let reached = self.iommu.places.lock().contains(&(gpa, *host));
                assert!(reached, "{range:#x?} is not mapped for DMA from {host:#x}");
            }
        }
        assert_eq!(self.slots.violations(), Vec::<String>::new());
        assert_eq!(self.iommu.violations(), Vec::<String>::new());
    }
}

#[test]
fn a_large_bar_agrees_in_all_bits_below_a_gibibyte() {
    let len_bytes = 128 * GIB;
    let rig = Rig::new(&HostBar { len_bytes, mappable: vec![0..len_bytes] });
    let parts = [(0..0x2000, 4096), (0x4000..len_bytes, GIB)];
    rig.check(len_bytes, &parts);
    // Moved while it decodes: the mapping stays, and agrees wherever the BAR can be.
    let (before, place) = (rig.parts(1, len_bytes), 1 << 41);
    rig.write(1, 0x14, &u32::try_from(place >> 32).unwrap().to_le_bytes());
    assert_eq!(rig.bar(1), place);
    assert_eq!(rig.parts(1, len_bytes), before);
    rig.check(len_bytes, &parts);
}

#[test]
fn parts_of_a_bar_agree_with_their_offset_in_it() {
    let len_bytes = 4 * GIB;
    let mappable = vec![0..0x1000, 3 * MIB..3 * GIB, 3 * GIB + 0x1000..4 * GIB - 0x1000];
    let rig = Rig::new(&HostBar { len_bytes, mappable });
    rig.check(
        len_bytes,
        &[
            (0..0x1000, 4096),
            (3 * MIB..3 * GIB, GIB),
            (3 * GIB + 0x1000..4 * GIB - 0x1000, 2 * MIB),
        ],
    );
}

#[test]
fn a_bar_of_some_mebibytes_agrees_in_all_bits_below_two() {
    let len_bytes = 16 * MIB;
    let rig = Rig::new(&HostBar { len_bytes, mappable: vec![0..len_bytes] });
    rig.check(len_bytes, &[(0..0x2000, 4096), (0x4000..len_bytes, 2 * MIB)]);
}

#[test]
fn a_small_bar_agrees_to_pages() {
    for len_bytes in [0x8000, MIB] {
        let rig = Rig::new(&HostBar { len_bytes, mappable: vec![0..len_bytes] });
        rig.check(len_bytes, &[(0..0x2000, 4096), (0x4000..len_bytes, 4096)]);
    }
}
