// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The destination's side of the commit.
//!
//! ```text
//! Promised --Confirm--> Owned --starts--> (runs)
//!   |  |                  |
//!   |  +--Abandon--> NotHere +--does not start--> NotStarted --operator: again--> Owned
//!   | connection lost     ^                          |
//!   v                     | Withheld                 +--operator: discards it--> Discarded
//! InDoubt ----------------+
//!   +--Committed, or operator: it runs here--> Owned
//!   +--operator: it does not--> Discarded
//! ```
//!
//! Times are those of [`super::clock`], which includes sleep. There is no transition by time alone: the
//! machine stays in doubt for as long as it takes.

#![expect(clippy::unused_self, reason = "a transition uses its phase up, whatever that holds")]

use std::time::Duration;

use super::Verdict;

/// What is asked of a machine that has arrived and does not run, by a request or a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperatorRequest {
    /// `vm.migration-cancel`.
    Cancel,
    /// `vm.resume`: it runs nowhere else, so it is to run here.
    Resume,
    /// `vm.delete`: it is not to run here.
    Delete {
        /// Whatever is lost by it.
        force: bool,
    },
    /// The end of the process: `vmm.shutdown`, or SIGTERM.
    End {
        /// Whatever is lost by it; of signals, the second.
        force: bool,
    },
}

/// Why a request is refused; the caller has the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// It comes after the acknowledgement: the source may have handed the guest over.
    TooLate,
    /// The source may still act on the acknowledgement, for as long as this.
    Promised(Duration),
}

/// Outcome for a machine that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// The operator says that it runs here and nowhere else.
    RunsHere,
    /// The operator says that it does not.
    Discarded,
}

/// The destination has acknowledged: it keeps the machine until it hears from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Promised {
    until: Duration,
}

/// The connection was lost before the source's word: it runs the guest, or has handed it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InDoubt {
    until: Duration,
}

/// The guest is this side's alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owned;

/// The guest is this side's alone and could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NotStarted;

/// The source has the guest; what was built here can go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NotHere;

/// How a doubt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DoubtOutcome {
    /// The guest is here.
    Owned(Owned),
    /// The source has it.
    NotHere(NotHere),
    /// The operator has given it up here.
    Discarded,
}

impl Promised {
    /// The acknowledgement goes out at this time or later, and holds for `promise` from then on.
    pub(crate) fn new(now: Duration, promise: Duration) -> Self {
        Self { until: now.saturating_add(promise) }
    }

    /// The source asks for another one.
    pub(crate) fn renewed(self, now: Duration, promise: Duration) -> Self {
        Self { until: self.until.max(now.saturating_add(promise)) }
    }

    /// Confirm: the source can run the guest no more.
    pub(crate) fn confirmed(self) -> Owned {
        Owned
    }

    /// Abandon: the source continues to run the guest.
    pub(crate) fn abandoned(self) -> NotHere {
        NotHere
    }

    /// The connection ended, was silent for too long, or made no sense.
    pub(crate) fn lost(self) -> InDoubt {
        InDoubt { until: self.until }
    }

    /// Every request comes too late or too early: the source's word is due.
    #[cfg_attr(
        any(not(test), loom),
        expect(dead_code, reason = "a request has no way in; for the model")
    )]
    pub(crate) fn asked(self, _: OperatorRequest) -> (Self, Refusal) {
        (self, Refusal::TooLate)
    }
}

impl InDoubt {
    /// The source says which it is.
    pub(crate) fn hears(self, verdict: Verdict) -> DoubtOutcome {
        match verdict {
            Verdict::Committed => DoubtOutcome::Owned(Owned),
            Verdict::Withheld => DoubtOutcome::NotHere(NotHere),
        }
    }

    /// Whether the operator may decide this now.
    ///
    /// A source that has not committed does so no more when the promise is over; until then what a
    /// look at it shows may change a moment later, so discarding the machine has to be insisted on.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn asked(self, asked: OperatorRequest, now: Duration) -> Result<Decision, Refusal> {
        match asked {
            OperatorRequest::Resume => Ok(Decision::RunsHere),
            OperatorRequest::Delete { force: true } | OperatorRequest::End { force: true } => {
                Ok(Decision::Discarded)
            }
            OperatorRequest::Delete { force: false } if now > self.until => Ok(Decision::Discarded),
            OperatorRequest::Delete { force: false } => {
                Err(Refusal::Promised(self.until.saturating_sub(now)))
            }
            OperatorRequest::Cancel | OperatorRequest::End { force: false } => {
                Err(Refusal::TooLate)
            }
        }
    }

    /// The operator has decided.
    pub(crate) fn decided(self, decision: Decision) -> DoubtOutcome {
        match decision {
            Decision::RunsHere => DoubtOutcome::Owned(Owned),
            Decision::Discarded => DoubtOutcome::Discarded,
        }
    }

    /// The source may have acted on the acknowledgement by now or never will.
    pub(crate) fn promise_is_over(self, now: Duration) -> bool {
        now > self.until
    }
}

impl Owned {
    /// The machine says that it cannot run: a disk is locked, a tap busy.
    pub(crate) fn does_not_start(self) -> NotStarted {
        NotStarted
    }
}

impl NotStarted {
    /// The operator tries again.
    #[cfg_attr(
        any(not(test), loom),
        expect(dead_code, reason = "the monitor has the machine by then; for the model")
    )]
    pub(crate) fn again(self) -> Owned {
        Owned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn no_ordinary_request_ends_what_has_been_acknowledged() {
        let promised = Promised::new(s(10), s(60));
        let asks = [OperatorRequest::Cancel, OperatorRequest::End { force: false }];
        for asked in asks
            .into_iter()
            .chain([OperatorRequest::Delete { force: true }, OperatorRequest::Resume])
        {
            assert_eq!(promised.asked(asked), (promised, Refusal::TooLate));
        }
        let doubt = promised.lost();
        for asked in asks {
            for now in [s(10), s(70), s(1_000_000)] {
                assert_eq!(doubt.asked(asked, now), Err(Refusal::TooLate));
            }
        }
    }

    #[test]
    fn giving_up_without_force_waits_for_the_end_of_the_promise() {
        let promised = Promised::new(s(10), s(60)).renewed(s(20), s(60));
        let doubt = promised.lost();
        let delete = OperatorRequest::Delete { force: false };
        assert_eq!(doubt.asked(delete, s(30)), Err(Refusal::Promised(s(50))));
        assert_eq!(doubt.asked(delete, s(81)), Ok(Decision::Discarded));
        assert!(doubt.promise_is_over(s(81)) && !doubt.promise_is_over(s(80)));
        assert_eq!(
            doubt.asked(OperatorRequest::Delete { force: true }, s(30)),
            Ok(Decision::Discarded)
        );
        assert_eq!(doubt.asked(OperatorRequest::Resume, s(30)), Ok(Decision::RunsHere));
    }
}
