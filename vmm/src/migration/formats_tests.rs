// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration that travels, against what programs of version 1 knew: `tests/data/formats` has the
//! fields of each of their types. Such a program refuses a field that it does not know, so a VM that uses
//! nothing new must name nothing new.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn frozen() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/formats/config-v1.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Fields of `value`, a `kind` of version 1, that version 1 does not know.
fn unknown(frozen: &Value, kind: &str, value: &Value, path: &str, out: &mut Vec<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| unknown(frozen, kind, item, path, out)),
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                match frozen[kind].get(name) {
                    None => out.push(path),
                    Some(Value::String(kind)) => unknown(frozen, kind, value, &path, out),
                    Some(_) => {}
                }
            }
        }
        _ => {}
    }
}

fn document(config: Value) -> (MachineDocument, Value) {
    let config: VmConfig = serde_json::from_value(config).unwrap();
    let vm_config = config.complete().unwrap();
    let document =
        MachineDocument { vm_config, common_cpuid: Vec::new(), feature_msrs: Vec::new() };
    let json = serde_json::from_slice(&document.to_json().unwrap()).unwrap();
    (document, json)
}

/// A VM that uses everything that version 1 had and this one supports.
fn everything() -> Value {
    json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2, "max_phys_bits": 40, "nested": false,
            "topology": {"threads_per_core": 2, "cores_per_die": 1, "dies_per_package": 1, "packages": 1},
            "affinity": [{"vcpu": 0, "host_cpus": [0]}]},
        "memory": {"size": 0, "zones": [{"id": "z", "size": 1 << 26, "shared": true}]},
        "payload": {"kernel": "/k", "initramfs": "/i", "cmdline": "x"},
        "disks": [{"path": "/d", "readonly": true, "direct": true, "serial": "s", "num_queues": 2}],
        "net": [{"tap": "t", "offload_tso": false, "mtu": 1400}],
        "balloon": {"size": 0, "deflate_on_oom": true, "free_page_reporting": true},
        "serial": {"mode": "File", "file": "/f"}, "console": {"mode": "Off"},
        "debug_console": {"mode": "File", "file": "/g", "iobase": 0xe9},
        "platform": {"system_uuid": "b5a6b1a0-4a4d-4a7d-8d8d-2f4f7d8f9e10", "oem_strings": ["a"]}})
}

#[test]
fn a_vm_that_uses_nothing_new_names_nothing_new() {
    for config in [json!({"payload": {"kernel": "/k"}}), everything()] {
        let (_, json) = document(config);
        let mut out = Vec::new();
        unknown(&frozen(), "VmConfig", &json["vm_config"], "", &mut out);
        assert!(out.is_empty(), "unknown to version 1: {out:?}");
    }
}

#[test]
fn what_has_its_default_is_not_written_and_comes_back() {
    for config in [json!({"payload": {"kernel": "/k"}}), everything()] {
        let (document, json) = document(config);
        let read = MachineDocument::read(&serde_json::to_vec(&json).unwrap()).unwrap();
        assert_eq!(read, document);
        assert_eq!(read.vm_config.clone().complete().unwrap(), document.vm_config);
    }
    let (_, json) = document(json!({"payload": {"kernel": "/k"}}));
    let fields: Vec<_> = json["vm_config"].as_object().unwrap().keys().cloned().collect();
    // Names are given to devices that have none.
    assert_eq!(fields, ["console", "payload", "rng"]);
    // Its source is a field that JSON has to have.
    assert_eq!(json["vm_config"]["rng"], json!({"id": "__rng", "src": "/dev/urandom"}));
}

#[test]
fn an_unknown_field_is_refused_by_name() {
    let known = json!({"vm_config": {"payload": {"kernel": "/k"}}});
    MachineDocument::read(known.to_string().as_bytes()).unwrap();
    for place in ["", "/vm_config", "/vm_config/payload"] {
        let mut document = known.clone();
        let object = document.pointer_mut(place).unwrap().as_object_mut().unwrap();
        object.insert("from_later".to_owned(), json!(1));
        let error = MachineDocument::read(document.to_string().as_bytes()).unwrap_err();
        let DocumentError::Json(error) = error else { panic!("{error:?}") };
        assert!(error.to_string().contains("`from_later`"), "{place}: {error}");
    }
}
