// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPUs that bring their own pages in postcopy (`fault_source=sigbus`): every page is compared, and
//! what happens while they sleep for one, or may not be refused at all.
//!
//! `GODWIT_FAULT_MOVES=20` makes the full number of moves; otherwise 4.

use std::time::Duration;

use serde_json::Value;

use crate::harness::migrate::{Reception, failure_of};
use crate::harness::{HugePages, Mode, Suite, Transport, Vmm, VmmBuilder};
use crate::harness::{is_root, skip, wait_for};

/// Rights that loading a BPF program may be allowed by.
const WITHOUT_BPF: [&str; 3] =
    ["setpriv", "--bounding-set=-bpf,-perfmon,-sys_admin", "--inh-caps=-bpf,-perfmon,-sys_admin"];

const LIMIT_EACH_MOVE: Duration = Duration::from_secs(15);

pub fn add(suite: &mut Suite) {
    let moves = std::env::var("GODWIT_FAULT_MOVES").ok().and_then(|text| text.parse().ok());
    let moves = moves.unwrap_or(4);
    let limit = Duration::from_mins(1) + LIMIT_EACH_MOVE * moves;
    suite.add_long("fault_sources::sigbus_moves_with_uffd_for_other_threads", limit, move || {
        rounds(moves);
    });
    suite.add("fault_sources::sigbus_after_precopy", after_precopy);
    suite.add("fault_sources::sigbus_with_zones_and_shared_connections", zones);
    suite.add("fault_sources::sigbus_with_large_pages_in_pieces", large_pages);
    suite.add("fault_sources::sleeping_vcpus_can_be_ended", sleeping);
    suite.add("fault_sources::sigbus_without_rights_is_refused", without_rights);
    suite.add("fault_sources::uffd_works_without_rights", uffd_without_rights);
    suite.add("fault_sources::auto_takes_what_is_safe_here_and_says_why", auto);
    suite.add("fault_sources::private_memory_is_refused", private);
    suite.add("fault_sources::exit_needs_the_patched_kvm", exit);
}

/// Loading a BPF program takes rights.
fn needs_rights() {
    if !is_root() {
        skip("fault_source=sigbus needs CAP_BPF and CAP_PERFMON");
    }
}

fn progress(vmm: &Vmm) -> Value {
    vmm.api().get("vm.migration-progress").ok().json()
}

fn wait_for_phase(vmm: &Vmm, wanted: &str) {
    wait_for(wanted, || (progress(vmm)["phase"] == wanted).then_some(()));
}

/// Moves the VM; gives what the destination counted.
fn moved(mut source: Vmm, destination: &Vmm, fault_source: &str, options: &str) -> Value {
    let more = format!(",fault_source={fault_source}");
    let reception = Reception::start_with(destination, Transport::Tcp, Mode::Postcopy, &more);
    let option = format!("destination_url={},memory_mode=postcopy{options}", reception.url);
    source.remote_ok(&["send-migration", &option]);
    let received = reception.finish();
    let output = || format!("{}\n{}", source.output(), destination.output());
    assert!(received.status.success(), "{received:?}\n{}", output());
    wait_for_phase(destination, "done");
    let last = progress(destination);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let wanted = if fault_source == "auto" { "uffd" } else { fault_source };
    assert_eq!(last["faults"]["source"], wanted, "{last}");
    assert_eq!(last["remaining_bytes"], 0, "{last}");
    last
}

/// Both sources in turn, with one guest that continues from process to process.
fn rounds(moves: u32) {
    needs_rights();
    let mut vmm = Vmm::boot(2, "size=256M,shared=on", "workload=random-write mem=160M");
    for number in 0..2 * moves {
        let fault_source = if number % 2 == 0 { "sigbus" } else { "uffd" };
        vmm.wait_for_work(5_000);
        let destination = Vmm::empty();
        let last = moved(vmm, &destination, fault_source, ",preempt=2,bandwidth=64M");
        let faults = &last["faults"];
        assert!(faults["requested"].as_u64() > Some(0), "{last}");
        assert!(faults["latency_us"]["count"].as_u64() > Some(0), "{last}");
        println!("     {fault_source}: {faults}");
        destination.wait_for_work(5_000);
        destination.verify();
        vmm = destination;
    }
    vmm.shut_down();
}

fn after_precopy() {
    needs_rights();
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=96M");
    let destination = Vmm::empty();
    let more = ",fault_source=sigbus";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Auto, more);
    let option = format!(
        "destination_url={},memory_mode=auto,downtime_ms=1,timeout_s=600,convergence=throttle",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    wait_for_phase(&source, "precopy");
    source.remote_ok(&["migration-start-postcopy"]);
    assert!(reception.finish().status.success(), "{}", destination.output());
    wait_for_phase(&destination, "done");
    assert_eq!(progress(&destination)["faults"]["source"], "sigbus");
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn zones() {
    needs_rights();
    let source = VmmBuilder::guest(4, "size=0", "workload=random-write mem=96M")
        .with(&["--memory-zone", "id=zone0,size=128M,shared=on", "id=zone1,size=64M,shared=on"])
        .start();
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    moved(source, &destination, "sigbus", ",preempt=0,connections=2");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// Large pages are in the file from their first piece on: a vCPU may see one with its last only. The
/// background alone takes seconds, so that vCPUs meet pages of which some pieces are here.
fn large_pages() {
    needs_rights();
    let _pool = HugePages::borrow(2 * 96);
    let memory = "size=192M,hugepages=on,hugepage_size=2M";
    let source = Vmm::boot(2, memory, "workload=random-write mem=160M");
    source.wait_for_work(20_000);
    let destination = Vmm::empty();
    moved(source, &destination, "sigbus", ",preempt=2,bandwidth=48M");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// The source stops answering: vCPUs sleep for pages that do not come, and a kick gets them out.
fn sleeping() {
    needs_rights();
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=128M");
    source.wait_for_work(5_000);
    let mut destination = Vmm::empty();
    let more = ",fault_source=sigbus";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Postcopy, more);
    let option = format!("destination_url={},memory_mode=postcopy,bandwidth=4M", reception.url);
    source.remote_ok(&["send-migration", &option]);
    wait_for_phase(&destination, "fault");
    assert!(reception.finish().status.success(), "{}", destination.output());
    source.signal(libc::SIGSTOP);
    // Every vCPU sleeps: nothing is executed any more.
    let count = || progress(&destination)["faults"]["seen"].as_u64();
    wait_for("the vCPUs to sleep", || {
        let before = count();
        std::thread::sleep(Duration::from_millis(300));
        (count() == before).then_some(())
    });
    destination.remote_ok(&["shutdown-vmm", "--force"]);
    assert_eq!(destination.wait_for_exit(), 0, "{}", destination.output());
    source.signal(libc::SIGCONT);
}

fn without_rights() {
    needs_rights();
    let destination = VmmBuilder::new::<&str>(&[]).wrapped(&WITHOUT_BPF).start();
    let option = "receiver_url=tcp:127.0.0.1:0,memory_mode=postcopy,fault_source=sigbus";
    let refused = destination.remote(&["receive-migration", option]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("setcap cap_bpf,cap_perfmon+ep"), "{text}");
    assert!(text.contains("fault_source=uffd"), "{text}");
    destination.shut_down();
}

fn uffd_without_rights() {
    needs_rights();
    let source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    source.wait_for_work(5_000);
    let destination = VmmBuilder::new::<&str>(&[]).wrapped(&WITHOUT_BPF).start();
    moved(source, &destination, "auto", "");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// This machine's KVM has neither the bitmap nor, mostly, two-dimensional paging: a guest that would
/// be refused with fault_source=sigbus is moved all the same.
fn auto() {
    let on = |path| std::fs::read_to_string(path).is_ok_and(|text| text.starts_with(['Y', '1']));
    if on("/sys/module/kvm_intel/parameters/ept") || on("/sys/module/kvm_amd/parameters/npt") {
        skip("with two-dimensional paging auto may take sigbus: the lab's group faults");
    }
    let source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    moved(source, &destination, "auto", "");
    let text = destination.output();
    let lines = text.lines().filter(|line| line.contains("fault_source=auto takes uffd"));
    let lines: Vec<_> = lines.collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines.iter().all(|line| line.contains("scripts/kvm-modules")), "{text}");
    let event = destination.wait_for_event("migration-faults-by-uffd");
    let reason = event["properties"]["reason"].as_str().expect("a reason");
    assert!(lines.iter().all(|line| line.contains(reason)), "{reason}: {text}");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn private() {
    needs_rights();
    let source = Vmm::boot(1, "size=192M", "workload=random-write mem=64M");
    let destination = Vmm::empty();
    let more = ",fault_source=sigbus";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Postcopy, more);
    let option = format!("destination_url={},memory_mode=postcopy", reception.url);
    source.remote(&["send-migration", &option]);
    assert_eq!(reception.finish().status.code(), Some(1));
    let text = failure_of(&source);
    assert!(text.contains("shared=on") && text.contains("fault_source=uffd"), "{text}");
    source.wait_for_work(5_000);
    source.verify();
    source.shut_down();
    destination.shut_down();
}

fn exit() {
    let destination = Vmm::empty();
    let option = "receiver_url=tcp:127.0.0.1:0,memory_mode=postcopy,fault_source=exit";
    let refused = destination.remote(&["receive-migration", option]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("scripts/kvm-modules") && text.contains("uffd"), "{text}");
    destination.shut_down();
}
