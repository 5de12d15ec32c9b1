// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The platform against docs/cloud-hypervisor-state.md, whose sections the tests name.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use arch::acpi::{HotplugProtocol, HotplugRegisters, RegisterPlace};
use arch::cpuid::{FlatCount, TimingLeaf};
use arch::layout::{self, HighHole};
use devices::virtio::rng::{Rng, RngConfig};
use devices::virtio::{Offering, VirtioDevice};
use memory::{GuestMemory, GuestMemoryHandle};
use pci::fakes::{FakeDevice, FakeIoEvents, FakeMapper, FakeMsiSource};
use pci::{
    BarWidth, MmioRange, MmioWindows, PciDevice, PciSegment, PciSegmentOptions, VirtioPciDevice,
    VirtioPciForm,
};
use vm_memory::GuestAddress;

use super::CLOUD_HYPERVISOR_53 as PLATFORM;
use crate::platform::DeviceKind;

fn function(id: &str, device: Box<dyn VirtioDevice>, width: BarWidth) -> Arc<dyn PciDevice> {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    let function = VirtioPciDevice::with_form(
        id.to_owned(),
        device,
        VirtioPciForm { width, rules: &PLATFORM.virtio_pci },
        GuestMemoryHandle::new(memory),
        &FakeMsiSource::new(16),
        Arc::new(FakeIoEvents::default()),
    );
    Arc::new(function.unwrap())
}

/// A disk with three queues.
fn disk(id: &str, width: BarWidth) -> Arc<dyn PciDevice> {
    function(id, FakeDevice::with_record().0, width)
}

fn rng() -> Arc<dyn PciDevice> {
    let source = "/dev/urandom".into();
    let rng = Rng::new(RngConfig { id: "rng".to_owned(), source }).unwrap();
    let rng = Offering::of(Box::new(rng), PLATFORM.offers.rng);
    function("rng", Box::new(rng), BarWidth::Bits64)
}

fn word(function: &dyn PciDevice, offset: u16) -> u32 {
    let mut bytes = [0; 4];
    function.read_config(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

/// Offset, id, type and structure offset of each capability in the list; of MSI-X its id alone.
fn capabilities(function: &dyn PciDevice) -> Vec<(u16, u8, u8, u32, u32)> {
    let mut found = Vec::new();
    let mut at = word(function, 0x34).to_le_bytes()[0];
    while at != 0 {
        let offset = u16::from(at);
        let [id, next, _, kind] = word(function, offset).to_le_bytes();
        let is_virtio = id == 9;
        let structure = (word(function, offset + 8), word(function, offset + 12));
        let (kind, structure) = if is_virtio { (kind, structure) } else { (0, (0, 0)) };
        found.push((offset, id, kind, structure.0, structure.1));
        at = next;
    }
    found
}

/// Section 5.6, the tables of BAR 0 and of capabilities.
#[test]
fn a_device_with_a_configuration_has_these_capabilities() {
    let disk = disk("disk", BarWidth::Bits32);
    assert_eq!(
        capabilities(disk.as_ref()),
        [
            (0x40, 9, 1, 0x0, 0x38),
            (0x50, 9, 3, 0x2000, 1),
            (0x60, 9, 4, 0x4000, 0x1000),
            (0x70, 9, 2, 0x6000, 0x1000),
            (0x84, 9, 5, 0, 0),
            (0x98, 0x11, 0, 0, 0),
        ]
    );
    assert_eq!(word(disk.as_ref(), 0x80), 4, "the multiplier of notifications");
    assert_eq!(word(disk.as_ref(), 0x98) >> 16, 3, "one vector more than queues");
    assert_eq!((word(disk.as_ref(), 0x9c), word(disk.as_ref(), 0xa0)), (0x8000, 0x4_8000));
}

#[test]
fn a_device_without_a_configuration_has_no_capability_for_it() {
    let offsets: Vec<_> =
        capabilities(rng().as_ref()).iter().map(|it| (it.0, it.1, it.2)).collect();
    assert_eq!(offsets, [(0x40, 9, 1), (0x50, 9, 3), (0x60, 9, 2), (0x74, 9, 5), (0x88, 0x11, 0)]);
}

/// Section 5.6: identity, BAR and command register.
#[test]
fn identity_bar_and_command_are_those_of_the_platform() {
    let (disk, rng) = (disk("disk", BarWidth::Bits32), rng());
    assert_eq!(word(disk.as_ref(), 0), 0x1042_1af4);
    assert_eq!(word(disk.as_ref(), 0x2c), 0x1042_1af4);
    assert_eq!(word(disk.as_ref(), 8), 0x0180_0001);
    assert_eq!(word(rng.as_ref(), 8), 0xffff_0001);
    assert_eq!(word(disk.as_ref(), 0x3c), 0, "no interrupt pin");
    for (function, low) in [(&disk, 0xfff8_0000_u32), (&rng, 0xfff8_0004)] {
        function.write_config(0x10, &u32::MAX.to_le_bytes());
        assert_eq!(word(function.as_ref(), 0x10), low);
        function.write_config(4, &u16::MAX.to_le_bytes());
        assert_eq!(word(function.as_ref(), 4) & 0xffff, 0xffff, "all bits are writable");
    }
}

/// Section 5.6: bus mastering is not enforced.
#[test]
fn a_device_works_without_bus_mastering() {
    let function = disk("disk", BarWidth::Bits64);
    for command in [7_u16, 3] {
        function.write_config(4, &command.to_le_bytes());
    }
    let mut status = [0];
    function.write_bar(0, 0x14, &[3]);
    function.read_bar(0, 0x14, &mut status);
    assert_eq!(status, [3]);
    // DEVICE_NEEDS_RESET would be set if clearing the bit had stopped it.
    function.write_bar(0, 0x08, &1_u32.to_le_bytes());
    function.write_bar(0, 0x0c, &1_u32.to_le_bytes());
    function.write_bar(0, 0x14, &[11]);
    function.write_bar(0, 0x14, &[15]);
    function.write_config(4, &7_u16.to_le_bytes());
    function.write_config(4, &3_u16.to_le_bytes());
    function.read_bar(0, 0x14, &mut status);
    assert_eq!(status, [15]);
}

/// Sections 5.1 and 5.6: windows are filled from the top.
#[test]
fn bars_are_placed_from_the_top() {
    let ram_end_gpa = 5 << 30;
    let high = PLATFORM.windows.high(ram_end_gpa, 40, HighHole::None).unwrap();
    assert_eq!((high.gpa, high.end_gpa()), (ram_end_gpa, (1 << 40) - 0x11_0000));
    let low = MmioRange { start_gpa: layout::MMIO32_GPA, len_bytes: layout::MMIO32_BYTES };
    let high = MmioRange { start_gpa: high.gpa, len_bytes: high.len_bytes };
    let windows = MmioWindows { below_4g: low, above_4g: high };
    let mapper = Arc::new(FakeMapper::new(vec![low, high]));
    let options = PciSegmentOptions { segment: 0, windows };
    let segment = PciSegment::with_rules(options, PLATFORM.bars, mapper, None).unwrap();
    let mut gpas = Vec::new();
    for (number, width) in
        [BarWidth::Bits32, BarWidth::Bits32, BarWidth::Bits64, BarWidth::Bits64].iter().enumerate()
    {
        let function = disk(&format!("disk{number}"), *width);
        let bdf = segment.add_device(&function, None).unwrap();
        assert_eq!(usize::from(bdf.device()), number + 1);
        gpas.push(function.bar_decode().gpas[0].1);
    }
    let top = (1 << 40) - 0x11_0000_u64;
    let first = (top - 0x8_0000) >> 23 << 23;
    assert_eq!(gpas, [0xe7f8_0000, 0xe7f0_0000, first, first - 0x80_0000]);
}

/// Section 5.2.
#[test]
fn the_last_segment_has_the_rest_of_the_windows() {
    let low = layout::GpaRange { gpa: layout::MMIO32_GPA, len_bytes: layout::MMIO32_BYTES };
    let parts = PLATFORM.windows.low_shares(low, &[1, 1, 1]).unwrap();
    // 163840 pages by 3 are 54613, and one is left.
    assert_eq!(
        parts.iter().map(|part| part.len_bytes / 4096).collect::<Vec<_>>(),
        [54613, 54613, 54614]
    );
}

/// Section 5.6: the order of device numbers. Each kind is in it once, on every platform.
#[test]
fn every_kind_of_device_gets_its_number_once() {
    use crate::platform::GODWIT;
    for platform in [&PLATFORM, &GODWIT] {
        let mut kinds = platform.numbers.order.to_vec();
        kinds.sort_unstable();
        kinds.dedup();
        assert_eq!(kinds.len(), platform.numbers.order.len());
        assert_eq!(kinds.len(), 14);
        let at = |kind| platform.numbers.order.iter().position(|it| *it == kind);
        assert!(at(DeviceKind::Mem) < at(DeviceKind::Balloon), "they determine its maximum size");
    }
    use DeviceKind::{Console, Disk, Net, Rng};
    assert_eq!(PLATFORM.numbers.order[..4], [Console, Disk, Net, Rng]);
}

/// Section 6.4, the column of what v53 offers.
#[test]
fn features_are_those_of_the_table() {
    let offers = &PLATFORM.offers;
    let version_1 = 1_u64 << 32;
    for (offer, keep, add) in [
        (offers.console, 1, 0),
        (offers.disk, 0x3000_7e64, 0),
        (offers.net, 0x2063_7faf, 1 << 22),
        (offers.rng, 0, 0),
        (offers.watchdog, 0, 0),
        (offers.pmem, 0, 0),
        (offers.rtc, 0, 0),
        (offers.balloon, 0x24, 0),
        (offers.vsock, 0, 1 << 35),
        (offers.mem, 1, 0),
    ] {
        assert_eq!((offer.keep, offer.add), (version_1 | keep, add), "{offer:x?}");
    }
}

/// Section 4.8, the column of queues.
#[test]
fn queues_are_those_of_the_table() {
    let offers = &PLATFORM.offers;
    for (offer, sizes) in [
        (offers.console, &[256_u16, 256][..]),
        (offers.rng, &[256]),
        (offers.balloon(true), &[128, 128, 32]),
        (offers.balloon(false), &[128, 128]),
        (offers.rtc, &[256]),
        (offers.vsock, &[256, 256, 256]),
        (offers.mem, &[128]),
        (offers.pmem, &[256]),
        (offers.watchdog, &[8]),
    ] {
        assert_eq!(offer.queue_sizes, Some(sizes));
    }
    assert_eq!((offers.disk.queue_sizes, offers.net.queue_sizes), (None, None));
}

/// Section 5.1, the table of platform devices.
#[test]
fn registers_are_below_the_end_of_the_addresses() {
    let end = 1_u64 << 46;
    let selected = |gpa| HotplugRegisters {
        place: RegisterPlace::Memory(gpa),
        protocol: HotplugProtocol::Selector,
    };
    let without = PLATFORM.registers.placed(46, false);
    assert_eq!(without.pci, RegisterPlace::Memory(end - 0x1_1000));
    assert_eq!(without.cpus, selected(end - 0x1_2000));
    assert_eq!(without.ged, RegisterPlace::Memory(end - 0x1_3000));
    let with = PLATFORM.registers.placed(46, true);
    assert_eq!(with.memory, selected(end - 0x1_1000));
    assert_eq!(with.pci, RegisterPlace::Memory(end - 0x1_2000));
    assert_eq!(with.cpus, selected(end - 0x1_3000));
    assert_eq!(with.ged, RegisterPlace::Memory(end - 0x1_4000));
    let window = PLATFORM.windows.high(4 << 30, 46, HighHole::None).unwrap();
    assert!(window.end_gpa() <= end - 0x11_0000, "they are outside of it");
}

/// Sections 5.4, 5.5 and 5.7.
#[test]
fn lines_tables_and_cpuid_are_those_of_the_platform() {
    assert_eq!((PLATFORM.ged_gsi, PLATFORM.first_intx_gsi), (13, 5));
    assert_eq!(
        (PLATFORM.ports.keyboard_data, PLATFORM.ports.firmware_output),
        (false, Some(0x402))
    );
    assert!(PLATFORM.interrupts.hides_pics && PLATFORM.interrupts.extended_destinations);
    let tables = PLATFORM.tables;
    assert!(tables.wide_apic_ids && tables.all_may_come && !tables.has_nmi);
    assert!(!tables.has_legacy_flags && !tables.has_generation_id);
    assert_eq!((tables.identity_overrides, tables.event_device), (&[4][..], "GEC_"));
    let cpuid = PLATFORM.cpuid;
    assert_eq!(
        (cpuid.flat_count, cpuid.timing_leaf),
        (FlatCount::AtBoot, TimingLeaf::InvariantTsc)
    );
    assert!(cpuid.guest_address_bits && cpuid.msi_ext_dest_id);
}
