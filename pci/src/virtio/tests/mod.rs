// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the transport: a small driver that finds its way by the capabilities, as Linux does.
#![expect(clippy::unwrap_used, reason = "tests")]

mod bus_master;
mod driving;
mod misuse;
mod saved_state;

use std::sync::Arc;

use devices::bus::BusDevice;
use devices::virtio::VirtioInterrupt;
use hypervisor::irq::MsiMessage;
use memory::{GuestMemory, GuestMemoryHandle};
use parking_lot::{Mutex, MutexGuard};
use pci_address::DeviceNumber;
use vm_memory::GuestAddress;

use super::{BarWidth, VirtioPciDevice};
use crate::bar_placement::{MmioRange, MmioWindows};
use crate::bus::{PciEcam, PciSegment, PciSegmentOptions};
use crate::device::PciDevice;
use crate::fakes::{DeviceCall, DeviceRecord, FakeDevice, FakeIoEvents, FakeMapper, FakeMsiSource};

const WINDOWS: MmioWindows = MmioWindows {
    below_4g: MmioRange { start_gpa: 0xc000_0000, len_bytes: 0x10_0000 },
    above_4g: MmioRange { start_gpa: 0x40_0000_0000, len_bytes: 0x100_0000 },
};
const MEMORY_LEN_BYTES: usize = 0x10_0000;
const SLOT: u64 = 5 << 15;

/// Registers of the common configuration.
mod reg {
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub const DEVICE_FEATURE: u64 = 0x04;
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub const DRIVER_FEATURE: u64 = 0x0c;
    pub const CONFIG_VECTOR: u64 = 0x10;
    pub const NUM_QUEUES: u64 = 0x12;
    pub const STATUS: u64 = 0x14;
    pub const GENERATION: u64 = 0x15;
    pub const QUEUE_SELECT: u64 = 0x16;
    pub const QUEUE_SIZE: u64 = 0x18;
    pub const QUEUE_VECTOR: u64 = 0x1a;
    pub const QUEUE_ENABLE: u64 = 0x1c;
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub const QUEUE_DESC: u64 = 0x20;
    pub const QUEUE_DRIVER: u64 = 0x28;
    pub const QUEUE_DEVICE: u64 = 0x30;
}

/// Where a driver found the structures, as guest physical addresses.
#[derive(Clone, Copy, Default)]
struct Found {
    common: u64,
    notify: u64,
    notify_multiplier: u64,
    isr: u64,
    device: u64,
    msix_capability: u64,
    msix_table: u64,
    window_capability: u64,
}

struct Rig {
    segment: Arc<PciSegment>,
    ecam: PciEcam,
    mapper: Arc<FakeMapper>,
    events: Arc<FakeIoEvents>,
    interrupts: Arc<FakeMsiSource>,
    device: Arc<VirtioPciDevice>,
    record: Arc<Mutex<DeviceRecord>>,
    found: Found,
}

impl Rig {
    /// A machine with the device at 00:05.0, untouched by any driver.
    fn cold() -> Self {
        Self::cold_with(BarWidth::Bits64, WINDOWS)
    }

    fn cold_with(width: BarWidth, windows: MmioWindows) -> Self {
        Self::cold_as(width, windows, |device| device)
    }

    fn cold_as(
        width: BarWidth,
        windows: MmioWindows,
        change: impl FnOnce(VirtioPciDevice) -> VirtioPciDevice,
    ) -> Self {
        let mapper = Arc::new(FakeMapper::new(vec![WINDOWS.below_4g, WINDOWS.above_4g]));
        let events = Arc::new(FakeIoEvents::default());
        let interrupts = Arc::new(FakeMsiSource::new(64));
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_LEN_BYTES)]).unwrap();
        let (fake, record) = FakeDevice::with_record();
        let device = VirtioPciDevice::new(
            "disk0".to_owned(),
            fake,
            width,
            GuestMemoryHandle::new(memory),
            interrupts.as_ref(),
            events.clone(),
        );
        let device = Arc::new(change(device.unwrap()));
        let options = PciSegmentOptions { segment: 0, windows };
        let segment = PciSegment::new(options, mapper.clone()).unwrap();
        let on_bus: Arc<dyn PciDevice> = device.clone();
        segment.add_device(&on_bus, Some(DeviceNumber::new(5).unwrap())).unwrap();
        let ecam = PciEcam::new(&segment);
        let found = Found::default();
        Self { segment, ecam, mapper, events, interrupts, device, record, found }
    }

    /// A machine whose guest found the device and switched memory decode on.
    fn new() -> Self {
        let mut rig = Self::cold();
        rig.probe();
        rig
    }

    /// A machine whose driver runs, with queues 0 and 2.
    fn driving() -> Self {
        let rig = Self::new();
        rig.negotiate(FakeDevice::OFFERED);
        rig.enable_msix();
        rig.set_up_queue(0, 128, 0x1_0000);
        rig.set_up_queue(2, 1024, 0x4_0000);
        rig.write_u16(reg::CONFIG_VECTOR, 0);
        rig.set_status(15);
        assert_eq!(rig.status(), 15);
        rig
    }

    fn record(&self) -> MutexGuard<'_, DeviceRecord> {
        self.record.lock()
    }

    fn take_kicks(&self, queue_index: u16) -> u64 {
        self.record().take_kicks(queue_index)
    }

    fn take_calls(&self) -> Vec<DeviceCall> {
        self.record().take_calls()
    }

    fn interrupt(&self) -> Arc<dyn VirtioInterrupt> {
        self.record().interrupt().unwrap()
    }

    fn config_u32(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.ecam.read(SLOT + offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn config_u8(&self, offset: u64) -> u64 {
        let mut data = [0];
        self.ecam.read(SLOT + offset, &mut data);
        data[0].into()
    }

    fn write_config(&self, offset: u64, data: &[u8]) {
        self.ecam.write(SLOT + offset, data);
    }

    fn bar_gpa(&self) -> u64 {
        u64::from(self.config_u32(0x14)) << 32 | u64::from(self.config_u32(0x10) & !0xf)
    }

    /// How wide the BAR says that it is.
    fn bar_width(&self) -> BarWidth {
        match self.config_u32(0x10) & 7 {
            0 => BarWidth::Bits32,
            4 => BarWidth::Bits64,
            other => panic!("no memory BAR: {other:#x}"),
        }
    }

    /// Switches decode and bus mastering on and walks the capabilities.
    fn probe(&mut self) {
        self.write_config(4, &[6, 0]);
        self.find();
    }

    fn find(&mut self) {
        let bar = self.bar_gpa();
        let mut found = Found::default();
        let mut at = self.config_u8(0x34);
        while at != 0 {
            let place = || bar + u64::from(self.config_u32(at + 8));
            match (self.config_u8(at), self.config_u8(at + 3)) {
                (0x11, _) => {
                    found.msix_capability = at;
                    found.msix_table = bar + u64::from(self.config_u32(at + 4) & !7);
                }
                (9, 1) => found.common = place(),
                (9, 2) => {
                    found.notify = place();
                    found.notify_multiplier = self.config_u32(at + 16).into();
                }
                (9, 3) => found.isr = place(),
                (9, 4) => found.device = place(),
                (9, 5) => found.window_capability = at,
                other => panic!("unexpected capability {other:?}"),
            }
            at = self.config_u8(at + 1);
        }
        self.found = found;
    }

    /// A guest's write, which the kernel may turn into a signal.
    fn write(&self, gpa: u64, data: &[u8]) {
        if !self.events.signal(gpa) {
            assert!(self.mapper.write(gpa, data), "nothing at {gpa:#x}");
        }
    }

    fn read<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut data = [0; N];
        assert!(self.mapper.read(gpa, &mut data), "nothing at {gpa:#x}");
        data
    }

    fn write_u16(&self, register: u64, value: u16) {
        self.write(self.found.common + register, &value.to_le_bytes());
    }

    fn write_u32(&self, register: u64, value: u32) {
        self.write(self.found.common + register, &value.to_le_bytes());
    }

    fn write_u64(&self, register: u64, value: u64) {
        let [low, high] = [value & 0xffff_ffff, value >> 32];
        self.write_u32(register, u32::try_from(low).unwrap());
        self.write_u32(register + 4, u32::try_from(high).unwrap());
    }

    fn read_u16(&self, register: u64) -> u16 {
        u16::from_le_bytes(self.read(self.found.common + register))
    }

    fn read_u32(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.read(self.found.common + register))
    }

    fn status(&self) -> u8 {
        let [status] = self.read(self.found.common + reg::STATUS);
        status
    }

    fn set_status(&self, status: u8) {
        self.write(self.found.common + reg::STATUS, &[status]);
    }

    fn offered_features(&self) -> u64 {
        self.write_u32(reg::DEVICE_FEATURE_SELECT, 0);
        let low = self.read_u32(reg::DEVICE_FEATURE);
        self.write_u32(reg::DEVICE_FEATURE_SELECT, 1);
        let high = self.read_u32(reg::DEVICE_FEATURE);
        u64::from(high) << 32 | u64::from(low)
    }

    /// Reset to FEATURES_OK; says whether the device agreed.
    fn negotiate(&self, features: u64) -> bool {
        self.set_status(0);
        self.set_status(1);
        self.set_status(3);
        self.write_u32(reg::DRIVER_FEATURE_SELECT, 0);
        self.write_u32(reg::DRIVER_FEATURE, u32::try_from(features & 0xffff_ffff).unwrap());
        self.write_u32(reg::DRIVER_FEATURE_SELECT, 1);
        self.write_u32(reg::DRIVER_FEATURE, u32::try_from(features >> 32).unwrap());
        self.set_status(11);
        self.status() == 11
    }

    /// Masks all, programs each vector with data 0x40 + index, unmasks all.
    fn enable_msix(&self) {
        let control = self.found.msix_capability + 2;
        self.write_config(control, &0xc000_u16.to_le_bytes());
        for vector in 0_u8..4 {
            let entry = self.found.msix_table + u64::from(vector) * 16;
            self.write(entry, &0xfee0_0000_u32.to_le_bytes());
            self.write(entry + 4, &0_u32.to_le_bytes());
            self.write(entry + 8, &(0x40 + u32::from(vector)).to_le_bytes());
            self.write(entry + 12, &0_u32.to_le_bytes());
        }
        self.write_config(control, &0x8000_u16.to_le_bytes());
    }

    /// Sets a queue up with its rings from `gpa` on, 64 KiB apart, and vector index + 1.
    fn set_up_queue(&self, index: u16, size: u16, gpa: u64) {
        self.write_u16(reg::QUEUE_SELECT, index);
        self.write_u16(reg::QUEUE_SIZE, size);
        self.write_u64(reg::QUEUE_DESC, gpa);
        self.write_u64(reg::QUEUE_DRIVER, gpa + 0x1_0000);
        self.write_u64(reg::QUEUE_DEVICE, gpa + 0x2_0000);
        self.write_u16(reg::QUEUE_VECTOR, index + 1);
        assert_eq!(self.read_u16(reg::QUEUE_VECTOR), index + 1);
        self.write_u16(reg::QUEUE_ENABLE, 1);
    }

    fn notify_gpa(&self, index: u16) -> u64 {
        self.write_u16(reg::QUEUE_SELECT, index);
        let notify_off = u64::from(self.read_u16(reg::QUEUE_NOTIFY_OFF));
        self.found.notify + notify_off * self.found.notify_multiplier
    }

    fn delivered(&self, vector: usize) -> usize {
        let vector = self.interrupts.vector(vector).unwrap();
        std::mem::take(&mut vector.record().delivered).len()
    }

    fn programmed(&self, vector: usize) -> Option<MsiMessage> {
        self.interrupts.vector(vector).unwrap().record().programmed
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.mapper.violations(), Vec::<String>::new());
            assert_eq!(self.events.violations(), Vec::<String>::new());
        }
    }
}
