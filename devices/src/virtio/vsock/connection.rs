// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One connection between a port of the guest and a stream of the host.
//!
//! Owns its state, and what the guest has sent and the host has not taken yet. Data for the guest are read when it has
//! provided buffers for them, and credit, straight into these: of a client that writes much into several at once. Its own
//! are written from where they are, and only what the stream does not take is kept. Must never wait for the host.
//!
//! ```text
//!   host's client > Requested -- RESPONSE --> Open -- both of one side's ends --> RST is sent
//!   guest's REQUEST > Open --------------------^                                    |
//!                                    what the host has not taken > Lingering, else the end
//! ```

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;

use super::credit::Credit;
use super::packet::{Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};

/// Time limit for the guest to respond to a connecting client.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Time limit for the guest to close a connection whose client has gone.
const END_TIME: Duration = Duration::from_secs(2);
/// Time limit for a client to read more of the guest's last data after the guest has closed the connection.
const LINGER_TIME: Duration = Duration::from_mins(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The guest has not responded to the host's client yet.
    Requested,
    /// Established.
    Open,
    /// Closed for the guest, with data left for the host.
    Lingering,
    /// Closed.
    Over,
}

/// Control packets to be sent to the guest.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    request: bool,
    response: bool,
    rst: bool,
    /// The device's credit, because the guest has asked for it.
    credit: bool,
    /// A question for the guest's.
    ask: bool,
}

/// Data of packets of the guest, as far as no stream has taken them.
pub(super) trait Data {
    fn len_bytes(&self) -> usize;
    /// Writes to a stream what it takes now, which is not left afterwards; returns the length.
    fn write(&mut self, stream: &UnixStream) -> io::Result<usize>;
    /// Appends what is left to `kept`.
    fn keep(&mut self, kept: &mut VecDeque<u8>) -> io::Result<()>;
}

/// Where the data of a packet go: one buffer or several, which are a packet each for the guest.
pub(super) trait Room {
    /// Reads from a stream into as many buffers as `wanted_bytes` take, but at least into one, and no more than
    /// `limit_bytes`.
    fn read(
        &mut self,
        stream: &UnixStream,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> io::Result<Filled>;
}

/// What was read from a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filled {
    pub(super) len_bytes: usize,
    /// Whether it is as much as there was room for.
    pub(super) is_full: bool,
}

/// A packet for the guest; its data are in the caller's room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) len_bytes: usize,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

/// A vsock connection; see the module.
pub(super) struct Connection {
    stream: UnixStream,
    phase: Phase,
    due: Due,
    /// Data from the guest that its stream has not taken, as many as the guest has credit for at most. While there are
    /// any, the stream is polled for room for them.
    to_host: VecDeque<u8>,
    credit: Credit,
    /// What has come of the host since it last had nothing, whether the last of it filled all of its room, and what had
    /// come when it last had nothing.
    burst_bytes: usize,
    is_flowing: bool,
    last_burst_bytes: usize,
    guest_receives: bool,
    guest_sends: bool,
    host_receives: bool,
    host_sends: bool,
    /// Flags of the last SHUTDOWN sent to the guest.
    shutdown_told: u32,
    /// Whether the host's stream may have data, or has ended.
    is_readable: bool,
    /// Whether the stream is polled for what changes, instead of for what is there.
    is_polled_by_edges: bool,
    /// Whether the stream has ended in both directions; remaining data can be read.
    has_hung_up: bool,
    deadline: Option<(Duration, Instant)>,
    /// When the guest is asked for credit: data wait for it.
    asks_at: Option<Instant>,
}

impl Connection {
    fn new(stream: UnixStream, phase: Phase, buffer_bytes: u32) -> Self {
        Self {
            stream,
            phase,
            due: Due::default(),
            to_host: VecDeque::new(),
            credit: Credit::new(buffer_bytes),
            burst_bytes: 0,
            is_flowing: false,
            last_burst_bytes: 0,
            guest_receives: true,
            guest_sends: true,
            host_receives: true,
            host_sends: true,
            shutdown_told: 0,
            is_readable: false,
            is_polled_by_edges: false,
            has_hung_up: false,
            deadline: None,
            asks_at: None,
        }
    }

    /// A connection by a host client, to be requested from the guest. `stream` must be non-blocking; of what the guest
    /// sends, `buffer_bytes` may wait for the client.
    pub(super) fn of_host(stream: UnixStream, buffer_bytes: u32) -> Self {
        let mut connection = Self::new(stream, Phase::Requested, buffer_bytes);
        connection.due.request = true;
        connection.wait_for(ANSWER_TIME);
        connection
    }

    /// A connection requested by the guest, and accepted; otherwise the same.
    pub(super) fn of_guest(stream: UnixStream, request: &Header, buffer_bytes: u32) -> Self {
        let mut connection = Self::new(stream, Phase::Open, buffer_bytes);
        connection.due.response = true;
        connection.credit.take(request);
        connection
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Whether the guest knows the connection. Before that, its packets are of an earlier one with the same ports.
    pub(super) fn is_known(&self) -> bool {
        match self.phase {
            Phase::Requested => !self.due.request,
            Phase::Open => true,
            Phase::Lingering | Phase::Over => false,
        }
    }

    /// Whether the connection is closed.
    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// When its time limit passes, or the guest is to be asked: [`Self::overdue`] has work to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        // Only one of them can be: data wait on an open connection alone.
        self.deadline.map(|(_, deadline)| deadline).or(self.asks_at)
    }

    fn wait_for(&mut self, time: Duration) {
        self.deadline = Some((time, Instant::now() + time));
    }

    /// Restarts the time limit, after time in which neither side could act.
    pub(super) fn restart_time_limit(&mut self) {
        if let Some((time, _)) = self.deadline {
            self.wait_for(time);
        }
        self.asks_at = None;
        self.mind_credit();
    }

    /// Ends the connection after its time limit, or has the guest asked for credit.
    pub(super) fn overdue(&mut self) {
        if self.deadline.is_none() {
            self.due.ask = self.asks_at.take().is_some();
        } else if self.phase == Phase::Lingering {
            self.phase = Phase::Over;
        } else {
            self.fail();
        }
    }

    /// Whether data of the host wait for credit.
    fn lacks_credit(&self) -> bool {
        self.may_read() && self.is_readable && self.credit.free_bytes() == 0
    }

    /// Sets when the guest is asked for credit.
    fn mind_credit(&mut self) {
        if !self.lacks_credit() {
            self.asks_at = None;
            self.due.ask = false;
        } else if self.asks_at.is_none() && !self.due.ask {
            let after = self.credit.ask_after();
            if after.is_zero() {
                self.due.ask = true;
            } else {
                self.asks_at = Some(Instant::now() + after);
            }
        }
    }

    /// Handles an immediate close or a violation by the guest: data not read by the host are dropped.
    pub(super) fn drop_data(&mut self) {
        self.to_host.clear();
    }

    /// Resets the connection: the client is told at once, and the guest by an RST once it has a buffer, with nothing
    /// else to wait for; if it knows of the connection.
    pub(super) fn fail(&mut self) {
        self.drop_data();
        self.deadline = None;
        self.asks_at = None;
        // Fails only if the client has gone.
        let _ = self.stream.shutdown(Shutdown::Both);
        if self.due.request {
            self.due = Due::default();
            self.phase = Phase::Over;
        } else {
            self.due = Due { rst: true, ..Due::default() };
        }
    }

    /// How much data the connection takes in packets that are given to it together; `None` if it takes one at a time.
    pub(super) fn direct_bytes(&self) -> Option<usize> {
        let is_direct = self.phase == Phase::Open
            && self.guest_sends
            && self.host_receives
            && self.to_host.is_empty()
            && !self.due.rst;
        is_direct.then(|| usize_of(self.credit.buffer_bytes()))
    }

    /// Handles a packet of the guest, except RST, or several with data, which only differ in their credit: that of the
    /// last. `host_port` is reported to the client.
    pub(super) fn take_packet(
        &mut self,
        header: &Header,
        data: Option<&mut dyn Data>,
        host_port: u32,
    ) {
        if self.due.rst {
            return;
        }
        self.credit.take(header);
        self.take_operation(header, data, host_port);
        self.mind_credit();
    }

    fn take_operation(&mut self, header: &Header, data: Option<&mut dyn Data>, host_port: u32) {
        match (self.phase, header.op) {
            (Phase::Requested, op::RESPONSE) => self.answer_client(host_port),
            (Phase::Open, op::RW) => match data {
                Some(data) if self.guest_sends => self.send(data),
                _ => self.fail(),
            },
            (Phase::Open, op::SHUTDOWN) => self.shut_down(header.flags),
            (Phase::Open, op::CREDIT_REQUEST) => self.due.credit = true,
            (Phase::Open, op::CREDIT_UPDATE) => {}
            _ => self.fail(),
        }
    }

    fn answer_client(&mut self, host_port: u32) {
        self.phase = Phase::Open;
        self.deadline = None;
        let answer = format!("OK {host_port}\n");
        // Nothing was written before, so it fits unless the client has gone.
        match self.stream.write(answer.as_bytes()) {
            Ok(written) if written == answer.len() => {}
            _ => self.fail(),
        }
    }

    fn send(&mut self, data: &mut dyn Data) {
        let free_bytes = usize_of(self.credit.buffer_bytes()).saturating_sub(self.to_host.len());
        if data.len_bytes() > free_bytes {
            return self.fail();
        }
        // Behind what is kept, this waits for the same room.
        while self.to_host.is_empty() && self.host_receives && data.len_bytes() > 0 {
            match data.write(&self.stream) {
                Ok(0) => break,
                Ok(written) => self.credit.forwarded(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_of_the_reader(&error) => self.host_receives = false,
                // Memory of the guest that the host cannot read, or none left of its own. What follows may not come in
                // place of it.
                Err(_) => return self.fail(),
            }
        }
        if !self.host_receives {
            // The reader is gone. Data sent before may still be read from the other side.
            self.credit.forwarded(data.len_bytes());
        } else if data.len_bytes() > 0 && data.keep(&mut self.to_host).is_err() {
            self.fail();
        }
    }

    /// Writes as much as the host accepts now.
    fn flush(&mut self) {
        while self.host_receives && !self.to_host.is_empty() {
            let (front, _) = self.to_host.as_slices();
            match self.stream.write(front) {
                Ok(0) => break,
                Ok(written) => self.forwarded(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_of_the_reader(&error) => self.host_receives = false,
                Err(_) if self.phase == Phase::Lingering => {
                    self.phase = Phase::Over;
                    return;
                }
                Err(_) => return self.fail(),
            }
        }
        if !self.host_receives {
            // The reader is gone. Data sent before may still be read from the other side.
            self.forwarded(self.to_host.len());
        }
        if !self.to_host.is_empty() {
            return;
        }
        if !self.guest_sends {
            // Fails only if the client has gone.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if self.phase == Phase::Lingering {
            self.phase = Phase::Over;
        }
    }

    /// Notes that the front of what is kept was taken.
    fn forwarded(&mut self, len_bytes: usize) {
        self.to_host.drain(..len_bytes.min(self.to_host.len()));
        if self.phase == Phase::Lingering {
            self.wait_for(LINGER_TIME);
        }
        self.credit.forwarded(len_bytes);
    }

    fn shut_down(&mut self, flags: u32) {
        if flags & SHUTDOWN_RECEIVE != 0 && std::mem::take(&mut self.guest_receives) {
            // Fails only if the client has gone.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        if flags & SHUTDOWN_SEND != 0 {
            self.guest_sends = false;
            self.flush();
        }
        if !self.guest_receives && !self.guest_sends {
            self.due = Due { rst: true, ..Due::default() };
        }
    }

    /// Handles a stream that is ready.
    pub(super) fn stream_ready(&mut self, events: EventSet) {
        if events.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            self.has_hung_up = true;
        }
        if events.intersects(EventSet::IN | EventSet::HANG_UP | EventSet::ERROR) {
            self.is_polled_by_edges |= std::mem::replace(&mut self.is_readable, true);
        }
        if events.intersects(EventSet::OUT | EventSet::HANG_UP | EventSet::ERROR) {
            self.flush();
        }
        self.mind_credit();
    }

    /// The events to poll the stream for; `None` to stop polling.
    ///
    /// A stream that is read until it has nothing is polled for what is there: a read that gets less than it has room for
    /// needs no further one, as what is left is reported again. Once data had to wait for the guest, that would report
    /// them again and again; from then on what is reported is remembered here, until a read finds nothing.
    pub(super) fn interest(&self) -> Option<EventSet> {
        if self.has_hung_up || self.is_over() {
            return None;
        }
        let mut events = EventSet::empty();
        events.set(EventSet::EDGE_TRIGGERED, self.is_polled_by_edges);
        if self.may_read() {
            events |= EventSet::IN;
        }
        if self.host_receives && !self.to_host.is_empty() {
            events |= EventSet::OUT;
        }
        Some(events)
    }

    fn may_read(&self) -> bool {
        self.phase == Phase::Open && self.host_sends && self.guest_receives && !self.due.rst
    }

    /// Flags of a SHUTDOWN that is still to be sent to the guest.
    fn shutdown_due(&self) -> Option<u32> {
        // A client that has gone reads no more, but its last data are delivered first, if the guest takes any.
        let is_gone = self.has_hung_up && (!self.host_sends || !self.guest_receives);
        let mut flags = 0;
        if !self.host_sends || is_gone {
            flags |= SHUTDOWN_SEND;
        }
        if !self.host_receives || is_gone {
            flags |= SHUTDOWN_RECEIVE;
        }
        (self.phase == Phase::Open && flags & !self.shutdown_told != 0).then_some(flags)
    }

    fn credit_update_is_due(&self) -> bool {
        self.due.credit || self.phase == Phase::Open && self.credit.is_report_due()
    }

    /// Whether [`Self::next_packet`] may return a packet.
    pub(super) fn has_packets(&self) -> bool {
        let Due { request, response, rst, ask, credit: _ } = self.due;
        let has_data = self.may_read() && self.is_readable;
        request
            || response
            || rst
            || has_data && (self.credit.free_bytes() > 0 || ask)
            || self.shutdown_due().is_some()
            || self.credit_update_is_due()
    }

    /// The next packet for the guest, with its data in `room`: not many more than `share_bytes`.
    pub(super) fn next_packet(
        &mut self,
        room: &mut impl Room,
        share_bytes: usize,
    ) -> Option<Packet> {
        let (op, flags, len_bytes) = self.next_op(room, share_bytes)?;
        self.mind_credit();
        self.due.credit = false;
        let (buf_alloc, fwd_cnt) = self.credit.tell();
        Some(Packet { op, flags, len_bytes, buf_alloc, fwd_cnt })
    }

    fn next_op(&mut self, room: &mut impl Room, share_bytes: usize) -> Option<(u16, u32, usize)> {
        if let Some(reset) = self.take_reset() {
            return Some(reset);
        }
        if std::mem::take(&mut self.due.request) {
            return Some((op::REQUEST, 0, 0));
        }
        if std::mem::take(&mut self.due.response) {
            return Some((op::RESPONSE, 0, 0));
        }
        if self.may_read() && self.is_readable {
            if self.credit.free_bytes() > 0 {
                if let Some(len_bytes) = self.read(room, share_bytes) {
                    return Some((op::RW, 0, len_bytes));
                }
                // Reading may have failed at the guest's memory, and nothing else may come that leads here again.
                if let Some(reset) = self.take_reset() {
                    return Some(reset);
                }
            } else if std::mem::take(&mut self.due.ask) {
                self.credit.ask();
                return Some((op::CREDIT_REQUEST, 0, 0));
            }
        }
        if let Some(flags) = self.shutdown_due() {
            self.shutdown_told = flags;
            if flags == SHUTDOWN_RECEIVE | SHUTDOWN_SEND {
                self.wait_for(END_TIME);
            }
            return Some((op::SHUTDOWN, flags, 0));
        }
        self.credit_update_is_due().then_some((op::CREDIT_UPDATE, 0, 0))
    }

    /// The reset that is due, which ends the connection.
    fn take_reset(&mut self) -> Option<(u16, u32, usize)> {
        std::mem::take(&mut self.due.rst).then(|| {
            self.close_for_guest();
            (op::RST, 0, 0)
        })
    }

    /// Reads data of the host, within the guest's credit; `None` if there are none now, or at the end.
    fn read(&mut self, room: &mut impl Room, share_bytes: usize) -> Option<usize> {
        let credit_bytes = usize_of(self.credit.free_bytes());
        let mut wanted_bytes = self.wanted_bytes(share_bytes);
        loop {
            match room.read(&self.stream, wanted_bytes, credit_bytes) {
                Ok(Filled { len_bytes, is_full }) if len_bytes > 0 => {
                    self.is_flowing = is_full;
                    self.burst_bytes = self.burst_bytes.saturating_add(len_bytes);
                    self.credit.sent(len_bytes);
                    if !is_full && !self.is_polled_by_edges && !self.has_hung_up {
                        self.ran_dry();
                    }
                    return Some(len_bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.ran_dry();
                    return None;
                }
                // A buffer that cannot be written, or memory of the host for a list of several: each is for one
                // connection, which may not be this one.
                Err(error) if wanted_bytes > 1 && is_of_the_buffers(&error) => wanted_bytes = 1,
                // That is no end of the client's data.
                Err(error) if !is_end(&error) => {
                    self.fail();
                    return None;
                }
                Ok(_) | Err(_) => {
                    self.is_readable = false;
                    self.host_sends = false;
                    return None;
                }
            }
        }
    }

    /// What there may be to read. Buffers that are taken in vain only have to be given back.
    fn wanted_bytes(&self, share_bytes: usize) -> usize {
        match (self.burst_bytes, self.is_flowing) {
            (0, _) => self.last_burst_bytes.clamp(1, share_bytes.max(1)),
            (_, true) => share_bytes,
            (_, false) => 1,
        }
    }

    /// Notes that the host has no data now.
    fn ran_dry(&mut self) {
        self.is_readable = false;
        if self.burst_bytes > 0 {
            self.last_burst_bytes = std::mem::take(&mut self.burst_bytes);
        }
    }

    fn close_for_guest(&mut self) {
        self.due = Due::default();
        if self.to_host.is_empty() {
            self.phase = Phase::Over;
        } else {
            self.phase = Phase::Lingering;
            self.wait_for(LINGER_TIME);
        }
    }
}

fn usize_of(len_bytes: u32) -> usize {
    usize::try_from(len_bytes).unwrap_or(usize::MAX)
}

/// Whether the reader of a stream has gone.
fn is_of_the_reader(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

/// Whether fewer buffers may be read into where several were not.
fn is_of_the_buffers(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::ENOMEM | libc::ENOBUFS))
}

/// Whether a stream that fails in this way has ended for its other side too.
fn is_end(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionReset
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
