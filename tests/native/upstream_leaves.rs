// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running guest moves from here to cloud-hypervisor v53: to a stand-in that answers as it does, whatever fails there,
//! and to the real program if `GODWIT_UPSTREAM_BIN` names it, and back. There is never more than one guest that runs.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disks::{Disk, is_locked, write_more, written};
use crate::harness::migrate::Reception;
use crate::harness::upstream::command::{COMPLETE, COMPLETE_PAUSED, CONFIG, MEMORY, START, STATE};
use crate::harness::upstream_cuts::{Cut, Cutter};
use crate::harness::upstream_destination::{Destination, Fault, Received};
use crate::harness::upstream_program::Program;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image, wait_for};
use crate::snapshot::place;

const ABANDON: u16 = 6;
const PLATFORM: &str = "platform=cloud-hypervisor-53";
/// Decides a doubt.
const FORCE: &str = r#"{"force":true}"#;
const LIMIT_EACH: Duration = Duration::from_mins(1);

pub fn add(suite: &mut Suite) {
    for transport in [Transport::Unix, Transport::Tcp] {
        let name = format!("upstream_leaves::a_stand_in_gets_all_of_it_{transport:?}");
        suite.add(&name.to_lowercase(), move || gets_all(transport, 1));
    }
    suite.add("upstream_leaves::several_connections", || gets_all(Transport::Tcp, 4));
    for connections in [1, 4] {
        let name = format!("upstream_leaves::memory_devices_by_{connections}_connections");
        suite.add(&name, move || memory_devices(connections));
    }
    suite.add("upstream_leaves::what_the_guest_asked_of_its_disk_is_served_before", disk_writes);
    suite.add("upstream_leaves::one_that_was_paused_is_paused", paused);
    suite.add("upstream_leaves::what_fails_before_the_end_leaves_the_guest_here", fails);
    suite.add("upstream_leaves::a_refusal_of_the_last_message_leaves_the_guest_here", refused_last);
    suite.add("upstream_leaves::what_it_cannot_have_is_named", named);
    let count = std::env::var("GODWIT_MIGRATIONS").ok().and_then(|text| text.parse().ok());
    let count: u32 = count.unwrap_or(3).max(1);
    for transport in [Transport::Unix, Transport::Tcp] {
        let name = format!("upstream_leaves::real_{transport:?}_{count}_rounds").to_lowercase();
        suite.add_long(&name, LIMIT_EACH * (count + 1), move || rounds(transport, 1, count));
    }
    suite.add("upstream_leaves::real_several_connections", || rounds(Transport::Tcp, 4, 1));
    suite.add("upstream_leaves::the_real_one_refuses_and_ends", real_failures);
    suite.add_long(
        "upstream_leaves::the_real_one_is_cut_at_each_message",
        4 * LIMIT_EACH,
        real_cuts,
    );
}

/// A guest with a disk that works.
pub struct Here {
    pub vmm: Vmm,
    pub disk: Disk,
    folder: TempDir,
}

impl Here {
    pub fn start() -> Self {
        let (disk, folder) =
            (Disk::new(), TempDir::with_prefix("godwit-leaves-").expect("a folder"));
        let option = format!("path={},image_type=raw", disk.file.display());
        let vmm = VmmBuilder::new(&["--kernel", image(), "--console", "null", "--serial", "null"])
            .with(&["--cmdline", "workload=random-write mem=48M", "--platform", PLATFORM])
            .with(&["--cpus", "boot=2", "--memory", "size=128M,shared=on", "--disk", &option])
            .start();
        vmm.wait_for_work(5_000);
        Self { vmm, disk, folder }
    }

    pub fn there(
        &self,
        transport: Transport,
        further: usize,
        fault: Option<(u16, Fault)>,
    ) -> Destination {
        Destination::start(transport, self.folder.path(), further, fault)
    }

    /// Sends it, and waits for the end.
    pub fn send(&self, url: &str, connections: u32) -> Output {
        let option = format!(
            "destination_url={url},connections={connections},downtime_ms=300,timeout_s=4,timeout_strategy=ignore"
        );
        self.vmm.remote(&["send-migration", "--wait", &option])
    }

    /// Sends it to a destination that fails; the error.
    #[track_caller]
    pub fn send_in_vain(&self, url: &str) -> String {
        let output = self.send(url, 1);
        assert!(!output.status.success(), "{output:?}\n{}", self.vmm.output());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// The guest is paused, and does nothing in a time in which it would have.
    #[track_caller]
    pub fn stands_still(&self) {
        assert_eq!(self.vmm.api().state(), "Paused", "{}", self.vmm.output());
        let before = self.vmm.guest_status().iterations();
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) {
            assert_eq!(self.vmm.guest_status().iterations(), before, "it works");
            std::thread::yield_now();
        }
    }

    /// The guest goes on, with its disk.
    #[track_caller]
    pub fn goes_on(&self) {
        assert_eq!(self.vmm.api().state(), "Running", "{}", self.vmm.output());
        self.vmm.wait_for_work(1_000);
        assert!(is_locked(&self.disk.file));
        self.vmm.verify();
    }
}

/// What has come there is a VM here, with all its pages.
#[track_caller]
pub fn holds(received: &Received, state: &str) {
    let folder = TempDir::with_prefix("godwit-left-").expect("a folder");
    received.save(folder.path());
    let vmm = Vmm::empty();
    let resume = if state == "Running" { "on" } else { "off" };
    let url = format!("source_url=file://{},resume={resume}", folder.path().display());
    vmm.remote_ok(&["restore", &url]);
    assert_eq!(vmm.api().state(), state);
    if state == "Running" {
        vmm.wait_for_work(2_000);
        vmm.verify();
    } else {
        vmm.verify_paused();
    }
    vmm.shut_down();
}

fn gets_all(transport: Transport, connections: u32) {
    let mut here = Here::start();
    let further = usize::try_from(connections - 1).expect("few");
    let there = here.there(transport, further, None);
    let output = here.send(&there.url, connections);
    assert!(output.status.success(), "{output:?}\n{}", here.vmm.output());
    let received = there.finish();
    assert_eq!(received.commands, [START, CONFIG, MEMORY, STATE, COMPLETE]);
    assert_eq!(received.further, further);
    assert_eq!(here.vmm.wait_for_exit(), 0, "{}", here.vmm.output());
    holds(&received, "Running");
}

/// Makes two memory devices of the one that a VM has that was saved.
fn two_devices(state: &Path, len: u64) {
    let text = fs::read(state).expect("a state");
    let mut root: Value = serde_json::from_slice(&text).expect("JSON");
    let inner = &mut root["snapshots"]["memory-manager"]["snapshot_data"]["state"];
    let mut manager: Value = serde_json::from_str(inner.as_str().expect("text")).expect("JSON");
    let mut halve = |list: &str, start: &str, size: &str| {
        let list = manager.pointer_mut(list).and_then(Value::as_array_mut).expect("a list");
        let mut next = list.last().expect("the device").clone();
        let last = list.last_mut().expect("the device");
        assert_eq!(last[size], 2 * len);
        last[size] = json!(len);
        next[size] = json!(len);
        next[start] = json!(last[start].as_u64().expect("a number") + len);
        if let Some(slot) = next.get_mut("slot") {
            *slot = json!(list.len());
        }
        list.push(next);
    };
    halve("/guest_ram_mappings", "gpa", "size");
    halve("/memory_ranges/data", "gpa", "length");
    let first = manager["hotplug_slots"][0]["base"].as_u64().expect("a number");
    for (number, base) in [first, first + len].into_iter().enumerate() {
        manager["hotplug_slots"][number] = json!({
            "base": base, "length": len, "active": true, "inserting": false, "removing": false,
        });
    }
    manager["next_hotplug_slot"] = json!(2);
    manager["next_memory_slot"] = json!(3);
    *inner = json!(manager.to_string());
    fs::write(state, root.to_string()).expect("written");
}

/// Memory with contents on both sides of the border between two memory devices, which is one region here. The guest has no
/// driver for them, so that a snapshot gives them their contents.
fn memory_devices(connections: u32) {
    const BOOT: u64 = 64 << 20;
    const DEVICE: u64 = 128 << 20;
    const FILLED: u64 = 512 << 10;
    const MEMORY: &str = "size=64M,shared=on,hotplug_size=512M,hotplugged_size=256M";
    let args = ["--kernel", image(), "--cmdline", "workload=random-write mem=32M"];
    let vmm = VmmBuilder::new(&args)
        .with(&["--console", "null", "--serial", "null", "--platform", PLATFORM])
        .with(&["--memory", MEMORY])
        .start();
    vmm.wait_for_work(2_000);
    let (folder, url) = place();
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["snapshot", &url, "--format", "cloud-hypervisor-53"]);
    vmm.shut_down();
    two_devices(&folder.path().join("state.json"), DEVICE);
    let path = folder.path().join("memory-ranges");
    let file = File::options().write(true).open(&path).expect("a file");
    assert_eq!(file.metadata().expect("a length").len(), BOOT + 2 * DEVICE);
    let filled: Vec<u8> = (0..2 * FILLED).map(|at| (at / 4096 % 250) as u8 + 1).collect();
    let border = BOOT + DEVICE;
    file.write_all_at(&filled, border - FILLED).expect("written");
    let mut here = Vmm::empty();
    here.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    here.wait_for_work(2_000);
    let further = usize::try_from(connections - 1).expect("few");
    let there = Destination::start(Transport::Tcp, folder.path(), further, None);
    let option = format!(
        "destination_url={},connections={connections},downtime_ms=300,timeout_s=4,timeout_strategy=ignore",
        there.url
    );
    let output = here.remote(&["send-migration", "--wait", &option]);
    assert!(output.status.success(), "{output:?}\n{}", here.output());
    let received = there.finish();
    assert_eq!(here.wait_for_exit(), 0, "{}", here.output());
    let folder = TempDir::with_prefix("godwit-left-").expect("a folder");
    received.save(folder.path());
    let mut came = vec![0; filled.len()];
    let file = File::open(folder.path().join("memory-ranges")).expect("a file");
    file.read_exact_at(&mut came, border - FILLED).expect("read");
    assert!(came == filled, "other contents");
}

/// A guest whose requests wait for the limit of its disk: none is left in the ring, or its state would be refused.
fn disk_writes() {
    let disk = Disk::new();
    let limit = "ops_size=2,ops_refill_time=100";
    let option = format!("path={},id=data,image_type=raw,{limit}", disk.file.display());
    let args = ["--kernel", image(), "--cmdline", "workload=disk-write mem=16M"];
    let mut here = VmmBuilder::new(&args)
        .with(&["--console", "null", "--serial", "null", "--platform", PLATFORM])
        .with(&["--memory", "size=128M,shared=on", "--disk", &option])
        .start();
    write_more(&here, 10);
    for number in 1..=3 {
        let folder = TempDir::with_prefix("godwit-leaves-").expect("a folder");
        let there = Destination::start(Transport::Unix, folder.path(), 0, None);
        let option = format!("destination_url={},downtime_ms=300,timeout_s=4", there.url);
        let output = here.remote(&["send-migration", "--wait", &option]);
        assert!(output.status.success(), "{number}: {output:?}\n{}", here.output());
        assert_eq!(here.wait_for_exit(), 0, "{}", here.output());
        there.finish().save(folder.path());
        here = Vmm::empty();
        let url = format!("source_url=file://{},resume=on", folder.path().display());
        here.remote_ok(&["restore", &url]);
        write_more(&here, 10);
    }
    here.remote_ok(&["pause"]);
    disk.holds(written(&here));
    here.shut_down();
}

fn paused() {
    let mut here = Here::start();
    here.vmm.remote_ok(&["pause"]);
    let there = here.there(Transport::Unix, 0, None);
    let output = here.send(&there.url, 1);
    assert!(output.status.success(), "{output:?}\n{}", here.vmm.output());
    let received = there.finish();
    assert_eq!(received.commands.last(), Some(&COMPLETE_PAUSED));
    assert_eq!(here.vmm.wait_for_exit(), 0, "{}", here.vmm.output());
    holds(&received, "Paused");
}

/// The same VM tries again and again, and moves in the end.
fn fails() {
    let mut here = Here::start();
    for message in [START, CONFIG, MEMORY, STATE] {
        for fault in [Fault::Refused, Fault::LostBefore, Fault::LostAfter] {
            let there = here.there(Transport::Unix, 0, Some((message, fault)));
            let error = here.send_in_vain(&there.url);
            let received = there.finish();
            let is_doubt = message == STATE && fault != Fault::Refused;
            assert_eq!(
                error.contains("does not run here"),
                is_doubt,
                "{message} {fault:?}: {error}"
            );
            if is_doubt {
                // It keeps its VM when a connection is lost.
                here.stands_still();
                here.vmm.api().put("vm.resume", FORCE).ok();
            }
            assert!(received.commands.contains(&message), "{message} {fault:?}: {received:?}");
            let is_told =
                received.commands.iter().any(|it| [COMPLETE, COMPLETE_PAUSED].contains(it));
            assert!(!is_told, "{message} {fault:?}: {:?}", received.commands);
            here.goes_on();
        }
    }
    let there = here.there(Transport::Unix, 0, None);
    assert!(here.send(&there.url, 1).status.success(), "{}", here.vmm.output());
    holds(&there.finish(), "Running");
    assert_eq!(here.vmm.wait_for_exit(), 0);
}

fn refused_last() {
    let here = Here::start();
    let there = here.there(Transport::Tcp, 0, Some((COMPLETE, Fault::Refused)));
    here.send_in_vain(&there.url);
    assert_eq!(there.finish().commands.last(), Some(&COMPLETE));
    here.goes_on();
    here.vmm.shut_down();
}

fn named() {
    // Another machine: nothing but the greeting is sent.
    let folder = TempDir::with_prefix("godwit-leaves-").expect("a folder");
    let vmm = Vmm::boot(1, "size=64M", "workload=random-write mem=16M");
    let there = Destination::start(Transport::Unix, folder.path(), 0, None);
    let output =
        vmm.remote(&["send-migration", "--wait", &format!("destination_url={}", there.url)]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("platform=godwit"), "{error}");
    assert_eq!(there.finish().commands, [START, ABANDON]);
    vmm.wait_for_work(1_000);
    vmm.shut_down();
    // Options that it does not have.
    let here = Here::start();
    for (options, expected) in [
        (",memory_mode=postcopy", "postcopy"),
        (",compression=zstd", "compression"),
        (",local=on", "local"),
        (",connections=2", "over TCP only"),
    ] {
        let there = here.there(Transport::Unix, 0, None);
        let option = format!("destination_url={}{options}", there.url);
        let output = here.vmm.remote(&["send-migration", "--wait", &option]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected), "{options}: {error}");
        assert_eq!(there.finish().commands, [START, ABANDON], "{options}");
        here.goes_on();
    }
    here.vmm.shut_down();
}

/// The real program that receives, and the answer to its request once that has ended.
struct Receiving {
    program: Program,
    url: String,
    answer: std::thread::JoinHandle<u16>,
}

impl Receiving {
    fn start(transport: Transport) -> Self {
        let program = Program::start(&[]);
        let url = match transport {
            Transport::Tcp => format!("tcp:127.0.0.1:{}", crate::harness::free_port()),
            Transport::Unix => format!("unix:{}", program.path("migration").display()),
        };
        let (api, body) = (program.api(), json!({"receiver_url": url}).to_string());
        let answer = std::thread::spawn(move || {
            let answer = api.request("PUT", "vm.receive-migration", Some(&body));
            // It may end before it answers.
            answer.map_or(0, |answer| answer.status)
        });
        wait_for("it to listen", || {
            let lists = ["/proc/net/tcp", "/proc/net/unix"].map(fs::read_to_string);
            let [tcp, unix] = lists.map(|list| list.expect("a list"));
            let listens = match transport {
                Transport::Tcp => {
                    let port: u16 = url.rsplit(':').next()?.parse().ok()?;
                    tcp.contains(&format!(":{port:04X} 00000000:0000 0A"))
                }
                Transport::Unix => unix.contains(url.strip_prefix("unix:")?),
            };
            listens.then_some(())
        });
        Self { program, url, answer }
    }
}

/// There and back, again and again.
fn rounds(transport: Transport, connections: u32, count: u32) {
    let mut here = Here::start();
    for number in 1..=count {
        let Receiving { mut program, url, answer } = Receiving::start(transport);
        let began = Instant::now();
        let output = here.send(&url, connections);
        assert!(output.status.success(), "{output:?}\n{}\n{}", here.vmm.output(), program.log());
        let total = began.elapsed();
        assert_eq!(answer.join().expect("no panic") / 100, 2, "{}", program.log());
        assert_eq!(here.vmm.wait_for_exit(), 0, "{}", here.vmm.output());
        assert_eq!(program.api().state(), "Running");
        assert!(!program.log().contains("faulty MSR"), "{}", program.log());
        program.wait_for_work(5_000);
        program.verify_and_pause();
        program.api().put("vm.resume", "").ok();
        let back = Vmm::empty();
        let reception = Reception::start(&back, transport, Mode::Precopy);
        let wanted = json!({"destination_url": reception.url}).to_string();
        program.api().put("vm.send-migration", &wanted).ok();
        let output = reception.finish();
        assert!(output.status.success(), "{output:?}\n{}\n{}", back.output(), program.log());
        wait_for("its end", || program.ended());
        back.wait_for_work(5_000);
        let report = back.verify();
        println!(
            "round {number}: {} ms there, {} pages compared",
            total.as_millis(),
            report.written
        );
        here.vmm = back;
    }
    here.vmm.shut_down();
}

/// What the real program cannot have, and its end while it receives.
fn real_failures() {
    let here = Here::start();
    // Its disk is not there: noticed with the state, when the guest is stopped.
    let hidden = here.disk.file.with_extension("hidden");
    let Receiving { mut program, url, answer } = Receiving::start(Transport::Unix);
    fs::rename(&here.disk.file, &hidden).expect("renamed");
    here.send_in_vain(&url);
    fs::rename(&hidden, &here.disk.file).expect("renamed");
    assert_ne!(answer.join().expect("no panic") / 100, 2);
    program.kill();
    here.goes_on();
    // It ends before it has been told to run the guest, at different moments.
    for bytes in [1_u64 << 20, 20 << 20] {
        let Receiving { mut program, url, answer } = Receiving::start(Transport::Unix);
        let option = format!("destination_url={url},bandwidth=8M");
        let child = here.vmm.remote_spawn(&["send-migration", "--wait", &option]);
        wait_for("some memory", || {
            let progress = here.vmm.api().get("vm.migration-progress");
            (progress.status < 300 && progress.json()["memory_bytes_sent"].as_u64()? >= bytes)
                .then_some(())
        });
        program.kill();
        assert!(!crate::harness::vmm::finish(child).status.success());
        assert_eq!(answer.join().expect("no panic"), 0);
        here.goes_on();
    }
    here.vmm.shut_down();
}

/// Cut at a message to the real program, or at its answer: there is one guest that runs, or a doubt in which none does here.
fn real_cuts() {
    let here = Here::start();
    for (message, cut) in [START, CONFIG, MEMORY, STATE, COMPLETE]
        .into_iter()
        .flat_map(|message| [Cut::Before, Cut::After].map(|cut| (message, cut)))
    {
        let case = format!("{message} {cut:?}");
        let Receiving { mut program, answer, .. } = Receiving::start(Transport::Unix);
        let cutter = Cutter::start(here.folder.path(), &program.path("migration"), message, cut);
        let error = here.send_in_vain(&cutter.url);
        assert!(cutter.has_cut(), "{case}: {error}");
        // Its devices and vCPUs run from then on.
        let has_run = |program: &Program| program.log().contains("event = resuming");
        match (message, cut) {
            (COMPLETE, Cut::After) => {
                // It runs there, which is not known here.
                assert!(error.contains("does not run here"), "{case}: {error}");
                assert_eq!(answer.join().expect("no panic") / 100, 2, "{case}");
                assert_eq!(program.api().state(), "Running", "{case}");
                assert!(has_run(&program), "{case}: {}", program.log());
                here.stands_still();
                here.vmm.api().put("vm.delete", FORCE).ok();
                program.wait_for_work(1_000);
                program.verify_and_pause();
                program.kill();
                here.vmm.shut_down();
                return;
            }
            (COMPLETE, Cut::Before) | (STATE, Cut::After) => {
                // It has a VM that does not run, and the disk.
                assert!(error.contains("does not run here"), "{case}: {error}");
                here.stands_still();
                let refused = here.vmm.api().put("vm.resume", FORCE);
                assert!(refused.status >= 300, "{case}: {refused:?}");
                assert!(!has_run(&program), "{case}: {}", program.log());
                program.kill();
                here.vmm.api().put("vm.resume", FORCE).ok();
            }
            (STATE, Cut::Before) => {
                // It has nothing, which is not known here.
                here.stands_still();
                assert!(!has_run(&program), "{case}: {}", program.log());
                program.kill();
                here.vmm.api().put("vm.resume", FORCE).ok();
            }
            _ => {
                assert!(!has_run(&program), "{case}: {}", program.log());
                program.kill();
            }
        }
        here.goes_on();
    }
}
