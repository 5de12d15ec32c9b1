// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Live migration between two processes while every vCPU writes: every page is compared, and the
//! guest itself must have seen nothing wrong. Many moves of large guests are `migration_rounds.rs`.

use crate::harness::migrate::{migrate, migrate_by};
use crate::harness::{HugePages, Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy, Mode::Auto] {
        let name = format!("migration::{}_of_a_paused_vm", mode.name());
        suite.add(&name, move || paused(mode));
        let name = format!("migration::{}_of_memory_beyond_4_gib", mode.name());
        suite.add(&name, move || beyond_4_gib(mode));
        let name = format!("migration::{}_with_zones", mode.name());
        suite.add(&name, move || zones(mode));
        let name = format!("migration::{}_of_4_vcpus", mode.name());
        suite.add(&name, move || of_4_vcpus(mode));
        let name = format!("migration::{}_gives_huge_pages_back", mode.name());
        suite.add(&name, move || huge_pages(mode));
    }
    for mode in [Mode::Postcopy, Mode::Auto] {
        let name = format!("migration::{}_of_large_and_small_pages", mode.name());
        suite.add(&name, move || of_large_pages(mode));
    }
    suite.add("migration::precopy_of_anonymous_memory", || of_anonymous(Mode::Precopy));
    suite.add("migration::postcopy_of_anonymous_memory", || of_anonymous(Mode::Postcopy));
    suite.add("migration::several_connections", several_connections);
    suite.add("migration::events_of_both_sides", events);
}

/// Bytes of shared memory that a VMM has mapped by huge pages.
pub fn huge_bytes(vmm: &Vmm) -> u64 {
    let path = format!("/proc/{}/smaps_rollup", vmm.pid());
    let text = std::fs::read_to_string(path).expect("the VMM runs");
    let line = text.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).expect("Linux says so");
    kib.parse::<u64>().expect("a number") << 10
}

/// Memory arrives in small pages and gets huge ones while the guest runs, without losing a byte.
fn huge_pages(mode: Mode) {
    const WRITTEN: u64 = 64 << 20;
    let source = Vmm::boot(1, "size=192M,shared=on", "workload=random-write mem=64M prefill=1");
    source.wait_for_heartbeat();
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    // The edges of what the guest writes need not be those of a huge page.
    wait_for("huge pages", || (huge_bytes(&destination) >= WRITTEN * 3 / 4).then_some(()));
    destination.wait_for_work(1000);
    destination.verify();
    destination.shut_down();
}

/// Waits until every vCPU works. Before, a vCPU has no status page, or one of zeros, which is not
/// sent.
fn wait_for_all_vcpus(vmm: &Vmm) {
    let guest = vmm.guest();
    wait_for("work of every vCPU", || {
        let status = guest.status().expect("the guest's status");
        let working = status.complete() && status.known().all(|vcpu| vcpu.iterations > 0);
        working.then_some(())
    });
}

fn paused(mode: Mode) {
    let source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    wait_for_all_vcpus(&source);
    source.api().put("vm.pause", "").ok();
    let beats = source.guest().heartbeat().expect("a heartbeat");
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    assert_eq!(destination.api().state(), "Paused", "a paused VM arrives paused");
    let guest = destination.guest();
    assert_eq!(guest.heartbeat().expect("a heartbeat"), beats, "the guest ran");
    destination.verify_paused();
    destination.api().put("vm.resume", "").ok();
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn beyond_4_gib(mode: Mode) {
    let cmdline = "workload=random-write mem=5G..64M";
    let source = Vmm::boot(2, "size=6G,shared=on", cmdline);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn zones(mode: Mode) {
    let source = VmmBuilder::guest(2, "size=0", "workload=random-write mem=96M")
        .with(&["--memory-zone", "id=zone0,size=128M,shared=on", "id=zone1,size=64M,shared=on"])
        .start();
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// The guest writes in both zones; in that of large pages each fault needs 2 MiB.
fn of_large_pages(mode: Mode) {
    let _pool = HugePages::borrow(2 * 64);
    let source = VmmBuilder::guest(2, "size=0", "workload=random-write mem=144M")
        .with(&["--memory-zone", "id=small,size=64M,shared=on"])
        .with(&["id=large,size=128M,hugepages=on,hugepage_size=2M"])
        .start();
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let option = |url: &str| {
        // A guest so small would be there before auto becomes postcopy.
        let early = if mode == Mode::Auto { ",postcopy_after_s=0" } else { "" };
        format!("destination_url={url},memory_mode={}{early}", mode.name())
    };
    migrate_by(source, &destination, Transport::Tcp, mode, option);
    let progress = destination.api().get("vm.migration-progress").ok().json();
    assert!(progress["faults"]["source"].is_string(), "it was not postcopy: {progress}");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn of_4_vcpus(mode: Mode) {
    let source = Vmm::boot(4, "size=256M,shared=on", "workload=random-write mem=128M");
    source.wait_for_work(10_000);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_work(10_000);
    assert_eq!(destination.guest_status().vcpus_online, 4);
    destination.verify();
    destination.shut_down();
}

fn of_anonymous(mode: Mode) {
    let source = Vmm::boot(1, "size=192M", "workload=random-write mem=64M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn several_connections() {
    let mut source = Vmm::boot(2, "size=320M,shared=on", "workload=random-write mem=192M");
    let destination = Vmm::empty();
    let reception =
        crate::harness::migrate::Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let option = format!(
        "destination_url={},connections=4,timeout_s=4,timeout_strategy=ignore",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn events() {
    let source = Vmm::boot(1, "size=128M,shared=on", "workload=random-write mem=32M");
    let destination = Vmm::empty();
    let log = source.path("events");
    let kept = destination.path("source-events");
    std::fs::hard_link(&log, &kept).expect("the source's events can be kept");
    migrate(source, &destination, Transport::Tcp, Mode::Postcopy);
    let text = std::fs::read_to_string(kept).expect("the source's events");
    for name in ["migration-starting", "migration-started", "migration-finished"] {
        assert!(text.contains(&format!("\"{name}\"")), "no {name} at the source: {text}");
    }
    let wanted = [
        "migration-receive-ready",
        "migration-receive-started",
        "migration-receive-finished",
        "postcopy-migration-completed",
    ];
    for name in wanted {
        destination.wait_for_event(name);
    }
    let progress = destination.api().get("vm.migration-progress").ok().json();
    assert_eq!(progress["phase"], "done", "{progress}");
    assert_eq!(progress["remaining_bytes"], 0, "{progress}");
    destination.shut_down();
}
