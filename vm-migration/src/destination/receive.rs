// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Receive: memory arrives on the first connection and on extra ones, until the machine state arrives.
//!
//! Owns what a source may send in this phase. Every range is checked against the machine that was
//! built here before a byte of it is received; contents go straight into guest memory. A connection
//! that does not present the session's token is closed and ignored: it is not the source's.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::arrivals::{Arrivals, Expect, Hello};
use super::blobs::{Blobs, Writers};
use super::building::Building;
use super::engine::Engine;
use super::fault::{FaultThreads, ParkedThreads};
use super::helpers::{Helpers, take_chunk};
use super::negotiate::{read, unexpected, watch};
use super::preparing::Preparing;
use super::rejoin::Rejoin;
use super::stale::Stale;
use super::tables::{locate, take_frame, take_memory, take_zeros};
use super::unpopulated::Unpopulated;
use super::{Context, PhaseFailure, late_reconnects, refusals};
use crate::channel::Channel;
use crate::document::Mode;
use crate::error::{Cause, Failure, Step};
use crate::fault::FaultSource;
use crate::options::{
    CONNECTIONS_MAX, Limits, MemoryMode, RECOVER_TIMEOUT_DEFAULT, URGENT_CONNECTIONS_MAX,
};
use crate::progress::Progress;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::BlobList;
use crate::protocol::capabilities::{
    FEATURE_FIGURES, FEATURE_MAPPING, FEATURE_PREPARING, Offer, TOKEN_BYTES,
};
use crate::protocol::inflate::Inflater;
use crate::protocol::message::{Answer, Message, Role};
use crate::ram::GuestMemoryMap;
use crate::steering::LOOK_EVERY;
use crate::transport::{TransportError, WaitEnd, wait_readable, wait_readable_or_left};
use crate::vm::DestinationVm;

/// How long an extra connection may take to send its role. Nothing waits for it meanwhile.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// A source of plain version 0 says nothing while it stops its guest, which waits for its disks: it may be silent for this
/// many times the usual limit.
const PLAIN_SILENCE_FACTOR: u32 = 4;

/// The negotiated protocol.
pub(crate) enum Terms {
    /// Plain version 0: answers have no payload, the roles of extra connections no token, and the source hands
    /// the guest over with the answer to Complete.
    Plain,
    /// The negotiated protocol.
    Negotiated { offer: Offer, token: [u8; TOKEN_BYTES] },
}

impl Terms {
    fn local(&self) -> bool {
        matches!(self, Self::Negotiated { offer, .. } if offer.local)
    }

    /// When memory is sent.
    pub(super) fn mode(&self) -> Mode {
        match self {
            Self::Plain => Mode::Precopy,
            Self::Negotiated { offer, .. } => Mode::of(offer.memory_mode, offer.local),
        }
    }

    pub(super) fn memory_mode(&self) -> MemoryMode {
        match self {
            Self::Plain => MemoryMode::Precopy,
            Self::Negotiated { offer, .. } => offer.memory_mode,
        }
    }

    /// The source expects keep-alives while it waits for the machine.
    fn tells_of_preparing(&self) -> bool {
        matches!(self, Self::Negotiated { offer, .. } if offer.features.contains(FEATURE_PREPARING))
    }

    /// The source expects keep-alives while memory is mapped, and while outdated pages are discarded.
    pub(super) fn tells_of_mapping(&self) -> bool {
        matches!(self, Self::Negotiated { offer, .. } if offer.features.contains(FEATURE_MAPPING))
    }

    pub(super) fn negotiated(&self) -> bool {
        matches!(self, Self::Negotiated { .. })
    }

    fn agreed(&self) -> Option<Agreed> {
        match self {
            Self::Plain => None,
            Self::Negotiated { token, offer } => {
                let tells_figures = offer.features.contains(FEATURE_FIGURES);
                Some(Agreed { id: *token, tells_figures })
            }
        }
    }
}

/// Results of Negotiate.
pub(crate) struct Parts<V: DestinationVm> {
    pub building: Building<V>,
    pub memory: Arc<V::Memory>,
    pub terms: Terms,
    pub fault_source: Option<Arc<dyn FaultSource>>,
    /// Threads of a postcopy, which wait for the stop.
    pub parked: Option<ParkedThreads>,
}

/// Memory is mapped and about to be filled; the machine is being built.
pub(crate) struct Mapped<V: DestinationVm> {
    /// Threads that write the parts of the state that come as bytes. They end before the machine does.
    writers: Option<Writers>,
    parts: Parts<V>,
    control: Channel,
    bulk: Vec<Channel>,
    urgent: Vec<Channel>,
}

/// The state has arrived, and all memory or the list of what is missing.
pub(crate) struct HasState<V: DestinationVm> {
    pub vm: V,
    pub control: Channel,
    pub state: Vec<u8>,
    /// `None` with plain version 0.
    pub agreed: Option<Agreed>,
    pub faults: Option<FaultThreads<V::Memory>>,
    /// Threads of a postcopy that was not needed. They end after the guest runs.
    pub parked: Option<ParkedThreads>,
}

/// The negotiated parts that the commit needs.
pub(crate) struct Agreed {
    /// The token that proves that a source belongs to this migration.
    pub id: [u8; TOKEN_BYTES],
    /// The source accepts figures with the last message.
    pub tells_figures: bool,
}

/// Results of Receive.
struct Outcome<V: DestinationVm> {
    vm: V,
    state: Vec<u8>,
    faults: Option<FaultThreads<V::Memory>>,
}

impl<V: DestinationVm> Mapped<V> {
    pub(crate) fn new(parts: Parts<V>, control: Channel) -> Self {
        Self { writers: None, parts, control, bulk: Vec::new(), urgent: Vec::new() }
    }

    /// Receives memory until the state arrives.
    pub(crate) fn receive(mut self, context: Context<'_>) -> Result<HasState<V>, PhaseFailure<V>> {
        match self.try_receive(context) {
            Ok(Outcome { vm, state, faults }) => Ok(HasState {
                vm,
                control: self.control,
                state,
                agreed: self.parts.terms.agreed(),
                faults,
                parked: self.parts.parked,
            }),
            Err(failure) => {
                // Before the machine that is being built ends, which may take long.
                failure.tell(&self.control);
                Err(PhaseFailure::early(None, failure))
            }
        }
    }

    fn try_receive(&mut self, context: Context<'_>) -> Result<Outcome<V>, Failure> {
        const STEP: &str = "receiving memory";
        let mut helpers = Helpers::new().step(STEP)?;
        let mut faults = None;
        let mut stale: Option<Stale> = None;
        let mut inflater = Inflater::default();
        let fresh = Arc::new(Unpopulated::new(self.parts.memory.layout()));
        let mut preparing = Preparing::new(context.options.prepare_threads);
        let expect =
            if self.parts.terms.negotiated() { Expect::RoleAndToken } else { Expect::Role };
        let mut arrivals = Arrivals::new(expect, HELLO_TIMEOUT);
        loop {
            let message = self.await_message(&mut helpers, &mut arrivals, &fresh, context)?;
            let memory = &*self.parts.memory;
            match message {
                Message::Memory(_)
                | Message::ZeroPages(_)
                | Message::MemoryZstd { .. }
                | Message::Coming(_)
                    if faults.is_some() || stale.is_some() || self.parts.terms.local() =>
                {
                    return Err(unexpected(&message, "State"));
                }
                Message::Memory(ranges) => {
                    let told = (&**context.progress, &[context.cancel][..]);
                    self.control
                        .timed(|from| take_memory(memory, &fresh, from, &ranges, told))
                        .step(STEP)?;
                }
                Message::MemoryZstd { ranges, frame_bytes } if self.parts.terms.negotiated() => {
                    let (inflater, progress) = (&mut inflater, context.progress);
                    self.control
                        .timed(|from| {
                            take_frame(memory, (from, inflater), &ranges, frame_bytes, progress)
                        })
                        .step(STEP)?;
                }
                Message::ZeroPages(ranges) if self.parts.terms.negotiated() => {
                    take_zeros(memory, &ranges, context.progress, &[context.cancel]).step(STEP)?;
                }
                Message::Coming(ranges) if self.parts.terms.negotiated() => {
                    let runs = locate(memory.layout(), &ranges).step(STEP)?;
                    // A page that is populated while others are discarded would become one of zeros
                    // that no fault waits for.
                    if !self.mode().may_postcopy() {
                        preparing.add(&self.parts.memory, &fresh, &runs);
                    }
                }
                Message::AwaitMachine if self.parts.terms.negotiated() => {
                    let told = self.parts.terms.tells_of_preparing();
                    self.parts.building.wait_telling(&mut self.control, told, context.cancel)?;
                    if self.parts.building.failed().is_cancelled() {
                        return Err(self.failure_to_build());
                    }
                }
                Message::Stale(units) if self.mode() == MemoryMode::Auto && faults.is_none() => {
                    // From here on memory goes to the engine only.
                    self.bulk.extend(helpers.return_channels()?);
                    let stale = stale.get_or_insert_with(|| Stale::new(memory));
                    let stays = |region| memory.is_ready(region);
                    let told = self.parts.terms.tells_of_mapping();
                    let thrown_away = self
                        .control
                        .busy(told, || stale.throw_away(memory, &units, stays, context.cancel));
                    thrown_away.step("discarding outdated pages")?;
                }
                Message::Pending(bytes) if faults.is_none() => {
                    let engine = self.start_engine(&bytes, stale.take(), &mut helpers, context)?;
                    faults = Some(engine);
                }
                Message::Blobs(list)
                    if self.may_have_blobs() && helpers.blobs().get().is_none() =>
                {
                    let blobs = self.prepare_blobs(&list, context)?;
                    helpers.blobs().get_or_init(|| blobs);
                }
                // The source waits for a device.
                Message::Alive if helpers.blobs().get().is_some() => {}
                Message::BlobChunk(chunk) => take_chunk(helpers.blobs(), chunk)?,
                Message::State(state) => {
                    // What was named as outdated is missing as well.
                    let lacks_pages = self.mode() == MemoryMode::Postcopy || stale.is_some();
                    if lacks_pages && faults.is_none() {
                        return Err(unexpected(&Message::State(Vec::new()), "Pending"));
                    }
                    let (vm, state) = self.take_state(state, &mut helpers, context)?;
                    if self.mode().may_postcopy() && faults.is_none() {
                        // All memory is here: it may have huge pages again.
                        self.parts.memory.use_small_pages(false);
                    }
                    return Ok(Outcome { vm, state, faults });
                }
                other => return Err(unexpected(&other, "Memory or State")),
            }
            self.control.yes().step("acknowledging memory")?;
        }
    }

    /// The machine with the state that is still to be restored, if all has come that precedes it.
    fn take_state(
        &mut self,
        state: Vec<u8>,
        helpers: &mut Helpers,
        context: Context<'_>,
    ) -> Result<(V, Vec<u8>), Failure> {
        helpers.finish()?;
        if let Some(blobs) = helpers.blobs().get() {
            blobs.finish().step("receiving the state of devices")?;
        }
        self.writers = None;
        self.check_memory_came(context.progress)?;
        // A machine that is made of its state has it already.
        let state = self.parts.building.begin_from(state)?.unwrap_or_default();
        self.parts.building.wait(&mut self.control, context.cancel)?;
        Ok((self.parts.building.finish()?, state))
    }

    fn may_have_blobs(&self) -> bool {
        self.parts.terms.negotiated() && self.mode() == MemoryMode::Precopy
    }

    /// Has the machine prepare for the parts of its state that will come as bytes.
    fn prepare_blobs(&mut self, list: &[u8], context: Context<'_>) -> Result<Arc<Blobs>, Failure> {
        const STEP: &str = "preparing for the state of devices";
        let BlobList { blobs } = BlobList::parse(list).step(STEP)?;
        self.parts.building.wait(&mut self.control, context.cancel)?;
        let mut vm = self.parts.building.finish()?;
        let sinks = self.control.busy(true, || vm.open_blobs(&blobs));
        let sinks = sinks.map_err(Cause::Vm).step(STEP)?;
        let limits = &context.options.limits;
        self.parts.building = Building::done(vm)?;
        let blobs = Arc::new(Blobs::new(blobs, sinks).step(STEP)?);
        self.writers = Some(Writers::start(&blobs, limits.device_leave).step(STEP)?);
        // Each has its own time, and says what it waits for.
        let connection = self.control.connection.as_raw_fd();
        let begun = self.control.busy(true, || {
            while !blobs.have_begun(limits.device_call())? {
                let (news, cancel) = (blobs.fd(), context.cancel);
                let waited = wait_readable_or_left(news, connection, cancel, Some(LOOK_EVERY));
                match waited.map_err(TransportError::io("waiting"))? {
                    WaitEnd::Cancelled => return Err(Cause::Cancelled),
                    // The source is gone, or does not wait any more; reading says which.
                    WaitEnd::Ready(1) => break,
                    WaitEnd::Ready(_) | WaitEnd::TimedOut => {}
                }
            }
            Ok(())
        });
        begun.step(STEP)?;
        Ok(blobs)
    }

    /// Tells the source how much is written of the parts of the state that come as bytes, if it has not been told.
    fn tell_written(&mut self, helpers: &Helpers, limits: &Limits) -> Result<(), Failure> {
        let Some(blobs) = helpers.blobs().get() else { return Ok(()) };
        blobs.check_calls(limits.device_call()).step("writing the state of devices")?;
        let Some(written) = blobs.news()? else { return Ok(()) };
        self.control.tell(&Message::BlobsWritten(written)).step("receiving the state of devices")
    }

    fn mode(&self) -> MemoryMode {
        self.parts.terms.memory_mode()
    }

    /// Nothing in plain version 0 says that memory follows the state, where it is missing for good here.
    fn check_memory_came(&self, progress: &Progress) -> Result<(), Failure> {
        let received = &progress.counters.memory_bytes_received;
        if self.parts.terms.negotiated() || received.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        let what = "the source has sent no memory before the state, as in postcopy".to_string();
        let remedy = "send the VM with memory_mode=precopy";
        Err(Cause::Unsupported { what, remedy }).step("receiving the guest's state")
    }

    fn failure_to_build(&mut self) -> Failure {
        match self.parts.building.finish() {
            Err(failure) => failure,
            Ok(_) => unreachable!("a machine is there or has failed"),
        }
    }

    /// Waits for the source's next message; other connections are accepted meanwhile.
    fn await_message(
        &mut self,
        helpers: &mut Helpers,
        arrivals: &mut Arrivals,
        fresh: &Arc<Unpopulated>,
        context: Context<'_>,
    ) -> Result<Message, Failure> {
        // The source has this time, whatever else connects, from the last sign of it on any connection.
        let (mut since, mut seen) = (Instant::now(), 0);
        loop {
            if helpers.are_active(&mut seen, context.progress) {
                since = Instant::now();
            }
            if let Some(message) = self.next(helpers, arrivals, since, context)? {
                return Ok(message);
            }
            for hello in arrivals.take(context.listener, context.cancel) {
                let hello = match hello {
                    Hello::Message(Message::Recover(recover), channel)
                        if late_reconnects::is_past(context.ended, &recover.id) =>
                    {
                        arrivals.dismiss(channel, &Answer::ok());
                        continue;
                    }
                    other => other,
                };
                match greet(hello, &self.parts.terms, &self.control, context) {
                    Ok(joined) => {
                        // A source that shows no token cannot be told from a stranger.
                        if self.parts.terms.negotiated() {
                            since = Instant::now();
                        }
                        self.join(joined, helpers, fresh, context)?;
                    }
                    Err((reason, channel)) => arrivals.refuse(channel, &reason),
                }
            }
        }
    }

    /// Waits for a message, or for a helper or the builder to fail. `None` when connections are to be
    /// looked at. `since` is when the wait for the message began.
    fn next(
        &mut self,
        helpers: &Helpers,
        arrivals: &Arrivals,
        since: Instant,
        context: Context<'_>,
    ) -> Result<Option<Message>, Failure> {
        const STEP: &str = "waiting for memory or state";
        self.tell_written(helpers, &context.options.limits)?;
        let answer = context.options.limits.answer;
        let limit = match self.parts.terms {
            Terms::Plain => answer.saturating_mul(PLAIN_SILENCE_FACTOR),
            Terms::Negotiated { .. } => answer,
        };
        if !self.control.reader.has_buffered() {
            let mut fds = vec![
                helpers.failed_fd(),
                self.parts.building.failed().fd(),
                self.control.connection.as_raw_fd(),
            ];
            fds.extend(helpers.blobs().get().map(|blobs| blobs.fd()));
            arrivals.add_fds(context.listener, &mut fds);
            let end = wait_readable(&fds, context.cancel, Some(LOOK_EVERY.min(limit)));
            match end.map_err(TransportError::io("waiting")).step(STEP)? {
                WaitEnd::Cancelled => return Err(Cause::Cancelled).step(STEP),
                WaitEnd::Ready(0) => return Err(helpers.failure()),
                WaitEnd::Ready(1) => return Err(self.failure_to_build()),
                WaitEnd::Ready(2) if matches!(self.control.has_data(), Ok(true) | Err(_)) => {}
                WaitEnd::TimedOut | WaitEnd::Ready(_) if since.elapsed() >= limit => {
                    let what = "waiting for memory or state";
                    return Err(TransportError::Timeout { what, after: limit }).step(STEP);
                }
                WaitEnd::TimedOut | WaitEnd::Ready(_) => return Ok(None),
            }
        }
        read(&mut self.control, STEP).map(Some).map_err(|failure| helpers.told(failure))
    }

    /// Takes an extra connection, or closes it if it does not fit.
    fn join(
        &mut self,
        (role, channel): (Role, Channel),
        helpers: &mut Helpers,
        fresh: &Arc<Unpopulated>,
        context: Context<'_>,
    ) -> Result<(), Failure> {
        let mode = self.mode();
        #[cfg(test)]
        crate::descriptors::test_open(helpers.count() + self.bulk.len() + self.urgent.len() + 1)
            .map_err(Cause::Resource)
            .step("joining")?;
        let (count, most) = match role {
            Role::Memory => (helpers.count() + self.bulk.len(), CONNECTIONS_MAX),
            Role::Fault => (self.urgent.len(), URGENT_CONNECTIONS_MAX),
        };
        match role {
            _ if count >= usize::from(most) => {
                log::warn!("an extra connection was turned away: there are {count} already");
                Ok(())
            }
            _ if self.parts.terms.local() => {
                log::warn!("an extra connection was turned away: local=on sends no memory");
                Ok(())
            }
            Role::Memory if mode == MemoryMode::Postcopy => {
                self.bulk.push(channel);
                Ok(())
            }
            Role::Fault if mode.may_postcopy() => {
                self.urgent.push(channel);
                Ok(())
            }
            Role::Memory => helpers.start(
                (Arc::clone(&self.parts.memory), Arc::clone(fresh)),
                channel,
                self.parts.terms.negotiated(),
                context,
            ),
            Role::Fault => {
                log::warn!("an extra connection for page requests was turned away: not postcopy");
                Ok(())
            }
        }
    }

    /// Starts the engine, which handles all memory from here on: the missing pages are known.
    fn start_engine(
        &mut self,
        pending: &[u8],
        stale: Option<Stale>,
        helpers: &mut Helpers,
        context: Context<'_>,
    ) -> Result<FaultThreads<V::Memory>, Failure> {
        const STEP: &str = "preparing for missing pages";
        let Terms::Negotiated { offer, token } = &self.parts.terms else {
            return Err(unexpected(&Message::Pending(Vec::new()), "Memory or State"));
        };
        if offer.memory_mode == MemoryMode::Auto {
            self.bulk.extend(helpers.return_channels()?);
            self.parts.building.wait(&mut self.control, context.cancel)?;
            let mut vm = self.parts.building.finish()?;
            let watched = watch(&mut vm, &self.parts.memory, offer, context);
            self.parts.building = Building::done(vm)?;
            self.parts.fault_source = Some(watched?);
        }
        let Some(source) = &self.parts.fault_source else {
            return Err(unexpected(&Message::Pending(Vec::new()), "Memory or State"));
        };
        let promised = (offer.bulk_connections, offer.urgent_connections());
        let there = (self.bulk.len(), self.urgent.len());
        if self.bulk.is_empty() || there != (promised.0.into(), promised.1.into()) {
            let why = "postcopy has other connections than those that were announced";
            return Err(ProtocolError::Malformed { what: "set of connections", why }).step(STEP);
        }
        let engine = Engine::new(
            &self.parts.memory,
            Arc::clone(source),
            pending,
            stale,
            Arc::clone(context.progress),
            context.cancel,
        )
        .step(STEP)?;
        let bulk = std::mem::take(&mut self.bulk);
        let urgent = std::mem::take(&mut self.urgent);
        let rejoin = Rejoin {
            listener: Arc::clone(context.listener),
            id: *token,
            attempt: 0,
            stall: context.options.limits.stall,
            steering: context.options.steering.clone(),
            reconnect_window: RECOVER_TIMEOUT_DEFAULT.max(offer.recover_timeout()),
            late_reconnects: context.late_reconnects.clone(),
            ended: context.ended.to_vec(),
        };
        let parked = self.parts.parked.take().map_or_else(ParkedThreads::new, Ok)?;
        FaultThreads::start(Arc::new(engine), rejoin, bulk, urgent, parked)
    }
}

/// Checks whether an extra connection belongs to this migration; if not, the error is the reason.
fn greet(
    hello: Hello,
    terms: &Terms,
    control: &Channel,
    context: Context<'_>,
) -> Result<(Role, Channel), (String, Channel)> {
    let stranger = |channel| Err((ProtocolError::Token.to_string(), channel));
    let (role, shown, mut channel) = match hello {
        Hello::Extra(role, shown, channel) => (role, shown, channel),
        Hello::Message(Message::Start { .. } | Message::Check, channel) => {
            return Err((refusals::ANOTHER_ARRIVES.to_string(), channel));
        }
        Hello::Message(_, channel) | Hello::Other(channel) => return stranger(channel),
    };
    if let Terms::Negotiated { token, .. } = terms {
        if shown != *token {
            return stranger(channel);
        }
        if let Err(error) = channel.yes() {
            return Err((error.to_string(), channel));
        }
    } else {
        channel.speak_plain();
        // It has no token to show. What it sends goes to guest memory.
        if !channel.connection.is_from_the_host_of(&control.connection) {
            return Err((ProtocolError::OtherHost.to_string(), channel));
        }
    }
    channel.connection.set_stall_timeout(context.options.limits.answer);
    Ok((role, channel))
}
