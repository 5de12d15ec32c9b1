// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The modules of a crate against each other: in the crates named here they import each other in one direction.
//!
//! A module is a file or a folder right below `src`. What it imports are the names behind `crate::`, and behind
//! `super::` where that leads as far, in its text without tests; a name that the crate re-exports is its module's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates in which no module imports itself by way of others.
const LAYERED: [&str; 13] = [
    "arch",
    "cloud-hypervisor-state",
    "devices",
    "hypervisor",
    "memory",
    "page-bitmap",
    "pci",
    "prezero-pool",
    "prezero-pool-client",
    "stoppable-thread",
    "vfio",
    "vm-migration",
    "vmm",
];

/// Files, and folders of files, that only tests have.
fn is_of_tests(part: &str) -> bool {
    part.ends_with("tests") || part.ends_with("testing") || ["fakes", "fuzzing"].contains(&part)
}

/// The sources below a folder, each with the path of its module.
fn sources(folder: &Path, of: &[String], out: &mut Vec<(Vec<String>, PathBuf)>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let part = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if is_of_tests(&part) {
            continue;
        }
        let mut module = of.to_vec();
        if part != "mod" {
            module.push(part);
        }
        if path.is_dir() {
            sources(&path, &module, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push((module, path));
        }
    }
}

/// A source without comments, and without what is built for tests alone.
fn program(path: &Path) -> String {
    let text = std::fs::read_to_string(path).expect("a source");
    let mut lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let mut out = String::new();
    while let Some(line) = lines.next() {
        if !(line.starts_with("#[cfg(") && line.contains("test")) {
            out.push_str(line);
            out.push('\n');
        } else if lines.next().is_some_and(|item| item.contains("mod ") && item.ends_with('{')) {
            // Tests are at the end.
            break;
        }
    }
    out
}

/// The first names of a path, or of each path of a group in braces.
fn first_names(path: &str) -> Vec<&str> {
    let name =
        |text: &'_ str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let Some(group) = path.strip_prefix('{') else { return vec![&path[..name(path)]] };
    let (mut depth, mut begins, mut out) = (1_u32, true, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => break,
            '}' => depth -= 1,
            ',' if depth == 1 => begins = true,
            c if begins && !c.is_whitespace() => {
                out.push(&group[at..at + name(&group[at..])]);
                begins = false;
            }
            _ => {}
        }
    }
    out
}

/// By module, the modules of the same crate that it imports.
fn imports(name: &str) -> BTreeMap<String, BTreeSet<String>> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join(name).join("src");
    let mut files = Vec::new();
    sources(&src, &[], &mut files);
    let root = program(&src.join("lib.rs"));
    // What the root offers of its modules.
    let mut offered = BTreeMap::new();
    for export in root.split("\npub use ").skip(1) {
        let export = export.split(';').next().unwrap_or_default();
        let Some((module, names)) = export.split_once("::") else { continue };
        offered.extend(first_names(names).into_iter().map(|name| (name.to_owned(), module)));
    }
    let modules: BTreeSet<String> = files.iter().map(|(module, _)| module[0].clone()).collect();
    let mut out: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, path) in &files {
        let from = &module[0];
        if from == "lib" {
            continue;
        }
        let imports = out.entry(from.clone()).or_default();
        let to_root = "super::".repeat(module.len());
        let text = program(path).replace(&to_root, "crate::");
        for path in text.split("crate::").skip(1) {
            let names = first_names(path).into_iter();
            let targets = names.map(|name| offered.get(name).copied().unwrap_or(name));
            imports.extend(
                targets.filter(|to| *to != from && modules.contains(*to)).map(str::to_owned),
            );
        }
    }
    out
}

/// The modules that are in a circle, or between two: no order has them all behind what they import.
fn circles(mut imports: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let left: BTreeSet<String> = imports.keys().cloned().collect();
        for targets in imports.values_mut() {
            targets.retain(|target| left.contains(target));
        }
        let wanted: BTreeSet<String> = imports.values().flatten().cloned().collect();
        imports.retain(|module, targets| !targets.is_empty() && wanted.contains(module));
        if imports.len() == left.len() {
            return imports;
        }
    }
}

#[test]
fn modules_import_each_other_in_one_direction() {
    for name in LAYERED {
        let imports = imports(name);
        let found = circles(imports.clone());
        assert!(found.is_empty(), "modules of {name} import each other in a circle: {found:#?}");
    }
}

#[test]
fn imports_are_found_and_circles_seen() {
    assert!(imports("vmm")["control"].contains("machine"));
    assert!(imports("vfio")["device"].contains("host"), "through the interface's own name");
    assert_eq!(first_names("{a::{b, c}, d_e, Self as F};"), ["a", "d_e", "Self"]);
    let to = |targets: &[&str]| targets.iter().map(ToString::to_string).collect();
    let mut graph = BTreeMap::from([("a".to_owned(), to(&["b"])), ("b".to_owned(), to(&["c"]))]);
    graph.insert("c".to_owned(), to(&[]));
    assert!(circles(graph.clone()).is_empty());
    graph.insert("c".to_owned(), to(&["b"]));
    assert_eq!(circles(graph).into_keys().collect::<Vec<_>>(), ["b", "c"]);
}
