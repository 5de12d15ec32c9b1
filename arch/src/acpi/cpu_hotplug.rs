// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU hotplug: the contract between the AML and the device behind it, and that AML.
//!
//! ACPI speaks for processors as for slots (ACPI 6.5, sections 6.3 and 8.4): the guest is notified of a processor
//! that came or is to go, looks at its `_STA`, releases it and says so by `_EJ0`. Processors are numbered by their
//! UID, which is the index of the vCPU. Registers are little-endian words of 32 bits in I/O ports:
//!
//! | offset | name | read | written |
//! | --- | --- | --- | --- |
//! | 0 | `CPNX` | takes the next pending event: UID in bits 0 to 15, the notification in bits 16 to 23; [`NO_EVENT`] if there is none | ignored |
//! | 4 | `CPEJ` | [`NO_EVENT`] | the guest has ejected the processor with this UID |
//! | 32 | `P000` ... | bit n of these 256 bits: processor n is present | ignored |
//!
//! - The side that adds an event then signals event [`super::ged::EVENT_CPU`].
//! - Every register can be read at any time, on several vCPUs at once: none selects what another shows.
//! - Ports without a device read as all ones. That is no event, and every processor present: a guest goes on with
//!   this AML where nothing can be plugged.
//! - An ejection that was not requested is ignored.
//! - All of it is part of the machine's state.
//!
//! Owns the offsets and the notifications; must never know a vCPU.

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Arg, BufferData, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, If, Local, Method, MethodCall, Name, NotEqual, Notify, Path,
    Return, ShiftRight, Store, While, ZERO,
};

use super::dsdt::{Raw, STATUS_PRESENT, uid};
use super::inputs::AcpiCpu;
use super::numa::{AcpiNuma, proximity};
use super::registers::{RegisterPlace, TableRules};
use super::tables::madt_entry;
use super::to_bytes;

/// Length of the registers in ports.
pub const REGISTERS_LEN_BYTES: u8 = 64;
/// Offset of the register that takes the next event.
pub const NEXT_EVENT_OFFSET: u64 = 0;
/// Offset of the register of ejections.
pub const EJECT_OFFSET: u64 = 4;
/// Offset of the bits of the processors that are present.
pub const PRESENT_OFFSET: u64 = 32;
/// Processors with a bit there.
pub const CPUS_MAX: u32 = 256;
/// What the register of events reads as when there is none.
pub const NO_EVENT: u32 = u32::MAX;
/// Notification "look whether it is there" (section 5.6.6).
pub const NOTIFY_CHECK: u8 = 1;
/// Notification "release it" (section 5.6.6).
pub const NOTIFY_EJECT: u8 = 3;

const UID_MASK: u32 = 0xffff;
const NOTIFICATION_SHIFT: u8 = 16;

/// The registers, for the container of the processors.
pub(super) fn registers(place: RegisterPlace, cpus: usize) -> Vec<u8> {
    let region = place.region("CPRG", REGISTERS_LEN_BYTES);
    let bits = |offset: u64| usize::try_from(offset * 8).unwrap_or(0);
    let mut fields = vec![
        FieldEntry::Named(*b"CPNX", 32),
        FieldEntry::Named(*b"CPEJ", 32),
        FieldEntry::Reserved(bits(PRESENT_OFFSET - EJECT_OFFSET) - 32),
    ];
    fields.extend((0..cpus).map(|index| FieldEntry::Named(present_name(index), 1)));
    let fields = Field::new(
        "CPRG".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::Preserve,
        fields,
    );
    [region, to_bytes(&fields)].concat()
}

fn present_name(index: usize) -> [u8; 4] {
    let digit = |shift: usize| {
        let value = index >> shift & 0xf;
        b"0123456789ABCDEF".get(value).copied().unwrap_or(b'0')
    };
    [b'P', digit(8), digit(4), digit(0)]
}

pub(super) fn path(index: usize) -> Path {
    Path::new(&format!("C{index:03X}"))
}

/// A processor that may come and go; the first one always stays.
pub(super) fn processor(
    index: usize,
    cpu: AcpiCpu,
    numa: Option<&AcpiNuma>,
    rules: &TableRules,
) -> Vec<u8> {
    let number = u32::try_from(index).unwrap_or(u32::MAX);
    let is_present = Path::new(&String::from_utf8_lossy(&present_name(index)));
    let id = Name::new("_HID".into(), &"ACPI0007");
    let unique = uid(number);
    let there = Return::new(&STATUS_PRESENT);
    let if_there = If::new(&is_present, vec![&there]);
    let not_there = Return::new(&ZERO);
    let status = Method::new("_STA".into(), 0, true, vec![&if_there, &not_there]);
    // Read of a processor that is there, so it is enabled.
    let entry = BufferData::new(madt_entry(number, AcpiCpu { enabled: true, ..cpu }, rules));
    let entry = Name::new("_MAT".into(), &entry);
    let register = Path::new("CPEJ");
    let eject = Store::new(&register, &number);
    let eject = Method::new("_EJ0".into(), 1, true, vec![&eject]);
    let node = numa.map(|_| proximity(cpu.domain));
    let mut children: Vec<&dyn Aml> = vec![&id, &unique, &status, &entry];
    children.extend(node.iter().map(|node| -> &dyn Aml { node }));
    if index > 0 {
        children.push(&eject);
    }
    to_bytes(&Device::new(path(index), children))
}

/// The methods of the container that tell the guest what came and what is to go.
pub(super) fn methods(cpus: usize) -> Vec<u8> {
    let mut choices = Vec::new();
    for index in 0..cpus {
        let device = path(index);
        let notification = Arg(1);
        let notify = Notify::new(&device, &notification);
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let is_meant = Equal::new(&Arg(0), &number);
        If::new(&is_meant, vec![&notify]).to_aml_bytes(&mut choices);
    }
    let choices = Raw(choices);
    let tell_one = Method::new("CPTL".into(), 2, true, vec![&choices]);

    let (event, next) = (Local(0), Path::new("CPNX"));
    let take = Store::new(&event, &next);
    let (number, notification) = (Local(1), Local(2));
    let split_number = And::new(&number, &event, &UID_MASK);
    let split_notification = ShiftRight::new(&notification, &event, &NOTIFICATION_SHIFT);
    let tell = MethodCall::new("CPTL".into(), vec![&number, &notification]);
    let take_another = Store::new(&event, &next);
    let is_event = NotEqual::new(&event, &NO_EVENT);
    let each =
        While::new(&is_event, vec![&split_number, &split_notification, &tell, &take_another]);
    let tell_all = Method::new("CPSC".into(), 0, true, vec![&take, &each]);
    [to_bytes(&tell_one), to_bytes(&tell_all)].concat()
}

/// Tells the guest, in the handler of events.
pub(super) fn tell() -> Vec<u8> {
    to_bytes(&MethodCall::new("\\_SB_.CPUS.CPSC".into(), Vec::new()))
}

/// The container of the processors.
pub(super) fn container(
    place: RegisterPlace,
    cpus: &[AcpiCpu],
    numa: Option<&AcpiNuma>,
    rules: &TableRules,
) -> Vec<u8> {
    let mut children = Vec::new();
    Name::new("_HID".into(), &"ACPI0010").to_aml_bytes(&mut children);
    Name::new("_CID".into(), &EISAName::new("PNP0A05")).to_aml_bytes(&mut children);
    children.extend(registers(place, cpus.len()));
    for (index, cpu) in cpus.iter().enumerate() {
        children.extend(processor(index, *cpu, numa, rules));
    }
    children.extend(methods(cpus.len()));
    to_bytes(&Device::new("CPUS".into(), vec![&Raw(children)]))
}
