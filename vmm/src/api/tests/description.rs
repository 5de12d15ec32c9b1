// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The OpenAPI description: kept up to date, and the names and types that clients rely on.

use serde_json::Value;

use super::super::body::Body;
use super::super::endpoints::{self, ENDPOINTS};
use super::super::openapi;
use super::*;

/// Names and types of the interface that clients are generated from.
fn wanted() -> Value {
    serde_json::from_str(include_str!("../compat.json")).unwrap()
}

fn ours() -> Value {
    serde_json::to_value(openapi::document()).unwrap()
}

/// Our type in the words of the list.
fn type_of(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        return name.rsplit('/').next().unwrap().to_owned();
    }
    match schema["type"].as_str().unwrap_or_default() {
        "array" => format!("array of {}", type_of(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map of {}", type_of(&schema["additionalProperties"]))
        }
        other => other.to_owned(),
    }
}

#[test]
fn the_kept_copy_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    let now = openapi::document_json();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &now).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == now, "docs/openapi.json is stale, run the test with UPDATE_DOCS=1");
}

#[test]
fn every_path_is_offered() {
    let wanted = wanted();
    for (path, item) in wanted["paths"].as_object().unwrap() {
        let endpoint = ENDPOINTS.iter().find(|e| e.path == path);
        let endpoint = endpoint.unwrap_or_else(|| panic!("there is no {path}"));
        assert_eq!(item["method"], endpoint.method.as_str(), "{path}");
        match endpoint.takes {
            Body::Schema(schema) => {
                // It describes what it takes without the name, which it takes.
                let wanted = match item["takes"].as_str() {
                    Some("VmAddUserDevice") => "UserDeviceConfig",
                    other => other.unwrap_or_default(),
                };
                assert_eq!(wanted, schema.name, "{path}");
            }
            // Clients that know of no body send none.
            Body::Empty | Body::Optional(_) | Body::Text(_) => {
                assert_eq!(item["takes"], "", "{path}");
            }
        }
        for status in item["statuses"].as_array().unwrap() {
            let ours =
                &ours()["paths"][format!("/{path}")][endpoint.method.as_str().to_lowercase()];
            assert!(!ours["responses"][status.as_str().unwrap()].is_null(), "{path} {status}");
        }
    }
    assert_eq!(endpoints::ENDPOINTS.len(), 39);
}

/// The sources of this crate without their tests, and what they are.
fn sources(folder: &std::path::Path, out: &mut Vec<(std::path::PathBuf, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            sources(&path, out);
        } else if path.extension().is_some_and(|ext| ext == "rs") && !name.contains("tests") {
            let text = std::fs::read_to_string(&path).unwrap();
            let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
            out.push((path, text[..tests].to_owned()));
        }
    }
}

#[test]
fn the_row_of_an_endpoint_alone_has_its_name_and_its_schemas() {
    let mut all = Vec::new();
    sources(std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), &mut all);
    for endpoint in ENDPOINTS {
        let quoted = format!("\"{}\"", endpoint.path);
        let found = all.iter().filter(|(_, text)| text.contains(&quoted));
        let files: Vec<_> = found.map(|(path, _)| path.file_name().unwrap()).collect();
        assert_eq!(files, ["endpoints.rs"], "{}", endpoint.path);
        for schema in [&endpoint.takes, &endpoint.gives].into_iter().filter_map(Body::schema) {
            let mut collected = BTreeMap::new();
            (schema.collect)(&mut collected);
            assert!(collected.contains_key(schema.name), "{}: {}", endpoint.path, schema.name);
        }
    }
}

/// Schemas of requests and answers that this version does not have.
const ELSEWHERE: [&str; 3] = ["VmSnapshotConfig", "VmCoredumpData", "VmAddUserDevice"];

#[test]
fn every_field_has_the_expected_name_and_type() {
    let (wanted, ours) = (wanted(), ours());
    let schemas = &ours["components"]["schemas"];
    let mut problems = Vec::new();
    for (name, want) in wanted["schemas"].as_object().unwrap() {
        if ELSEWHERE.contains(&name.as_str()) || name.contains("Restore") {
            continue;
        }
        let have = &schemas[name];
        if have.is_null() {
            problems.push(format!("{name} is missing"));
            continue;
        }
        if want["enum"].is_array() {
            let has = |value: &Value| have["enum"].as_array().is_some_and(|h| h.contains(value));
            // More values than clients know of do not hurt them.
            if !want["enum"].as_array().into_iter().flatten().all(has) {
                problems.push(format!("{name}: {} is not {}", have["enum"], want["enum"]));
            }
            continue;
        }
        for (field, kind) in want["fields"].as_object().into_iter().flatten() {
            let property = &have["properties"][field];
            let kind = kind.as_str().unwrap();
            // One enum where the list has a plain string.
            let enumerated = kind == "string" && schemas[type_of(property)]["enum"].is_array();
            if type_of(property) != kind && !enumerated {
                problems.push(format!("{name}.{field}: {property} is not {kind}"));
            }
            let default = &want["defaults"][field];
            // Addresses of taps have had no default since the version that clients ask for.
            if !default.is_null()
                && !property["default"].is_null()
                && property["default"] != *default
            {
                problems.push(format!("{name}.{field}: default {}", property["default"]));
            }
        }
        let required = |value: &Value| -> Vec<String> {
            value["required"].as_array().into_iter().flatten().map(ToString::to_string).collect()
        };
        for field in required(have) {
            if !required(want).contains(&field) {
                problems.push(format!("{name}: {field} must not be required"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn references_lead_somewhere() {
    let ours = ours();
    let text = ours.to_string();
    for reference in text.split("\"$ref\":\"#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(!ours["components"]["schemas"][name].is_null(), "{name}");
    }
}

#[test]
fn a_configuration_with_every_field_of_the_original_is_understood() {
    // What a generated client sends if it fills in every scalar default that it knows.
    let wanted = wanted();
    let defaults = |name: &str| wanted["schemas"][name]["defaults"].clone();
    let mut disk = defaults("DiskConfig");
    disk["path"] = "/d".into();
    let mut net = defaults("NetConfig");
    net["tap"] = "t0".into();
    let mut memory = defaults("MemoryConfig");
    memory["size"] = (1_u64 << 30).into();
    let mut cpus = defaults("CpusConfig");
    cpus["boot_vcpus"] = 1.into();
    cpus["max_vcpus"] = 1.into();
    let mut config = defaults("VmConfig");
    config["payload"] = serde_json::json!({"kernel": "/k"});
    config["disks"] = vec![disk].into();
    config["net"] = vec![net].into();
    config["memory"] = memory;
    config["cpus"] = cpus;
    config["platform"] = defaults("PlatformConfig");
    let config: VmConfig = serde_json::from_value(config).unwrap();
    config.complete().unwrap();
}
