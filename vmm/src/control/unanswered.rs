// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A source VM in doubt: its destination was told to run it, and has not answered.
//!
//! Owns what requests and signals may do to it. This happens with a destination that only answers and cannot be asked
//! again, as cloud-hypervisor's; that of this program is in doubt itself ([`super::doubt`]), and is told what holds.
//! The guest must never continue here unless an operator says that it runs nowhere else.

use std::time::Instant;

use super::ending::AT_ONCE;
use super::pausing::TransitionKind;
use super::teardown::AfterTeardown;
use super::{Next, VmLifecycle, Vmm, cancel};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::events;
use crate::machine::Machine;
use crate::options::ExitReason;

/// The error of a request to such a VM: the state, and what the operator can do.
pub fn may_run_elsewhere(reason: &str) -> ApiError {
    ApiError::new(
        ApiErrorKind::Conflict,
        format!(
            "the destination of the VM was told to run it and may do so, it has not answered: {reason}; what tells \
             whether it does is in docs/adopt.md: if it does not and never did, end it there and continue here with \
             vm.resume; if it does, vm.delete with force discards the VM here"
        ),
    )
}

impl Vmm {
    /// Notes that it is not known whether the destination runs the VM. Requests that were made before, without
    /// knowledge of that, are refused.
    pub(super) fn left_unanswered(
        &mut self,
        machine: Box<Machine>,
        reason: String,
        mut requests: Vec<Responder>,
    ) {
        let error = may_run_elsewhere(&reason);
        events::emit("vm", "migration-in-doubt", &[("side", "source"), ("error", &reason)]);
        log::error!("{error}");
        self.vm = VmLifecycle::Unanswered { machine, reason };
        cancel::refuse_all(&mut requests, &error);
        self.refuse_end(&error);
    }

    /// `vm.resume` of such a VM: an operator says that it runs nowhere else.
    pub(super) fn resume_unanswered(&mut self, responder: Responder) {
        let Some(reason) = self.take_unanswered() else {
            return responder.answer(Err(self.vm.why_not_live()));
        };
        log::warn!("told that the destination does not run the VM: it continues here");
        // A signal that came in the doubt is not meant for a VM that an operator has continued since.
        self.refuse_end(&ApiError::new(ApiErrorKind::Conflict, "the VM continues here"));
        events::emit("vm", "resuming", &[]);
        // Its disks are locked again, and opened anew.
        self.begin_transition(TransitionKind::Resume, Some(responder));
        if let VmLifecycle::Transitioning(transition) = &mut self.vm {
            transition.unanswered = Some(reason);
        }
    }

    /// Handles that such a VM could not be resumed: a disk is locked, perhaps because it runs at its destination.
    pub(super) fn still_unanswered(&mut self, reason: String) {
        match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Live(machine) => {
                let error = may_run_elsewhere(&reason);
                self.vm = VmLifecycle::Unanswered { machine, reason };
                self.refuse_end(&error);
            }
            other => self.vm = other,
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

    /// Makes it a VM like any other. Returns why it was in doubt; `None` if there is no such VM.
    fn take_unanswered(&mut self) -> Option<String> {
        match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Unanswered { machine, reason } => {
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
