// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where the registers that AML uses are, and what a platform decides about tables.
//!
//! Owns the form of both, and how AML says where registers are. Must never know a device or a platform by its name.

use acpi_tables::Aml;
use acpi_tables::aml::{AddressSpace, AddressSpaceCacheable, IO, OpRegion, OpRegionSpace, Path};

use super::to_bytes;

/// Where registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterPlace {
    /// At ports from this one on.
    Ports(u16),
    /// In memory from this address on.
    Memory(u64),
}

impl RegisterPlace {
    /// The operation region of registers of this length.
    pub(super) fn region(self, name: &str, len_bytes: u8) -> Vec<u8> {
        let path = Path::new(name);
        match self {
            Self::Ports(port) => {
                to_bytes(&OpRegion::new(path, OpRegionSpace::SystemIO, &port, &len_bytes))
            }
            Self::Memory(gpa) => {
                to_bytes(&OpRegion::new(path, OpRegionSpace::SystemMemory, &gpa, &len_bytes))
            }
        }
    }

    /// The resource of registers of this length, for the device that keeps others off them.
    pub(super) fn resource(self, len_bytes: u8) -> Vec<u8> {
        match self {
            Self::Ports(port) => to_bytes(&IO::new(port, port, 1, len_bytes)),
            Self::Memory(gpa) => {
                let last = gpa.saturating_add(u64::from(len_bytes).saturating_sub(1));
                let cacheable = AddressSpaceCacheable::NotCacheable;
                let range = AddressSpace::<u64>::new_memory(cacheable, true, gpa, last, None);
                to_bytes(&range as &dyn Aml)
            }
        }
    }

    /// A number that no other registers have, for the `_UID` of their device.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Ports(port) => port.into(),
            Self::Memory(_) => 0,
        }
    }
}

/// How a guest reads and acknowledges what has come and what is to go, where there are many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HotplugProtocol {
    /// One register takes the next event; every other can be read at any time.
    Events,
    /// One register selects what the others show; the guest goes through all.
    Selector,
}

/// Registers of hotplug with their protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotplugRegisters {
    /// Where they are.
    pub place: RegisterPlace,
    /// How they are used.
    pub protocol: HotplugProtocol,
}

/// What a platform decides about the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRules {
    /// Name of the generic event device in the namespace, four characters.
    pub event_device: &'static str,
    /// All processors are described as those whose APIC id needs 32 bits.
    pub wide_apic_ids: bool,
    /// Processors that are there from the start are said to be able to come online, too.
    pub all_may_come: bool,
    /// LINT1 is described as the NMI of all processors.
    pub has_nmi: bool,
    /// ISA interrupts that are described as those global ones, although the numbers are the same.
    pub identity_overrides: &'static [u8],
    /// The FADT says which devices of a PC there are not.
    pub has_legacy_flags: bool,
    /// Guests have a generation ID.
    pub has_generation_id: bool,
}

/// The rules for this program's own guests.
pub const GODWIT_TABLES: TableRules = TableRules {
    event_device: "GED_",
    wide_apic_ids: false,
    all_may_come: false,
    has_nmi: true,
    identity_overrides: &[],
    has_legacy_flags: true,
    has_generation_id: true,
};
