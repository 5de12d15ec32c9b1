// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Nothing is left behind: descriptors, threads, memory, sockets, taps.

use std::fs;
use std::io::Write as _;

use vm_migration::protocol::message::{Message, VERSION};

use crate::harness::migrate::{Reception, failure_of, send_option};
use crate::harness::{
    Mode, PATIENCE, Suite, Transport, Vmm, VmmBuilder, is_root, process, skip, wait_for,
};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("leaks::create_boot_delete", create_boot_delete);
    suite.add("leaks::creations_that_fail", failing_creations);
    suite.add("leaks::migrations_that_fail", failing_migrations);
    suite.add("leaks::tap_that_was_made", taps);
}

/// What must be the same before and after. A thread or connection that is just ending when it is first
/// looked at hides one that is left behind, and what is looked for is left behind by each of many.
fn holdings(vmm: &Vmm) -> (Vec<String>, usize) {
    (process::descriptors(vmm.pid()), process::threads(vmm.pid()))
}

/// Whether all of `now` was there before. Less is fine: a connection of the API may have been open
/// when `before` was looked at.
fn nothing_more(now: &(Vec<String>, usize), before: &(Vec<String>, usize)) -> bool {
    let mut left = before.0.clone();
    let known = now.0.iter().all(|name| match left.iter().position(|other| other == name) {
        Some(at) => {
            left.swap_remove(at);
            true
        }
        None => false,
    });
    known && now.1 <= before.1
}

#[track_caller]
fn assert_back(vmm: &Vmm, before: &(Vec<String>, usize)) {
    // Threads end a moment after the request that ended them was answered.
    let start = std::time::Instant::now();
    loop {
        let now = holdings(vmm);
        if nothing_more(&now, before) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "before: {before:?}\nafter: {now:?}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn life(vmm: &Vmm, disk: &str) {
    let api = vmm.api();
    let mut body: serde_json::Value = serde_json::from_str(&config(128)).expect("JSON");
    body["disks"] = serde_json::json!([{ "path": disk }]);
    body["serial"] = serde_json::json!({ "mode": "Null" });
    body["console"] = serde_json::json!({ "mode": "Null" });
    api.put("vm.create", &body.to_string()).ok();
    api.put("vm.boot", "").ok();
    vmm.guest();
    api.put("vm.pause", "").ok();
    api.put("vm.resume", "").ok();
    api.put("vm.reboot", "").ok();
    api.put("vm.delete", "").ok();
}

fn create_boot_delete() {
    let vmm = Vmm::empty();
    let disk = vmm.path("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a file");
    let disk = disk.to_str().expect("UTF-8");
    // The first life fills caches that stay.
    life(&vmm, disk);
    let before = holdings(&vmm);
    let rss_before = process::status_kib(vmm.pid(), "VmRSS");
    for _ in 0..15 {
        life(&vmm, disk);
    }
    assert_back(&vmm, &before);
    let grown = process::status_kib(vmm.pid(), "VmRSS").saturating_sub(rss_before);
    assert!(grown < 2 << 10, "{grown} KiB more are resident after 15 lives");
    vmm.shut_down();
}

fn failing_creations() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    let fail = || {
        let mut body: serde_json::Value = serde_json::from_str(&config(128)).expect("JSON");
        body["disks"] = serde_json::json!([{ "path": "/nonexistent/disk" }]);
        let created = api.put("vm.create", &body.to_string());
        if created.status < 300 {
            let booted = api.put("vm.boot", "");
            assert!(booted.status >= 400, "{booted:?}");
            assert!(booted.body.contains("/nonexistent/disk"), "{booted:?}");
            api.put("vm.delete", "").ok();
        }
    };
    fail();
    let before = holdings(&vmm);
    for _ in 0..20 {
        fail();
    }
    assert_back(&vmm, &before);
    vmm.shut_down();
}

fn failing_migrations() {
    let source = Vmm::boot(2, "size=128M,shared=on", "workload=random-write mem=16M");
    let port = crate::harness::free_port();
    let nowhere = format!("destination_url=tcp:127.0.0.1:{port}");
    let fail = |count: usize| {
        source.remote(&["send-migration", &nowhere]);
        wait_for("the end of a migration", || {
            let failed =
                source.event_names().iter().filter(|name| *name == "migration-failed").count();
            (failed >= count).then_some(())
        });
        wait_for("the VM", || (source.api().state() == "Running").then_some(()));
    };
    fail(1);
    let before = holdings(&source);
    for count in 2..8 {
        fail(count);
    }
    assert_back(&source, &before);
    assert!(failure_of(&source).contains("127.0.0.1"), "{}", failure_of(&source));
    source.verify();

    // A destination that gave up listens no more, and can be asked again.
    let destination = Vmm::empty();
    let before = holdings(&destination);
    for _ in 0..3 {
        let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
        let address = reception.url.trim_start_matches("tcp:").to_owned();
        let mut stream = std::net::TcpStream::connect(address).expect("it listens");
        let start = Message::Start { version: VERSION, offer: false };
        stream.write_all(&start.encode()).expect("it reads");
        drop(stream);
        let output = reception.finish();
        assert!(!output.status.success(), "{output:?}");
    }
    assert_back(&destination, &before);
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    reception.finish();
    destination.wait_for_heartbeat();
    destination.shut_down();
}

fn taps() {
    if !is_root() || !std::path::Path::new("/dev/net/tun").exists() {
        skip("taps need root and /dev/net/tun");
    }
    let names = || -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir("/sys/class/net")
            .expect("sysfs")
            .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    };
    let before = names();
    let builder = VmmBuilder::guest(1, "size=128M,shared=on", "workload=idle prefill=0")
        .with(&["--net", "mac=2e:89:a8:e4:92:00"]);
    let vmm = builder.spawn();
    let mut vmm = vmm;
    let api = vmm.api();
    wait_for("the VM or its refusal", || {
        (vmm.exited().is_some() || api.state() == "Running").then_some(())
    });
    if vmm.exited().is_some() {
        let output = vmm.output();
        if output.contains("ermitted") || output.contains("ermission") {
            skip("this machine does not let a tap be made");
        }
        panic!("{output}");
    }
    assert_eq!(names().len(), before.len() + 1, "no tap was made");
    vmm.shut_down();
    assert_eq!(names(), before);
}
