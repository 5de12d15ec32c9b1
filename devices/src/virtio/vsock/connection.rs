// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One connection between a port of the guest and a stream of the host.
//!
//! Owns its state, what the guest has sent and the host has not taken yet, and the credit of both
//! directions (virtio 1.3, 5.10.6.3). Data for the guest are read when it has provided buffers for them, and credit,
//! straight into these: of a client that writes much into several at once. Must never wait for the host.
//!
//! ```text
//!   host's client > Requested -- RESPONSE --> Open -- both of one side's ends --> RST is sent
//!   guest's REQUEST > Open --------------------^                                    |
//!                                    what the host has not taken > Lingering, else the end
//! ```

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::num::Wrapping;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;

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
    credit: bool,
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
    /// Data from the guest that the host has not read yet, and their maximum, which the guest has as its credit.
    to_host: VecDeque<u8>,
    buffer_bytes: u32,
    /// Whether the last data filled all of their room.
    is_flowing: bool,
    /// Bytes consumed by the host, and the count last reported to the guest.
    fwd_cnt: Wrapping<u32>,
    fwd_cnt_told: Wrapping<u32>,
    /// Bytes sent to the guest, and the guest's reported buffer space.
    sent_cnt: Wrapping<u32>,
    peer_fwd_cnt: Wrapping<u32>,
    peer_buf_alloc: u32,
    /// Whether credit was requested and not granted since.
    has_asked: bool,
    guest_receives: bool,
    guest_sends: bool,
    host_receives: bool,
    host_sends: bool,
    /// Flags of the last SHUTDOWN sent to the guest.
    shutdown_told: u32,
    /// Whether the host's stream may have data, or has ended.
    is_readable: bool,
    /// Whether the stream has ended in both directions; remaining data can be read.
    has_hung_up: bool,
    deadline: Option<(Duration, Instant)>,
}

impl Connection {
    fn new(stream: UnixStream, phase: Phase, buffer_bytes: u32) -> Self {
        Self {
            stream,
            phase,
            due: Due::default(),
            to_host: VecDeque::new(),
            buffer_bytes,
            is_flowing: false,
            fwd_cnt: Wrapping(0),
            fwd_cnt_told: Wrapping(0),
            sent_cnt: Wrapping(0),
            peer_fwd_cnt: Wrapping(0),
            peer_buf_alloc: 0,
            has_asked: false,
            guest_receives: true,
            guest_sends: true,
            host_receives: true,
            host_sends: true,
            shutdown_told: 0,
            is_readable: false,
            has_hung_up: false,
            deadline: None,
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
        connection.take_credit(request);
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

    /// When its time limit passes.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.map(|(_, deadline)| deadline)
    }

    fn wait_for(&mut self, time: Duration) {
        self.deadline = Some((time, Instant::now() + time));
    }

    /// Restarts the time limit, after time in which neither side could act.
    pub(super) fn restart_time_limit(&mut self) {
        if let Some((time, _)) = self.deadline {
            self.wait_for(time);
        }
    }

    /// Ends the connection after its time limit.
    pub(super) fn end_overdue(&mut self) {
        if self.phase == Phase::Lingering { self.phase = Phase::Over } else { self.fail() }
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
        // Fails only if the client has gone.
        let _ = self.stream.shutdown(Shutdown::Both);
        if self.due.request {
            self.due = Due::default();
            self.phase = Phase::Over;
        } else {
            self.due = Due { rst: true, ..Due::default() };
        }
    }

    fn take_credit(&mut self, header: &Header) {
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_fwd_cnt = Wrapping(header.fwd_cnt);
        // A guest without space reports it when its program reads, and would answer each request until
        // then.
        self.has_asked &= self.credit_bytes() == 0;
    }

    /// The guest's free buffer space; zero if it claims to have consumed more than was sent.
    fn credit_bytes(&self) -> u32 {
        let Wrapping(in_flight) = self.sent_cnt - self.peer_fwd_cnt;
        self.peer_buf_alloc.saturating_sub(in_flight)
    }

    /// Handles a packet of the guest, except RST; `host_port` is reported to the client.
    pub(super) fn take_packet(&mut self, header: &Header, data: Option<&[u8]>, host_port: u32) {
        if self.due.rst {
            return;
        }
        self.take_credit(header);
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

    fn send(&mut self, data: &[u8]) {
        let held_bytes = u32::try_from(self.to_host.len()).unwrap_or(u32::MAX);
        let free_bytes = self.buffer_bytes.saturating_sub(held_bytes);
        if u32::try_from(data.len()).map_or(true, |len_bytes| len_bytes > free_bytes) {
            return self.fail();
        }
        let mut rest = data;
        if self.to_host.is_empty() && self.host_receives {
            // What fails here is tried again below, and understood there.
            let written = self.stream.write(data).unwrap_or(0);
            rest = data.get(written..).unwrap_or_default();
            self.forwarded(written);
        }
        self.to_host.extend(rest);
        self.flush();
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
                Err(_) => self.host_receives = false,
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

    fn forwarded(&mut self, len_bytes: usize) {
        self.to_host.drain(..len_bytes.min(self.to_host.len()));
        if self.phase == Phase::Lingering {
            self.wait_for(LINGER_TIME);
        }
        self.fwd_cnt += Wrapping(u32::try_from(len_bytes).unwrap_or(0));
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
            self.is_readable = true;
        }
        if events.intersects(EventSet::OUT | EventSet::HANG_UP | EventSet::ERROR) {
            self.flush();
        }
    }

    /// The events to poll the stream for; `None` to stop polling. They come once, and are remembered here: to poll for
    /// some and no longer would be two system calls for each message.
    pub(super) fn interest(&self) -> Option<EventSet> {
        if self.has_hung_up || self.is_over() {
            return None;
        }
        let mut events = EventSet::EDGE_TRIGGERED;
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
        let Wrapping(untold) = self.fwd_cnt - self.fwd_cnt_told;
        // Linux has no more on its way than its own buffer holds, and does not ask.
        let most_bytes = self.buffer_bytes.min(self.peer_buf_alloc);
        self.due.credit || self.phase == Phase::Open && untold >= (most_bytes / 4).max(1)
    }

    /// Whether [`Self::next_packet`] may return a packet.
    pub(super) fn has_packets(&self) -> bool {
        let Due { request, response, rst, credit: _ } = self.due;
        let reads = self.may_read() && self.is_readable;
        request
            || response
            || rst
            || reads && (self.credit_bytes() > 0 || !self.has_asked)
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
        self.due.credit = false;
        self.fwd_cnt_told = self.fwd_cnt;
        let (buf_alloc, fwd_cnt) = (self.buffer_bytes, self.fwd_cnt.0);
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
            if self.credit_bytes() > 0 {
                if let Some(len_bytes) = self.read(room, share_bytes) {
                    return Some((op::RW, 0, len_bytes));
                }
                // Reading may have failed at the guest's memory, and nothing else may come that leads here again.
                if let Some(reset) = self.take_reset() {
                    return Some(reset);
                }
            } else if !std::mem::replace(&mut self.has_asked, true) {
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
        let credit_bytes = usize::try_from(self.credit_bytes()).unwrap_or(usize::MAX);
        // Buffers that are taken for a client that writes little only have to be given back.
        let mut wanted_bytes = if self.is_flowing { share_bytes } else { 1 };
        loop {
            match room.read(&self.stream, wanted_bytes, credit_bytes) {
                Ok(Filled { len_bytes, is_full }) if len_bytes > 0 => {
                    self.is_flowing = is_full;
                    self.sent_cnt += Wrapping(u32::try_from(len_bytes).unwrap_or(0));
                    return Some(len_bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_readable = false;
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
