// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Two passed-through functions on a bus that are to reach each other, with everything around them made
//! up.
#![expect(clippy::unwrap_used, reason = "tests")]

use devices::bus::BusDevice as _;

use super::*;
use crate::fakes::{FakeFunction, FakeP2p, FakeSlots, POWER_OFFSET};
use crate::{DmaGate, VfioPciDevice, VfioWiring};
use pci::DeviceNumber;
use pci::PciDevice;
use pci::fakes::{FakeMapper, FakeMsiSource};
use pci::{MmioRange, MmioWindows};
use pci::{PciEcam, PciSegment, PciSegmentOptions};

const BELOW: u64 = 0xc000_0000;
const BELOW_LEN_BYTES: u64 = 0x100_0000;
const ABOVE: u64 = 0x40_0000_0000;
const MIB: u64 = 1 << 20;
const NOTHING: Range<u64> = 0..0;

struct Rig {
    iommu: Arc<FakeP2p>,
    peers: Arc<P2pBars>,
    slots: Arc<FakeSlots>,
    gate: Arc<DmaGate>,
    hosts: Vec<Arc<FakeFunction>>,
    devices: Vec<Arc<VfioPciDevice>>,
    ecam: PciEcam,
    segment: Arc<PciSegment>,
}

impl Rig {
    fn new(functions: u8) -> Self {
        Self::with(functions, None)
    }

    fn with(functions: u8, entries: Option<u64>) -> Self {
        let windows = MmioWindows {
            below_4g: MmioRange { start_gpa: BELOW, len_bytes: BELOW_LEN_BYTES },
            above_4g: MmioRange { start_gpa: ABOVE, len_bytes: 0x100_0000 },
        };
        let (gate, slots) = (Arc::new(DmaGate::default()), Arc::new(FakeSlots::default()));
        let mut iommu = FakeP2p::new(slots.clone(), gate.clone());
        iommu.entries = entries;
        let iommu = Arc::new(iommu);
        let mapper = Arc::new(FakeMapper::new(vec![windows.below_4g, windows.above_4g]));
        let segment = PciSegment::new(PciSegmentOptions { segment: 0, windows }, mapper).unwrap();
        let peers = P2pBars::new(iommu.clone());
        let ecam = PciEcam::new(&segment);
        let (hosts, devices) = (Vec::new(), Vec::new());
        let mut rig = Self { iommu, peers, slots, gate, hosts, devices, ecam, segment };
        (1..=functions).for_each(|number| rig.plug(number));
        rig
    }

    fn plug(&mut self, number: u8) {
        let host = FakeFunction::new(FakeFunction::config(), self.gate.clone()).unwrap();
        let wiring = VfioWiring {
            msi_source: &FakeMsiSource::new(64),
            slots: self.slots.clone(),
            gate: self.gate.clone(),
            intx: None,
            trapped_bars: Vec::new(),
            has_ports: true,
            gpudirect_clique: None,
            peers: Some(self.peers.clone()),
        };
        let device = VfioPciDevice::new(format!("gpu{number}"), host.clone(), wiring).unwrap();
        let device = Arc::new(device);
        let on_bus: Arc<dyn PciDevice> = device.clone();
        self.segment.add_device(&on_bus, DeviceNumber::new(number).ok()).unwrap();
        self.hosts.push(host);
        self.devices.push(device);
    }

    fn command(&self, number: u64, value: u8) {
        self.ecam.write(number << 15 | 4, &[value, 0]);
    }

    fn check(&self) {
        assert_eq!(self.iommu.violations(), Vec::<String>::new());
        assert_eq!(self.slots.violations(), Vec::<String>::new());
        for host in &self.hosts {
            assert_eq!(host.violations(), Vec::<String>::new());
        }
    }
}

/// What the guest reaches of the first and of the second function at first: the pages of MSI-X are not
/// in it.
fn bars_of(number: u64) -> [Range<u64>; 2] {
    let low = BELOW + BELOW_LEN_BYTES - number * 0x1000;
    let high = ABOVE + (number - 1) * 0x4000;
    [low..low + 0x1000, high..high + 0x2000]
}

fn bars_of_both() -> Vec<Range<u64>> {
    let ([low, high], [other_low, other_high]) = (bars_of(1), bars_of(2));
    vec![other_low, low, high, other_high]
}

#[test]
fn bars_are_mapped_before_a_function_gets_through_the_gate() {
    let rig = Rig::new(2);
    rig.command(1, 2);
    rig.command(2, 2);
    assert_eq!((rig.iommu.mapped(), rig.iommu.calls()), (vec![], 0), "of no use yet");
    rig.gate.open();
    let iommu = rig.iommu.clone();
    let all_there = move || assert_eq!(iommu.mapped(), bars_of_both());
    assert!(rig.hosts[0].on_bus_master.set(Box::new(all_there)).is_ok());
    rig.command(1, 6);
    assert_eq!(rig.iommu.mapped(), bars_of_both());
    assert!(rig.hosts[0].is_bus_master());
    rig.command(2, 6);
    assert_eq!(rig.iommu.calls(), 4, "once each");
    rig.check();
}

#[test]
fn what_the_guest_reaches_later_is_mapped_then() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    assert_eq!(rig.iommu.mapped(), bars_of(1));
    rig.command(2, 2);
    assert_eq!(rig.iommu.mapped(), bars_of_both());
    rig.check();
}

#[test]
fn a_function_that_sleeps_stays_mapped() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 2);
    let calls = rig.iommu.calls();
    let power = |state| rig.ecam.write(2 << 15 | u64::from(POWER_OFFSET), &[state, 0]);
    for state in [3, 0] {
        power(state);
        assert_eq!((rig.iommu.mapped(), rig.iommu.calls()), (bars_of_both(), calls));
    }
    rig.check();
    // It moves meanwhile.
    rig.iommu.may_sleep.store(true, Ordering::Relaxed);
    power(3);
    rig.ecam.write(2 << 15 | 0x10, &0x0010_0000_u32.to_le_bytes());
    let ([low, high], other) = (bars_of(1), bars_of(2)[0].clone());
    let moved = ABOVE + MIB..ABOVE + MIB + 0x2000;
    assert_eq!(rig.iommu.mapped(), [other, low, high, moved.clone()]);
    assert!(!rig.slots.shown().contains(&moved));
    power(0);
    assert!(rig.slots.shown().contains(&moved));
    rig.check();
}

#[test]
fn a_bar_that_moves_is_mapped_where_it_is() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 2);
    rig.ecam.write(2 << 15 | 0x10, &0x0010_0000_u32.to_le_bytes());
    let [low, high] = bars_of(1);
    let other = bars_of(2)[0].clone();
    assert_eq!(rig.iommu.mapped(), [other, low, high, ABOVE + MIB..ABOVE + MIB + 0x2000]);
    rig.check();
}

#[test]
fn nothing_is_mapped_that_the_guest_does_not_reach() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 6);
    rig.command(2, 4);
    assert_eq!(rig.iommu.mapped(), bars_of(1), "decoding is off");
    rig.command(2, 6);
    rig.devices[0].lose();
    assert_eq!(rig.iommu.mapped(), bars_of(2), "gone for the guest");
    rig.command(1, 2);
    assert_eq!(rig.iommu.mapped(), bars_of(2), "for good");
    rig.check();
}

#[test]
fn nothing_is_mapped_when_the_device_is_reset() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 6);
    rig.devices[1].disarm();
    assert_eq!(*rig.hosts[1].resets.lock(), 1);
    assert_eq!(rig.iommu.mapped(), bars_of(1));
    rig.check();
}

#[test]
fn a_device_that_comes_and_goes() {
    let mut rig = Rig::new(1);
    rig.gate.open();
    rig.command(1, 6);
    assert_eq!(rig.iommu.calls(), 0, "no device is there that could reach it");
    rig.plug(2);
    assert_eq!(rig.iommu.mapped(), bars_of(1));
    rig.command(2, 6);
    assert_eq!(rig.iommu.mapped(), bars_of_both());
    rig.segment.remove_device(DeviceNumber::new(2).unwrap());
    assert_eq!(rig.iommu.mapped(), bars_of(1));
    rig.devices.pop();
    rig.check();
    // Dropped without a word.
    let Rig { iommu, devices, segment, ecam, .. } = rig;
    drop((devices, ecam, segment));
    assert_eq!(iommu.mapped(), [NOTHING; 0]);
    assert_eq!(iommu.violations(), Vec::<String>::new());
}

#[test]
fn what_the_kernel_refuses_is_done_without() {
    let rig = Rig::new(2);
    rig.iommu.refuses.store(true, Ordering::Relaxed);
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 6);
    assert_eq!(rig.iommu.mapped(), []);
    assert_eq!(rig.iommu.calls(), 4, "asked once for each");
    assert!(rig.hosts.iter().all(|host| host.is_bus_master()));
    assert_eq!(rig.slots.shown(), bars_of_both(), "the guest has its devices");
    // Something of it may be possible when it moves.
    rig.iommu.refuses.store(false, Ordering::Relaxed);
    rig.command(2, 4);
    rig.command(2, 6);
    assert_eq!(rig.iommu.mapped(), bars_of(2));
    rig.check();
}

#[test]
fn a_guest_that_switches_for_ever_uses_nothing_up() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    for _ in 0..1000 {
        rig.command(2, 6);
        rig.command(2, 4);
    }
    assert_eq!(rig.iommu.mapped(), bars_of(1));
    let state = rig.peers.state.lock();
    assert_eq!((state.mapped, state.bars.len(), state.stuck.len()), (2, 2, 0));
    drop(state);
    rig.check();
}

#[test]
fn a_device_is_kept_that_others_still_reach() {
    let rig = Rig::new(2);
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 6);
    rig.iommu.keeps.store(true, Ordering::Relaxed);
    rig.devices[1].lose();
    assert_eq!(rig.peers.state.lock().stuck.len(), 2);
    rig.check();
}

#[test]
fn guest_memory_keeps_its_part_of_the_mappings() {
    let rig = Rig::with(2, Some(3 * ENTRIES_SHARE));
    rig.gate.open();
    rig.command(1, 6);
    rig.command(2, 6);
    assert_eq!(rig.iommu.mapped().len(), 3);
    rig.command(1, 4);
    rig.command(2, 4);
    rig.command(2, 6);
    assert_eq!(rig.iommu.mapped(), bars_of(2), "there is room again");
    rig.check();
}

#[test]
fn what_bars_will_take_is_forecast_until_they_are_mapped() {
    let rig = Rig::new(1);
    assert_eq!(rig.peers.time_to_map(), Duration::ZERO, "there is nothing to reach it");
    drop(rig);
    let mut rig = Rig::new(2);
    // Of each: what can be mapped of BAR 0 without the pages of MSI-X, and BAR 2.
    let of_fakes = 2 * 0x3000;
    let expected = |bytes: u64, per_second: u64| {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(per_second);
        Duration::from_nanos(u64::try_from(nanos).unwrap())
    };
    let rate = rig.peers.bytes_per_second;
    assert_eq!(rig.peers.time_to_map(), expected(of_fakes, rate));
    let gpu = rig.peers.join("gpu", vec![1 << 20, 128 << 30]);
    let all = of_fakes + (1 << 20) + (128 << 30);
    assert_eq!(rig.peers.time_to_map(), expected(all, rate));
    rig.peers.state.lock().measured = (1 << 30, Duration::from_secs(1));
    assert!(rig.peers.time_to_map() > Duration::from_secs(128), "by what it has taken");
    drop(gpu);
    assert!(rig.peers.time_to_map() < Duration::from_secs(1), "it has gone");
    rig.gate.open();
    rig.command(1, 6);
    assert_eq!(rig.peers.time_to_map(), Duration::ZERO, "no wait is to come");
    assert!(rig.peers.state.lock().measured.0 > 1 << 30);
    let few = Rig::with(2, Some(8));
    let gpu = few.peers.join("gpu", vec![128 << 30; 6]);
    assert_eq!(few.peers.time_to_map(), expected(128 << 30, rate), "one of eight may be mapped");
    drop(gpu);
    rig.plug(3);
}
