// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! NUMA nodes: what the firmware tables in guest memory say of them, and that they are kept through a reboot, a move and
//! a restore. Guests that read the tables are the lab's.

use std::fs;
use std::os::unix::fs::FileExt as _;

use serde_json::{Value, json};

use crate::harness::migrate::{Reception, failure_after, migrate, migrate_to, send_option};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image};

pub fn add(suite: &mut Suite) {
    suite.add("numa::tables_tell_of_nodes_after_each_boot", boots);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        suite.add(&format!("numa::nodes_move_by_{}", mode.name()), move || moves(mode));
    }
    suite.add("numa::nodes_are_saved_and_restored", restored);
    suite.add("numa::zones_move_to_other_nodes_of_the_host", other_host_nodes);
    suite.add("numa::without_nodes_there_are_no_tables", without);
    suite.add("numa::impossible_nodes_are_refused", impossible);
}

const WORK: &str = "workload=random-write mem=96M";
/// Where the tables are (`arch::layout`), and where they end.
const TABLES: (u64, usize) = (0xa_0000, 0x4_f000);

/// Two nodes of two zones, which both may grow, the second of so many GiB.
fn start(high_gib: u64) -> Vmm {
    let vmm = builder(high_gib)
        .with(&["--numa", "guest_numa_id=0,cpus=[0,2],memory_zones=[low],distances=[1@17]"])
        .with(&["--numa", "guest_numa_id=1,cpus=[1,3],memory_zones=[high]"])
        .start();
    vmm.wait_for_heartbeat();
    vmm
}

fn builder(high_gib: u64) -> VmmBuilder {
    let high = format!("id=high,size={high_gib}G,shared=on,hotplug_size=1G");
    let arguments = ["--serial", "off", "--console", "off", "--kernel", image()];
    VmmBuilder::new(&arguments)
        .with(&["--cpus", "boot=2,max=4", "--memory", "size=0,hotplug_method=virtio-mem"])
        .with(&["--memory-zone", "id=low,size=128M,shared=on,hotplug_size=1G"])
        .with(&[&high, "--cmdline", WORK])
}

/// The bytes in guest memory where the tables are.
fn area(vmm: &Vmm) -> Vec<u8> {
    let folder = format!("/proc/{}/fd", vmm.pid());
    for entry in fs::read_dir(folder).expect("descriptors").flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        if target.to_string_lossy().starts_with("/memfd:ram-low") {
            let file = fs::File::open(entry.path()).expect("a memfd");
            let mut bytes = vec![0; TABLES.1];
            file.read_exact_at(&mut bytes, TABLES.0).expect("guest memory");
            return bytes;
        }
    }
    panic!("there is no memfd of the zone");
}

/// A table by its signature and its creator.
fn table(area: &[u8], signature: [u8; 4]) -> Option<&[u8]> {
    let starts = (0..area.len() - 16).step_by(16);
    let mut found = starts
        .filter(|at| area[*at..].starts_with(&signature) && area[at + 10..at + 16] == *b"GODWIT");
    let table = &area[found.next()?..];
    let len = u32::from_le_bytes(table[4..8].try_into().expect("four bytes"));
    Some(&table[..len as usize])
}

/// APIC id and node of the processors; address, length in MiB, node and flags of memory.
type Affinities = (Vec<(u8, u8)>, Vec<(u64, u64, u8, u8)>);

fn affinities(srat: &[u8]) -> Affinities {
    let (mut cpus, mut memory) = (Vec::new(), Vec::new());
    let mut entries = &srat[48..];
    while let [kind, len, ..] = *entries {
        let at =
            |from: usize| u64::from_le_bytes(entries[from..from + 8].try_into().expect("eight"));
        match kind {
            0 => cpus.push((entries[3], entries[2])),
            1 => memory.push((at(8), at(16) >> 20, entries[2], entries[28])),
            other => panic!("an entry of kind {other}"),
        }
        entries = &entries[usize::from(len)..];
    }
    (cpus, memory)
}

/// The tables and the configuration tell of the nodes.
#[track_caller]
fn has_nodes(vmm: &Vmm, high_gib: u64) {
    let area = area(vmm);
    let (cpus, memory) = affinities(table(&area, *b"SRAT").expect("an SRAT"));
    assert_eq!(cpus, [(0, 0), (2, 0), (1, 1), (3, 1)]);
    let (mib, gib) = (1 << 20, 1_u64 << 30);
    // What comes later is behind all other memory, and that of 3 GiB is cut by the hole below 4 GiB.
    let expected = match high_gib {
        3 => vec![
            (0, 128, 0, 1),
            (6 * gib, 1024, 0, 3),
            (128 * mib, 3072 - 128, 1, 1),
            (4 * gib, 128, 1, 1),
            (8 * gib, 1024, 1, 3),
        ],
        _ => vec![
            (0, 128, 0, 1),
            (4 * gib, 1024, 0, 3),
            (128 * mib, high_gib << 10, 1, 1),
            (6 * gib, 1024, 1, 3),
        ],
    };
    assert_eq!(memory, expected);
    let slit = table(&area, *b"SLIT").expect("an SLIT");
    assert_eq!(slit[44..], [10, 17, 17, 10]);
    assert_eq!(nodes(vmm)[1]["memory_zones"], json!(["high"]));
}

fn nodes(vmm: &Vmm) -> Value {
    vmm.api().get("vm.info").ok().json()["config"]["numa"].clone()
}

fn boots() {
    let vmm = start(1);
    has_nodes(&vmm, 1);
    vmm.api().put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    has_nodes(&vmm, 1);
    vmm.wait_for_work(5_000);
    vmm.verify();
    vmm.shut_down();
}

fn moves(mode: Mode) {
    let source = start(1);
    // Memory and vCPUs that are to come move with their nodes.
    let grow = json!({"id": "high", "desired_ram": 3_u64 << 29}).to_string();
    source.api().put("vm.resize-zone", &grow).ok();
    source.api().put("vm.resize", r#"{"desired_vcpus":3}"#).ok();
    source.wait_for_work(2_000);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_work(5_000);
    destination.verify();
    has_nodes(&destination, 1);
    destination.api().put("vm.reboot", "").ok();
    destination.wait_for_heartbeat();
    has_nodes(&destination, 1);
    destination.shut_down();
}

fn restored() {
    let vmm = start(3);
    vmm.api().put("vm.pause", "").ok();
    let folder = vmm.path("snapshot");
    fs::create_dir(&folder).expect("a folder");
    let url = format!("file://{}", folder.display());
    vmm.api().put("vm.snapshot", &json!({"destination_url": url}).to_string()).ok();
    let restored = Vmm::empty();
    restored.remote_ok(&["restore", &format!("source_url={url},resume=true")]);
    restored.wait_for_event("restored");
    restored.wait_for_heartbeat();
    has_nodes(&restored, 3);
    restored.verify();
    restored.shut_down();
    vmm.shut_down();
}

fn other_host_nodes() {
    let source = start(1);
    for (update, why) in [
        ("none@0", "zone_updates names 'none', which the VM does not have"),
        ("high@999", "memory zone 'high': this host has no NUMA node 999"),
    ] {
        let destination = Vmm::empty();
        let more = format!(",zone_updates=[{update}]");
        let before = source.events().len();
        let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, &more);
        let sent = source.remote(&[
            "send-migration",
            "--wait",
            &send_option(&reception.url, Mode::Precopy),
        ]);
        assert_eq!(sent.status.code(), Some(1), "{sent:?}");
        let received = reception.finish();
        assert_eq!(received.status.code(), Some(1), "{received:?}");
        let told = failure_after(&source, before);
        assert!(told.contains(why), "{told}");
        destination.shut_down();
    }
    let destination = Vmm::empty();
    let more = ",zone_updates=[high@0,low@0]";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, more);
    migrate_to(reception, source, &destination, |url| send_option(url, Mode::Precopy));
    let config = destination.api().get("vm.info").ok().json()["config"].clone();
    let zones = &config["memory"]["zones"];
    let nodes = [0, 1].map(|at: usize| zones[at]["host_numa_node"].clone());
    assert_eq!(nodes, [json!(0), json!(0)]);
    has_nodes(&destination, 1);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// Of nodes; memory that may grow has an SRAT, which puts all into node 0.
fn without() {
    let vmm = builder(1).start();
    vmm.wait_for_heartbeat();
    let area = area(&vmm);
    let (cpus, memory) = affinities(table(&area, *b"SRAT").expect("an SRAT"));
    assert!(cpus.iter().all(|(_, node)| *node == 0), "{cpus:?}");
    assert!(memory.iter().all(|(.., node, _)| *node == 0), "{memory:?}");
    assert!(table(&area, *b"SLIT").is_none());
    assert_eq!(nodes(&vmm), Value::Null);
    vmm.shut_down();
}

fn impossible() {
    let vmm = Vmm::empty();
    let create = |node: Value| {
        let config = json!({"payload": {"kernel": image()}, "numa": [node]});
        vmm.api().put("vm.create", &config.to_string())
    };
    for (node, why) in [
        (json!({"guest_numa_id": 1, "cpus": [1]}), "numa '1': there is no vCPU 1"),
        (
            json!({"guest_numa_id": 1, "memory_zones": ["a"]}),
            "numa '1': there is no memory zone 'a'",
        ),
        (json!({"guest_numa_id": 1, "device_id": "gpu"}), "numa '1': there is no --device 'gpu'"),
        (json!({"guest_numa_id": 1}), "numa '1': it needs"),
    ] {
        let answer = create(node);
        assert!(answer.status == 400 && answer.body.contains(why), "{answer:?}");
    }
    create(json!({"guest_numa_id": 1, "cpus": [0], "memory_zones": ["mem0"]})).ok();
    vmm.shut_down();
}
