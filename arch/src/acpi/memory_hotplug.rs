// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory hotplug: the contract between the AML and the device behind it, and that AML.
//!
//! Memory that is added is a memory device (ACPI 6.5, sections 5.6.6 and 9.11): the guest is notified of it, looks at
//! its `_STA`, and finds its addresses in its `_CRS`. There are [`DEVICES`] of them, numbered by their UID. Registers
//! are little-endian words of 32 bits in I/O ports:
//!
//! | offset | name | read | written |
//! | --- | --- | --- | --- |
//! | 0 | `MMNX` | takes the number of the next device that came; [`NO_EVENT`] if there is none | ignored |
//! | 4 | `MMST` | [`NO_EVENT`] | what the guest made of a device (`_OST`): UID in bits 0 to 7, status in bits 8 to 31 |
//! | 8 | `M000` ... | bit n: device n is present | ignored |
//! | 16 + 16 n | `Bn_L`, `Bn_H`, `Ln_L`, `Ln_H` | address and length of device n, low and high halves | ignored |
//!
//! - The side that adds a device then signals event [`super::ged::EVENT_MEMORY`].
//! - Every register can be read at any time, on several vCPUs at once: none selects what another shows.
//! - A device stays once it is there: there is no `_EJ0`.
//! - All of it is part of the machine's state.
//!
//! Owns the offsets; must never know what the memory is made of.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Add, AddressSpace, AddressSpaceCacheable, And, Arg, CreateQWordField, Device, EISAName, Equal,
    Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local, Method,
    MethodCall, Name, NotEqual, Notify, ONE, Or, Path, ResourceTemplate, Return, ShiftLeft, Store,
    Subtract, While, ZERO,
};

use super::cpu_hotplug::{NO_EVENT, NOTIFY_CHECK};
use super::dsdt::{Raw, STATUS_PRESENT, hid, uid};
use super::numa::proximity;
use super::registers::{HotplugRegisters, RegisterPlace};
use super::to_bytes;

/// Memory devices that there can be.
pub const DEVICES: u8 = 8;
/// Length of the registers in ports.
pub const REGISTERS_LEN_BYTES: u8 = 16 + 16 * DEVICES;
/// Offset of the register that takes the next event.
pub const NEXT_EVENT_OFFSET: u64 = 0;
/// Offset of the register of what the guest reports.
pub const STATUS_OFFSET: u64 = 4;
/// Offset of the bits of the devices that are present.
pub const PRESENT_OFFSET: u64 = 8;
/// Offset of the addresses and lengths.
pub const RANGES_OFFSET: u64 = 16;

/// Where a descriptor of a 64-bit address space has its fields (section 6.4.3.5.1).
const MIN_OFFSET: u8 = 14;
const MAX_OFFSET: u8 = 22;
const LEN_OFFSET: u8 = 38;

/// The registers, and the NUMA node of what may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHotplug {
    /// The registers.
    pub registers: HotplugRegisters,
    /// NUMA node of the memory, as a proximity domain; it is used if the guest has nodes.
    pub domain: u32,
}

fn registers(place: RegisterPlace) -> Vec<u8> {
    let region = place.region("MMRG", REGISTERS_LEN_BYTES);
    let mut fields = vec![FieldEntry::Named(*b"MMNX", 32), FieldEntry::Named(*b"MMST", 32)];
    fields.extend((0..DEVICES).map(|device| FieldEntry::Named(present_name(device), 1)));
    fields.push(FieldEntry::Reserved(64 - usize::from(DEVICES)));
    for device in 0..DEVICES {
        for (kind, half) in [(b'B', b'L'), (b'B', b'H'), (b'L', b'L'), (b'L', b'H')] {
            fields.push(FieldEntry::Named(range_name(device, kind, half), 32));
        }
    }
    let fields = Field::new(
        "MMRG".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::Preserve,
        fields,
    );
    [region, to_bytes(&fields)].concat()
}

fn digit(device: u8) -> u8 {
    b'0' + device % 10
}

fn present_name(device: u8) -> [u8; 4] {
    [b'M', b'0', b'0', digit(device)]
}

fn range_name(device: u8, kind: u8, half: u8) -> [u8; 4] {
    [kind, digit(device), b'_', half]
}

fn path_of(name: [u8; 4]) -> Path {
    Path::new(&String::from_utf8_lossy(&name))
}

fn path(device: u8) -> Path {
    Path::new(&format!("MD{device:02}"))
}

/// A memory device.
fn device(number: u8, node: Option<u32>) -> Vec<u8> {
    let (id, unique) = (hid("PNP0C80"), uid(u32::from(number)));
    let is_present = path_of(present_name(number));
    let there = Return::new(&STATUS_PRESENT);
    let if_there = If::new(&is_present, vec![&there]);
    let not_there = Return::new(&ZERO);
    let status = Method::new("_STA".into(), 0, true, vec![&if_there, &not_there]);
    let range = [(b'B', b'L'), (b'B', b'H'), (b'L', b'L'), (b'L', b'H')]
        .map(|(kind, half)| path_of(range_name(number, kind, half)));
    let arguments = range.iter().map(|half| -> &dyn Aml { half }).collect();
    let template = MethodCall::new("MCRS".into(), arguments);
    let template = Return::new(&template);
    let resources = Method::new("_CRS".into(), 0, true, vec![&template]);
    let report = MethodCall::new("MOST".into(), vec![&number, &Arg(1)]);
    let report = Method::new("_OST".into(), 3, true, vec![&report]);
    let node = node.map(proximity);
    let mut children: Vec<&dyn Aml> = vec![&id, &unique, &status, &resources, &report];
    children.extend(node.iter().map(|node| -> &dyn Aml { node }));
    to_bytes(&Device::new(path(number), children))
}

/// `MCRS`: the resources for an address and a length, each given in halves.
pub(super) fn resources() -> Vec<u8> {
    // The limits are written below; one byte is what a descriptor needs to be valid.
    let memory =
        AddressSpace::<u64>::new_memory(AddressSpaceCacheable::Cacheable, true, 0, 0, None);
    let template = Name::new("MR64".into(), &ResourceTemplate::new(vec![&memory]));
    let buffer = Path::new("MR64");
    let fields = [("MIN_", MIN_OFFSET), ("MAX_", MAX_OFFSET), ("LEN_", LEN_OFFSET)];
    let (min, max, len) = (Path::new("MIN_"), Path::new("MAX_"), Path::new("LEN_"));
    let (base, length) = (Local(0), Local(1));
    let mut body = to_bytes(&template);
    for (name, offset) in fields {
        let name = Path::new(name);
        CreateQWordField::new(&name, &buffer, &offset).to_aml_bytes(&mut body);
    }
    let shift = 32_u8;
    for part in [
        &ShiftLeft::new(&base, &Arg(1), &shift) as &dyn Aml,
        &Or::new(&min, &base, &Arg(0)),
        &ShiftLeft::new(&length, &Arg(3), &shift),
        &Or::new(&len, &length, &Arg(2)),
        &Add::new(&base, &min, &len),
        &Subtract::new(&max, &base, &ONE),
        &Return::new(&buffer),
    ] {
        part.to_aml_bytes(&mut body);
    }
    to_bytes(&Method::new("MCRS".into(), 4, true, vec![&Raw(body)]))
}

/// `MOST`: passes on what the guest made of a device.
fn status() -> Vec<u8> {
    let register = Path::new("MMST");
    let (shift, low) = (8_u8, 0xff_ffff_u32);
    let limit = And::new(&Local(0), &Arg(1), &low);
    let shifted = ShiftLeft::new(&Local(0), &Local(0), &shift);
    let report = Or::new(&register, &Local(0), &Arg(0));
    to_bytes(&Method::new("MOST".into(), 2, true, vec![&limit, &shifted, &report]))
}

/// `MMSC`: tells the guest what came.
fn tell_all() -> Vec<u8> {
    let mut choices = Vec::new();
    for number in 0..DEVICES {
        let device = path(number);
        let notify = Notify::new(&device, &NOTIFY_CHECK);
        let is_meant = Equal::new(&Local(0), &number);
        If::new(&is_meant, vec![&notify]).to_aml_bytes(&mut choices);
    }
    let choices = Raw(choices);
    let (event, next) = (Local(0), Path::new("MMNX"));
    let take = Store::new(&event, &next);
    let is_event = NotEqual::new(&event, &NO_EVENT);
    let each = While::new(&is_event, vec![&choices, &take]);
    to_bytes(&Method::new("MMSC".into(), 0, true, vec![&take, &each]))
}

/// Tells the guest, in the handler of events.
pub(super) fn tell() -> Vec<u8> {
    to_bytes(&MethodCall::new("\\_SB_.MHPC.MMSC".into(), Vec::new()))
}

/// The container of the memory devices; with their node if `has_nodes`.
pub(super) fn container(hotplug: MemoryHotplug, has_nodes: bool) -> Vec<u8> {
    let mut children = Vec::new();
    Name::new("_HID".into(), &EISAName::new("PNP0A06")).to_aml_bytes(&mut children);
    Name::new("_UID".into(), &"Memory Hotplug Controller").to_aml_bytes(&mut children);
    children.extend(registers(hotplug.registers.place));
    children.extend([resources(), status()].concat());
    let node = has_nodes.then_some(hotplug.domain);
    (0..DEVICES).for_each(|number| children.extend(device(number, node)));
    children.extend(tell_all());
    to_bytes(&Device::new("MHPC".into(), vec![&Raw(children)]))
}
