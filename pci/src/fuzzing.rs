// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entry points for fuzzing: bytes are interpreted as accesses of a guest.
//!
//! Whatever the guest does, nothing may panic, no BAR may be mapped outside of the windows or over
//! another, and no ioeventfd may be left behind.

use std::sync::Arc;

use devices::bus::BusDevice;
use memory::{GuestMemory, GuestMemoryHandle};
use pci_address::DeviceNumber;
use vm_memory::GuestAddress;

use crate::bar_placement::{MmioRange, MmioWindows};
use crate::bus::{PciConfigIo, PciEcam, PciSegment, PciSegmentOptions};
use crate::device::PciDevice;
use crate::fakes::{FakeDevice, FakeIoEvents, FakeMapper, FakeMsiSource};
use crate::virtio::{BarWidth, VirtioPciDevice, VirtioPciState};

const WINDOWS: MmioWindows = MmioWindows {
    below_4g: MmioRange { start_gpa: 0xc000_0000, len_bytes: 0x100_0000 },
    above_4g: MmioRange { start_gpa: 0x40_0000_0000, len_bytes: 0x100_0000 },
};
const MEMORY_LEN_BYTES: usize = 0x10_0000;
/// Maximum number of accesses per run, so that a long input does not look like a hang.
const ACCESSES_MAX: usize = 4096;

/// A machine with devices and fake back ends.
struct Rig {
    segment: Arc<PciSegment>,
    ecam: PciEcam,
    ports: PciConfigIo,
    mapper: Arc<FakeMapper>,
    events: Arc<FakeIoEvents>,
    devices: Vec<Arc<VirtioPciDevice>>,
}

impl Rig {
    fn new(devices_count: u8) -> Option<Self> {
        let mapper = Arc::new(FakeMapper::new(vec![WINDOWS.below_4g, WINDOWS.above_4g]));
        let events = Arc::new(FakeIoEvents::default());
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_LEN_BYTES)]).ok()?;
        let memory = GuestMemoryHandle::new(memory);
        let options = PciSegmentOptions { segment: 0, windows: WINDOWS };
        let segment = PciSegment::new(options, mapper.clone()).ok()?;
        let mut devices = Vec::new();
        for number in 1..=devices_count {
            let device = VirtioPciDevice::new(
                format!("device{number}"),
                FakeDevice::with_record().0,
                // Both widths occur.
                if number % 2 == 1 { BarWidth::Bits64 } else { BarWidth::Bits32 },
                memory.clone(),
                &FakeMsiSource::new(1024),
                events.clone(),
            );
            let device = Arc::new(device.ok()?);
            let on_bus: Arc<dyn PciDevice> = device.clone();
            segment.add_device(&on_bus, DeviceNumber::new(number).ok()).ok()?;
            devices.push(device);
        }
        let (ecam, ports) = (PciEcam::new(&segment), PciConfigIo::new(&segment));
        Some(Self { segment, ecam, ports, mapper, events, devices })
    }

    fn check(&self) {
        assert_eq!(self.mapper.violations(), Vec::<String>::new());
        assert_eq!(self.events.violations(), Vec::<String>::new());
        for device in &self.devices {
            device.pause();
            let saved = PciDevice::save(device.as_ref());
            assert!(saved.is_ok(), "{:?}", saved.err());
            device.resume();
            device.reset();
        }
        assert_eq!(self.events.addresses(), Vec::<u64>::new());
        self.segment.refresh_mappings();
    }
}

/// Reads bytes from the front; zeros at the end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let (head, rest) = self.0.split_at(self.0.len().min(N));
        for (to, from) in bytes.iter_mut().zip(head) {
            *to = *from;
        }
        self.0 = rest;
        bytes
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.take();
        byte
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    /// One to eight bytes of data, mostly of the widths that processors use.
    fn data(&mut self) -> Vec<u8> {
        let choice = self.byte();
        let len = match choice & 0xf {
            0..=4 => 1,
            5..=8 => 2,
            9..=12 => 4,
            13 => 8,
            _ => usize::from(choice >> 4) % 9,
        };
        let bytes: [u8; 8] = self.take();
        bytes[..len].to_vec()
    }
}

/// Fuzzes configuration space accesses to a bus with three devices, through ECAM and ports.
#[doc(hidden)]
pub fn fuzz_config_space(bytes: &[u8]) {
    let Some(rig) = Rig::new(3) else { return };
    let mut input = Input(bytes);
    for _ in 0..ACCESSES_MAX {
        if input.0.is_empty() {
            break;
        }
        let kind = input.byte();
        // Mostly the standard headers of existing devices.
        let device = u64::from(kind >> 4 & 3);
        let offset = match kind & 0xc {
            0 => u64::from(input.byte()),
            4 => 0x10 + u64::from(input.byte() % 0x18),
            8 => 0x04,
            _ => u64::from(input.u16()) << 4 | u64::from(input.byte()),
        };
        let mut data = input.data();
        match kind & 3 {
            0 => rig.ecam.write(device << 15 | offset, &data),
            1 => rig.ecam.read(device << 15 | offset, &mut data),
            2 => rig.ports.write(offset & 0xf, &data),
            _ => rig.ports.read(offset & 0xf, &mut data),
        }
    }
    rig.check();
}

/// Takes the device to DRIVER_OK, with a queue from the input; random accesses alone would rarely get
/// there.
fn drive(rig: &Rig, bar_gpa: u64, input: &mut Input) {
    let write = |offset: u64, data: &[u8]| rig.mapper.write(bar_gpa + offset, data);
    for status in [&[0_u8][..], &[1], &[3]] {
        write(0x14, status);
    }
    for (select, word) in [(0_u32, FakeDevice::OFFERED & 0xffff_ffff), (1, 1)] {
        write(0x08, &select.to_le_bytes());
        write(0x0c, &word.to_le_bytes()[..4]);
    }
    write(0x14, &[11]);
    let [queue, size, gpa0, gpa1, gpa2, vector] = input.take();
    write(0x16, &u16::from(queue & 3).to_le_bytes());
    write(0x18, &(1_u16 << (size & 0xf)).to_le_bytes());
    for (offset, gpa) in [(0x20, gpa0), (0x28, gpa1), (0x30, gpa2)] {
        write(offset, &(u32::from(gpa) << 12).to_le_bytes());
    }
    write(0x1a, &u16::from(vector & 7).to_le_bytes());
    write(0x1c, &[1, 0]);
    write(0x14, &[15]);
}

/// Fuzzes accesses to the BAR of a virtio device, with pauses and resumes in between.
#[doc(hidden)]
pub fn fuzz_transport(bytes: &[u8]) {
    let Some(rig) = Rig::new(1) else { return };
    let Some(device) = rig.devices.first() else { return };
    rig.ecam.write(1 << 15 | 0x04, &[6, 0]);
    let bar_gpa = WINDOWS.above_4g.start_gpa;
    let mut input = Input(bytes);
    for _ in 0..ACCESSES_MAX {
        if input.0.is_empty() {
            break;
        }
        let kind = input.byte();
        // Mostly the common configuration, and mostly registers there.
        let offset = match kind >> 4 & 7 {
            0..=2 => u64::from(input.byte() & 0x3e),
            3 => 0x14,
            4 => u64::from(input.byte()),
            5 => u64::from(input.u16()),
            6 => 0x4000 | u64::from(input.byte()),
            _ => 0x3000 | u64::from(input.byte()),
        };
        let mut data = input.data();
        match kind & 0xf {
            0 => drive(&rig, bar_gpa, &mut input),
            1..=9 => {
                if !rig.events.signal(bar_gpa + offset) {
                    rig.mapper.write(bar_gpa + offset, &data);
                }
            }
            10..=12 => drop(rig.mapper.read(bar_gpa + offset, &mut data)),
            13 => device.pause(),
            14 => device.resume(),
            _ => rig.ecam.write(1 << 15 | offset & 0xfff, &data),
        }
    }
    rig.check();
}

/// Fuzzes the restore of a saved state into a new device, which is then resumed.
#[doc(hidden)]
pub fn fuzz_state(bytes: &[u8]) {
    let Ok(state) = serde_json::from_slice::<VirtioPciState>(bytes) else { return };
    let Some(rig) = Rig::new(1) else { return };
    let Some(device) = rig.devices.first() else { return };
    if device.restore(&state).is_ok() {
        assert_eq!(device.save().ok().map(|saved| saved.queues), Some(state.queues));
    }
    rig.segment.refresh_mappings();
    device.resume();
    rig.check();
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn driven() -> Rig {
        let rig = Rig::new(1).unwrap();
        rig.ecam.write(1 << 15 | 0x04, &[6, 0]);
        // Queue 0 of 128 entries with its rings at 4, 8 and 12 KiB, and vector 1.
        drive(&rig, WINDOWS.above_4g.start_gpa, &mut Input(&[0, 7, 1, 2, 3, 1]));
        rig
    }

    #[test]
    fn the_target_reaches_active_devices() {
        assert!(driven().devices[0].is_active());
    }

    proptest! {
        /// A valid state in which single characters were replaced.
        #[test]
        fn states_survive(changes in prop::collection::vec((any::<prop::sample::Index>(), "[0-9a-z]"), 0..4)) {
            let rig = driven();
            rig.devices[0].pause();
            let mut text = serde_json::to_vec(&rig.devices[0].save().unwrap()).unwrap();
            for (index, change) in changes {
                let at = index.index(text.len());
                text[at] = change.as_bytes()[0];
            }
            fuzz_state(&text);
        }

        #[test]
        fn config_space_survives(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
            fuzz_config_space(&bytes);
        }

        #[test]
        fn transport_survives(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
            fuzz_transport(&bytes);
        }
    }
}
