// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Handover: state goes over, and with one acknowledgement the guest belongs to the destination.
//!
//! Owns the point of no return. With the negotiated protocol it is the moment before Confirm is
//! sent: until then the destination does not run the guest whatever it has received, from then on
//! no value exists here that could run it. With plain version 0 the destination runs the guest on
//! Complete, so exclusive resources are let go before, and taken back if the answer is not Ok.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::negotiate::{Links, Terms};
use super::serve::{Held, Reconnect, Server, serve_bulk, serve_urgent};
use super::stop::Stopped;
use super::{Context, Remains, Setback, check_cancel};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::page_server::Successor;
use crate::protocol::message::Message;
use crate::ram::GuestMemoryMap;
use crate::session::Session;
use crate::vm::{PausedVm, SourceVm};

/// The destination owns the guest.
pub(crate) struct HandedOver<V: SourceVm> {
    pub remains: Remains<V>,
    pub control: Channel,
    pub pages: Option<Pages<V>>,
    /// Why the destination may not know yet that the guest is its own: it learns that when the
    /// connections are made again.
    pub unconfirmed: Option<Failure>,
}

/// Pages that are to be served, and who serves them.
pub(crate) struct Pages<V: SourceVm> {
    pub server: Arc<Server<V::Memory>>,
    pub session: Session,
    pub bulk: Vec<Channel>,
    pub reconnect: Reconnect,
    pub successor: Option<Box<dyn Successor>>,
}

impl<V: SourceVm> HandedOver<V> {
    pub(crate) fn has_pages_to_serve(&self) -> bool {
        self.pages.is_some()
    }

    pub(crate) fn into_remains(self) -> Remains<V> {
        self.remains
    }
}

impl<V: SourceVm> Stopped<V> {
    /// Sends state, and gives the guest away.
    pub(crate) fn hand_over(self, context: Context<'_>) -> Result<HandedOver<V>, Setback<V>> {
        let Self { mut vm, mut control, mut links, later, since } = self;
        let (bulk, urgent) = (links.memory.len(), links.urgent.len());
        let mut session = None;
        let server = later.as_ref();
        let prepared =
            give_everything(&mut vm, &mut control, &mut links, server, &mut session, context);
        if let Err(failure) = prepared {
            // The destination's own words say most; after them what the urgent servers ran into.
            let fate = session.as_ref().map(|session: &Session| session.fate());
            let failure = if matches!(failure.cause, Cause::Refused(_)) {
                failure
            } else {
                fate.and_then(|fate| fate.take_failure()).unwrap_or(failure)
            };
            drop(session);
            return Err(Setback::Paused(vm, control, failure));
        }
        // The point of no return. A cancel from here on comes too late.
        let remains = vm.handed_over();
        let confirmed = match &links.terms {
            Terms::Plain => Ok(()),
            Terms::Negotiated { .. } => confirm(&mut control, context),
        };
        let downtime_us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        context.progress.counters.downtime_us.store(downtime_us, Ordering::Relaxed);
        let pages = later.zip(session).zip(links.token).map(|((server, session), id)| {
            let reconnect = Reconnect::new(context.options, id, bulk, urgent);
            let successor = links.successor;
            Pages { server, session, bulk: links.memory, reconnect, successor }
        });
        match confirmed {
            Ok(()) => Ok(HandedOver { remains, control, pages, unconfirmed: None }),
            // It may run the guest by now, or wait for the word that it may: both learn it from a
            // connection that is made again.
            Err(failure) if pages.is_some() && !matches!(failure.cause, Cause::Refused(_)) => {
                Ok(HandedOver { remains, control, pages, unconfirmed: Some(failure) })
            }
            Err(failure) => {
                let held = pages.map(|pages| Held::new(pages.server));
                Err(Setback::HandedOver(remains, held, failure))
            }
        }
    }
}

/// Saves and sends all state, up to the acknowledgement.
fn give_everything<P: PausedVm, M: GuestMemoryMap>(
    vm: &mut P,
    control: &mut Channel,
    links: &mut Links,
    server: Option<&Arc<Server<M>>>,
    session: &mut Option<Session>,
    context: Context<'_>,
) -> Result<(), Failure> {
    let state = vm.state_json().map_err(Cause::Vm).step("saving the guest's state")?;
    check_cancel(context.cancel, "saving the guest's state")?;
    let mut pending = server.map(|server| server.encode_pending());
    if let Some(server) = server {
        // Putting state in may touch memory over there, so requests are served from now on; without
        // connections of their own they come on those of the pushers.
        let mut serving = Session::new()?;
        if links.urgent.is_empty() {
            let pending = Message::Pending(pending.take().unwrap_or_default());
            control
                .ask(&pending, context.options.limits.answer)
                .step("telling the destination what is missing")?;
            serve_bulk(server, &mut serving, std::mem::take(&mut links.memory))?;
        } else {
            serve_urgent(server, &mut serving, std::mem::take(&mut links.urgent))?;
        }
        *session = Some(serving);
    }
    send_state(vm, control, pending, state, &links.terms, context)
}

/// Sends everything that the destination needs, in one go where the peer can take it so, and waits
/// for the acknowledgement.
fn send_state<P: PausedVm>(
    vm: &mut P,
    control: &mut Channel,
    pending: Option<Vec<u8>>,
    state: Vec<u8>,
    terms: &Terms,
    context: Context<'_>,
) -> Result<(), Failure> {
    let limit = context.options.limits.answer;
    let complete = if vm.ran_before() { Message::Complete } else { Message::CompletePaused };
    match terms {
        Terms::Plain => {
            control.ask(&Message::State(state), limit).step("sending the guest's state")?;
            release(vm)?;
            control.ask(&complete, limit).step("handing the guest over")?;
        }
        Terms::Negotiated { .. } => {
            let mut answers = 2;
            let mut bytes = Vec::new();
            if let Some(pending) = pending {
                bytes = Message::Pending(pending).encode();
                answers += 1;
            }
            bytes.extend(Message::State(state).encode());
            bytes.extend(complete.encode());
            let sent = control.connection.send(&bytes);
            sent.map_err(|error| control.explain(error)).step("sending the guest's state")?;
            for _ in 0..answers {
                control.answer(limit).step("waiting for the handover to be acknowledged")?;
            }
            release(vm)?;
            check_cancel(context.cancel, "confirming the handover")?;
        }
    }
    Ok(())
}

fn release(vm: &mut impl PausedVm) -> Result<(), Failure> {
    vm.release_exclusive().map_err(Cause::Vm).step("letting go of disks and taps")
}

/// Tells the destination to run the guest, and hears that it does.
fn confirm(control: &mut Channel, context: Context<'_>) -> Result<(), Failure> {
    const STEP: &str = "confirming the handover";
    let never = crate::cancel::Cancel::new().map_err(Cause::Resource).step(STEP)?;
    control.connection.set_cancel(&never);
    control.ask(&Message::Confirm, context.options.limits.answer).map(drop).step(STEP)
}
