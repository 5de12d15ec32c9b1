// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A passed-through function on a bus, with everything around it made up.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use devices::bus::BusDevice as _;

use super::fakes::{
    FakeFunction, FakeLine, FakeSlots, MSI_OFFSET, MSIX_COUNT, MSIX_OFFSET, PENDING_OFFSET,
    SRIOV_OFFSET, TABLE_OFFSET,
};
use super::*;
use pci::DeviceNumber;
use pci::fakes::{FakeMapper, FakeMsiSource};
use pci::{BarKind, PciDevice};
use pci::{MmioRange, MmioWindows, PortWindow};
use pci::{PciEcam, PciSegment, PciSegmentOptions};

pub(super) const BELOW: u64 = 0xc000_0000;
/// Where the first BAR of a page is placed.
const LAST_PAGE_BELOW: u64 = BELOW + 0xff_f000;
pub(super) const ABOVE: u64 = 0x40_0000_0000;
const DEVICE: u64 = 1 << 15;
const MIB: u64 = 1 << 20;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) struct Rig {
    pub(super) host: Arc<FakeFunction>,
    pub(super) device: Arc<VfioPciDevice>,
    pub(super) slots: Arc<FakeSlots>,
    pub(super) mapper: Arc<FakeMapper>,
    pub(super) ports: Arc<FakeMapper>,
    pub(super) msi: FakeMsiSource,
    pub(super) gate: Arc<DmaGate>,
    pub(super) ecam: PciEcam,
    pub(super) segment: Arc<PciSegment>,
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::with(FakeFunction::config(), Vec::new(), false)
    }

    pub(super) fn with(config: Vec<u8>, trapped_bars: Vec<u8>, has_line: bool) -> Self {
        Self::build(config, trapped_bars, has_line, |_| {})
    }

    /// `prepare` sets up the host's function before it is taken for the guest.
    pub(super) fn prepared(config: Vec<u8>, prepare: impl FnOnce(&FakeFunction)) -> Self {
        Self::build(config, Vec::new(), false, prepare)
    }

    fn build(
        config: Vec<u8>,
        trapped_bars: Vec<u8>,
        has_line: bool,
        prepare: impl FnOnce(&FakeFunction),
    ) -> Self {
        Self::wired(config, prepare, |wiring| {
            wiring.trapped_bars = trapped_bars;
            wiring.intx = has_line.then(|| Box::new(FakeLine(silent_file())) as _);
        })
    }

    /// `connect` changes what the function is connected to.
    pub(super) fn wired(
        config: Vec<u8>,
        prepare: impl FnOnce(&FakeFunction),
        connect: impl FnOnce(&mut VfioWiring<'_>),
    ) -> Self {
        let windows = MmioWindows {
            below_4g: MmioRange { start_gpa: BELOW, len_bytes: 0x100_0000 },
            above_4g: MmioRange { start_gpa: ABOVE, len_bytes: 0x100_0000 },
        };
        let gate = Arc::new(DmaGate::default());
        let host = FakeFunction::new(config, Arc::clone(&gate)).unwrap();
        prepare(&host);
        let slots = Arc::new(FakeSlots::default());
        let msi = FakeMsiSource::new(64);
        let mut wiring = VfioWiring {
            msi_source: &msi,
            slots: slots.clone(),
            gate: Arc::clone(&gate),
            intx: None,
            trapped_bars: Vec::new(),
            has_ports: true,
            gpudirect_clique: None,
            peers: None,
        };
        connect(&mut wiring);
        let device = Arc::new(VfioPciDevice::new("gpu".into(), host.clone(), wiring).unwrap());
        let mapper = Arc::new(FakeMapper::new(vec![windows.below_4g, windows.above_4g]));
        let ports =
            Arc::new(FakeMapper::new(vec![MmioRange { start_gpa: 0x1000, len_bytes: 0xf000 }]));
        let window = PortWindow { first: 0x1000, last: 0xffff, mapper: ports.clone() };
        let options = PciSegmentOptions { segment: 0, windows };
        let segment = PciSegment::with_ports(options, mapper.clone(), Some(window)).unwrap();
        let on_bus: Arc<dyn PciDevice> = device.clone();
        segment.add_device(&on_bus, DeviceNumber::new(1).ok()).unwrap();
        let ecam = PciEcam::new(&segment);
        Self { host, device, slots, mapper, ports, msi, gate, ecam, segment }
    }

    pub(super) fn write(&self, offset: u16, data: &[u8]) {
        self.ecam.write(DEVICE | u64::from(offset), data);
    }

    pub(super) fn read<const N: usize>(&self, offset: u16) -> [u8; N] {
        let mut data = [0; N];
        self.ecam.read(DEVICE | u64::from(offset), &mut data);
        data
    }

    pub(super) fn check(&self) {
        assert_eq!(self.host.violations(), Vec::<String>::new());
        assert_eq!(self.slots.violations(), Vec::<String>::new());
        assert_eq!(self.mapper.violations(), Vec::<String>::new());
        assert_eq!(self.ports.violations(), Vec::<String>::new());
    }
}

/// What can be waited for, and never comes.
fn silent_file() -> File {
    File::from(OwnedFd::from(UnixDatagram::unbound().unwrap()))
}

#[test]
fn the_guest_sees_the_function_and_its_own_bars() {
    let rig = Rig::new();
    assert_eq!(rig.read(0), [0x36, 0x1b, 0x10, 0x00]);
    assert_eq!(rig.read(8), [2, 2, 8, 1]);
    assert_eq!(rig.read::<1>(0x0e), [0], "one function only");
    assert_eq!(rig.read::<1>(0x3d), [0], "a pin that leads nowhere is not there");
    rig.write(0x10, &[0xff; 4]);
    rig.write(0x14, &[0xff; 4]);
    assert_eq!(rig.read::<8>(0x10), (!0x3fff_u64 | 4).to_le_bytes());
    rig.write(0x20, &[0xff; 4]);
    assert_eq!(rig.read::<4>(0x20), (!0x1f_u32 | 1).to_le_bytes(), "ports");
    rig.write(0x30, &[0xff; 4]);
    assert_eq!(rig.read::<4>(0x30), [0; 4], "no ROM");
    assert_eq!(rig.read::<4>(SRIOV_OFFSET), 0x1800_0000_u32.to_le_bytes(), "hidden, list intact");
    assert_eq!(rig.read::<4>(0x180), 0x0001_0003_u32.to_le_bytes());
    rig.check();
}

/// A function with these flags of PCI Express, whose other registers of that capability are ones.
fn express(flags: [u8; 2]) -> Vec<u8> {
    let mut config = FakeFunction::config();
    config[0x82..0x84].copy_from_slice(&flags);
    config[0x84..0xbc].fill(0xff);
    config
}

#[test]
fn on_the_root_bus_is_an_integrated_endpoint_without_a_link() {
    let rig = Rig::with(express([0x02, 0x02]), Vec::new(), false);
    assert_eq!(rig.read::<4>(0x80), [0x10, 0, 0x92, 0x02], "an endpoint on the host");
    assert_eq!(rig.read::<8>(0x84), [0xff; 8], "device registers are the host's");
    assert_eq!((rig.read::<8>(0x8c), rig.read::<8>(0xac)), ([0; 8], [0; 8]), "no link");
    assert_eq!((rig.read::<8>(0xa4), rig.read::<8>(0xb4)), ([0xff; 8], [0xff; 8]));
    // Device control is the host's, link control is not there.
    rig.write(0x88, &[0x10, 0x20]);
    rig.write(0x90, &[0x03, 0]);
    let writes = rig.host.config_writes.lock().clone();
    assert_eq!(writes[1..], [(0x88, vec![0x10, 0x20])]);
    rig.check();
}

#[test]
fn the_first_version_of_express_has_one_set_of_link_registers() {
    let rig = Rig::with(express([0x01, 0]), Vec::new(), false);
    assert_eq!((rig.read::<1>(0x82), rig.read::<8>(0x8c)), ([0x91], [0; 8]));
    assert_eq!(rig.read::<8>(0xac), [0xff; 8], "something else's");
    rig.check();
}

#[test]
fn a_legacy_endpoint_has_no_express_capability() {
    let mut config = express([0x12, 0]);
    config[0x81] = 0xc0;
    let rig = Rig::with(config, Vec::new(), false);
    assert_eq!(rig.read::<2>(0x80), [0, 0xc0], "hidden, list intact");
    rig.check();
}

#[test]
fn an_integrated_endpoint_of_the_host_stays_what_it_is() {
    let rig = Rig::with(express([0x92, 0]), Vec::new(), false);
    assert_eq!((rig.read::<1>(0x82), rig.read::<8>(0x8c)), ([0x92], [0xff; 8]));
    rig.check();
}

#[test]
fn ports_are_reached_while_the_guest_wants_them() {
    let rig = Rig::new();
    assert_eq!(rig.read::<4>(0x20), 0x1001_u32.to_le_bytes());
    rig.write(4, &[2]);
    assert_eq!((rig.ports.mapped(), rig.host.command() & 1), (vec![], 0));
    rig.write(4, &[3]);
    assert_eq!((rig.ports.mapped(), rig.host.command() & 3), (vec![0x1000], 3));
    assert!(rig.ports.write(0x1007, &[0xa5]));
    let mut data = [0];
    rig.host.read_bar(4, 7, &mut data);
    assert_eq!(data, [0xa5]);
    rig.write(0x20, &[0x60, 0xc0]);
    assert_eq!(rig.ports.mapped(), [0xc060]);
    assert!(rig.ports.read(0xc067, &mut data) && data == [0xa5]);
    rig.device.lose();
    assert!(rig.ports.read(0xc067, &mut data) && data == [0xff], "as any BAR of one that is gone");
    rig.check();
}

#[test]
fn a_pin_that_the_host_does_not_unmask_is_unmasked_here() {
    let rig = Rig::build(FakeFunction::config(), Vec::new(), true, |host| {
        host.never_resamples.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(rig.host.connected(), Some((InterruptKind::Intx, 1)));
    assert!(!rig.host.has_resample());
    rig.write(MSI_OFFSET + 2, &[1, 0]);
    assert_eq!(rig.host.connected(), Some((InterruptKind::Msi, 1)));
    rig.write(MSI_OFFSET + 2, &[0, 0]);
    assert_eq!(rig.host.connected(), Some((InterruptKind::Intx, 1)));
    rig.device.lose();
    assert_eq!(rig.host.connected(), None);
    rig.check();
}

#[test]
fn other_writes_reach_the_host() {
    let rig = Rig::new();
    rig.write(0x44, &[0x03, 0x01]);
    rig.write(MSIX_OFFSET, &[0, 0, 0, 0x80]);
    let writes = rig.host.config_writes.lock().clone();
    assert_eq!(writes[1..], [(0x44, vec![3, 1]), (MSIX_OFFSET, vec![0, 0])]);
    rig.check();
}

#[test]
fn bars_are_slots_without_the_pages_of_msix() {
    let rig = Rig::new();
    assert_eq!(rig.slots.shown(), []);
    rig.write(4, &[2, 0]);
    assert_eq!(
        rig.slots.shown(),
        [LAST_PAGE_BELOW..LAST_PAGE_BELOW + 0x1000, ABOVE..ABOVE + 0x2000]
    );
    assert_eq!(rig.read::<1>(4), [2]);
    // Moved while it decodes.
    rig.write(0x10, &0x0010_0000_u32.to_le_bytes());
    assert_eq!(rig.slots.shown()[1], ABOVE + MIB..ABOVE + MIB + 0x2000);
    rig.write(4, &[0, 0]);
    assert_eq!(rig.slots.shown(), []);
    assert_eq!(rig.host.command(), 2, "the host's function keeps decoding");
    rig.check();
}

#[test]
fn trapped_bars_reach_the_host_by_accesses() {
    let rig = Rig::with(FakeFunction::config(), vec![0], false);
    rig.write(4, &[2, 0]);
    assert_eq!(rig.slots.shown().len(), 1, "BAR 2 only");
    assert!(rig.mapper.write(ABOVE + 0x10, &[1, 2, 3, 4]));
    let mut data = [0; 4];
    assert!(rig.mapper.read(ABOVE + 0x10, &mut data));
    assert_eq!(data, [1, 2, 3, 4]);
    rig.check();
}

#[test]
fn msix_is_connected_while_it_is_on_and_its_table_is_ours() {
    let rig = Rig::new();
    rig.write(4, &[2, 0]);
    assert_eq!(rig.host.connected(), None);
    rig.write(MSIX_OFFSET + 2, &[4, 0x80]);
    assert_eq!(rig.read(MSIX_OFFSET + 2), [4, 0x80]);
    assert_eq!(rig.host.connected(), Some((InterruptKind::Msix, MSIX_COUNT.into())));
    for (offset, word) in [(0, 0xfee0_1000_u32), (8, 0x41), (12, 0)] {
        assert!(rig.mapper.write(ABOVE + TABLE_OFFSET + 16 + offset, &word.to_le_bytes()));
    }
    let vector = rig.msi.vector(1).unwrap();
    assert_eq!(vector.record().programmed.unwrap().address, 0xfee0_1000);
    let mut pending = [0xff; 8];
    assert!(rig.mapper.read(ABOVE + PENDING_OFFSET, &mut pending));
    assert_eq!(pending, [0; 8]);
    let mut host = [0; 16];
    rig.host.read_bar(0, TABLE_OFFSET + 16, &mut host);
    assert_eq!(host, [0; 16], "the host's table is not written");
    rig.write(MSIX_OFFSET + 2, &[4, 0]);
    assert_eq!(rig.host.connected(), None);
    rig.check();
}

#[test]
fn msi_follows_its_registers() {
    let rig = Rig::with(FakeFunction::config(), Vec::new(), true);
    assert_eq!(rig.host.connected(), Some((InterruptKind::Intx, 1)), "the pin needs no asking");
    assert!(rig.host.has_resample());
    rig.write(MSI_OFFSET + 4, &0xfee0_2000_u32.to_le_bytes());
    rig.write(MSI_OFFSET + 8, &0_u32.to_le_bytes());
    rig.write(MSI_OFFSET + 12, &0x60_u16.to_le_bytes());
    rig.write(MSI_OFFSET + 16, &0b10_u32.to_le_bytes());
    // Two messages of four, on.
    rig.write(MSI_OFFSET + 2, &[0x11, 0]);
    assert_eq!(rig.host.connected(), Some((InterruptKind::Msi, 2)));
    let programmed = |index: usize| {
        // MSI-X has the first vectors.
        rig.msi.vector(usize::from(MSIX_COUNT) + index).unwrap().record().programmed
    };
    assert_eq!(programmed(0).unwrap().data, 0x60);
    assert_eq!(programmed(1), None, "masked");
    rig.write(MSI_OFFSET + 16, &[0; 4]);
    assert_eq!(programmed(1).unwrap().data, 0x61);
    assert_eq!(programmed(2), None, "not asked for");
    rig.write(MSI_OFFSET + 2, &[0x10, 0]);
    assert_eq!(rig.host.connected(), Some((InterruptKind::Intx, 1)));
    rig.check();
}

#[test]
fn without_ports_the_guest_sees_no_bar_of_them() {
    for has_ports in [true, false] {
        let gate = Arc::new(DmaGate::default());
        let host = FakeFunction::new(FakeFunction::config(), Arc::clone(&gate)).unwrap();
        let wiring = VfioWiring {
            msi_source: &FakeMsiSource::new(64),
            slots: Arc::new(FakeSlots::default()),
            gate,
            intx: None,
            trapped_bars: Vec::new(),
            has_ports,
            gpudirect_clique: None,
            peers: None,
        };
        let device = VfioPciDevice::new("gpu".into(), host, wiring).unwrap();
        let ports = device.bars().into_iter().filter(|bar| bar.kind == BarKind::Ports);
        let ports: Vec<u8> = ports.map(|bar| bar.index).collect();
        assert_eq!(ports.is_empty(), !has_ports);
        assert!(device.bars().len() > ports.len());
        let host_ports = bars::describe(
            &FakeFunction::config(),
            &*FakeFunction::new(FakeFunction::config(), Arc::default()).unwrap(),
        );
        let index = host_ports.iter().find(|bar| bar.kind == BarKind::Ports).unwrap().index;
        let offset = 0x10 + 4 * u16::from(index);
        device.write_config(offset, &[0xff; 4]);
        let mut register = [0; 4];
        device.read_config(offset, &mut register);
        assert_eq!(register != [0; 4], has_ports);
    }
}

#[test]
fn a_bridge_is_refused() {
    let mut config = FakeFunction::config();
    config[0x0e] = 1;
    let gate = Arc::new(DmaGate::default());
    let host = FakeFunction::new(config, Arc::clone(&gate)).unwrap();
    let wiring = VfioWiring {
        msi_source: &FakeMsiSource::new(64),
        slots: Arc::new(FakeSlots::default()),
        gate,
        intx: None,
        trapped_bars: Vec::new(),
        has_ports: true,
        gpudirect_clique: None,
        peers: None,
    };
    let refused = VfioPciDevice::new("bridge".into(), host, wiring);
    assert!(matches!(refused.err(), Some(VfioError::Header { found: 1 })));
}

#[test]
fn bus_mastering_waits_for_the_gate() {
    let rig = Arc::new(Rig::new());
    rig.write(4, &[2, 0]);
    assert_eq!(rig.device.bus_master_times().asked, None);
    let (done, wait) = mpsc::channel();
    let guest = {
        let rig = Arc::clone(&rig);
        std::thread::spawn(move || {
            rig.write(4, &[6, 4]);
            done.send(rig.host.is_bus_master()).unwrap();
        })
    };
    // Other vCPUs continue meanwhile.
    while rig.device.bus_master_times().asked.is_none() {
        assert_eq!(rig.read::<1>(4), [2]);
    }
    assert!(wait.try_recv().is_err());
    assert_eq!(rig.device.bus_master_times().granted, None);
    rig.gate.open();
    assert_eq!(wait.recv_timeout(PATIENCE), Ok(true));
    guest.join().unwrap();
    assert!(rig.device.bus_master_times().granted.is_some());
    assert_eq!(rig.read::<2>(4), [6, 4]);
    rig.check();
}

#[test]
fn a_write_that_waits_at_the_gate_does_not_arm_a_device_that_failed_meanwhile() {
    let rig = Arc::new(Rig::new());
    rig.write(4, &[2, 0]);
    let guest = {
        let rig = Arc::clone(&rig);
        std::thread::spawn(move || rig.write(4, &[6, 0]))
    };
    while rig.device.bus_master_times().asked.is_none() {
        std::thread::yield_now();
    }
    rig.device.disarm();
    assert!(rig.device.is_lost() && rig.device.is_disarmed());
    rig.gate.open();
    guest.join().unwrap();
    assert!(!rig.host.is_bus_master(), "it reaches memory that is about to be unmapped");
    rig.write(4, &[6, 0]);
    assert!(!rig.host.is_bus_master());
    rig.check();
}

#[test]
fn a_failure_pulls_the_device_out() {
    let rig = Rig::new();
    rig.write(4, &[2, 0]);
    rig.write(MSIX_OFFSET + 2, &[4, 0x80]);
    rig.gate.fail("no memory");
    rig.write(4, &[6, 0]);
    assert!(rig.device.is_lost());
    assert!(!rig.host.is_bus_master());
    assert_eq!(rig.read::<4>(0), [0xff; 4]);
    assert_eq!(rig.slots.shown(), []);
    assert_eq!(rig.host.connected(), None);
    assert!(rig.mapper.mapped().is_empty(), "nothing decodes any more");
    let mut data = [0; 4];
    rig.device.read_bar(0, 0, &mut data);
    assert_eq!(data, [0xff; 4]);
    rig.check();
}

#[test]
fn a_device_is_harmless_before_it_is_released() {
    let rig = Rig::new();
    rig.write(4, &[2, 0]);
    rig.write(MSIX_OFFSET + 2, &[4, 0x80]);
    rig.gate.open();
    rig.write(4, &[6, 0]);
    assert!(rig.host.is_bus_master());
    let number = DeviceNumber::new(1).unwrap();
    rig.segment.remove_device(number).unwrap();
    assert_eq!(rig.slots.shown(), []);
    rig.device.disarm();
    assert!(!rig.host.is_bus_master());
    assert_eq!((rig.host.connected(), *rig.host.resets.lock()), (None, 1));
    assert_eq!(Arc::strong_count(&rig.device), 1, "no other reference is left");
    rig.check();
}

#[test]
fn nothing_is_left_when_the_device_goes() {
    let rig = Rig::with(FakeFunction::config(), Vec::new(), true);
    rig.write(4, &[2, 0]);
    let Rig { host, device, slots, mapper, ecam, segment, .. } = rig;
    drop((device, ecam, segment, mapper));
    assert_eq!(slots.shown(), []);
    assert_eq!(host.connected(), None);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_function_is_silent_only_if_it_says_that_its_dma_is_off() {
    let rig = Rig::new();
    rig.gate.open();
    rig.device.write_config(4, &[6, 0]);
    assert!(rig.host.is_bus_master());
    assert!(rig.device.silence());
    assert!(!rig.host.is_bus_master() && rig.device.is_lost());
    rig.device.write_config(4, &[6, 0]);
    assert!(!rig.host.is_bus_master(), "it is gone for the guest");

    let rig = Rig::new();
    rig.gate.open();
    rig.device.write_config(4, &[6, 0]);
    rig.host.ignores_commands.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(!rig.device.silence());
}

#[test]
fn the_host_hears_whether_the_guest_uses_a_function() {
    let rig = Rig::new();
    let in_use = || rig.host.in_use.load(std::sync::atomic::Ordering::Relaxed);
    // What firmware does before it places BARs.
    rig.device.write_config(0x10, &[0xff; 4]);
    rig.device.write_config(4, &[0, 4]);
    assert!(!in_use());
    for command in [1, 2, 4] {
        rig.gate.open();
        rig.device.write_config(4, &[command, 0]);
        assert!(in_use(), "{command}");
        rig.host.in_use.store(false, std::sync::atomic::Ordering::Relaxed);
    }
    rig.device.write_config(4, &[2, 0]);
    rig.device.lose();
    assert!(!in_use());
    rig.device.write_config(4, &[2, 0]);
    assert!(!in_use(), "it is gone for the guest");
}

#[test]
fn a_function_that_cannot_be_reset_is_harmless_all_the_same() {
    let rig = Rig::new();
    rig.gate.open();
    rig.device.write_config(4, &[6, 0]);
    rig.host.refuses_resets.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(rig.host.reset().is_err());
    rig.device.disarm();
    assert!(rig.device.is_disarmed() && !rig.host.is_bus_master());
}
