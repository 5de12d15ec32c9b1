// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination VM in doubt: it is not known whether its source still runs it.
//!
//! Owns what requests and signals may do to it: the rules are those of
//! [`vm_migration::commit::destination`], and the words are here. The machine stays with the thread
//! that received it, which waits for the source's word all the time; what the operator decides goes to
//! that thread, and the request is answered when it has acted on it.

use std::time::Duration;

use vm_migration::commit::destination::{Decision, InDoubt, OperatorRequest, Refusal};

use super::receiving::Receiving;
use super::{GuestPages, VmLifecycle, Vmm, cancel};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, VmInfo};
use crate::events;

/// A VM in doubt: the state of the decision, and its description.
pub struct InDoubtVm {
    /// State of the decision between source and destination.
    pub state: InDoubt,
    /// Description of the VM for `vm.info`.
    pub info: Box<VmInfo>,
}

/// A request that has decided the doubt, or waits for an incoming migration to end.
pub struct DecisionRequest {
    decision: Decision,
    responder: Responder,
}

/// The error of a request to a VM in doubt: the state, and what the operator can do.
pub fn in_doubt() -> ApiError {
    ApiError::new(
        ApiErrorKind::Conflict,
        "the VM has arrived, and the connection was lost before its source said which of the two has \
         it: a source of this program says so when it can be reached again; if it has handed the VM over or ended \
         before it could continue with it, vm.resume starts it here, and if the VM ran on there, vm.delete \
         discards it here. What tells that of a source of cloud-hypervisor is in docs/adopt.md",
    )
}

fn words(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::TooLate => in_doubt(),
        Refusal::Promised(Duration::MAX) => in_doubt().context(
            "its source may still hand the VM over to here as long as it lives: vm.delete needs force",
        ),
        Refusal::Promised(left) => in_doubt().context(format!(
            "for {} s more the source may still hand the VM over to here: vm.delete needs force \
             until then",
            left.as_secs() + 1
        )),
    }
}

impl Receiving {
    /// The VM in doubt, if there is one.
    pub fn doubtful(&self) -> Option<&InDoubtVm> {
        self.doubt.as_ref()
    }

    /// Decides the doubt as the operator requests.
    ///
    /// # Errors
    /// The state does not allow this decision now.
    fn decide(&self, state: InDoubt, asked: OperatorRequest) -> Result<Decision, ApiError> {
        let decision = state.asked(asked, vm_migration::commit::now()).map_err(words)?;
        self.steering.decide(decision);
        Ok(decision)
    }

    /// Answers the requests that wait for the end of the migration. `runs` is the result of starting the
    /// machine; `None`: there is no machine.
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
    /// Notes that the incoming migration is in doubt; `lasts` is set when it is reported again.
    pub(super) fn doubt(&mut self, doubtful: InDoubtVm) {
        let VmLifecycle::Receiving(receiving) = &mut self.vm else { return };
        if receiving.doubt.replace(doubtful).is_some() {
            // Requests and signals since the first report were made with knowledge of the doubt.
            return;
        }
        cancel::refuse_all(&mut receiving.cancellers, &in_doubt());
        // Earlier requests were made without knowledge of the doubt.
        for DecisionRequest { responder, .. } in receiving.decision_requests.drain(..) {
            responder.answer(Err(in_doubt()));
        }
        self.refuse_end(&in_doubt());
    }

    /// `vm.resume` of a VM in doubt, or `vm.delete` of one that is being received. Returns the responder if
    /// there is neither.
    pub(super) fn decide_for(
        &mut self,
        asked: OperatorRequest,
        responder: Responder,
    ) -> Option<Responder> {
        let VmLifecycle::Receiving(receiving) = &mut self.vm else { return Some(responder) };
        let decision = match (receiving.doubtful().map(|doubtful| doubtful.state), asked) {
            (Some(state), _) => receiving.decide(state, asked),
            (None, OperatorRequest::Delete { .. }) => {
                // Answered once it is known whether the cancellation came in time.
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

    /// `vm.delete` of a machine that has arrived, was not started and still receives pages: the receiving
    /// thread has to end first.
    pub(super) fn abandon_not_started(&mut self, responder: Responder) {
        if let GuestPages::Arriving { steering, .. } = &self.pages {
            steering.abandon();
        }
        self.deleters.push(responder);
    }

    /// Whether the deletion of such a machine is in progress.
    pub(super) fn is_abandoned(&self) -> bool {
        !self.deleters.is_empty()
    }

    /// Deletes such a machine once its page transfer has ended and no thread waits for a page.
    pub(super) fn delete_unstarted(&mut self) {
        self.pages = GuestPages::Resident;
        self.vm = VmLifecycle::None;
        events::emit("vm", "deleted", &[]);
        for responder in self.deleters.drain(..) {
            responder.answer(Ok(ApiReply::Empty));
        }
    }

    /// Handles the request to end the process while a VM is in doubt or being received.
    ///
    /// # Errors
    /// The VM is in doubt and would be lost by a request made without knowledge of that.
    pub(super) fn end_awaited(&self, force: bool) -> Result<(), ApiError> {
        let VmLifecycle::Receiving(receiving) = &self.vm else { return Ok(()) };
        let Some(doubtful) = receiving.doubtful() else {
            receiving.cancel.cancel();
            return Ok(());
        };
        receiving.decide(doubtful.state, OperatorRequest::End { force }).map(drop)
    }
}
