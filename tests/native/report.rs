// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a migration leaves behind: its phases, its course, and how long each vCPU waited.

use serde_json::Value;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm};

pub fn add(suite: &mut Suite) {
    suite.add("report::postcopy_tells_its_course_and_the_waits_of_each_vcpu", postcopy);
}

fn report(vmm: &Vmm) -> Value {
    vmm.api().get("vm.migration-report").ok().json()
}

fn list<'a>(report: &'a Value, name: &str) -> &'a [Value] {
    report[name].as_array().map_or(&[], Vec::as_slice)
}

fn sum(list: &[Value], field: &str) -> u64 {
    list.iter().filter_map(|entry| entry.pointer(field)?.as_u64()).sum()
}

fn postcopy() {
    let source = Vmm::boot(2, "size=384M,shared=on", "workload=random-write mem=256M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let early = destination.remote(&["migration-report"]);
    let refused = String::from_utf8_lossy(&early.stderr).into_owned();
    assert!(!early.status.success() && refused.contains("not migrated"), "{refused}");
    migrate(source, &destination, Transport::Tcp, Mode::Postcopy);

    let report = report(&destination);
    let phases: Vec<&str> =
        list(&report, "phases").iter().filter_map(|passage| passage["phase"].as_str()).collect();
    assert_eq!(
        phases,
        ["listen", "negotiate", "receive", "prepare", "run", "fault", "done"],
        "{report}"
    );
    let timeline = list(&report, "timeline");
    // How much is to come is not known before the source has said so.
    let remaining = |sample: &Value| sample["remaining_bytes"].as_u64();
    assert!(timeline.iter().any(|sample| remaining(sample) > Some(0)), "{timeline:?}");
    let last = timeline.last().expect("a last sample");
    assert_eq!(remaining(last), Some(0), "{last}");
    assert!(last["moved_bytes"].as_u64() >= Some(256 << 20), "{last}");

    let threads = list(&report, "threads");
    let names: Vec<&str> = threads.iter().filter_map(|thread| thread["name"].as_str()).collect();
    assert!(names.contains(&"vcpu0") && names.contains(&"vcpu1"), "{names:?}");
    let waited = report["progress"]["faults"]["latency_us"]["count"].as_u64().expect("a number");
    assert!(waited > 0);
    assert_eq!(sum(threads, "/latency_us/count"), waited, "{report}");
    assert_eq!(sum(list(&report, "latency"), "/count"), waited, "{report}");

    let file = destination.path("report.svg");
    let path = file.to_str().expect("a path");
    destination.remote_ok(&["migration-report", "--svg", path]);
    let picture = std::fs::read_to_string(&file).expect("the picture");
    assert!(picture.starts_with("<svg") && picture.contains(">vcpu1<"), "{picture}");
    assert_eq!(destination.remote_ok(&["migration-report", "--svg", "-"]).trim(), picture.trim());
    destination.verify();
    destination.shut_down();
}
