// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When the guest is told that its packets were taken.
//!
//! Owns whether that waits for a packet to the guest, so that it is interrupted once for both. Linux needs to know of
//! taken packets only to release their memory, and mostly waits for the answer of the host; it would be woken, and sleep
//! again, just before that. A guest that needs to know is told soon, and then at once for many packets to come.

use std::time::Duration;

/// The longest time that it waits after a packet.
pub(super) const HOLD_FOR: Duration = Duration::from_millis(1);
/// Packets of which the guest has not been told, at most, and the part of its queue that they may be.
const HELD_PACKETS: u16 = 8;
const HELD_QUEUE_PART: u16 = 8;
/// How often it does not wait after it has waited in vain; twice as often after each further time.
const SKIPS_FIRST: u32 = 16;
const SKIPS_MOST: u32 = 4096;

/// What the device has done since it last waited for events.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// Packets of the guest that it has not been told of.
    pub(super) untold: u16,
    /// Whether some of them were taken in this turn.
    pub(super) has_taken: bool,
    /// Whether the guest was given packets, and is interrupted for these.
    pub(super) has_given: bool,
    /// Whether nothing has come within the time.
    pub(super) has_timed_out: bool,
}

/// Whether the guest is told now; see the module.
pub(super) struct Notice {
    held_max: u16,
    is_held: bool,
    skips_left: u32,
    skips_next: u32,
}

impl Notice {
    pub(super) fn new(queue_size: u16) -> Self {
        let held_max = HELD_PACKETS.min(queue_size / HELD_QUEUE_PART);
        Self { held_max, is_held: false, skips_left: 0, skips_next: SKIPS_FIRST }
    }

    /// Whether the guest is told now. Otherwise it is at the end of the next turn, or of a later one in which more was
    /// taken, and there must be one within [`HOLD_FOR`].
    pub(super) fn is_due(&mut self, turn: Turn) -> bool {
        let was_held = std::mem::take(&mut self.is_held);
        if turn.untold == 0 {
            return true;
        }
        if turn.has_given {
            if was_held {
                self.skips_next = SKIPS_FIRST;
            }
            return true;
        }
        if was_held && turn.has_timed_out {
            self.skips_left = self.skips_next;
            self.skips_next = self.skips_next.saturating_mul(2).min(SKIPS_MOST);
        }
        if !turn.has_taken || turn.untold >= self.held_max {
            return true;
        }
        if let Some(left) = self.skips_left.checked_sub(1) {
            self.skips_left = left;
            return true;
        }
        self.is_held = true;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUE: u16 = 256;
    const TAKEN: Turn = Turn { untold: 1, has_taken: true, has_given: false, has_timed_out: false };
    const ANSWERED: Turn = Turn { has_taken: false, has_given: true, ..TAKEN };
    const TIMED_OUT: Turn = Turn { has_taken: false, has_timed_out: true, ..TAKEN };
    const OTHER: Turn = Turn { has_taken: false, ..TAKEN };

    /// How many packets it is told of at once until the next one is held.
    fn told_at_once(notice: &mut Notice) -> u32 {
        (0..1_000_000_u32).find(|_| !notice.is_due(TAKEN)).unwrap_or(u32::MAX)
    }

    #[test]
    fn a_guest_is_told_of_what_was_taken_with_the_answer() {
        let mut notice = Notice::new(QUEUE);
        for _ in 0..1000 {
            assert!(!notice.is_due(TAKEN));
            assert!(notice.is_due(ANSWERED));
        }
        // What was taken and answered in one turn.
        assert!(notice.is_due(Turn { has_given: true, ..TAKEN }));
    }

    #[test]
    fn anything_else_that_happens_ends_the_wait() {
        let mut notice = Notice::new(QUEUE);
        assert!(!notice.is_due(TAKEN));
        assert!(notice.is_due(OTHER));
        assert!(!notice.is_due(TAKEN), "it was not in vain");
    }

    #[test]
    fn a_guest_that_sends_and_gets_no_answer_is_told_at_once_ever_more_often() {
        let mut notice = Notice::new(QUEUE);
        let mut all = Vec::new();
        for _ in 0..12 {
            all.push(told_at_once(&mut notice));
            assert!(notice.is_due(TIMED_OUT));
        }
        assert_eq!(all, [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]);
        assert_eq!(told_at_once(&mut notice), 4096);
        assert!(notice.is_due(ANSWERED));
        assert_eq!(told_at_once(&mut notice), 0);
        assert!(notice.is_due(TIMED_OUT));
        assert_eq!(told_at_once(&mut notice), 16, "an answer has come in between");
    }

    #[test]
    fn no_more_packets_are_held_than_a_part_of_the_queue() {
        for (queue, held_max) in [(256, 8), (64, 8), (32, 4), (8, 1), (4, 0)] {
            let mut notice = Notice::new(queue);
            for untold in 1..20 {
                let is_due = notice.is_due(Turn { untold, ..TAKEN });
                assert_eq!(is_due, untold >= held_max, "{untold} of {queue}");
            }
        }
    }
}
