// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state in doubt: the handover was acknowledged, and the connection was lost before the source
//! confirmed it.
//!
//! Owns the wait for the decision, with no time limit: from the source, on a new connection, or from the
//! operator. Nothing else ends it; [`crate::commit::destination`] says what each decision means.
//! The machine and its fault threads are kept unchanged meanwhile.

use std::sync::Arc;

use super::Context;
use super::arrivals::{Arrivals, Expect, Hello};
use super::fault::FaultThreads;
use super::late_reconnects;
use super::receive::Agreed;
use super::refusals;
use super::rejoin::HELLO_TIMEOUT;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::commit::destination::{DoubtOutcome, InDoubt};
use crate::commit::{Verdict, clock};
use crate::error::Failure;
use crate::progress::Phase;
use crate::protocol::message::{Answer, Message};
use crate::ram::GuestMemoryMap;
use crate::steering::{self, LOOK_EVERY};
use crate::transport::{Listener, wait_readable};
use crate::vm::DestinationVm;

/// The peer or request that ended the doubt, which waits for the result.
pub(super) enum Resolution {
    /// The source, on a connection that carries only its verdict.
    Verdict(Channel),
    /// The source, reconnected with all its connections; the first of them.
    Returned(Channel),
    /// The source, whose reconnection failed; it will try again.
    Lost,
    /// The operator.
    Operator,
}

/// State and connections of a destination in doubt.
pub(super) struct Doubt<'a, M: GuestMemoryMap> {
    pub state: InDoubt,
    /// `None` with plain version 0, whose source never says more.
    pub agreed: Option<&'a Agreed>,
    /// The fault threads, if pages are missing.
    pub faults: Option<&'a mut FaultThreads<M>>,
    /// A handle that is never cancelled.
    pub never: &'a Cancel,
}

impl<M: GuestMemoryMap> Doubt<'_, M> {
    /// Waits until it is known which side has the guest.
    pub(super) fn resolve<V: DestinationVm>(
        mut self,
        vm: &mut V,
        lost: &Failure,
        context: Context<'_>,
    ) -> (DoubtOutcome, Resolution) {
        log::warn!("which side has the guest is in doubt: {}", lost.for_peer());
        if let Some(faults) = &mut self.faults {
            faults.disconnect();
        }
        if self.agreed.is_none() {
            log::warn!(
                "this source does not say so itself: find out whether it runs the guest, and decide here"
            );
        }
        context.progress.cannot_recover(lost.for_peer());
        context.progress.enter(Phase::InDoubt);
        vm.in_doubt(self.state, false);
        let mut lasts = false;
        // A promise without an end is that to a source which never reports.
        let reports_until = clock::now().saturating_add(context.options.limits.rejoin);
        let mut arrivals = Arrivals::new(Expect::Message, HELLO_TIMEOUT);
        let mut listener = Arc::clone(context.listener);
        let steering = &context.options.steering;
        loop {
            if let Some(decision) = steering.take_decision() {
                log::warn!("the operator has decided: {decision:?}");
                return (self.state.decided(decision), Resolution::Operator);
            }
            if let Some(steering::Recover::At(address)) = steering.take_recover() {
                self.listen_at(&address, &mut listener);
            }
            let now = clock::now();
            let is_over = match self.agreed {
                Some(_) => self.state.promise_is_over(now),
                None => now > reports_until,
            };
            if !lasts && is_over {
                lasts = true;
                vm.in_doubt(self.state, true);
            }
            let mut fds = Vec::new();
            arrivals.add_fds(&listener, &mut fds);
            if wait_readable(&fds, self.never, Some(LOOK_EVERY)).is_err() {
                // The machine is kept while the host lacks something for waiting.
                std::thread::sleep(LOOK_EVERY);
            }
            for hello in arrivals.take(&listener, self.never) {
                match self.hear(hello, context) {
                    Ok(heard) => return heard,
                    Err((Some(reason), channel)) => arrivals.refuse(channel, reason),
                    Err((None, channel)) => arrivals.dismiss(channel, &Answer::ok()),
                }
            }
        }
    }

    fn listen_at(&mut self, address: &crate::Address, listener: &mut Arc<Listener>) {
        match Listener::bind(address) {
            Ok(other) => {
                *listener = Arc::new(other.with_tls(listener.tls().cloned()));
                if let Some(faults) = &mut self.faults {
                    faults.rejoin.listener = Arc::clone(listener);
                }
            }
            Err(error) => log::error!("{}", error_text::chain(&error)),
        }
    }

    /// Takes the message of a connection. An error holds the reason to refuse it, or `None` if it was
    /// the source of an ended migration and has its answer.
    fn hear(
        &mut self,
        hello: Hello,
        context: Context<'_>,
    ) -> Result<(DoubtOutcome, Resolution), (Option<&'static str>, Channel)> {
        let refused = |reason, channel| Err((Some(reason), channel));
        match hello {
            Hello::Message(Message::Verdict { id, verdict }, control)
                if self.agreed.is_some_and(|agreed| agreed.id == id) =>
            {
                let known = self.state.hears(verdict);
                if matches!(known, DoubtOutcome::NotHere(_)) {
                    // The source continues whether it receives this or not.
                    let _ = control.yes();
                }
                Ok((known, Resolution::Verdict(control)))
            }
            Hello::Message(Message::Recover(recover), control)
                if late_reconnects::is_past(context.ended, &recover.id) =>
            {
                Err((None, control))
            }
            Hello::Message(Message::Recover(recover), control) => {
                let Some(faults) = &mut self.faults else {
                    return refused("this migration has no pages to come", control);
                };
                let returned = match faults.rejoin.admit(control, recover) {
                    Ok(returned) => returned,
                    Err((reason, control)) => return refused(reason, control),
                };
                // Only a source that has handed the guest over reconnects.
                let known = self.state.hears(Verdict::Committed);
                let word = match faults.take_over(returned, self.never) {
                    Ok(control) => Resolution::Returned(control),
                    Err(failure) => {
                        faults.disconnect();
                        log::warn!("the source is lost again: {}", failure.for_peer());
                        Resolution::Lost
                    }
                };
                Ok((known, word))
            }
            Hello::Message(_, channel) | Hello::Extra(_, _, channel) | Hello::Other(channel) => {
                refused(refusals::IN_DOUBT, channel)
            }
        }
    }
}
