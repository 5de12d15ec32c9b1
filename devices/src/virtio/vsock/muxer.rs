// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All connections of one guest.
//!
//! Owns which packet belongs to which connection, the ports of the host's clients, and the order in which
//! packets are sent to the guest: round robin over the connections, which share what is sent in a round. Every count is
//! bounded, whatever guest and clients do. Must never touch guest memory.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::SockRef;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::connection::{Connection, Data, Packet, Room};
use super::counters::VsockCounters;
use super::greeting::{Greeted, Greeting};
use super::packet::{HOST_CID, Header, TYPE_STREAM, op};
use super::socket::VsockSocket;
use crate::endpoint::listener::PathListener;
use crate::{LogLimit, log_limited, syscalls};

/// Maximum number of connections, including those with only data for the host left; as in cloud-hypervisor.
pub(super) const CONNECTIONS_MAX: usize = 1023;
/// Connections that there may be for another one to have the larger buffer.
const LARGE_MAX: usize = 256;
/// What the guest may send of a connection while its client does not read, in few and in many connections: 112 MiB in
/// all. Before that it is what the client's socket takes, which the host limits.
pub(super) const LARGE_BUFFER_BYTES: u32 = 256 << 10;
const SMALL_BUFFER_BYTES: u32 = 64 << 10;
/// Maximum number of clients that have not sent their port; beyond that the oldest is dropped.
const GREETINGS_MAX: usize = 64;
/// Maximum number of RSTs without a connection that wait for guest buffers; the size of a queue.
const ANSWERS_MAX: usize = 256;
/// Maximum number of clients accepted before other events.
const ACCEPTED_MAX: usize = 16;
/// Data that all connections with packets together may send in a round. Each may fill one buffer of the guest in any
/// case.
const ROUND_BYTES: usize = 128 << 10;
/// First port for the host's clients; their range ends at the largest positive 32-bit integer, for programs
/// that treat ports as signed.
const FIRST_CLIENT_PORT: u32 = 1 << 30;
const LAST_CLIENT_PORT: u32 = (1 << 31) - 1;
/// Delay after a client could not be accepted for lack of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The token of the listening socket, and the first of all those by which the muxer's descriptors are polled.
pub(super) const LISTENER_TOKEN: u64 = 1 << 32;

/// Host port and guest port.
type Ports = (u32, u32);

/// A packet for the guest, or several that only differ in their data, which are in the caller's room.
pub(super) struct Outgoing {
    /// Without the length of the data.
    pub(super) header: Header,
    pub(super) len_bytes: usize,
}

/// An RST for a packet without a connection.
struct Answer {
    ports: Ports,
    kind: u16,
}

struct Entry {
    connection: Connection,
    token: u64,
    watched: Option<EventSet>,
    /// Its place in the list of time limits.
    deadline: Option<Instant>,
    /// Whether it is queued as having packets.
    is_ready: bool,
}

/// All connections; see the module.
pub(crate) struct Muxer {
    cid: u64,
    socket: Arc<VsockSocket>,
    counters: Arc<VsockCounters>,
    log: Arc<LogLimit>,
    epoll: Arc<Epoll>,
    /// Held while the device runs.
    listener: Option<Arc<PathListener>>,
    accept_again: Option<Instant>,
    /// Whether clients are closed at once, as their guest cannot be reached.
    refuses_all: bool,
    greetings: BTreeMap<u64, Greeting>,
    connections: BTreeMap<Ports, Entry>,
    /// Connections by the epoll tokens of their streams.
    tokens: BTreeMap<u64, Ports>,
    deadlines: BTreeMap<Ports, Instant>,
    ready: VecDeque<Ports>,
    answers: VecDeque<Answer>,
    last_token: u64,
    last_port: u32,
}

impl Muxer {
    /// Descriptors are registered at `epoll`; its caller hands over those that are ready ([`Self::ready`]).
    pub(crate) fn new(
        cid: u64,
        socket: Arc<VsockSocket>,
        counters: Arc<VsockCounters>,
        log: Arc<LogLimit>,
        epoll: Arc<Epoll>,
    ) -> Self {
        Self {
            cid,
            socket,
            counters,
            log,
            epoll,
            listener: None,
            accept_again: None,
            refuses_all: false,
            greetings: BTreeMap::new(),
            connections: BTreeMap::new(),
            tokens: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            ready: VecDeque::new(),
            answers: VecDeque::new(),
            last_token: LISTENER_TOKEN,
            last_port: any_client_port(),
        }
    }

    /// Starts to accept clients, and restarts time limits.
    pub(super) fn start(&mut self) {
        self.listen();
        let waiting: Vec<Ports> = self.deadlines.keys().copied().collect();
        for ports in waiting {
            self.with(ports, Connection::restart_time_limit);
        }
    }

    /// Stops accepting clients, and drops its reference to the listening socket.
    pub(super) fn stop(&mut self) {
        self.accept_again = None;
        self.unlisten();
        self.listener = None;
    }

    /// Closes all connections and clients, and each client that connects from now on, instead of
    /// [`Self::start`].
    pub(super) fn refuse_all(&mut self) {
        self.refuses_all = true;
        // Closes the streams, which removes them from epoll.
        self.connections.clear();
        self.greetings.clear();
        self.tokens.clear();
        self.deadlines.clear();
        self.ready.clear();
        self.answers.clear();
        self.accept_again = None;
        self.listen();
    }

    fn listen(&mut self) {
        self.unlisten();
        self.listener = self.socket.listener();
        let Some(listener) = &self.listener else { return };
        let event = EpollEvent::new(EventSet::IN, LISTENER_TOKEN);
        if let Err(error) = self.epoll.ctl(ControlOperation::Add, listener.as_raw_fd(), event) {
            log_limited!(self.log, Warn, "cannot watch a socket device's path: {error}");
        }
    }

    fn unlisten(&self) {
        if let Some(listener) = &self.listener {
            // Fails if it is not registered.
            let fd = listener.as_raw_fd();
            let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
        }
    }

    /// Whether any packet of the guest can be handled now.
    pub(super) fn has_room_for_answers(&self) -> bool {
        self.answers.len() < ANSWERS_MAX
    }

    /// How much data the connection of a packet takes in several that are handled together; `None` for a packet that is
    /// handled by itself.
    pub(super) fn direct_bytes(&self, header: &Header) -> Option<usize> {
        if !self.is_ours(header) || header.op != op::RW || header.kind != TYPE_STREAM {
            return None;
        }
        self.connections.get(&(header.dst_port, header.src_port))?.connection.direct_bytes()
    }

    fn is_ours(&self, header: &Header) -> bool {
        header.src_cid == self.cid && header.dst_cid == HOST_CID
    }

    /// Handles a packet of the guest; without `data` its data are incomplete. Also `count` packets together, which only
    /// differ in their credit, as far as their connection takes them ([`Self::direct_bytes`]).
    pub(super) fn take_packets(
        &mut self,
        count: usize,
        header: &Header,
        data: Option<&mut dyn Data>,
    ) {
        self.counters.tx_packets.add(count as u64);
        if !self.is_ours(header) {
            let Header { src_cid, dst_cid, .. } = header;
            log_limited!(self.log, Debug, "a packet from CID {src_cid} to {dst_cid} is dropped");
            return;
        }
        let ports = (header.dst_port, header.src_port);
        let known = self.connections.get(&ports);
        let is_known = known.is_some_and(|entry| entry.connection.is_known());
        if header.op == op::RST {
            if is_known && header.kind == TYPE_STREAM {
                self.remove(ports);
            }
        } else if header.kind != TYPE_STREAM {
            self.answer(ports, header.kind);
        } else if is_known {
            if header.op == op::RW {
                let said = || u64::from(header.len_bytes);
                let len_bytes = data.as_ref().map_or_else(said, |data| data.len_bytes() as u64);
                self.counters.tx_bytes.add(len_bytes);
            }
            self.with(ports, |connection| connection.take_packet(header, data, ports.0));
        } else if header.op != op::REQUEST || known.is_some() || !self.connect(ports, header) {
            self.answer(ports, header.kind);
        }
    }

    fn answer(&mut self, ports: Ports, kind: u16) {
        if self.has_room_for_answers() {
            self.answers.push_back(Answer { ports, kind });
        }
    }

    /// Connects the guest to the listener of a port; returns whether that succeeded.
    fn connect(&mut self, ports: Ports, request: &Header) -> bool {
        if self.connections.len() >= CONNECTIONS_MAX {
            log_limited!(self.log, Warn, "the guest has {CONNECTIONS_MAX} connections already");
            return false;
        }
        match self.socket.connect_to_port(ports.0) {
            Ok(stream) => {
                let (stream, buffer_bytes) = (UnixStream::from(stream), self.buffer_bytes());
                give_room(&stream, buffer_bytes);
                let connection = Connection::of_guest(stream, request, buffer_bytes);
                let token = self.next_token();
                self.insert(ports, connection, token);
                true
            }
            Err(error) => {
                log_limited!(self.log, Debug, "port {} of the host: {error}", ports.0);
                false
            }
        }
    }

    fn next_token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    fn insert(&mut self, ports: Ports, connection: Connection, token: u64) {
        self.counters.connections.add(1);
        self.tokens.insert(token, ports);
        let entry = Entry { connection, token, watched: None, deadline: None, is_ready: false };
        self.connections.insert(ports, entry);
        self.with(ports, |_| ());
    }

    fn remove(&mut self, ports: Ports) {
        // Closes the stream, which removes it from epoll.
        if let Some(entry) = self.connections.remove(&ports) {
            self.tokens.remove(&entry.token);
            if entry.is_ready {
                // A guest without receive buffers could open and reset one connection without end.
                self.ready.retain(|ready| *ready != ports);
            }
        }
        self.deadlines.remove(&ports);
    }

    /// Changes a connection, and updates its queueing, polling and time limit.
    fn with(&mut self, ports: Ports, change: impl FnOnce(&mut Connection)) {
        let Some(entry) = self.connections.get_mut(&ports) else { return };
        change(&mut entry.connection);
        if entry.connection.is_over() {
            return self.remove(ports);
        }
        if let Err(error) = entry.watch(&self.epoll) {
            log_limited!(self.log, Warn, "cannot watch a client of the guest: {error}");
            entry.connection.fail();
            if entry.connection.is_over() {
                return self.remove(ports);
            }
        }
        let deadline = entry.connection.deadline();
        if deadline != std::mem::replace(&mut entry.deadline, deadline) {
            match deadline {
                Some(deadline) => self.deadlines.insert(ports, deadline),
                None => self.deadlines.remove(&ports),
            };
        }
        if entry.connection.has_packets() && !std::mem::replace(&mut entry.is_ready, true) {
            self.ready.push_back(ports);
        }
    }

    /// What a new connection may have to buffer.
    fn buffer_bytes(&self) -> u32 {
        if self.connections.len() < LARGE_MAX { LARGE_BUFFER_BYTES } else { SMALL_BUFFER_BYTES }
    }

    /// Whether [`Self::next_packet`] may return a packet.
    pub(super) fn has_packets(&self) -> bool {
        !self.answers.is_empty() || !self.ready.is_empty()
    }

    /// The next packet for the guest, with its data in `room`.
    pub(super) fn next_packet(&mut self, room: &mut impl Room) -> Option<Outgoing> {
        if let Some(Answer { ports, kind }) = self.answers.pop_front() {
            let header = Header { kind, op: op::RST, ..self.header(ports) };
            return Some(Outgoing { header, len_bytes: 0 });
        }
        while let Some(ports) = self.ready.pop_front() {
            // It may be closed, and its ports reused by another connection, which has its own turn.
            let Some(entry) = self.connections.get_mut(&ports).filter(|it| it.is_ready) else {
                continue;
            };
            entry.is_ready = false;
            let share_bytes = ROUND_BYTES / self.ready.len().saturating_add(1);
            let mut packet = None;
            self.with(ports, |connection| packet = connection.next_packet(room, share_bytes));
            if let Some(Packet { op, flags, len_bytes, buf_alloc, fwd_cnt }) = packet {
                let header = Header { op, flags, buf_alloc, fwd_cnt, ..self.header(ports) };
                return Some(Outgoing { header, len_bytes });
            }
        }
        None
    }

    fn header(&self, (src_port, dst_port): Ports) -> Header {
        let (src_cid, dst_cid) = (HOST_CID, self.cid);
        Header { src_cid, dst_cid, src_port, dst_port, kind: TYPE_STREAM, ..Header::default() }
    }

    /// Counts packets that were given to the guest, with their data.
    pub(super) fn count_given(&self, packets: u32, data_bytes: u64) {
        self.counters.rx_packets.add(packets.into());
        self.counters.rx_bytes.add(data_bytes);
    }

    /// Logs why a client's data could not be read into the guest's memory, or the guest's written from there.
    pub(super) fn complain(&self, error: &io::Error) {
        log_limited!(
            self.log,
            Warn,
            "data of a connection cannot be moved to or from the guest's memory: {error}"
        );
    }

    /// Handles a descriptor that is ready, by its token.
    pub(super) fn ready(&mut self, token: u64, events: EventSet) {
        // A token of a stream closed meanwhile is unknown.
        if token == LISTENER_TOKEN {
            self.accept();
        } else if let Some(ports) = self.tokens.get(&token).copied() {
            self.with(ports, |connection| connection.stream_ready(events));
        } else {
            self.greet(token);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_MAX {
            let Some(listener) = &self.listener else { return };
            let accepted = listener.accept().and_then(|client| {
                client.set_nonblocking(true)?;
                Ok(client)
            });
            match accepted {
                Ok(client) => self.add_greeting(client),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    log_limited!(self.log, Warn, "a client of the guest cannot be let in: {error}");
                    // It would be readable again at once while the host lacks the resource.
                    self.unlisten();
                    self.accept_again = Some(Instant::now() + ACCEPT_AGAIN_AFTER);
                    return;
                }
            }
        }
    }

    fn add_greeting(&mut self, client: UnixStream) {
        if self.refuses_all {
            return;
        }
        if self.greetings.len() >= GREETINGS_MAX {
            self.greetings.pop_first();
        }
        let token = self.next_token();
        let event = EpollEvent::new(EventSet::IN, token);
        if let Err(error) = self.epoll.ctl(ControlOperation::Add, client.as_raw_fd(), event) {
            log_limited!(self.log, Warn, "cannot watch a client of the guest: {error}");
            return;
        }
        self.greetings.insert(token, Greeting::new(client));
        self.greet(token);
    }

    fn greet(&mut self, token: u64) {
        let Some(greeting) = self.greetings.get_mut(&token) else { return };
        let guest_port = match greeting.read() {
            Greeted::NotYet => return,
            Greeted::Port(port) => Some(port),
            Greeted::Nonsense => None,
        };
        let Some(greeting) = self.greetings.remove(&token) else { return };
        // Closes the stream, which removes it from epoll.
        let Some(guest_port) = guest_port else { return };
        if self.connections.len() >= CONNECTIONS_MAX {
            log_limited!(self.log, Warn, "the guest has {CONNECTIONS_MAX} connections already");
            return;
        }
        let fd = greeting.stream().as_raw_fd();
        // It is registered again as a connection; cannot fail.
        let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
        let ports = (self.next_client_port(guest_port), guest_port);
        let (stream, buffer_bytes) = (greeting.into_stream(), self.buffer_bytes());
        give_room(&stream, buffer_bytes);
        let connection = Connection::of_host(stream, buffer_bytes);
        self.insert(ports, connection, token);
    }

    /// A port that no connection to `guest_port` uses; there are more ports than connections.
    fn next_client_port(&mut self, guest_port: u32) -> u32 {
        loop {
            self.last_port = match self.last_port {
                LAST_CLIENT_PORT => FIRST_CLIENT_PORT,
                last => last + 1,
            };
            if !self.connections.contains_key(&(self.last_port, guest_port)) {
                return self.last_port;
            }
        }
    }

    /// When [`Self::serve_overdue`] has work to do.
    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.deadlines.values().copied().chain(self.accept_again).min()
    }

    /// Handles connections whose time has passed, and accepts clients again.
    pub(super) fn serve_overdue(&mut self, now: Instant) {
        if self.accept_again.is_some_and(|again| again <= now) {
            self.accept_again = None;
            self.listen();
        }
        let overdue = self.deadlines.iter().filter(|(_, deadline)| **deadline <= now);
        let overdue: Vec<Ports> = overdue.map(|(ports, _)| *ports).collect();
        for ports in overdue {
            self.with(ports, Connection::overdue);
        }
    }

    /// Handles all descriptors that are ready.
    #[cfg(test)]
    pub(super) fn serve_ready(&mut self) {
        let mut events = [EpollEvent::default(); 32];
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        for event in events.iter().take(count) {
            self.ready(event.data(), EventSet::from_bits_truncate(event.events()));
        }
    }

    /// Number of entries in the list of connections with packets.
    #[cfg(test)]
    pub(super) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// Number of connections, and of clients that are not connected yet.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.connections.len(), self.greetings.len())
    }
}

/// Lets the host's kernel take all that the guest may send at once. By default a stream has room for a little less than
/// the larger buffer, and the rest would have to be kept here, and the stream polled for room, each time.
fn give_room(stream: &UnixStream, buffer_bytes: u32) {
    if buffer_bytes == LARGE_BUFFER_BYTES {
        let len_bytes = usize::try_from(buffer_bytes).unwrap_or(usize::MAX);
        // The stream works with less.
        let _ = SockRef::from(stream).set_send_buffer_size(len_bytes);
    }
}

/// Where the ports of this run begin: a guest that was restored, or has moved, may have connections left whose ports an
/// earlier run has given.
fn any_client_port() -> u32 {
    let mut bytes = [0; 4];
    // Without random numbers they begin where they always did.
    let _ = syscalls::random(&mut bytes);
    FIRST_CLIENT_PORT + u32::from_le_bytes(bytes) % (LAST_CLIENT_PORT - FIRST_CLIENT_PORT + 1)
}

impl Entry {
    /// Updates the events that the stream is polled for.
    fn watch(&mut self, epoll: &Epoll) -> io::Result<()> {
        let wanted = self.connection.interest();
        if self.watched == wanted {
            return Ok(());
        }
        let fd = self.connection.stream().as_raw_fd();
        let operation = match (self.watched, wanted) {
            (None, _) => ControlOperation::Add,
            (_, None) => ControlOperation::Delete,
            _ => ControlOperation::Modify,
        };
        epoll.ctl(
            operation,
            fd,
            EpollEvent::new(wanted.unwrap_or(EventSet::empty()), self.token),
        )?;
        self.watched = wanted;
        Ok(())
    }
}
