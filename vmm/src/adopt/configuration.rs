// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration: the same names and values but for a few, and what the VMM has decided since.
//!
//! Owns which keys are refused, and what is added: the place of each device, where the guest has found it.

use cloud_hypervisor_state::MemoryManager;
use serde_json::{Map, Value, json};

use super::error::AdoptError;
use super::memory::devices_bytes;
use super::topology::Topology;
use crate::config::VmConfig;
use crate::config::foreign::says_nothing;
use crate::config::vm::{BALLOON_ID, CONSOLE_ID, RNG_ID, RTC_ID};

/// Keys of which any value but a default is refused, although this program knows them.
const REFUSED: [&str; 10] = [
    "iommu",
    "devices",
    "user_devices",
    "vdpa",
    "generic_vhost_user",
    "ivshmem",
    "pvmemcontrol",
    "igvm",
    "gdb",
    "tpm",
];
/// Devices of which there is one at most, and the id of each if none is given.
const SINGLE: [(&str, &str); 5] = [
    ("console", CONSOLE_ID),
    ("rng", RNG_ID),
    ("balloon", BALLOON_ID),
    ("rtc", RTC_ID),
    ("vsock", ""),
];
const LISTS: [&str; 4] = ["disks", "net", "pmem", "fs"];

/// The configuration, not complete yet.
#[derive(Debug)]
pub struct Raw {
    /// Its values.
    pub config: VmConfig,
    /// Ids of network devices whose taps were given as descriptors.
    pub without_tap: Vec<String>,
}

/// Reads the configuration, with the place of each device.
///
/// # Errors
/// Names the key.
pub fn read(
    vm_config: &Value,
    memory: &MemoryManager,
    topology: &Topology,
) -> Result<Raw, AdoptError> {
    let mut vm = vm_config.clone();
    let Some(keys) = vm.as_object_mut() else {
        return Err(refused("vm_config", vm_config));
    };
    for key in REFUSED {
        check(keys, "", key)?;
        keys.remove(key);
    }
    if let Some(platform) = keys.get("platform").and_then(Value::as_object) {
        for key in ["iommu_segments", "tdx", "sev_snp"] {
            check(platform, "platform.", key)?;
        }
    }
    let mut without_tap = Vec::new();
    for family in LISTS {
        let list = keys.get_mut(family).and_then(Value::as_array_mut);
        for (index, device) in list.into_iter().flatten().enumerate() {
            let Some(device) = device.as_object_mut() else {
                return Err(refused(&format!("{family}[{index}]"), device));
            };
            let at = format!("{family}[{index}].");
            check(device, &at, "iommu")?;
            if family == "disks" {
                check(device, &at, "vhost_user")?;
            }
            let id = device.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
            if device.remove("fds").is_some_and(|fds| !fds.is_null()) {
                without_tap.push(id.clone());
            }
            place(device, &at, &id, topology)?;
            if let (true, Some(mtu)) = (family == "net", topology.mtu(&id)) {
                let has = device.entry("mtu").or_insert(Value::Null);
                if has.is_null() {
                    *has = json!(mtu);
                }
            }
            if let (true, Some(gpa)) = (family == "pmem", topology.pmem_gpa(&id)) {
                device.insert("gpa".to_owned(), json!(gpa));
            }
        }
    }
    for (key, id) in SINGLE {
        let Some(device) = keys.get_mut(key).and_then(Value::as_object_mut) else { continue };
        check(device, &format!("{key}."), "iommu")?;
        let named = device.get("id").and_then(Value::as_str).unwrap_or(id).to_owned();
        place(device, &format!("{key}."), &named, topology)?;
    }
    if let Some(options) = keys.get_mut("memory").and_then(Value::as_object_mut) {
        with_devices_apart(options, memory);
    }
    let config = serde_json::from_value(vm).map_err(AdoptError::Malformed)?;
    Ok(Raw { config, without_tap })
}

fn refused(key: &str, value: &Value) -> AdoptError {
    const CHARS_MAX: usize = 80;
    let value = value.to_string().chars().take(CHARS_MAX).collect();
    AdoptError::Key { key: key.to_owned(), value }
}

/// Refuses a value that is not the default one.
fn check(keys: &Map<String, Value>, at: &str, key: &str) -> Result<(), AdoptError> {
    match keys.get(key) {
        None | Some(Value::Null | Value::Bool(false)) => Ok(()),
        Some(Value::Array(items)) if items.is_empty() => Ok(()),
        Some(value) if says_nothing("VmConfig", key, value) => Ok(()),
        Some(value) => Err(refused(&format!("{at}{key}"), value)),
    }
}

/// Notes the number that a device has; a number and a segment that were asked for have to be those.
fn place(
    device: &mut Map<String, Value>,
    at: &str,
    id: &str,
    topology: &Topology,
) -> Result<(), AdoptError> {
    // A device that is off has no place.
    let Ok(place) = topology.place(id) else { return Ok(()) };
    let wanted =
        [("pci_segment", json!(place.bdf.segment())), ("pci_device_id", json!(place.bdf.device()))];
    for (key, has) in wanted {
        match device.get(key) {
            None | Some(Value::Null) => drop(device.insert(key.to_owned(), has)),
            Some(value) if *value == has => {}
            Some(value) => return Err(refused(&format!("{at}{key}"), value)),
        }
    }
    Ok(())
}

/// With ACPI `size` is what was asked for last: it counts memory devices, and is less than there is where memory was to
/// shrink, which does nothing. Here it is what the guest has booted with.
fn with_devices_apart(options: &mut Map<String, Value>, memory: &MemoryManager) {
    let devices_bytes = devices_bytes(memory);
    let is_acpi = options.get("hotplug_method").is_none_or(|method| method == "Acpi");
    let zones = options.get("zones").and_then(Value::as_array);
    if !is_acpi || zones.is_some_and(|zones| !zones.is_empty()) {
        return;
    }
    options.insert("size".to_owned(), json!(memory.boot_ram));
    if devices_bytes > 0 {
        options.insert("hotplugged_size".to_owned(), json!(devices_bytes));
    }
}
