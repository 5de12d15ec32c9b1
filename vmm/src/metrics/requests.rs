// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is counted of requests to the API: how they ended, and how long they took.
//!
//! Owns these counts. It must never count by what a client names: endpoints are those of the table, so that a client cannot
//! make any number of them.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use super::families::Family;
use super::text::{Bound, Observed, Page, Value};

/// Upper bounds of durations: most requests take a millisecond or less, those that wait for a disk or a migration any
/// time.
const BOUNDS: [Bound; 8] = [
    (500, "0.0005"),
    (1_000, "0.001"),
    (5_000, "0.005"),
    (25_000, "0.025"),
    (100_000, "0.1"),
    (1_000_000, "1.0"),
    (10_000_000, "10.0"),
    (60_000_000, "60.0"),
];

/// Name of all that has no endpoint.
const UNKNOWN: &str = "unknown";

/// How requests end.
const OUTCOMES: [&str; 3] = ["success", "refused", "failed"];

#[derive(Debug, Default)]
struct Counted {
    /// By outcome.
    outcomes: [u64; OUTCOMES.len()],
    /// By bucket, and those beyond all bounds.
    durations: [u64; BOUNDS.len() + 1],
    sum_us: u64,
}

/// All requests so far. Locked by the threads that serve HTTP, for one addition or one copy.
#[derive(Debug, Default)]
pub struct Requests(Mutex<BTreeMap<&'static str, Counted>>);

impl Requests {
    /// Counts a request that was answered with this status. `endpoint`: `None` if there is no such.
    pub fn note(&self, endpoint: Option<&'static str>, status: u16, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let outcome = match status {
            ..400 => 0,
            400..500 => 1,
            _ => 2,
        };
        let bucket = BOUNDS.partition_point(|(bound_us, _)| *bound_us < took_us);
        let mut all = self.0.lock();
        let counted = all.entry(endpoint.unwrap_or(UNKNOWN)).or_default();
        counted.sum_us = counted.sum_us.saturating_add(took_us);
        let counts = [counted.outcomes.get_mut(outcome), counted.durations.get_mut(bucket)];
        for count in counts.into_iter().flatten() {
            *count += 1;
        }
    }

    /// Adds its metrics.
    pub fn add_to(&self, page: &mut Page) {
        for (endpoint, counted) in &*self.0.lock() {
            for (outcome, count) in OUTCOMES.iter().zip(counted.outcomes) {
                page.add(Family::ApiRequests, &[endpoint, outcome], Value::whole(count));
            }
            let mut count = 0;
            let up_to = counted.durations.iter().map(|in_bucket| {
                count += in_bucket;
                count
            });
            let up_to = up_to.collect();
            let observed = Observed { up_to, count, sum_us: counted.sum_us };
            page.histogram(Family::ApiDuration, &[endpoint], &BOUNDS, &observed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::Format;
    use super::*;

    #[test]
    fn requests_are_counted_by_endpoint_outcome_and_duration() {
        let requests = Requests::default();
        requests.note(Some("vm.info"), 200, Duration::from_micros(500));
        requests.note(Some("vm.info"), 204, Duration::from_micros(501));
        requests.note(Some("vm.info"), 404, Duration::from_secs(61));
        requests.note(None, 404, Duration::ZERO);
        requests.note(Some("vm.boot"), 500, Duration::MAX);
        let mut page = Page::default();
        requests.add_to(&mut page);
        let text = page.write(Format::OpenMetrics);
        for line in [
            r#"godwit_api_requests_total{endpoint="vm.info",outcome="success"} 2"#,
            r#"godwit_api_requests_total{endpoint="vm.info",outcome="refused"} 1"#,
            r#"godwit_api_requests_total{endpoint="unknown",outcome="refused"} 1"#,
            r#"godwit_api_requests_total{endpoint="vm.boot",outcome="failed"} 1"#,
            r#"godwit_api_request_duration_seconds_bucket{endpoint="vm.info",le="0.0005"} 1"#,
            r#"godwit_api_request_duration_seconds_bucket{endpoint="vm.info",le="0.001"} 2"#,
            r#"godwit_api_request_duration_seconds_bucket{endpoint="vm.info",le="60.0"} 2"#,
            r#"godwit_api_request_duration_seconds_bucket{endpoint="vm.info",le="+Inf"} 3"#,
            r#"godwit_api_request_duration_seconds_count{endpoint="vm.info"} 3"#,
            r#"godwit_api_request_duration_seconds_sum{endpoint="vm.info"} 61.001001"#,
        ] {
            assert!(text.lines().any(|it| it == line), "no {line} in\n{text}");
        }
    }
}
