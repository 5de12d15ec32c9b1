// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU hotplug by selected processor: the contract between the AML and the device behind it, and that AML.
//!
//! For platforms whose guests know these registers instead of those of [`super::cpu_hotplug`]:
//!
//! | offset | name | bytes | read | written |
//! | --- | --- | --- | --- | --- |
//! | 0 | `CSEL` | 4 | the selected processor, by its UID | selects one |
//! | 4 | `CPEN`, `CINS`, `CRMV` | 1 | bit 0: it is there; bit 1: it came; bit 2: it is to go | bits 1 and 2: the guest has noticed; bit 3 (`CEJ_`): the guest has ejected it |
//!
//! - The guest goes through all processors when event [`super::ged::EVENT_CPU`] comes, under a mutex, as it does for
//!   every other use of the registers.
//! - An access of another width is ignored. An ejection that was not requested is ignored.
//!
//! Owns the offsets; must never know a vCPU.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Acquire, Add, Arg, BufferData, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, If, LessThan, Local, Method, MethodCall, Mutex, Name, Notify,
    ONE, Path, Release, Return, Store, While, ZERO,
};

use super::cpu_hotplug::{NOTIFY_CHECK, NOTIFY_EJECT, path};
use super::dsdt::{Raw, STATUS_PRESENT, hid, uid};
use super::inputs::AcpiCpu;
use super::numa::{AcpiNuma, proximity};
use super::registers::{RegisterPlace, TableRules};
use super::tables::madt_entry;
use super::to_bytes;

/// Length of the registers.
pub const REGISTERS_LEN_BYTES: u8 = 12;
/// Offset of the register that selects a processor.
pub const SELECT_OFFSET: u64 = 0;
/// Offset of the byte with its state.
pub const STATE_OFFSET: u64 = 4;

/// Wait for a mutex without a limit.
const FOREVER: u16 = 0xffff;
const MUTEX: &str = "\\_SB_.PRES.CPLK";
const SELECT: &str = "\\_SB_.PRES.CSEL";

/// A field of the selected processor, one bit.
fn bit(name: &str) -> Path {
    Path::new(&format!("\\_SB_.PRES.{name}"))
}

/// The device with the registers.
pub(super) fn controller(place: RegisterPlace) -> Vec<u8> {
    let region = Raw(place.region("PRST", REGISTERS_LEN_BYTES));
    let state = Field::new(
        "PRST".into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![
            FieldEntry::Reserved(32),
            FieldEntry::Named(*b"CPEN", 1),
            FieldEntry::Named(*b"CINS", 1),
            FieldEntry::Named(*b"CRMV", 1),
            FieldEntry::Named(*b"CEJ_", 1),
        ],
    );
    let select = Field::new(
        "PRST".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::Preserve,
        vec![FieldEntry::Named(*b"CSEL", 32)],
    );
    let label = Name::new("_UID".into(), &"CPU Hotplug Controller");
    let mutex = Mutex::new("CPLK".into(), 0);
    to_bytes(&Device::new(
        "PRES".into(),
        vec![&hid("PNP0A06"), &label, &mutex, &region, &state, &select],
    ))
}

fn processor(index: usize, cpu: AcpiCpu, numa: Option<&AcpiNuma>, rules: &TableRules) -> Vec<u8> {
    let number = u32::try_from(index).unwrap_or(u32::MAX);
    let id = Name::new("_HID".into(), &"ACPI0007");
    let unique = uid(number);
    let look = MethodCall::new("CSTA".into(), vec![&number]);
    let answer = Return::new(&look);
    let status = Method::new("_STA".into(), 0, true, vec![&answer]);
    // Read of a processor that is there, so it is enabled.
    let entry = BufferData::new(madt_entry(number, AcpiCpu { enabled: true, ..cpu }, rules));
    let entry = Name::new("_MAT".into(), &entry);
    let eject = MethodCall::new("CEJ0".into(), vec![&number]);
    let eject = Method::new("_EJ0".into(), 1, true, vec![&eject]);
    let node = numa.map(|_| proximity(cpu.domain));
    let mut children: Vec<&dyn Aml> = vec![&id, &unique, &status, &entry];
    children.extend(node.iter().map(|node| -> &dyn Aml { node }));
    if index > 0 {
        children.push(&eject);
    }
    to_bytes(&Device::new(path(index), children))
}

/// The method that returns whether a processor is there, and the one that ejects it.
fn state_methods() -> Vec<u8> {
    let (take, release) = (Acquire::new(MUTEX.into(), FOREVER), Release::new(MUTEX.into()));
    let register = Path::new(SELECT);
    let select = Store::new(&register, &Arg(0));
    let (answer, is_there) = (Local(0), bit("CPEN"));
    let nothing = Store::new(&answer, &ZERO);
    let there = Store::new(&answer, &STATUS_PRESENT);
    let is_present = Equal::new(&is_there, &ONE);
    let if_there = If::new(&is_present, vec![&there]);
    let say = Return::new(&answer);
    let status = Method::new(
        "CSTA".into(),
        1,
        true,
        vec![&take, &select, &nothing, &if_there, &release, &say],
    );
    let register = bit("CEJ_");
    let eject = Store::new(&register, &ONE);
    let eject = Method::new("CEJ0".into(), 1, true, vec![&take, &select, &eject, &release]);
    [to_bytes(&status), to_bytes(&eject)].concat()
}

/// The methods that tell the guest what came and what is to go.
fn scan_methods(cpus: usize) -> Vec<u8> {
    let mut choices = Vec::new();
    for index in 0..cpus {
        let device = path(index);
        let notify = Notify::new(&device, &Arg(1));
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let is_meant = Equal::new(&Arg(0), &number);
        If::new(&is_meant, vec![&notify]).to_aml_bytes(&mut choices);
    }
    let choices = Raw(choices);
    let tell_one = Method::new("CTFY".into(), 2, true, vec![&choices]);

    let number = Local(0);
    let (take, release) = (Acquire::new(MUTEX.into(), FOREVER), Release::new(MUTEX.into()));
    let register = Path::new(SELECT);
    let (begin, select) = (Store::new(&number, &ZERO), Store::new(&register, &number));
    let next = Add::new(&number, &number, &ONE);
    let count = u32::try_from(cpus).unwrap_or(u32::MAX);
    let is_left = LessThan::new(&number, &count);
    let (came, goes) = (bit("CINS"), bit("CRMV"));
    let (has_come, is_to_go) = (Equal::new(&came, &ONE), Equal::new(&goes, &ONE));
    let tell_come = MethodCall::new("CTFY".into(), vec![&number, &NOTIFY_CHECK]);
    let tell_go = MethodCall::new("CTFY".into(), vec![&number, &NOTIFY_EJECT]);
    let (noticed_come, noticed_go) = (Store::new(&came, &ONE), Store::new(&goes, &ONE));
    let if_come = If::new(&has_come, vec![&tell_come, &noticed_come]);
    let if_go = If::new(&is_to_go, vec![&tell_go, &noticed_go]);
    let each = While::new(&is_left, vec![&select, &if_come, &if_go, &next]);
    let scan = Method::new("CSCN".into(), 0, true, vec![&take, &begin, &each, &release]);
    [to_bytes(&tell_one), to_bytes(&scan)].concat()
}

/// Tells the guest, in the handler of events, of what came and what is to go.
pub(super) fn tell() -> Vec<u8> {
    to_bytes(&MethodCall::new("\\_SB_.CPUS.CSCN".into(), Vec::new()))
}

/// The container of the processors.
pub(super) fn container(cpus: &[AcpiCpu], numa: Option<&AcpiNuma>, rules: &TableRules) -> Vec<u8> {
    let mut children = Vec::new();
    Name::new("_HID".into(), &"ACPI0010").to_aml_bytes(&mut children);
    Name::new("_CID".into(), &EISAName::new("PNP0A05")).to_aml_bytes(&mut children);
    children.extend(state_methods());
    children.extend(scan_methods(cpus.len()));
    for (index, cpu) in cpus.iter().enumerate() {
        children.extend(processor(index, *cpu, numa, rules));
    }
    to_bytes(&Device::new("CPUS".into(), vec![&Raw(children)]))
}
