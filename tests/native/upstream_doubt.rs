// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM whose destination, cloud-hypervisor v53 as a stand-in, was told to run it and has not answered: nothing is done here
//! until an operator says where it is ("In doubt" in docs/adopt.md).

use std::fs;

use crate::disks::{is_locked, lock};
use crate::harness::upstream::command::COMPLETE;
use crate::harness::upstream_destination::{Fault, Received};
use crate::harness::vmm::finish;
use crate::harness::{Suite, Transport, wait_for};
use crate::requests::{Held, requests_but, wave};
use crate::upstream_leaves::{Here, holds};

pub fn add(suite: &mut Suite) {
    suite.add("upstream_doubt::an_operator_says_that_it_runs_there", is_there);
    suite.add("upstream_doubt::an_operator_says_that_it_does_not", is_not_there);
    suite.add("upstream_doubt::all_that_would_use_it_is_refused", all_is_refused);
    suite.add("upstream_doubt::it_ends_by_force_or_at_the_second_signal", ends);
    suite.add("upstream_doubt::requests_that_came_before_are_refused", came_before);
}

const REFUSED: u16 = 409;
const FORCE: &str = r#"{"force":true}"#;

/// One in doubt, and what the destination has got.
fn doubtful() -> (Here, Received) {
    let here = Here::start();
    let there = here.there(Transport::Unix, 0, Some((COMPLETE, Fault::LostBefore)));
    let error = here.send_in_vain(&there.url);
    assert!(error.contains("does not run here"), "{error}");
    let received = there.finish();
    assert_eq!(received.commands.last(), Some(&COMPLETE), "it is not told to drop the VM");
    here.vmm.wait_for_event("migration-unanswered");
    here.stands_still();
    is_in_doubt(&here);
    assert!(!is_locked(&here.disk.file), "the destination may have the disk");
    (here, received)
}

#[track_caller]
fn is_in_doubt(here: &Here) {
    let info = here.vmm.api().get("vm.info").ok().json();
    assert_eq!(info["state"], "Paused", "{info}");
    assert!(info["in_doubt"].is_string(), "{info}");
}

fn is_there() {
    let (here, received) = doubtful();
    let refused = here.vmm.api().put("vm.delete", "");
    assert!(refused.status == REFUSED && refused.body.contains("force"), "{refused:?}");
    is_in_doubt(&here);
    let disk = fs::read(&here.disk.file).expect("the disk");
    here.vmm.remote_ok(&["delete", "--force"]);
    assert!(fs::read(&here.disk.file).expect("the disk") == disk, "it is not written");
    assert_eq!(here.vmm.api().get("vm.info").status, 404);
    holds(&received, "Running");
    here.vmm.shut_down();
}

fn is_not_there() {
    let (mut here, _) = doubtful();
    let file = lock(&here.disk.file);
    let refused = here.vmm.api().put("vm.resume", "");
    assert!(refused.status == REFUSED && refused.body.contains("force"), "{refused:?}");
    let refused = here.vmm.api().put("vm.resume", FORCE);
    let says = |what| refused.body.contains(what);
    assert!(
        refused.status >= 400 && says("cannot be locked") && says("docs/adopt.md"),
        "{refused:?}"
    );
    is_in_doubt(&here);
    // A request to end the process that came in the doubt does not end what an operator continues.
    here.vmm.signal(libc::SIGTERM);
    is_logged(&here, "another signal discards the VM");
    drop(file);
    here.vmm.remote_ok(&["resume", "--force"]);
    here.goes_on();
    assert!(here.vmm.api().get("vm.info").ok().json()["in_doubt"].is_null());
    // It is a VM like any other: it moves in the end.
    let there = here.there(Transport::Unix, 0, None);
    assert!(here.send(&there.url, 1).status.success(), "{}", here.vmm.output());
    holds(&there.finish(), "Running");
    assert_eq!(here.vmm.wait_for_exit(), 0);
}

fn all_is_refused() {
    let (here, _) = doubtful();
    let api = here.vmm.api();
    let held = Held::by(&here.vmm);
    let answered =
        ["vmm.ping", "vm.info", "vm.migration-progress", "vm.migration-report", "vm.metrics"];
    // What needs a VM is refused for the doubt; the rest is answered, or refused for what it asks for.
    let others = [
        "vm.create",
        "vm.restore",
        "vm.receive-migration",
        "vm.migration-recover",
        "vm.migration-start-postcopy",
    ];
    for (name, answer) in wave(&api, &requests_but(&[])) {
        if answered.contains(&name) {
            assert_eq!(answer.status, 200, "{name}: {answer:?}");
        } else if others.contains(&name) || name.ends_with("-cancel") {
            assert!(answer.status >= 400, "{name}: {answer:?}");
        } else {
            let is_refused = answer.status == REFUSED && answer.body.contains("docs/adopt.md");
            assert!(is_refused, "{name}: {answer:?}");
        }
    }
    held.assert_still(&here.vmm, "all requests");
    is_in_doubt(&here);
    api.put("vm.resume", FORCE).ok();
    here.goes_on();
    here.vmm.shut_down();
}

fn ends() {
    let (mut here, _) = doubtful();
    // A session that ends sends several.
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        here.vmm.signal(signal);
    }
    is_logged(&here, "another signal discards the VM");
    is_in_doubt(&here);
    here.vmm.signal_again(libc::SIGTERM);
    ended(&mut here);

    let (mut here, _) = doubtful();
    let refused = here.vmm.api().put("vmm.shutdown", "");
    assert!(refused.status == REFUSED && refused.body.contains("force"), "{refused:?}");
    is_in_doubt(&here);
    here.vmm.api().put("vmm.shutdown", FORCE).ok();
    ended(&mut here);
}

/// It has ended without its guest having run again.
#[track_caller]
fn ended(here: &mut Here) {
    assert_eq!(here.vmm.wait_for_exit(), 0, "{}", here.vmm.output());
    let names = here.vmm.event_names();
    let left = names.iter().position(|name| name == "migration-unanswered").expect("the doubt");
    assert!(!names[left..].iter().any(|name| name.starts_with("resum")), "{names:?}");
    assert!(!is_locked(&here.disk.file));
}

#[track_caller]
fn is_logged(here: &Here, line: &str) {
    wait_for(line, || here.vmm.output().contains(line).then_some(()));
}

fn came_before() {
    let mut here = Here::start();
    let there = here.there(Transport::Unix, 0, Some((COMPLETE, Fault::Held)));
    let option = format!("destination_url={}", there.url);
    let sender = here.vmm.remote_spawn(&["send-migration", "--wait", &option]);
    there.wait_until_held();
    let canceller = here.vmm.remote_spawn(&["migration-cancel"]);
    here.vmm.wait_for_event("migration-cancelling");
    here.vmm.signal(libc::SIGTERM);
    is_logged(&here, "told to end");
    there.finish();
    let cancelled = finish(canceller);
    let error = String::from_utf8_lossy(&cancelled.stderr).into_owned();
    assert!(!cancelled.status.success() && error.contains("docs/adopt.md"), "{error}");
    let sent = finish(sender);
    assert_eq!(sent.status.code(), Some(4), "{sent:?}");
    is_in_doubt(&here);
    // The signal came before the doubt, and this one is the first.
    here.vmm.signal_again(libc::SIGTERM);
    is_logged(&here, "another signal discards the VM");
    is_in_doubt(&here);
    here.vmm.remote_ok(&["resume", "--force"]);
    here.goes_on();
    here.vmm.shut_down();
}
