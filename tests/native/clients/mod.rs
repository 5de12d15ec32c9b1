// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stand-ins for the programs that drive cloud-hypervisor: each starts the VMM with the command line of
//! its program, sends the very bytes that it sends, and reads answers and events by its rules, from the first
//! ping to the end of the process.
//!
//! Written from what those programs' sources and the bytes on their sockets show; none of their code is
//! here. What a program asks for and this version does not have is refused by name, and the life continues
//! without it.

mod kata_go;
mod kata_rs;
mod libvirt;
mod typed;
mod upstream;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{Suite, Vmm, VmmBuilder, wait_for};

pub fn add(suite: &mut Suite) {
    upstream::add(suite);
    kata_go::add(suite);
    kata_rs::add(suite);
    libvirt::add(suite);
}

/// A place for the files that a client makes for its VM.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(TempDir::with_prefix("godwit-client-").expect("a folder"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The same for JSON and command lines.
    fn text(&self, name: &str) -> String {
        self.at(name).to_str().expect("a path in UTF-8").to_owned()
    }

    /// A disk of a MiB.
    fn disk(&self, name: &str) -> String {
        fs::write(self.at(name), vec![0; 1 << 20]).expect("an image");
        self.text(name)
    }
}

/// A VMM that a client starts with arguments of its own.
fn start(arguments: &[&str]) -> Vmm {
    VmmBuilder::new(arguments).bare().spawn()
}

/// Names of a process's threads.
fn thread_names(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
    let name = |path: &Path| fs::read_to_string(path.join("comm")).ok();
    tasks
        .filter_map(|task| name(&task.ok()?.path()))
        .map(|name| name.trim_end().to_owned())
        .collect()
}

/// vCPUs as Kata counts them: each thread whose name begins with `vcpu` is one, and has a number.
fn kata_vcpus(vmm: &Vmm) -> usize {
    let names = thread_names(vmm.pid());
    let numbers = names.iter().filter_map(|name| name.strip_prefix("vcpu"));
    let count = numbers.clone().count();
    assert!(numbers.into_iter().all(|number| number.parse::<u32>().is_ok()), "{names:?}");
    count
}

/// A place on the PCI bus as Kata takes it, which knows one bus and one segment.
fn kata_slot(bdf: &str) -> u8 {
    let slot = bdf.strip_prefix("0000:00:").and_then(|rest| rest.strip_suffix(".0"));
    let slot = slot.filter(|slot| slot.len() == 2);
    let number = slot.and_then(|slot| u8::from_str_radix(slot, 16).ok());
    number.unwrap_or_else(|| panic!("'{bdf}' is no place"))
}

/// The parts of `document` without these members, each a path with dots.
fn without(document: &Value, members: &[&str]) -> Value {
    let mut document = document.clone();
    for member in members {
        let pointer = format!("/{}", member.replace('.', "/"));
        let (parent, name) = pointer.rsplit_once('/').expect("a path");
        let parent = document.pointer_mut(parent).and_then(Value::as_object_mut);
        parent.expect("an object").remove(name).expect("a member");
    }
    document
}

/// The reasons of a refusal, in one text.
fn reasons(body: &str) -> String {
    let list: Vec<String> = serde_json::from_str(body).unwrap_or_else(|error| {
        panic!("{error}: '{body}' is no list of sentences");
    });
    list.join(": ")
}

/// Waits for the end of a VMM that was told to end.
fn ends(mut vmm: Vmm) {
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
}

/// Waits until something listens at `socket`.
fn wait_for_socket(socket: &Path) {
    wait_for("the API socket", || std::os::unix::net::UnixStream::connect(socket).ok());
}
