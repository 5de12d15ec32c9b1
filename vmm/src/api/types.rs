// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Response types of the API.
//!
//! Owns their definitions (schema included) and the version that is reported. It must never
//! compute an answer.

use std::collections::BTreeMap;

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, Type};

use crate::config::VmConfig;
use crate::config::codec::JsonOnly;
use crate::config::enums::option_enum;
use crate::config::family::option_family;
use crate::config::value::{FieldValue, SchemaSet};

pub use vm_migration::History as MigrationReport;
pub use vm_migration::document::{self, ProgressDocument};
pub use vm_migration::history;
pub use vm_migration::{CheckFinding, MigrationCheck, MigrationForecast};

/// Version of cloud-hypervisor whose API this is; clients select features by it.
pub const COMPATIBLE_VERSION: &str = "53.0.0";

/// Version of this program.
pub const BUILD_VERSION: &str = concat!("godwit v", env!("CARGO_PKG_VERSION"));

/// Version of the API description.
pub const API_VERSION: &str = "0.3.0";

option_enum! {
    /// State of a VM.
    VmState = "created|running|shutdown|paused|breakpoint", default Created {
        /// Configured, not yet booted.
        Created = "created",
        /// The vCPUs run.
        Running = "running",
        /// Shut down after having run.
        Shutdown = "shutdown",
        /// The vCPUs are stopped.
        Paused = "paused",
        /// Stopped at a breakpoint.
        BreakPoint = "breakpoint",
    }
}

option_family! {
    /// Identity of the VMM.
    VmmPingResponse "ping" {
        /// Name and version of the program.
        build_version: String = BUILD_VERSION.to_owned(), "" as JsonOnly, answer();
        /// Version of the API that is implemented.
        version: String = COMPATIBLE_VERSION.to_owned(), "" as JsonOnly, answer(), required_json();
        /// Process ID of the VMM.
        pid: i64 = i64::from(std::process::id()), "" as JsonOnly, answer();
        /// Optional features of this build.
        features: Vec<String> = vec!["kvm".to_owned()], "" as JsonOnly, answer();
    }
}

option_family! {
    /// A device of a VM.
    DeviceNode "device-node" {
        /// Name.
        id: String = String::new(), "" as JsonOnly, answer();
        /// Resources that the device uses.
        resources: Vec<serde_json::Value> = Vec::new(), "" as JsonOnly, answer();
        /// Parent device.
        parent: Option<String> = None, "" as JsonOnly, answer();
        /// Child devices.
        children: Vec<String> = Vec::new(), "" as JsonOnly, answer();
        /// PCI address (segment, bus, device, function).
        pci_bdf: Option<String> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// A device that was added to a running VM.
    PciDeviceInfo "pci-device-info" {
        /// Name.
        id: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// PCI address (segment, bus, device, function).
        bdf: String = String::new(), "" as JsonOnly, answer(), required_json();
    }
}

option_enum! {
    /// State of background population of guest memory.
    PrefaultState = "running|completed|failed|cancelled", default Running {
        /// In progress.
        Running = "running",
        /// All memory is populated.
        Completed = "completed",
        /// The host ran out of memory; remaining pages are allocated on first access, if possible.
        Failed = "failed",
        /// Ended early, because the VM is being migrated.
        Cancelled = "cancelled",
    }
}

option_enum! {
    /// Whether guest memory is mapped for the DMA of passed-through devices.
    PinningState = "pinning|pinned|failed", default Pinning {
        /// In progress.
        Pinning = "pinning",
        /// All guest memory is mapped and pinned.
        Pinned = "pinned",
        /// Mapping failed; the guest can no longer reach the devices.
        Failed = "failed",
    }
}

option_family! {
    /// Progress of populating memory: before the guest starts (prefault=on), or while it runs (prefault=background).
    PrefaultInfo "prefault-info" {
        /// State.
        state: PrefaultState = PrefaultState::Running, "" as JsonOnly, answer(), required_json();
        /// Bytes populated so far.
        done_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// Total bytes.
        total_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// Reason of the failure.
        error: Option<String> = None, "" as JsonOnly, answer();
    }
}

option_enum! {
    /// What a passed-through device waits for that the guest does not see yet.
    WithheldFor = "opening|memory", default Memory {
        /// The host opens it.
        Opening = "opening",
        /// All guest memory is to be mapped.
        Memory = "memory",
    }
}

option_family! {
    /// A passed-through device that the guest does not see before it is open and all memory is mapped.
    WithheldDeviceInfo "withheld-device-info" {
        /// Name of the device.
        id: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// What it waits for.
        waits_for: WithheldFor = WithheldFor::Memory, "" as JsonOnly, answer(), required_json();
        /// Since when, in microseconds on the host's CLOCK_MONOTONIC.
        since_monotonic_us: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// For how long, in milliseconds.
        withheld_ms: u64 = 0, "" as JsonOnly, answer(), required_json();
    }
}

option_family! {
    /// Progress of mapping guest memory for DMA by passed-through devices.
    PassthroughInfo "passthrough-info" {
        /// Bytes mapped and pinned so far.
        pinned_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// Total bytes.
        total_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// State.
        state: PinningState = PinningState::Pinning, "" as JsonOnly, answer(), required_json();
        /// Reason of the failure.
        error: Option<String> = None, "" as JsonOnly, answer();
        /// Devices that the guest does not see yet, if there are any.
        withheld: Option<Vec<WithheldDeviceInfo>> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// A disk whose backing storage is full (on_full=pause).
    FullDiskInfo "full-disk-info" {
        /// Name of the device.
        id: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Path of the image.
        path: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Guest requests waiting for free space.
        requests: u64 = 0, "" as JsonOnly, answer(), required_json();
    }
}

option_family! {
    /// A VM: its configuration and current state.
    VmInfo "info" {
        /// Configuration, with all defaults filled in.
        config: VmConfig = VmConfig::default(), "" as JsonOnly, answer(), required_json();
        /// State.
        state: VmState = VmState::Created, "" as JsonOnly, answer(), required_json();
        /// Current size of guest memory in bytes.
        memory_actual_size: u64 = 0, "" as JsonOnly, answer();
        /// The balloon, if configured: target size, actual size, and the memory statistics last
        /// reported by the guest.
        balloon: Option<BTreeMap<String, u64>> = None, "" as JsonOnly, answer();
        /// Devices by name.
        device_tree: Option<BTreeMap<String, DeviceNode>> = None, "" as JsonOnly, answer();
        /// What is being done to the VM while other requests wait, if anything: booted, rebooted, paused,
        /// resumed, changed, saved, restored, migrated, ended.
        doing: Option<String> = None, "" as JsonOnly, answer();
        /// Set at a migration destination while it is not known whether the source still runs the VM, and at a source
        /// while it is not known whether the destination does (the state is Paused): the reason.
        in_doubt: Option<String> = None, "" as JsonOnly, answer();
        /// Set at a postcopy destination that has lost its connections to the source (the state is
        /// Running; an access to a missing page blocks): the reason.
        postcopy_paused: Option<String> = None, "" as JsonOnly, answer();
        /// Disks whose backing storage is full; the VM is paused until there is free space.
        full_disks: Option<Vec<FullDiskInfo>> = None, "" as JsonOnly, answer();
        /// Progress of populating memory: before the guest starts (prefault=on; absent afterwards), or while it runs
        /// (prefault=background).
        prefault: Option<PrefaultInfo> = None, "" as JsonOnly, answer();
        /// Progress of mapping memory for passed-through devices, if the VM has any.
        passthrough: Option<PassthroughInfo> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// Result of a cancelled migration.
    MigrationCancelled "migration-cancelled" {
        /// Side that was asked to cancel: source or destination.
        side: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Location of the guest: on-source, paused-on-source, not-here.
        guest: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// The result as a sentence.
        message: String = String::new(), "" as JsonOnly, answer(), required_json();
    }
}

/// Counters of the devices: device, then counter.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;

impl<T: FieldValue> FieldValue for BTreeMap<String, T> {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::Object)
            .additional_properties(Some(AdditionalProperties::RefOr(T::schema())))
            .into()
    }

    fn type_name() -> String {
        format!("map of {}", T::type_name())
    }

    fn collect_schemas(out: &mut SchemaSet) {
        T::collect_schemas(out);
    }
}

impl FieldValue for serde_json::Value {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Object).into()
    }

    fn type_name() -> String {
        "object".to_owned()
    }
}
