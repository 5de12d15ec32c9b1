// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Device counters.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of a device, with their names in the API.
pub trait Counters: Send + Sync {
    /// The current values, which wrap at 2^64.
    fn counters(&self) -> BTreeMap<&'static str, u64>;
}

/// A counter. Updates are independent of each other, so relaxed ordering suffices.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
