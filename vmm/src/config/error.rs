// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration errors.
//!
//! Owns one enum; each variant names the thing and says what to change.

use std::path::PathBuf;

use thiserror::Error;
use vm_migration::options::OptionsError;
use vm_migration::transport::AddressError;

use super::option_string::OptionError;

/// Why a configuration is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The CPU baseline is none.
    #[error(transparent)]
    Baseline(#[from] super::cpu_baseline::BaselineContentsError),
    /// The configuration of a VM that has booted elsewhere names a file.
    #[error(
        "the CPU baseline of a VM that has run is in its configuration, and this one names the file {} instead",
        path.display()
    )]
    BaselineFile {
        /// The file.
        path: PathBuf,
    },
    /// AMX beside a CPU baseline.
    #[error(
        "features=[amx] cannot be had with a baseline, as none has AMX: leave cpus.features.amx or cpus.baseline out"
    )]
    AmxBaseline,
    /// An option string cannot be parsed.
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
    /// There is no boot payload.
    #[error(
        "there is no kernel to boot, give --kernel or payload.kernel, or --firmware or payload.firmware"
    )]
    KernelMissing,
    /// Both kernel and firmware are given.
    #[error(
        "a VM boots a kernel or firmware, not both: leave payload.kernel or payload.firmware out"
    )]
    TwoPayloads,
    /// The kernel command line is too long.
    #[error("the kernel command line has {bytes} bytes; the maximum is {max_bytes}")]
    CmdlineTooLong {
        /// Its length in bytes.
        bytes: usize,
        /// The limit in bytes.
        max_bytes: usize,
    },
    /// The kernel command line contains a zero byte.
    #[error("the kernel command line contains a zero byte")]
    CmdlineHasNul,
    /// A Landlock rule without a path.
    #[error("a Landlock rule needs a path")]
    LandlockPath,
    /// Access of a Landlock rule.
    #[error("access '{access}' of the Landlock rule for {} is not 'r', 'w' or 'rw'", path.display())]
    LandlockAccess {
        /// Its path.
        path: PathBuf,
        /// What is not access.
        access: String,
    },
    /// The maximum number of vCPUs is below the number at boot.
    #[error("the maximum number of vCPUs ({max}) is below the number at boot ({boot})")]
    VcpusMaxBelowBoot {
        /// Maximum number of vCPUs.
        max: u32,
        /// vCPUs at boot.
        boot: u32,
    },
    /// The topology has another number of vCPUs.
    #[error("the topology has {product} logical CPUs, but the VM has at most {max} vCPUs")]
    TopologyProduct {
        /// Threads times cores times dies times packages.
        product: u64,
        /// Maximum number of vCPUs.
        max: u32,
    },
    /// The topology's gaps lead to APIC ids above the limit.
    #[error(
        "the topology gives a vCPU the APIC id {apic_id}, but interrupts reach ids up to {max} only: use \
         counts of threads, cores and dies that are powers of two, or fewer packages"
    )]
    TopologyApicId {
        /// The highest id.
        apic_id: u32,
        /// The limit.
        max: u32,
    },
    /// The affinity of a nonexistent vCPU is given.
    #[error("affinity names vCPU {vcpu}, but the VM has at most {max} vCPUs")]
    AffinityVcpu {
        /// The vCPU.
        vcpu: u32,
        /// Maximum number of vCPUs.
        max: u32,
    },
    /// An affinity is given twice, or is empty.
    #[error("affinity of vCPU {vcpu} is empty or given twice")]
    AffinityEntry {
        /// The vCPU.
        vcpu: u32,
    },
    /// Memory or a zone is invalid.
    #[error("{what}: {problem}")]
    Memory {
        /// `memory`, or the zone.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// A device is invalid.
    #[error("{what}{}{}{}: {problem}", if id.is_empty() { "" } else { " '" }, id, if id.is_empty() { "" } else { "'" })]
    Device {
        /// Option family of the device.
        what: &'static str,
        /// Id of the device, if it has one.
        id: String,
        /// What is wrong.
        problem: String,
    },
    /// An id is used twice.
    #[error("the id '{id}' is used twice")]
    DuplicateId {
        /// The id.
        id: String,
    },
    /// An id has the reserved prefix.
    #[error("the id '{id}' begins with '__', which is reserved for names assigned by the VMM")]
    ReservedId {
        /// The id.
        id: String,
    },
    /// An id is empty.
    #[error("a {family} has an empty id")]
    EmptyId {
        /// Option family of the device.
        family: &'static str,
    },
    /// Two devices of a PCI segment have the same device number.
    #[error("pci_device_id {slot} is used twice in PCI segment {segment}")]
    DuplicateSlot {
        /// PCI segment.
        segment: u16,
        /// PCI device number.
        slot: u8,
    },
    /// A host device is given twice.
    #[error("the device at {path} is already passed through")]
    DuplicatePath {
        /// Path of the device.
        path: std::path::PathBuf,
    },
    /// Two devices share a resource that only one can use.
    #[error("'{first}' and '{second}' both name {what}, which only one device can use")]
    InUse {
        /// The image or tap.
        what: String,
        /// The first device.
        first: String,
        /// The second device.
        second: String,
    },
    /// There is more than one vsock device.
    #[error("the VM already has the vsock device '{id}', and can have only one")]
    SecondVsock {
        /// The first one.
        id: String,
    },
    /// Two consoles use the terminal.
    #[error("console and serial cannot both be tty, set one of them to off, null or file")]
    DoubleTty,
    /// The URL of a snapshot is invalid.
    #[error("'{url}' is not a snapshot URL, expected file://<directory>")]
    SnapshotUrl {
        /// The URL.
        url: String,
    },
    /// The URL of a core dump is invalid.
    #[error("'{url}' is not the URL of a core dump, expected file://<path>")]
    CoreDumpUrl {
        /// The URL.
        url: String,
    },
    /// The address of a migration is invalid.
    #[error(transparent)]
    MigrationAddress(#[from] AddressError),
    /// The options of a migration are invalid or contradict each other.
    #[error(transparent)]
    MigrationOptions(#[from] OptionsError),
    /// The host provides no random bytes for a MAC address.
    #[error("the host provided no random bytes for a MAC address")]
    Random,
}

fn list_names(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("'{name}'")).collect();
    format!("{} {}", quoted.join(", "), if names.len() == 1 { "is" } else { "are" })
}
