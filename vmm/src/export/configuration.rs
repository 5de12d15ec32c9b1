// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration: the same names and values but for a few.
//!
//! Owns which options v53 has, and what happens to others: dropped, said to be lost, or refused. One that is not
//! named here is refused by its name as soon as it is used.

use serde_json::{Map, Value, json};

use super::error::ExportError;
use crate::config::VmConfig;
use crate::config::value::FieldValue as _;
use crate::config::vm::{BALLOON_ID, CONSOLE_ID, RNG_ID, RTC_ID};

/// Option families that v53 has, by their path, each with its options. What is in an option that is no family of this
/// list is taken as it is.
const FAMILIES: [(&str, &[&str]); 20] = [
    (
        "",
        &[
            "cpus",
            "memory",
            "payload",
            "rate_limit_groups",
            "disks",
            "net",
            "rng",
            "balloon",
            "pmem",
            "serial",
            "console",
            "debug_console",
            "vsock",
            "numa",
            "watchdog",
            "rtc",
            "pvpanic",
            "pci_segments",
            "platform",
            "landlock_enable",
            "landlock_rules",
        ],
    ),
    (
        "cpus",
        &[
            "boot_vcpus",
            "max_vcpus",
            "topology",
            "kvm_hyperv",
            "max_phys_bits",
            "affinity",
            "features",
            "nested",
            "core_scheduling",
        ],
    ),
    (
        "memory",
        &[
            "size",
            "hotplug_size",
            "hotplugged_size",
            "mergeable",
            "hotplug_method",
            "shared",
            "hugepages",
            "hugepage_size",
            "prefault",
            "reserve",
            "thp",
            "zones",
        ],
    ),
    (
        "memory.zones",
        &[
            "id",
            "size",
            "file",
            "mergeable",
            "shared",
            "hugepages",
            "hugepage_size",
            "host_numa_node",
            "hotplug_size",
            "hotplugged_size",
            "prefault",
            "reserve",
        ],
    ),
    ("payload", &["firmware", "kernel", "cmdline", "initramfs"]),
    (
        "disks",
        &[
            "path",
            "readonly",
            "direct",
            "num_queues",
            "queue_size",
            "rate_limiter_config",
            "pci_segment",
            "pci_device_id",
            "id",
            "serial",
            "rate_limit_group",
            "queue_affinity",
            "backing_files",
            "sparse",
            "image_type",
            "lock_granularity",
            "disable_io_uring",
            "disable_aio",
        ],
    ),
    (
        "net",
        &[
            "tap",
            "ip",
            "mask",
            "mac",
            "host_mac",
            "mtu",
            "num_queues",
            "queue_size",
            "id",
            "fds",
            "pci_segment",
            "pci_device_id",
            "rate_limiter_config",
            "offload_tso",
            "offload_ufo",
            "offload_csum",
        ],
    ),
    ("rng", &["id", "pci_segment", "pci_device_id", "src"]),
    (
        "balloon",
        &["id", "pci_segment", "pci_device_id", "size", "deflate_on_oom", "free_page_reporting"],
    ),
    ("pmem", &["file", "size", "discard_writes", "pci_segment", "pci_device_id", "id"]),
    ("serial", &["mode", "file", "socket"]),
    ("console", &["mode", "file", "socket", "id", "pci_segment", "pci_device_id"]),
    ("debug_console", &["mode", "file", "iobase"]),
    ("vsock", &["cid", "socket", "pci_segment", "pci_device_id", "id"]),
    ("numa", &["guest_numa_id", "cpus", "distances", "memory_zones", "pci_segments", "device_id"]),
    ("rtc", &["id", "pci_segment", "pci_device_id"]),
    ("pci_segments", &["pci_segment", "mmio32_aperture_weight", "mmio64_aperture_weight"]),
    (
        "platform",
        &[
            "num_pci_segments",
            "iommu_address_width_bits",
            "system_serial_number",
            "serial_number",
            "system_uuid",
            "uuid",
            "oem_strings",
            "system_manufacturer",
            "system_product_name",
            "system_version",
            "system_family",
            "system_sku_number",
            "chassis_asset_tag",
            "iommufd",
            "vfio_p2p_dma",
        ],
    ),
    ("landlock_rules", &["path", "access"]),
    ("rate_limit_groups", &["id", "rate_limiter_config"]),
];

/// Options of this program that say nothing to v53: what they mean is in the documents, or is the same there always.
const IMPLIED: [&str; 7] = [
    "pci_address_bits",
    "pci_numbers",
    "removed_device_numbers",
    "platform.platform",
    "pmem.gpa",
    "memory.high_hole",
    "net.vhost_mode",
];

/// Options of this program that a guest cannot notice: their effect is lost.
const LOST: [&str; 7] = [
    "memory.prezeroed",
    "memory.zones.prezeroed",
    "memory.prefault_threads",
    "disks.on_full",
    "balloon.free_page_hinting",
    "balloon.statistics_interval_s",
    "balloon.prezero_hints",
];

/// Devices of which there is one at most, and ids that they have there without being told.
const SINGLE: [(&str, &str); 4] =
    [("console", CONSOLE_ID), ("rng", RNG_ID), ("balloon", BALLOON_ID), ("rtc", RTC_ID)];

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// The options of a family, if it is one.
fn options(path: &str) -> Option<&'static [&'static str]> {
    FAMILIES.iter().find(|(family, _)| *family == path).map(|(_, options)| *options)
}

/// Refuses the options that are used and not known, and says which are lost.
fn check(used: &Value, path: &str, losses: &mut Vec<String>) -> Result<(), ExportError> {
    match used {
        Value::Array(items) => items.iter().try_for_each(|item| check(item, path, losses)),
        Value::Object(fields) => {
            let Some(options) = options(path) else { return Ok(()) };
            for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                let at = join(path, key);
                if options.contains(&key.as_str()) {
                    check(value, &at, losses)?;
                } else if LOST.contains(&at.as_str()) {
                    losses.push(format!("{at} has no counterpart there"));
                } else if !IMPLIED.contains(&at.as_str()) {
                    return Err(ExportError::refused(at, "cloud-hypervisor 53 has no such option"));
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Leaves the options that v53 has, and of them those with a value.
fn keep(value: &mut Value, path: &str) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| keep(item, path)),
        Value::Object(fields) => {
            let known = options(path);
            fields.retain(|key, value| {
                !value.is_null() && known.is_none_or(|known| known.contains(&key.as_str()))
            });
            for (key, value) in fields.iter_mut() {
                keep(value, &join(path, key));
            }
        }
        _ => {}
    }
}

/// The configuration; what is lost and no guest can notice is added to `losses`.
///
/// # Errors
/// Names an option that v53 does not have.
pub fn convert(config: &VmConfig, losses: &mut Vec<String>) -> Result<Value, ExportError> {
    let used = config.sparse()?;
    check(&used, "", losses)?;
    if config.memory.hole() != arch::layout::HighHole::None {
        let problem = "cloud-hypervisor 53 leaves no hole in memory";
        return Err(ExportError::refused("memory.high_hole", problem));
    }
    let mut vm = serde_json::to_value(config)?;
    keep(&mut vm, "");
    let Some(fields) = vm.as_object_mut() else { return Ok(vm) };
    let platform = used.get("platform").and_then(Value::as_object);
    if platform.is_none_or(|used| used.keys().all(|key| key == "platform")) {
        fields.remove("platform");
    }
    if fields.get("payload").and_then(Value::as_object).is_some_and(Map::is_empty) {
        fields.remove("payload");
    }
    for (key, id) in SINGLE {
        let Some(device) = fields.get_mut(key).and_then(Value::as_object_mut) else { continue };
        if device.get("id").is_some_and(|has| has == id) {
            device.remove("id");
        }
    }
    let nets = fields.get_mut("net").and_then(Value::as_array_mut);
    for net in nets.into_iter().flatten() {
        if let Some(Value::Array(fds)) = net.get_mut("fds") {
            // Descriptors that are given anew.
            fds.fill(json!(-1));
        }
    }
    if let Some(cpus) = fields.get_mut("cpus").and_then(Value::as_object_mut) {
        // A host with more must place its registers and windows as this one has.
        if let Some(bits) = config.pci_address_bits {
            cpus.insert("max_phys_bits".to_owned(), json!(bits));
        }
    }
    if let Some(memory) = fields.get_mut("memory").and_then(Value::as_object_mut) {
        populated_or_not(memory, "memory", losses);
        let zones = memory.get_mut("zones").and_then(Value::as_array_mut);
        for zone in zones.into_iter().flatten().filter_map(Value::as_object_mut) {
            populated_or_not(zone, "memory.zones", losses);
        }
        with_devices(memory, config);
    }
    Ok(vm)
}

/// There is no way there to populate memory in the background.
fn populated_or_not(options: &mut Map<String, Value>, path: &str, losses: &mut Vec<String>) {
    if options.get("prefault").is_some_and(|how| !how.is_boolean()) {
        losses.push(format!("{path}.prefault has no counterpart there"));
        options.insert("prefault".to_owned(), json!(false));
    }
}

/// With memory devices of ACPI `size` counts them too, and they have no size of their own.
fn with_devices(memory: &mut Map<String, Value>, config: &VmConfig) {
    let bytes = config.memory.hotplugged_size.filter(|_| config.memory.has_memory_devices());
    if let Some(bytes) = bytes {
        memory.insert("size".to_owned(), json!(config.memory.size.saturating_add(bytes)));
        memory.remove("hotplugged_size");
    }
}
