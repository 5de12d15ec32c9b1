// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The life of a VM through the API: created, running, paused, shut down, booted again, deleted;
//! requests at the wrong time; and how the process ends.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::{Suite, Vmm, VmmBuilder, image, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("lifecycle::create_boot_shutdown_boot_delete", whole_life);
    suite.add("lifecycle::requests_at_the_wrong_time", wrong_time);
    suite.add("lifecycle::reboot_starts_afresh", reboot);
    suite.add("lifecycle::pause_stops_every_vcpu", pause_stops);
    suite.add("lifecycle::api_shutdown_ends_with_0", || {
        Vmm::boot(1, "size=128M,shared=on", "workload=idle prefill=0").shut_down();
    });
    let ending = [
        ("term", libc::SIGTERM),
        ("int", libc::SIGINT),
        ("hup", libc::SIGHUP),
        ("quit", libc::SIGQUIT),
    ];
    for (name, signal) in ending {
        suite.add(&format!("lifecycle::sig{name}_ends_with_0"), move || ends_on_signal(signal));
    }
    suite.add("lifecycle::signals_without_meaning_end_nothing", stray_signals);
    suite.add("lifecycle::ignored_signals_stay_so", ignored_signals);
    suite.add("lifecycle::triple_fault_is_a_reset", triple_fault);
}

/// A configuration with the test guest.
pub fn config(memory_mib: u64) -> String {
    serde_json::json!({
        "cpus": { "boot_vcpus": 2, "max_vcpus": 2 },
        "memory": { "size": memory_mib << 20, "shared": true },
        "payload": { "kernel": image(), "cmdline": "workload=random-write mem=32M" },
        "serial": { "mode": "Off" },
        "console": { "mode": "Off" },
    })
    .to_string()
}

/// Signals that would end a process that does not know them.
fn stray_signals() {
    let mut vmm = Vmm::boot(1, "size=128M,shared=on", "workload=random-write mem=32M");
    for signal in
        [libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM, libc::SIGPROF, libc::SIGIO, libc::SIGPIPE]
    {
        vmm.signal(signal);
    }
    // A signal that ends the process would have done so before this is answered.
    vmm.api().get("vmm.ping").ok();
    vmm.wait_for_work(1_000);
    vmm.verify();
    vmm.shut_down();
}

/// As after nohup(1), or in the background of a script.
fn ignored_signals() {
    let mut vmm =
        VmmBuilder::guest(1, "size=128M,shared=on", "workload=random-write mem=32M prefill=0")
            .wrapped(&["sh", "-c", "trap '' HUP INT QUIT; exec \"$0\" \"$@\""])
            .start();
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        vmm.signal(signal);
        // What the signal ends would have begun to before the second of these is answered.
        for _ in 0..2 {
            vmm.api().get("vmm.ping").ok();
        }
        assert_eq!(vmm.api().state(), "Running", "after signal {signal}");
        assert_eq!(vmm.api().get("vm.info").ok().json().get("doing"), None);
    }
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
}

fn whole_life() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    for _ in 0..2 {
        api.put("vm.create", &config(128)).ok();
        assert_eq!(api.state(), "Created");
        api.put("vm.boot", "").ok();
        assert_eq!(api.state(), "Running");
        vmm.wait_for_heartbeat();
        api.put("vm.pause", "").ok();
        assert_eq!(api.state(), "Paused");
        api.put("vm.resume", "").ok();
        assert_eq!(api.state(), "Running");
        vmm.wait_for_heartbeat();
        api.put("vm.shutdown", "").ok();
        assert!(["Shutdown", "Created"].contains(&api.state().as_str()), "{}", api.state());
        api.put("vm.boot", "").ok();
        vmm.wait_for_heartbeat();
        vmm.verify();
        api.put("vm.delete", "").ok();
        assert_eq!(api.get("vm.info").status, 404);
    }
    vmm.shut_down();
}

fn wrong_time() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    // As in cloud-hypervisor, in which the others are 404 by its description.
    api.put("vm.delete", "").ok();
    let sizes = r#"{"desired_vcpus": 1}"#;
    for (name, body) in [
        ("vm.boot", ""),
        ("vm.pause", ""),
        ("vm.resume", ""),
        ("vm.shutdown", ""),
        ("vm.reboot", ""),
        ("vm.resize", sizes),
    ] {
        let answer = api.put(name, body);
        assert!((400..500).contains(&answer.status), "{name}: {answer:?}");
        assert!(answer.body.contains("there is no VM"), "{name}: {answer:?}");
    }
    api.put("vm.create", &config(128)).ok();
    let again = api.put("vm.create", &config(128));
    assert_eq!(again.status, 409, "{again:?}");
    for name in ["vm.pause", "vm.resume", "vm.power-button", "vm.reboot"] {
        let answer = api.put(name, "");
        assert!((400..500).contains(&answer.status), "{name}: {answer:?}");
    }
    api.put("vm.boot", "").ok();
    let twice = api.put("vm.boot", "");
    assert!((400..500).contains(&twice.status), "{twice:?}");
    let resumed = api.put("vm.resume", "");
    assert!((400..500).contains(&resumed.status), "{resumed:?}");
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn reboot() {
    let vmm = Vmm::boot(2, "size=128M,shared=on", "workload=random-write mem=32M");
    vmm.wait_for_work(10_000);
    vmm.reboot();
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.wait_for_event("rebooting");
    vmm.wait_for_event("rebooted");
    vmm.shut_down();
}

fn pause_stops() {
    let vmm = Vmm::boot(2, "size=128M,shared=on", "workload=random-write mem=32M");
    vmm.api().put("vm.pause", "").ok();
    let first = vmm.guest_status();
    // Long enough for thousands of visits, had a vCPU continued.
    std::thread::sleep(std::time::Duration::from_millis(200));
    let second = vmm.guest_status();
    let beats = |status: &guest_reader::Status| -> Vec<u64> {
        status.known().map(|vcpu| vcpu.heartbeat).collect()
    };
    assert_eq!(beats(&first), beats(&second));
    vmm.verify_paused();
    vmm.api().put("vm.resume", "").ok();
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn ends_on_signal(signal: i32) {
    let mut vmm = Vmm::boot(1, "size=128M,shared=on", "workload=idle prefill=0");
    vmm.signal(signal);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(!vmm.socket().exists(), "the API socket is left behind");
    assert!(vmm.event_names().iter().any(|name| name == "shutdown"), "{:?}", vmm.event_names());
}

/// An image whose first instruction cannot be executed: no descriptor table, so a triple fault.
fn triple_fault() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut bytes = std::fs::read(image()).expect("the image");
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    // The entry that the PVH note names is in the first loaded segment; its first bytes become ud2.
    let note = find_pvh_entry(&bytes).expect("a PVH note");
    let headers = usize::try_from(word(0x20)).expect("an offset");
    let mut patched = false;
    for index in 0..16 {
        let at = headers + index * 56;
        if at + 56 > bytes.len() || bytes[at..at + 4] != 1_u32.to_le_bytes() {
            continue;
        }
        let word =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (offset, gpa, length) = (word(at + 8), word(at + 24), word(at + 32));
        if (gpa..gpa + length).contains(&note) {
            let entry = usize::try_from(offset + note - gpa).expect("an offset");
            bytes[entry..entry + 2].copy_from_slice(&[0x0f, 0x0b]);
            patched = true;
            break;
        }
    }
    assert!(patched, "no segment holds the entry {note:#x}");
    let kernel = crate::harness::vmm::write_file(&folder.path().join("bad"), &bytes);
    let begun = Instant::now();
    let vmm = VmmBuilder::new(&["--serial", "off", "--console", "off", "--kernel", &kernel])
        .with(&["--memory", "size=64M"])
        .start();
    // A guest that always triple-faults would reboot forever; the VMM says so and keeps answering.
    vmm.wait_for_events(&["rebooting", "rebooted", "shutdown"]);
    wait_for("the third of them", || {
        let events = vmm.events();
        let faults = events.iter().filter(|event| event["event"] == "triple-fault");
        let number = |fault: &Value| -> Option<u64> {
            fault["properties"]["in_a_row"].as_str()?.parse().ok()
        };
        let counts: Vec<_> = faults.map(number).collect();
        let expected: Vec<_> = (1..).take(counts.len()).map(Some).collect();
        assert_eq!(counts, expected);
        (counts.len() >= 3).then_some(())
    });
    vmm.api().get("vmm.ping").ok();
    // There are 32 at once, and one more in each second, however fast the host is.
    let resets = |vmm: &Vmm| vmm.event_names().iter().filter(|name| *name == "rebooting").count();
    wait_for("a guest that resets without end", || (resets(&vmm) >= 38).then_some(()));
    assert!(begun.elapsed() >= Duration::from_secs(5), "{} ms", begun.elapsed().as_millis());
    let in_a_loop = || vmm.output().matches("the payload resets in a loop: its last 3").count();
    wait_for("the log's word of it", || (in_a_loop() == 1).then_some(()));
    assert_eq!(vmm.output().matches("resets the guest").count(), 2, "{}", vmm.output());
    // Those of a client are not counted, and do not wait.
    let begun = Instant::now();
    for _ in 0..5 {
        vmm.api().put("vm.reboot", "").ok();
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "{} ms", begun.elapsed().as_millis());
    vmm.shut_down();
}

fn find_pvh_entry(bytes: &[u8]) -> Option<u64> {
    // Name size 4, descriptor size 4 or 8, type 18 (XEN_ELFNOTE_PHYS32_ENTRY), "Xen\0".
    let at = bytes.windows(8).position(|window| window == [18, 0, 0, 0, b'X', b'e', b'n', 0])?;
    Some(u64::from(u32::from_le_bytes(bytes.get(at + 8..at + 12)?.try_into().ok()?)))
}
