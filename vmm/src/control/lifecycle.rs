// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Life-cycle requests: create, resume, delete.
//!
//! Owns the events that report them.

use vm_migration::commit::destination::OperatorRequest;
use vm_migration::progress::Phase;

use super::snapshot::{Busy, Work};
use super::teardown::AfterTeardown;
use super::{GuestPages, Next, VmLifecycle, Vmm, emit, failed};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, VmState};
use crate::config::VmConfig;
use crate::events;

impl Vmm {
    pub(super) fn create(&mut self, config: Box<VmConfig>) -> Result<(), ApiError> {
        if !matches!(self.vm, VmLifecycle::None) {
            return Err(ApiError::new(
                ApiErrorKind::AlreadyCreated,
                "there is a VM already; delete it first",
            ));
        }
        self.refuse_a_vm_at_the_end()?;
        self.pending_exit = None;
        self.vm = VmLifecycle::Created(config);
        emit("created");
        Ok(())
    }

    /// `vm.resume`.
    pub(super) fn resume_for(&mut self, force: bool, responder: Responder) {
        if self.is_abandoned() {
            return responder.answer(Err(ApiError::not_created()));
        }
        let Some(responder) = self.resume_in_transition(responder) else { return };
        // A silent peer may take long to time out, and nothing has been sent to it yet.
        if let VmLifecycle::Migrating { info, sending, .. } = &mut self.vm
            && info.state == VmState::Paused
            && sending.has_sent_nothing()
        {
            log::warn!(
                "the VM is resumed: its migration, which has not started to send it, is cancelled"
            );
            sending.cancel.cancel();
            return sending.resumers.push(responder);
        }
        let Some(responder) = self.decide_for(OperatorRequest::Resume, responder) else { return };
        match &self.vm {
            VmLifecycle::NotStarted { .. } => self.start_arrived_for(responder),
            VmLifecycle::Unanswered(_) => self.resume_unanswered(force, responder),
            _ => self.resume_live_for(responder),
        }
    }

    pub(super) fn resume(&mut self) -> Result<(), ApiError> {
        let machine = self.machine_mut()?;
        if !machine.is_paused() {
            return Err(ApiError::new(ApiErrorKind::NotBooted, "the VM is not paused"));
        }
        emit("resuming");
        let resumed = machine.resume().map_err(|error| failed(&error));
        let tell = |error: &ApiError| {
            events::emit("vm", "resume-failed", &[("error", &error.to_string())]);
        };
        resumed.inspect_err(tell)?;
        self.found_room();
        emit("resumed");
        Ok(())
    }

    /// `vm.delete`.
    pub(super) fn delete_for(&mut self, force: bool, responder: Responder) -> Next {
        match &mut self.vm {
            VmLifecycle::Serving(sending) if force => {
                log::warn!("told to discard pages that a migrated VM needs: it is lost");
                sending.deleters.push(responder);
                sending.steering.abandon();
            }
            VmLifecycle::Unanswered(_) if force => return self.discard_unanswered(responder),
            VmLifecycle::Receiving(_) => {
                drop(self.decide_for(OperatorRequest::Delete { force }, responder));
            }
            VmLifecycle::NotStarted { .. } if matches!(self.pages, GuestPages::Arriving { .. }) => {
                self.abandon_not_started(responder);
            }
            VmLifecycle::Starting(_) | VmLifecycle::Busy(Busy { work: Work::Restore, .. }) => {
                drop(self.end_starting(true, responder));
            }
            VmLifecycle::Live(_) => match self.refuse_without_all_pages() {
                Ok(()) => return self.tear_down(AfterTeardown::Deleted(responder)),
                Err(error) => responder.answer(Err(error)),
            },
            _ => responder.answer(self.delete().map(|()| ApiReply::Empty)),
        }
        Next::Continue
    }

    fn delete(&mut self) -> Result<(), ApiError> {
        match &self.vm {
            // As in cloud-hypervisor: what is to be gone is gone.
            VmLifecycle::None => return Ok(()),
            // A machine that arrived and was not started, or is kept for a guest elsewhere, is given up;
            // its pages first, as in `delete_unstarted`.
            VmLifecycle::NotStarted { .. } => self.pages = GuestPages::Resident,
            VmLifecycle::Created(_) | VmLifecycle::HandedOver { .. } => {}
            other => return Err(other.why_not_live()),
        }
        self.vm = VmLifecycle::None;
        emit("deleted");
        Ok(())
    }

    /// Why postcopy is paused, if it is.
    pub(super) fn postcopy_paused(&self) -> Option<String> {
        if let GuestPages::Lost(paused) = &self.pages {
            return Some(failed(&paused.error).to_string());
        }
        let progress =
            self.progress.as_ref().filter(|_| matches!(self.pages, GuestPages::Arriving { .. }));
        let document = progress?.snapshot();
        let lost = matches!(document.phase, Phase::PostcopyPaused | Phase::PostcopyRecover);
        lost.then(|| document.recovery.reason.unwrap_or_default())
    }

    /// Whether an incoming postcopy migration has lost its connections.
    fn is_stopped(&self) -> bool {
        self.progress.as_ref().is_some_and(|progress| progress.phase() == Phase::PostcopyPaused)
    }

    pub(super) fn refuse_without_all_pages(&self) -> Result<(), ApiError> {
        match &self.pages {
            GuestPages::Resident => Ok(()),
            GuestPages::Arriving { .. } if self.is_stopped() => Err(ApiError::new(
                ApiErrorKind::Conflict,
                "the VM waits for pages from a source that cannot be reached; it continues when the \
                 source has connected again (vm.migration-recover names a new address), and \
                 vmm.shutdown with force ends it with its VMM",
            )),
            GuestPages::Arriving { .. } => Err(ApiError::new(
                ApiErrorKind::Conflict,
                "pages of the VM are still arriving from another VMM; wait until they are here",
            )),
            GuestPages::Lost(paused) => {
                Err(ApiError::from_error(ApiErrorKind::Conflict, &paused.error).context(
                    "the VM waits for pages that are lost, and cannot continue or be taken apart; \
                     vmm.shutdown ends it with its VMM",
                ))
            }
        }
    }

    /// Refuses to migrate or save a VM whose devices do not support it, or whose guest has requested its
    /// end, which takes precedence.
    pub(super) fn refuse_unmovable(&mut self) -> Result<(), ApiError> {
        self.refuse_ending()?;
        let movable = self.machine_mut()?.check_movable();
        movable.map_err(|error| ApiError::from_error(ApiErrorKind::Conflict, &error))
    }

    /// Refuses what a guest excludes that has requested its end.
    pub(super) fn refuse_ending(&mut self) -> Result<(), ApiError> {
        let machine = self.machine_mut()?;
        if machine.is_ending() {
            let text = if machine.is_paused() {
                "the guest has asked for a reset or a shutdown, which happens when the VM runs; vm.resume \
                 lets it happen"
            } else {
                "the guest has asked for a reset or a shutdown, which happens first; repeat the request then"
            };
            return Err(ApiError::new(ApiErrorKind::Conflict, text));
        }
        Ok(())
    }
}
