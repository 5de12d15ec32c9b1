// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The answer to `migrate-check`, as text or as JSON, and what the exit code says of it.
//!
//! Owns the text: the verdict, what was found, and what was measured. Text of a destination is shown as the VMM has passed
//! it on, which has cut it and taken out what controls a terminal. It must never judge by itself: whether a migration is
//! possible is what the VMM says.

use std::fmt::Write as _;

use vmm::api::types::{MigrationCheck, MigrationForecast};

use super::{RemoteError, printed, write_out};

/// The subcommand.
pub(super) const MIGRATE_CHECK: &str = "migrate-check";

/// Writes the answer to stdout.
///
/// # Errors
/// The migration would not succeed, or the answer cannot be read or written.
pub(super) fn show(answer: String, as_json: bool, is_pretty: bool) -> Result<(), RemoteError> {
    let unread = |source| RemoteError::Answer { command: MIGRATE_CHECK.to_owned(), source };
    let check: MigrationCheck = serde_json::from_str(&answer).map_err(unread)?;
    let shown =
        if as_json { printed(MIGRATE_CHECK, answer, is_pretty)? + "\n" } else { text(&check) };
    write_out(&shown)
        .map_err(|source| RemoteError::Output { command: MIGRATE_CHECK.to_owned(), source })?;
    if check.possible {
        return Ok(());
    }
    Err(RemoteError::NotPossible { problems: check.problems.len() })
}

fn text(check: &MigrationCheck) -> String {
    let mut text = String::new();
    let mut line = |what: &str, value: &str| {
        let _ = writeln!(text, "{what:<14}{value}");
    };
    line("possible", if check.possible { "yes" } else { "NO" });
    line("destination", check.destination.as_deref().unwrap_or("not reached"));
    for problem in &check.problems {
        line("problem", &format!("{}: {}", problem.side, problem.text));
    }
    for warning in &check.warnings {
        line("warning", &format!("{}: {}", warning.side, warning.text));
    }
    let rate = |rate: Option<u64>| {
        rate.map_or("not measured".to_owned(), |rate| format!("{} a second", bytes(rate)))
    };
    line("link", &rate(check.link_bytes_per_second));
    let round_trip = check.round_trip_us.map(|us| format!("{us} us"));
    line("round trip", round_trip.as_deref().unwrap_or("not measured"));
    line("memory", &format!("{} to move", bytes(check.memory_bytes)));
    line("written", &rate(check.dirty_bytes_per_second));
    line("precopy", &forecast(check.precopy));
    line("postcopy", &forecast(check.postcopy));
    text
}

fn forecast(forecast: Option<MigrationForecast>) -> String {
    let Some(MigrationForecast { duration_ms, downtime_ms, converges }) = forecast else {
        return "no forecast".to_owned();
    };
    let (duration, downtime) = (time(duration_ms), time(downtime_ms));
    if converges {
        format!("{duration}, with a downtime of {downtime}")
    } else {
        format!("does not converge; stopped nevertheless, the downtime would be {downtime}")
    }
}

fn time(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{ms} ms"),
        10_000..600_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        600_000..36_000_000 => format!("{} min", ms / 60_000),
        _ => format!("{} h", ms / 3_600_000),
    }
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes.div_ceil(1 << 10)),
        0x10_0000..0x2_8000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::exit;
    use super::*;

    fn answer() -> Value {
        json!({
            "version": 1, "possible": true, "destination": "godwit 1.0.0", "problems": [], "warnings": [],
            "link_bytes_per_second": 1_250_000_000_u64, "round_trip_us": 210,
            "dirty_bytes_per_second": 52_428_800, "memory_bytes": 4_294_967_296_u64,
            "precopy": {"duration_ms": 3700, "downtime_ms": 24, "converges": true},
            "postcopy": {"duration_ms": 13_456, "downtime_ms": 12, "converges": true},
        })
    }

    fn shown(answer: &Value) -> String {
        serde_json::from_value(answer.clone()).map(|check| text(&check)).unwrap_or_default()
    }

    #[test]
    fn what_was_found_is_a_line_each() {
        let wanted = "\
possible      yes
destination   godwit 1.0.0
link          1192 MiB a second
round trip    210 us
memory        4096 MiB to move
written       50 MiB a second
precopy       3700 ms, with a downtime of 24 ms
postcopy      13.4 s, with a downtime of 12 ms
";
        assert_eq!(shown(&answer()), wanted);
    }

    #[test]
    fn problems_come_first_and_what_is_not_known_says_so() {
        let mut refused = answer();
        refused["possible"] = json!(false);
        refused["problems"] = json!([{"side": "destination", "text": "no tap"}]);
        refused["warnings"] = json!([{"side": "source", "text": "it writes much"}]);
        refused["precopy"]["converges"] = json!(false);
        for unknown in ["destination", "link_bytes_per_second", "round_trip_us", "postcopy"] {
            refused[unknown] = Value::Null;
        }
        let wanted = "\
possible      NO
destination   not reached
problem       destination: no tap
warning       source: it writes much
link          not measured
round trip    not measured
memory        4096 MiB to move
written       50 MiB a second
precopy       does not converge; stopped nevertheless, the downtime would be 24 ms
postcopy      no forecast
";
        assert_eq!(shown(&refused), wanted);
        let error = show(refused.to_string(), true, false).expect_err("it is not possible");
        assert_eq!(error.exit_code(), exit::NOT_POSSIBLE);
        assert!(show(answer().to_string(), false, false).is_ok());
        let error = show("{}".to_owned(), true, false).expect_err("no answer");
        assert_eq!(error.exit_code(), exit::FAILED);
    }

    #[test]
    fn every_size_has_a_unit() {
        assert_eq!([0, 1, 1 << 20, 10 << 30].map(bytes), ["0 KiB", "1 KiB", "1 MiB", "10 GiB"]);
        assert_eq!(bytes(u64::MAX), "17179869183 GiB");
        let times = [9999, 10_000, 600_000, 36_000_000];
        assert_eq!(times.map(time), ["9999 ms", "10.0 s", "10 min", "10 h"]);
    }
}
