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

/// Result of looking up a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultLookup {
    /// The unit is not missing: it is to be made visible.
    Present,
    /// The unit is missing and this is its first fault: it is to be requested from the source.
    First,
    /// The unit is missing and has been requested.
    Repeated,
}

/// Counts of an arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Units that were missing and are not any more.
    pub cleared: u64,
    /// Units that faults had requested.
    pub wanted: u64,
}

/// The missing and the requested units of all regions, two bits a unit, and the running waits.
pub(super) struct Demand {
    /// Contents are still to arrive.
    missing: Vec<PageBitmap>,
    /// A fault requested it from the source. Never cleared.
    wanted: Vec<PageBitmap>,
    waits: Waits,
}

impl Demand {
    /// Starts with no request for any of the missing units.
    pub(super) fn new(missing: Vec<PageBitmap>) -> Self {
        let wanted = missing.iter().map(|map| PageBitmap::new(map.len())).collect();
        Self { missing, wanted, waits: Waits::new() }
    }

    /// The missing units, one map a region.
    pub(super) fn missing(&self) -> &[PageBitmap] {
        &self.missing
    }

    pub(super) fn is_missing(&self, region: usize, unit: u64) -> bool {
        self.missing[region].get(unit)
    }

    /// True if there was a fault in this unit at any time.
    pub(super) fn is_wanted(&self, region: usize, unit: u64) -> bool {
        self.wanted[region].get(unit)
    }

    /// Notes a fault of `thread` in a unit.
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
        // The unit arrived between the two looks, and the arrival may not have seen this wait to end it.
        let _ = self.waits.end(region, unit);
        FaultLookup::Present
    }

    /// Marks units as in place. For each that was requested, `wake` is called, and after it `waited` with the
    /// thread that waited and for how long, where that is known.
    ///
    /// # Errors
    /// Those of `wake`; the rest of the units is left unmarked then.
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

    /// Duration of the longest running wait.
    pub(super) fn longest_wait(&self) -> Duration {
        self.waits.longest()
    }

    /// Units of a region that are requested and still missing; see [`begin_wishes`](Self::begin_wishes).
    pub(super) fn wishes(&self, region: usize) -> impl Iterator<Item = u64> {
        self.wanted[region].common_runs(&self.missing[region]).flatten()
    }

    /// Orders a change of the usable connections before the look at the requests, and restarts the clocks of
    /// all waits.
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

    /// A page arrives at any moment of its fault: the wait never outlasts both, and the thread that waits for
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

    /// The same with a second fault on the page.
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
