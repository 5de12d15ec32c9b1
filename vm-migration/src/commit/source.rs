// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The source's side of the commit.
//!
//! ```text
//! Offered --acknowledged--> Acknowledged --commit--> Committed --confirmed--> (over)
//!    ^  |                      |     |                   |
//!    |  +------- fails --------+     | too old           | connection lost
//!    |              |                v                   v
//!    +-- asked again|---------- Outdated             Unconfirmed: says Committed until heard
//!                   v
//!               Withheld: says Withheld until heard
//! ```
//!
//! Times are those of [`super::clock`]. An acknowledgement counts as being as old as the message that it
//! answers: the source does not know when the destination sent it, only that it was not before that message.

#![expect(clippy::unused_self, reason = "a transition uses its phase up, whatever that holds")]

use std::time::Duration;

use super::Verdict;

/// Everything that the destination needs has been sent; it may acknowledge at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Offered {
    asked_at: Duration,
}

/// The destination has acknowledged, and promises to keep the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Acknowledged {
    asked_at: Duration,
}

/// An acknowledgement that is too old to commit with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Outdated {
    /// Its age.
    pub age: Duration,
}

/// The guest belongs to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Committed;

/// The guest belongs to the destination, which may not know it yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Unconfirmed;

/// The guest continues at the source, and the destination may be in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Withheld;

impl Offered {
    /// The last message before the acknowledgement is sent at `asked_at`, or later.
    pub(crate) fn new(asked_at: Duration) -> Self {
        Self { asked_at }
    }

    /// The acknowledgement arrived.
    pub(crate) fn acknowledged(self) -> Acknowledged {
        Acknowledged { asked_at: self.asked_at }
    }

    /// The connection was lost, the migration was cancelled, or the destination did not answer.
    pub(crate) fn fails(self) -> Withheld {
        Withheld
    }
}

impl Acknowledged {
    /// Checks the age of the acknowledgement before a step that takes long (releasing disks and taps)
    /// begins.
    ///
    /// # Errors
    /// [`Outdated`] when it is too old: request another one, or withhold the guest.
    pub(crate) fn still_usable(self, now: Duration, usable: Duration) -> Result<Self, Outdated> {
        let age = now.saturating_sub(self.asked_at);
        if age <= usable { Ok(self) } else { Err(Outdated { age }) }
    }

    /// Hands the guest over.
    ///
    /// # Errors
    /// [`Outdated`] when it is too old: request another one, or withhold the guest.
    pub(crate) fn commit(self, now: Duration, usable: Duration) -> Result<Committed, Outdated> {
        self.still_usable(now, usable).map(|_| Committed)
    }

    /// The migration was cancelled, disks or taps could not be released, or the acknowledgement is too old
    /// and cannot be renewed.
    pub(crate) fn fails(self) -> Withheld {
        Withheld
    }
}

impl Outdated {
    /// A new acknowledgement is requested from the destination.
    pub(crate) fn asked_again(self, asked_at: Duration) -> Offered {
        Offered { asked_at }
    }
}

impl Committed {
    /// The connection was lost before the destination answered the confirmation.
    pub(crate) fn lost(self) -> Unconfirmed {
        Unconfirmed
    }
}

impl Unconfirmed {
    /// The verdict to report until the destination has received it. In postcopy, reconnecting says the same.
    pub(crate) fn says(self) -> Verdict {
        Verdict::Committed
    }
}

impl Withheld {
    /// The verdict to report until the destination has received it.
    pub(crate) fn says(self) -> Verdict {
        Verdict::Withheld
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn an_acknowledgement_is_as_old_as_the_message_that_it_answers() {
        let usable = super::super::usable(s(60));
        assert_eq!(usable, s(30));
        let acknowledged = Offered::new(s(100)).acknowledged();
        assert_eq!(acknowledged.commit(s(130), usable), Ok(Committed));
        let old = acknowledged.commit(s(131), usable).unwrap_err();
        assert_eq!(old.age, s(31));
        // Renewed, it counts from the new request.
        let again = old.asked_again(s(131)).acknowledged();
        assert_eq!(again.commit(s(161), usable), Ok(Committed));
        assert_eq!(again.commit(s(162), usable).unwrap_err().age, s(31));
        assert_eq!(again.fails().says(), Verdict::Withheld);
        assert_eq!(Committed.lost().says(), Verdict::Committed);
    }

    #[test]
    fn a_clock_that_seems_to_go_back_makes_nothing_younger_than_now() {
        assert_eq!(Offered::new(s(9)).acknowledged().commit(s(8), s(0)), Ok(Committed));
    }
}
