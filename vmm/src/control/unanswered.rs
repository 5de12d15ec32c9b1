// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A source VM in doubt: its destination may have been told to run it, and has not answered.
//!
//! Owns what requests and signals may do to it. This happens with a destination that only answers and cannot be asked
//! again, as cloud-hypervisor's; that of this program is in doubt itself ([`super::doubt`]), and is told what holds.
//! The guest must never continue here unless an operator says that it runs nowhere else, and must never be lost by a
//! request that does not say that it is.

use std::time::Instant;

use super::ending::AT_ONCE;
use super::pausing::TransitionKind;
use super::teardown::AfterTeardown;
use super::{Next, VmLifecycle, Vmm, cancel, describe, emit};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, VmInfo};
use crate::events;
use crate::machine::Machine;
use crate::options::ExitReason;

/// Such a VM, paused.
pub struct Unanswered {
    /// The machine.
    pub machine: Box<Machine>,
    /// Why there is no answer.
    reason: String,
    /// Whether a signal has asked for the end of the process.
    is_told: bool,
}

impl Unanswered {
    /// Its `vm.info`.
    pub fn info(&self) -> VmInfo {
        VmInfo { in_doubt: Some(self.reason.clone()), ..describe::of_machine(&self.machine) }
    }

    /// The error of a request to it.
    pub fn error(&self) -> ApiError {
        ApiError::new(ApiErrorKind::Conflict, may_run_elsewhere(&self.reason))
    }
}

/// The state, and what the operator can do.
fn may_run_elsewhere(reason: &str) -> String {
    format!(
        "the VM may run at the destination of its migration, which has not answered: {reason}; docs/adopt.md says what \
         tells whether it does: if it never did, end it there, and vm.resume with force continues it here; if it does, \
         vm.delete or vmm.shutdown with force discards it here"
    )
}

impl Vmm {
    /// Notes that it is not known whether the destination runs the VM. `requests` were made before, without knowledge of
    /// that, as was a request to end the process: they are refused.
    pub(super) fn left_unanswered(
        &mut self,
        machine: Box<Machine>,
        reason: String,
        mut requests: Vec<Responder>,
    ) {
        events::emit("vm", "migration-unanswered", &[("error", &reason)]);
        let unanswered = Unanswered { machine, reason, is_told: false };
        let error = unanswered.error();
        log::error!("{error}");
        self.vm = VmLifecycle::Unanswered(unanswered);
        cancel::refuse_all(&mut requests, &error);
        self.refuse_end(&error);
    }

    /// `vm.resume` of such a VM: with `force` an operator says that it runs nowhere else.
    pub(super) fn resume_unanswered(&mut self, force: bool, responder: Responder) {
        if !force {
            return responder.answer(Err(self.vm.why_not_live()));
        }
        let Some(reason) = self.take_unanswered() else {
            return responder.answer(Err(self.vm.why_not_live()));
        };
        log::warn!("told that the destination does not run the VM: it continues here");
        // A signal that came in the doubt is not meant for a VM that an operator continues.
        self.refuse_end(&ApiError::new(ApiErrorKind::Conflict, "the VM continues here"));
        emit("resuming");
        // Its disks are locked again, and opened anew.
        self.begin_transition(TransitionKind::Resume, Some(responder));
        if let VmLifecycle::Transitioning(transition) = &mut self.vm {
            transition.info.in_doubt = Some(reason.clone());
            transition.unanswered = Some(reason);
        }
    }

    /// Handles that such a VM could not be resumed: a disk is locked, perhaps because it runs at its destination. Returns
    /// what the answer is to say.
    pub(super) fn still_unanswered(&mut self, reason: String) -> Option<String> {
        match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            // Told to end at once meanwhile, which happens next.
            VmLifecycle::Live(machine) if self.at_latest.is_some() => {
                self.vm = VmLifecycle::Live(machine);
                None
            }
            VmLifecycle::Live(machine) => {
                let why = may_run_elsewhere(&reason);
                self.vm = VmLifecycle::Unanswered(Unanswered { machine, reason, is_told: false });
                if self.told_by_signal {
                    log::warn!("not ending: {why}");
                }
                self.refuse_end(&ApiError::new(ApiErrorKind::Conflict, why.clone()));
                Some(why)
            }
            other => {
                self.vm = other;
                None
            }
        }
    }

    /// `vm.delete` with `force` of such a VM.
    pub(super) fn discard_unanswered(&mut self, responder: Responder) -> Next {
        if self.take_unanswered().is_none() {
            responder.answer(Err(self.vm.why_not_live()));
            return Next::Continue;
        }
        log::warn!("told to discard a VM that may not run at its destination");
        self.tear_down(AfterTeardown::Deleted(responder))
    }

    /// Handles a signal to end the process: the second one ends it with the VM.
    pub(super) fn signal_unanswered(&mut self) -> Next {
        let VmLifecycle::Unanswered(unanswered) = &mut self.vm else { return Next::Continue };
        if std::mem::replace(&mut unanswered.is_told, true) {
            return self.end_unanswered(ExitReason::Signal, None);
        }
        let why = unanswered.error();
        log::warn!("told to end; another signal discards the VM: {why}");
        Next::Continue
    }

    /// Ends the process with such a VM, as told with `force` or by a second signal.
    pub(super) fn end_unanswered(
        &mut self,
        reason: ExitReason,
        responder: Option<Responder>,
    ) -> Next {
        log::warn!("told to end, with a VM that may not run at its destination");
        self.take_unanswered();
        self.at_latest = Some(Instant::now() + AT_ONCE);
        self.end_here(reason, responder)
    }

    /// Makes it a VM like any other. Returns why there is no answer; `None` if there is no such VM.
    fn take_unanswered(&mut self) -> Option<String> {
        match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Unanswered(Unanswered { machine, reason, is_told: _ }) => {
                self.vm = VmLifecycle::Live(machine);
                Some(reason)
            }
            other => {
                self.vm = other;
                None
            }
        }
    }
}
