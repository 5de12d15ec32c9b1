// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When each thread of a trace ran, slept, or could run and did not.
//!
//! Owns the states of threads. Must never know what they are for.

use std::collections::{BTreeMap, BTreeSet};

use super::events::{Event, IDLE, What};

/// A stretch in which a thread could run and did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ready {
    from_us: u64,
    to_us: u64,
    /// The thread that ran meanwhile on the processor that it got.
    behind: u32,
}

/// Time without a processor, by who had the one on which the thread ran then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "each has its unit")]
pub struct Without {
    /// A thread of the migration's two processes.
    pub own_us: u64,
    /// Another thread.
    pub others_us: u64,
    /// None: until an idle processor has woken up.
    pub idle_us: u64,
}

impl Without {
    pub fn all_us(self) -> u64 {
        self.own_us + self.others_us + self.idle_us
    }

    pub fn and(self, other: Self) -> Self {
        Self {
            own_us: self.own_us + other.own_us,
            others_us: self.others_us + other.others_us,
            idle_us: self.idle_us + other.idle_us,
        }
    }
}

/// A time when a sleeping thread was woken, and when it ran. The first is a place in the trace as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeUp {
    /// Place of the event.
    pub at: usize,
    pub woken_us: u64,
    pub runs_us: u64,
}

/// What has run on a processor: from when, and which thread.
#[derive(Default)]
struct Processor(Vec<(u64, u32)>);

impl Processor {
    /// A switch from one thread to another. Returns what has run since a time.
    fn switch(&mut self, us: u64, (from, to): (u32, u32), since_us: u64) -> Vec<Ready> {
        match self.0.last_mut() {
            // A switch was not recorded.
            Some((_, last)) => *last = from,
            None => self.0.push((0, from)),
        }
        let (mut pieces, mut to_us) = (Vec::new(), us);
        for (began, behind) in self.0.iter().rev().copied() {
            let from_us = began.max(since_us);
            if from_us < to_us {
                pieces.push(Ready { from_us, to_us, behind });
                to_us = from_us;
            }
            if began <= since_us {
                break;
            }
        }
        self.0.push((us, to));
        pieces.reverse();
        pieces
    }
}

/// What is known of a thread.
#[derive(Default)]
struct Thread {
    ready: Vec<Ready>,
    wake_ups: Vec<WakeUp>,
    /// Place and time at which it got a processor or lost it.
    switches: Vec<(usize, u64, bool)>,
    sleeps: bool,
    /// Since when it could run, and by the waking at which place.
    since: Option<(u64, Option<usize>)>,
}

/// All threads of a trace.
pub struct Threads {
    threads: BTreeMap<u32, Thread>,
    own: BTreeSet<u32>,
}

impl Threads {
    /// `own`: those of the migration's two processes.
    pub fn of(events: &[Event], own: &BTreeSet<u32>) -> Self {
        let mut threads: BTreeMap<u32, Thread> = BTreeMap::new();
        let mut processors: BTreeMap<u32, Processor> = BTreeMap::new();
        for (at, event) in events.iter().enumerate() {
            match event.what {
                What::Waking(woken) => {
                    let thread = threads.entry(woken).or_default();
                    // One that runs, or waits for a processor already, is not woken by that.
                    if thread.sleeps {
                        thread.sleeps = false;
                        thread.since = Some((event.us, Some(at)));
                    }
                }
                What::Switch { from, sleeps, to } => {
                    if from != IDLE {
                        let thread = threads.entry(from).or_default();
                        thread.switches.push((at, event.us, false));
                        thread.sleeps = sleeps;
                        thread.since = (!sleeps).then_some((event.us, None));
                    }
                    let thread = threads.entry(to).or_default();
                    thread.switches.push((at, event.us, true));
                    thread.sleeps = false;
                    let since = if to == IDLE { None } else { thread.since.take() };
                    let processor = processors.entry(event.processor).or_default();
                    let since_us = since.map_or(event.us, |(us, _)| us);
                    thread.ready.extend(processor.switch(event.us, (from, to), since_us));
                    if let Some((woken_us, Some(at))) = since {
                        thread.wake_ups.push(WakeUp { at, woken_us, runs_us: event.us });
                    }
                }
                What::Enter { .. } | What::Exit { .. } => {}
            }
        }
        Self { threads, own: own.clone() }
    }

    /// How long a thread had no processor between two times, and could have used one.
    pub fn without(&self, thread: u32, from_us: u64, to_us: u64) -> Without {
        let mut sum = Without::default();
        let Some(thread) = self.threads.get(&thread) else { return sum };
        let first = thread.ready.partition_point(|ready| ready.to_us <= from_us);
        for ready in thread.ready.iter().skip(first) {
            if ready.from_us >= to_us {
                break;
            }
            let us = ready.to_us.min(to_us).saturating_sub(ready.from_us.max(from_us));
            *match ready.behind {
                IDLE => &mut sum.idle_us,
                one if self.own.contains(&one) => &mut sum.own_us,
                _ => &mut sum.others_us,
            } += us;
        }
        sum
    }

    /// When a thread ran from a place of the trace on, whose time is `us`: then, if it had a processor. One that was about
    /// to sleep and lost its processor before that needs no wake-up.
    pub fn runs_from(&self, thread: u32, at: usize, us: u64) -> Option<u64> {
        let all = &self.threads.get(&thread)?.switches;
        let next = all.partition_point(|(place, ..)| *place < at);
        let has_processor = all.get(next.checked_sub(1)?).is_some_and(|(.., gets)| *gets);
        let later = all.get(next..)?.iter().find(|(.., gets)| *gets);
        if has_processor { Some(us) } else { later.map(|(_, us, _)| *us) }
    }

    /// The first wake-up of a thread between two places of the trace.
    pub fn wake_up(&self, thread: u32, from: usize, to: usize) -> Option<WakeUp> {
        let all = &self.threads.get(&thread)?.wake_ups;
        let first = all.get(all.partition_point(|one| one.at < from))?;
        (first.at < to).then_some(*first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(us: u64, what: What) -> Event {
        Event { us, processor: 3, by: 1, what }
    }

    fn switch(us: u64, from: u32, sleeps: bool, to: u32) -> Event {
        event(us, What::Switch { from, sleeps, to })
    }

    #[test]
    fn a_wait_is_for_all_that_run_there_meanwhile() {
        let mut events = vec![
            switch(100, 7, true, 8),
            event(110, What::Waking(7)),
            switch(130, 8, false, 9),
            switch(170, 9, true, IDLE),
            switch(180, IDLE, false, 7),
        ];
        let elsewhere = switch(120, 5, false, 6);
        events.insert(2, Event { processor: 0, ..elsewhere });
        let threads = Threads::of(&events, &BTreeSet::from([7, 8]));
        let all = Without { own_us: 20, others_us: 40, idle_us: 10 };
        assert_eq!(threads.without(7, 0, 1000), all);
        let part = Without { own_us: 0, others_us: 20, idle_us: 5 };
        assert_eq!(threads.without(7, 150, 175), part);
    }

    #[test]
    fn a_thread_without_a_processor_waits_for_a_busy_or_an_idle_one() {
        let events = [
            switch(100, 7, true, 8),
            event(110, What::Waking(7)),
            event(115, What::Waking(7)),
            switch(130, 8, false, 7),
            switch(140, 7, false, 9),
            switch(160, 9, true, 7),
            switch(170, 7, true, IDLE),
            event(180, What::Waking(7)),
            switch(230, IDLE, false, 7),
            event(240, What::Waking(7)),
        ];
        let threads = Threads::of(&events, &BTreeSet::from([7, 8]));
        let all = Without { own_us: 20, others_us: 20, idle_us: 50 };
        assert_eq!(threads.without(7, 0, 1000), all);
        assert_eq!(all.all_us(), 90);
        let part = Without { own_us: 5, others_us: 20, idle_us: 10 };
        assert_eq!(threads.without(7, 125, 190), part);
        assert_eq!(threads.without(7, 130, 140), Without::default());
        assert_eq!(threads.without(9, 0, 1000), Without::default());
        let first = WakeUp { at: 1, woken_us: 110, runs_us: 130 };
        let second = WakeUp { at: 7, woken_us: 180, runs_us: 230 };
        assert_eq!(threads.wake_up(7, 0, 100), Some(first));
        assert_eq!(threads.wake_up(7, 2, 8), Some(second));
        assert_eq!(threads.wake_up(7, 2, 7), None);
    }

    #[test]
    fn a_thread_that_lost_its_processor_before_it_slept_runs_without_a_wake_up() {
        let events = [
            switch(100, IDLE, false, 7),
            switch(110, 7, false, 8),
            event(130, What::Waking(7)),
            switch(150, 8, true, 7),
            event(160, What::Waking(7)),
            switch(170, 7, true, IDLE),
        ];
        let threads = Threads::of(&events, &BTreeSet::new());
        assert_eq!(threads.wake_up(7, 2, 3), None);
        assert_eq!(threads.runs_from(7, 2, 130), Some(150));
        // It has one, and needs not to wait.
        assert_eq!(threads.runs_from(7, 4, 160), Some(160));
        // It never gets one again, or is not known.
        assert_eq!(threads.runs_from(7, 6, 180), None);
        assert_eq!(threads.runs_from(9, 2, 130), None);
    }
}
