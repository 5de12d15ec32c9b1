// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination VM in doubt: it is not known whether its source still runs it.
//!
//! Owns what requests and signals may do to it: the rules are those of
//! [`vm_migration::commit::destination`], and the words are here. The machine stays with the thread
//! that received it, which waits for the source's word all the time; what the operator decides goes to
//! that thread, and the request is answered when it has acted on it.

use vm_migration::commit::destination::{Decision, InDoubt, OperatorRequest, Refusal};

use super::receiving::Receiving;
use super::{GuestPages, VmLifecycle, Vmm, cancel};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, VmInfo};
use crate::events;

/// What is known of it.
pub struct InDoubtVm {
    /// What is to be asked.
    pub state: InDoubt,
    /// Its description.
    pub info: Box<VmInfo>,
}

/// A request that has decided it, or that waits for the end of a migration to here.
pub struct DecisionRequest {
    decision: Decision,
    responder: Responder,
}

/// What it is like, and what can be done.
pub fn in_doubt() -> ApiError {
    ApiError::new(
        ApiErrorKind::Conflict,
        "the VM has arrived, and the connection was lost before its source said which of the two has \
         it: the source says so when it can be reached again; if it has handed the VM over or ended \
         before it could continue with it, vm.resume starts it here, and if the VM ran on there, vm.delete \
         discards it here",
    )
}

fn words(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::TooLate => in_doubt(),
        Refusal::Promised(left) => in_doubt().context(format!(
            "for {} s more the source may still hand the VM over to here: vm.delete needs force \
             until then",
            left.as_secs() + 1
        )),
    }
}

impl Receiving {
    /// The doubt, if there is one.
    pub fn doubtful(&self) -> Option<&InDoubtVm> {
        self.doubt.as_ref()
    }

    /// Decides the doubt, if that may be now.
    ///
    /// # Errors
    /// Why it may not.
    fn decide(&self, state: InDoubt, asked: OperatorRequest) -> Result<Decision, ApiError> {
        let decision = state.asked(asked, vm_migration::commit::now()).map_err(words)?;
        self.steering.decide(decision);
        Ok(decision)
    }

    /// Answers requests that wait for the end of the migration; `runs` says how a machine that is
    /// here now fares, `None` that there is none.
    pub fn answer_decision_requests(&mut self, runs: Option<&Result<(), ApiError>>) {
        for DecisionRequest { decision, responder } in self.decision_requests.drain(..) {
            responder.answer(match (decision, runs) {
                (Decision::RunsHere, Some(result)) => result.clone().map(|()| ApiReply::Empty),
                (Decision::Discarded, None) => Ok(ApiReply::Empty),
                (Decision::Discarded, Some(_)) => Err(cancel::arrived()),
                (Decision::RunsHere, None) => Err(ApiError::not_created()),
            });
        }
    }
}

impl Vmm {
    /// The migration to here is in doubt (again, when that `lasts`).
    pub(super) fn doubt(&mut self, doubtful: InDoubtVm) {
        let VmLifecycle::Receiving(receiving) = &mut self.vm else { return };
        if receiving.doubt.replace(doubtful).is_some() {
            // Requests and signals since it began were made in its knowledge.
            return;
        }
        cancel::refuse_all(&mut receiving.cancellers, &in_doubt());
        // What was asked before did not know of this.
        for DecisionRequest { responder, .. } in receiving.decision_requests.drain(..) {
            responder.answer(Err(in_doubt()));
        }
        self.refuse_end(&in_doubt());
    }

    /// `vm.resume` of a machine in doubt, or `vm.delete` of one that is awaited. Gives the responder
    /// back when there is neither.
    pub(super) fn decide_for(
        &mut self,
        asked: OperatorRequest,
        responder: Responder,
    ) -> Option<Responder> {
        let VmLifecycle::Receiving(receiving) = &mut self.vm else { return Some(responder) };
        let decision = match (receiving.doubtful().map(|doubtful| doubtful.state), asked) {
            (Some(state), _) => receiving.decide(state, asked),
            (None, OperatorRequest::Delete { .. }) => {
                // Answered when it is known whether that came in time.
                receiving.cancel.cancel();
                Ok(Decision::Discarded)
            }
            (None, _) => return Some(responder),
        };
        match decision {
            Ok(decision) => {
                receiving.decision_requests.push(DecisionRequest { decision, responder });
            }
            Err(error) => responder.answer(Err(error)),
        }
        None
    }

    /// `vm.delete` of a machine that has arrived, was not started, and gets pages: the thread that
    /// receives them has to end first.
    pub(super) fn abandon_not_started(&mut self, responder: Responder) {
        if let GuestPages::Arriving { steering, .. } = &self.pages {
            steering.abandon();
        }
        self.deleters.push(responder);
    }

    /// Such a machine is on its way out.
    pub(super) fn is_abandoned(&self) -> bool {
        !self.deleters.is_empty()
    }

    /// Its pages have ended, and nothing of it waits for one any more: it goes.
    pub(super) fn not_started_is_gone(&mut self) {
        self.pages = GuestPages::Resident;
        self.vm = VmLifecycle::None;
        events::emit("vm", "deleted", &[]);
        for responder in self.deleters.drain(..) {
            responder.answer(Ok(ApiReply::Empty));
        }
    }

    /// The process is told to end while a machine here is in doubt, or only awaited.
    ///
    /// # Errors
    /// Why it does not: it is not to be lost by a request that did not know of it.
    pub(super) fn end_awaited(&self, force: bool) -> Result<(), ApiError> {
        let VmLifecycle::Receiving(receiving) = &self.vm else { return Ok(()) };
        let Some(doubtful) = receiving.doubtful() else {
            receiving.cancel.cancel();
            return Ok(());
        };
        receiving.decide(doubtful.state, OperatorRequest::End { force }).map(drop)
    }
}
