// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Readahead for postcopy faults, from the stride of a thread's last faults.
//!
//! Owns a small state for each faulting thread: the distance between its last faults, and a window of pages
//! to request along. The window doubles each time the thread faults where the prediction ended, and is
//! halved when it does not. Pure arithmetic: it knows neither what is missing nor which thread asks.

use std::collections::HashMap;

/// Most pages that are predicted at once.
pub(crate) const WINDOW_MAX: u64 = 32;

/// Longest distance between two faults, in units, that counts as a stride.
const STRIDE_MAX: i64 = 64;

/// Most threads with a history: vCPUs and back ends. Beyond that the history is cleared.
const THREADS_MAX: usize = 1024;

/// Steps past the window that still count as predicted: pages in between may have been there already.
const SLACK: i64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct State {
    region: usize,
    last: i64,
    /// 0 while unknown.
    stride: i64,
    window: u64,
    /// The stride has been seen twice.
    steady: bool,
}

/// History of the faulting threads.
#[derive(Debug, Default)]
pub(crate) struct Strides(HashMap<u32, State>);

/// Predicted pages: `count` of them, `stride` units apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guess {
    pub stride: i64,
    pub count: u64,
}

impl Strides {
    /// Notes a fault of `thread` at `unit`, and predicts its next ones.
    pub(crate) fn fault(&mut self, thread: u32, region: usize, unit: u64) -> Option<Guess> {
        if self.0.len() >= THREADS_MAX && !self.0.contains_key(&thread) {
            self.0.clear();
        }
        let at = i64::try_from(unit).ok()?;
        let first = State { region, last: at, ..State::default() };
        let state = self.0.entry(thread).or_insert(first);
        if state.region != region {
            *state = first;
            return None;
        }
        let distance = at - state.last;
        state.last = at;
        let steps = if state.stride != 0 && distance % state.stride == 0 {
            distance / state.stride
        } else {
            0
        };
        let window = i64::try_from(state.window).unwrap_or(0);
        if steps > 0 && steps <= window + 1 + SLACK {
            // Inside the window: the predicted pages have not arrived yet. Past it: the prediction was
            // right.
            if steps > window || !state.steady {
                state.window = (state.window * 2).clamp(1, WINDOW_MAX);
            }
            state.steady = true;
        } else {
            state.window /= 2;
            if state.window == 0 {
                let near = distance != 0 && distance.abs() <= STRIDE_MAX;
                state.stride = if near { distance } else { 0 };
                state.steady = false;
            }
            return None;
        }
        Some(Guess { stride: state.stride, count: state.window })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    /// Number of faults of a thread that advances by a stride, if all predicted pages arrive in time.
    fn walk(stride: i64, touches: i64) -> (u64, u64) {
        let mut strides = Strides::default();
        let mut here = std::collections::BTreeSet::new();
        let (mut faults, mut wasted) = (0, 0);
        for index in 0..touches {
            let at = 100_000 + index * stride;
            if here.remove(&at) {
                continue;
            }
            faults += 1;
            if let Some(guess) = strides.fault(7, 0, u64::try_from(at).unwrap()) {
                for step in 1..=i64::try_from(guess.count).unwrap() {
                    here.insert(at + step * guess.stride);
                }
            }
        }
        wasted += here.len() as u64;
        (faults, wasted)
    }

    #[test]
    fn a_walk_soon_faults_once_a_window() {
        for stride in [1, -1, 3, 64] {
            let (faults, wasted) = walk(stride, 1000);
            assert!(faults <= 10 + 1000 / WINDOW_MAX, "stride {stride}: {faults} faults");
            assert!(wasted <= WINDOW_MAX, "stride {stride}: {wasted} wasted");
        }
    }

    #[test]
    fn random_faults_bring_next_to_nothing_along() {
        let mut strides = Strides::default();
        let mut number = 1u64;
        let mut along = 0;
        for _ in 0..10_000 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            along += strides.fault(1, 0, number >> 40).map_or(0, |guess| guess.count);
        }
        assert!(along < 200, "{along} pages");
    }

    #[test]
    fn a_wrong_guess_halves_the_window() {
        let mut strides = Strides::default();
        let mut at = 0;
        let mut guess = None;
        for _ in 0..10 {
            at += guess.map_or(1, |guess: Guess| guess.count + 1);
            guess = strides.fault(1, 0, at);
        }
        assert_eq!(guess.unwrap().count, WINDOW_MAX);
        assert!(strides.fault(1, 0, at + 100_000).is_none());
        assert_eq!(strides.0[&1].window, WINDOW_MAX / 2);
    }

    #[test]
    fn threads_and_regions_do_not_mix() {
        let mut strides = Strides::default();
        for unit in 0..4 {
            strides.fault(1, 0, unit);
            assert!(strides.fault(2, usize::try_from(unit).unwrap() % 2, unit * 7).is_none());
        }
        assert!(strides.fault(1, 0, 6).is_some());
    }

    proptest! {
        #[test]
        fn no_sequence_overflows_or_exceeds_the_window(
            faults in prop::collection::vec((0u32..3, 0usize..2, any::<u64>()), 0..200),
        ) {
            let mut strides = Strides::default();
            for (thread, region, unit) in faults {
                if let Some(guess) = strides.fault(thread, region, unit) {
                    prop_assert!((1..=WINDOW_MAX).contains(&guess.count));
                    prop_assert!(guess.stride != 0 && guess.stride.abs() <= STRIDE_MAX);
                }
            }
        }
    }
}
