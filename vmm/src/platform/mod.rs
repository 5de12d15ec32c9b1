// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Platforms: which machine a guest sees, as far as that is not a matter of options.
//!
//! A platform is a value, and has a name under which it is asked for, saved and sent. It is composed of small structs
//! which the crates that obey them define; this module owns the values, and that a name always means the same. Once
//! published, a definition never changes: guests have seen it. No other code may ask for a platform's name, and
//! nothing here does anything.
//!
//! | module | owns |
//! | --- | --- |
//! | `godwit` | the machine that this program's own guests see |
//! | `cloud_hypervisor_53` | the machine that guests of cloud-hypervisor v53 see; facts in docs/cloud-hypervisor-state.md |
//! | `numbers` | the form of the rules for device numbers |
//! | `offers` | the form of what a platform says of each kind of virtio device |
//! | `registers` | where registers of the event device and of hotplug are |

mod cloud_hypervisor_53;
mod godwit;
mod numbers;
mod offers;
mod registers;

use arch::acpi::TableRules;
use arch::cpuid::CpuidRules;
use arch::windows::WindowRules;
use hypervisor::InterruptRules;
use pci::{BarRules, PanicDeviceRules, VirtioPciRules};
use serde::{Deserialize, Serialize};

pub use cloud_hypervisor_53::CLOUD_HYPERVISOR_53;
pub use godwit::GODWIT;
pub use numbers::{NumberRules, Unlisted};
pub use offers::{DeviceKind, KindOffers};
pub use registers::{PlacedRegisters, RegisterRules};

/// Name of a platform, in options, JSON and saved states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlatformName {
    /// This program's own.
    #[default]
    #[serde(rename = "godwit")]
    Godwit,
    /// That of cloud-hypervisor v53.
    #[serde(rename = "cloud-hypervisor-53")]
    CloudHypervisor53,
}

impl PlatformName {
    /// All of them, with how they are written.
    pub const ALL: &'static [(Self, &'static str)] =
        &[(Self::Godwit, "godwit"), (Self::CloudHypervisor53, "cloud-hypervisor-53")];

    /// What the name stands for.
    pub fn definition(self) -> &'static Platform {
        match self {
            Self::Godwit => &GODWIT,
            Self::CloudHypervisor53 => &CLOUD_HYPERVISOR_53,
        }
    }

    /// How it is written.
    pub fn text(self) -> &'static str {
        Self::ALL.iter().find(|(name, _)| *name == self).map_or("", |(_, text)| text)
    }
}

/// A platform.
#[derive(Debug)]
pub struct Platform {
    /// Its name.
    pub name: PlatformName,
    /// Virtio functions: identity, BAR, capabilities, command register.
    pub virtio_pci: VirtioPciRules,
    /// The panic device's command register.
    pub panic_device: PanicDeviceRules,
    /// Addresses of BARs that the VMM chooses.
    pub bars: BarRules,
    /// The windows for BARs.
    pub windows: WindowRules,
    /// Device numbers, and the order in which devices get them.
    pub numbers: NumberRules,
    /// Features and queues of virtio devices.
    pub offers: KindOffers,
    /// The registers of the event device and of hotplug.
    pub registers: RegisterRules,
    /// Ports that not every platform has.
    pub ports: PortRules,
    /// Interrupt line of the event device.
    pub ged_gsi: u32,
    /// First of the eight interrupt lines that the tables name for the pins of PCI devices.
    pub first_intx_gsi: u32,
    /// What ACPI tables say, beyond where things are.
    pub tables: TableRules,
    /// Interrupt controllers, and messages to them.
    pub interrupts: InterruptRules,
    /// CPUID of guests that boot on it.
    pub cpuid: CpuidRules,
    /// What guests have been shown depends on the number of their address bits, which is then kept with the
    /// configuration from the first boot on. If it is not, only several PCI segments depend on it.
    pub keeps_address_bits: bool,
    /// Longest queue of a disk, as far as this program serves it.
    pub disk_queue_size_max: u16,
    /// Options that make another machine than the platform's, by their paths in the JSON, and why they are refused.
    pub refused: &'static [RefusedOption],
}

/// Ports that not every platform has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRules {
    /// The keyboard controller has a data port.
    pub keyboard_data: bool,
    /// Where firmware writes its messages.
    pub firmware_output: Option<u16>,
}

/// An option that a platform does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedOption {
    /// Its path in the configuration's JSON.
    pub path: &'static str,
    /// Why.
    pub why: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_written_as_it_is_read_and_has_its_definition() {
        for (name, text) in PlatformName::ALL {
            assert_eq!(serde_json::to_value(name).expect("JSON"), serde_json::json!(text));
            assert_eq!(name.text(), *text);
            assert_eq!(name.definition().name, *name);
        }
    }
}
