// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests on documents that cloud-hypervisor v53 has written, and on those with one thing changed.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{ConfigMessage, Document, Vcpu, Virtio, fuzz_document};

macro_rules! recorded {
    ($name:literal) => {
        include_bytes!(concat!(
            "../../tests/data/cloud-hypervisor-53/snapshots/",
            $name,
            "/state.json"
        ))
    };
}

const ONE_VCPU: &[u8] = recorded!("plain-1");
const TWO_VCPUS: &[u8] = recorded!("all-2");
const TWO_VCPUS_CONFIG: &[u8] =
    include_bytes!("../../tests/data/cloud-hypervisor-53/snapshots/all-2/config.json");
const BEHIND_IOMMU: &[u8] = recorded!("iommu");
const ALL: [(&str, &[u8]); 10] = [
    ("plain-1", ONE_VCPU),
    ("plain-2", recorded!("plain-2")),
    ("all-2", TWO_VCPUS),
    ("added", recorded!("added")),
    ("acpi-hotplug", recorded!("acpi-hotplug")),
    ("virtio-mem", recorded!("virtio-mem")),
    ("zones", recorded!("zones")),
    ("segments", recorded!("segments")),
    ("topology", recorded!("topology")),
    ("large", recorded!("large")),
];

/// Visits each node with its path.
fn visit(node: &Value, path: &str, see: &mut dyn FnMut(&str, &Value)) {
    see(path, node);
    for (id, child) in node["snapshots"].as_object().unwrap() {
        let child_path = if path.is_empty() { id.clone() } else { format!("{path}/{id}") };
        visit(child, &child_path, see);
    }
}

fn node_at<'a>(root: &'a mut Value, path: &str) -> &'a mut Value {
    let ids = path.split('/').filter(|id| !id.is_empty());
    ids.fold(root, |node, id| &mut node["snapshots"][id])
}

/// The document with the state of a node changed.
fn with_state(document: &[u8], path: &str, change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut root: Value = serde_json::from_slice(document).unwrap();
    let text = &mut node_at(&mut root, path)["snapshot_data"]["state"];
    let mut state: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    change(&mut state);
    *text = Value::String(state.to_string());
    serde_json::to_vec(&root).unwrap()
}

fn refusal(document: &[u8]) -> String {
    Document::read(document).expect_err("it is read").to_string()
}

/// Pointers to all values of a state; of long lists the first and the last element.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    if !at.is_empty() {
        found.push(at.to_owned());
    }
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| pointers(value, &format!("{at}/{key}"), found));
        }
        Value::Array(items) => {
            let last = items.len().saturating_sub(1);
            let ends = items.iter().enumerate().filter(|(index, _)| [0, last].contains(index));
            ends.for_each(|(index, value)| pointers(value, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

/// Path of a node and pointer into its state, of all values of the document.
fn values(document: &[u8]) -> Vec<(String, String)> {
    let root: Value = serde_json::from_slice(document).unwrap();
    let mut all = Vec::new();
    visit(&root, "", &mut |path, node| {
        if let Some(text) = node["snapshot_data"]["state"].as_str() {
            let mut found = Vec::new();
            pointers(&serde_json::from_str(text).unwrap(), "", &mut found);
            all.extend(found.into_iter().map(|pointer| (path.to_owned(), pointer)));
        }
    });
    all
}

fn remove(state: &mut Value, pointer: &str) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match state.pointer_mut(parent).unwrap() {
        Value::Object(fields) => drop(fields.remove(key)),
        Value::Array(items) => drop(items.remove(key.parse().unwrap())),
        _ => unreachable!("it has children"),
    }
}

fn alter(value: &mut Value) {
    *value = match &*value {
        Value::Null => json!(1),
        Value::Bool(is) => json!(!is),
        Value::Number(number) => match number.as_u64() {
            Some(number) => json!(number ^ 1),
            None => json!(0),
        },
        Value::String(text) => json!(format!("{text}x")),
        Value::Array(items) => {
            let more = items.first().cloned().unwrap_or(json!(0));
            json!(items.iter().cloned().chain([more]).collect::<Vec<_>>())
        }
        Value::Object(fields) => {
            let mut fields = fields.clone();
            fields.insert("unheard_of".to_owned(), json!(0));
            Value::Object(fields)
        }
    };
}

/// Checks that nothing is dropped: refused by the name of the node, or read and written again.
fn is_named_or_kept(changed: &[u8], path: &str, original: &Document, what: &str) {
    match Document::read(changed) {
        Err(error) => {
            let error = error.to_string();
            // The state of a device is read by what its transport says.
            let transport = path.replace("device-manager/", "device-manager/_virtio-pci-");
            let is_named = [path, transport.as_str()].iter().any(|name| error.contains(name));
            assert!(path.is_empty() || is_named, "{what}: {error}");
        }
        Ok(read) => {
            assert!(read != *original, "{what}: dropped");
            let again = Document::read(&read.write().unwrap()).unwrap();
            assert!(again == read, "{what}: read otherwise");
        }
    }
}

#[test]
fn recorded_documents_are_read_and_written_as_they_were() {
    for (name, document) in ALL {
        let read = Document::read(document).unwrap_or_else(|error| panic!("{name}: {error}"));
        let written = read.write().unwrap();
        assert_eq!(Document::read(&written).unwrap(), read);
        // As JSON too: nothing that was there is missing, and nothing was added.
        let (mut ours, mut theirs): (Value, Value) =
            (serde_json::from_slice(&written).unwrap(), serde_json::from_slice(document).unwrap());
        let states = |root: &mut Value| {
            let mut all = Vec::new();
            visit(root, "", &mut |path, node| {
                let state = node["snapshot_data"]["state"].as_str();
                let state: Option<Value> = state.map(|text| serde_json::from_str(text).unwrap());
                all.push((path.to_owned(), state));
            });
            all
        };
        assert_eq!(states(&mut ours), states(&mut theirs), "{name}");
    }
}

#[test]
fn a_recorded_document_has_what_the_machine_had() {
    let read = Document::read(TWO_VCPUS).unwrap();
    assert_eq!(read.vcpus.len(), 2);
    let Vcpu::Kvm(vcpu) = &read.vcpus[&1];
    assert_eq!(vcpu.tsc_khz, Some(2_600_000));
    assert!(vcpu.msrs.iter().any(|msr| msr.index == 0x10));
    let ids: Vec<&str> = read.devices.virtio.keys().map(String::as_str).collect();
    assert_eq!(
        ids,
        [
            "__balloon",
            "__console",
            "__rng",
            "__rtc",
            "__watchdog",
            "_disk0",
            "_disk1",
            "_net2",
            "_pmem3",
            "_vsock4"
        ]
    );
    let (transport, device) = &read.devices.virtio["_disk1"];
    assert_eq!((transport.device_type(), transport.data.queues.len()), (2, 2));
    let Virtio::Block(block) = device else { panic!("a disk") };
    assert_eq!(block.config.capacity, 2048);
    assert_eq!(device.features().0, block.avail_features);
    assert_eq!(read.memory.guest_ram_mappings[0].zone_id, "mem0");
    assert_eq!(read.devices.pvpanic.unwrap().data.events, 3);
    assert_eq!(read.devices.data.device_id_cnt, 5);
}

#[test]
fn each_value_that_is_removed_is_named_or_has_a_meaning() {
    let original = Document::read(ONE_VCPU).unwrap();
    for (path, pointer) in values(ONE_VCPU) {
        let changed = with_state(ONE_VCPU, &path, |state| remove(state, &pointer));
        // The rest of a structure of the kernel is zero, so that a zero at its end can be left out; and so can the one flag
        // that is off by default.
        if Document::read(&changed).ok().as_ref() != Some(&original) {
            is_named_or_kept(&changed, &path, &original, &format!("{path} without {pointer}"));
            continue;
        }
        let root: Value = serde_json::from_slice(ONE_VCPU).unwrap();
        let mut root = root;
        let text = node_at(&mut root, &path)["snapshot_data"]["state"].as_str().unwrap();
        let state: Value = serde_json::from_str(text).unwrap();
        let default = if pointer == "/Kvm/hyperv_synic" { json!(false) } else { json!(0) };
        assert_eq!(state.pointer(&pointer), Some(&default), "{path} without {pointer}: dropped");
    }
}

#[test]
fn each_value_that_is_altered_is_named_or_kept() {
    let original = Document::read(ONE_VCPU).unwrap();
    for (path, pointer) in values(ONE_VCPU) {
        let change = |state: &mut Value| alter(state.pointer_mut(&pointer).unwrap());
        let changed = with_state(ONE_VCPU, &path, change);
        is_named_or_kept(&changed, &path, &original, &format!("{path} with another {pointer}"));
    }
}

#[test]
fn each_node_that_is_removed_renamed_or_added_is_named() {
    let root: Value = serde_json::from_slice(TWO_VCPUS).unwrap();
    let mut paths = Vec::new();
    visit(&root, "", &mut |path, _| paths.push(path.to_owned()));
    let original = Document::read(TWO_VCPUS).unwrap();
    for path in paths.iter().filter(|path| !path.is_empty()) {
        let (parent, id) = path.rsplit_once('/').unwrap_or(("", path));
        let mut without = root.clone();
        let siblings = node_at(&mut without, parent)["snapshots"].as_object_mut().unwrap();
        let node = siblings.remove(id).unwrap();
        siblings.insert("unheard-of".to_owned(), node);
        let error = refusal(&serde_json::to_vec(&without).unwrap());
        // A device without its transport is unknown itself.
        let named = id.strip_prefix("_virtio-pci-").unwrap_or(id);
        assert!(error.contains("unheard-of") || error.contains(named), "{path}: {error}");
        let mut with = root.clone();
        let children = node_at(&mut with, path)["snapshots"].as_object_mut().unwrap();
        children.insert("unheard-of".to_owned(), json!({"snapshots": {}}));
        let error = refusal(&serde_json::to_vec(&with).unwrap());
        assert!(error.contains("unheard-of"), "{path}: {error}");
        let mut empty = root.clone();
        let data = &mut node_at(&mut empty, path)["snapshot_data"];
        let had_state = !data.is_null();
        *data = Value::Null;
        match Document::read(&serde_json::to_vec(&empty).unwrap()) {
            Ok(read) => assert!(!had_state && read == original, "{path}"),
            Err(error) => assert!(had_state && error.to_string().contains(path), "{path}: {error}"),
        }
    }
}

#[test]
fn refusals_name_the_place() {
    let change = |path: &str, pointer: &str, value: Value| {
        let set = |state: &mut Value| *state.pointer_mut(pointer).unwrap() = value;
        refusal(&with_state(TWO_VCPUS, path, set))
    };
    let disk = "device-manager/_virtio-pci-_disk0";
    for (path, pointer, value, expected) in [
        (disk, "/queues/0", json!({"x": 1}), "_disk0: queues[0]: unknown field `x`"),
        (disk, "/cap_pci_cfg", json!(vec![0; 19]), "cap_pci_cfg: invalid length 19"),
        (disk, "/interrupt_status", json!(256), "interrupt_status: 0x100"),
        (&format!("{disk}/virtio_pci_common_config"), "/msix_queues", json!([1, 2]), "msix_queues"),
        (&format!("{disk}/pci_configuration"), "/registers/0", json!(7), "not a virtio device"),
        (&format!("{disk}/msix_config"), "/pba_entries", json!([0, 0]), "pba_entries: 2 words"),
        ("cpu-manager/1", "", json!({"Mshv": {}}), "cpu-manager/1: unknown variant `Mshv`"),
        ("cpu-manager/0", "/Kvm/regs", json!(vec![0; 145]), "Kvm.regs: invalid length 145"),
        ("memory-manager", "/guest_ram_mappings/0/size", json!(1), "guest_ram_mappings[0]"),
        ("memory-manager", "/hotplug_slots", json!([]), "hotplug_slots: invalid length 0"),
        ("memory-manager", "/selected_slot", json!(256), "selected_slot: 256 is above 255"),
        ("device-manager", "/device_tree/_disk0/id", json!("x"), "device_tree._disk0.id"),
        ("device-manager", "/device_tree/_disk0/resources", json!([{"LegacyIrq": 3}]), "LegacyIrq"),
        ("", "/clock", json!({"Mshv": {}}), "(root): clock: unknown variant `Mshv`"),
    ] {
        let error = change(path, pointer, value);
        assert!(error.contains(expected), "{path} {pointer}: {error}");
    }
}

#[test]
fn parts_that_are_known_and_not_taken_are_named() {
    let mut root: Value = serde_json::from_slice(TWO_VCPUS).unwrap();
    let vfio = json!({"snapshots": {"vfio_common": {"snapshots": {}}}});
    node_at(&mut root, "device-manager")["snapshots"]["_vfio5"] = vfio;
    let error = refusal(&serde_json::to_vec(&root).unwrap());
    assert_eq!(error, "device-manager/_vfio5: a passed-through device cannot be taken over");

    for (device, fields, what) in [
        ("_disk0", json!({"vu_num_queues": 1, "config": {}}), "a vhost-user disk"),
        ("_disk0", json!({"vu_num_queues": 1, "config": null}), "a generic vhost-user device"),
        ("_net2", json!({"iova_range_first": 1}), "a vDPA device"),
    ] {
        let path = format!("device-manager/{device}");
        let error = refusal(&with_state(TWO_VCPUS, &path, |state| *state = fields));
        assert_eq!(error, format!("{path}: {what} cannot be taken over"));
    }
    let transport = "device-manager/_virtio-pci-__rng/pci_configuration";
    for (device_type, what) in [(23, "a virtual IOMMU"), (99, "a virtio device of this type")] {
        let identification = (0x1040 + device_type) << 16 | 0x1af4;
        let set = |state: &mut Value| state["registers"][0] = json!(identification);
        let error = refusal(&with_state(TWO_VCPUS, transport, set));
        assert_eq!(error, format!("device-manager/__rng: {what} cannot be taken over"));
    }
}

#[test]
fn a_recorded_machine_with_an_iommu_is_refused_by_its_name() {
    let error = refusal(BEHIND_IOMMU);
    assert_eq!(error, "device-manager/__iommu: a virtual IOMMU cannot be taken over");
}

#[test]
fn inner_documents_are_counted_and_outer_ones_too() {
    let many = format!("[{}]", vec!["0"; 8 << 20].join(","));
    let document = json!({"snapshots": {}, "snapshot_data": {"state": many}});
    let error = refusal(&serde_json::to_vec(&document).unwrap());
    assert_eq!(error, "the document cannot be taken");
    let deep = format!("{}1{}", "[".repeat(4096), "]".repeat(4096));
    let document = json!({"snapshots": {}, "snapshot_data": {"state": deep}});
    assert!(refusal(&serde_json::to_vec(&document).unwrap()).contains("(root)"));
    let node = |inner: String| format!(r#"{{"snapshots":{{"a":{inner}}},"snapshot_data":null}}"#);
    let deep = (0..300).fold(r#"{"snapshots":{}}"#.to_owned(), |inner, _| node(inner));
    assert!(refusal(deep.as_bytes()).contains("recursion limit"));
    assert!(refusal(&[0xff]).contains("(root): no text after 0 bytes"));
    assert!(refusal(b"{}").contains("missing field `snapshots`"));
}

fn message() -> ConfigMessage {
    let document = Document::read(TWO_VCPUS).unwrap();
    ConfigMessage {
        vm_config: ConfigMessage::read_vm_config(TWO_VCPUS_CONFIG).unwrap(),
        common_cpuid: document.vm.common_cpuid,
        memory_manager_data: document.memory,
    }
}

#[test]
fn the_configuration_is_read_and_written() {
    let message = message();
    let written = message.write().unwrap();
    assert_eq!(ConfigMessage::read(&written).unwrap(), message);
    for (pointer, expected) in [
        ("/memory_manager_data/guest_ram_mappings/0/gpa", "config/memory_manager_data: guest_ram"),
        ("/common_cpuid/0/eax", "config: common_cpuid[0].eax: invalid type"),
    ] {
        let mut changed: Value = serde_json::from_slice(&written).unwrap();
        let value = changed.pointer_mut(pointer).unwrap();
        *value = if pointer.contains("gpa") { json!(1) } else { json!("x") };
        let error = ConfigMessage::read(&serde_json::to_vec(&changed).unwrap()).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
    }
    for key in ["vm_config", "common_cpuid", "memory_manager_data"] {
        let mut changed: Value = serde_json::from_slice(&written).unwrap();
        changed.as_object_mut().unwrap().remove(key);
        let error = ConfigMessage::read(&serde_json::to_vec(&changed).unwrap()).unwrap_err();
        assert_eq!(error.to_string(), format!("config: missing field `{key}`"));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_no_document(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for kind in [&b""[..], b"c", b"d"] {
            prop_assert!(!fuzz_document(&[kind, &bytes].concat()));
        }
    }

    #[test]
    fn a_document_with_bytes_changed_is_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = [b"d", ONE_VCPU].concat();
        for (index, byte) in changes {
            *index.get_mut(&mut bytes[1..]) = byte;
        }
        let is_read = Document::read(&bytes[1..]).is_ok();
        // What is read is the same again when it is written, which the entry asserts.
        prop_assert_eq!(fuzz_document(&bytes), is_read);
    }
}

#[test]
fn what_was_recorded_gets_through_the_entry_of_the_fuzz_target() {
    assert!(fuzz_document(&[b"d", ONE_VCPU].concat()));
    assert!(fuzz_document(&[&b"c"[..], &message().write().unwrap()].concat()));
}

#[test]
fn documents_that_are_too_long_are_not_looked_at() {
    let too_long = |error: crate::DocumentError, most: usize| match error {
        crate::DocumentError::TooLong { max_bytes, .. } => assert_eq!(max_bytes, most),
        other => panic!("{other}"),
    };
    // Pages that nothing has touched.
    let bytes = vec![0; (256 << 20) + 1];
    too_long(Document::read(&bytes).unwrap_err(), 256 << 20);
    let bytes = &bytes[..=16 << 20];
    too_long(ConfigMessage::read(bytes).unwrap_err(), 16 << 20);
    too_long(ConfigMessage::read_vm_config(bytes).unwrap_err(), 16 << 20);
    let many = format!("[{}0]", "0,".repeat(512 << 10));
    let error = ConfigMessage::read(many.as_bytes()).unwrap_err();
    assert!(matches!(error, crate::DocumentError::TooManyValues(_)), "{error}");
}

#[test]
fn a_vcpu_has_a_number_that_a_machine_can_have() {
    let root: Value = serde_json::from_slice(ONE_VCPU).unwrap();
    let mut paths = Vec::new();
    visit(&root, "", &mut |path, _| paths.push(path.to_owned()));
    let path = paths.iter().find(|path| path.ends_with("/0")).unwrap();
    let (parent, _) = path.rsplit_once('/').unwrap();
    let renumbered = |number: &str| {
        let mut changed = root.clone();
        let vcpus = node_at(&mut changed, parent)["snapshots"].as_object_mut().unwrap();
        let vcpu = vcpus.remove("0").unwrap();
        vcpus.insert(number.to_owned(), vcpu);
        Document::read(&serde_json::to_vec(&changed).unwrap())
    };
    assert!(renumbered("1023").unwrap().vcpus.contains_key(&1023));
    for number in ["1024", "4294967296", "-1", "01"] {
        let error = renumbered(number).unwrap_err().to_string();
        assert!(error.contains(number), "{error}");
    }
}

#[test]
fn a_tree_cannot_have_as_many_values_as_the_texts_in_it() {
    let many = format!("[{}0]", "0,".repeat(256 << 10));
    let error = Document::read(many.as_bytes()).unwrap_err();
    assert!(matches!(error, crate::DocumentError::TooManyValues(_)), "{error}");
    // As many in the text of a node are possible.
    let few = format!("[{}0]", "0,".repeat(1 << 10));
    let error = Document::read(few.as_bytes()).unwrap_err();
    assert!(matches!(error, crate::DocumentError::Malformed { .. }), "{error}");
}
