// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Device counters.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device's counters, by the names under which the API shows them.
pub trait Counters: Send + Sync {
    /// The counters now; they wrap at 2^64.
    fn counters(&self) -> BTreeMap<&'static str, u64>;
}

/// One counter. Updates are independent of each other, so no order is asked for.
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
