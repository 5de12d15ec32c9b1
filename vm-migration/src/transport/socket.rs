// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections over TCP and Unix sockets.
//!
//! May contain `unsafe`: vectored send and receive on raw slices of guest memory. All sockets are
//! non-blocking, and every call that would block polls together with the cancel. A connection has
//! at most one reading and one sending thread at a time. What TLS does differently is in `secured`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::{Domain, Socket, TcpKeepalive};

use super::reach::{ConnectEnd, connect_one, resolve};
use super::tls::{ClientTls, Stream};
use super::wait::{WaitEnd, is_ready_now, wait};
use super::{
    Address, BULK_UNSENT_BYTES_MAX, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES,
    SLOWEST_BYTES_PER_S, TCP_USER_TIMEOUT, TransportError,
};
use crate::cancel::Cancel;
use crate::iovecs::Iovecs;
use crate::ram::GuestSlice;

/// A part of a message.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Bytes of this process.
    Bytes(&'a [u8]),
    /// Guest memory, which is sent without a copy.
    Guest(GuestSlice<'a>),
}

/// A connected socket.
#[derive(Debug)]
pub struct Connection {
    pub(super) socket: Socket,
    /// TLS state, if the connection uses TLS.
    pub(super) tls: Option<Box<Stream>>,
    /// The handle that interrupts waits; replaced at the handover, after which a cancel comes too late.
    cancel: Mutex<Cancel>,
    /// Longest time without progress, in microseconds.
    stall_timeout_us: AtomicU64,
    /// When reading the current message began.
    reading_since: Mutex<Option<Instant>>,
    /// Bytes of it that have been read.
    read_bytes: AtomicU64,
    /// A message was sent in part only.
    is_cut_short: AtomicBool,
    /// The bytes that it lacks; 0 if that is not known.
    pub(super) missing_bytes: AtomicU64,
}

impl Connection {
    /// Connects without TLS.
    ///
    /// # Errors
    /// When nothing accepts the connection in time.
    pub fn connect(
        to: &Address,
        cancel: &Cancel,
        timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<Self, TransportError> {
        Self::connect_secured(to, None, cancel, timeout, stall_timeout)
    }

    /// Connects, with TLS if certificates are given.
    ///
    /// # Errors
    /// When nothing accepts the connection in time, or the TLS handshake does not succeed within
    /// `stall_timeout`.
    pub fn connect_secured(
        to: &Address,
        tls: Option<&ClientTls>,
        cancel: &Cancel,
        timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<Self, TransportError> {
        let deadline = Instant::now() + timeout;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in resolve(to, cancel, timeout)? {
            let left = deadline.saturating_duration_since(Instant::now());
            match connect_one(&address, cancel, left) {
                Ok(socket) => {
                    return Self::new(socket, cancel, stall_timeout)?.secure(tls, to);
                }
                Err(ConnectEnd::Cancelled) => return Err(TransportError::Cancelled),
                Err(ConnectEnd::Failed(error)) => last = error,
            }
        }
        Err(TransportError::Connect { address: to.clone(), source: last })
    }

    /// Opens another connection to the peer of this one, with TLS if this one uses it. For a TCP address it
    /// uses the same IP address, whatever the name resolves to now.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub(crate) fn connect_extra(
        &self,
        to: &Address,
        cancel: &Cancel,
        timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Connect { address: to.clone(), source };
        if !is_tcp(&self.socket).map_err(failed)? {
            return Self::connect(to, cancel, timeout, stall_timeout);
        }
        let address = self.socket.peer_addr().map_err(failed)?;
        match connect_one(&address, cancel, timeout) {
            Ok(socket) => {
                let tls = self.tls.as_ref().and_then(|tls| tls.client());
                Self::new(socket, cancel, stall_timeout)?.secure(tls, to)
            }
            Err(ConnectEnd::Cancelled) => Err(TransportError::Cancelled),
            Err(ConnectEnd::Failed(error)) => Err(failed(error)),
        }
    }

    /// A connection over a connected Unix socket.
    ///
    /// # Errors
    /// When the host refuses an operation on the socket.
    pub(crate) fn over(
        stream: UnixStream,
        cancel: &Cancel,
        stall_timeout: Duration,
    ) -> Result<Self, TransportError> {
        Self::new(Socket::from(stream), cancel, stall_timeout)
    }

    /// A connection over a connected socket.
    pub(super) fn new(
        socket: Socket,
        cancel: &Cancel,
        stall_timeout: Duration,
    ) -> Result<Self, TransportError> {
        let set_up = || -> io::Result<()> {
            socket.set_nonblocking(true)?;
            if is_tcp(&socket)? {
                socket.set_tcp_nodelay(true)?;
                let keepalive = TcpKeepalive::new()
                    .with_time(KEEPALIVE_IDLE)
                    .with_interval(KEEPALIVE_INTERVAL)
                    .with_retries(KEEPALIVE_PROBES);
                socket.set_tcp_keepalive(&keepalive)?;
                socket.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
            }
            Ok(())
        };
        set_up().map_err(TransportError::io("setting socket options"))?;
        Ok(Self {
            socket,
            tls: None,
            cancel: Mutex::new(cancel.clone()),
            stall_timeout_us: AtomicU64::new(micros(stall_timeout)),
            reading_since: Mutex::new(None),
            read_bytes: AtomicU64::new(0),
            is_cut_short: AtomicBool::new(false),
            missing_bytes: AtomicU64::new(0),
        })
    }

    /// Limits the queue of unsent bytes, so that data is sent soon after it is queued.
    pub(crate) fn keep_queue_short(&self) -> Result<(), TransportError> {
        let set = || {
            if is_tcp(&self.socket)? {
                self.socket.set_tcp_notsent_lowat(BULK_UNSENT_BYTES_MAX)
            } else {
                self.socket.set_send_buffer_size(BULK_UNSENT_BYTES_MAX as usize)
            }
        };
        set().map_err(TransportError::io("limiting a socket's queue"))
    }

    /// Sets the handle that interrupts the waits of this connection.
    pub(crate) fn set_cancel(&self, cancel: &Cancel) {
        *self.cancel.lock() = cancel.clone();
    }

    /// Longest time without progress.
    pub(crate) fn stall_timeout(&self) -> Duration {
        Duration::from_micros(self.stall_timeout_us.load(Ordering::Relaxed))
    }

    /// Changes the stall timeout for later waits.
    pub(crate) fn set_stall_timeout(&self, timeout: Duration) {
        self.stall_timeout_us.store(micros(timeout), Ordering::Relaxed);
    }

    /// Limits the time of the message that is read from now on: it must not stall, and must arrive within the
    /// stall timeout plus the time of its bytes at [`SLOWEST_BYTES_PER_S`]. `false` removes the second limit.
    pub(crate) fn time_message(&self, begins: bool) {
        self.read_bytes.store(0, Ordering::Relaxed);
        *self.reading_since.lock() = begins.then(Instant::now);
    }

    pub(super) fn has_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn cancel(&self) -> Cancel {
        self.cancel.lock().clone()
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// When the connection has ended or stalls, or the migration is cancelled.
    pub fn send(&self, bytes: &[u8]) -> Result<(), TransportError> {
        self.send_parts(&[Part::Bytes(bytes)])
    }

    /// Sends all parts in order, without copying them in this process.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_parts(&self, parts: &[Part<'_>]) -> Result<(), TransportError> {
        let mut sent_bytes = 0;
        let sent = self.send_pieces(parts, &mut sent_bytes);
        if sent.is_err() && sent_bytes > 0 {
            self.cut_short();
            // What a record of TLS has taken of a message is not known.
            let all_bytes: u64 = parts.iter().map(|part| part_iovec(part).iov_len as u64).sum();
            let missing = all_bytes.saturating_sub(sent_bytes);
            self.missing_bytes
                .store(if self.tls.is_none() { missing } else { 0 }, Ordering::Relaxed);
        }
        sent
    }

    /// Notes that a message was sent in part only: the peer would take further bytes for the rest of it.
    pub(crate) fn cut_short(&self) {
        self.is_cut_short.store(true, Ordering::Relaxed);
    }

    /// Notes that the message is complete after all.
    pub(super) fn is_complete(&self) {
        self.is_cut_short.store(false, Ordering::Relaxed);
    }

    /// True when the peer takes what is sent next as a new message.
    pub(crate) fn is_between_messages(&self) -> bool {
        !self.is_cut_short.load(Ordering::Relaxed)
    }

    fn send_pieces(&self, parts: &[Part<'_>], sent_bytes: &mut u64) -> Result<(), TransportError> {
        let mut total = None;
        if let Some(tls) = &self.tls {
            return self.send_sealed(tls, parts, sent_bytes, &mut total);
        }
        let mut pieces: Vec<libc::iovec> = parts.iter().map(part_iovec).collect();
        // SAFETY: the pieces point to bytes or guest memory that `parts` borrows; the kernel only
        // reads them.
        unsafe { self.send_all(&mut pieces, sent_bytes, &mut total) }
    }

    /// Sends pieces until all are sent. `total` holds when the message had to wait first.
    ///
    /// # Safety
    /// Each piece must be readable for its length.
    pub(super) unsafe fn send_all(
        &self,
        pieces: &mut [libc::iovec],
        sent_bytes: &mut u64,
        total: &mut Option<Instant>,
    ) -> Result<(), TransportError> {
        let mut left = Iovecs::new(pieces);
        while let Some(now) = left.next_call() {
            // SAFETY: readable, as the caller promises.
            match unsafe { transfer(self.socket.as_raw_fd(), now, true) } {
                Ok(0) => return Err(TransportError::Closed),
                Ok(sent) => {
                    *sent_bytes += sent as u64;
                    left.advance(sent);
                }
                Err(error) => {
                    let since = *total.get_or_insert_with(Instant::now);
                    self.wait_after(error, libc::POLLOUT, "sending", Some((since, *sent_bytes)))?;
                }
            }
        }
        Ok(())
    }

    /// Receives into pieces until all are full. The pieces must point to writable memory.
    ///
    /// # Safety
    /// Each piece must be writable for its length, by this thread alone or by any thread if nothing
    /// but the kernel and racing guests looks at it.
    pub(super) unsafe fn receive(&self, pieces: &mut [libc::iovec]) -> Result<(), TransportError> {
        if let Some(tls) = &self.tls {
            // SAFETY: as the caller promises.
            return unsafe { self.receive_opened(tls, pieces) };
        }
        let mut left = Iovecs::new(pieces);
        while let Some(now) = left.next_call() {
            // SAFETY: writable, as the caller promises.
            match unsafe { transfer(self.socket.as_raw_fd(), now, false) } {
                Ok(0) => return Err(TransportError::Closed),
                Ok(received) => {
                    self.has_read(received);
                    left.advance(received);
                }
                Err(error) => self.wait_to_read(error)?,
            }
        }
        Ok(())
    }

    /// True when the connection can carry descriptors.
    pub(crate) fn is_unix(&self) -> bool {
        self.tls.is_none() && is_tcp(&self.socket).is_ok_and(|tcp| !tcp)
    }

    /// Sends bytes, and a descriptor with the first of them.
    pub(crate) fn send_with_descriptor(
        &self,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), TransportError> {
        if self.tls.is_some() {
            let source = io::Error::other("descriptors do not travel over TLS");
            return Err(TransportError::Io { what: "sending", source });
        }
        loop {
            match super::rights::send(self.socket.as_raw_fd(), bytes, descriptor) {
                Ok(sent) => return self.send(&bytes[sent..]),
                Err(error) => self.wait_after(error, libc::POLLOUT, "sending", None)?,
            }
        }
    }

    /// Receives what is available, at least one byte, and a descriptor if one comes with it.
    pub(super) fn receive_with_descriptor(
        &self,
        buf: &mut [u8],
    ) -> Result<(usize, Option<OwnedFd>), TransportError> {
        if let Some(tls) = &self.tls {
            return Ok((self.receive_some_opened(tls, buf)?, None));
        }
        loop {
            match super::rights::receive(self.socket.as_raw_fd(), buf) {
                Ok((0, _)) => return Err(TransportError::Closed),
                Ok(received) => {
                    self.has_read(received.0);
                    return Ok(received);
                }
                Err(error) => self.wait_to_read(error)?,
            }
        }
    }

    /// Receives what is available, at least one byte. Descriptors that come with it are closed.
    pub(crate) fn receive_some(&self, buf: &mut [u8]) -> Result<usize, TransportError> {
        if let Some(tls) = &self.tls {
            return self.receive_some_opened(tls, buf);
        }
        loop {
            match receive_into(&self.socket, buf) {
                Ok(0) => return Err(TransportError::Closed),
                Ok(received) => {
                    self.has_read(received);
                    return Ok(received);
                }
                Err(error) => self.wait_to_read(error)?,
            }
        }
    }

    pub(super) fn wait_to_read(&self, error: io::Error) -> Result<(), TransportError> {
        let since = *self.reading_since.lock();
        let total = since.map(|since| (since, self.read_bytes.load(Ordering::Relaxed)));
        self.wait_after(error, libc::POLLIN, "receiving", total)
    }

    /// Waits until the socket accepts some bytes, if it accepts none now. `since` holds when the message had
    /// to wait first.
    pub(super) fn wait_for_room(&self, since: &mut Option<Instant>) -> Result<(), TransportError> {
        const WHAT: &str = "sending";
        let events = libc::POLLOUT;
        while !is_ready_now(self.socket.as_raw_fd(), events).map_err(TransportError::io(WHAT))? {
            let total = Some((*since.get_or_insert_with(Instant::now), 0));
            self.wait_after(io::ErrorKind::WouldBlock.into(), events, WHAT, total)?;
        }
        Ok(())
    }

    /// Handles a call that transferred nothing: waits if it would have blocked. `total` holds the start and
    /// bytes of the message, if its total time is limited.
    fn wait_after(
        &self,
        error: io::Error,
        events: i16,
        what: &'static str,
        total: Option<(Instant, u64)>,
    ) -> Result<(), TransportError> {
        match error.kind() {
            io::ErrorKind::WouldBlock => {
                let stall = self.stall_timeout();
                let (since, bytes) = total.unwrap_or((Instant::now(), 0));
                let allowed = stall + Duration::from_millis(bytes * 1000 / SLOWEST_BYTES_PER_S);
                let left = allowed.saturating_sub(since.elapsed());
                match self.wait(events, Some(left.min(stall)), what) {
                    Err(TransportError::Timeout { .. }) if bytes > 0 && left < stall => {
                        Err(TransportError::TooSlow { what, bytes, after: since.elapsed() })
                    }
                    Err(TransportError::Timeout { .. }) => {
                        Err(TransportError::Timeout { what, after: stall })
                    }
                    waited => waited,
                }
            }
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Err(TransportError::Closed)
            }
            _ if error.raw_os_error() == Some(libc::EFAULT) => Err(TransportError::NoPage { what }),
            _ => Err(TransportError::Io { what, source: error }),
        }
    }

    pub(super) fn wait(
        &self,
        events: i16,
        timeout: Option<Duration>,
        what: &'static str,
    ) -> Result<(), TransportError> {
        match wait(&[self.socket.as_raw_fd()], events, &self.cancel(), timeout) {
            Ok(WaitEnd::Ready(_)) => Ok(()),
            Ok(WaitEnd::Cancelled) => Err(TransportError::Cancelled),
            Ok(WaitEnd::TimedOut) => {
                Err(TransportError::Timeout { what, after: timeout.unwrap_or_default() })
            }
            Err(source) => Err(TransportError::Io { what, source }),
        }
    }

    /// Waits until there is data to read, for up to `timeout` instead of the stall timeout, or as long as the
    /// connection is alive if `None`.
    ///
    /// # Errors
    /// As for reading.
    pub(crate) fn wait_for_data(&self, timeout: Option<Duration>) -> Result<(), TransportError> {
        const WHAT: &str = "waiting for an answer";
        match &self.tls {
            Some(tls) => self.wait_for_plain(tls, timeout, WHAT),
            None => self.wait(libc::POLLIN, timeout, WHAT),
        }
    }

    /// Copies available data to `buf` without consuming it; returns its length.
    pub(crate) fn peek_now(&self, buf: &mut [u8]) -> usize {
        if let Some(tls) = &self.tls {
            return self.peek_opened(tls, buf);
        }
        // SAFETY: initialised bytes are valid as possibly uninitialised ones, and `recv` only ever
        // writes initialised bytes into them.
        let uninit = unsafe { &mut *(std::ptr::from_mut(buf) as *mut [MaybeUninit<u8>]) };
        self.socket.peek(uninit).unwrap_or(0)
    }

    /// Receives what is available without blocking; `None` when that is nothing.
    ///
    /// # Errors
    /// When the connection has ended or failed.
    pub(crate) fn receive_now(&self, buf: &mut [u8]) -> Result<Option<usize>, TransportError> {
        if let Some(tls) = &self.tls {
            return self.receive_now_opened(tls, buf);
        }
        loop {
            match receive_into(&self.socket, buf) {
                Ok(0) => return Err(TransportError::Closed),
                Ok(received) => return Ok(Some(received)),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(TransportError::Closed),
                },
            }
        }
    }

    /// Ends the sending direction.
    pub(crate) fn shut_down_sending(&self) {
        self.say_goodbye();
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
    }

    /// Ends both directions: threads that wait on this connection, on both sides, return at once.
    pub(crate) fn shut_down(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Ends the sending direction and reads what the peer still sends, for up to `limit`: closing with unread
    /// bytes would make the peer's host discard the last message. Returns whether the peer has closed in order.
    pub(crate) fn finish_sending(&self, limit: Duration) -> bool {
        self.say_goodbye();
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        let deadline = Instant::now() + limit;
        let mut sink = vec![MaybeUninit::uninit(); 64 << 10];
        loop {
            match self.socket.recv(&mut sink) {
                Ok(0) => return true,
                Ok(_) if Instant::now() < deadline => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let ready = self.wait(libc::POLLIN, Some(left), "draining");
                    if ready.is_err() {
                        return false;
                    }
                }
                _ => return false,
            }
        }
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn is_tcp(socket: &Socket) -> io::Result<bool> {
    Ok(socket.domain()? != Domain::UNIX)
}

fn part_iovec(part: &Part<'_>) -> libc::iovec {
    match part {
        Part::Bytes(bytes) => {
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
        }
        Part::Guest(slice) => guest_iovec(slice),
    }
}

pub(super) fn guest_iovec(slice: &GuestSlice<'_>) -> libc::iovec {
    libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() }
}

/// Calls sendmsg or recvmsg once.
///
/// # Safety
/// The pieces must be readable (sending) or writable (receiving) for their lengths.
unsafe fn transfer(fd: RawFd, pieces: &mut [libc::iovec], send: bool) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    // SAFETY: `message` describes `pieces`, which the caller vouches for.
    let moved = unsafe {
        if send {
            libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        } else {
            libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT)
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Sends what the socket accepts without blocking.
pub(super) fn send_now(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    socket.send_with_flags(bytes, libc::MSG_NOSIGNAL)
}

/// Receives what is available, up to the length of `buf`.
pub(super) fn receive_into(socket: &Socket, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: initialised bytes are valid as possibly uninitialised ones, and `recv` only ever writes
    // initialised bytes into them.
    let uninit = unsafe { &mut *(std::ptr::from_mut(buf) as *mut [MaybeUninit<u8>]) };
    socket.recv(uninit)
}
