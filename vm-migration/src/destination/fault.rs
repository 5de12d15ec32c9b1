// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads of the phase Fault: one reader for each queue of faults, one receiver for each connection that is not
//! a vCPU's own, and one for what is left on those that are.
//!
//! Owns how faults become page requests. Where vCPUs resolve their own faults, and there are at least as many
//! connections for requests as vCPUs, each vCPU has one of its own (`own`); the others, and those of a set with fewer,
//! have receivers. Requests are pipelined: a reader puts all faults of one read into
//! one message and never waits for an answer. Readers outlive connections: without a connection a fault is
//! only marked as wanted, and the next set of connections begins with a request for all that is. A reader
//! marks the page and then looks for a connection; a new set of connections is installed before the marks
//! are read, so that one of the two sends the request.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use page_bitmap::change_then_look;
use parking_lot::Mutex;

use super::engine::{Engine, Via};
use super::negotiate::unexpected;
use super::own::{Leftovers, OwnConnection};
use super::rejoin::{Connections, Rejoin, Returned};
use super::resolver::VcpuFaultResolver;
use crate::bell::Bell;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::fault::FaultWait;
use crate::layout::GpaRange;
use crate::poll_thread::poll_while;
use crate::protocol::message::Message;
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;
use crate::session::{Session, SessionState, Urgency};
use crate::steering::LOOK_EVERY;
use crate::stride::Strides;
use crate::transport::{AHEAD_WITH_PAGE_BYTES, Connection};

const READY: &str = "preparing to receive pages";

/// The names of threads: those that receive requested pages and those of the background, and those that read faults.
pub(super) const URGENT: &str = "mig-urgent";
pub(super) const PAGES: &str = "mig-pages";
pub(super) const FAULTS: &str = "mig-faults";

/// The one that looks after the machine while its state is restored, which need not be any faster than others.
pub(super) const LOOK: &str = "mig-look";
pub(super) const LOOK_URGENCY: Urgency = Urgency::Later { vcpus: 0, threads: 1 };

/// Threads that were started before the guest was stopped, and wait until it is.
pub(crate) struct ParkedThreads {
    /// For the first set of connections.
    pub(super) set: Session,
    /// That read faults.
    pub(super) readers: Session,
}

impl ParkedThreads {
    pub(crate) fn new() -> Result<Self, Failure> {
        Ok(Self { set: Session::new()?, readers: Session::new()? })
    }
}

/// Ranges in one request after a reconnection.
const WISHES_AT_ONCE: usize = 512;

/// How long releasing a machine that is thrown away is retried while the host lacks a resource for it.
const LET_GO_MAX: Duration = Duration::from_mins(1);

/// The sending end of a connection for requests; several readers may share one.
pub(super) struct Asker {
    /// Locked while one message is sent.
    one_at_a_time: Mutex<()>,
    connection: Arc<Connection>,
    fate: Arc<SessionState>,
    /// Set if it is a vCPU's own.
    own: Option<Arc<OwnConnection>>,
}

impl Asker {
    /// The same connection, if it is the vCPU's own that reads the answers itself.
    pub(super) fn own(&self) -> Option<&OwnConnection> {
        self.own.as_deref()
    }

    /// Sends a request whose answer the calling thread does not read.
    fn ask(&self, requests: &Requests) {
        self.ask_for_self(requests);
        if let Some(own) = &self.own {
            own.leave();
        }
    }

    /// Sends a request; on the vCPU's own connection the calling thread is the vCPU's, and waits for the answer. A
    /// failure ends the set of connections, and the requests stay recorded.
    pub(super) fn ask_for_self(&self, requests: &Requests) {
        if let Some(own) = &self.own {
            own.note(&requests.waited_for);
            own.note(&requests.ahead);
        }
        let mut bytes = Message::PageFault(requests.waited_for.clone()).encode();
        if !requests.ahead.is_empty() {
            bytes.extend(Message::Ahead(requests.ahead.clone()).encode());
        }
        let one_at_a_time = self.one_at_a_time.lock();
        let sent = self.connection.send(&bytes).step("asking for pages");
        drop(one_at_a_time);
        if let Err(failure) = sent {
            self.fate.fail(failure);
        }
    }
}

/// The ranges of one request message.
pub(super) struct Requests {
    pub(super) waited_for: Vec<GpaRange>,
    /// Ranges that may follow, for which no thread waits.
    pub(super) ahead: Vec<GpaRange>,
}

/// A slot of [`Askers`], on cache lines of its own.
#[repr(align(128))]
struct Slot(Mutex<Option<Arc<Asker>>>);

/// The connection on which each reader, and after them each vCPU thread, sends its requests now. Only its
/// own thread uses a slot; others lock it when connections are set up or lost.
pub(super) struct Askers {
    slots: Vec<Slot>,
    readers: usize,
}

impl Askers {
    fn new(readers: usize, vcpus: usize) -> Self {
        let slots = (0..readers + vcpus).map(|_| Slot(Mutex::new(None))).collect();
        Self { slots, readers }
    }

    /// Sets the connections: `own` by number of the vCPU, `shared` for all others in turn, or the own ones if there is
    /// no shared one.
    fn set(&self, own: &[Option<Arc<Asker>>], shared: &[Arc<Asker>]) {
        let owned: Vec<_> = own.iter().flatten().collect();
        let shared: Vec<_> = if shared.is_empty() { owned } else { shared.iter().collect() };
        for (number, slot) in self.slots.iter().enumerate() {
            let vcpu = number.checked_sub(self.readers);
            let own = vcpu.and_then(|vcpu| own.get(vcpu)).and_then(Option::as_ref);
            let in_turn = || shared.get(number % shared.len().max(1)).copied();
            *slot.0.lock() = own.or_else(in_turn).map(Arc::clone);
        }
        change_then_look();
    }

    pub(super) fn of(&self, reader: usize) -> Option<Arc<Asker>> {
        self.slots.get(reader)?.0.lock().clone()
    }
}

/// The engine and its threads. Dropping it stops the threads and releases the waiters of missing pages, so
/// the guest must have ended by then, or be complete.
pub(crate) struct FaultThreads<M: GuestMemoryMap> {
    pub(super) engine: Arc<Engine<M>>,
    pub(super) rejoin: Rejoin,
    askers: Arc<Askers>,
    /// Keeps the resolver alive for the vCPU threads that use it.
    resolver: Arc<VcpuFaultResolver<M>>,
    /// Threads that read faults, from the start to the end.
    readers: Session,
    /// Threads that receive pages; they end when a connection is lost.
    pub(super) session: Session,
    /// Connections of that set on which vCPUs read.
    own: Vec<Arc<OwnConnection>>,
}

impl<M: GuestMemoryMap> FaultThreads<M> {
    /// Begins on threads that wait for that, and starts those that are lacking. Without connections for requested pages,
    /// requests use those of the background.
    pub(crate) fn start(
        engine: Arc<Engine<M>>,
        rejoin: Rejoin,
        bulk: Vec<Channel>,
        urgent: Vec<Channel>,
        parked: ParkedThreads,
    ) -> Result<Self, Failure> {
        let readers = engine.source().readers();
        let askers = Arc::new(Askers::new(readers, engine.source().bells().len()));
        let resolver = Arc::new(VcpuFaultResolver::new(&engine, &askers));
        let ParkedThreads { set: session, readers: readers_of } = parked;
        let own = Vec::new();
        let mut all = Self { engine, rejoin, askers, resolver, readers: readers_of, session, own };
        all.receive_on(bulk, urgent)?;
        let open: Weak<VcpuFaultResolver<M>> = Arc::downgrade(&all.resolver);
        all.engine.source().set_resolver(open);
        for reader in 0..readers {
            let part = (Arc::clone(&all.engine), Arc::clone(&all.askers));
            let engine = Arc::clone(&all.engine);
            all.readers.spawn(
                FAULTS,
                Urgency::Now,
                part,
                move |(engine, askers)| read_faults(engine, askers, reader),
                move |failure| engine.fail(failure),
            )?;
        }
        Ok(all)
    }

    /// The guest runs: threads that got nothing to do end.
    pub(super) fn dismiss_parked(&mut self) {
        self.session.dismiss(URGENT, 0);
        self.session.dismiss(PAGES, 0);
        self.readers.dismiss(FAULTS, 0);
    }

    /// Starts the receivers of a set of connections, and makes the readers and vCPUs send requests on it.
    fn receive_on(&mut self, bulk: Vec<Channel>, urgent: Vec<Channel>) -> Result<(), Failure> {
        let fate = Arc::clone(self.session.fate());
        for channel in bulk.iter().chain(&urgent) {
            channel.connection.set_cancel(fate.stop());
        }
        let asker = |connection: &Arc<Connection>, own: Option<Arc<OwnConnection>>| {
            let (connection, fate) = (Arc::clone(connection), Arc::clone(&fate));
            Arc::new(Asker { one_at_a_time: Mutex::new(()), connection, fate, own })
        };
        let bells = self.engine.source().bells();
        let vcpus = bells.iter().flatten().count();
        let mut urgent = urgent;
        let shared = urgent.split_off(if urgent.len() < vcpus { 0 } else { vcpus });
        let mut askers: Vec<Option<Arc<Asker>>> = Vec::new();
        if !urgent.is_empty() {
            let others = Arc::new(Bell::new().map_err(Cause::Resource).step(READY)?);
            let mut connections = Vec::new();
            let mut channels = urgent.into_iter();
            for bell in bells {
                let channel = if bell.is_some() { channels.next() } else { None };
                askers.push(channel.map(|channel| {
                    let connection = Arc::clone(&channel.connection);
                    let own = Arc::new(OwnConnection::new(channel, &others, &fate));
                    connections.push(Arc::clone(&own));
                    asker(&connection, Some(own))
                }));
            }
            self.own.clone_from(&connections);
            let look_every = LOOK_EVERY;
            self.read_left(Leftovers { connections, bell: others, look_every })?;
        }
        let for_requests = if shared.is_empty() && askers.is_empty() { &bulk } else { &shared };
        let for_requests: Vec<_> =
            for_requests.iter().map(|channel| asker(&channel.connection, None)).collect();
        let vcpus = self.engine.progress().counters.guest_vcpus.load(Ordering::Relaxed);
        let threads = u32::try_from(bulk.len()).unwrap_or(u32::MAX);
        let bulk = bulk.into_iter().map(|channel| (Via::Bulk, channel));
        for (via, channel) in bulk.chain(shared.into_iter().map(|channel| (Via::Urgent, channel))) {
            let (name, urgency) = match via {
                Via::Bulk => (PAGES, Urgency::Later { vcpus, threads }),
                Via::Urgent | Via::Own(_) => (URGENT, Urgency::Now),
            };
            let part = (Arc::clone(&self.engine), channel);
            let (engine, fate) = (Arc::clone(&self.engine), Arc::clone(&fate));
            self.session.spawn(
                name,
                urgency,
                part,
                move |(engine, channel)| take_pages(engine, channel, via),
                move |failure| receiver_failed(&engine, &fate, failure),
            )?;
        }
        self.askers.set(&askers, &for_requests);
        Ok(())
    }

    /// Starts the thread that reads what no vCPU waits for on the vCPUs' own connections.
    fn read_left(&mut self, left: Leftovers) -> Result<(), Failure> {
        let part = (Arc::clone(&self.engine), Arc::clone(self.session.fate()), left);
        let (engine, fate) = (Arc::clone(&self.engine), Arc::clone(self.session.fate()));
        self.session.spawn(
            URGENT,
            Urgency::Now,
            part,
            move |(engine, fate, left)| left.read(engine, fate),
            move |failure| receiver_failed(&engine, &fate, failure),
        )
    }

    /// Does `work`, and has a thread that waits for this look again and again meanwhile: the guest is stopped. Returns
    /// what that thread has found as well.
    pub(super) fn looked_after<T, F: Default + Send + 'static>(
        &mut self,
        mut look: impl FnMut(&mut F) + Send + 'static,
        work: impl FnOnce() -> T,
    ) -> Result<(F, T), Failure> {
        let (working, ended) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let looks = move |found: &mut F| {
            while ended.recv_timeout(LOOK_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                look(found);
            }
            // It is waited for.
            let _ = tell.send(std::mem::take(found));
            Ok(())
        };
        // It cannot fail.
        self.readers.spawn(LOOK, LOOK_URGENCY, F::default(), looks, drop)?;
        let done = work();
        drop(working);
        Ok((told.recv().unwrap_or_default(), done))
    }

    /// Ends the set of connections; the readers continue. A receiver, or a vCPU that reads, first finishes the pages
    /// that it has begun to place, and waits while the host has no memory for them; abandoning the migration ends that
    /// wait, and the engine.
    pub(super) fn disconnect(&mut self) {
        self.askers.set(&[], &[]);
        self.session.fate().stop().cancel();
        // Those that wait on connections of this set.
        self.engine.wake_vcpus();
        let (engine, steering) = (&self.engine, &self.rejoin.steering);
        let look = || {
            if steering.is_abandoned() {
                engine.failed().cancel();
                engine.source().stop_readers();
            }
        };
        let (session, own) = (&mut self.session, std::mem::take(&mut self.own));
        let mut end = || {
            session.end();
            for one in &own {
                one.close();
            }
        };
        if let Err(error) = poll_while(look, &mut end) {
            log::warn!("the wait for pages of the host cannot be interrupted: {error}");
            end();
        }
    }

    /// Continues with another set of connections, over which only the missing pages have been listed so
    /// far.
    fn reconnect(&mut self, bulk: Vec<Channel>, urgent: Vec<Channel>) -> Result<(), Failure> {
        self.session = Session::new()?;
        self.receive_on(bulk, urgent)?;
        for (index, wishes) in self.engine.wishes().chunks(WISHES_AT_ONCE).enumerate() {
            if let Some(asker) = self.askers.of(index % self.askers.slots.len().max(1)) {
                asker.ask(&Requests { waited_for: wishes.to_vec(), ahead: Vec::new() });
            }
        }
        Ok(())
    }

    /// Takes over the connections of a source that has reconnected.
    pub(super) fn take_over(
        &mut self,
        returned: Returned,
        cancel: &Cancel,
    ) -> Result<Channel, Failure> {
        let engine = Arc::clone(&self.engine);
        let missing = move || {
            engine.begin_again()?;
            Ok(runs::encode(engine.missing()))
        };
        let (steering, connection) = (self.rejoin.steering.clone(), returned.connection());
        let look = || {
            if steering.is_abandoned() {
                connection.shut_down();
            }
        };
        let connected = poll_while(look, || self.rejoin.connect(returned, missing, cancel));
        let connected = connected.map_err(Cause::Resource).step("taking over connections")?;
        let Connections { control, bulk, urgent } = connected?;
        self.reconnect(bulk, urgent)?;
        Ok(control)
    }

    /// Every page is here: see [`Rejoin::answer_late_reconnects`].
    pub(super) fn answer_late_reconnects(&self, knows: bool) {
        self.rejoin.answer_late_reconnects(knows);
    }

    /// No page is received any more: see [`Rejoin::answer_for_others`].
    pub(super) fn answer_for_others(&self) {
        self.rejoin.answer_for_others();
    }

    /// Releases all waiters of a machine that is about to be dropped without having run; a thread that
    /// waited for a page would keep it from ending.
    pub(crate) fn release_waiters(&self) {
        let since = Instant::now();
        if let Err(error) = self.engine.release(|| since.elapsed() > LET_GO_MAX) {
            log::warn!(
                "threads may still wait for pages, which keeps the machine from ending: {}",
                error_text::chain(&error)
            );
        }
    }

    /// See [`Engine::commit`].
    pub(crate) fn commit(&self) -> Result<(), Failure> {
        self.engine.commit()
    }

    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.engine.take_failure()
    }
}

impl<M: GuestMemoryMap> Drop for FaultThreads<M> {
    fn drop(&mut self) {
        self.engine.failed().cancel();
        // Receivers check this as well while the host has no memory.
        self.engine.source().stop_readers();
        self.askers.set(&[], &[]);
        self.engine.wake_vcpus();
        self.session.end();
        self.readers.end();
    }
}

/// Handles a failed receiver: a lost connection ends its set, and a host that cannot make pages visible
/// ends the engine. Once every page is here neither happens, and the other connections stay open until the
/// source knows.
pub(super) fn receiver_failed<M: GuestMemoryMap>(
    engine: &Engine<M>,
    fate: &SessionState,
    failure: Failure,
) {
    if engine.complete().is_cancelled() {
        log::debug!("after the last page: {}", failure.for_peer());
    } else if matches!(failure.cause, Cause::Uffd(_) | Cause::Memory(_)) {
        engine.fail(failure);
        fate.stop().cancel();
    } else {
        match engine.fails_with_connections(failure) {
            Some(failure) => fate.fail(failure),
            None => fate.stop().cancel(),
        }
    }
}

/// Receives pages from a connection until it ends or the engine stops.
fn take_pages<M: GuestMemoryMap>(
    engine: &Engine<M>,
    channel: &mut Channel,
    via: Via,
) -> Result<(), Failure> {
    const STEP: &str = "receiving pages";
    let mut scratch = Vec::new();
    if matches!(via, Via::Urgent) {
        channel.reader.read_ahead_up_to(AHEAD_WITH_PAGE_BYTES);
    }
    loop {
        if !channel.reader.has_buffered() {
            channel.connection.wait_for_data(None).step(STEP)?;
        }
        match Message::read(&mut channel.reader).step(STEP)? {
            Message::Memory(ranges) => {
                let reader = &mut channel.reader;
                engine.take_contents(reader, &ranges, via, &mut scratch).step(STEP)?;
            }
            Message::ZeroPages(ranges) => engine.take_zeros(&ranges, via).step(STEP)?,
            Message::Elsewhere(ranges) => engine.expect_elsewhere(&ranges, via).step(STEP)?,
            other => return Err(unexpected(&other, "Memory or ZeroPages")),
        }
    }
}

/// Reads the faults of one queue and requests their pages.
fn read_faults<M: GuestMemoryMap>(
    engine: &Engine<M>,
    askers: &Askers,
    reader: usize,
) -> Result<(), Failure> {
    const STEP: &str = "asking for pages";
    let mut faults = Vec::new();
    let mut strides = Strides::default();
    loop {
        faults.clear();
        match engine.source().next_faults(reader, &mut faults).step(STEP)? {
            FaultWait::Stopped => return Ok(()),
            FaultWait::Faults => {}
        }
        let waited_for = engine.take_faults(&faults).step(STEP)?;
        let ahead = engine.ahead_of(&faults, &mut strides);
        if waited_for.is_empty() && ahead.is_empty() {
            continue;
        }
        change_then_look();
        if let Some(asker) = askers.of(reader) {
            asker.ask(&Requests { waited_for, ahead });
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "fault_tests.rs"]
mod tests;
