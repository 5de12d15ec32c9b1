// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The server thread: accepts clients, answers them, and detects when a lease ends.
//!
//! Owns the sockets and the connections. Must never wait for a client: one that does not read its
//! answer, or says nothing for long without having anything, is cut off.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prezero_pool_client::{
    HEADER_BYTES, MESSAGE_BYTES_MAX, Refusal, Reply, Request, Take, TakePinned,
};
use thiserror::Error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use crate::broker::{Broker, PinnedAnswer, Waited};
use crate::config::Config;
use crate::connections::{Admission, Client, Open, admit};
use crate::pace::Pace;
use crate::prepinned::PinnedFiles;
use crate::slot::ZeroingOptions;
use crate::stats;
use crate::sys;
use crate::worker::Workers;

/// A connection that has nothing says what it wants within this time.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// For readers of statistics.
const STATS_TIME: Duration = Duration::from_secs(2);

const CLIENTS: u64 = 0;
const STATS: u64 = 1;
const WORKERS: u64 = 2;
const FIRST_CONNECTION: u64 = 16;

/// Why the daemon cannot run.
#[derive(Debug, Error)]
pub enum ServeError {
    /// A socket cannot be made.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// Its path.
        path: PathBuf,
        /// The host's answer.
        #[source]
        source: io::Error,
    },
    /// Another daemon is there.
    #[error("another pool listens at {}", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The host gives no descriptor or thread.
    #[error("cannot start")]
    Start(#[source] io::Error),
    /// The loop is broken.
    #[error("cannot wait for requests")]
    Wait(#[source] io::Error),
}

struct Connection {
    stream: UnixStream,
    uid: u32,
    pid: i32,
    since: Instant,
    received: Vec<u8>,
    /// What it asked for and a worker is at, and what is known of the answer.
    waits_for: Option<(TakePinned, Waited)>,
}

struct Server {
    epoll: Epoll,
    clients: UnixListener,
    stats: Option<UnixListener>,
    wake: EventFd,
    workers: Workers,
    options: Arc<ZeroingOptions>,
    broker: Broker,
    connections: BTreeMap<u64, Connection>,
    next_number: u64,
    own_uid: u32,
}

/// What came of a connection that had something to say.
enum ConnectionStatus {
    Open,
    Closed,
    Violation(String),
}

fn listen(path: &Path, mode: u32) -> Result<UnixListener, ServeError> {
    let failed = |source| ServeError::Listen { path: path.to_owned(), source };
    // What a daemon left behind that was killed is taken away; what answers is not.
    if path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket()) {
        if UnixStream::connect(path).is_ok() {
            return Err(ServeError::InUse { path: path.to_owned() });
        }
        fs::remove_file(path).map_err(failed)?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Runs the daemon for as long as the process lives; only what keeps it from running comes back.
///
/// # Errors
/// Naming what is missing.
pub fn serve(config: Config) -> Result<std::convert::Infallible, ServeError> {
    sys::ignore_stray_signals();
    let clients = listen(&config.socket, config.socket_mode)?;
    let stats = config.stats_socket.as_deref().map(|path| listen(path, 0o660)).transpose()?;
    let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(ServeError::Start)?;
    let options = Arc::new(ZeroingOptions {
        pace: Pace::new(config.bandwidth.unwrap_or(0), config.bandwidth_busy),
        keep_free_bytes: config.keep_free_bytes,
        idle_only: config.idle_only,
        threads: config.threads,
    });
    let workers = Workers::start(&config.classes, &options, &wake).map_err(ServeError::Start)?;
    let own_uid = sys::own_uid();
    let mut server = Server {
        epoll: Epoll::new().map_err(ServeError::Start)?,
        clients,
        stats,
        wake,
        workers,
        options,
        broker: Broker::new(config, own_uid),
        connections: BTreeMap::new(),
        next_number: FIRST_CONNECTION,
        own_uid,
    };
    server.watch(server.clients.as_raw_fd(), CLIENTS).map_err(ServeError::Start)?;
    if let Some(stats) = &server.stats {
        server.watch(stats.as_raw_fd(), STATS).map_err(ServeError::Start)?;
    }
    server.watch(server.wake.as_raw_fd(), WORKERS).map_err(ServeError::Start)?;
    server.run()
}

impl Server {
    fn watch(&self, fd: i32, token: u64) -> io::Result<()> {
        self.epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token))
    }

    fn run(&mut self) -> Result<std::convert::Infallible, ServeError> {
        let mut ready = [EpollEvent::default(); 64];
        loop {
            let timeout_ms = self.tick();
            let count = match self.epoll.wait(timeout_ms, &mut ready) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(ServeError::Wait(error)),
            };
            for event in ready.iter().take(count) {
                match event.data() {
                    CLIENTS => self.accept(),
                    STATS => self.send_stats(),
                    WORKERS => self.take_results(),
                    number => self.talk(number),
                }
            }
        }
    }

    /// Does what is due; gives the time that the loop may sleep.
    fn tick(&mut self) -> i32 {
        let now = Instant::now();
        let silent: Vec<u64> = self
            .connections
            .iter()
            .filter(|(number, connection)| connection.is_silent(**number, &self.broker, now))
            .map(|(number, _)| *number)
            .collect();
        for number in silent {
            self.cut(number, "it says nothing");
        }
        self.broker.tick(now);
        self.answer_late();
        // Which may have ended a connection.
        let due = self.broker.tick(now);
        while let Some(job) = self.broker.next_job() {
            self.workers.submit(job);
        }
        let idle = (!self.connections.is_empty()).then(|| now + Duration::from_secs(1));
        let next = [due, idle].into_iter().flatten().min();
        next.map_or(-1, |at| {
            let left = at.saturating_duration_since(now);
            i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
        })
    }

    fn take_results(&mut self) {
        // WouldBlock means that it was read before.
        let _ = self.wake.read();
        while let Some(done) = self.workers.next_done() {
            self.broker.done(done, Instant::now());
        }
    }

    /// Answers who has waited, as far as that is possible by now.
    fn answer_late(&mut self) {
        let waiting = self.connections.iter().filter(|(_, other)| other.waits_for.is_some());
        let waiting: Vec<u64> = waiting.map(|(number, _)| *number).collect();
        for number in waiting {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            if let Err(error) = connection.answer_late(number, &mut self.broker) {
                self.cut(number, &format!("it takes no answer: {error}"));
            }
        }
    }

    fn accept(&mut self) {
        let stream = match self.clients.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                log::warn!("a connection cannot be accepted: {error}");
                // Out of descriptors, most likely: others must end first.
                std::thread::sleep(Duration::from_millis(20));
                return;
            }
        };
        if let Err(error) = self.admit(stream) {
            log::info!("a connection is not accepted: {error}");
        }
    }

    fn admit(&mut self, stream: UnixStream) -> io::Result<()> {
        let peer = sys::peer_of(&stream)?;
        let client = Client {
            is_trusted: peer.uid == 0 || peer.uid == self.own_uid,
            may_ask: self.broker.may_ask(peer.uid),
        };
        let of_user = self.connections.values().filter(|other| other.uid == peer.uid).count();
        match admit(client, Open { of_user, of_all: self.connections.len() }) {
            Admission::Admitted => {}
            Admission::Pointless => {
                let text = format!(
                    "user {} may have no memory of the pool: raise the limit in the pool's configuration",
                    peer.uid
                );
                let reason = Refusal::OverLimit;
                self.broker.counters.refuse(reason);
                stream.set_nonblocking(true)?;
                // The answer to whatever it asks; it is read also after this end was closed.
                let reply = Reply::Refused { reason, text: text.clone() };
                (&stream).write_all(&reply.encode())?;
                return Err(io::Error::other(text));
            }
            Admission::TooMany => {
                let text = format!("user {} (process {}) has too many", peer.uid, peer.pid);
                return Err(io::Error::other(text));
            }
        }
        stream.set_nonblocking(true)?;
        let number = self.next_number;
        self.watch(stream.as_raw_fd(), number)?;
        self.next_number += 1;
        let (uid, pid) = (peer.uid, peer.pid);
        let (since, received) = (Instant::now(), Vec::new());
        let connection = Connection { stream, uid, pid, since, received, waits_for: None };
        self.connections.insert(number, connection);
        Ok(())
    }

    /// Hears what a connection has to say.
    fn talk(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match connection.hear(number, &mut self.broker) {
            ConnectionStatus::Open => {}
            ConnectionStatus::Closed => self.cut(number, "it was closed"),
            ConnectionStatus::Violation(why) => {
                self.broker.counters.bad_requests += 1;
                self.cut(number, &why);
            }
        }
    }

    fn cut(&mut self, number: u64, why: &str) {
        if let Some(connection) = self.connections.remove(&number) {
            log::debug!("connection of process {} ends: {why}", connection.pid);
            // The kernel takes a closed descriptor out of the epoll set.
            drop(connection);
            self.broker.closed(number, Instant::now());
        }
    }

    fn send_stats(&mut self) {
        let Some(Ok((mut stream, _))) = self.stats.as_ref().map(UnixListener::accept) else {
            return;
        };
        let text = stats::render(
            &self.broker.counters,
            &self.broker.slot_counts(),
            self.options.pace.bytes_per_s(),
        );
        // The text fits into the socket's buffer; a client that connects and does not read gets a part.
        let _ = stream.set_nonblocking(true).and_then(|()| stream.write_all(text.as_bytes()));
    }
}

impl Connection {
    fn is_silent(&self, number: u64, broker: &Broker, now: Instant) -> bool {
        now.duration_since(self.since) > IDLE_MAX
            && self.waits_for.is_none()
            && !broker.has_any(number)
    }

    fn hear(&mut self, number: u64, broker: &mut Broker) -> ConnectionStatus {
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        // One read each time: no client keeps the others waiting. Descriptors that a client sends go
        // nowhere, as this is no recvmsg.
        match self.stream.read(&mut buffer) {
            Ok(0) => return ConnectionStatus::Closed,
            Ok(len) => self.received.extend(buffer.iter().take(len)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return ConnectionStatus::Open;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                return ConnectionStatus::Open;
            }
            Err(_) => return ConnectionStatus::Closed,
        }
        loop {
            let request = match Request::decode(&self.received) {
                Ok(None) => return ConnectionStatus::Open,
                Err(error) => return ConnectionStatus::Violation(error.to_string()),
                Ok(Some(_)) if self.waits_for.is_some() => {
                    return ConnectionStatus::Violation(
                        "it asks again before it was answered".to_owned(),
                    );
                }
                Ok(Some((request, len))) => {
                    self.received.drain(..len);
                    request
                }
            };
            let answered = match request {
                Request::Take(take) => self.answer(number, &take, broker),
                Request::TakePinned(take) => self.answer_pinned(number, take, None, broker),
                Request::Release(device) => {
                    let (devices, zones, regions) = (vec![device], Vec::new(), Vec::new());
                    let take = TakePinned { devices, zones, regions };
                    self.answer_pinned(number, take, None, broker)
                }
            };
            if let Err(error) = answered {
                return ConnectionStatus::Violation(format!("it takes no answer: {error}"));
            }
        }
    }

    fn answer_late(&mut self, number: u64, broker: &mut Broker) -> io::Result<()> {
        let Some((take, waited)) = self.waits_for.take() else { return Ok(()) };
        self.answer_pinned(number, take, Some(waited), broker)
    }

    fn answer_pinned(
        &mut self,
        number: u64,
        take: TakePinned,
        waited: Option<Waited>,
        broker: &mut Broker,
    ) -> io::Result<()> {
        let answer = broker.take_pinned(number, self.uid, &take, waited, Instant::now());
        let (reply, files) = match answer {
            PinnedAnswer::Now(reply, files) => (reply, files),
            PinnedAnswer::Later(waited) => {
                self.waits_for = Some((take, waited));
                return Ok(());
            }
        };
        log::info!("process {} of user {}: {take:?}: {reply:?}", self.pid, self.uid);
        let Some(files) = files else { return self.send(&reply.encode(), None) };
        let sent = self.send_all(&reply.encode(), &files);
        broker.close(files);
        sent
    }

    /// Sends a descriptor with each part: a reader has room for one.
    fn send_all(&self, bytes: &[u8], files: &PinnedFiles) -> io::Result<()> {
        let mut rest = bytes;
        for file in files.memory.iter().chain([&files.iommufd]) {
            let (part, after) = rest.split_at(HEADER_BYTES.min(rest.len()));
            self.send(part, Some(file))?;
            rest = after;
        }
        self.send(rest, Some(&files.device))
    }

    fn answer(&self, number: u64, take: &Take, broker: &mut Broker) -> io::Result<()> {
        let (reply, file) = broker.take(number, self.uid, take);
        log::info!("process {} of user {}: {take:?}: {reply:?}", self.pid, self.uid);
        self.send(&reply.encode(), file.as_ref())
    }

    fn send(&self, bytes: &[u8], file: Option<&File>) -> io::Result<()> {
        let sent = match file {
            Some(file) => self
                .stream
                .send_with_fd(bytes, file.as_raw_fd())
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))?,
            None => (&self.stream).write(bytes)?,
        };
        // A message is far smaller than a socket's buffer.
        if sent < bytes.len() {
            return Err(io::Error::from(io::ErrorKind::WouldBlock));
        }
        Ok(())
    }
}

/// Reads the statistics of a running daemon.
///
/// # Errors
/// Nothing listens, or nothing comes.
pub fn read_stats(path: &Path) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(STATS_TIME))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use prezero_pool_client::{
        PagesWanted, PinnedGrant, PinnedRegion, PinnedZone, PoolConnection, SlotPages, ZONES_MAX,
        ZoneWanted,
    };

    use super::*;

    fn file_of(len_bytes: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len_bytes).unwrap();
        file
    }

    fn connection() -> (Connection, UnixStream) {
        let (stream, client) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let (since, received, waits_for) = (Instant::now(), Vec::new(), None);
        (Connection { stream, uid: 0, pid: 0, since, received, waits_for }, client)
    }

    fn broker() -> Broker {
        Broker::new(Config::parse("socket = '/s'").unwrap(), 0)
    }

    #[test]
    fn a_connection_that_waits_for_an_answer_is_not_silent() {
        let ((mut connection, _client), broker) = (connection(), broker());
        let at = |seconds| connection.since + Duration::from_secs(seconds);
        let (soon, late) = (at(9), at(11));
        assert!(!connection.is_silent(16, &broker, soon));
        assert!(connection.is_silent(16, &broker, late));
        let devices = vec!["0000:65:00.0".parse().unwrap()];
        let take = TakePinned { devices, zones: Vec::new(), regions: Vec::new() };
        connection.waits_for = Some((take, Waited::default()));
        assert!(!connection.is_silent(16, &broker, late));
    }

    #[test]
    fn a_vmm_of_an_earlier_version_is_refused_and_not_cut() {
        let ((mut connection, mut client), mut broker) = (connection(), broker());
        let request = Request::Release("0000:65:00.0".parse().unwrap());
        client.write_all(&request.encode()).unwrap();
        let status = connection.hear(16, &mut broker);
        assert!(matches!(status, ConnectionStatus::Open));
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let len = client.read(&mut bytes).unwrap();
        let (reply, _) = Reply::decode(&bytes[..len]).unwrap().unwrap();
        assert!(matches!(reply, Reply::Refused { reason: Refusal::NoSuchSlot, .. }), "{reply:?}");
    }

    #[test]
    fn devices_that_are_named_without_memory_are_left_alone() {
        let slot = "[[device_slots]]\ndevice = '0000:65:00.0'\nsize = '4M'\npages = '4K'";
        let config = Config::parse(&format!("socket = '/s'\n{slot}")).unwrap();
        let device = "0000:65:00.0".parse().unwrap();
        let (devices, zones, regions) = (vec![device], Vec::new(), Vec::new());
        let alone = Request::TakePinned(TakePinned { devices, zones, regions });
        for request in [alone, Request::Release(device)] {
            let mut broker = Broker::new(config.clone(), 0);
            let (mut connection, mut client) = connection();
            client.write_all(&request.encode()).unwrap();
            assert!(matches!(connection.hear(16, &mut broker), ConnectionStatus::Open));
            assert!(broker.has_any(16), "{request:?}");
            let late = connection.since + Duration::from_hours(1);
            assert!(!connection.is_silent(16, &broker, late), "it may be taken now");
        }
    }

    #[test]
    fn each_zone_of_the_largest_vm_has_its_memfd() {
        const TIB: u64 = 1 << 40;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        let listener = UnixListener::bind(&path).unwrap();
        let device = "0000:65:00.0".parse().unwrap();
        let region = |zone| {
            let gpa = zone as u64 * TIB;
            PinnedRegion { zone, gpa, len_bytes: TIB, offset: 0 }
        };
        let regions: Vec<_> = (0..ZONES_MAX).map(region).collect();
        let (pages, node) = (PagesWanted::Huge1Gib, Some(1));
        let zones = vec![ZoneWanted { size_bytes: TIB, pages, node }; ZONES_MAX];
        let request = TakePinned { devices: vec![device], zones, regions: regions.clone() };
        let asked = request.clone();
        let client = std::thread::spawn(move || {
            PoolConnection::open(&path).and_then(|pool| pool.take_pinned(&asked))
        });
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; request.encode().len()];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(TakePinned::decode(&bytes).unwrap().unwrap().0, request);
        let zone = PinnedZone { size_bytes: TIB, pages: SlotPages::Huge1Gib };
        let grant = PinnedGrant {
            device,
            zones: vec![zone; ZONES_MAX],
            piece_bytes: 64 << 20,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions,
        };
        let files = PinnedFiles {
            memory: (1..=ZONES_MAX as u64).map(file_of).collect(),
            iommufd: file_of(100),
            device: file_of(101),
        };
        stream.set_nonblocking(true).unwrap();
        let (since, received, waits_for) = (Instant::now(), Vec::new(), None);
        let connection = Connection { stream, uid: 0, pid: 0, since, received, waits_for };
        connection.send_all(&Reply::GrantedPinned(grant.clone()).encode(), &files).unwrap();
        let memory = client.join().unwrap().unwrap();
        let len = |file: &File| file.metadata().unwrap().len();
        assert_eq!(memory.grant, grant);
        assert!(memory.files.iter().map(len).eq(1..=ZONES_MAX as u64));
        assert_eq!([len(&memory.iommufd), len(&memory.device)], [100, 101]);
    }
}
