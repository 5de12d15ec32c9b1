// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Prepare and Run: state goes in, the handover is acknowledged, the guest starts.
//!
//! Owns the moment at which the guest may run here. With the negotiated protocol that is when the
//! source confirms that it has seen the acknowledgement; a connection lost in between leaves the
//! guest standing here, in doubt, rather than running twice. A version 0 source knows no Confirm:
//! the guest starts on Complete and the answer says whether it did.

use super::fault::FaultThreads;
use super::faulting::Faulting;
use super::negotiate::{read, unexpected};
use super::receive::HasState;
use super::{Context, Received, Setback};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, GuestIs, Step};
use crate::protocol::message::Message;
use crate::vm::DestinationVm;

/// Everything is in place; the source has been told so.
pub(crate) struct Ready<V: DestinationVm> {
    vm: V,
    control: Channel,
    negotiated: bool,
    faults: Option<FaultThreads<V::Memory>>,
    /// The guest ran at the source.
    resume: bool,
}

impl<V: DestinationVm> HasState<V> {
    /// Puts state in and acknowledges the handover.
    pub(crate) fn prepare(mut self, context: Context<'_>) -> Result<Ready<V>, Setback<V>> {
        match self.try_prepare(context) {
            Ok(resume) => Ok(Ready {
                vm: self.vm,
                control: self.control,
                negotiated: self.negotiated,
                faults: self.faults,
                resume,
            }),
            Err(failure) => {
                let failure = explain(self.faults.as_ref(), failure);
                Err(Setback::early(Some(self.control), failure))
            }
        }
    }

    fn try_prepare(&mut self, context: Context<'_>) -> Result<bool, Failure> {
        let state = std::mem::take(&mut self.state);
        self.vm.apply_state(&state).map_err(Cause::Vm).step("restoring the guest's state")?;
        self.control.yes().step("acknowledging the guest's state")?;
        let resume = match read(&mut self.control, "waiting for the handover")? {
            Message::Complete => true,
            Message::CompletePaused => false,
            other => return Err(unexpected(&other, "Complete")),
        };
        if let Some(faults) = &self.faults {
            faults.commit()?;
        }
        self.end_of_cancel(context)?;
        if self.negotiated {
            self.control.yes().step("acknowledging the handover")?;
        }
        Ok(resume)
    }
}

impl<V: DestinationVm> HasState<V> {
    /// From the acknowledgement on the source may give the guest away at any moment, so a cancel
    /// here would lose it: the last one that counts is one that was asked for before.
    fn end_of_cancel(&self, context: Context<'_>) -> Result<(), Failure> {
        const STEP: &str = "acknowledging the handover";
        let never = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        self.control.connection.set_cancel(&never);
        if context.cancel.is_cancelled() {
            return Err(Cause::Cancelled).step(STEP);
        }
        Ok(())
    }
}

impl<V: DestinationVm> Ready<V> {
    /// Waits for the word that the source cannot run the guest any more. With pages missing, a
    /// source whose connections were lost says the same by coming back; it is not answered then.
    fn wait_for_confirm(&mut self, context: Context<'_>, hears: &mut bool) -> Result<(), Failure> {
        let lost = match read(&mut self.control, "waiting for the source to confirm the handover") {
            Ok(Message::Confirm) => return Ok(()),
            Ok(other) => return Err(unexpected(&other, "Confirm")),
            Err(failure) => failure,
        };
        let may_return = matches!(lost.cause, Cause::Transport(_) | Cause::Protocol(_));
        match &mut self.faults {
            Some(faults) if may_return => {
                log::warn!("the source has not confirmed the handover: {}", lost.for_peer());
                self.control.connection.shut_down();
                let within = context.options.limits.rejoin;
                self.control = faults.source_returns(lost, within, context.cancel)?;
                *hears = false;
                Ok(())
            }
            _ => Err(lost),
        }
    }

    /// Starts the guest, once the source cannot run it any more.
    pub(crate) fn run(mut self, context: Context<'_>) -> Result<Received<V>, Setback<V>> {
        let mut hears = true;
        if self.negotiated
            && let Err(failure) = self.wait_for_confirm(context, &mut hears)
        {
            let failure = explain(self.faults.as_ref(), failure);
            if matches!(failure.cause, Cause::Abandoned(_)) {
                // Its own word that it goes on there: nothing is in doubt.
                return Err(Setback::early(Some(self.control), failure));
            }
            // With pages missing the machine is of no use to anybody.
            let vm = self.faults.is_none().then_some(self.vm);
            let guest = GuestIs::InDoubt;
            return Err(Setback { peer: Some(self.control), failure, guest, vm });
        }
        // The guest is ours, and a cancel has come too late since the acknowledgement.
        let vm = match self.vm.run(self.resume) {
            Ok(vm) => vm,
            Err((vm, reason)) => {
                let failure = Failure::new("starting the guest", Cause::Vm(reason));
                let guest = if self.negotiated { GuestIs::OnDestination } else { GuestIs::NotHere };
                let vm = self.faults.is_none().then_some(vm);
                return Err(Setback { peer: Some(self.control), failure, guest, vm });
            }
        };
        if hears && let Err(error) = self.control.yes() {
            // The guest runs; a source that does not hear of it keeps what it has.
            log::warn!("the source could not be told that the guest runs: {error}");
        }
        let control = self.control;
        let faults = self.faults.map(|threads| Faulting::new(threads, control));
        Ok(Received { vm, faults })
    }
}

/// The source's own words say most; after them what the page engine ran into.
fn explain<M: crate::ram::GuestMemoryMap>(
    faults: Option<&FaultThreads<M>>,
    failure: Failure,
) -> Failure {
    match failure.cause {
        Cause::Abandoned(_) => failure,
        _ => faults.and_then(FaultThreads::take_failure).unwrap_or(failure),
    }
}
