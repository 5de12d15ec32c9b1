// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two documents against the workspace: in `docs/architecture.md` every crate has a row, which names exactly
//! the crates that it depends on; in `docs/dependencies.md` every crate of others has its reason.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// By crate, the crates of the workspace that it depends on.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Packages that are in no program: of tests and benchmarks, and what writes texts of Debian's packages.
const NOT_SHIPPED: [&str; 7] = [
    "godwit-bench",
    "guest-reader",
    "native-tests",
    "package-texts",
    "test-skip",
    "vfio-user-device",
    "vhost-user-disk",
];

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn names(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().expect("a list").iter()
}

/// What cargo says of the workspace's packages.
fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(ROOT)
        .output()
        .expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Its crates, and what they import of each other.
fn workspace() -> Imports {
    let metadata = metadata();
    let name = |value: &Value| value["name"].as_str().expect("a name").to_owned();
    let packages: BTreeSet<String> = names(&metadata["packages"]).map(name).collect();
    names(&metadata["packages"])
        .filter(|package| !NOT_SHIPPED.contains(&name(package).as_str()))
        .map(|package| {
            let imports = names(&package["dependencies"])
                .filter(|dependency| dependency["kind"].is_null())
                .map(name)
                .filter(|dependency| packages.contains(dependency));
            (name(package), imports.collect())
        })
        .collect()
}

/// What the table says.
fn documented() -> Imports {
    let path = format!("{ROOT}/docs/architecture.md");
    let text = std::fs::read_to_string(path).expect("the document");
    let quoted = |cell: &str| -> BTreeSet<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    text.lines()
        .skip_while(|line| !line.starts_with("| crate | imports |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let name =
                if cells[1] == "root package" { "godwit" } else { cells[1].trim_matches('`') };
            (name.to_owned(), quoted(cells[2]))
        })
        .collect()
}

#[test]
fn the_table_of_crates_is_true() {
    let documented = documented();
    assert!(!documented.is_empty(), "no table of crates in docs/architecture.md");
    assert_eq!(documented, workspace());
}

/// Crates of others that get into the programs.
fn external() -> BTreeSet<String> {
    let metadata = metadata();
    names(&metadata["packages"])
        .filter(|package| !NOT_SHIPPED.contains(&package["name"].as_str().expect("a name")))
        .flat_map(|package| names(&package["dependencies"]))
        .filter(|dependency| dependency["kind"] != "dev" && dependency["path"].is_null())
        // Loom replaces the standard library's atomics in models alone.
        .filter(|dependency| dependency["target"] != "cfg(loom)" && dependency["optional"] == false)
        .map(|dependency| dependency["name"].as_str().expect("a name").to_owned())
        .collect()
}

#[test]
fn every_dependency_has_its_reason() {
    let text =
        std::fs::read_to_string(format!("{ROOT}/docs/dependencies.md")).expect("the document");
    let documented: BTreeSet<String> = text
        .lines()
        .skip_while(|line| !line.starts_with("| crate | of | why |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .flat_map(|line| line.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    assert_eq!(documented, external());
}
