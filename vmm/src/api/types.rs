// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The answers of the API, as JSON has them.
//!
//! Owns their definitions (schema included) and the version that is reported. It must never
//! compute an answer.

use std::collections::BTreeMap;

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, Type};

use crate::config::VmConfig;
use crate::config::codec::JsonOnly;
use crate::config::family::{option_enum, option_family};
use crate::config::value::{FieldValue, SchemaSet};

/// Version of the program whose interface this is; clients choose by it what they may ask for.
pub const COMPATIBLE_VERSION: &str = "53.0.0";

/// Version of this program.
pub const BUILD_VERSION: &str = concat!("godwit v", env!("CARGO_PKG_VERSION"));

/// Version of the API description.
pub const API_VERSION: &str = "0.3.0";

option_enum! {
    /// Where a VM is in its life.
    VmState = "created|running|shutdown|paused|breakpoint", default Created {
        /// It has a configuration and has not run yet.
        Created = "created",
        /// Its vCPUs run.
        Running = "running",
        /// It has run and was shut down.
        Shutdown = "shutdown",
        /// Its vCPUs stand still.
        Paused = "paused",
        /// It stands at a breakpoint.
        BreakPoint = "breakpoint",
    }
}

option_family! {
    /// What answers at the other end.
    VmmPingResponse "ping" {
        /// Name and version of the program.
        build_version: String = BUILD_VERSION.to_owned(), "" as JsonOnly, answer();
        /// Version of the interface.
        version: String = COMPATIBLE_VERSION.to_owned(), "" as JsonOnly, answer(), required_json();
        /// Process.
        pid: i64 = i64::from(std::process::id()), "" as JsonOnly, answer();
        /// Optional features that were built in.
        features: Vec<String> = vec!["kvm".to_owned()], "" as JsonOnly, answer();
    }
}

option_family! {
    /// A device of a VM.
    DeviceNode "device-node" {
        /// Name.
        id: String = String::new(), "" as JsonOnly, answer();
        /// What it uses.
        resources: Vec<serde_json::Value> = Vec::new(), "" as JsonOnly, answer();
        /// What it hangs on.
        parent: Option<String> = None, "" as JsonOnly, answer();
        /// What hangs on it.
        children: Vec<String> = Vec::new(), "" as JsonOnly, answer();
        /// Its place on the PCI bus.
        pci_bdf: Option<String> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// A device that was added to a VM that runs.
    PciDeviceInfo "pci-device-info" {
        /// Name.
        id: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Its place on the PCI bus.
        bdf: String = String::new(), "" as JsonOnly, answer(), required_json();
    }
}

option_enum! {
    /// What has become of memory that is populated in the background.
    PrefaultState = "running|completed|failed|cancelled", default Running {
        /// It goes on.
        Running = "running",
        /// All of it is there.
        Completed = "completed",
        /// The host has no more memory; the guest gets the rest when it touches it, if it can.
        Failed = "failed",
        /// The VM is going elsewhere.
        Cancelled = "cancelled",
    }
}

option_enum! {
    /// Whether guest memory is mapped for the DMA of passed-through devices.
    PinningState = "pinning|pinned|failed", default Pinning {
        /// Under way.
        Pinning = "pinning",
        /// All of it is.
        Pinned = "pinned",
        /// It is not; the devices are gone for the guest.
        Failed = "failed",
    }
}

option_family! {
    /// Memory that is populated in the background (prefault=background).
    PrefaultInfo "prefault-info" {
        /// What has become of it.
        state: PrefaultState = PrefaultState::Running, "" as JsonOnly, answer(), required_json();
        /// Bytes that are populated.
        done_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// Bytes in all.
        total_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// Why it failed.
        error: Option<String> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// Guest memory on its way to the DMA of passed-through devices.
    PassthroughInfo "passthrough-info" {
        /// Bytes that are mapped and pinned.
        pinned_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// Bytes in all.
        total_bytes: u64 = 0, "" as JsonOnly, answer(), required_json();
        /// What becomes of it.
        state: PinningState = PinningState::Pinning, "" as JsonOnly, answer(), required_json();
        /// Why it failed.
        error: Option<String> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// A disk that the host has no room for (on_full=pause).
    FullDiskInfo "full-disk-info" {
        /// Name of the device.
        id: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Its image.
        path: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Requests of the guest that wait for room.
        requests: u64 = 0, "" as JsonOnly, answer(), required_json();
    }
}

option_family! {
    /// A VM: its configuration and what has become of it.
    VmInfo "info" {
        /// Configuration, with everything that was filled in.
        config: VmConfig = VmConfig::default(), "" as JsonOnly, answer(), required_json();
        /// Where it is in its life.
        state: VmState = VmState::Created, "" as JsonOnly, answer(), required_json();
        /// Bytes of memory that the guest has now.
        memory_actual_size: u64 = 0, "" as JsonOnly, answer();
        /// The balloon, if there is one: what it is to have, what it has, and what the guest last
        /// said of its memory.
        balloon: Option<BTreeMap<String, u64>> = None, "" as JsonOnly, answer();
        /// Its devices by name.
        device_tree: Option<BTreeMap<String, DeviceNode>> = None, "" as JsonOnly, answer();
        /// What goes on with it, while something does that other requests wait for: booted, rebooted,
        /// paused, resumed, changed, saved, restored, migrated, ended.
        doing: Option<String> = None, "" as JsonOnly, answer();
        /// Of a VM that has arrived (its state is Paused) while it is not known whether its source
        /// runs it: why not.
        in_doubt: Option<String> = None, "" as JsonOnly, answer();
        /// Of a VM that has arrived in postcopy and has lost the connections over which its pages come
        /// (its state is Running, and what touches a missing page waits): why.
        postcopy_paused: Option<String> = None, "" as JsonOnly, answer();
        /// Disks that the host has no room for; the VM is paused until there is.
        full_disks: Option<Vec<FullDiskInfo>> = None, "" as JsonOnly, answer();
        /// How far memory is populated in the background.
        prefault: Option<PrefaultInfo> = None, "" as JsonOnly, answer();
        /// How much memory is ready for passed-through devices, if it has any.
        passthrough: Option<PassthroughInfo> = None, "" as JsonOnly, answer();
    }
}

option_family! {
    /// A migration that was cancelled.
    MigrationCancelled "migration-cancelled" {
        /// The side that answers: source or destination.
        side: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// Where the guest is now: on-source, paused-on-source, not-here.
        guest: String = String::new(), "" as JsonOnly, answer(), required_json();
        /// The same as text.
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
