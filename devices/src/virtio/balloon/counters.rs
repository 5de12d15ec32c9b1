// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a balloon.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::shared::Shared;
use crate::virtio::Counters;
use crate::virtio::counters::Counter;

/// Operations of the device so far.
#[derive(Debug, Default)]
pub(super) struct OperationCounters {
    pub(super) inflated_pages: Counter,
    pub(super) deflated_pages: Counter,
    /// Bytes of the balloon that were discarded.
    pub(super) inflated_given_back_bytes: Counter,
    pub(super) reported_bytes: Counter,
    pub(super) reported_given_back_bytes: Counter,
    /// Number of discard calls, to relate to the bytes.
    pub(super) runs: Counter,
    /// Bytes that could not be discarded when inflated.
    pub(super) deferred_bytes: Counter,
    pub(super) hinted_bytes: Counter,
    /// Page numbers outside RAM, or not contiguous.
    pub(super) rejected_pages: Counter,
    pub(super) failures: Counter,
}

/// Counters of a balloon, and the guest's latest memory statistics.
pub struct BalloonCounters(pub(super) Weak<Shared>);

impl Counters for BalloonCounters {
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        let Some(shared): Option<Arc<Shared>> = self.0.upgrade() else { return BTreeMap::new() };
        let operations = &shared.counters;
        let mut counters = BTreeMap::from([
            ("target_bytes", shared.target_bytes()),
            ("actual_bytes", shared.actual_bytes()),
            ("inflated_pages", operations.inflated_pages.get()),
            ("deflated_pages", operations.deflated_pages.get()),
            ("inflated_given_back_bytes", operations.inflated_given_back_bytes.get()),
            ("reported_bytes", operations.reported_bytes.get()),
            ("reported_given_back_bytes", operations.reported_given_back_bytes.get()),
            ("give_back_calls", operations.runs.get()),
            ("deferred_bytes", operations.deferred_bytes.get()),
            ("hinted_bytes", operations.hinted_bytes.get()),
            ("rejected_pages", operations.rejected_pages.get()),
            ("give_back_failures", operations.failures.get()),
        ]);
        counters.extend(shared.statistics().named());
        counters
    }
}
