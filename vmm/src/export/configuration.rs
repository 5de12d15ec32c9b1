// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration: the same names and values but for a few.
//!
//! Owns which options v53 has, and what happens to others: dropped, said to be lost, or refused. One that is not
//! named here is refused by its name as soon as it is used.

use serde_json::{Map, Value, json};

use super::error::ExportError;
use crate::config::memory::HotplugMethod;
use crate::config::value::FieldValue as _;
use crate::config::vm::{BALLOON_ID, CONSOLE_ID, RNG_ID, RTC_ID};
use crate::config::{ConsoleMode, VmConfig};

/// Option families that v53 has, by their path, each with its options.
const FAMILIES: [(&str, &[&str]); 25] = [
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
    ("cpus.topology", &["threads_per_core", "cores_per_die", "dies_per_package", "packages"]),
    ("cpus.features", &["amx"]),
    ("cpus.affinity", &["vcpu", "host_cpus"]),
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
    ("disks.queue_affinity", &["queue_index", "host_cpus"]),
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
    ("numa.distances", &["destination", "distance"]),
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

/// The end of the path of a rate limiter, its limits, and the options of each.
const RATE_LIMITER: &str = "rate_limiter_config";
const LIMITS: [&str; 2] = ["bandwidth", "ops"];
const BUCKET: [&str; 3] = ["size", "one_time_burst", "refill_time"];

/// Options that v53 has, and of which not all is known that would have to be written. The last part of a path is enough where
/// devices of several families have it.
const NOT_WRITTEN: [&str; 17] = [
    "tpm",
    "fs",
    "generic_vhost_user",
    "devices",
    "user_devices",
    "vdpa",
    "ivshmem",
    "pvmemcontrol",
    "iommu",
    "iommu_segments",
    "vhost_user",
    "vhost_socket",
    "gdb",
    "igvm",
    "fw_cfg_config",
    "tdx",
    "sev_snp",
];

/// Bytes of the serial number that a disk has.
const SERIAL_BYTES: usize = 20;

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
const LOST: [&str; 8] = [
    "memory.prezeroed",
    "memory.zones.prezeroed",
    "memory.prefault_threads",
    "memory.pin_threads",
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
    let (family, last) = path.rsplit_once('.').unwrap_or(("", path));
    if last == RATE_LIMITER {
        return Some(&LIMITS);
    }
    if family.ends_with(RATE_LIMITER) && LIMITS.contains(&last) {
        return Some(&BUCKET);
    }
    FAMILIES.iter().find(|(family, _)| *family == path).map(|(_, options)| *options)
}

/// Why an option that is used cannot be written.
fn unknown(path: &str) -> ExportError {
    let last = path.rsplit('.').next().unwrap_or(path);
    let problem = if path == "memory.zones.file" {
        "pages that are zero are not written, and the file may have others when it is opened there"
    } else if NOT_WRITTEN.contains(&last) {
        "this option of cloud-hypervisor 53 is not written"
    } else {
        "cloud-hypervisor 53 has no such option"
    };
    ExportError::refused(path, problem)
}

/// Refuses the options that are used and not known, and says which are lost.
pub(super) fn check(used: &Value, path: &str, losses: &mut Vec<String>) -> Result<(), ExportError> {
    match used {
        Value::Array(items) => items.iter().try_for_each(|item| check(item, path, losses)),
        Value::Object(fields) => {
            let options = options(path).ok_or_else(|| unknown(path))?;
            for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                let at = join(path, key);
                if options.contains(&key.as_str()) {
                    check(value, &at, losses)?;
                } else if LOST.contains(&at.as_str()) {
                    losses.push(format!("{at} has no counterpart there"));
                } else if !IMPLIED.contains(&at.as_str()) {
                    return Err(unknown(&at));
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
    if config.console.mode == ConsoleMode::Socket {
        let problem = "cloud-hypervisor 53 has no console at a socket, only a serial port";
        return Err(ExportError::refused("console.mode=socket", problem));
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
    let disks = fields.get_mut("disks").and_then(Value::as_array_mut);
    disks.into_iter().flatten().filter_map(Value::as_object_mut).for_each(with_serial);
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
        let has_devices = config.memory.hotplug_method == HotplugMethod::Acpi;
        populated_or_not(memory, "memory", losses);
        let zones = memory.get_mut("zones").and_then(Value::as_array_mut);
        for zone in zones.into_iter().flatten().filter_map(Value::as_object_mut) {
            populated_or_not(zone, "memory.zones", losses);
            without_zeros(zone, has_devices);
        }
        with_devices(memory, config);
        without_zeros(memory, has_devices);
        if memory.get("zones").and_then(Value::as_array).is_some_and(Vec::is_empty) {
            memory.remove("zones");
        }
    }
    Ok(vm)
}

/// Without one of its own the number of a disk follows from its id here, and from its file there. It is no longer than what a
/// driver reads.
fn with_serial(disk: &mut Map<String, Value>) {
    let own = disk.get("serial").or_else(|| disk.get("id")).and_then(Value::as_str);
    let Some(own) = own else { return };
    let cut = own.get(..own.floor_char_boundary(SERIAL_BYTES)).unwrap_or(own);
    let serial = json!(cut);
    disk.insert("serial".to_owned(), serial);
}

/// There is no way there to populate memory in the background.
fn populated_or_not(options: &mut Map<String, Value>, path: &str, losses: &mut Vec<String>) {
    if options.get("prefault").is_some_and(|how| !how.is_boolean()) {
        losses.push(format!("{path}.prefault has no counterpart there"));
        options.insert("prefault".to_owned(), json!(false));
    }
}

/// With memory devices of ACPI `size` counts them too.
fn with_devices(memory: &mut Map<String, Value>, config: &VmConfig) {
    let bytes = config.memory.hotplugged_size.filter(|_| config.memory.has_memory_devices());
    if let Some(bytes) = bytes {
        memory.insert("size".to_owned(), json!(config.memory.size.saturating_add(bytes)));
    }
}

/// A size that is refused there even if it is zero: with memory devices of ACPI none is plugged in by its size, and a zone
/// has none; what is to be added has to be there for a part of it to be plugged in.
fn without_zeros(options: &mut Map<String, Value>, has_devices: bool) {
    let is_zone = options.contains_key("id");
    let is_zero = |value: Option<&Value>| value.is_some_and(|value| *value == json!(0));
    if has_devices {
        options.remove("hotplugged_size");
    }
    if is_zone && has_devices && is_zero(options.get("hotplug_size")) {
        options.remove("hotplug_size");
    }
    if !options.contains_key("hotplug_size") && is_zero(options.get("hotplugged_size")) {
        options.remove("hotplugged_size");
    }
}
