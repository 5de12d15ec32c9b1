// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shutdown of the process, requested by a signal or the API, also during a migration.
//!
//! Owns the rule: a request is refused while a guest leaves; a signal cannot be
//! answered, so it is remembered until the migration is over, and a second one cancels it. A guest
//! that has been handed over or has just arrived is never ended by a request that did not know it.
//! A VM that stays ends in order, however long its disks take; with force, or at the second signal,
//! nothing is waited for.

use std::time::{Duration, Instant};

use vm_migration::Phase;

use super::snapshot::report_failed_restore;
use super::starting::start_cancelled;
use super::unanswered::Unanswered;
use super::{GuestPages, Next, VmLifecycle, Vmm, emit};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply};
use crate::options::ExitReason;

/// An operation that ends in order within this time may do so in a process that is to end at once.
pub(super) const AT_ONCE: Duration = Duration::from_millis(300);

/// A second signal counts as such after this time. Sooner it is part of the first one: a session that ends sends SIGTERM
/// and SIGHUP, a terminal that is closed SIGHUP twice.
const SECOND_SIGNAL: Duration = Duration::from_secs(1);

/// The signals that have asked for the end of the process, whatever has come of it.
#[derive(Default)]
pub(super) struct EndSignals {
    last: Option<Instant>,
}

impl EndSignals {
    /// Notes one that comes now. Returns whether it is another one than the last, and not a part of that.
    fn is_another(&mut self, now: Instant) -> bool {
        let is_soon = |last: Instant| now.saturating_duration_since(last) < SECOND_SIGNAL;
        let is_another = !self.last.is_some_and(is_soon);
        if is_another {
            self.last = Some(now);
        }
        is_another
    }
}

/// Time that a cancelled start or restore has to end after a signal. Does not apply once the guest runs
/// while its passed-through devices are still being opened: such a guest is ended in order.
const START_END: Duration = Duration::from_secs(2);

/// A pending end of the process, for when the migration or the machine has ended.
pub struct Ending {
    reason: ExitReason,
    /// Requests to be answered when the process ends.
    responders: Vec<Responder>,
}

impl Ending {
    fn new(reason: ExitReason) -> Self {
        Self { reason, responders: Vec::new() }
    }

    /// Answers the requests, and returns the exit reason.
    fn answer(self, result: &Result<(), ApiError>) -> ExitReason {
        for responder in self.responders {
            responder.answer(result.clone().map(|()| ApiReply::Empty));
        }
        self.reason
    }
}

impl Vmm {
    /// `vmm.shutdown`.
    pub(super) fn vmm_shutdown(&mut self, force: bool, responder: Responder) -> Next {
        match &self.vm {
            VmLifecycle::Serving(_) | VmLifecycle::NotStarted { .. } if force => {
                log::warn!("told to end, even if data is lost");
                self.end_vm();
                responder.answer(Ok(ApiReply::Empty));
                Next::Exit(ExitReason::ApiShutdown)
            }
            VmLifecycle::Unanswered(_) if force => {
                self.end_unanswered(ExitReason::ApiShutdown, Some(responder))
            }
            VmLifecycle::Live(_)
            | VmLifecycle::Starting(_)
            | VmLifecycle::Transitioning(_)
            | VmLifecycle::Busy(_)
            | VmLifecycle::TearingDown(_)
                if force =>
            {
                log::warn!("told to end, even if data is lost");
                self.at_latest = Some(Instant::now() + AT_ONCE);
                self.end_here(ExitReason::ApiShutdown, Some(responder))
            }
            VmLifecycle::Migrating { .. }
            | VmLifecycle::Serving(_)
            | VmLifecycle::Unanswered(_) => {
                responder.answer(Err(self.vm.why_not_live()));
                Next::Continue
            }
            VmLifecycle::Live(_)
            | VmLifecycle::Transitioning(_)
            | VmLifecycle::NotStarted { .. }
                if matches!(self.pages, GuestPages::Arriving { .. }) =>
            {
                responder.answer(self.refuse_without_all_pages().map(|()| ApiReply::Empty));
                Next::Continue
            }
            VmLifecycle::Receiving(_) => {
                match self.end_awaited(force) {
                    Ok(()) => {
                        if force {
                            self.at_latest = Some(Instant::now() + AT_ONCE);
                        }
                        self.ask_for_end(ExitReason::ApiShutdown, Some(responder));
                    }
                    Err(error) => responder.answer(Err(error)),
                }
                Next::Continue
            }
            _ => self.end_here(ExitReason::ApiShutdown, Some(responder)),
        }
    }

    /// Ends the process once the VM has ended in order.
    pub(super) fn end_here(&mut self, reason: ExitReason, responder: Option<Responder>) -> Next {
        self.ask_for_end(reason, responder);
        self.go_on_ending()
    }

    /// Records a request to end the process; the reason of the first one is kept.
    fn ask_for_end(&mut self, reason: ExitReason, responder: Option<Responder>) {
        let ending = self.ending.get_or_insert_with(|| Ending::new(reason));
        ending.responders.extend(responder);
    }

    /// When the process ends at the latest, whatever has not finished.
    pub(super) fn ends_at_latest(&self, now: Instant) -> Option<Instant> {
        let start = match &self.vm {
            VmLifecycle::Starting(starting) => starting.until(now),
            VmLifecycle::Busy(busy) => busy.until,
            _ => None,
        };
        self.at_latest.into_iter().chain(start).min()
    }

    /// Ends the process if its time limit has passed. An incoming guest is exempt once the source may have
    /// been told that it can be handed over; before that nothing is lost, as an earlier cancellation is
    /// seen in the step that tells the source.
    pub(super) fn end_if_too_late(&mut self) -> Next {
        let now = Instant::now();
        if self.ends_at_latest(now).is_none_or(|at_latest| at_latest > now) {
            return Next::Continue;
        }
        let may_be_told = || {
            let phase = self.progress.as_ref().map(|progress| progress.phase());
            !matches!(
                phase,
                None | Some(Phase::Idle | Phase::Listen | Phase::Negotiate | Phase::Receive)
            )
        };
        if matches!(self.vm, VmLifecycle::Receiving(_)) && may_be_told() {
            self.at_latest = None;
            return Next::Continue;
        }
        Next::Exit(self.end_at_once())
    }

    /// Answers the requests to end the process with an error.
    pub(super) fn refuse_end(&mut self, error: &ApiError) {
        if let Some(ending) = self.take_ending() {
            ending.answer(&Err(error.clone()));
        }
    }

    /// Drops the pending end of the process. The next signal counts as the first one again.
    fn take_ending(&mut self) -> Option<Ending> {
        self.told_by_signal = false;
        self.at_latest = None;
        self.ending.take()
    }

    /// If the process is to end: starts to end the VM, or ends the process when there is none.
    pub(super) fn go_on_ending(&mut self) -> Next {
        if self.ending.is_none() {
            return Next::Continue;
        }
        match &self.vm {
            // Its memory is complete: it ends as any VM, once that has been processed.
            VmLifecycle::Live(_) if self.has_unprocessed_pages() => {}
            VmLifecycle::Live(_) => return self.end_with_machine(None),
            VmLifecycle::Starting(starting) => starting.cancel(),
            VmLifecycle::Transitioning(transition) => transition.cancel.cancel(),
            VmLifecycle::Busy(busy) => busy.cancel(),
            VmLifecycle::TearingDown(_)
            | VmLifecycle::Migrating { .. }
            | VmLifecycle::Serving(_)
            | VmLifecycle::Receiving(_)
            // Only with force, or at the second signal: `end_unanswered`.
            | VmLifecycle::Unanswered(_) => {}
            VmLifecycle::None
            | VmLifecycle::Created(_)
            | VmLifecycle::NotStarted { .. }
            | VmLifecycle::HandedOver { .. } => {
                return self.ended();
            }
        }
        Next::Continue
    }

    fn ended(&mut self) -> Next {
        let Some(ending) = self.ending.take() else { return Next::Continue };
        Next::Exit(ending.answer(&Ok(())))
    }

    /// Ends the process without waiting; operations that have not finished end with it.
    fn end_at_once(&mut self) -> ExitReason {
        log::warn!("ending without waiting for what has not ended: {}", self.vm.why_not_live());
        let has_machine = match &self.vm {
            VmLifecycle::Transitioning(transition) => {
                transition.consoles.close();
                true
            }
            VmLifecycle::TearingDown(teardown) => {
                teardown.consoles.close();
                teardown.report_failed();
                true
            }
            VmLifecycle::Starting(starting) => {
                starting.report_failed(&start_cancelled());
                starting.has_begun()
            }
            VmLifecycle::Busy(busy) if busy.is_restore() => {
                report_failed_restore(&start_cancelled());
                false
            }
            VmLifecycle::Live(_)
            | VmLifecycle::Busy(_)
            | VmLifecycle::Migrating { .. }
            | VmLifecycle::Serving(_)
            | VmLifecycle::NotStarted { .. }
            | VmLifecycle::Unanswered(_) => true,
            VmLifecycle::None
            | VmLifecycle::Created(_)
            | VmLifecycle::Receiving(_)
            | VmLifecycle::HandedOver { .. } => false,
        };
        if has_machine {
            emit("shutdown");
        }
        self.exit_reason()
    }

    fn exit_reason(&mut self) -> ExitReason {
        match self.ended() {
            Next::Exit(reason) => reason,
            Next::Continue | Next::Fail(_) => ExitReason::ApiShutdown,
        }
    }

    /// Handles SIGTERM, SIGINT, SIGHUP and SIGQUIT, one or several that came together.
    pub(super) fn end_signal(&mut self) -> Next {
        if !self.end_signals.is_another(Instant::now()) {
            log::info!("told to end by several signals at a time, which count as one");
            return Next::Continue;
        }
        let is_second = self.ending.is_some();
        match &self.vm {
            VmLifecycle::Migrating { sending, .. } => {
                if is_second {
                    log::warn!("told to end again: the migration is cancelled");
                    sending.cancel.cancel();
                } else {
                    log::warn!("told to end: that waits until the migration is over");
                }
            }
            VmLifecycle::Serving(_) => {
                log::warn!("told to end: that waits until the destination has the last page");
            }
            VmLifecycle::Receiving(_) => match self.end_awaited(is_second) {
                Ok(()) => {
                    if is_second {
                        self.at_latest = Some(Instant::now() + AT_ONCE);
                    }
                    log::warn!(
                        "told to end: the incoming migration is cancelled, if it still can be"
                    );
                }
                Err(error) => log::warn!("told to end; a second request discards the VM: {error}"),
            },
            VmLifecycle::Unanswered(_) => return self.signal_unanswered(),
            _ if is_second && self.told_by_signal => {
                log::warn!("told to end again: ending without waiting");
                self.at_latest = Some(Instant::now() + AT_ONCE);
            }
            _ => {
                self.told_by_signal = true;
                let start_end = Instant::now() + START_END;
                match &mut self.vm {
                    VmLifecycle::Starting(starting) => starting.end_until(start_end),
                    VmLifecycle::Busy(busy) if busy.is_restore() => busy.until = Some(start_end),
                    // Nothing is lost with it that the guest has.
                    VmLifecycle::Busy(busy) if busy.is_core_dump() => busy.cancel(),
                    _ => {}
                }
                let runs =
                    matches!(&self.vm, VmLifecycle::Starting(starting) if starting.has_begun());
                if runs
                    || matches!(
                        self.vm,
                        VmLifecycle::Transitioning(_)
                            | VmLifecycle::Busy(_)
                            | VmLifecycle::TearingDown(_)
                            | VmLifecycle::Live(_)
                    )
                {
                    log::info!(
                        "told to end: ends when the devices have finished; a second request ends at once"
                    );
                }
                return self.end_here(ExitReason::Signal, None);
            }
        }
        self.told_by_signal = true;
        if !is_second {
            self.ask_for_end(ExitReason::Signal, None);
        }
        Next::Continue
    }

    /// Refuses to create a VM in a process that was told to end and only waits for clients to read the end
    /// of a migration: the VM would end with it.
    ///
    /// # Errors
    /// The process ends soon.
    pub(super) fn refuse_a_vm_at_the_end(&self) -> Result<(), ApiError> {
        if self.pending_exit.is_none() || self.ending.is_none() {
            return Ok(());
        }
        let why = "this VMM has been told to end, and ends within seconds; use another one";
        Err(ApiError::new(ApiErrorKind::Conflict, why))
    }

    /// Releases the VM, in whatever state, right before the process ends. A machine that still exists ends
    /// with the process.
    pub(super) fn end_vm(&mut self) {
        match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Live(machine) | VmLifecycle::Unanswered(Unanswered { machine, .. }) => {
                machine.consoles().close();
                let waiting = std::mem::replace(&mut self.pages, GuestPages::Resident);
                std::mem::forget((machine, waiting));
                emit("shutdown");
            }
            VmLifecycle::NotStarted { machine, .. } => {
                match std::mem::replace(&mut self.pages, GuestPages::Resident) {
                    GuestPages::Resident => drop(machine),
                    waiting => std::mem::forget((machine, waiting)),
                }
            }
            VmLifecycle::Migrating { sending, .. } | VmLifecycle::Serving(sending) => {
                sending.cancel.cancel();
            }
            VmLifecycle::Receiving(receiving) => receiving.cancel.cancel(),
            VmLifecycle::Busy(busy) => busy.cancel(),
            VmLifecycle::Starting(starting) => starting.cancel(),
            // Dropping it would wait for the disks that it keeps for the next machine.
            VmLifecycle::TearingDown(teardown) => std::mem::forget(teardown),
            VmLifecycle::None
            | VmLifecycle::Created(_)
            | VmLifecycle::Transitioning(_)
            | VmLifecycle::HandedOver { .. } => {}
        }
        // Threads that wait for missing pages must not see other contents in their place.
        std::mem::forget(std::mem::replace(&mut self.pages, GuestPages::Resident));
    }

    /// Drops a pending end of the process: the guest runs elsewhere and may need pages from here, which
    /// takes precedence.
    pub(super) fn stay_for_the_pages(&mut self) {
        if self.take_ending().is_some() {
            log::warn!(
                "not ending: the VM elsewhere may need pages from here; vm.delete or another \
                 signal discards them"
            );
        }
    }

    /// Handles the end of an incoming migration in a process that may have been told to end.
    pub(super) fn end_after_arrival(&mut self) -> Next {
        if matches!(self.vm, VmLifecycle::None) {
            return self.ended();
        }
        let Some(ending) = self.take_ending() else { return Next::Continue };
        log::warn!("not ending: the VM has arrived in the meantime");
        ending.answer(&Err(ApiError::new(
            ApiErrorKind::Conflict,
            "the VM has arrived here before the migration could be cancelled",
        )));
        Next::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_one_end_count_as_one_and_later_ones_as_others() {
        let (mut signals, start) = (EndSignals::default(), Instant::now());
        let mut at = |ms| signals.is_another(start + Duration::from_millis(ms));
        assert!(at(0));
        for soon_ms in [0, 10, 999] {
            assert!(!at(soon_ms), "after {soon_ms} ms");
        }
        // Those in between have not moved the time.
        assert!(at(1000) && !at(1999) && at(2000));
    }
}
