// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Handover: sends the state; with one acknowledgement the guest belongs to the destination.
//!
//! Owns the point of no return. With the negotiated protocol it is the moment before Confirm is sent
//! ([`crate::commit`] has the rules): until then the destination does not run the guest, whatever it has
//! received, and from then on no value exists here that could run it. With plain version 0 the destination
//! runs the guest on Complete, so exclusive resources are released before, and acquired again if it
//! refuses. [`super::other`] has what is different with another program.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blobs::send_blobs;
use super::negotiate::{Links, Terms};
use super::other::{self, Given};
use super::peers::Peers;
use super::serve::{Held, Reconnect, Server, serve_bulk};
use super::stop::Stopped;
use super::verdict::{Retraction, VerdictSender, note_standing};
use super::{Context, PhaseFailure, Remains, check_cancel};
use crate::channel::Channel;
use crate::commit::clock;
use crate::commit::source::{Acknowledged, Committed, Offered, Outdated, Unconfirmed, Withheld};
use crate::error::{Cause, Failure, Step};
use crate::figures::Figures;
use crate::latency::micros;
use crate::page_server::PageServerHandle;
use crate::progress::Phase;
use crate::protocol::message::Message;
use crate::ram::GuestMemoryMap;
use crate::session::Session;
use crate::vm::{PausedVm, SourceVm};

/// The destination owns the guest.
pub(crate) struct HandedOver<V: SourceVm> {
    pub remains: Remains<V>,
    pub control: Channel,
    pub pages: Option<Pages<V>>,
    /// Set while the destination may not know yet that it owns the guest.
    pub unconfirmed: Option<Doubt>,
    /// The dirty log, which is stopped when the guest no longer waits for that.
    pub log: Option<V::Log>,
}

/// The destination may not know that it owns the guest.
pub(crate) struct Doubt {
    /// The failure that led to it.
    pub failure: Failure,
    pub state: Unconfirmed,
    /// Reports the verdict in precopy; in postcopy, reconnecting does.
    pub teller: Option<VerdictSender>,
}

/// What a failure means.
pub(super) enum Stage {
    /// The destination does not run the guest, and cannot be in doubt.
    Safe,
    /// The destination may have acknowledged, and is told that the guest stays.
    Offered(Withheld),
    /// Another program has the state, and holds what only one side may hold until it has dropped its machine.
    Given(Given),
    /// Another program was told to run the guest, and only its answer says whether it does.
    InDoubt,
}

impl Stage {
    fn withheld(self) -> Option<Withheld> {
        match self {
            Self::Offered(withheld) => Some(withheld),
            Self::Safe | Self::Given(_) | Self::InDoubt => None,
        }
    }

    /// What another program has, unless it is in doubt.
    fn given(&self) -> Option<Given> {
        match self {
            Self::Given(given) => Some(*given),
            // It has answered all messages.
            Self::InDoubt => Some(Given { is_answered: true, answers_until: Instant::now() }),
            Self::Safe | Self::Offered(_) => None,
        }
    }
}

/// Most acknowledgements that may become outdated before the source commits: a source that is later than
/// that so often is too slow.
const RENEWALS_MAX: u32 = 4;

/// The pages that are to be served, and the connections for them.
pub(crate) struct Pages<V: SourceVm> {
    pub server: Arc<Server<V::Memory>>,
    pub session: Session,
    pub bulk: Vec<Channel>,
    pub reconnect: Reconnect,
    pub page_server: Option<Box<dyn PageServerHandle>>,
}

impl<V: SourceVm> HandedOver<V> {
    pub(crate) fn has_pages_to_serve(&self) -> bool {
        self.pages.is_some()
    }

    pub(crate) fn into_remains(self) -> Remains<V> {
        self.remains
    }

    /// Reports to the destination of a precopy that it owns the guest, for as long as the source reconnects
    /// by itself. Returns the last phase.
    pub(crate) fn confirm_again(
        self,
        context: Context<'_>,
    ) -> Result<(Remains<V>, Phase), PhaseFailure<V>> {
        let Self { remains, control, unconfirmed, log: _log, .. } = self;
        let Some(Doubt { failure, state, teller: Some(teller) }) = unconfirmed else {
            return Ok((remains, Phase::Done));
        };
        log::warn!("the destination may not know that it owns the guest: {}", failure.for_peer());
        context.progress.cannot_recover(failure.for_peer());
        match teller.confirm(state, control, context) {
            Ok(()) => Ok((remains, Phase::Done)),
            // The destination's own reason says more than the loss.
            Err(told) if matches!(told.cause, Cause::Refused(_) | Cause::Cancelled) => {
                Err(PhaseFailure::HandedOver(remains, None, told))
            }
            Err(_) => Err(PhaseFailure::HandedOver(remains, None, failure)),
        }
    }
}

impl<V: SourceVm> Stopped<V> {
    /// Sends the state, and hands the guest over.
    pub(crate) fn hand_over(self, context: Context<'_>) -> Result<HandedOver<V>, PhaseFailure<V>> {
        let Self { mut vm, mut control, mut links, later, log, since } = self;
        let (bulk, urgent) = (links.memory.len(), links.urgent_count.into());
        let mut session = None;
        let server = later.as_ref();
        let mut stage = Stage::Safe;
        let prepared = give_everything(
            &mut vm,
            &mut control,
            &mut links,
            (server, &mut session),
            &mut stage,
            context,
        );
        let prepared = prepared.and_then(|acknowledged| commit(acknowledged, &links.terms));
        let committed = match prepared {
            Ok(committed) => committed,
            Err(failure) => {
                // The destination's own reason comes first, then the failure of the threads that serve
                // requests.
                let fate = session.as_ref().map(|session: &Session| session.fate());
                let is_refused = matches!(failure.cause, Cause::Refused(_));
                let failure = if is_refused {
                    failure
                } else {
                    fate.and_then(|fate| fate.take_failure()).unwrap_or(failure)
                };
                // They are waited for when the guest runs again.
                if let Some(serving) = &session {
                    serving.fate().stop().cancel();
                }
                links.serving = session.or(links.serving);
                if matches!(stage, Stage::InDoubt) && !is_refused {
                    // What is still under way of the last message is not sent again.
                    control.connection.reset_when_closed();
                    return Err(PhaseFailure::InDoubt(vm, failure));
                }
                let given = stage.given();
                // A destination that has refused is not in doubt.
                let withheld = stage.withheld().filter(|_| !is_refused);
                let retraction = withheld.zip(links.teller(context));
                let retraction =
                    retraction.map(|(withheld, teller)| Box::new(Retraction { withheld, teller }));
                let peers = Peers::new(control, links);
                let paused = PhaseFailure::Paused { vm, peers, failure, retraction, given, log };
                return Err(paused);
            }
        };
        // The point of no return: a cancel from here on comes too late.
        let ran = vm.ran_before();
        let remains = vm.handed_over();
        let confirmed = match (&links.terms, committed) {
            (Terms::Plain { .. }, _) | (_, None) => Ok(()),
            (Terms::Negotiated { .. }, Some(committed)) => {
                let figures = last_figures(&links, since, context);
                confirm(&mut control, figures, context).map_err(|failure| (failure, committed))
            }
        };
        if ran && confirmed.is_ok() {
            // Otherwise it is not known when the guest began to run, or whether it has.
            context.progress.counters.downtime_us.set(micros(since.elapsed()));
        }
        let teller = links.teller(context);
        let pages = later.zip(session).zip(links.token).map(|((server, session), id)| {
            let reconnect = Reconnect::new(context.options, id, bulk, urgent);
            let page_server = links.page_server;
            Pages { server, session, bulk: links.memory, reconnect, page_server }
        });
        match confirmed {
            Ok(()) => Ok(HandedOver { remains, control, pages, unconfirmed: None, log }),
            // The destination may run the guest by now, or wait for the confirmation.
            Err((failure, committed))
                if (pages.is_some() || teller.is_some())
                    && !matches!(failure.cause, Cause::Refused(_)) =>
            {
                let teller = teller.filter(|_| pages.is_none());
                let doubt = Doubt { failure, state: committed.lost(), teller };
                Ok(HandedOver { remains, control, pages, unconfirmed: Some(doubt), log })
            }
            Err((failure, _)) => {
                let held = pages.map(|pages| Held::new(pages.server));
                Err(PhaseFailure::HandedOver(remains, held, failure))
            }
        }
    }
}

/// Commits, if the acknowledgement can still be used; `None` with plain version 0, where the destination
/// has the guest already.
fn commit(acknowledged: Option<Acknowledged>, terms: &Terms) -> Result<Option<Committed>, Failure> {
    let Some(acknowledged) = acknowledged else { return Ok(None) };
    let usable = terms.usable();
    let committed = acknowledged.commit(clock::now(), usable);
    committed.map(Some).map_err(|outdated| too_old(outdated, usable))
}

fn too_old(outdated: Outdated, usable: Duration) -> Failure {
    let age = outdated.age;
    Failure::new("using the destination's acknowledgement", Cause::Outdated { age, usable })
}

/// Saves and sends all state, up to the acknowledgement.
fn give_everything<P: PausedVm, M: GuestMemoryMap>(
    vm: &mut P,
    control: &mut Channel,
    links: &mut Links,
    (server, session): (Option<&Arc<Server<M>>>, &mut Option<Session>),
    stage: &mut Stage,
    context: Context<'_>,
) -> Result<Option<Acknowledged>, Failure> {
    let blobs = send_blobs(vm, control, links, context)?;
    // The destination takes the end of these connections for the end of their work.
    if !blobs.is_empty() {
        links.memory.clear();
    }
    let state = vm.state_json(&blobs).map_err(Cause::Vm).step("saving the guest's state")?;
    check_cancel(context.cancel, "saving the guest's state")?;
    let mut pending = server.map(|server| server.encode_pending());
    if let Some(server) = server {
        // Restoring the state may touch memory at the destination, so requests are served from now on: threads wait for
        // those on connections of their own, and others come on those for background pages.
        let mut serving = links.serving.take().map_or_else(Session::new, Ok)?;
        if links.urgent_count == 0 {
            let pending = Message::Pending(pending.take().unwrap_or_default());
            control
                .ask(&pending, context.options.limits.answer)
                .step("telling the destination which pages are missing")?;
            serve_bulk(server, &mut serving, std::mem::take(&mut links.memory))?;
        }
        *session = Some(serving);
    }
    send_state(vm, control, (pending, state), &links.terms, stage, context)
}

/// Sends everything that the destination needs, without waiting in between if the peer supports that, and
/// waits for the acknowledgement. `stage` records how a failure is to be handled once the destination may
/// have acknowledged.
fn send_state<P: PausedVm>(
    vm: &mut P,
    control: &mut Channel,
    (pending, state): (Option<Vec<u8>>, Vec<u8>),
    terms: &Terms,
    stage: &mut Stage,
    context: Context<'_>,
) -> Result<Option<Acknowledged>, Failure> {
    let limit = context.options.limits.answer;
    let complete = if vm.ran_before() { Message::Complete } else { Message::CompletePaused };
    match terms {
        Terms::Plain { other: Some(_) } => {
            // It takes them with the state.
            release(vm)?;
            other::hand_over(control, state, &complete, stage, context)?;
            Ok(None)
        }
        Terms::Plain { other: None } => {
            control.ask(&Message::State(state), limit).step("sending the guest's state")?;
            release(vm)?;
            control.ask(&complete, limit).step("handing the guest over")?;
            Ok(None)
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
            let offered = Offered::new(clock::now());
            *stage = Stage::Offered(offered.fails());
            let sent = control.connection.send(&bytes);
            sent.map_err(|error| control.explain(error)).step("sending the guest's state")?;
            for _ in 0..answers {
                control.answer(limit).step("waiting for the handover to be acknowledged")?;
            }
            let acknowledged = make_usable(offered.acknowledged(), control, terms, context)?;
            *stage = Stage::Offered(acknowledged.fails());
            release(vm)?;
            check_cancel(context.cancel, "confirming the handover")?;
            Ok(Some(acknowledged))
        }
    }
}

/// Renews an acknowledgement that took too long, because restoring the state took long or the source was
/// stopped meanwhile.
fn make_usable(
    mut acknowledged: Acknowledged,
    control: &mut Channel,
    terms: &Terms,
    context: Context<'_>,
) -> Result<Acknowledged, Failure> {
    let usable = terms.usable();
    for _ in 0..RENEWALS_MAX {
        let outdated = match acknowledged.still_usable(clock::now(), usable) {
            Ok(acknowledged) => return Ok(acknowledged),
            Err(outdated) => outdated,
        };
        if !terms.hears_verdicts() {
            return Err(too_old(outdated, usable));
        }
        let offered = outdated.asked_again(clock::now());
        control
            .ask(&Message::Renew, context.options.limits.answer)
            .step("requesting another acknowledgement")?;
        acknowledged = offered.acknowledged();
    }
    acknowledged.still_usable(clock::now(), usable).map_err(|outdated| too_old(outdated, usable))
}

fn release(vm: &mut impl PausedVm) -> Result<(), Failure> {
    vm.release_exclusive().map_err(Cause::Vm).step("releasing disks and taps")
}

/// The figures for the last message, if the destination accepts them.
fn last_figures(links: &Links, since: Instant, context: Context<'_>) -> Vec<u8> {
    if !links.terms.takes_figures() {
        return Vec::new();
    }
    let figures = Figures {
        stopped_us: Some(micros(since.elapsed())),
        round_trip_us: Some(micros(links.fastest_answer())),
        ..context.progress.figures()
    };
    figures.to_json()
}

/// Tells the destination to run the guest, and waits until it does.
fn confirm(control: &mut Channel, figures: Vec<u8>, context: Context<'_>) -> Result<(), Failure> {
    const STEP: &str = "confirming the handover";
    let never = crate::cancel::Cancel::new().map_err(Cause::Resource).step(STEP)?;
    control.connection.set_cancel(&never);
    let answer =
        control.ask(&Message::Confirm(figures), context.options.limits.answer).step(STEP)?;
    note_standing(&answer.payload);
    Ok(())
}
