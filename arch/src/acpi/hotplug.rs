// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI hotplug: the contract between the AML and the device behind it, and that AML.
//!
//! Functions sit on a root bus, where PCI Express has no slots of its own. So each device number is a
//! slot that ACPI speaks for (ACPI 6.5, section 6.3): the guest is notified of what came and of what
//! is to go, releases it, and says so by `_EJ0`. The registers are three little-endian words of 32
//! bits in I/O ports, bit n of which stands for device number n:
//!
//! | offset | name | read | written |
//! | --- | --- | --- | --- |
//! | 0 | `PCIU` | devices that came; reading clears | ignored |
//! | 4 | `PCID` | devices that are asked to go; reading clears | ignored |
//! | 8 | `B0EJ` | 0 | the guest has ejected these |
//! | 12 | `PSEG` | segment that the others are of | selects a segment; one that does not exist is ignored |
//!
//! - A machine with one segment has no `PSEG`: its offset reads 0. With several, the AML selects and reads under
//!   a mutex, since ejections come from other threads of the guest.
//! - The side that sets a bit of the first two then signals event [`super::ged::EVENT_PCI`].
//! - Asking again for a device that has not gone sets its bit again.
//! - An ejection that was not requested is ignored: a guest may switch a slot off and on again.
//! - All of it is part of the machine's state.
//!
//! Names are those that guests of cloud-hypervisor see. Owns the offsets; must never know a device.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Acquire, And, Arg, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule,
    If, Local, Method, MethodCall, Mutex, Name, Notify, ONE, Path, Release, ShiftLeft, Store, ZERO,
};

use super::dsdt::{Raw, hid, uid};
use super::registers::RegisterPlace;
use super::to_bytes;

/// Length of the registers in ports.
pub const REGISTERS_LEN_BYTES: u16 = 16;
/// Device number 0 is the host bridge, which stays.
const SLOTS: std::ops::RangeInclusive<u32> = 1..=31;
/// Notifications (section 5.6.6): look whether a device is there, and release it.
const NOTIFY_CHECK: u8 = 1;
const NOTIFY_EJECT: u8 = 3;

/// Wait for a mutex without a limit.
const FOREVER: u16 = 0xffff;
const MUTEX: &str = "\\_SB_.PHPR.BLCK";

/// The slots that a host bridge describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slots {
    /// None: devices stay.
    None,
    /// Those of the only segment.
    Only,
    /// Those of one of several segments, which has to be selected.
    Of(u8),
}

/// The device with the registers.
pub(super) fn controller(place: RegisterPlace, has_segments: bool) -> Vec<u8> {
    let (id, number) = (hid("PNP0A06"), uid(place.number()));
    let len = u8::try_from(REGISTERS_LEN_BYTES).unwrap_or(u8::MAX);
    let region = Raw(place.region("PCST", len));
    let mut fields = vec![
        FieldEntry::Named(*b"PCIU", 32),
        FieldEntry::Named(*b"PCID", 32),
        FieldEntry::Named(*b"B0EJ", 32),
    ];
    if has_segments {
        fields.push(FieldEntry::Named(*b"PSEG", 32));
    }
    let registers = Field::new(
        "PCST".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        fields,
    );
    let register = Path::new("B0EJ");
    let eject = ShiftLeft::new(&register, &ONE, &Arg(0));
    let mutex = Mutex::new("BLCK".into(), 0);
    let take = Acquire::new("BLCK".into(), FOREVER);
    let selected = Path::new("PSEG");
    let select = Store::new(&selected, &Arg(1));
    let release = Release::new("BLCK".into());
    let mut parts: Vec<&dyn Aml> = vec![&id, &number, &region, &registers];
    let method = if has_segments {
        parts.push(&mutex);
        Method::new("PCEJ".into(), 2, true, vec![&take, &select, &eject, &release])
    } else {
        Method::new("PCEJ".into(), 1, true, vec![&eject])
    };
    parts.push(&method);
    to_bytes(&Device::new("PHPR".into(), parts))
}

fn name(slot: u32) -> Path {
    Path::new(&format!("S{slot:03}"))
}

/// The slots of a host bridge, and the method that tells the guest what came and what is to go; to
/// stand inside of the bridge's device.
pub(super) fn slots(slots: Slots) -> Raw {
    let segment = match slots {
        Slots::None => return Raw(Vec::new()),
        Slots::Only => None,
        Slots::Of(segment) => Some(segment),
    };
    let mut bytes = Vec::new();
    for slot in SLOTS {
        let address = Name::new("_ADR".into(), &(slot << 16));
        let number = Name::new("_SUN".into(), &slot);
        let mut arguments: Vec<&dyn Aml> = vec![&slot];
        arguments.extend(segment.iter().map(|segment| -> &dyn Aml { segment }));
        let eject = MethodCall::new("\\_SB_.PHPR.PCEJ".into(), arguments);
        let method = Method::new("_EJ0".into(), 1, true, vec![&eject]);
        Device::new(name(slot), vec![&address, &number, &method]).to_aml_bytes(&mut bytes);
    }
    match segment {
        None => tell_of_only(&mut bytes),
        Some(segment) => tell_of_selected(segment, &mut bytes),
    }
    Raw(bytes)
}

const REGISTERS: [(&str, u8); 2] =
    [("\\_SB_.PHPR.PCIU", NOTIFY_CHECK), ("\\_SB_.PHPR.PCID", NOTIFY_EJECT)];

fn tell_of_only(bytes: &mut Vec<u8>) {
    let mut body = Vec::new();
    for (register, notification) in REGISTERS {
        // One read, which clears; then look at the copy.
        Store::new(&Local(0), &Path::new(register)).to_aml_bytes(&mut body);
        for slot in SLOTS {
            let bit = 1_u32 << slot;
            let is_meant = And::new(&ZERO, &Local(0), &bit);
            let slot = name(slot);
            let notify = Notify::new(&slot, &notification);
            If::new(&is_meant, vec![&notify]).to_aml_bytes(&mut body);
        }
    }
    Method::new("PCNT".into(), 0, true, vec![&Raw(body)]).to_aml_bytes(bytes);
}

/// As for the only segment, in two methods: room for tables is short where there are many segments.
fn tell_of_selected(segment: u8, bytes: &mut Vec<u8>) {
    let mut body = Vec::new();
    for slot in SLOTS {
        let bit = 1_u32 << slot;
        let is_meant = And::new(&ZERO, &Arg(0), &bit);
        let slot = name(slot);
        let notify = Notify::new(&slot, &Arg(1));
        If::new(&is_meant, vec![&notify]).to_aml_bytes(&mut body);
    }
    Method::new("PCNN".into(), 2, true, vec![&Raw(body)]).to_aml_bytes(bytes);
    let mut body = Vec::new();
    Acquire::new(MUTEX.into(), FOREVER).to_aml_bytes(&mut body);
    Store::new(&Path::new("\\_SB_.PHPR.PSEG"), &segment).to_aml_bytes(&mut body);
    for (local, (register, _)) in (0_u8..).zip(REGISTERS) {
        Store::new(&Local(local), &Path::new(register)).to_aml_bytes(&mut body);
    }
    Release::new(MUTEX.into()).to_aml_bytes(&mut body);
    for (local, (_, notification)) in (0_u8..).zip(REGISTERS) {
        let bits = Local(local);
        let tell = MethodCall::new("PCNN".into(), vec![&bits, &notification]);
        If::new(&bits, vec![&tell]).to_aml_bytes(&mut body);
    }
    Method::new("PCNT".into(), 0, true, vec![&Raw(body)]).to_aml_bytes(bytes);
}

/// Tells the guest, in the handler of events, of what came and what is to go in these segments.
pub(super) fn tell(segments: impl Iterator<Item = u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in segments {
        let path = Path::new(&format!("\\_SB_.PC{segment:02X}.PCNT"));
        MethodCall::new(path, Vec::new()).to_aml_bytes(&mut bytes);
    }
    bytes
}
