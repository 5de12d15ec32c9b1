// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where a platform has the registers of the event device and of hotplug.
//!
//! Owns the two ways of placing them, and what follows for a machine's address bits. What the registers do is told
//! beside their AML, in the crate `arch`.

use arch::acpi::{HotplugProtocol, HotplugRegisters, RegisterPlace};
use arch::{layout, windows};

/// How the registers are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterRules {
    /// At fixed ports, with registers that take events one by one.
    Ports,
    /// A page for each device, downwards from `first_below_end` bytes below the end of the guest's addresses, with
    /// registers that are of one vCPU or memory device at a time.
    Pages {
        /// Distance of the first page from the end of the addresses.
        first_below_end: u64,
    },
}

/// The registers of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedRegisters {
    /// Of the event device.
    pub ged: RegisterPlace,
    /// Of PCI hotplug.
    pub pci: RegisterPlace,
    /// Of vCPU hotplug.
    pub cpus: HotplugRegisters,
    /// Of memory hotplug, if the machine has memory devices.
    pub memory: HotplugRegisters,
}

impl RegisterRules {
    /// The registers of a machine with so many address bits, and memory devices or none.
    pub fn placed(self, address_bits: u8, has_memory_devices: bool) -> PlacedRegisters {
        match self {
            Self::Ports => {
                let at = |port| HotplugRegisters {
                    place: RegisterPlace::Ports(port),
                    protocol: HotplugProtocol::Events,
                };
                PlacedRegisters {
                    ged: RegisterPlace::Ports(layout::GED_PORT),
                    pci: RegisterPlace::Ports(layout::PCI_HOTPLUG_PORT),
                    cpus: at(layout::CPU_HOTPLUG_PORT),
                    memory: at(layout::MEMORY_HOTPLUG_PORT),
                }
            }
            Self::Pages { first_below_end } => {
                let first = windows::end_gpa(address_bits).saturating_sub(first_below_end);
                // That of memory comes first where there is one.
                let before = u64::from(has_memory_devices);
                let page = |number: u64| {
                    let below = (before + number).saturating_mul(layout::PAGE_BYTES);
                    RegisterPlace::Memory(first.saturating_sub(below))
                };
                let selected =
                    |place| HotplugRegisters { place, protocol: HotplugProtocol::Selector };
                PlacedRegisters {
                    ged: page(2),
                    pci: page(0),
                    cpus: selected(page(1)),
                    memory: selected(RegisterPlace::Memory(first)),
                }
            }
        }
    }
}
