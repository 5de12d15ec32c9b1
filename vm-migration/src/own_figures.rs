// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is counted of faults and of the pages that come, by each vCPU that resolves its own faults for itself.
//!
//! Owns the counters and latencies of each such vCPU, on cache lines of their own; they are added up when they
//! are read. Must never be written by a thread other than the vCPU's.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use hdrhistogram::Histogram;
use parking_lot::Mutex;

use crate::latency::{Latencies, name_of, thread_histogram};

/// What is counted, by its name in the progress document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Faults,
    Requested,
    Merged,
    Local,
    Elsewhere,
    UrgentPages,
    BulkPages,
    PrefetchedPages,
    WaitedMicros,
    ReceivedBytes,
    ZeroPages,
    /// Of missing memory, what is not missing any more.
    ArrivedBytes,
}

const COUNTS: usize = Count::ArrivedBytes as usize + 1;

/// Those of one vCPU.
#[derive(Default)]
#[repr(align(128))]
struct OwnFigures {
    counts: [AtomicU64; COUNTS],
    /// ID of the vCPU's thread; 0 before its first fault.
    thread: AtomicU32,
    name: OnceLock<String>,
    /// Locked by that thread for one entry, and by those who read it.
    latency: Mutex<Option<Histogram<u32>>>,
}

/// Those of all vCPUs, by number.
#[derive(Default)]
pub(crate) struct FiguresOfVcpus(OnceLock<Box<[OwnFigures]>>);

impl FiguresOfVcpus {
    /// Sets how many there are. Once; those of a second engine are counted there, too.
    pub(crate) fn begin(&self, vcpus: usize) {
        let _ = self.0.set((0..vcpus).map(|_| OwnFigures::default()).collect());
    }

    fn all(&self) -> &[OwnFigures] {
        self.0.get().map_or(&[], |all| all)
    }

    /// Counts for a vCPU on its thread; false if there is no such vCPU.
    pub(crate) fn count(&self, vcpu: usize, what: Count, by: u64) -> bool {
        let Some(own) = self.all().get(vcpu) else { return false };
        own.counts[what as usize].fetch_add(by, Relaxed);
        true
    }

    pub(crate) fn sum(&self, what: Count) -> u64 {
        let of = |own: &OwnFigures| own.counts[what as usize].load(Relaxed);
        self.all().iter().map(of).fold(0, u64::saturating_add)
    }

    /// Notes the thread of a vCPU, on it.
    pub(crate) fn is_thread_of(&self, vcpu: usize, thread: Option<u32>) {
        if let (Some(own), Some(thread)) = (self.all().get(vcpu), thread) {
            own.thread.store(thread, Relaxed);
        }
    }

    /// Records how long the thread of a vCPU has waited, on it; false if `thread` is another one.
    pub(crate) fn record(&self, vcpu: usize, thread: Option<u32>, latency_us: u64) -> bool {
        let Some(own) = self.all().get(vcpu) else { return false };
        if thread != Some(own.thread.load(Relaxed)) {
            return false;
        }
        let mut latency = own.latency.lock();
        let histogram = match &mut *latency {
            Some(histogram) => histogram,
            none => match thread_histogram() {
                Some(made) => none.insert(made),
                None => return false,
            },
        };
        histogram.saturating_record(latency_us);
        true
    }

    /// Looks up the names of the threads that have none yet.
    pub(crate) fn name_threads(&self) {
        for own in self.all().iter().filter(|own| own.name.get().is_none()) {
            let thread = own.thread.load(Relaxed);
            if let Some(name) = Some(thread).filter(|id| *id != 0).and_then(name_of) {
                let _ = own.name.set(name);
            }
        }
    }

    /// Adds the latencies to those of other threads.
    pub(crate) fn add_to(&self, latencies: &mut Latencies) {
        for own in self.all() {
            // Added without the lock, for which the vCPU would wait.
            let histogram = own.latency.lock().clone();
            if let Some(histogram) = histogram {
                latencies.add(own.thread.load(Relaxed), own.name.get(), &histogram);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_vcpu_counts_for_itself_and_all_are_added_up() {
        let figures = FiguresOfVcpus::default();
        assert!(!figures.count(0, Count::Faults, 1), "there is no vCPU yet");
        figures.begin(2);
        assert!(figures.count(0, Count::Faults, 3) && figures.count(1, Count::Faults, 4));
        assert!(figures.count(1, Count::ArrivedBytes, 1));
        assert!(!figures.count(2, Count::Faults, 1));
        assert_eq!((figures.sum(Count::Faults), figures.sum(Count::ArrivedBytes)), (7, 1));
    }

    #[test]
    fn latencies_are_those_of_the_thread_and_part_of_all() {
        let figures = FiguresOfVcpus::default();
        figures.begin(2);
        figures.is_thread_of(1, Some(u32::MAX));
        assert!(figures.record(1, Some(u32::MAX), 700));
        assert!(!figures.record(1, Some(7), 9), "the wait of another thread ends here");
        assert!(!figures.record(1, None, 9) && !figures.record(0, Some(u32::MAX), 9));
        let mut latencies = Latencies::new();
        latencies.record(Some(u32::MAX), 3);
        figures.add_to(&mut latencies);
        let all = latencies.snapshot();
        assert_eq!((all.count, all.min), (2, 3));
        assert!(all.max.abs_diff(700) <= 7, "{all:?}");
        let threads = latencies.threads();
        assert_eq!((threads.len(), threads[0].latency_us.count), (1, 2));
    }

    #[test]
    fn no_two_vcpus_write_to_one_cache_line() {
        assert!(size_of::<OwnFigures>().is_multiple_of(128) && align_of::<OwnFigures>() == 128);
    }
}
