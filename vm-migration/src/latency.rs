// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long faults waited for the peer: in total, and for each thread.
//!
//! Owns the histograms. A thread is identified by its name, which the machine gives it (`vcpu0`), so that
//! this crate need not know what a vCPU is. It must never measure anything itself.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest fault latency that is resolved: one hour, in microseconds.
const LATENCY_MAX_US: u64 = 3_600_000_000;

/// Most threads with statistics of their own: as many vCPUs as there can be, and as many others.
const THREADS_MAX: usize = 512;

/// Divisor of a bucket's width: a bucket spans a quarter of its lower bound, so that a median and a p99
/// are apart in the chart.
const BUCKET_GROWTH: u64 = 4;

/// Quantiles of latencies in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationLatency)]
#[expect(missing_docs, reason = "quantiles name themselves")]
pub struct LatencySnapshot {
    pub count: u64,
    pub min: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

/// A bucket of fault latencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationLatencyBucket)]
pub struct LatencyBucket {
    /// Lower bound in microseconds, inclusive.
    pub from_us: u64,
    /// Upper bound in microseconds, exclusive.
    pub below_us: u64,
    /// Number of faults.
    pub count: u64,
}

/// Fault latencies of one thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationThreadLatency)]
pub struct ThreadLatency {
    /// Name of the thread: `vcpu` and a number for a vCPU.
    pub name: String,
    /// Latencies of its faults.
    pub latency_us: LatencySnapshot,
}

struct OfThread {
    name: String,
    histogram: Histogram<u32>,
}

/// All measured latencies.
pub(crate) struct Latencies {
    all: Histogram<u64>,
    threads: BTreeMap<u32, OfThread>,
}

impl Latencies {
    pub(crate) fn new() -> Self {
        let all = Histogram::new_with_max(LATENCY_MAX_US, 3)
            .expect("the bounds are constants that the histogram accepts");
        Self { all, threads: BTreeMap::new() }
    }

    /// Records a wait of `thread`, where that is known.
    pub(crate) fn record(&mut self, thread: Option<u32>, latency_us: u64) {
        self.all.saturating_record(latency_us);
        let Some(id) = thread else { return };
        if let Some(known) = self.threads.get_mut(&id) {
            known.histogram.saturating_record(latency_us);
        } else if self.threads.len() < THREADS_MAX
            && let Ok(mut histogram) = Histogram::new_with_max(LATENCY_MAX_US, 2)
        {
            histogram.saturating_record(latency_us);
            self.threads.insert(id, OfThread { name: name_of(id), histogram });
        }
    }

    pub(crate) fn snapshot(&self) -> LatencySnapshot {
        summary(&self.all)
    }

    /// The distribution over all threads, without empty buckets.
    pub(crate) fn buckets(&self) -> Vec<LatencyBucket> {
        let mut list: Vec<LatencyBucket> = Vec::new();
        let mut bucket = LatencyBucket { from_us: 0, below_us: 1, count: 0 };
        for value in self.all.iter_recorded() {
            let at_us = value.value_iterated_to();
            while at_us >= bucket.below_us {
                if bucket.count > 0 {
                    list.push(bucket);
                }
                let from_us = bucket.below_us;
                let below_us = from_us + from_us.div_ceil(BUCKET_GROWTH);
                bucket = LatencyBucket { from_us, below_us, count: 0 };
            }
            bucket.count += value.count_since_last_iteration();
        }
        list.extend((bucket.count > 0).then_some(bucket));
        list
    }

    /// The latencies of each thread, by name: `vcpu2` comes before `vcpu10`.
    pub(crate) fn threads(&self) -> Vec<ThreadLatency> {
        let of = |thread: &OfThread| ThreadLatency {
            name: thread.name.clone(),
            latency_us: summary(&thread.histogram),
        };
        let mut list: Vec<ThreadLatency> = self.threads.values().map(of).collect();
        list.sort_by(|left, right| {
            (left.name.len(), &left.name).cmp(&(right.name.len(), &right.name))
        });
        list
    }
}

/// A duration in microseconds, saturating.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The name of a thread of this process, or else its ID: back ends in other processes fault as well.
fn name_of(thread: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
    name.map_or_else(|_| format!("thread {thread}"), |name| name.trim_end().to_owned())
}

fn summary<C: hdrhistogram::Counter>(histogram: &Histogram<C>) -> LatencySnapshot {
    let at = |quantile| histogram.value_at_quantile(quantile);
    LatencySnapshot {
        count: histogram.len(),
        min: if histogram.is_empty() { 0 } else { histogram.min() },
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: histogram.max(),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn threads_are_told_apart_by_name_and_all_are_counted_together() {
        let mut latencies = Latencies::new();
        let this = stoppable_thread::Builder::new("vcpu7");
        // SAFETY: gettid has no preconditions.
        let this = this.spawn(|| unsafe { libc::gettid() }.cast_unsigned());
        latencies.record(Some(u32::MAX), 10);
        latencies.record(None, 30);
        // The thread may have ended by now: then its ID is its name.
        latencies.record(Some(this.unwrap().join().unwrap()), 20);
        assert_eq!(latencies.snapshot().count, 3);
        assert_eq!(latencies.threads().len(), 2);
        // SAFETY: as above.
        let here = name_of(unsafe { libc::gettid() }.cast_unsigned());
        assert!(!here.starts_with("thread "), "{here}");
    }

    #[test]
    fn threads_beyond_the_limit_are_counted_with_all() {
        let mut latencies = Latencies::new();
        for id in 0..1000 {
            latencies.record(Some(0x4000_0000 + id), 5);
        }
        assert_eq!(latencies.snapshot().count, 1000);
        assert_eq!(latencies.threads().len(), THREADS_MAX);
    }

    proptest! {
        #[test]
        fn every_wait_is_in_one_bucket(waits in prop::collection::vec(0u64..10_000_000, 0..200)) {
            let mut latencies = Latencies::new();
            for wait in &waits {
                latencies.record(None, *wait);
            }
            let buckets = latencies.buckets();
            let count: u64 = buckets.iter().map(|bucket| bucket.count).sum();
            prop_assert_eq!(count, waits.len() as u64);
            prop_assert!(buckets.is_sorted_by(|left, right| left.below_us <= right.from_us));
            prop_assert!(buckets.iter().all(|bucket| bucket.from_us < bucket.below_us));
        }
    }
}
