// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Listen and Negotiate: finds the source among all connections, agrees on versions and capabilities, and
//! maps memory.
//!
//! Owns the checks that must fail before anything starts: versions, capabilities, the right to use
//! userfaultfd, the memory layout.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::arrivals::{Arrivals, Expect, Hello};
use super::building::Building;
use super::check::Checks;
use super::parking::{Planned, plan};
use super::preparing::spare_threads;
use super::receive::{Mapped, Parts, Terms};
use super::{Context, PhaseFailure, late_reconnects};
use crate::channel::Channel;
use crate::descriptors;
use crate::error::{Cause, Failure, Step};
use crate::fault::FaultSource;
use crate::layout::Layout;
use crate::options::{MemoryMode, ReceiveOptions};
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::{
    Accepted, FEATURE_COMING, FEATURE_CONFIRM, FEATURE_FEWER_CONNECTIONS, FEATURE_POSTCOPY, Offer,
    Prepared, TOKEN_BYTES, common, features, millis, software,
};
use crate::protocol::formats::Formats;
use crate::protocol::message::{Answer, Message, VERSION};
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;
use crate::transport::{TransportError, WaitEnd, wait_readable};
use crate::uffd::{self, Uffd};
use crate::vm::{DestinationBuilder, DestinationVm, GivenMemory, MappedMachine};

/// How long a connection may take to prove that it is the source. Nothing waits for it meanwhile.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// The refusal of a message that does not begin a migration: what a destination says to a check that does not know them.
pub(crate) const BEGINS_NOTHING: &str =
    "a migration is awaited here, and this message does not begin one";

/// Most userfaultfds that are derived from a number of connections.
pub const READERS_MAX: u16 = 16;

/// A source that has connected.
pub(crate) struct Connected {
    control: Channel,
    /// Its first message.
    first: Message,
}

/// Waits for the source. Other clients do not end the wait: a silent connection is closed after a time, one
/// that sends anything else is told that a VM is awaited, and the source of an ended migration that does not
/// know the outcome is told that. One that only checks a migration is answered meanwhile.
pub(crate) fn listen<V: crate::vm::DestinationVm>(
    context: Context<'_>,
    mut checks: Checks,
) -> Result<Connected, PhaseFailure<V>> {
    const STEP: &str = "waiting for the source";
    let early = |cause: Cause| PhaseFailure::early(None, Failure::new(STEP, cause));
    let deadline = context.options.accept_timeout.map(|limit| (Instant::now() + limit, limit));
    let mut arrivals = Arrivals::new(Expect::Message, HELLO_TIMEOUT);
    loop {
        let mut fds = Vec::new();
        arrivals.add_fds(context.listener, &mut fds);
        let left = deadline.map(|(at, _)| at.saturating_duration_since(Instant::now()));
        let wait = arrivals.look_again().into_iter().chain(left).min();
        match wait_readable(&fds, context.cancel, wait) {
            Ok(WaitEnd::Cancelled) => return Err(early(Cause::Cancelled)),
            Ok(WaitEnd::Ready(_) | WaitEnd::TimedOut) => {}
            Err(error) => return Err(early(Cause::Resource(error))),
        }
        let mut source = None;
        for hello in arrivals.take(context.listener, context.cancel) {
            match hello {
                Hello::Message(first @ Message::Start { .. }, control) if source.is_none() => {
                    source = Some(Connected { control, first });
                }
                Hello::Message(Message::Check, other) if source.is_none() => {
                    if let Err((other, reason)) = checks.begin(other) {
                        arrivals.refuse(other, reason);
                    }
                }
                Hello::Message(
                    message @ (Message::Recover(_) | Message::Verdict { .. }),
                    other,
                ) => match late_reconnects::reply(&message, context.ended) {
                    Ok(()) => arrivals.dismiss(other, &Answer::ok()),
                    Err(reason) => arrivals.refuse(other, reason),
                },
                Hello::Message(_, other) | Hello::Extra(_, _, other) | Hello::Other(other) => {
                    arrivals.refuse(other, BEGINS_NOTHING);
                }
            }
        }
        if let Some(source) = source {
            source.control.connection.set_stall_timeout(context.options.limits.answer);
            return Ok(source);
        }
        if let Some((at, after)) = deadline
            && Instant::now() >= at
        {
            return Err(early(TransportError::Timeout { what: STEP, after }.into()));
        }
    }
}

impl Connected {
    /// Negotiates the protocol, maps memory, and begins to build the machine.
    pub(crate) fn negotiate<B: DestinationBuilder>(
        mut self,
        builder: B,
        context: Context<'_>,
    ) -> Result<Mapped<B::Vm>, PhaseFailure<B::Vm>> {
        let mut building = None;
        match self.try_negotiate(builder, &mut building, context) {
            Ok(parts) => Ok(Mapped::new(parts, self.control)),
            Err(failure) => {
                // Before the machine that is being built ends, which may take long.
                failure.tell(&self.control);
                Err(PhaseFailure::early(None, failure))
            }
        }
    }

    /// On failure the machine that is being built is left in `begun`.
    fn try_negotiate<B: DestinationBuilder>(
        &mut self,
        builder: B,
        begun: &mut Option<Building<B::Vm>>,
        context: Context<'_>,
    ) -> Result<Parts<B::Vm>, Failure> {
        const STEP: &str = "mapping the guest's memory at the destination";
        let control = &mut self.control;
        let first = std::mem::replace(&mut self.first, Message::Complete);
        let (terms, planned) = agree(first, control, context.options, builder.formats())?;
        let (config, given) = take_config(control, &terms)?;
        let told = terms.tells_of_mapping();
        let mapped = control.busy(told, || builder.map_memory(&config, given, terms.memory_mode()));
        let mapped = mapped.map_err(Cause::Vm).step(STEP)?;
        // From here on this thread is as confined as the machine's process is to be.
        let parked = planned.as_ref().map(Planned::park).transpose()?;
        let memory = mapped.memory();
        if matches!(&terms, Terms::Negotiated { offer, .. } if offer.memory_mode.may_postcopy()) {
            memory.use_small_pages(true);
        }
        let total_bytes: u64 = memory.layout().regions().iter().map(|r| r.len_bytes).sum();
        let counters = &context.progress.counters;
        counters.total_bytes.set(total_bytes);
        context.progress.set_mode(terms.mode());
        let mut payload = Vec::new();
        let mut first_machine = None;
        if let Terms::Negotiated { offer, .. } = &terms {
            check_layout(memory.layout(), offer)?;
            payload = Prepared { regions: memory.layout().regions().to_vec() }.to_json();
            first_machine = (offer.memory_mode == MemoryMode::Postcopy).then_some(offer);
        }
        // A machine whose pages are still to come takes its state without them.
        let until_ready = first_machine.is_none();
        let is_deferred = mapped.is_built_from_state();
        if is_deferred && terms.negotiated() {
            let what = "a source that negotiates has sent the configuration of another program";
            let remedy = "send the VM with the program that runs it";
            return Err(Cause::Unsupported { what: what.to_string(), remedy }).step(STEP);
        }
        let building = begun.insert(if is_deferred {
            Building::deferred(mapped)?
        } else {
            Building::start(mapped, until_ready)?
        });
        let mut fault_source = None;
        if let Some(offer) = first_machine {
            // The source stops its guest next, so the machine has to be built before; and it may know the
            // best way to catch accesses.
            building.wait_telling(control, told, context.cancel)?;
            let (vm, watched) = control.busy(told, || {
                let mut vm = building.finish()?;
                let watched = watch(&mut vm, &memory, offer, context);
                Ok::<_, Failure>((vm, watched))
            })?;
            *building = Building::done(vm)?;
            fault_source = Some(watched?);
        }
        let answer = Answer::Ok { offer_taken: false, payload };
        control.connection.send(&answer.encode()).step("answering the configuration")?;
        let Some(building) = begun.take() else { unreachable!("it was put there above") };
        Ok(Parts { building, memory, terms, fault_source, parked })
    }
}

/// Takes Start, and Capabilities if the source offers them.
fn agree(
    first: Message,
    control: &mut Channel,
    options: &ReceiveOptions,
    known: Formats,
) -> Result<(Terms, Option<Planned>), Failure> {
    const STEP: &str = "negotiating";
    let offer = match first {
        Message::Start { version: VERSION, offer } => offer,
        Message::Start { version, .. } => return Err(ProtocolError::Version(version)).step(STEP),
        other => return Err(unexpected(&other, "Start")),
    };
    let answer = Answer::Ok { offer_taken: offer, payload: Vec::new() };
    control.connection.send(&answer.encode()).step(STEP)?;
    if !offer {
        control.speak_plain();
        return Ok((Terms::Plain, None));
    }
    let mut offer = match read(control, "waiting for the source's capabilities")? {
        Message::Capabilities(json) => Offer::parse(&json).step(STEP)?,
        other => return Err(unexpected(&other, "Capabilities")),
    };
    log::info!("the source is {:?}", offer.software);
    let layout = offer.layout().step(STEP)?;
    let is_unix = control.connection.is_unix();
    if let Some(refusal) = refusals(&offer, &layout, known, is_unix).into_iter().next() {
        return Err(refusal);
    }
    let mut ours = features();
    if options.prepare_threads.unwrap_or_else(spare_threads) == 0 {
        // The source need not determine which memory it will send.
        ours.remove(FEATURE_COMING);
    }
    let common = common(&ours, &offer.features);
    let offered = (offer.bulk_connections, offer.urgent_connections());
    let connections_max = limit_connections(&mut offer, &common);
    let (connections_max, planned) = plan(&mut offer, offered, connections_max, &common, options)?;
    let token = random_token().map_err(Cause::Resource).step(STEP)?;
    let promise_ms = Some(millis(options.limits.rejoin));
    let software = software();
    let (features, formats) = (ours, known);
    let accepted = Accepted { software, features, token, promise_ms, formats, connections_max };
    let answer = Answer::Ok { offer_taken: false, payload: accepted.to_json() };
    control.connection.send(&answer.encode()).step(STEP)?;
    Ok((Terms::Negotiated { offer, token }, planned))
}

/// Leaves as many further connections in the offer as this process has descriptors for; returns how many that are at the
/// most, if it is less than was offered. A source that does not know of this opens all.
fn limit_connections(offer: &mut Offer, common: &BTreeSet<String>) -> Option<u16> {
    let offered = (offer.bulk_connections, offer.urgent_connections());
    let all = offered.0.saturating_add(offered.1);
    // The machine is still to be built: each vCPU has a descriptor of KVM, and one that wakes it. There are about as many as
    // connections for requested pages, where these are many.
    let of_vcpus = offered.1.saturating_mul(2);
    let room = descriptors::room(all.saturating_add(of_vcpus));
    let room = room.saturating_sub(of_vcpus);
    if room >= all || !common.contains(FEATURE_FEWER_CONNECTIONS) {
        return None;
    }
    let mode = offer.memory_mode;
    leave(offer, descriptors::fewer_telling(offered, room, mode, descriptors::FEW_HERE));
    Some(room)
}

pub(super) fn leave(offer: &mut Offer, counts: (u16, u16)) {
    (offer.bulk_connections, offer.urgent_connections) = counts;
    offer.many_urgent_connections = None;
}

/// How many threads read faults from userfaultfd.
pub(super) fn fault_readers(urgent_connections: u16, options: &ReceiveOptions) -> usize {
    options.fault_readers.unwrap_or(usize::from(urgent_connections.clamp(1, READERS_MAX)))
}

/// What of an offer cannot be done here: all of it, as far as it is known before anything is built.
pub(super) fn refusals(
    offer: &Offer,
    layout: &Layout,
    known: Formats,
    is_unix: bool,
) -> Vec<Failure> {
    const STEP: &str = "negotiating";
    let mut found = Vec::new();
    let unsupported = |what, remedy| Failure::new(STEP, Cause::Unsupported { what, remedy });
    if let Some(what) = offer.formats.beyond(known) {
        let what = format!("the source's guest needs {what}, at the destination");
        found.push(unsupported(what, "update the destination"));
    }
    let common = common(&features(), &offer.features);
    let needed: &[&str] = match offer.memory_mode {
        MemoryMode::Precopy => &[FEATURE_CONFIRM],
        MemoryMode::Postcopy | MemoryMode::Auto => &[FEATURE_CONFIRM, FEATURE_POSTCOPY],
    };
    for missing in needed.iter().filter(|feature| !common.contains(**feature)) {
        found.push(unsupported(format!("the source lacks {missing}"), "update the source"));
    }
    if offer.local && !is_unix {
        let what = "memory can only be handed over through a Unix socket".to_string();
        found.push(unsupported(what, "use a unix: address"));
    }
    if offer.local && offer.memory_mode.may_postcopy() {
        let why = "local and postcopy exclude each other";
        found.push(Failure::new(STEP, ProtocolError::Malformed { what: "capability offer", why }));
    }
    if offer.memory_mode.may_postcopy() {
        found.extend(uffd::check(layout.regions()).step("checking for userfaultfd").err());
    }
    found
}

/// Takes the configuration, and before it the memory files of a local migration.
fn take_config(
    control: &mut Channel,
    terms: &Terms,
) -> Result<(Vec<u8>, Vec<GivenMemory>), Failure> {
    const STEP: &str = "taking memory over";
    let offer = match terms {
        Terms::Negotiated { offer, .. } if offer.local => Some(offer),
        _ => None,
    };
    control.reader.welcome_descriptors(offer.is_some());
    let mut given: Vec<GivenMemory> = Vec::new();
    let config = loop {
        match (read(control, "waiting for the configuration")?, offer) {
            (Message::Config(config), _) => break config,
            (Message::MemoryFd { slot }, Some(offer)) => {
                let malformed = |why| {
                    Failure::new(STEP, ProtocolError::Malformed { what: "file of memory", why })
                };
                let descriptor = control.reader.take_descriptor();
                let file = descriptor.ok_or_else(|| malformed("no descriptor came with it"))?;
                let region = usize::try_from(slot).ok().and_then(|slot| offer.regions.get(slot));
                let name = &region.ok_or_else(|| malformed("it names no region"))?.name;
                if given.iter().any(|zone| zone.name == *name) {
                    return Err(malformed("its zone has one already"));
                }
                given.push(GivenMemory { name: name.clone(), file: file.into() });
                control.yes().step(STEP)?;
            }
            (Message::MemoryFd { .. }, None) if !terms.negotiated() => {
                let what = "the source hands its memory over as files".to_string();
                let remedy = "send the VM without local=on";
                return Err(Cause::Unsupported { what, remedy }).step(STEP);
            }
            (other, _) => return Err(unexpected(&other, "Config")),
        }
    };
    control.reader.welcome_descriptors(false);
    let without = |name: &String| !given.iter().any(|zone| zone.name == *name);
    if offer.is_some_and(|offer| offer.regions.iter().any(|region| without(&region.name))) {
        let why = "a zone has none";
        return Err(ProtocolError::Malformed { what: "set of memory files", why }).step(STEP);
    }
    Ok((config, given))
}

pub(super) fn random_token() -> std::io::Result<[u8; TOKEN_BYTES]> {
    let mut token = [0; TOKEN_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut token)?;
    Ok(token)
}

fn check_layout(ours: &Layout, offer: &Offer) -> Result<(), Failure> {
    const STEP: &str = "comparing memory layouts";
    let theirs = offer.layout().step(STEP)?;
    ours.same_for_guest(&theirs).map_err(ProtocolError::from).step(STEP)?;
    if offer.local && ours.regions() != theirs.regions() {
        let why = "the zones that were handed over do not become the same memory here";
        return Err(ProtocolError::Malformed { what: "memory layout", why }).step(STEP);
    }
    if offer.memory_mode.may_postcopy() {
        runs::check_fits(ours).step(STEP)?;
    }
    Ok(())
}

/// Sets up the best available way to catch accesses to missing pages. Where most of memory is here already,
/// only the missing parts are watched.
pub(super) fn watch<V: DestinationVm>(
    vm: &mut V,
    memory: &Arc<V::Memory>,
    offer: &Offer,
    context: Context<'_>,
) -> Result<Arc<dyn FaultSource>, Failure> {
    const STEP: &str = "preparing to catch page faults";
    let own = vm.fault_source().map_err(Cause::Vm).step(STEP)?;
    let source = if let Some(source) = own {
        source
    } else {
        let readers = fault_readers(offer.urgent_connections(), context.options);
        let memory = Arc::clone(memory);
        let uffd = match offer.memory_mode {
            MemoryMode::Auto => Uffd::register_missing(memory, readers),
            _ => Uffd::register(memory, readers),
        };
        Arc::new(uffd.step(STEP)?)
    };
    context.progress.set_fault_source(source.kind());
    context.progress.counters.guest_vcpus.store(vm.vcpus(), Ordering::Relaxed);
    Ok(source)
}

/// Reads the next message; Abandon from the source is an error.
pub(crate) fn read(control: &mut Channel, step: &'static str) -> Result<Message, Failure> {
    if !control.reader.has_buffered() {
        let limit = control.connection.stall_timeout();
        control.connection.wait_for_data(Some(limit)).step(step)?;
    }
    match control.read_message().step(step)? {
        Message::Abandon(reason) if reason.is_empty() => {
            Err(Cause::Abandoned("it gave no reason, see its log".to_string())).step(step)
        }
        Message::Abandon(reason) => Err(Cause::Abandoned(reason)).step(step),
        message => Ok(message),
    }
}

pub(crate) fn unexpected(message: &Message, expected: &'static str) -> Failure {
    let got = message.command().name();
    Failure::new("reading a message", ProtocolError::Unexpected { got, expected })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::descriptors::TEST_ROOM;

    #[test]
    fn the_vcpus_of_the_machine_have_their_descriptors_before_further_connections() {
        let offered = |room: Option<u16>, many: Option<u16>| {
            TEST_ROOM.set(room);
            let mut offer = Offer {
                software: String::new(),
                features: features(),
                memory_mode: MemoryMode::Postcopy,
                bulk_connections: 6,
                urgent_connections: 5,
                many_urgent_connections: many,
                vcpus: None,
                local: false,
                recover_timeout_ms: None,
                regions: Vec::new(),
                formats: Formats::default(),
            };
            let most = limit_connections(&mut offer, &features());
            TEST_ROOM.set(None);
            (most, offer.bulk_connections, offer.urgent_connections())
        };
        // For 6 + 5 connections, and 2 * 5 of vCPUs.
        assert_eq!(offered(Some(21), None), (None, 6, 5));
        assert_eq!(offered(Some(14), None), (Some(4), 2, 2));
        assert_eq!(offered(Some(9), None), (Some(0), 1, 0));
        assert_eq!(offered(Some(486), Some(160)), (None, 6, 160));
        assert_eq!(offered(Some(485), Some(160)), (Some(165), 6, 159));
        let mut older = features();
        older.remove(FEATURE_FEWER_CONNECTIONS);
        TEST_ROOM.set(Some(0));
        let mut offer = Offer {
            features: older.clone(),
            ..Offer::parse(OFFER).unwrap_or_else(|error| panic!("{error}"))
        };
        assert_eq!(limit_connections(&mut offer, &older), None, "it opens all");
        TEST_ROOM.set(None);
    }

    const OFFER: &[u8] =
        br#"{"software": "", "features": [], "memory_mode": "postcopy", "bulk_connections": 6,
        "urgent_connections": 5, "regions": []}"#;
}
