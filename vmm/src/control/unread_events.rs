// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ACPI events that the guest has not read: their interrupt is raised again. It is an edge, and lost if the
//! guest has not enabled it yet: a kernel that boots looks for devices before it listens for new ones, so a
//! device that is announced in between would stay unseen.
//!
//! Owns when the interrupt is raised again. Must never raise it for a guest that is paused.

use std::time::{Duration, Instant};

use super::{VmLifecycle, Vmm};

/// Time after which the interrupt is raised again for the first time.
const FIRST_INTERVAL: Duration = Duration::from_secs(1);

/// The interval doubles up to this one: a guest without ACPI never reads the event.
const INTERVAL_MAX: Duration = Duration::from_secs(64);

/// When the interrupt of an unread event is raised again.
#[derive(Default)]
pub(super) struct UnreadEvents {
    next: Option<Repetition>,
}

#[derive(Clone, Copy)]
struct Repetition {
    /// Number of the newest event.
    event: u64,
    at: Instant,
    interval: Duration,
}

impl UnreadEvents {
    /// Whether the interrupt is to be raised `now`. `unread`: the newest event, if the guest could read it.
    fn is_due(&mut self, unread: Option<u64>, now: Instant) -> bool {
        let Some(event) = unread else {
            self.next = None;
            return false;
        };
        let (is_due, interval) = match self.next.filter(|next| next.event == event) {
            None => (false, FIRST_INTERVAL),
            Some(next) if next.at > now => return false,
            Some(next) => (true, (next.interval * 2).min(INTERVAL_MAX)),
        };
        self.next = Some(Repetition { event, at: now + interval, interval });
        is_due
    }
}

impl Vmm {
    /// When [`Vmm::repeat_unread_events`] has to be called next.
    pub(super) fn repeats_events_at(&self) -> Option<Instant> {
        self.unread_events.next.map(|next| next.at)
    }

    /// Raises the interrupt of ACPI events again that the guest has not read, if that is due.
    pub(super) fn repeat_unread_events(&mut self) {
        let machine = match &self.vm {
            VmLifecycle::Live(machine) if !machine.is_paused() => Some(machine),
            _ => None,
        };
        let unread = machine.and_then(|machine| machine.unread_event());
        let is_due = self.unread_events.is_due(unread, Instant::now());
        if let Some(machine) = machine.filter(|_| is_due) {
            machine.repeat_unread_events();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_repeated_until_it_is_read_ever_more_rarely() {
        let (mut events, start) = (UnreadEvents::default(), Instant::now());
        let mut due_s = Vec::new();
        for second in 0..200 {
            if events.is_due(Some(1), start + Duration::from_secs(second)) {
                due_s.push(second);
            }
        }
        assert_eq!(due_s, [1, 3, 7, 15, 31, 63, 127, 191]);
        // Another event begins anew, also when the first is still unread.
        assert!(!events.is_due(Some(2), start + Duration::from_secs(200)));
        assert!(events.is_due(Some(2), start + Duration::from_secs(201)));
        assert!(!events.is_due(None, start + Duration::from_secs(1000)) && events.next.is_none());
    }
}
