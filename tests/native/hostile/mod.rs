// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that attacks: its first vCPU misuses every PCI function's registers, rings, interrupts and
//! configuration space at random, from a seed, while another one writes to memory that no device was told of.
//!
//! Meanwhile the API answers, the host spends no more threads, descriptors, memory and log lines on it than
//! the limits below, and the guest is moved, saved and restored. Afterwards every page that the second vCPU
//! wrote is compared. `GODWIT_HOSTILE_SECONDS` attacks for longer, `GODWIT_HOSTILE_SEED` from another seed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image, is_root, process};
use crate::snapshot;

pub fn add(suite: &mut Suite) {
    let seconds = variable("SECONDS").unwrap_or(SECONDS);
    let limit = Duration::from_secs(seconds) + MORE_TIME;
    suite.add_long("hostile::devices_are_attacked", limit, move || attacked(seconds));
    suite.add_long("hostile::it_moves", limit, moved);
    suite.add_long("hostile::it_is_saved_and_restored", limit, saved);
}

/// How long it attacks where nothing else is said.
const SECONDS: u64 = 20;
/// For all that a test does beside.
const MORE_TIME: Duration = Duration::from_mins(3);
/// How long it attacks between moves, and after a restore.
const BETWEEN: Duration = Duration::from_secs(2);

/// In which the API answers.
const PROMPT: Duration = Duration::from_secs(2);
/// Threads that devices may have besides those of the beginning: a worker a queue.
const MORE_THREADS: usize = 24;
/// Descriptors, likewise: those of the workers' event loops and of notifications.
const MORE_DESCRIPTORS: usize = 128;
/// Anonymous memory of the VMM that attacks may cost, KiB.
const MORE_MEMORY_KIB: u64 = 64 << 10;
/// Bytes of log and events at once, and a second.
const LOG_BURST_BYTES: u64 = 1 << 20;
const LOG_BYTES_PER_SECOND: u64 = 64 << 10;

fn variable(name: &str) -> Option<u64> {
    let name = format!("GODWIT_HOSTILE_{name}");
    let text = std::env::var(&name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Disks that several VMMs open in turn.
struct Disks {
    folder: TempDir,
}

impl Disks {
    fn new() -> Self {
        let folder = TempDir::with_prefix("godwit-hostile-").expect("a folder");
        for name in ["a", "b"] {
            let file = fs::File::create(folder.path().join(name)).expect("a disk");
            file.set_len(16 << 20).expect("a disk");
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// The guest with a device of each kind, and `more`.
fn start(disks: &Disks, seed: u64, more: &[&str]) -> Vmm {
    let memory = "size=256M,shared=on,hotplug_method=virtio-mem,hotplug_size=256M";
    let cmdline = format!("workload=hostile vcpus=2 mem=64M reserve=24M verify=full seed={seed}");
    let disk = |name: &str, more: &str| {
        format!("path={},image_type=raw,queue_size=256{more}", disks.path(name).display())
    };
    let mut builder = VmmBuilder::new(&["--serial", "off", "--console", "null"])
        .with(&["--kernel", image(), "--cpus", "boot=3", "--memory", memory, "--cmdline", &cmdline])
        .with(&["--balloon"])
        .with(&["size=16M,free_page_reporting=on,free_page_hinting=on,statistics_interval_s=1"])
        .with(&["--disk", &disk("a", ""), &disk("b", ",readonly=on,num_queues=2")])
        .with(&["--rtc", "id=clock"]);
    if is_root() && Path::new("/dev/net/tun").exists() {
        builder = builder.with(&["--net", "mac=02:00:00:00:00:01"]);
    }
    let vmm = builder.with(more).start();
    vmm.guest();
    println!("the guest attacks with seed {seed}");
    vmm
}

/// What a VMM holds and has written.
struct Spent {
    threads: usize,
    descriptors: usize,
    memory_kib: u64,
    log_bytes: u64,
}

impl Spent {
    fn of(vmm: &Vmm) -> Self {
        let pid = vmm.pid();
        let len = |name: &str| fs::metadata(vmm.path(name)).map_or(0, |file| file.len());
        Self {
            threads: process::threads(pid),
            descriptors: process::descriptors(pid).len(),
            memory_kib: process::status_kib(pid, "RssAnon"),
            log_bytes: ["log", "stderr", "stdout", "events"].into_iter().map(len).sum(),
        }
    }
}

fn attacks(vmm: &Vmm) -> Vec<u64> {
    let status = vmm.guest_status();
    let first = status.known().next().expect("a vCPU");
    first.attacks.clone().expect("something to attack")
}

/// Watches for so long; the VMM stays within its limits and the guest goes on.
#[track_caller]
fn watch(vmm: &mut Vmm, time: Duration) {
    let (start, before, attacked) = (Instant::now(), Spent::of(vmm), attacks(vmm));
    while start.elapsed() < time {
        let asked = Instant::now();
        vmm.api().get("vmm.ping").ok();
        vmm.api().get("vm.counters").ok();
        assert!(asked.elapsed() < PROMPT, "two answers took {:?}", asked.elapsed());
        assert_eq!(vmm.exited(), None, "the VMM ended: {}", vmm.output());
        let now = Spent::of(vmm);
        assert!(
            now.threads <= before.threads + MORE_THREADS,
            "{:?}",
            process::thread_names(vmm.pid())
        );
        let descriptors = before.descriptors + MORE_DESCRIPTORS;
        assert!(now.descriptors <= descriptors, "{:?}", process::descriptors(vmm.pid()));
        assert!(now.memory_kib <= before.memory_kib + MORE_MEMORY_KIB, "{} KiB", now.memory_kib);
        let log_bytes = LOG_BURST_BYTES + start.elapsed().as_secs() * LOG_BYTES_PER_SECOND;
        assert!(now.log_bytes <= before.log_bytes + log_bytes, "{} bytes of log", now.log_bytes);
        std::thread::sleep(Duration::from_millis(50));
    }
    vmm.wait_for_heartbeat();
    let counts = attacks(vmm);
    let idle = counts.iter().zip(&attacked).position(|(now, then)| now <= then);
    assert!(idle.is_none() || time < BETWEEN, "no attack of kind {idle:?}: {counts:?}");
    println!("attacks by kind: {counts:?}");
    let names = vmm.event_names();
    assert!(!names.iter().any(|name| name == "rebooting"), "the guest was reset: {names:?}");
}

/// That the attacks get past the first checks: devices did what they were asked.
#[track_caller]
fn assert_deep(vmm: &Vmm) {
    let counters = vmm.api().get("vm.counters").ok().json();
    let sum = |device: &str, names: &[&str]| -> u64 {
        names.iter().filter_map(|name| counters[device][*name].as_u64()).sum()
    };
    assert!(sum("_disk0", &["read_ops", "write_ops"]) > 0, "{counters}");
    assert!(sum("_disk1", &["read_ops"]) > 0, "{counters}");
    assert!(sum("__balloon", &["inflated_pages"]) > 0, "{counters}");
    assert!(sum("__balloon", &["rejected_pages"]) > 0, "{counters}");
}

fn seed() -> u64 {
    variable("SEED").unwrap_or(1)
}

fn attacked(seconds: u64) {
    let disks = Disks::new();
    let vsock = format!("cid=3,socket={}", disks.path("vsock").display());
    let mut vmm = start(&disks, seed(), &["--vsock", &vsock]);
    watch(&mut vmm, Duration::from_secs(seconds));
    vmm.verify();
    watch(&mut vmm, BETWEEN);
    assert_deep(&vmm);
    vmm.verify();
    vmm.shut_down();
}

fn moved() {
    let disks = Disks::new();
    let mut here = start(&disks, seed() + 1, &[]);
    for mode in [Mode::Precopy, Mode::Postcopy, Mode::Precopy, Mode::Postcopy] {
        watch(&mut here, BETWEEN);
        let there = Vmm::empty();
        migrate(here, &there, Transport::Tcp, mode);
        here = there;
        here.verify();
    }
    watch(&mut here, BETWEEN);
    here.verify();
    here.shut_down();
}

fn saved() {
    let disks = Disks::new();
    let mut here = start(&disks, seed() + 2, &[]);
    for mode in ["copy", "ondemand"] {
        watch(&mut here, BETWEEN);
        let (folder, url) = snapshot::place();
        snapshot::save(&here, &url);
        here.verify_paused();
        here.signal(libc::SIGKILL);
        here.wait_for_exit();
        let option = format!("source_url={url},memory_restore_mode={mode},resume=on");
        let there = Vmm::empty();
        there.remote_ok(&["restore", &option]);
        if mode == "ondemand" {
            there.wait_for_event("restore-memory-completed");
        }
        here = there;
        here.verify();
        drop(folder);
    }
    watch(&mut here, BETWEEN);
    here.verify();
    here.shut_down();
}
