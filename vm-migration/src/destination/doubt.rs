// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! In doubt: the handover was acknowledged, and the connection was lost before the source's word.
//!
//! Owns the wait for that word, however long it takes: from the source, on a connection of its own,
//! or from a person. Nothing else ends it; what each word means is [`crate::commit::destination`]'s.
//! The machine and its fault threads stay as they are meanwhile.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::Context;
use super::fault::FaultThreads;
use super::hello;
use super::receive::Agreed;
use super::rejoin::HELLO_TIMEOUT;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::commit::destination::{InDoubt, Known};
use crate::commit::{Verdict, clock};
use crate::error::{Cause, Failure};
use crate::progress::Phase;
use crate::protocol::message::Message;
use crate::ram::GuestMemoryMap;
use crate::steering::{self, LOOK_EVERY};
use crate::transport::{Listener, WaitEnd, wait_readable};
use crate::vm::DestinationVm;

/// Who gave the word, and waits for what comes of it.
pub(super) enum Word {
    /// A source that said it on a connection for nothing else.
    Verdict(Channel),
    /// A source that has come back with all its connections; the first of them.
    Returned(Channel),
    /// A source that wanted to come back and was lost again: it will.
    Lost,
    /// A person.
    Person,
}

/// What a destination in doubt waits with.
pub(super) struct Doubt<'a, M: GuestMemoryMap> {
    pub state: InDoubt,
    pub agreed: &'a Agreed,
    /// With pages missing.
    pub faults: Option<&'a mut FaultThreads<M>>,
    /// Never cancelled.
    pub never: &'a Cancel,
}

impl<M: GuestMemoryMap> Doubt<'_, M> {
    /// Waits until it is known which side has the guest.
    pub(super) fn resolve<V: DestinationVm>(
        mut self,
        vm: &mut V,
        lost: &Failure,
        context: Context<'_>,
    ) -> (Known, Word) {
        log::warn!("which side has the guest is in doubt: {}", lost.for_peer());
        if let Some(faults) = &mut self.faults {
            faults.disconnect();
        }
        context.progress.cannot_recover(lost.for_peer());
        context.progress.enter(Phase::InDoubt);
        vm.in_doubt(self.state, false);
        let mut lasts = false;
        let mut listener = Arc::clone(context.listener);
        let steering = &context.options.steering;
        loop {
            if let Some(decision) = steering.take_decision() {
                log::warn!("a person has decided: {decision:?}");
                return (self.state.decided(decision), Word::Person);
            }
            if let Some(steering::Recover::At(address)) = steering.take_recover() {
                self.listen_at(&address, &mut listener);
            }
            if !lasts && self.state.promise_is_over(clock::now()) {
                lasts = true;
                vm.in_doubt(self.state, true);
            }
            match wait_readable(&[listener.as_raw_fd()], self.never, Some(LOOK_EVERY)) {
                Ok(WaitEnd::Ready(_)) => match self.hear(&listener) {
                    Ok(heard) => return heard,
                    Err(cause) => {
                        let why = error_text::chain(&cause);
                        log::warn!("a connection in doubt was turned away: {why}");
                        // Neither a busy loop nor a flood of lines.
                        std::thread::sleep(LOOK_EVERY);
                    }
                },
                Ok(WaitEnd::TimedOut | WaitEnd::Cancelled) => {}
                // The machine is kept all the same.
                Err(_) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    fn listen_at(&mut self, address: &crate::Address, listener: &mut Arc<Listener>) {
        match Listener::bind(address) {
            Ok(other) => {
                *listener = Arc::new(other);
                if let Some(faults) = &mut self.faults {
                    faults.rejoin.listener = Arc::clone(listener);
                }
            }
            Err(error) => log::error!("{}", error_text::chain(&error)),
        }
    }

    /// Takes one connection; an error when it is not the source's.
    fn hear(&mut self, listener: &Listener) -> Result<(Known, Word), Cause> {
        let connection =
            listener.accept(self.never, Some(std::time::Duration::ZERO), HELLO_TIMEOUT)?;
        let (mut control, message) = hello::hear(connection, HELLO_TIMEOUT)?;
        let refused = match message {
            Message::Verdict { id, verdict } if id == self.agreed.id => {
                let known = self.state.hears(verdict);
                if matches!(known, Known::NotHere(_)) {
                    // It goes on whether it hears this or not.
                    let _ = control.yes();
                }
                return Ok((known, Word::Verdict(control)));
            }
            Message::Recover(recover) => match &mut self.faults {
                Some(faults) => match faults.rejoin.admit(control, recover) {
                    Ok(returned) => {
                        // Only a source that has given the guest away comes back.
                        let known = self.state.hears(Verdict::Committed);
                        let word = match faults.take_over(returned, self.never) {
                            Ok(control) => Word::Returned(control),
                            Err(failure) => {
                                faults.disconnect();
                                log::warn!("the source is lost again: {}", failure.for_peer());
                                Word::Lost
                            }
                        };
                        return Ok((known, word));
                    }
                    Err((refused, other)) => {
                        control = other;
                        refused
                    }
                },
                None => "this migration has no pages to come",
            },
            _ => {
                "a VM has arrived here, and it is not known yet whether it runs where it was; \
                 nothing else is received"
            }
        };
        control.refuse(refused);
        Err(Cause::Refused(refused.to_string()))
    }
}
