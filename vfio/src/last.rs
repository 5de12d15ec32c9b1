// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that is mapped when all is populated, by kind of page, and the sample of each that says how long that takes.
//!
//! Owns the counters. It must never make a thread wait: those that map add to them without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use memory::{PageKind, RamRegion};

use super::dma::DmaTarget;
use super::pin_time::LastProgress;

/// Memory of one kind that is mapped last.
#[derive(Debug)]
pub(super) struct LastKind {
    kind: PageKind,
    total_bytes: u64,
    mapped_bytes: AtomicU64,
    /// Whether a thread has begun to map the sample.
    is_begun: AtomicBool,
    sample_bytes: AtomicU64,
    sample_ns: AtomicU64,
}

/// Pages, whether they are populated or not.
fn kind_of(region: &RamRegion) -> PageKind {
    PageKind { is_there: false, ..region.page_kind(&(0..0)) }
}

/// What `target` maps last of `regions`.
pub(super) fn kinds(target: &dyn DmaTarget, regions: &[Arc<RamRegion>]) -> Vec<LastKind> {
    let mut kinds: Vec<LastKind> = Vec::new();
    for region in regions.iter().filter(|region| target.maps_last(region)) {
        let kind = kind_of(region);
        let bytes = region.usable_bytes();
        match kinds.iter_mut().find(|last| last.kind == kind) {
            Some(last) => last.total_bytes = last.total_bytes.saturating_add(bytes),
            None => kinds.push(LastKind {
                kind,
                total_bytes: bytes,
                mapped_bytes: AtomicU64::new(0),
                is_begun: AtomicBool::new(false),
                sample_bytes: AtomicU64::new(0),
                sample_ns: AtomicU64::new(0),
            }),
        }
    }
    kinds
}

/// The kind of a region, if it is mapped last.
pub(super) fn of<'a>(kinds: &'a [LastKind], region: &RamRegion) -> Option<&'a LastKind> {
    if kinds.is_empty() {
        return None;
    }
    let kind = kind_of(region);
    kinds.iter().find(|last| last.kind == kind)
}

impl LastKind {
    /// Whether the calling thread is to map the sample: once.
    pub fn begins_sample(&self) -> bool {
        !self.is_begun.load(Ordering::Relaxed) && !self.is_begun.swap(true, Ordering::Relaxed)
    }

    /// Notes the sample.
    pub fn sampled(&self, bytes: u64, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sample_ns.store(ns, Ordering::Relaxed);
        // Read first: what is known has its time.
        self.sample_bytes.store(bytes, Ordering::Release);
        self.mapped(bytes);
    }

    /// Notes what is mapped.
    pub fn mapped(&self, bytes: u64) {
        self.mapped_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn progress(&self) -> LastProgress {
        let bytes = self.sample_bytes.load(Ordering::Acquire);
        let took = Duration::from_nanos(self.sample_ns.load(Ordering::Relaxed));
        LastProgress {
            left_bytes: self.total_bytes.saturating_sub(self.mapped_bytes.load(Ordering::Relaxed)),
            sample: (bytes > 0).then_some((bytes, took)),
        }
    }
}
