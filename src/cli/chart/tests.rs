// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The picture has what the report has, and nothing runs into anything else.

use serde_json::json;

use super::*;

/// Draws the report of a migration that has not begun, with other values.
fn drawn(values: serde_json::Value) -> String {
    svg(&crate::cli::tests::report(values), "/run/a.sock")
}

fn latency(count: u64, p50: u64, p99: u64, max: u64) -> serde_json::Value {
    json!({"count": count, "min": 0, "p50": p50, "p90": p50, "p99": p99, "p999": p99, "max": max})
}

fn sound(picture: &str) {
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
}

fn postcopy() -> serde_json::Value {
    json!({
        "progress": {"side": "destination", "phase": "done", "elapsed_ms": 900, "mode": "postcopy",
            "postcopy": true, "began_unix_ms": 1_716_278_535_542_u64, "total_bytes": 1 << 30,
            "memory_bytes_received": 1 << 30, "round": null,
            "downtime_us": 4200, "faults": {"seen": 12, "latency_us":
                latency(12, 80, 900, 1000)}},
        "phases": [{"at_ms": 0, "phase": "listen"}, {"at_ms": 0, "phase": "negotiate"},
            {"at_ms": 2, "phase": "receive"}, {"at_ms": 3, "phase": "prepare"},
            {"at_ms": 4, "phase": "run"}, {"at_ms": 10, "phase": "fault"},
            {"at_ms": 900, "phase": "done"}],
        "timeline": [
            {"at_ms": 10, "remaining_bytes": 1 << 30, "moved_bytes": 0, "faults": 0, "urgent_pages": 0},
            {"at_ms": 500, "remaining_bytes": 1 << 29, "moved_bytes": 1 << 29, "faults": 10, "urgent_pages": 0},
            {"at_ms": 900, "remaining_bytes": 0, "moved_bytes": 1 << 30, "faults": 12, "urgent_pages": 0}],
        "latency": [{"from_us": 70, "below_us": 90, "count": 10},
            {"from_us": 900, "below_us": 1100, "count": 2}],
        "threads": [{"name": "vcpu0", "latency_us": latency(7, 80, 90, 90)},
            {"name": "<vcpu1>", "latency_us": latency(5, 81, 90, 90)}],
        "more": [1, 2],
    })
}

#[test]
fn a_postcopy_becomes_panels_bars_lines_and_a_row_for_each_thread() {
    let picture = drawn(postcopy());
    sound(&picture);
    let count = |what: &str| picture.matches(what).count();
    assert_eq!(count("<title>"), 2, "bars");
    assert_eq!(count("<polyline"), 4, "moved, to come, rate, faults");
    assert_eq!(count("stroke-dasharray"), 2, "two quantiles");
    assert!(
        picture.contains(
            "Migration of /run/a.sock (postcopy): done at the destination, 2024-05-21 08:02:15 UTC"
        ),
        "{picture}"
    );
    assert!(
        picture
            .contains("900 ms in all, downtime 4.2 ms, memory moved: 1 GiB for 1 GiB, faults: 12"),
        "{picture}"
    );
    assert!(picture.contains(">vcpu0<"), "{picture}");
    assert!(picture.contains("&lt;vcpu1&gt;") && !picture.contains("<vcpu1>"));
}

#[test]
fn phases_are_told_in_words_that_do_not_meet() {
    let picture = drawn(postcopy());
    assert_eq!(picture.matches("class=\"phase\"").count(), 6);
    assert!(!picture.contains("listen"), "waiting for a source is no part of it");
    assert!(picture.contains("1 negotiate 2 ms    2 receive 1 ms    3 prepare 1 ms"), "{picture}");
    // Only what is wide enough has its number in the band.
    assert!(picture.contains(">5</text>") && !picture.contains(">3</text>"), "{picture}");
    assert!(!picture.contains("rotate("));
}

#[test]
fn a_precopy_shows_its_rounds_and_how_fast_the_guest_writes() {
    let picture = drawn(json!({
        "progress": {"side": "source", "phase": "done", "elapsed_ms": 3000, "mode": "precopy",
            "round": 3, "memory_bytes_sent": 3 << 20, "downtime_us": 30_000,
            "faults": {"seen": null, "latency_us": null}},
        "phases": [{"at_ms": 0, "phase": "precopy"}, {"at_ms": 3000, "phase": "done"}],
        "timeline": [{"at_ms": 0, "remaining_bytes": 4096, "moved_bytes": 0, "faults": 0, "urgent_pages": 0},
            {"at_ms": 3000, "remaining_bytes": 0, "moved_bytes": 3 << 20, "faults": 0, "urgent_pages": 0}],
        "rounds": [
            {"at_ms": 0, "round": 1, "remaining_bytes": 1 << 30, "dirty_bytes_per_s": null},
            {"at_ms": 2000, "round": 2, "remaining_bytes": 1 << 28, "dirty_bytes_per_s": 1 << 27},
            {"at_ms": 2500, "round": 3, "remaining_bytes": 1 << 20, "dirty_bytes_per_s": 1 << 26}],
    }));
    sound(&picture);
    assert_eq!(picture.matches("<title>round ").count(), 3);
    assert!(picture.contains("round 2: 256 MiB") && picture.contains("rounds: 3"), "{picture}");
    assert!(picture.contains("the guest writes") && picture.contains("MiB/s"), "{picture}");
    assert!(!picture.contains("Faults"), "there are none in precopy");
}

#[test]
fn what_is_not_known_is_not_drawn() {
    let bucket = json!({"latency": [{"from_us": 0, "below_us": 1, "count": 1}]});
    let huge = json!({"timeline": [
        {"at_ms": u64::MAX, "moved_bytes": u64::MAX, "remaining_bytes": u64::MAX,
            "faults": 0, "urgent_pages": 0},
        {"at_ms": u64::MAX, "moved_bytes": 0, "faults": 0, "urgent_pages": 0}]});
    for value in [json!({}), bucket, huge] {
        let picture = drawn(value);
        sound(&picture);
        assert!(!picture.contains("downtime"), "{picture}");
    }
}

#[test]
fn amounts_and_times_are_short() {
    let times = [0.0, 950.0, 4200.0, 61_500.0, 2_500_000.0].map(time_of);
    assert_eq!(times, ["0", "950 us", "4.2 ms", "61.5 ms", "2.5 s"]);
    assert_eq!([512.0, 1_572_864.0].map(bytes_of), ["512 B", "1.5 MiB"]);
    assert_eq!([7.0, 12_500.0].map(count_of), ["7", "12.5k"]);
}
