// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory hotplug by selected device: the contract between the AML and the device behind it, and that AML.
//!
//! For platforms whose guests know these registers instead of those of [`super::memory_hotplug`]:
//!
//! | offset | name | bytes | read | written |
//! | --- | --- | --- | --- | --- |
//! | 0, 4 | `MHBL`, `MHBH` | 4 | address of the selected memory device, low and high half | 0: selects one, by the first byte (`MSEL`) |
//! | 8, 12 | `MHLL`, `MHLH` | 4 | its length, low and high half | ignored |
//! | 20 | `MEN_`, `MINS`, `MRMV` | 1 | bit 0: it is there; bit 1: it came; bit 2: it is to go | bits 1 and 2: the guest has noticed |
//!
//! - The guest goes through all [`DEVICES`] when event [`super::ged::EVENT_MEMORY`] comes, under a mutex.
//! - An access of another width is ignored. No guest is asked to give memory back.
//!
//! Owns the offsets; must never know memory.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Acquire, Add, Arg, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule,
    FieldUpdateRule, If, LessThan, Local, Method, MethodCall, Mutex, Name, Notify, ONE, Path,
    Release, Return, Store, While, ZERO,
};

use super::cpu_hotplug::NOTIFY_CHECK;
use super::dsdt::{Raw, STATUS_PRESENT, hid, uid};
use super::memory_hotplug::{DEVICES, MemoryHotplug, resources};
use super::numa::proximity;
use super::to_bytes;

/// Length of the registers.
pub const REGISTERS_LEN_BYTES: u8 = 0x18;
/// Offset of the first word of address and length; written, it selects a device.
pub const RANGE_OFFSET: u64 = 0;
/// Offset of the byte with the state of the selected device.
pub const STATE_OFFSET: u64 = 20;

/// Wait for a mutex without a limit.
const FOREVER: u16 = 0xffff;
const MUTEX: &str = "\\_SB_.MHPC.MLCK";

fn registers(hotplug: MemoryHotplug) -> Vec<u8> {
    let region = hotplug.registers.place.region("MHPR", REGISTERS_LEN_BYTES);
    let field = |access, rule, fields| {
        let lock = FieldLockRule::NoLock;
        to_bytes(&Field::new("MHPR".into(), access, lock, rule, fields))
    };
    let range = field(
        FieldAccessType::DWord,
        FieldUpdateRule::Preserve,
        [*b"MHBL", *b"MHBH", *b"MHLL", *b"MHLH"].map(|name| FieldEntry::Named(name, 32)).to_vec(),
    );
    let select = field(
        FieldAccessType::DWord,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"MSEL", 32)],
    );
    let state = field(
        FieldAccessType::Byte,
        FieldUpdateRule::WriteAsZeroes,
        vec![
            FieldEntry::Reserved(160),
            FieldEntry::Named(*b"MEN_", 1),
            FieldEntry::Named(*b"MINS", 1),
            FieldEntry::Named(*b"MRMV", 1),
        ],
    );
    [region, range, select, state].concat()
}

fn path(number: u8) -> Path {
    Path::new(&format!("M{number:03}"))
}

fn device(number: u8, node: Option<u32>) -> Vec<u8> {
    let (id, unique) = (hid("PNP0C80"), uid(u32::from(number)));
    let call = |name: &str| -> Vec<u8> {
        let call = MethodCall::new(name.into(), vec![&number]);
        to_bytes(&Return::new(&call))
    };
    let (look, range) = (Raw(call("MSTA")), Raw(call("MRES")));
    let status = Method::new("_STA".into(), 0, true, vec![&look]);
    let resources = Method::new("_CRS".into(), 0, true, vec![&range]);
    let node = node.map(proximity);
    let mut children: Vec<&dyn Aml> = vec![&id, &unique, &status, &resources];
    children.extend(node.iter().map(|node| -> &dyn Aml { node }));
    to_bytes(&Device::new(path(number), children))
}

/// The methods that look at the device of a number, each under the mutex.
fn state_methods() -> Vec<u8> {
    let (take, release) = (Acquire::new(MUTEX.into(), FOREVER), Release::new(MUTEX.into()));
    let register = Path::new("MSEL");
    let select = Store::new(&register, &Arg(0));
    let (answer, is_there) = (Local(0), Path::new("MEN_"));
    let nothing = Store::new(&answer, &ZERO);
    let there = Store::new(&answer, &STATUS_PRESENT);
    let is_present = Equal::new(&is_there, &ONE);
    let if_there = If::new(&is_present, vec![&there]);
    let say = Return::new(&answer);
    let status = Method::new(
        "MSTA".into(),
        1,
        true,
        vec![&take, &select, &nothing, &if_there, &release, &say],
    );
    let parts = ["MHBL", "MHBH", "MHLL", "MHLH"].map(Path::new);
    let parts = parts.iter().map(|part| -> &dyn Aml { part }).collect();
    let template = MethodCall::new("MCRS".into(), parts);
    let read = Store::new(&answer, &template);
    let range = Method::new("MRES".into(), 1, true, vec![&take, &select, &read, &release, &say]);
    [to_bytes(&status), to_bytes(&range)].concat()
}

fn scan_method() -> Vec<u8> {
    let mut choices = Vec::new();
    for number in 0..DEVICES {
        let device = path(number);
        let notify = Notify::new(&device, &NOTIFY_CHECK);
        let is_meant = Equal::new(&Arg(0), &number);
        If::new(&is_meant, vec![&notify]).to_aml_bytes(&mut choices);
    }
    let choices = Raw(choices);
    let tell_one = Method::new("MTFY".into(), 1, true, vec![&choices]);
    let number = Local(0);
    let (take, release) = (Acquire::new(MUTEX.into(), FOREVER), Release::new(MUTEX.into()));
    let register = Path::new("MSEL");
    let (begin, select) = (Store::new(&number, &ZERO), Store::new(&register, &number));
    let next = Add::new(&number, &number, &ONE);
    let is_left = LessThan::new(&number, &DEVICES);
    let came = Path::new("MINS");
    let has_come = Equal::new(&came, &ONE);
    let tell = MethodCall::new("MTFY".into(), vec![&number]);
    let noticed = Store::new(&came, &ONE);
    let if_come = If::new(&has_come, vec![&tell, &noticed]);
    let each = While::new(&is_left, vec![&select, &if_come, &next]);
    let scan = Method::new("MSCN".into(), 0, true, vec![&take, &begin, &each, &release]);
    [to_bytes(&tell_one), to_bytes(&scan)].concat()
}

/// Tells the guest, in the handler of events, of the memory that came.
pub(super) fn tell() -> Vec<u8> {
    to_bytes(&MethodCall::new("\\_SB_.MHPC.MSCN".into(), Vec::new()))
}

/// The device with the registers, and in it the memory devices.
pub(super) fn container(hotplug: MemoryHotplug, has_nodes: bool) -> Vec<u8> {
    let mut children = Vec::new();
    Name::new("_HID".into(), &EISAName::new("PNP0A06")).to_aml_bytes(&mut children);
    Name::new("_UID".into(), &"Memory Hotplug Controller").to_aml_bytes(&mut children);
    Mutex::new("MLCK".into(), 0).to_aml_bytes(&mut children);
    children.extend(registers(hotplug));
    children.extend([resources(), state_methods(), scan_method()].concat());
    let node = has_nodes.then_some(hotplug.domain);
    (0..DEVICES).for_each(|number| children.extend(device(number, node)));
    to_bytes(&Device::new("MHPC".into(), vec![&Raw(children)]))
}
