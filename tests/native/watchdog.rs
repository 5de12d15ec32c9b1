// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The watchdog: a guest that sets it back runs on; one that no longer does is reset, where it is, where it has moved,
//! and where it was restored, but not while it is paused.

use std::time::{Duration, Instant};

use guest_reader::abi::{self, param};

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};
use crate::snapshot::{place, save};

/// The time after which a guest is reset.
const PERIOD: Duration = Duration::from_secs(20);
/// A clock that begins anew does not run out within this; how late the guest and these tests run is left to the rest.
const BEGUN_ANEW: Duration = Duration::from_secs(14);
/// For two periods, and what comes with them.
const LIMIT: Duration = Duration::from_mins(4);
const EXPIRED: &str = "watchdog-expired";
const SET_BACK_GPA: u64 = abi::PARAM_GPA + param::WATCHDOG;

pub fn add(suite: &mut Suite) {
    suite.add_long("watchdog::a_guest_that_stops_setting_it_back_is_reset", LIMIT, expires);
    suite.add_long("watchdog::it_runs_out_after_a_restore_and_not_in_a_pause", LIMIT, restored);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("watchdog::it_runs_out_after_{}", mode.name());
        suite.add_long(&name, LIMIT, move || moved(mode));
    }
}

/// A guest that has set its watchdog back.
fn guest() -> Vmm {
    const GUEST: &str = "workload=random-write mem=16M pace_ns=1000000 watchdog=1";
    let vmm = VmmBuilder::guest(1, "size=128M,shared=on", GUEST).with(&["--watchdog"]).start();
    let errors = vmm.guest().status().expect("the guest's status").errors();
    assert_eq!(errors, 0, "it has no watchdog");
    vmm.wait_for_work(10);
    vmm
}

/// From now on it does not.
fn stop_setting_back(vmm: &Vmm) {
    vmm.guest().memory().set_word(SET_BACK_GPA, 0).expect("the parameter page");
}

fn has_expired(vmm: &Vmm) -> bool {
    vmm.event_names().iter().any(|name| name == EXPIRED)
}

/// Waits until the watchdog has run out, no sooner than a clock does that begins at `since`, and until the guest has
/// booted again and sets it back.
#[track_caller]
fn assert_is_reset(vmm: &Vmm, since: Instant) {
    let before = vmm.events().len();
    assert!(!has_expired(vmm), "too early: {}", vmm.output());
    vmm.wait_for_event(EXPIRED);
    assert!(since.elapsed() >= BEGUN_ANEW, "after {:?}: {}", since.elapsed(), vmm.output());
    vmm.wait_for_later_events(before, &["rebooted"]);
    // From its command line.
    wait_for("the guest to boot again", || {
        let word = vmm.guest().memory().word(SET_BACK_GPA).expect("the parameter page");
        (word == 1).then_some(())
    });
    vmm.wait_for_work(10);
    vmm.verify();
    let count = vmm.event_names().iter().filter(|name| *name == EXPIRED).count();
    assert_eq!(count, 1, "it was reset once: {}", vmm.output());
}

/// Time itself is what happens here, and in the others.
fn expires() {
    let vmm = guest();
    let until = Instant::now() + PERIOD + Duration::from_secs(3);
    while Instant::now() < until {
        assert!(!has_expired(&vmm), "it sets its watchdog back: {}", vmm.output());
        std::thread::sleep(Duration::from_millis(200));
    }
    stop_setting_back(&vmm);
    assert_is_reset(&vmm, Instant::now());
    vmm.shut_down();
}

fn restored() {
    let (_folder, url) = place();
    let vmm = guest();
    stop_setting_back(&vmm);
    save(&vmm, &url);
    let there = Vmm::empty();
    there.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    assert_is_reset(&there, Instant::now());
    there.shut_down();
    // Meanwhile a whole period has passed for this one.
    assert!(!has_expired(&vmm), "it is paused: {}", vmm.output());
    vmm.remote_ok(&["resume"]);
    assert_is_reset(&vmm, Instant::now());
    vmm.shut_down();
}

fn moved(mode: Mode) {
    let vmm = guest();
    stop_setting_back(&vmm);
    let there = Vmm::empty();
    migrate(vmm, &there, Transport::Unix, mode);
    assert_is_reset(&there, Instant::now());
    there.shut_down();
}
