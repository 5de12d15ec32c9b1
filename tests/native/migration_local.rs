// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is handed over as descriptors: the guest continues in the very same pages, every page
//! is compared, and private memory is refused by name.

use std::time::Duration;

use crate::harness::migrate::{Reception, failure_of};
use crate::harness::{HugePages, Mode, Suite, Transport, Vmm, VmmBuilder};

/// For ten hand-overs.
const LIMIT_MANY: Duration = Duration::from_mins(2);

pub fn add(suite: &mut Suite) {
    suite.add_long("migration_local::back_and_forth", LIMIT_MANY, back_and_forth);
    suite.add("migration_local::of_a_gibibyte_copies_nothing", a_gibibyte);
    suite.add("migration_local::with_zones", zones);
    suite.add("migration_local::of_hugetlb_memory_in_a_pool_that_is_just_large_enough", hugetlb);
    suite.add("migration_local::private_memory_is_refused_by_name", private);
    suite.add("migration_local::a_network_is_refused_by_name", network);
}

/// Hands the VM over; the source ends by itself.
#[track_caller]
fn hand_over(mut source: Vmm, destination: &Vmm) {
    let reception = Reception::start(destination, Transport::Unix, Mode::Precopy);
    source.remote_ok(&["send-migration", &format!("destination_url={},local=on", reception.url)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
}

fn back_and_forth() {
    let mut here = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    for _ in 0..10 {
        here.wait_for_work(5_000);
        let there = Vmm::empty();
        hand_over(here, &there);
        there.wait_for_work(5_000);
        there.verify();
        here = there;
    }
    here.shut_down();
}

fn a_gibibyte() {
    let source = Vmm::boot(2, "size=1280M,shared=on", "workload=random-write mem=1G");
    source.wait_for_work(20_000);
    let destination = Vmm::empty();
    hand_over(source, &destination);
    // Asked here and not in every case: a client that asked is waited for when that VMM's guest leaves.
    let progress = destination.api().get("vm.migration-progress").ok().json();
    assert_eq!(progress["memory_bytes_received"], 0, "{progress}");
    destination.wait_for_work(20_000);
    let report = destination.verify();
    assert_eq!(report.written, (1 << 30) / 4096, "every page was filled before: {report:?}");
    assert!(report.resident >= report.written, "pages are missing: {report:?}");
    destination.shut_down();
}

fn zones() {
    let source = VmmBuilder::guest(2, "size=0", "workload=random-write mem=96M")
        .with(&["--memory-zone", "id=zone0,size=128M,shared=on", "id=zone1,size=64M,shared=on"])
        .start();
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    hand_over(source, &destination);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn hugetlb() {
    // For one VM, not for two: what is handed over is not needed a second time.
    let _pool = HugePages::borrow(96);
    let memory = "size=192M,hugepages=on,hugepage_size=2M";
    let source = Vmm::boot(2, memory, "workload=random-write mem=64M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    hand_over(source, &destination);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn private() {
    let source = VmmBuilder::guest(1, "size=0", "workload=random-write mem=64M")
        .with(&["--memory-zone", "id=mine,size=192M,mergeable=on"])
        .start();
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    source.remote_ok(&["send-migration", &format!("destination_url={},local=on", reception.url)]);
    let reason = failure_of(&source);
    assert!(reason.contains("'mine'") && reason.contains("shared=on"), "{reason}");
    // The source has not begun anything: it is still awaited.
    destination.remote_ok(&["migration-cancel"]);
    assert!(!reception.finish().status.success());
    source.wait_for_work(5_000);
    source.verify();
    source.shut_down();
    destination.shut_down();
}

fn network() {
    let source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    let output = source.remote(&["send-migration", "destination_url=tcp:127.0.0.1:1,local=on"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("unix"), "{error}");
    assert_eq!(source.api().state(), "Running");
    source.wait_for_work(5_000);
    source.shut_down();
}
