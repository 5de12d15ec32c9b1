// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that attacks: its first vCPU misuses every PCI function's registers, rings, interrupts and
//! configuration space, I/O ports and registers outside of BARs at random, from a seed, while another one writes to
//! memory that no device was told of.
//!
//! Meanwhile the API answers, the host spends no more threads, descriptors, memory and log lines on it than
//! the limits below, and the guest is moved, saved and restored. Afterwards every page that the second vCPU
//! wrote is compared. `GODWIT_HOSTILE_SECONDS` attacks for longer, `GODWIT_HOSTILE_SEED` from another seed;
//! `GODWIT_HOSTILE_COST`, in seconds, adds a run that measures what each kind of attack costs the host.

mod cost;
mod machine;
mod meddling;

use std::fs;
use std::time::{Duration, Instant};

use guest_reader::abi::{self, param};

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, process};
use crate::tpm::Swtpm;
use crate::vhost_user::BackEnd;
use crate::{snapshot, user_devices};

use machine::{Attackable, Disks};

pub fn add(suite: &mut Suite) {
    let limit = limit();
    suite.add_long("hostile::devices_are_attacked", limit, attacked);
    suite.add_long("hostile::it_moves", limit, moved);
    suite.add_long("hostile::it_is_saved_and_restored", limit, saved);
    if let Some(seconds) = variable("COST") {
        suite.add_long("hostile::what_it_costs", Duration::from_hours(1), move || {
            cost::all(seconds);
        });
    }
}

/// Those that mind no other.
pub fn add_beside(suite: &mut Suite) {
    let limit = limit();
    suite.add_long("hostile::other_devices_are_attacked", limit, others);
    suite.add_long("hostile::devices_behind_the_iommu_are_attacked", limit, behind_iommu);
    meddling::add(suite, limit);
}

fn seconds() -> u64 {
    variable("SECONDS").unwrap_or(SECONDS)
}

fn limit() -> Duration {
    Duration::from_secs(seconds()) + MORE_TIME
}

/// How long it attacks where nothing else is said.
const SECONDS: u64 = 8;
/// For all that a test does beside.
const MORE_TIME: Duration = Duration::from_mins(3);
/// How long it attacks between moves, and after a restore.
const BETWEEN: Duration = Duration::from_secs(2);

/// In which the API answers, also on a host that has much else to do.
const PROMPT: Duration = Duration::from_secs(10);
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

/// Whether the guest was told to attack by a kind.
fn is_wanted(vmm: &Vmm, kind: usize) -> bool {
    let page = vmm.guest().memory().word(abi::PARAM_GPA + param::ATTACKS).expect("its parameters");
    page == 0 || page >> kind & 1 == 1
}

/// Watches for so long; the VMM stays within its limits and the guest goes on.
#[track_caller]
fn watch(vmm: &mut Vmm, time: Duration) {
    watch_while(vmm, time, |_| ());
}

/// The same, while something is done over and over.
#[track_caller]
fn watch_while(vmm: &mut Vmm, time: Duration, mut meddle: impl FnMut(&Vmm)) {
    let (start, before, attacked) = (Instant::now(), Spent::of(vmm), attacks(vmm));
    while start.elapsed() < time {
        meddle(vmm);
        let asked = Instant::now();
        vmm.api().get("vmm.ping").ok();
        let counters = vmm.api().get("vm.counters");
        // While a device goes that the guest has ejected, others wait.
        assert!([200, 409].contains(&counters.status), "{counters:?}");
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
    let is_idle = |(kind, (now, then)): (usize, (&u64, &u64))| {
        (is_wanted(vmm, kind) && now <= then).then_some(kind)
    };
    let idle = counts.iter().zip(&attacked).enumerate().find_map(is_idle);
    assert!(idle.is_none() || time <= BETWEEN, "no attack of kind {idle:?}: {counts:?}");
    println!("attacks by kind: {counts:?}");
    let names = vmm.event_names();
    assert!(!names.iter().any(|name| name == "rebooting"), "the guest was reset: {names:?}");
}

/// That the attacks get past the first checks: devices did what they were asked, each by one of its counters.
#[track_caller]
fn assert_deep(vmm: &Vmm, did: &[(&str, &str)]) {
    let counters = vmm.api().get("vm.counters").ok().json();
    for (device, counter) in did {
        assert!(counters[*device][*counter].as_u64() > Some(0), "{device}, {counter}: {counters}");
    }
}

fn seed() -> u64 {
    variable("SEED").unwrap_or(1)
}

fn attacked() {
    let disks = Disks::new();
    let mut vmm = Attackable::new(&disks, seed()).start();
    watch(&mut vmm, Duration::from_secs(seconds()));
    vmm.verify();
    watch(&mut vmm, BETWEEN);
    assert_deep(&vmm, &[("_disk0", "write_ops"), ("_disk1", "read_ops")]);
    assert_deep(&vmm, &[("__balloon", "inflated_pages"), ("__balloon", "rejected_pages")]);
    vmm.verify();
    vmm.shut_down();
}

/// Devices that do not move, or are of more than one queue, or of an image.
fn others() {
    let disks = Disks::new();
    let (server, served) = (user_devices::server("usual"), BackEnd::start());
    let swtpm = Swtpm::start();
    let mut machine = Attackable::bare(&disks, seed() + 3);
    let device = format!("socket={}", server.socket().display());
    machine.add(&["--pvpanic", "--user-device", &device]);
    let disk = disks.option("qcow2", "image_type=qcow2,num_queues=2");
    machine.add(&["--disk", &disk, &format!("vhost_user=on,socket={}", served.socket().display())]);
    machine.add_net("mac=02:00:00:00:00:02,num_queues=4");
    let mut vmm = match &swtpm {
        Some(swtpm) => swtpm.vmm(machine.builder().with(&["--tpm", "socket=socket"])),
        None => machine.start(),
    };
    vmm.guest();
    watch(&mut vmm, Duration::from_secs(seconds()));
    vmm.verify();
    watch(&mut vmm, BETWEEN);
    assert_deep(&vmm, &[("_disk0", "write_ops")]);
    vmm.verify();
    vmm.shut_down();
}

fn behind_iommu() {
    let disks = Disks::new();
    let mut machine = Attackable::bare(&disks, seed() + 4);
    let disk = disks.option("a", "image_type=raw,iommu=on");
    machine.add(&["--disk", &disk, &disks.option("qcow2", "image_type=qcow2,iommu=on")]);
    machine.add(&["--rng", "src=/dev/urandom,iommu=on", "--rtc", "id=clock,iommu=on"]);
    machine.add(&["--pmem", &format!("file={},iommu=on", disks.path("pmem").display())]);
    machine.add_vsock(",iommu=on,id=vsock");
    machine.add_net("mac=02:00:00:00:00:03,iommu=on");
    let mut vmm = machine.start();
    watch(&mut vmm, Duration::from_secs(seconds()));
    vmm.verify();
    assert_deep(&vmm, &[("_disk0", "read_bytes"), ("vsock", "tx_packets")]);
    let mut there = Vmm::empty();
    migrate(vmm, &there, Transport::Unix, Mode::Precopy);
    watch(&mut there, BETWEEN);
    there.verify();
    there.shut_down();
}

fn moved() {
    let disks = Disks::new();
    let mut here = Attackable::new(&disks, seed() + 1).start();
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
    let mut here = Attackable::new(&disks, seed() + 2).start();
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
