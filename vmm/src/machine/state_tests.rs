// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Versions of the machine's state: recorded ones are read, unknown parts and later versions are refused by
//! name, and what is written for an older program is what such a program reads.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::path::Path;

use serde_json::{Value, json};

use super::*;

/// Without PCI hotplug, and with it: both were written by programs of version 1.
const RECORDED: [&str; 2] = ["v1", "v1-generic"];

fn recorded(name: &str) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/snapshots");
    let text = std::fs::read(root.join(name).join("state.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn read(state: &Value) -> Result<MachineState, MachineStateError> {
    MachineState::from_json(state.to_string().as_bytes())
}

fn generation() -> Value {
    json!({"kind": "vmgenid", "version": 1, "data": {"gpa": 0xe_f000}})
}

/// The schema of version 1 as it was, frozen: whatever is written for a program of that version has to fit.
/// Such a program ignored what it did not know; this one does not, so that nothing is lost on the way.
mod frozen {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::Value;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "the form is what is tested")]
    pub struct Machine {
        pub version: u32,
        shown: Vec<Cpuid>,
        clock: Clock,
        pub vcpus: Vec<Vcpu>,
        irqchips: Irqchips,
        pub legacy: BTreeMap<String, Device>,
        pci_config_address: u32,
        #[serde(default)]
        pci_hotplug: Option<Device>,
        pci: BTreeMap<String, Function>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    struct Cpuid {
        function: u32,
        index: u32,
        flags: u32,
        answer: [u32; 4],
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    #[expect(clippy::struct_field_names, reason = "the names are those of the format")]
    struct Clock {
        clock_ns: u64,
        realtime_ns: Option<u64>,
        host_tsc: Option<u64>,
        host_tsc_khz: Option<u32>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    pub struct Vcpu {
        pub version: u32,
        cpuid: Vec<Cpuid>,
        mp_state: u32,
        regs: Vec<u8>,
        sregs: Vec<u8>,
        pdptrs: Option<[u64; 4]>,
        xsave: String,
        xcrs: Vec<u8>,
        debugregs: Vec<u8>,
        lapic: String,
        msrs: Vec<Msr>,
        events: Vec<u8>,
        tsc: Tsc,
        nested: Option<String>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    struct Msr {
        index: u32,
        value: u64,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    struct Tsc {
        khz: Option<u32>,
        value: u64,
        offset: Option<u64>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    struct Irqchips {
        version: u32,
        pic_master: String,
        pic_slave: String,
        ioapic: String,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    pub struct Device {
        kind: String,
        version: u32,
        data: Value,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "as above")]
    struct Function {
        bdf: String,
        state: Device,
    }

    /// A program of that version refused the state of a device that it does not have.
    pub const LEGACY: [&str; 7] =
        ["acpi-power", "cmos", "debug-console", "ged", "i8042", "pm-timer", "serial"];
}

#[test]
fn recorded_states_of_version_1_are_read() {
    for name in RECORDED {
        let state = read(&recorded(name)).unwrap();
        assert_eq!((state.version, state.vcpus.len()), (1, 2), "{name}");
        assert_eq!(state.pci_hotplug.is_some(), name == "v1-generic", "{name}");
        serde_json::from_value::<frozen::Machine>(recorded(name)).unwrap();
    }
}

#[test]
fn what_is_written_for_a_program_of_version_1_is_what_it_read() {
    for has_generation in [false, true] {
        let mut state = recorded("v1-generic");
        if has_generation {
            state["version"] = json!(2);
            state["legacy"][GENERATION_ID] = generation();
        }
        let here = read(&state).unwrap();
        assert_eq!(here.needed_version(), if has_generation { 2 } else { 1 });
        let written = serde_json::to_string(&here.for_reader(1).unwrap()).unwrap();
        let old: frozen::Machine = serde_json::from_str(&written).unwrap();
        assert_eq!(old.version, 1);
        assert!(old.vcpus.iter().all(|vcpu| vcpu.version == 1));
        assert!(old.legacy.keys().all(|name| frozen::LEGACY.contains(&name.as_str())));
        // And this program reads it again.
        read(&serde_json::from_str(&written).unwrap()).unwrap();
    }
}

#[test]
fn what_version_1_cannot_say_is_not_left_out_for_it() {
    let mut state = recorded("v1-generic");
    state["version"] = json!(2);
    state["vcpus"][1]["version"] = json!(2);
    state["vcpus"][1]["ssp"] = json!(0x7fff_1000);
    let here = read(&state).unwrap();
    let refused = here.for_reader(1).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the destination reads machine states up to version 1, and this one needs 2"
    );
    let newest = read(&state).unwrap().for_reader(MACHINE_STATE_VERSION).unwrap();
    assert_eq!((newest.version, newest.vcpus[1].ssp), (2, Some(0x7fff_1000)));
}

#[test]
fn what_came_with_version_2_is_refused_in_version_1() {
    let mut state = recorded("v1-generic");
    state["legacy"][GENERATION_ID] = generation();
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1") && refused.contains("generation ID"), "{refused}");
    let mut state = recorded("v1-generic");
    state["vcpus"][0]["version"] = json!(2);
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1") && refused.contains("vCPU of version 2"), "{refused}");
}

/// A 32-bit BAR, as a program that knows none would have to lay it out.
fn with_narrow_bar() -> Value {
    let mut state = recorded("v1-generic");
    state["version"] = json!(3);
    state["pci"]["_disk0"]["state"]["version"] = json!(2);
    state
}

#[test]
fn a_guest_with_32_bit_bars_goes_to_no_program_that_knows_none() {
    let state = with_narrow_bar();
    for newest in [1, 2] {
        let here = read(&state).unwrap();
        assert_eq!(here.needed_version(), 3);
        let refused = here.for_reader(newest).unwrap_err().to_string();
        let expected = format!("up to version {newest}, and this one needs 3");
        assert!(refused.ends_with(&expected), "{refused}");
    }
    assert_eq!(read(&state).unwrap().for_reader(3).unwrap().version, 3);
}

#[test]
fn vcpus_that_come_or_go_are_left_out_for_a_program_that_knows_none() {
    let mut state = recorded("v1-generic");
    let registers = json!({"present": [0, 1], "coming": [1], "going": [], "leaving": []});
    state["cpu_hotplug"] = json!({"kind": "cpu-hotplug", "version": 1, "data": registers});
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1 and vCPUs that come or go"), "{refused}");
    state["version"] = json!(5);
    let here = read(&state).unwrap();
    assert_eq!(here.needed_version(), 5);
    let newest = here.for_reader(5).unwrap();
    assert!((newest.version, newest.cpu_hotplug.is_some()) == (5, true));
    for older in [1, 4] {
        let left = read(&state).unwrap().for_reader(older).unwrap();
        assert_eq!((left.version, left.cpu_hotplug.is_some()), (1, false));
        let written = serde_json::to_value(&left).unwrap();
        assert_eq!(written.get("cpu_hotplug"), None, "an older program refuses a field");
    }
}

#[test]
fn a_guest_with_several_segments_goes_to_no_program_that_knows_one() {
    let mut state = recorded("v1-generic");
    state["pci_hotplug"]["version"] = json!(2);
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1 and several PCI segments"), "{refused}");
    state["version"] = json!(6);
    assert!(read(&state).unwrap().for_reader(5).is_err());
    assert_eq!(read(&state).unwrap().for_reader(6).unwrap().version, 6);
}

#[test]
fn a_guest_with_memory_devices_goes_to_no_program_that_knows_none() {
    let mut state = recorded("v1-generic");
    let registers = json!({"devices": [{"gpa": 4_u64 << 30, "len_bytes": 1 << 27}], "coming": [0]});
    state["memory_hotplug"] = json!({"kind": "memory-hotplug", "version": 1, "data": registers});
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1 and memory devices of ACPI"), "{refused}");
    state["version"] = json!(7);
    assert!(read(&state).unwrap().for_reader(6).is_err());
    assert_eq!(read(&state).unwrap().for_reader(7).unwrap().version, 7);
}

#[test]
fn a_guest_with_integrated_endpoints_goes_to_no_program_that_knows_none() {
    let mut state = recorded("v1-generic");
    let function = &mut state["pci"]["_disk0"]["state"];
    function["kind"] = json!("vfio-pci");
    function["version"] = json!(2);
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1 and a passed-through device"), "{refused}");
    state["version"] = json!(4);
    assert!(read(&state).unwrap().for_reader(3).is_err());
    assert_eq!(read(&state).unwrap().for_reader(4).unwrap().version, 4);
}

#[test]
fn a_guest_with_an_expansion_rom_goes_to_no_program_that_knows_none() {
    let mut state = recorded("v1-generic");
    let function = &mut state["pci"]["_disk0"]["state"];
    function["kind"] = json!("vfio-pci");
    function["version"] = json!(3);
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("with an expansion ROM"), "{refused}");
    state["version"] = json!(8);
    assert!(read(&state).unwrap().for_reader(7).is_err());
    assert_eq!(read(&state).unwrap().for_reader(8).unwrap().version, 8);
}

#[test]
fn a_cmos_clock_that_the_guest_has_set_is_left_out_for_a_program_that_knows_none() {
    let mut state = recorded("v1-generic");
    let untouched = state["legacy"]["cmos"].clone();
    state["legacy"]["cmos"]["version"] = json!(2);
    state["legacy"]["cmos"]["data"]["clock"] = json!({"ahead_s": -3600});
    let refused = read(&state).unwrap_err().to_string();
    assert!(refused.contains("version 1 and a CMOS clock"), "{refused}");
    state["version"] = json!(4);
    assert_eq!(read(&state).unwrap().for_reader(4).unwrap().version, 4);
    let older = read(&state).unwrap().for_reader(1).unwrap();
    let cmos = serde_json::to_value(&older.legacy["cmos"]).unwrap();
    assert_eq!((older.version, cmos), (1, untouched));
}

#[test]
fn a_32_bit_bar_is_refused_in_versions_before_it() {
    for version in [1, 2] {
        let mut state = with_narrow_bar();
        state["version"] = json!(version);
        let refused = read(&state).unwrap_err().to_string();
        let expected = format!("version {version} and a virtio device with a 32-bit BAR");
        assert!(refused.contains(&expected), "{refused}");
    }
}

#[test]
fn an_unknown_field_is_refused_by_name_wherever_it_is() {
    let places = [
        "",
        "/shown/0",
        "/clock",
        "/vcpus/1",
        "/vcpus/1/cpuid/0",
        "/vcpus/1/msrs/0",
        "/vcpus/1/tsc",
        "/irqchips",
        "/legacy/ged",
        "/pci_hotplug",
        "/pci/_disk0",
        "/pci/_disk0/state",
    ];
    for place in places {
        let mut state = recorded("v1-generic");
        let object = state.pointer_mut(place).and_then(Value::as_object_mut);
        object.unwrap_or_else(|| panic!("{place}")).insert("from_later".to_owned(), json!(1));
        let error = read(&state).unwrap_err();
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(source.contains("`from_later`"), "{place}: {error:?}");
    }
}

#[test]
fn a_later_version_is_named_whatever_else_is_in_it() {
    let mut state = recorded("v1-generic");
    state["version"] = json!(MACHINE_STATE_VERSION + 1);
    state["from_later"] = json!({});
    state["clock"] = json!("of another kind");
    let expected = format!(
        "the machine state has version {}, and the newest known here is {MACHINE_STATE_VERSION}",
        MACHINE_STATE_VERSION + 1
    );
    assert_eq!(read(&state).unwrap_err().to_string(), expected);
}

#[test]
fn hardware_at_its_limit_leaves_room_for_all_else() {
    for vcpus in [1, 160, 254] {
        let hardware_bytes = hardware_state_len_bytes_max(vcpus);
        let left_bytes = STATE_BYTES_MAX - hardware_bytes.div_ceil(3) * 4;
        assert!(left_bytes >= (16 << 20) + u64::from(vcpus) * (128 << 10) - 4, "{vcpus}");
        assert!(hardware_bytes > vfio::migration::STATE_LEN_BYTES_MAX, "one at its limit");
    }
    assert_eq!(hardware_state_len_bytes_max(u32::MAX), 0);
}

#[test]
fn lists_without_an_end_are_refused_before_they_are_made() {
    let zeros = vec!["0"; STATE_VALUES_MAX].join(",");
    let json = format!(r#"{{"version":2,"legacy":{{"x":{{"data":[{zeros}]}}}}}}"#);
    let error = MachineState::from_json(json.as_bytes()).unwrap_err();
    assert!(matches!(error, MachineStateError::TooLarge(_)), "{error}");
}

#[test]
fn another_platform_needs_its_version_and_no_earlier_reader_gets_it() {
    let mut state = recorded("v1");
    assert_eq!(read(&state).unwrap().platform, PlatformName::Godwit);
    state["platform"] = json!("cloud-hypervisor-53");
    let error = read(&state).unwrap_err().to_string();
    assert!(error.contains("version 1") && error.contains("a platform"), "{error}");
    state["version"] = json!(9);
    let read_back = read(&state).unwrap();
    assert_eq!(read_back.platform, PlatformName::CloudHypervisor53);
    assert_eq!(read_back.needed_version(), 9);
    let written: Value = serde_json::from_slice(&read_back.to_json().unwrap()).unwrap();
    assert_eq!(written["platform"], "cloud-hypervisor-53");
    let error = read_back.for_reader(8).unwrap_err().to_string();
    assert!(error.contains("up to version 8") && error.contains('9'), "{error}");
    state["platform"] = json!("cloud-hypervisor-99");
    let error = error_text::chain(&read(&state).unwrap_err());
    assert!(error.contains("cloud-hypervisor-99"), "{error}");
}
