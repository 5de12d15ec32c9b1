// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which units of memory are missing, which of them have been requested, and since when.
//!
//! Owns the memory ordering between a fault and the arrival of its page. A fault sets `wanted` and then
//! reads `missing`; an arrival clears `missing` and then reads `wanted`. A fault that requests its page
//! begins a wait and then reads `missing` once more, because the arrival may have looked for a wait before
//! there was one. A fence separates the two steps of each, so that at least one of the two sees the other.
//! Checked by a loom model. It wakes no thread and sends nothing.

use std::time::Duration;

use page_bitmap::{PageBitmap, change_then_look};

use crate::waits::Waits;

/// What a fault found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultLookup {
    /// The unit is not missing: it is to be shown.
    Present,
    /// It is missing and this is the first fault of it: the source is to be asked.
    First,
    /// It is missing and the source has been asked.
    Repeated,
}

/// What an arrival found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Units that were missing and are not any more.
    pub cleared: u64,
    /// Units that faults had asked for.
    pub wanted: u64,
}

/// Two bits a unit, by region, and the waits.
pub(super) struct Demand {
    /// Contents are still to arrive.
    missing: Vec<PageBitmap>,
    /// There was a fault, and the source has been asked. Never cleared.
    wanted: Vec<PageBitmap>,
    waits: Waits,
}

impl Demand {
    /// Nothing is wanted yet of what is missing.
    pub(super) fn new(missing: Vec<PageBitmap>) -> Self {
        let wanted = missing.iter().map(|map| PageBitmap::new(map.len())).collect();
        Self { missing, wanted, waits: Waits::new() }
    }

    /// What is missing, one map a region.
    pub(super) fn missing(&self) -> &[PageBitmap] {
        &self.missing
    }

    pub(super) fn is_missing(&self, region: usize, unit: u64) -> bool {
        self.missing[region].get(unit)
    }

    /// There was a fault in this unit at some time.
    pub(super) fn is_wanted(&self, region: usize, unit: u64) -> bool {
        self.wanted[region].get(unit)
    }

    /// A thread faulted in a unit.
    pub(super) fn fault(&self, region: usize, unit: u64, thread: Option<u32>) -> FaultLookup {
        let first = self.wanted[region].set(unit);
        change_then_look();
        if !self.is_missing(region, unit) {
            return FaultLookup::Present;
        }
        if !first {
            return FaultLookup::Repeated;
        }
        self.waits.begin(region, unit, thread);
        change_then_look();
        if self.is_missing(region, unit) {
            return FaultLookup::First;
        }
        // It came between the two looks, and its arrival may have found no wait to end.
        let _ = self.waits.end(region, unit);
        FaultLookup::Present
    }

    /// Units are in place. `wake` is called for each that is wanted, and after it `waited` with the
    /// thread that waited and for how long, where that is known.
    ///
    /// # Errors
    /// Those of `wake`; the rest of the units is not looked at then.
    pub(super) fn arrive<E>(
        &self,
        (region, first, count): (usize, u64, u64),
        mut wake: impl FnMut(u64) -> Result<(), E>,
        mut waited: impl FnMut(Option<u32>, Duration),
    ) -> Result<Arrival, E> {
        let cleared = self.missing[region].claim_range(first..first + count);
        change_then_look();
        let mut wanted = 0;
        for unit in (first..first + count).filter(|unit| self.is_wanted(region, *unit)) {
            wanted += 1;
            wake(unit)?;
            if let Some((thread, took)) = self.waits.end(region, unit) {
                waited(thread, took);
            }
        }
        Ok(Arrival { cleared, wanted })
    }

    /// How long the longest wait has lasted.
    pub(super) fn longest_wait(&self) -> Duration {
        self.waits.longest()
    }

    /// Units of a region that are wanted and still missing; see [`begin_wishes`](Self::begin_wishes).
    pub(super) fn wishes(&self, region: usize) -> impl Iterator<Item = u64> {
        self.wanted[region].common_runs(&self.missing[region]).flatten()
    }

    /// Orders a change of the connections that may be used before the look at the requests, and counts all waits as
    /// beginning now.
    pub(super) fn begin_wishes(&self) {
        change_then_look();
        self.waits.restart_clock();
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::convert::Infallible;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn page() -> Arc<Demand> {
        let missing = PageBitmap::new(1);
        missing.set(0);
        Arc::new(Demand::new(vec![missing]))
    }

    fn arrive(demand: &Demand) -> bool {
        let mut woken = false;
        let wake = |_| {
            woken = true;
            Ok::<_, Infallible>(())
        };
        let Ok(arrival) = demand.arrive((0, 0, 1), wake, |_, _| {});
        assert_eq!(arrival.cleared, 1);
        woken
    }

    /// A page arrives at any moment of its fault: no wait lasts beyond both, and a thread that waits for
    /// the page is woken by one of the two.
    #[test]
    fn no_wait_outlives_the_arrival_of_its_page() {
        loom::model(|| {
            let demand = page();
            let reader = {
                let demand = Arc::clone(&demand);
                thread::spawn(move || demand.fault(0, 0, None))
            };
            let woken = arrive(&demand);
            let look = reader.join().unwrap();
            assert!(woken || look == FaultLookup::Present);
            assert!(demand.waits.is_empty(), "a wait that nothing will end");
        });
    }

    /// The same with a second fault of the page.
    #[test]
    fn no_wait_outlives_the_arrival_of_a_page_that_two_need() {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(3);
        bounded.check(|| {
            let demand = page();
            let readers = [1, 2].map(|thread_id| {
                let demand = Arc::clone(&demand);
                thread::spawn(move || demand.fault(0, 0, Some(thread_id)))
            });
            arrive(&demand);
            let looks = readers.map(|reader| reader.join().unwrap());
            assert!(looks != [FaultLookup::First, FaultLookup::First]);
            assert!(demand.waits.is_empty(), "a wait that nothing will end");
        });
    }
}
