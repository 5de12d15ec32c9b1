// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration errors.
//!
//! Owns one enum; each variant names the thing and says what to change.

use thiserror::Error;
use vm_migration::options::OptionsError;
use vm_migration::transport::AddressError;

use super::option_string::OptionError;

/// Why a configuration was refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// An option string could not be read.
    #[error("--{option} cannot be read")]
    Option {
        /// The command line option, without dashes.
        option: &'static str,
        /// What is wrong with it.
        #[source]
        source: OptionError,
    },
    /// Options that are recognised but not supported.
    #[error("{} not supported by this version", list_names(names))]
    Unsupported {
        /// JSON paths or options.
        names: Vec<String>,
    },
    /// No boot payload.
    #[error(
        "there is no kernel to boot, give --kernel or payload.kernel, or --firmware or payload.firmware"
    )]
    KernelMissing,
    /// Both kernel and firmware.
    #[error(
        "a VM boots a kernel or firmware, not both: leave payload.kernel or payload.firmware out"
    )]
    TwoPayloads,
    /// The command line does not fit.
    #[error("the kernel command line has {bytes} bytes; the maximum is {max_bytes}")]
    CmdlineTooLong {
        /// Bytes that it has.
        bytes: usize,
        /// Bytes that it may have.
        max_bytes: usize,
    },
    /// The command line has a zero byte.
    #[error("the kernel command line contains a zero byte")]
    CmdlineHasNul,
    /// Fewer vCPUs at most than at boot.
    #[error("the maximum number of vCPUs ({max}) is below the number at boot ({boot})")]
    VcpusMaxBelowBoot {
        /// Most vCPUs.
        max: u32,
        /// vCPUs at boot.
        boot: u32,
    },
    /// The topology describes another number of vCPUs.
    #[error("the topology has {product} logical CPUs, but the VM has at most {max} vCPUs")]
    TopologyProduct {
        /// Threads times cores times dies times packages.
        product: u64,
        /// Most vCPUs.
        max: u32,
    },
    /// The topology leaves gaps in the numbers of vCPUs.
    #[error(
        "the topology gives a vCPU the APIC id {apic_id}, but interrupts reach ids up to {max} only: use \
         counts of threads, cores and dies that are powers of two, or fewer packages"
    )]
    TopologyApicId {
        /// The highest id.
        apic_id: u32,
        /// The highest that can be.
        max: u32,
    },
    /// Affinity of a vCPU that is not there.
    #[error("affinity names vCPU {vcpu}, but the VM has at most {max} vCPUs")]
    AffinityVcpu {
        /// The vCPU.
        vcpu: u32,
        /// Most vCPUs.
        max: u32,
    },
    /// Affinity given twice, or to no CPU.
    #[error("affinity of vCPU {vcpu} is empty or given twice")]
    AffinityEntry {
        /// The vCPU.
        vcpu: u32,
    },
    /// Memory or a zone that cannot be made.
    #[error("{what}: {problem}")]
    Memory {
        /// `memory`, or which zone.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// A device that cannot be made.
    #[error("{what}{}{}{}: {problem}", if id.is_empty() { "" } else { " '" }, id, if id.is_empty() { "" } else { "'" })]
    Device {
        /// Family.
        what: &'static str,
        /// Its name, if it has one.
        id: String,
        /// What is wrong.
        problem: String,
    },
    /// A name that is used twice.
    #[error("the id '{id}' is used twice")]
    DuplicateId {
        /// The name.
        id: String,
    },
    /// A reserved name.
    #[error("the id '{id}' begins with '__', which is reserved for names assigned by the VMM")]
    ReservedId {
        /// The name.
        id: String,
    },
    /// A name without letters.
    #[error("a {family} has an empty id")]
    EmptyId {
        /// Family.
        family: &'static str,
    },
    /// Two devices in one PCI slot.
    #[error("pci_device_id {slot} is used twice")]
    DuplicateSlot {
        /// PCI device number.
        slot: u8,
    },
    /// One device of the host twice.
    #[error("the device at {path} is already passed through")]
    DuplicatePath {
        /// The device.
        path: std::path::PathBuf,
    },
    /// A resource that only one device can use.
    #[error("'{first}' and '{second}' both name {what}, which only one device can use")]
    InUse {
        /// An image or a tap.
        what: String,
        /// The device that has it.
        first: String,
        /// The other one.
        second: String,
    },
    /// A second socket device.
    #[error("the VM already has the vsock device '{id}', and can have only one")]
    SecondVsock {
        /// The device that it has.
        id: String,
    },
    /// One terminal for two consoles.
    #[error("console and serial cannot both be tty, set one of them to off, null or file")]
    DoubleTty,
    /// Not an address of a snapshot.
    #[error("'{url}' is not a snapshot URL, expected file://<directory>")]
    SnapshotUrl {
        /// What was given.
        url: String,
    },
    /// Not an address of a migration.
    #[error(transparent)]
    MigrationAddress(#[from] AddressError),
    /// Options of a migration that cannot be, or not together.
    #[error(transparent)]
    MigrationOptions(#[from] OptionsError),
    /// No random bytes for a MAC address.
    #[error("the host provided no random bytes for a MAC address")]
    Random,
}

fn list_names(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("'{name}'")).collect();
    format!("{} {}", quoted.join(", "), if names.len() == 1 { "is" } else { "are" })
}
