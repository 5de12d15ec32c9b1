// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Each value of a document changed in turn: it is refused, or changes what is made of it, or is one of those that have
//! no meaning here.

use super::*;

/// Values without a meaning for a machine of this program, and why.
const WITHOUT_MEANING: [&str; 21] = [
    // A second copy of what is in the XSAVE area.
    "/Kvm/fpu/",
    // An interrupt that is being delivered, also in the events.
    "/Kvm/sregs/311",
    // A VM's property, also in its configuration.
    "/Kvm/hyperv_synic",
    // What the VMM works with: slots, its files, sums, constants.
    "/memory_ranges",
    "/file_offset",
    "/slot",
    "/current_ram",
    "/arch_mem_regions",
    "/next_memory_slot",
    "/next_hotplug_slot",
    // Of a memory device that is not there, and a register that the guest writes before it reads.
    "/hotplug_slots/",
    "/selected_slot",
    // Whether a pin has a route, which each has here.
    "/used_entries/",
    // Sizes and masks of BARs that are not in use, or follow from the kind of device.
    "/bars/",
    "/rom_bar_",
    "/last_capability",
    "/writable_bits",
    // The host's TSC, if its flag says that it is valid; padding.
    "/clock/Kvm/",
    // Limits that follow from the kind of device and its options, and are checked when it is restored.
    "/max_size",
    "/config/",
    "/disk_path",
];

/// All that is made of a VM.
fn picture(adopted: &Adopted) -> String {
    let state = String::from_utf8(adopted.state.to_json().unwrap()).unwrap();
    let config = serde_json::to_string(&adopted.config).unwrap();
    format!("{state}{config}{:?}{:?}{:?}", adopted.platform, adopted.memory, adopted.losses)
}

fn alter(value: &mut Value) {
    *value = match &*value {
        Value::Null => json!(1),
        Value::Bool(is) => json!(!is),
        Value::Number(number) => json!(number.as_u64().map_or(0, |number| number ^ 1)),
        Value::String(text) => json!(format!("{text}x")),
        other => other.clone(),
    };
}

fn leaves(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| leaves(value, &format!("{at}/{key}"), found));
        }
        Value::Array(items) => {
            let last = items.len().saturating_sub(1);
            let ends = items.iter().enumerate().filter(|(index, _)| [0, last].contains(index));
            ends.for_each(|(index, value)| leaves(value, &format!("{at}/{index}"), found));
        }
        _ => found.push(at.to_owned()),
    }
}

/// Visits the state of each node with its path.
fn visit(node: &Value, path: &str, see: &mut dyn FnMut(&str, &Value)) {
    if let Some(text) = node["snapshot_data"]["state"].as_str() {
        see(path, &serde_json::from_str(text).unwrap());
    }
    for (id, child) in node["snapshots"].as_object().unwrap() {
        visit(child, &format!("{path}/{id}"), see);
    }
}

#[test]
fn no_value_of_a_document_is_dropped_in_silence() {
    let recorded = all_devices();
    let before = picture(&recorded.adopted());
    let root: Value = serde_json::from_slice(&recorded.document.write().unwrap()).unwrap();
    let mut all = Vec::new();
    visit(&root, "", &mut |path, state| {
        let mut found = Vec::new();
        leaves(state, "", &mut found);
        all.extend(found.into_iter().map(|pointer| (path.to_owned(), state.clone(), pointer)));
    });
    let mut dropped = Vec::new();
    for (path, mut state, pointer) in all {
        alter(state.pointer_mut(&pointer).unwrap());
        let mut changed = root.clone();
        let ids = path.split('/').filter(|id| !id.is_empty());
        let node = ids.fold(&mut changed, |node, id| &mut node["snapshots"][id]);
        node["snapshot_data"]["state"] = json!(state.to_string());
        let Ok(document) = Document::read(&serde_json::to_vec(&changed).unwrap()) else { continue };
        let changed =
            Recorded { document, config: recorded.config.clone(), memory: recorded.memory.clone() };
        let is_same = changed.adopt().is_ok_and(|adopted| picture(&adopted) == before);
        if is_same && !WITHOUT_MEANING.iter().any(|part| pointer.contains(part)) {
            dropped.push(format!("{path} {pointer}"));
        }
    }
    assert_eq!(dropped, Vec::<String>::new());
}
