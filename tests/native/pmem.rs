// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Persistent memory: what the guest has made stable is in the file, over reboots, hot-plug and moves; what is
//! discarded is not; and files that cannot be persistent memory are refused by name. The guest writes numbered pages,
//! flushes each, and reads each before it is overwritten.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use guest_reader::abi::{PAGE_BYTES, disk::BLOCKS};
use serde_json::json;
use tempfile::TempDir;

use crate::disks::{is_locked, write_more, written};
use crate::harness::loops::Loop;
use crate::harness::migrate::migrate;
use crate::harness::{Api, Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};
use crate::hotplug::places;

pub fn add(suite: &mut Suite) {
    suite.add("pmem::what_the_guest_has_flushed_is_in_the_file", flushed);
    suite.add("pmem::what_is_discarded_is_not_in_the_file_and_stays_here", discarded);
    suite.add("pmem::a_temporary_file_outlives_a_reboot_and_stays_here", temporary);
    for (mode, transport) in [
        (Mode::Precopy, Transport::Tcp),
        (Mode::Precopy, Transport::Unix),
        (Mode::Postcopy, Transport::Tcp),
    ] {
        let name = format!("pmem::another_host_has_it_after_{}_{transport:?}", mode.name());
        suite.add(&name.to_lowercase(), move || moves(mode, transport));
    }
    suite.add("pmem::it_is_restored_where_it_was", restored);
    suite.add("pmem::it_comes_and_goes", hotplug);
    suite.add("pmem::it_works_with_the_paths_of_the_configuration_alone", confined);
    suite.add("pmem::what_cannot_be_is_refused", refused);
    suite.add("pmem::a_file_that_becomes_too_short_is_named", shortened);
}

const GUEST: &str = "workload=pmem-write mem=16M";
const MEMORY: &str = "size=128M,shared=on";
const FILE_BYTES: u64 = 4 << 20;

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(TempDir::with_prefix("godwit-pmem-").expect("a folder"))
    }

    fn file(&self, name: &str, len_bytes: u64) -> PathBuf {
        let path = self.0.path().join(name);
        File::create(&path).and_then(|file| file.set_len(len_bytes)).expect("a file");
        path
    }
}

fn builder(path: &Path, more: &str) -> VmmBuilder {
    let option = format!("file={},id=data{more}", path.display());
    VmmBuilder::guest(1, MEMORY, GUEST).with(&["--pmem", &option])
}

/// Checks that a file has every page that the guest, which is paused, counts as stable.
#[track_caller]
fn holds(path: &Path, acknowledged: u64) {
    let file = File::open(path).expect("the file");
    assert!(acknowledged > BLOCKS);
    for number in acknowledged - BLOCKS..acknowledged {
        for at in [0, PAGE_BYTES - 8] {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, number % BLOCKS * PAGE_BYTES + at).expect("a word");
            let word = u64::from_le_bytes(word);
            // The one after the last may have been written and not be counted yet.
            let is_next = number + BLOCKS == acknowledged && word == acknowledged + 1;
            assert!(word == number + 1 || is_next, "page {number}: {word} of {acknowledged}");
        }
    }
}

/// Where the guest has it.
fn gpa(api: &Api) -> u64 {
    let info = api.get("vm.info").ok().json();
    info["config"]["pmem"][0]["gpa"].as_u64().expect("its address")
}

fn flushed() {
    let place = Place::new();
    let path = place.file("file", FILE_BYTES);
    let vmm = builder(&path, "").start();
    let api = vmm.api();
    write_more(&vmm, 2 * BLOCKS);
    api.put("vm.pause", "").ok();
    holds(&path, written(&vmm));
    api.put("vm.resume", "").ok();
    write_more(&vmm, BLOCKS);
    let (code, output) = builder(&path, "").bare().run();
    assert!(code == 1 && output.contains("in use by another VM"), "{output}");
    let (code, output) = builder(&path, ",discard_writes=on").bare().run();
    assert!(code == 1 && output.contains("in use by another VM"), "{output}");
    let before = gpa(&api);
    assert_eq!(before % (2 << 20), 0);
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 2 * BLOCKS);
    assert_eq!(gpa(&api), before);
    api.put("vm.shutdown", "").ok();
    assert!(!is_locked(&path));
    api.put("vm.boot", "").ok();
    write_more(&vmm, 2 * BLOCKS);
    assert_eq!(gpa(&api), before);
    vmm.shut_down();
    assert_eq!(fs::metadata(&path).expect("the file").len(), FILE_BYTES);
}

#[track_caller]
fn stays(vmm: &Vmm) {
    let folder = Place::new();
    let api = vmm.api();
    let to = json!({ "destination_url": "tcp:127.0.0.1:1" }).to_string();
    let sent = api.put("vm.send-migration", &to);
    let why = "'data' cannot be migrated or saved";
    assert!(sent.status == 409 && sent.body.contains(why), "{sent:?}");
    api.put("vm.pause", "").ok();
    let to = json!({ "destination_url": format!("file://{}", folder.0.path().display()) });
    let saved = api.put("vm.snapshot", &to.to_string());
    assert!(saved.status == 409 && saved.body.contains(why), "{saved:?}");
    api.put("vm.resume", "").ok();
    write_more(vmm, BLOCKS);
}

fn discarded() {
    let place = Place::new();
    let path = place.file("file", FILE_BYTES);
    fs::write(&path, vec![0x5a; usize::try_from(FILE_BYTES).expect("few")]).expect("a file");
    let vmm = builder(&path, ",discard_writes=on").start();
    write_more(&vmm, 3 * BLOCKS);
    let also = builder(&path, ",discard_writes=on").start();
    write_more(&also, BLOCKS);
    also.shut_down();
    stays(&vmm);
    vmm.shut_down();
    assert!(fs::read(&path).expect("the file").iter().all(|byte| *byte == 0x5a));
}

fn temporary() {
    let place = Place::new();
    let vmm = builder(place.0.path(), ",size=4M").start();
    write_more(&vmm, 2 * BLOCKS);
    assert_eq!(fs::read_dir(place.0.path()).expect("the folder").count(), 0);
    vmm.api().put("vm.reboot", "").ok();
    write_more(&vmm, 2 * BLOCKS);
    stays(&vmm);
    vmm.shut_down();
}

/// Loop devices over one file are one file as two hosts see it: each has a page cache of its own.
fn moves(mode: Mode, transport: Transport) {
    let place = Place::new();
    let file = place.file("file", FILE_BYTES);
    let (here, there) = (Loop::over(&file), Loop::over(&file));
    let name = place.0.path().join("pmem");
    let name_is = |to: &Path| {
        let next = name.with_extension("next");
        std::os::unix::fs::symlink(to, &next).and_then(|()| fs::rename(&next, &name)).expect("it");
    };
    name_is(here.path());
    let source = builder(&name, "").start();
    write_more(&source, BLOCKS);
    // The other host has had it open, so it has pages of it that are old.
    let reader = File::open(there.path()).expect("the device");
    let mut old = vec![0; 1 << 20];
    reader.read_exact_at(&mut old, 0).expect("its contents");
    write_more(&source, BLOCKS / 2);
    let before = gpa(&source.api());
    name_is(there.path());
    let destination = Vmm::empty();
    migrate(source, &destination, transport, mode);
    assert_eq!(gpa(&destination.api()), before);
    write_more(&destination, 2 * BLOCKS);
    assert!(is_locked(there.path()));
    destination.api().put("vm.pause", "").ok();
    holds(&file, written(&destination));
    destination.shut_down();
}

fn restored() {
    let place = Place::new();
    let path = place.file("file", FILE_BYTES);
    let saved = place.0.path().join("saved");
    fs::create_dir(&saved).expect("a folder");
    let url = format!("file://{}", saved.display());
    let vmm = builder(&path, "").start();
    write_more(&vmm, 2 * BLOCKS);
    let before = gpa(&vmm.api());
    vmm.api().put("vm.pause", "").ok();
    vmm.api().put("vm.snapshot", &json!({ "destination_url": url }).to_string()).ok();
    vmm.shut_down();
    let next = Vmm::empty();
    next.api().put("vm.restore", &json!({ "source_url": url, "resume": true }).to_string()).ok();
    wait_for("the guest", || (next.api().state() == "Running").then_some(()));
    assert_eq!(gpa(&next.api()), before);
    write_more(&next, 2 * BLOCKS);
    next.shut_down();
}

fn hotplug() {
    let place = Place::new();
    let path = place.file("file", FILE_BYTES);
    let vmm = Vmm::boot(1, MEMORY, "workload=idle mem=16M");
    let api = vmm.api();
    let before = places(&api);
    let none = api.put("vm.add-pmem", &json!({ "file": "/nonexistent", "id": "data" }).to_string());
    assert!(none.status == 500 && none.body.contains("/nonexistent"), "{none:?}");
    let odd = place.file("odd", FILE_BYTES + 4096);
    let odd = api.put("vm.add-pmem", &json!({ "file": odd, "id": "data" }).to_string());
    assert!(odd.status == 500 && odd.body.contains("multiple of 2 MiB"), "{odd:?}");
    assert_eq!(places(&api), before);
    let option = format!("file={},id=data", path.display());
    let added = vmm.remote_ok(&["add-pmem", &option]);
    assert!(added.contains("\"data\""), "{added}");
    assert!(is_locked(&path));
    vmm.guest().set("workload=pmem-write").expect("it listens");
    write_more(&vmm, 2 * BLOCKS);
    let found = gpa(&api);
    // The test guest does not listen, so it stays until it reboots.
    api.put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    assert_eq!(gpa(&api), found);
    vmm.remote_ok(&["remove-device", "data"]);
    vmm.wait_for_event("device-removing");
    api.put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    assert_eq!(places(&api), before);
    assert!(!is_locked(&path));
    vmm.shut_down();
}

fn confined() {
    let place = Place::new();
    let path = place.file("file", FILE_BYTES);
    let folder = place.0.path().join("folder");
    fs::create_dir(&folder).expect("a folder");
    for (path, more) in [(&path, ""), (&path, ",discard_writes=on"), (&folder, ",size=4M")] {
        let vmm = builder(path, more).with(&["--landlock"]).start();
        write_more(&vmm, BLOCKS);
        vmm.api().put("vm.reboot", "").ok();
        write_more(&vmm, BLOCKS);
        vmm.shut_down();
    }
}

fn refused() {
    let place = Place::new();
    let odd = place.file("odd", FILE_BYTES + 512);
    let empty = place.file("empty", 0);
    let good = place.file("good", FILE_BYTES);
    let text = |path: &Path| path.display().to_string();
    for (option, why) in [
        (text(&odd), "multiple of 2 MiB"),
        (text(&empty), "multiple of 2 MiB"),
        (format!("{},size=8M", text(&good)), "fewer than size="),
        (format!("{},size=3M", text(&good)), "not a multiple of 2 MiB"),
        (text(place.0.path()), "is a directory"),
        (format!("{},size=4M,discard_writes=on", text(place.0.path())), "discard_writes=on"),
        ("/dev/null".to_owned(), "neither a regular file nor a block device"),
        (format!("{},pci_segment=1", text(&good)), "no PCI segment 1"),
    ] {
        let option = format!("file={option}");
        let vmm = VmmBuilder::guest(1, MEMORY, GUEST).with(&["--pmem", &option]);
        let (code, output) = vmm.bare().run();
        // What is wrong with the configuration has a code of its own.
        assert!(matches!(code, 1 | 2) && output.contains(why), "{option}: {code} {output}");
    }
    assert!(!is_locked(&good));
}

fn shortened() {
    let place = Place::new();
    let path = place.file("file", FILE_BYTES);
    let mut vmm = builder(&path, "").start();
    write_more(&vmm, BLOCKS);
    File::options().write(true).open(&path).and_then(|file| file.set_len(0)).expect("shorter");
    let code = vmm.wait_for_exit();
    let output = vmm.output();
    assert_ne!(code, 0, "{output}");
    assert!(output.contains("shorter than persistent memory 'data'"), "{output}");
}
