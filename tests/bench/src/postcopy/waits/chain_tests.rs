// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waits in what a kernel has recorded.

use super::*;
use crate::postcopy::waits::events::parse;

const BY_THREADS_TEXT: &str = include_str!("recorded/uffd.txt");
const OWN_TEXT: &str = include_str!("recorded/own.txt");

/// Of the first record; the last two are of the background.
fn threads() -> Roles {
    let own = [32555, 32556, 32545, 32546, 32549, 32550, 32278, 32279, 32548, 32277];
    Roles {
        vcpus: BTreeSet::from([32555, 32556]),
        readers: BTreeSet::from([32545, 32546]),
        receivers: BTreeSet::from([32549, 32550]),
        servers: BTreeSet::from([32278, 32279]),
        own: BTreeSet::from(own),
    }
}

fn vcpu_alone() -> Roles {
    let own = [1305, 1306, 1028, 1029];
    Roles {
        vcpus: BTreeSet::from([1305, 1306]),
        servers: BTreeSet::from([1028, 1029]),
        own: BTreeSet::from(own),
        ..Roles::default()
    }
}

fn times(steps: &[Step]) -> Vec<u64> {
    steps.iter().map(|step| step.us).collect()
}

/// By step: without a processor behind threads of both processes, and behind others.
fn without(steps: &[Step]) -> Vec<(u64, u64)> {
    assert!(steps.iter().all(|step| step.without.idle_us == 0));
    steps.iter().map(|step| (step.without.own_us, step.without.others_us)).collect()
}

#[test]
fn two_vcpus_at_once_are_followed_through_the_threads_that_they_share() {
    let followed = follow(&parse(BY_THREADS_TEXT), &threads(), Way::Threads);
    let Followed { waits, otherwise, unclear } = followed;
    // The record ends in the middle of a third one.
    assert_eq!((waits.len(), otherwise, unclear), (2, 0, 1));
    assert!(waits.iter().all(|steps| steps.len() == Way::Threads.steps().len()));
    assert_eq!(times(&waits[0]), [7, 10, 6, 6, 12, 5, 6, 31, 9, 5]);
    let first = [(7, 0), (0, 0), (0, 0), (6, 0), (0, 0), (0, 0), (6, 0), (6, 0), (0, 0), (0, 5)];
    assert_eq!(without(&waits[0]), first);
    // The receiver did not sleep when the second answer came.
    assert_eq!(times(&waits[1]), [2, 9, 5, 10, 6, 4, 0, 18, 6, 41]);
    let second = [(2, 0), (0, 0), (0, 0), (0, 10), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (41, 0)];
    assert_eq!(without(&waits[1]), second);
}

#[test]
fn a_vcpu_that_asks_itself_is_followed_once_it_is_known_what_was_read_before() {
    let Followed { waits, otherwise, unclear } = follow(&parse(OWN_TEXT), &vcpu_alone(), Way::Own);
    assert_eq!((waits.len(), otherwise, unclear), (1, 0, 1));
    assert_eq!(times(&waits[0]), [10, 4, 4, 6, 4, 8, 9, 7]);
    let expected = [(0, 0), (0, 0), (0, 4), (0, 0), (0, 0), (8, 0), (0, 0), (0, 0)];
    assert_eq!(without(&waits[0]), expected);
}

#[test]
fn an_answer_without_a_page_is_no_end_of_a_wait() {
    let text = OWN_TEXT.replace("sys_exit: NR 46 = 4128", "sys_exit: NR 46 = 32");
    let text = text.replace("sys_exit: NR 45 = 4128", "sys_exit: NR 45 = 32");
    let followed = follow(&parse(&text), &vcpu_alone(), Way::Own);
    assert_eq!((followed.waits.len(), followed.otherwise), (0, 1));
}

#[test]
fn a_vcpu_woken_by_another_thread_has_got_its_page_otherwise() {
    // A thread of the background wakes the second vCPU.
    let by = |line: &str, thread: &str| {
        let is_wake_up = line.contains("sched_waking: comm=vcpu1");
        if is_wake_up { line.replace("mig-urgent-32549", thread) } else { line.to_owned() }
    };
    let text: Vec<String> =
        BY_THREADS_TEXT.lines().map(|line| by(line, "mig-pages-32548")).collect();
    let followed = follow(&parse(&text.join("\n")), &threads(), Way::Threads);
    assert_eq!((followed.waits.len(), followed.otherwise, followed.unclear), (1, 1, 1));
}

#[test]
fn nothing_is_followed_in_nothing() {
    for way in [Way::Threads, Way::Own] {
        assert_eq!(follow(&[], &threads(), way), Followed::default());
    }
}
