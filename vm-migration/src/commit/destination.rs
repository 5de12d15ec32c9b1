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

/// A request or signal for a machine that has arrived and does not run yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperatorRequest {
    /// `vm.migration-cancel`.
    Cancel,
    /// `vm.resume`: the source does not run the guest, so it is to run here.
    Resume,
    /// `vm.delete`: the guest is not to run here.
    Delete {
        /// Discard it even if the guest is lost by that.
        force: bool,
    },
    /// End of the process: `vmm.shutdown`, or SIGTERM.
    End {
        /// End even if the guest is lost by that; for signals, the second one.
        force: bool,
    },
}

/// Why a request is refused; the caller has the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The destination has acknowledged: the source may have handed the guest over.
    TooLate,
    /// The source may still act on the acknowledgement, for this long.
    Promised(Duration),
}

/// The operator's decision on a machine in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// The guest runs here and nowhere else.
    RunsHere,
    /// The machine is discarded.
    Discarded,
}

/// The destination has acknowledged, and keeps the machine until the source confirms or abandons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Promised {
    until: Duration,
}

/// The connection was lost before the source's decision arrived: the source may run the guest, or have
/// handed it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InDoubt {
    until: Duration,
}

/// The destination alone owns the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owned;

/// The destination alone owns the guest, which could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NotStarted;

/// The source has the guest; the machine that was built here can be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NotHere;

/// How a doubt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DoubtOutcome {
    /// The destination owns the guest.
    Owned(Owned),
    /// The source has the guest.
    NotHere(NotHere),
    /// The operator has discarded the machine here.
    Discarded,
}

impl Promised {
    /// An acknowledgement that is sent at `now` or later; the promise lasts for `promise` from `now`.
    pub(crate) fn new(now: Duration, promise: Duration) -> Self {
        Self { until: now.saturating_add(promise) }
    }

    /// Extends the promise, because the source asked for a new acknowledgement.
    pub(crate) fn renewed(self, now: Duration, promise: Duration) -> Self {
        Self { until: self.until.max(now.saturating_add(promise)) }
    }

    /// The source confirmed, or its host has received the acknowledgement that is the commit: it cannot run the guest
    /// any more.
    pub(crate) fn confirmed(self) -> Owned {
        Owned
    }

    /// The source abandoned the handover: it continues to run the guest.
    pub(crate) fn abandoned(self) -> NotHere {
        NotHere
    }

    /// The connection ended, was silent for too long, or carried an invalid message.
    pub(crate) fn lost(self) -> InDoubt {
        InDoubt { until: self.until }
    }

    /// Refuses every request: the source's decision is still to come on the connection.
    #[cfg_attr(
        any(not(test), loom),
        expect(dead_code, reason = "a request has no way in; for the model")
    )]
    pub(crate) fn asked(self, _: OperatorRequest) -> (Self, Refusal) {
        (self, Refusal::TooLate)
    }
}

impl InDoubt {
    /// Ends the doubt with the source's verdict.
    pub(crate) fn hears(self, verdict: Verdict) -> DoubtOutcome {
        match verdict {
            Verdict::Committed => DoubtOutcome::Owned(Owned),
            Verdict::Withheld => DoubtOutcome::NotHere(NotHere),
        }
    }

    /// Whether the operator may decide this now.
    ///
    /// The source commits no more once the promise is over. Until then it may still commit after the
    /// operator has looked at it, so discarding the machine needs `force`. A promise without an end is
    /// [`Duration::MAX`], also in the refusal.
    ///
    /// # Errors
    /// The reason for a refusal.
    pub fn asked(self, asked: OperatorRequest, now: Duration) -> Result<Decision, Refusal> {
        match asked {
            OperatorRequest::Resume => Ok(Decision::RunsHere),
            OperatorRequest::Delete { force: true } | OperatorRequest::End { force: true } => {
                Ok(Decision::Discarded)
            }
            OperatorRequest::Delete { force: false } if now > self.until => Ok(Decision::Discarded),
            OperatorRequest::Delete { force: false } => {
                Err(Refusal::Promised(if self.until == Duration::MAX {
                    self.until
                } else {
                    self.until.saturating_sub(now)
                }))
            }
            OperatorRequest::Cancel | OperatorRequest::End { force: false } => {
                Err(Refusal::TooLate)
            }
        }
    }

    /// Ends the doubt with the operator's decision.
    pub(crate) fn decided(self, decision: Decision) -> DoubtOutcome {
        match decision {
            Decision::RunsHere => DoubtOutcome::Owned(Owned),
            Decision::Discarded => DoubtOutcome::Discarded,
        }
    }

    /// True once the promise is over: the source has acted on the acknowledgement by then, or never
    /// will.
    pub(crate) fn promise_is_over(self, now: Duration) -> bool {
        now > self.until
    }
}

impl Owned {
    /// The machine could not be started: a disk is locked, or a tap busy.
    pub(crate) fn does_not_start(self) -> NotStarted {
        NotStarted
    }
}

impl NotStarted {
    /// The operator tries to start it again.
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
