// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are documents of cloud-hypervisor: small ones, and one that it has written. The first letter says which of the
//! two kinds it is.

use super::Seed;

const RECORDED_CONFIG: &[u8] =
    include_bytes!("../../tests/data/cloud-hypervisor-53/snapshots/plain-1/config.json");
const RECORDED: &[u8] =
    include_bytes!("../../tests/data/cloud-hypervisor-53/snapshots/plain-1/state.json");

const MEMORY: &str = r#"{"memory_ranges":{"data":[{"gpa":0,"length":4096}]},"guest_ram_mappings":[{"slot":0,"gpa":0,"size":4096,"zone_id":"mem0","virtio_mem":false,"file_offset":0}],"start_of_device_area":4294967296,"boot_ram":4096,"current_ram":4096,"arch_mem_regions":[{"base":0,"size":3221225472,"r_type":"Ram"}],"hotplug_slots":[S,S,S,S,S,S,S,S],"next_memory_slot":1,"selected_slot":0,"next_hotplug_slot":0}"#;
const SLOT: &str = r#"{"base":0,"length":0,"active":false,"inserting":false,"removing":false}"#;
const VM: &str = r#"{"clock":{"Kvm":[1,2,3]},"common_cpuid":[{"function":7,"index":0,"flags":1,"eax":0,"ebx":1,"ecx":0,"edx":0}]}"#;
const DEVICES: &str = r#"{"device_tree":{"__rng":{"id":"__rng","resources":[],"parent":"_virtio-pci-__rng","children":[]},"_virtio-pci-__rng":{"id":"_virtio-pci-__rng","resources":[{"PciBar":{"index":0,"base":549730648064,"size":524288,"type_":"Mmio64","prefetchable":false}},{"MmioAddressRange":{"base":4096,"size":4096}}],"children":["__rng"],"pci_bdf":"0000:00:05.0"}},"device_id_cnt":5}"#;
const SERIAL: &str = r#"{"interrupt_enable":0,"interrupt_identification":1,"line_control":3,"line_status":96,"modem_control":8,"modem_status":176,"scratch":0,"baud_divisor":12,"in_buffer":[65]}"#;
const TRANSPORT: &str = r#"{"device_activated":true,"queues":[{"max_size":256,"size":32,"ready":true,"desc_table":4096,"avail_ring":8192,"used_ring":12288}],"interrupt_status":0,"cap_pci_cfg_offset":118,"cap_pci_cfg":[20,5,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}"#;
const COMMON: &str = r#"{"driver_status":15,"config_generation":0,"device_feature_select":1,"driver_feature_select":1,"queue_select":0,"msix_config":0,"msix_queues":[1]}"#;
const MSIX: &str = r#"{"table_entries":[{"msg_addr_lo":4276092928,"msg_addr_hi":0,"msg_data":76,"vector_ctl":0}],"pba_entries":[0],"masked":false,"enabled":true}"#;
const FEATURES: &str = r#"{"avail_features":4294967296,"acked_features":4294967296}"#;
const BAR: &str = r#"{"addr":4269801476,"size":4294443008,"used":true,"type":"Memory64BitRegion"}"#;
const NO_BAR: &str = r#"{"addr":0,"size":0,"used":false,"type":null}"#;

fn memory() -> String {
    MEMORY.replace('S', SLOT)
}

/// Configuration space of an entropy device.
fn configuration() -> String {
    let registers = |first: &str| format!("[{first}{}]", ",0".repeat(1023));
    let bars = [BAR, NO_BAR, NO_BAR, NO_BAR, NO_BAR, NO_BAR].join(",");
    format!(
        r#"{{"registers":{},"writable_bits":{},"bars":[{bars}],"rom_bar_addr":0,"rom_bar_size":0,"rom_bar_used":false,"last_capability":[136,10],"msix_cap_reg_idx":34,"pending_bar_reprogram":[{{"old_base":0,"new_base":4096,"len":16,"region_type":"IoRegion"}}]}}"#,
        registers("272898804"),
        registers("0"),
    )
}

/// An I/O APIC with all pins masked.
fn ioapic() -> String {
    let list = |value: &str| vec![value; 24].join(",");
    format!(
        r#"{{"id_reg":0,"reg_sel":0,"reg_entries":[{}],"used_entries":[{}],"apic_address":4276092928}}"#,
        list("65536"),
        list("false"),
    )
}

/// A node with children.
fn node(state: Option<&str>, children: &[(&str, String)]) -> String {
    let children: Vec<String> =
        children.iter().map(|(id, child)| format!(r#""{id}":{child}"#)).collect();
    let state = state.map_or("null".to_owned(), |state| {
        format!(r#"{{"state":"{}"}}"#, state.replace('\\', "\\\\").replace('"', "\\\""))
    });
    format!(r#"{{"snapshots":{{{}}},"snapshot_data":{state}}}"#, children.join(","))
}

fn document(devices: &[(&str, String)]) -> String {
    node(
        Some(VM),
        &[
            ("cpu-manager", node(None, &[])),
            ("memory-manager", node(Some(&memory()), &[])),
            ("device-manager", node(Some(DEVICES), devices)),
        ],
    )
}

pub fn seeds() -> Vec<Seed> {
    let seed = |name: &str, kind: &str, text: &[u8]| {
        Seed::new("cloud_hypervisor_document", name, [kind.as_bytes(), text].concat())
    };
    let of = |state: &str| node(Some(state), &[]);
    let transport = node(
        Some(TRANSPORT),
        &[
            ("pci_configuration", of(&configuration())),
            ("virtio_pci_common_config", of(COMMON)),
            ("msix_config", of(MSIX)),
        ],
    );
    let panics = node(Some(r#"{"events":3}"#), &[("pci_configuration", of(&configuration()))]);
    let few = document(&[("__ioapic", of(&ioapic())), ("__serial", of(SERIAL))]);
    let more = document(&[
        ("__ioapic", of(&ioapic())),
        ("__debug_console", of("null")),
        ("__pvpanic", panics),
        ("__rng", of(FEATURES)),
        ("_virtio-pci-__rng", transport),
    ]);
    let config = format!(
        r#"{{"vm_config":{{"cpus":{{"boot_vcpus":1,"max_vcpus":1}}}},"common_cpuid":[],"memory_manager_data":{}}}"#,
        memory(),
    );
    let whole = [RECORDED_CONFIG, b"\n", RECORDED].concat();
    vec![
        Seed::new("cloud_hypervisor_adopt", "recorded", whole),
        seed("few-devices", "d", few.as_bytes()),
        seed("more-devices", "d", more.as_bytes()),
        seed("recorded", "d", RECORDED),
        seed("configuration", "c", config.as_bytes()),
    ]
}
