// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The progress document of a migration as metrics.
//!
//! Owns which figure is which metric. It must never give what a side does not know as zero: that is left out.

use serde_json::Value as Json;
use vm_migration::document::{FaultSnapshot, ProgressDocument};
use vm_migration::{FaultWaits, Phase, Progress, Side};

use super::families::Family;
use super::text::{Bound, Observed, Page, Value};

/// Upper bounds of waits for a page: from a few round trips of a network within a rack to lost connections.
const WAIT_BOUNDS: [Bound; 16] = [
    (50, "5e-05"),
    (100, "0.0001"),
    (200, "0.0002"),
    (500, "0.0005"),
    (1_000, "0.001"),
    (2_000, "0.002"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (20_000, "0.02"),
    (50_000, "0.05"),
    (100_000, "0.1"),
    (200_000, "0.2"),
    (500_000, "0.5"),
    (1_000_000, "1.0"),
    (10_000_000, "10.0"),
    (60_000_000, "60.0"),
];

/// States of a page server, as in the document.
const PAGE_SERVER_STATES: [&str; 3] = ["ready", "serving", "failed"];

/// A name as the document has it; empty if there is none.
fn name(value: impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Json::String(name)) => name,
        _ => String::new(),
    }
}

/// Adds the metrics of a migration.
pub fn add(page: &mut Page, progress: &Progress) {
    let document = progress.snapshot();
    add_document(page, &document);
    if document.side == Side::Destination {
        let bounds: Vec<u64> = WAIT_BOUNDS.iter().map(|(bound_us, _)| *bound_us).collect();
        let FaultWaits { up_to, count, sum_us } = progress.fault_waits(&bounds);
        let observed = Observed { up_to, count, sum_us };
        page.histogram(Family::PostcopyFaultWait, &[], &WAIT_BOUNDS, &observed);
    }
}

fn add_document(page: &mut Page, document: &ProgressDocument) {
    let whole = |value: Option<u64>| value.map(Value::whole);
    let micros = |value: Option<u64>| value.map(Value::micros);
    page.info(
        Family::Migration,
        &[
            &name(document.side),
            &name(document.mode),
            &name(document.convergence),
            &name(document.faults.source),
        ],
    );
    let phases: Vec<String> = Phase::ALL.iter().map(ToString::to_string).collect();
    let phases: Vec<&str> = phases.iter().map(String::as_str).collect();
    page.state(Family::MigrationPhase, &phases, &document.phase.to_string());
    if let Some(began_ms) = document.began_unix_ms {
        page.add(Family::MigrationStart, &[], Value::millis(began_ms));
        page.add(Family::MigrationElapsed, &[], Value::millis(document.elapsed_ms));
    }
    page.add(Family::MigrationPostcopy, &[], Value::flag(document.postcopy));
    page.add_some(Family::MigrationMemory, &[], whole(document.total_bytes));
    page.add_some(Family::MigrationRemaining, &[], whole(document.remaining_bytes));
    for (direction, bytes) in
        [("sent", document.memory_bytes_sent), ("received", document.memory_bytes_received)]
    {
        page.add_some(Family::MigrationMoved, &[direction], whole(bytes));
    }
    let faults = &document.faults;
    for (kind, pages) in [
        ("zero", Some(document.zero_pages)),
        ("free", document.free_pages),
        ("urgent", Some(faults.urgent_pages)),
        ("bulk", Some(faults.bulk_pages)),
        ("prefetched", Some(faults.prefetched_pages)),
    ] {
        page.add_some(Family::MigrationPages, &[kind], whole(pages));
    }
    page.add_some(Family::MigrationRounds, &[], whole(document.round.map(u64::from)));
    let stalled = document.stalled_rounds.map(u64::from);
    page.add_some(Family::MigrationStalledRounds, &[], whole(stalled));
    for (kind, rate) in [
        ("link", document.link_bytes_per_s),
        ("dirty", document.dirty_bytes_per_s),
        ("bulk", document.postcopy.then_some(faults.bulk_bytes_per_s)),
        ("urgent", document.postcopy.then_some(faults.urgent_bytes_per_s)),
    ] {
        page.add_some(Family::MigrationRate, &[kind], whole(rate));
    }
    for (kind, downtime_us) in [
        ("expected", document.expected_downtime_us),
        ("allowed", document.allowed_downtime_us),
        ("measured", document.downtime_us),
    ] {
        page.add_some(Family::MigrationDowntime, &[kind], micros(downtime_us));
    }
    let throttle = document.throttle_percent.map(|percent| Value::percent(percent.into()));
    page.add_some(Family::MigrationThrottle, &[], throttle);
    if document.side == Side::Source {
        let compression = &document.compression;
        page.add(Family::MigrationCompressionInput, &[], Value::whole(compression.raw_bytes));
        page.add(Family::MigrationCompressionOutput, &[], Value::whole(compression.frame_bytes));
        let connections = Value::whole(compression.connections_on.into());
        page.add(Family::MigrationCompressing, &[], connections);
    }
    let recovery = &document.recovery;
    page.add(Family::MigrationLosses, &[], Value::whole(recovery.losses.into()));
    page.add(Family::MigrationRecoveries, &[], Value::whole(recovery.recoveries.into()));
    let left = recovery.left_ms.map(Value::millis);
    page.add_some(Family::MigrationReconnectLeft, &[], left);
    if let Some(server) = &document.page_server {
        page.state(Family::MigrationPageServer, &PAGE_SERVER_STATES, &name(server.state));
    }
    add_faults(page, faults);
}

fn add_faults(page: &mut Page, faults: &FaultSnapshot) {
    for (outcome, count) in [
        ("requested", faults.requested),
        ("merged", faults.merged),
        ("local", faults.local),
        ("elsewhere", faults.elsewhere),
    ] {
        page.add_some(Family::PostcopyFaults, &[outcome], count.map(Value::whole));
    }
    page.add_some(Family::PostcopyFaultsLeft, &[], faults.remaining_ms.map(Value::millis));
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::super::text::Format;
    use super::*;

    /// Samples alone.
    fn text(progress: &Progress) -> String {
        let mut page = Page::default();
        add(&mut page, progress);
        let text = page.write(Format::OpenMetrics);
        text.split_inclusive('\n').filter(|line| !line.starts_with('#')).collect()
    }

    #[test]
    fn what_a_side_does_not_know_is_left_out() {
        let source = text(&Progress::new(Side::Source));
        assert!(source.contains("godwit_migration_phase{phase=\"idle\"} 1\n"), "{source}");
        assert!(source.contains("godwit_migration_phase{phase=\"failed\"} 0\n"), "{source}");
        assert!(source.contains("godwit_migration_info{side=\"source\",mode=\"\","), "{source}");
        for absent in ["received", "start_time", "fault_wait", "downtime", "page_server"] {
            assert!(!source.contains(absent), "{absent} in {source}");
        }
        let destination = text(&Progress::new(Side::Destination));
        let waits = "godwit_postcopy_fault_wait_seconds_bucket{le=\"5e-05\"} 0\n";
        assert!(destination.contains(waits), "{destination}");
        for absent in ["\"sent\"", "compression", "throttle", "rounds"] {
            assert!(!destination.contains(absent), "{absent} in {destination}");
        }
    }

    #[test]
    fn a_document_with_all_figures_has_each_family() {
        let mut document = Progress::new(Side::Source).snapshot();
        document.began_unix_ms = Some(1_700_000_000_123);
        (document.elapsed_ms, document.postcopy) = (1_500, true);
        (document.total_bytes, document.remaining_bytes) = (Some(10), Some(5));
        document.memory_bytes_received = Some(7);
        (document.link_bytes_per_s, document.dirty_bytes_per_s) = (Some(8), Some(9));
        document.downtime_us = Some(12_345);
        (document.expected_downtime_us, document.allowed_downtime_us) = (Some(1), Some(300_000));
        document.throttle_percent = Some(20);
        document.recovery.left_ms = Some(2_000);
        document.faults.requested = Some(3);
        document.faults.remaining_ms = Some(10);
        document.page_server = Some(vm_migration::document::PageServerSnapshot {
            state: vm_migration::document::PageServerState::Serving,
            socket: "/s".to_owned(),
            pid: 1,
            took_over_us: None,
            reason: None,
        });
        let mut page = Page::default();
        add_document(&mut page, &document);
        let text = page.write(Format::OpenMetrics);
        for line in [
            "godwit_migration_start_time_seconds 1700000000.123",
            "godwit_migration_elapsed_seconds 1.5",
            "godwit_migration_downtime_seconds{kind=\"measured\"} 0.012345",
            "godwit_migration_downtime_seconds{kind=\"expected\"} 0.000001",
            "godwit_migration_throttle_ratio 0.2",
            "godwit_migration_page_server{state=\"serving\"} 1",
            "godwit_migration_page_server{state=\"ready\"} 0",
            "godwit_migration_rate_bytes_per_second{kind=\"dirty\"} 9",
            "godwit_postcopy_faults_total{outcome=\"requested\"} 3",
        ] {
            assert!(text.lines().any(|it| it == line), "no {line} in\n{text}");
        }
        for family in Family::ALL {
            let name = family.definition().name();
            let is_of_a_migration = name.contains("migration") || name.contains("postcopy");
            if is_of_a_migration && *family != Family::PostcopyFaultWait {
                assert!(text.contains(&format!("# TYPE {name} ")), "{name} is missing");
            }
        }
        assert!(name(document.faults.source).is_empty());
        assert_eq!(serde_json::to_value(document.side).unwrap(), "source");
    }

    #[test]
    fn bounds_rise_and_are_what_their_text_says() {
        assert!(WAIT_BOUNDS.is_sorted());
        for (bound_us, text) in WAIT_BOUNDS {
            let seconds: f64 = text.parse().unwrap();
            assert_eq!(format!("{:.0}", seconds * 1e6), bound_us.to_string());
        }
    }
}
