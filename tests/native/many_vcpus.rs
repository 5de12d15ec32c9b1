// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest with many more vCPUs than there are processors moves in postcopy: every page is compared, the background
//! gets its share of the processors, and its source says how it ended and ends.

use std::time::{Duration, Instant};

use crate::harness::migrate::{Reception, wait_for_done};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, is_root, skip, wait_for};
use crate::postcopy::progress;

const VCPUS: u32 = 160;

/// What the guest writes, and more than it has besides.
const WRITTEN_BYTES: u64 = 256 << 20;

/// More vCPUs than this for each processor, and the background would get next to nothing as a thread among theirs.
const CROWD: usize = 8;

/// A source that waits for a client, or for its own threads, in vain ends later than this.
const END_TIME: Duration = Duration::from_secs(9);

/// With this the first vCPU, which starts the others one after the other, has half a processor among them.
const FIRST: libc::c_int = -19;

/// Each vCPU has to be started and moved twice on as few processors as there are.
const LIMIT: Duration = Duration::from_mins(4);

pub fn add(suite: &mut Suite) {
    suite.add_long("many_vcpus::a_guest_of_160_moves_and_its_source_ends", LIMIT, moves);
}

fn moves() {
    if !is_root() {
        skip("fault_source=sigbus needs CAP_BPF and CAP_PERFMON");
    }
    let mut vmm = boot();
    for fault_source in ["sigbus", "uffd"] {
        vmm = moved(vmm, fault_source);
        vmm.wait_for_heartbeat();
        vmm.verify();
    }
    vmm.shut_down();
}

fn boot() -> Vmm {
    let cmdline = "workload=random-write mem=256M";
    let vmm = VmmBuilder::guest(VCPUS, "size=1G,shared=on", cmdline).start_at_once();
    let first = wait_for("the first vCPU", || thread_of(&vmm, "vcpu0"));
    set_nice(first, FIRST);
    vmm.guest();
    set_nice(first, 0);
    vmm
}

fn thread_of(vmm: &Vmm, name: &str) -> Option<libc::id_t> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vmm.pid())).ok()?;
    let named = |path: &std::path::Path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    let task = tasks.flatten().find(|task| named(&task.path()))?;
    task.file_name().to_str()?.parse().ok()
}

fn set_nice(thread: libc::id_t, nice: libc::c_int) {
    // SAFETY: changes how a thread is scheduled, and touches no memory. It is one of a child that runs.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

fn moved(mut source: Vmm, fault_source: &str) -> Vmm {
    let destination = Vmm::empty();
    let more = format!(",fault_source={fault_source}");
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Postcopy, &more);
    let option = format!("destination_url={},memory_mode=postcopy", reception.url);
    let begun = Instant::now();
    let sent = source.remote(&["send-migration", "--wait", &option]);
    let told = begun.elapsed();
    assert_eq!(sent.status.code(), Some(0), "{sent:?}\n{}", source.output());
    assert!(reception.finish().status.success(), "{}", destination.output());
    wait_for_done(&destination);
    let done = Instant::now();
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert!(done.elapsed() < END_TIME, "it took {:?} to end\n{}", done.elapsed(), source.output());
    let last = progress(&destination);
    let pages = |name: &str| last["faults"][name].as_u64().unwrap_or_default();
    let (background, asked) = (pages("bulk_pages"), pages("urgent_pages"));
    println!("     {fault_source}: {told:?}, {background} pages, {asked} for vCPUs that waited");
    assert_eq!(last["faults"]["source"], fault_source, "{last}");
    assert!((background + asked) * 4096 >= WRITTEN_BYTES, "{last}");
    let processors = process_facts::usable_processors();
    if usize::try_from(VCPUS).is_ok_and(|vcpus| vcpus > processors * CROWD) {
        assert!(background > asked, "the background got no share of the processors: {last}");
    }
    destination
}
