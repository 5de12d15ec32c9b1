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
//!
//! - The side that sets a bit of the first two then signals event [`super::ged::EVENT_PCI`].
//! - Asking again for a device that has not gone sets its bit again.
//! - An ejection that was not requested is ignored: a guest may switch a slot off and on again.
//! - All of it is part of the machine's state.
//!
//! Names are those that guests of cloud-hypervisor see. Owns the offsets; must never know a device.

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Arg, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If,
    Local, Method, MethodCall, Name, Notify, ONE, OpRegion, OpRegionSpace, Path, ShiftLeft, Store,
    ZERO,
};

use super::dsdt::{Raw, hid, uid};
use super::to_bytes;

/// Length of the registers in ports.
pub const REGISTERS_LEN_BYTES: u16 = 16;
/// Device number 0 is the host bridge, which stays.
const SLOTS: std::ops::RangeInclusive<u32> = 1..=31;
/// Notifications (section 5.6.6): look whether a device is there, and release it.
const NOTIFY_CHECK: u8 = 1;
const NOTIFY_EJECT: u8 = 3;

/// The device with the registers.
pub(super) fn controller(port: u16) -> Vec<u8> {
    let (id, number) = (hid("PNP0A06"), uid(u32::from(port)));
    let len = u8::try_from(REGISTERS_LEN_BYTES).unwrap_or(u8::MAX);
    let region = OpRegion::new("PCST".into(), OpRegionSpace::SystemIO, &port, &len);
    let registers = Field::new(
        "PCST".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![
            FieldEntry::Named(*b"PCIU", 32),
            FieldEntry::Named(*b"PCID", 32),
            FieldEntry::Named(*b"B0EJ", 32),
        ],
    );
    let register = Path::new("B0EJ");
    let eject = ShiftLeft::new(&register, &ONE, &Arg(0));
    let method = Method::new("PCEJ".into(), 1, true, vec![&eject]);
    to_bytes(&Device::new("PHPR".into(), vec![&id, &number, &region, &registers, &method]))
}

fn name(slot: u32) -> Path {
    Path::new(&format!("S{slot:03}"))
}

/// The slots of a host bridge, and the method that tells the guest what came and what is to go; to
/// stand inside of the bridge's device.
pub(super) fn slots() -> Raw {
    let mut bytes = Vec::new();
    for slot in SLOTS {
        let address = Name::new("_ADR".into(), &(slot << 16));
        let number = Name::new("_SUN".into(), &slot);
        let eject = MethodCall::new("\\_SB_.PHPR.PCEJ".into(), vec![&slot]);
        let method = Method::new("_EJ0".into(), 1, true, vec![&eject]);
        Device::new(name(slot), vec![&address, &number, &method]).to_aml_bytes(&mut bytes);
    }
    let mut body = Vec::new();
    for (register, notification) in
        [("\\_SB_.PHPR.PCIU", NOTIFY_CHECK), ("\\_SB_.PHPR.PCID", NOTIFY_EJECT)]
    {
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
    Method::new("PCNT".into(), 0, true, vec![&Raw(body)]).to_aml_bytes(&mut bytes);
    Raw(bytes)
}

/// Tells the guest, in the handler of events.
pub(super) fn tell() -> Vec<u8> {
    to_bytes(&MethodCall::new("\\_SB_.PC00.PCNT".into(), Vec::new()))
}
