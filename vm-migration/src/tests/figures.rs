// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Figures at the end: both sides have the same, and figures that no side has sent are unknown.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::moves::{Case, postcopy};
use super::relay::{Relay, Rule};
use super::{Builder, FakeVm, Guest, LIMITS, Target, have_uffd, loopback, memory, options, send};
use crate::progress::ProgressDocument;
use crate::protocol::capabilities::FEATURE_FIGURES;
use crate::{MemoryMode, Mode};

fn value(figure: Option<u64>) -> u64 {
    figure.unwrap()
}

/// Asserts that both sides have almost the same downtime.
fn assert_downtimes_meet(source: &ProgressDocument, destination: &ProgressDocument) {
    let (ours, theirs) = (value(source.downtime_us), value(destination.downtime_us));
    assert!(ours > 0 && theirs > 0, "{ours} {theirs}");
    // They differ by the transit of two messages, which may take long on a busy machine.
    assert!(ours.abs_diff(theirs) < 5_000_000, "{ours} {theirs}");
}

#[test]
fn the_destination_of_a_precopy_knows_how_it_went() {
    let case = Case::new(memory(), memory(), 91);
    let (source, destination) = case.go(&loopback(), |o| o.downtime = Duration::from_millis(5));
    assert_eq!((source.mode, destination.mode), (Some(Mode::Precopy), Some(Mode::Precopy)));
    assert!(!source.postcopy && !destination.postcopy);
    assert_downtimes_meet(&source, &destination);
    assert!(source.round > Some(0));
    assert_eq!(source.round, destination.round);
    assert_eq!(source.memory_bytes_sent, destination.memory_bytes_sent);
    assert_eq!(source.expected_downtime_us, destination.expected_downtime_us);
    assert_eq!(source.allowed_downtime_us, destination.allowed_downtime_us);
    assert_eq!(source.faults.seen, None, "the source of a precopy is told of no faults");
    let line = destination.final_line();
    assert!(line.starts_with("precopy, ") && line.contains("downtime "), "{line}");
    assert!(!line.contains("unknown") && !line.contains("faults"), "{line}");
}

#[test]
fn both_sides_of_a_postcopy_know_what_the_other_counted() {
    if !have_uffd() {
        return;
    }
    let (source, destination) = Case::new(memory(), memory(), 92).go(&loopback(), |options| {
        postcopy(options);
        options.bandwidth_bytes_per_s = 64 << 20;
    });
    assert_eq!((source.mode, destination.mode), (Some(Mode::Postcopy), Some(Mode::Postcopy)));
    assert!(source.postcopy && destination.postcopy);
    assert_downtimes_meet(&source, &destination);
    assert!(destination.faults.seen > Some(0));
    assert_eq!(source.faults.seen, destination.faults.seen);
    assert_eq!(source.faults.latency_us, destination.faults.latency_us);
    assert_eq!(source.memory_bytes_received, destination.memory_bytes_received);
    assert_eq!(destination.memory_bytes_sent, source.memory_bytes_sent);
    let of = |side: &ProgressDocument, name| {
        let figures = side.final_figures();
        figures.into_iter().find(|figure| figure.0 == name).map(|figure| figure.1)
    };
    assert_eq!(of(&source, "faults"), of(&destination, "faults"));
    assert_eq!(of(&destination, "downtime_us"), destination.downtime_us.map(|us| us.to_string()));
}

/// Migrates through a relay that removes the feature `figures` from both sides' capabilities.
fn without_figures(mode: MemoryMode) -> (ProgressDocument, ProgressDocument) {
    let mut relay = None;
    Case::new(memory(), memory(), 93).go(&loopback(), |options| {
        options.memory_mode = mode;
        let between = Relay::start(&options.to, Rule::Without(FEATURE_FIGURES));
        options.to = relay.insert(between).address.clone();
    })
}

#[test]
fn a_peer_without_figures_gets_none_and_what_it_does_not_tell_is_unknown() {
    for mode in [MemoryMode::Precopy, MemoryMode::Postcopy] {
        if mode == MemoryMode::Postcopy && !have_uffd() {
            return;
        }
        let (source, destination) = without_figures(mode);
        assert!(source.downtime_us > Some(0), "the source measures it itself");
        assert_eq!(destination.downtime_us, None);
        assert_eq!(destination.round, None);
        assert_eq!(destination.memory_bytes_sent, None);
        assert_eq!(source.faults.seen, None);
        assert!(destination.final_line().contains("downtime unknown"));
        let named = destination.final_figures();
        assert!(
            named.iter().all(|(name, _)| !["downtime_us", "rounds"].contains(name)),
            "{named:?}"
        );
        let document = serde_json::to_value(destination).unwrap();
        assert!(document["downtime_us"].is_null() && document["round"].is_null(), "{document}");
    }
}

#[test]
fn waiting_for_a_source_is_no_part_of_the_time() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 94);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let began = Instant::now();
    // No source connects for a while: the passing of time is what is tested.
    std::thread::sleep(Duration::from_millis(1200));
    let waiting = target.progress.snapshot();
    assert_eq!((waiting.elapsed_ms, waiting.began_unix_ms), (0, None));
    let waited = began.elapsed();
    let progress = Arc::clone(&target.progress);
    send(FakeVm::new(&from, &guest), &options(&target.address)).unwrap();
    target.join().unwrap();
    let all = began.elapsed();
    let last = progress.snapshot();
    assert!(last.began_unix_ms.is_some());
    let most = u64::try_from(all.saturating_sub(waited).as_millis()).unwrap() + 50;
    assert!(last.elapsed_ms <= most, "{} ms of {most}", last.elapsed_ms);
}
