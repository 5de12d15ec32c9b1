// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Prepare and Run: the machine state is loaded, the handover is acknowledged, the guest starts.
//!
//! Owns the moment at which the guest may run here. With the negotiated protocol that is when the
//! source confirms that it has seen the acknowledgement; [`super::doubt`] handles a connection that is
//! lost in between. A machine that cannot be started is kept, and its pages keep arriving: the guest is
//! nowhere else. A version 0 source does not send Confirm: its commit is the answer to Complete, and the guest
//! may run once the source's host has acknowledged the bytes of that answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::doubt::{Doubt, Resolution};
use super::fault::{FaultThreads, ParkedThreads};
use super::faulting::Faulting;
use super::negotiate::{read, unexpected};
use super::receive::{Agreed, HasState};
use super::{Context, PhaseFailure, Received};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::commit::clock;
use crate::commit::destination::{DoubtOutcome, NotHere, NotStarted, Owned, Promised};
use crate::error::{Cause, Failure, GuestLocation, Step};
use crate::figures::Figures;
use crate::latency::micros;
use crate::progress::Phase;
use crate::protocol::message::{Answer, Message, bounded_reason};
use crate::transport::TransportError;
use crate::vm::DestinationVm;

/// The state is restored; the handover has been acknowledged.
pub(crate) struct Ready<V: DestinationVm> {
    vm: V,
    control: Channel,
    commit: Commit,
    faults: Option<FaultThreads<V::Memory>>,
    /// See [`HasState::parked`].
    parked: Option<ParkedThreads>,
    /// True if the guest ran at the source.
    resume: bool,
}

/// The promise of the acknowledgement.
struct Commit {
    /// `None` with plain version 0, whose source confirms nothing.
    agreed: Option<Agreed>,
    promised: Promised,
    /// Why not all of it has left this side.
    unsent: Option<Failure>,
    /// A handle that is never cancelled: nothing ends a wait from the acknowledgement on.
    never: Cancel,
}

/// Where the outcome of the guest's start is reported.
enum StartReport {
    /// To the source on the first connection, as the answer to Confirm.
    Control,
    /// To the source, on a connection that carries only its verdict.
    Verdict(Channel),
    /// Nowhere.
    Silence,
}

impl StartReport {
    fn tell(&self, control: &Channel, answer: &Answer) -> Result<(), TransportError> {
        match self {
            Self::Control => control.connection.send(&answer.encode()),
            // Nothing else was sent on it, so the answer arrives although the connection ends.
            Self::Verdict(channel) => channel.connection.send(&answer.encode()),
            Self::Silence => Ok(()),
        }
    }
}

impl<V: DestinationVm> HasState<V> {
    /// Restores the state and acknowledges the handover.
    pub(crate) fn prepare(mut self, context: Context<'_>) -> Result<Ready<V>, PhaseFailure<V>> {
        match self.try_prepare(context) {
            Ok((resume, commit)) => {
                let Self { vm, control, faults, parked, .. } = self;
                Ok(Ready { vm, control, commit, faults, parked, resume })
            }
            Err(failure) => {
                let failure = explain(self.faults.as_ref(), failure);
                // Before the machine is dropped, which may take long while the guest is stopped.
                failure.tell(&self.control);
                self.faults.iter().for_each(FaultThreads::release_waiters);
                Err(PhaseFailure::early(None, failure))
            }
        }
    }

    fn try_prepare(&mut self, context: Context<'_>) -> Result<(bool, Commit), Failure> {
        const STEP: &str = "acknowledging the handover";
        self.apply_state(context)?;
        if self.agreed.is_none() {
            self.vm
                .take_exclusive()
                .map_err(Cause::Vm)
                .step("taking what the guest has for itself")?;
        }
        self.control.yes().step("acknowledging the guest's state")?;
        let resume = match read(&mut self.control, "waiting for the handover")? {
            Message::Complete => true,
            Message::CompletePaused => false,
            other => return Err(unexpected(&other, "Complete")),
        };
        if let Some(faults) = &self.faults {
            faults.commit()?;
        }
        let never = self.end_of_cancel(context)?;
        // If sending fails, the acknowledgement may still have been sent: the connection is then found
        // lost.
        // What a source was sent that confirms nothing, it may read whenever it goes on.
        let promise =
            if self.agreed.is_some() { context.options.limits.rejoin } else { Duration::MAX };
        let promised = Promised::new(clock::now(), promise);
        let unsent = match self.control.yes() {
            Ok(()) => None,
            // Not a byte of what would be the commit has left.
            Err(error)
                if self.agreed.is_none() && self.control.connection.is_between_messages() =>
            {
                return Err(error).step(STEP);
            }
            Err(error) => {
                log::warn!("{STEP}: {error}");
                Some(Failure::new(STEP, error))
            }
        };
        Ok((resume, Commit { agreed: self.agreed.take(), promised, unsent, never }))
    }
}

impl<V: DestinationVm> HasState<V> {
    /// Restores the state. That may touch missing pages, and the thread may block on one in the kernel,
    /// where it checks nothing: a cancel, or a page that takes too long, ends the engine, which releases
    /// the thread with a machine that is then dropped.
    fn apply_state(&mut self, context: Context<'_>) -> Result<(), Failure> {
        const STEP: &str = "restoring the guest's state";
        let state = std::mem::take(&mut self.state);
        let Some(faults) = &mut self.faults else {
            return self.vm.apply_state(&state).map_err(Cause::Vm).step(STEP);
        };
        let (engine, after) = (Arc::clone(&faults.engine), faults.rejoin.stall);
        let cancel = context.cancel.clone();
        let mut lets_go = false;
        let look = move |ended: &mut Option<Failure>| {
            // The engine has ended, here or elsewhere. The host may have refused to release all waiters
            // then.
            if engine.failed().is_cancelled() && !lets_go {
                lets_go = engine.source().release().is_ok();
            }
            if ended.is_some() {
                return;
            }
            let cause = || -> Option<Cause> {
                if cancel.is_cancelled() {
                    return Some(Cause::Cancelled);
                }
                let what = "waiting for a requested page";
                let stalls = engine.longest_wait() > after;
                stalls.then(|| TransportError::Timeout { what, after }.into())
            };
            *ended = cause().map(|cause| Failure::new(STEP, cause));
            if ended.is_some() {
                // No reason of its own: the caller reports the one for this.
                engine.fail(Failure::new(STEP, Cause::Cancelled));
            }
        };
        let vm = &mut self.vm;
        let (ended, applied) = faults.looked_after(look, || vm.apply_state(&state))?;
        ended.map_or_else(|| applied.map_err(Cause::Vm).step(STEP), Err)
    }

    /// Ends the time in which a cancel counts: only one that was requested before the acknowledgement
    /// does. From then on the source may hand the guest over at any moment, so cancelling would lose it.
    fn end_of_cancel(&self, context: Context<'_>) -> Result<Cancel, Failure> {
        const STEP: &str = "acknowledging the handover";
        let never = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        self.control.connection.set_cancel(&never);
        if context.cancel.is_cancelled() {
            return Err(Cause::Cancelled).step(STEP);
        }
        Ok(never)
    }
}

/// The destination is the only owner of the guest.
struct SoleOwner {
    owned: Owned,
    /// Where the outcome of the start is reported.
    teller: StartReport,
    /// The failure, if the connections for pages were lost.
    lost: Option<Failure>,
    /// The operator wants it to run, even if it was paused at the source.
    wanted: bool,
    /// Since when the guest has been stopped, message transit included, where that is known.
    stopped: Option<Instant>,
}

/// What was heard of the source after the acknowledgement.
enum Heard {
    /// The guest is here.
    Owned(SoleOwner),
    /// The connection was lost before.
    Nothing(Promised, Failure),
}

impl<V: DestinationVm> Ready<V> {
    fn tells_figures(&self) -> bool {
        self.commit.agreed.as_ref().is_some_and(|agreed| agreed.tells_figures)
    }

    /// Waits for Confirm, however often the source asks for a new acknowledgement before.
    ///
    /// # Errors
    /// The source has said that it continues to run the guest.
    fn wait_for_confirm(
        &mut self,
        mut promised: Promised,
        context: Context<'_>,
    ) -> Result<Heard, Failure> {
        const STEP: &str = "waiting for the source to confirm the handover";
        let lost = loop {
            match read(&mut self.control, STEP) {
                Ok(Message::Confirm(figures)) => {
                    let at = Instant::now();
                    let told = Figures::read(&figures);
                    context.progress.heard(&figures);
                    let owned = promised.confirmed();
                    let (teller, stopped) =
                        (StartReport::Control, told.and_then(|told| told.stopped(at)));
                    let here = SoleOwner { owned, teller, lost: None, wanted: false, stopped };
                    return Ok(Heard::Owned(here));
                }
                Ok(Message::Renew) => {
                    promised = promised.renewed(clock::now(), context.options.limits.rejoin);
                    if let Err(error) = self.control.yes() {
                        break Failure::new(STEP, error);
                    }
                }
                Ok(other) => break unexpected(&other, "Confirm"),
                Err(failure) if matches!(failure.cause, Cause::Abandoned(_)) => {
                    // The source states that it continues to run the guest: nothing is in doubt.
                    let NotHere = promised.abandoned();
                    return Err(failure);
                }
                Err(failure) => break failure,
            }
        };
        Ok(Heard::Nothing(promised, lost))
    }

    /// Waits until the source's host has the answer to Complete: the source reads it from there, or does not run any
    /// more.
    fn wait_for_bytes(&mut self, promised: Promised, context: Context<'_>) -> Heard {
        const STEP: &str = "waiting for the source's host to receive the acknowledgement";
        if let Some(failure) = self.commit.unsent.take() {
            return Heard::Nothing(promised, failure);
        }
        let limit = context.options.limits.answer;
        match self.control.connection.await_received(limit) {
            Ok(()) => Heard::Owned(SoleOwner {
                owned: promised.confirmed(),
                teller: StartReport::Silence,
                lost: None,
                wanted: false,
                stopped: None,
            }),
            Err(error) => Heard::Nothing(promised, Failure::new(STEP, error)),
        }
    }

    /// Waits until the source cannot run the guest any more, by its word or what its host has received.
    ///
    /// # Errors
    /// When the guest is not here, by decision of the source or the operator.
    fn wait_for_word(&mut self, context: Context<'_>) -> Result<SoleOwner, Failure> {
        const STEP: &str = "waiting for the source to confirm the handover";
        let promised = self.commit.promised;
        let heard = match self.commit.agreed {
            Some(_) => self.wait_for_confirm(promised, context)?,
            None => self.wait_for_bytes(promised, context),
        };
        let (promised, lost) = match heard {
            Heard::Owned(here) => return Ok(here),
            Heard::Nothing(promised, lost) => (promised, lost),
        };
        self.control.connection.shut_down();
        let faults = self.faults.as_mut();
        let Commit { agreed, never, .. } = &self.commit;
        let doubt = Doubt { state: promised.lost(), agreed: agreed.as_ref(), faults, never };
        let (known, word) = doubt.resolve(&mut self.vm, &lost, context);
        match known {
            DoubtOutcome::Owned(owned) => {
                context.progress.enter(Phase::Run);
                let wanted = matches!(word, Resolution::Operator);
                let (teller, lost) = match word {
                    Resolution::Verdict(channel) => (StartReport::Verdict(channel), Some(lost)),
                    Resolution::Returned(control) => {
                        self.control = control;
                        (StartReport::Silence, None)
                    }
                    Resolution::Lost | Resolution::Operator => (StartReport::Silence, Some(lost)),
                };
                Ok(SoleOwner { owned, teller, lost, wanted, stopped: None })
            }
            DoubtOutcome::NotHere(NotHere) => {
                let why = "it continues to run the guest, and the connection was lost before it could \
                           say so";
                Err(Cause::Abandoned(why.to_string())).step(STEP)
            }
            DoubtOutcome::Discarded => Err(Cause::Cancelled).step(STEP),
        }
    }

    /// Starts the guest, once the source cannot run it any more.
    pub(crate) fn run(mut self, context: Context<'_>) -> Result<Received<V>, PhaseFailure<V>> {
        let tells_figures = self.tells_figures();
        let here = match self.wait_for_word(context) {
            Ok(here) => here,
            Err(failure) => {
                let failure = explain(self.faults.as_ref(), failure);
                self.faults.iter().for_each(FaultThreads::release_waiters);
                return Err(PhaseFailure::early(None, failure));
            }
        };
        let Self { vm, control, faults, resume, parked: _parked, .. } = self;
        let SoleOwner { owned, teller, lost, wanted, stopped } = here;
        match (vm.run(resume || wanted), faults) {
            (Ok(vm), faults) => {
                if let Some(stopped) = stopped.filter(|_| resume) {
                    context.progress.counters.downtime_us.set(micros(stopped.elapsed()));
                }
                // The guest runs; a source that does not get this report keeps its pages.
                if let Err(error) = teller.tell(&control, &Answer::ok()) {
                    log::warn!("the source could not be told that the guest runs: {error}");
                }
                let faults =
                    faults.map(|threads| Faulting::new(threads, control, lost, tells_figures));
                Ok(Received { vm, faults })
            }
            (Err((vm, reason)), faults) => {
                let NotStarted = owned.does_not_start();
                let failure = Failure::new("starting the guest", Cause::Vm(reason));
                let guest = GuestLocation::OnDestination;
                let Some(threads) = faults else {
                    let peer = match teller {
                        StartReport::Control => Some(control),
                        StartReport::Verdict(channel) => Some(channel),
                        StartReport::Silence => None,
                    };
                    return Err(PhaseFailure { peer, failure, guest, vm: Some(vm), faults: None });
                };
                // Its pages keep arriving, so for the source this is the same as if it ran.
                let note = Answer::Ok {
                    offer_taken: false,
                    payload: bounded_reason(&failure.for_peer()).as_bytes().to_vec(),
                };
                if let Err(error) = teller.tell(&control, &note) {
                    log::warn!("the source could not be told that its pages are needed: {error}");
                }
                let faults = Some(Box::new(Faulting::new(threads, control, lost, tells_figures)));
                Err(PhaseFailure { peer: None, failure, guest, vm: Some(vm), faults })
            }
        }
    }
}

/// The failure to report: the source's own reason comes first, then the failure of the page engine.
fn explain<M: crate::ram::GuestMemoryMap>(
    faults: Option<&FaultThreads<M>>,
    failure: Failure,
) -> Failure {
    match failure.cause {
        Cause::Abandoned(_) => failure,
        _ => faults.and_then(FaultThreads::take_failure).unwrap_or(failure),
    }
}
