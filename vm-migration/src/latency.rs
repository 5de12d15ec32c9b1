// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long faults waited for the peer: in total, and for each thread.
//!
//! Owns the histograms. A thread is identified by its name, which the machine gives it (`vcpu0`), so that
//! this crate need not know what a vCPU is. It must never measure anything itself.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
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

/// How long faults waited, counted up to some bounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultWaits {
    /// Faults up to each bound, those up to the bounds before it included.
    pub up_to: Vec<u64>,
    /// All faults.
    pub count: u64,
    /// Their waits together, in microseconds.
    pub sum_us: u64,
}

#[derive(Clone)]
struct OfThread {
    /// Once it was looked up.
    name: Option<String>,
    histogram: Histogram<u32>,
}

/// All measured latencies.
#[derive(Clone)]
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

    /// Those of all threads, without those of each.
    pub(crate) fn together(&self) -> Self {
        Self { all: self.all.clone(), threads: BTreeMap::new() }
    }

    /// Records a wait of `thread`, where that is known.
    pub(crate) fn record(&mut self, thread: Option<u32>, latency_us: u64) {
        self.all.saturating_record(latency_us);
        let Some(id) = thread else { return };
        if let Some(known) = self.threads.get_mut(&id) {
            known.histogram.saturating_record(latency_us);
        } else if self.threads.len() < THREADS_MAX
            && let Some(mut histogram) = thread_histogram()
        {
            histogram.saturating_record(latency_us);
            self.threads.insert(id, OfThread { name: None, histogram });
        }
    }

    /// Adds the latencies that a thread has recorded by itself, to within a hundredth.
    pub(crate) fn add(&mut self, thread: u32, name: Option<&String>, own: &Histogram<u32>) {
        for value in own.iter_recorded() {
            let count = value.count_at_value();
            self.all.saturating_record_n(value.value_iterated_to(), count.into());
        }
        if let Some(known) = self.threads.get_mut(&thread) {
            known.name = known.name.take().or_else(|| name.cloned());
            for value in own.iter_recorded() {
                known
                    .histogram
                    .saturating_record_n(value.value_iterated_to(), value.count_at_value());
            }
        } else if self.threads.len() < THREADS_MAX {
            let (name, histogram) = (name.cloned(), own.clone());
            self.threads.insert(thread, OfThread { name, histogram });
        }
    }

    pub(crate) fn snapshot(&self) -> LatencySnapshot {
        summary(&self.all)
    }

    /// Faults of all threads up to each of these bounds, which rise, and all faults. A wait is known as exactly as the
    /// histogram keeps it, to a thousandth.
    pub(crate) fn up_to(&self, bounds_us: &[u64]) -> (Vec<u64>, u64) {
        let mut counts = vec![0; bounds_us.len()];
        for value in self.all.iter_recorded() {
            let bucket = bounds_us.partition_point(|bound| *bound < value.value_iterated_to());
            if let Some(count) = counts.get_mut(bucket) {
                *count += value.count_since_last_iteration();
            }
        }
        let mut sum = 0;
        for count in &mut counts {
            sum += *count;
            *count = sum;
        }
        (counts, self.all.len())
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

    /// IDs of the threads whose names were not found yet.
    fn unnamed(&self) -> Vec<u32> {
        let unnamed = self.threads.iter().filter(|(_, thread)| thread.name.is_none());
        unnamed.map(|(id, _)| *id).collect()
    }

    fn set_names(&mut self, names: impl IntoIterator<Item = (u32, String)>) {
        for (id, name) in names {
            if let Some(thread) = self.threads.get_mut(&id) {
                thread.name.get_or_insert(name);
            }
        }
    }

    /// The latencies of each thread, by name: `vcpu2` comes before `vcpu10`. One without a name has its ID: it ended
    /// before, or belongs to a back end in another process.
    pub(crate) fn threads(&self) -> Vec<ThreadLatency> {
        let of = |(id, thread): (&u32, &OfThread)| ThreadLatency {
            name: thread.name.clone().unwrap_or_else(|| format!("thread {id}")),
            latency_us: summary(&thread.histogram),
        };
        let mut list: Vec<ThreadLatency> = self.threads.iter().map(of).collect();
        list.sort_by(|left, right| {
            (left.name.len(), &left.name).cmp(&(right.name.len(), &right.name))
        });
        list
    }
}

/// An empty histogram for one thread.
pub(crate) fn thread_histogram() -> Option<Histogram<u32>> {
    Histogram::new_with_max(LATENCY_MAX_US, 2).ok()
}

/// A duration in microseconds, saturating.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Looks up the names of the threads of this process that have none yet, on a thread that may open files: those that
/// record latencies may not, and are not to wait for it.
pub(crate) fn name_threads(latencies: &Mutex<Latencies>) {
    let unnamed = latencies.lock().unnamed();
    let names: Vec<_> = unnamed.into_iter().filter_map(|id| Some((id, name_of(id)?))).collect();
    latencies.lock().set_names(names);
}

/// Name of a thread of this process.
pub(crate) fn name_of(thread: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm")).ok()?;
    Some(name.trim_end().to_owned())
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
        let latencies = Mutex::new(Latencies::new());
        let record = |thread, latency_us| latencies.lock().record(thread, latency_us);
        let names = || -> Vec<String> {
            let threads = latencies.lock().threads();
            threads.into_iter().map(|thread| thread.name).collect()
        };
        let of_none = format!("thread {}", u32::MAX);
        record(Some(u32::MAX), 10);
        record(None, 30);
        let (named, is_named) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let this = stoppable_thread::spawn("vcpu7", move || {
            // SAFETY: gettid has no preconditions.
            tell.send(unsafe { libc::gettid() }.cast_unsigned()).unwrap();
            is_named.recv().unwrap_err();
        });
        let id = told.recv().unwrap();
        record(Some(id), 20);
        assert_eq!(names().len(), 2);
        assert!(names().contains(&format!("thread {id}")), "nothing was looked up: {:?}", names());
        name_threads(&latencies);
        assert_eq!(names(), ["vcpu7".to_owned(), of_none.clone()]);
        assert_eq!(latencies.lock().snapshot().count, 3);
        drop(named);
        this.unwrap().join().unwrap();
        name_threads(&latencies);
        assert_eq!(names(), ["vcpu7".to_owned(), of_none], "the name stays");
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
        fn waits_are_counted_up_to_each_bound(waits in prop::collection::vec(0u64..2_000, 0..200)) {
            let mut latencies = Latencies::new();
            for wait in &waits {
                latencies.record(None, *wait);
            }
            // So small ones are kept exactly.
            let bounds = [0, 10, 999, 1_500];
            let expected = bounds.map(|bound| waits.iter().filter(|it| **it <= bound).count() as u64);
            prop_assert_eq!(latencies.up_to(&bounds), (expected.to_vec(), waits.len() as u64));
        }

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
