// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Listen and Negotiate: finds the source among all connections, agrees on versions and capabilities, and
//! maps memory.
//!
//! Owns the checks that must fail before anything starts: versions, capabilities, the right to use
//! userfaultfd, the memory layout.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arrivals::{Arrivals, Expect, Hello};
use super::building::Building;
use super::preparing::spare_threads;
use super::receive::{Mapped, Parts, Terms};
use super::{Context, PhaseFailure, late_reconnects};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::fault::FaultSource;
use crate::layout::Layout;
use crate::options::{MemoryMode, ReceiveOptions};
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::{
    Accepted, FEATURE_COMING, FEATURE_CONFIRM, FEATURE_POSTCOPY, Offer, Prepared, TOKEN_BYTES,
    common, features, millis, software,
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

/// Most userfaultfds that are derived from a number of connections.
const READERS_MAX: u16 = 16;

/// A source that has connected.
pub(crate) struct Connected {
    control: Channel,
    /// Its first message.
    first: Message,
}

/// Waits for the source. Other clients do not end the wait: a silent connection is closed after a time, one
/// that sends anything else is told that a VM is awaited, and the source of an ended migration that does not
/// know the outcome is told that.
pub(crate) fn listen<V: crate::vm::DestinationVm>(
    context: Context<'_>,
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
                Hello::Message(
                    message @ (Message::Recover(_) | Message::Verdict { .. }),
                    other,
                ) => match late_reconnects::reply(&message, context.ended) {
                    Ok(()) => arrivals.dismiss(other, &Answer::ok()),
                    Err(reason) => arrivals.refuse(other, reason),
                },
                Hello::Message(_, other) | Hello::Extra(_, _, other) | Hello::Other(other) => {
                    arrivals.refuse(
                        other,
                        "a migration is awaited here, and this message does not begin one",
                    );
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
        let terms = agree(first, control, context.options, builder.formats())?;
        let (config, given) = take_config(control, &terms)?;
        let told = terms.tells_of_mapping();
        let mapped = control.busy(told, || builder.map_memory(&config, given, terms.memory_mode()));
        let mapped = mapped.map_err(Cause::Vm).step(STEP)?;
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
        Ok(Parts { building, memory, terms, fault_source })
    }
}

/// Takes Start, and Capabilities if the source offers them.
fn agree(
    first: Message,
    control: &mut Channel,
    options: &ReceiveOptions,
    known: Formats,
) -> Result<Terms, Failure> {
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
        return Ok(Terms::Plain);
    }
    let offer = match read(control, "waiting for the source's capabilities")? {
        Message::Capabilities(json) => Offer::parse(&json).step(STEP)?,
        other => return Err(unexpected(&other, "Capabilities")),
    };
    log::info!("the source is {:?}", offer.software);
    if let Some(what) = offer.formats.beyond(known) {
        let what = format!("the source's guest needs {what}, at the destination");
        return Err(Cause::Unsupported { what, remedy: "update the destination" }).step(STEP);
    }
    let layout = offer.layout().step(STEP)?;
    let mut ours = features();
    if options.prepare_threads.unwrap_or_else(spare_threads) == 0 {
        // The source need not determine which memory it will send.
        ours.remove(FEATURE_COMING);
    }
    let common = common(&ours, &offer.features);
    let needed: &[&str] = match offer.memory_mode {
        MemoryMode::Precopy => &[FEATURE_CONFIRM],
        MemoryMode::Postcopy | MemoryMode::Auto => &[FEATURE_CONFIRM, FEATURE_POSTCOPY],
    };
    if let Some(missing) = needed.iter().find(|feature| !common.contains(**feature)) {
        let what = format!("the source lacks {missing}");
        return Err(Cause::Unsupported { what, remedy: "update the source" }).step(STEP);
    }
    if offer.local && !control.connection.is_unix() {
        let what = "memory can only be handed over through a Unix socket".to_string();
        return Err(Cause::Unsupported { what, remedy: "use a unix: address" }).step(STEP);
    }
    if offer.local && offer.memory_mode.may_postcopy() {
        let why = "local and postcopy exclude each other";
        return Err(ProtocolError::Malformed { what: "capability offer", why }).step(STEP);
    }
    if offer.memory_mode.may_postcopy() {
        // Checked before anything is built, so that a refusal comes at once.
        uffd::check(layout.regions()).step("checking for userfaultfd")?;
    }
    let token = random_token().map_err(Cause::Resource).step(STEP)?;
    let promise_ms = Some(millis(options.limits.rejoin));
    let software = software();
    let accepted = Accepted { software, features: ours, token, promise_ms, formats: known };
    let answer = Answer::Ok { offer_taken: false, payload: accepted.to_json() };
    control.connection.send(&answer.encode()).step(STEP)?;
    Ok(Terms::Negotiated { offer, token })
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
        let urgent = usize::from(offer.urgent_connections.clamp(1, READERS_MAX));
        let readers = context.options.fault_readers.unwrap_or(urgent);
        let memory = Arc::clone(memory);
        let uffd = match offer.memory_mode {
            MemoryMode::Auto => Uffd::register_missing(memory, readers),
            _ => Uffd::register(memory, readers),
        };
        Arc::new(uffd.step(STEP)?)
    };
    context.progress.set_fault_source(source.kind());
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
