// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a socket device: its three queues and all streams of the host.
//!
//! Owns which queue is served when, and the guest's receive buffers while a packet is put into them. The guest's packets
//! are taken only while there is room for answers to them, so that a driver that sends and never receives is not answered
//! forever.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use memory::GuestMemory;
use virtio_queue::QueueState;
use vmm_sys_util::timerfd::TimerFd;

use super::connection::{Filled, Room};
use super::muxer::{Muxer, Outgoing};
use super::packet::{DATA_BYTES_MAX, HEADER_BYTES, Header};
use crate::virtio::buffers::HostRanges;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const RECEIVE_TOKEN: u64 = 0;
const TRANSMIT_TOKEN: u64 = 1;
const EVENT_TOKEN: u64 = 2;
const STREAMS_TOKEN: u64 = 3;
const TIMER_TOKEN: u64 = 4;
/// Maximum number of packets of one direction before other events.
const BUDGET: u32 = 256;
/// Ranges of buffers that are taken for one read.
const TAKEN_RANGES_MAX: usize = 128;
/// Ranges that a read into several buffers mostly has: those of Linux have almost 4 KiB each.
const RANGES_EXPECTED: usize = 20;
/// Maximum number of turns of both directions before other events.
const ROUNDS_MAX: u32 = 2;
/// The event that all connections are closed (`VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`).
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// Serves the queues of a vsock device.
pub(crate) struct VsockWorker {
    receive: WorkQueue,
    transmit: WorkQueue,
    event: WorkQueue,
    muxer: Muxer,
    reset_is_due: bool,
    /// Whether packets of the guest wait, without a notification by it, for room for their answers.
    is_transmit_held: bool,
    timer: TimerFd,
    /// What the timer is set to.
    armed: Option<Instant>,
    /// Data of a packet of the guest.
    data: Vec<u8>,
    /// Buffers taken from the receive queue, in its order; none between two events.
    taken: VecDeque<Chain>,
    /// Buffers that a packet was put into, with the bytes in each.
    used: Vec<(u16, u64)>,
}

/// The receive queue while data are read into its buffers.
struct ReceiveRoom<'a> {
    queue: &'a mut WorkQueue,
    memory: &'a GuestMemory,
    taken: &'a mut VecDeque<Chain>,
    /// A rule that the driver has broken with a buffer.
    broken: Option<Broken>,
    /// Why the last read has failed.
    failure: Option<io::Error>,
}

impl VsockWorker {
    pub(crate) fn new(
        receive: WorkQueue,
        transmit: WorkQueue,
        event: WorkQueue,
        muxer: Muxer,
        reset_is_due: bool,
    ) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(io::Error::from)?;
        let data = vec![0; DATA_BYTES_MAX];
        Ok(Self {
            receive,
            transmit,
            event,
            muxer,
            reset_is_due,
            is_transmit_held: false,
            timer,
            armed: None,
            data,
            taken: VecDeque::new(),
            used: Vec::new(),
        })
    }

    /// Handles packets of the guest while there is space for answers.
    fn transmit(&mut self) -> Result<(), Broken> {
        let memory = self.transmit.memory();
        let mut budget = BUDGET;
        self.is_transmit_held = false;
        loop {
            self.transmit.suppress_kicks(&memory)?;
            while self.muxer.has_room_for_answers() {
                let Some(mut chain) = self.transmit.pop(&memory)? else { break };
                self.take_packet(&memory, &mut chain)?;
                self.transmit.add_used(&memory, chain.head, 0)?;
                budget -= 1;
                if budget == 0 {
                    self.transmit.kick_self();
                    return self.transmit.notify(&memory);
                }
            }
            self.transmit.notify(&memory)?;
            if !self.muxer.has_room_for_answers() {
                // This continues when the guest has taken answers.
                self.is_transmit_held = true;
                return Ok(());
            }
            if !self.transmit.allow_kicks(&memory)? {
                return Ok(());
            }
        }
    }

    fn take_packet(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<(), Broken> {
        let head = chain.head;
        let not_ram = |queue: &WorkQueue| queue.bad_chain(head, NOT_RAM);
        let header = chain.readable.split_front(HEADER_BYTES as u64);
        let header =
            header.ok_or_else(|| self.transmit.bad_chain(head, "is too short for a header"))?;
        let mut bytes = [0; HEADER_BYTES];
        header.copy_out(memory, &mut bytes).map_err(|_| not_ram(&self.transmit))?;
        let header = Header::parse(&bytes);
        let data = chain.readable.split_front(header.len_bytes.into());
        let room = self.data.get_mut(..usize::try_from(header.len_bytes).unwrap_or(usize::MAX));
        // If its data are missing, the packet is not one of its connection.
        let data = match (data, room) {
            (Some(data), Some(room)) => {
                data.copy_out(memory, room).map_err(|_| not_ram(&self.transmit))?;
                Some(&*room)
            }
            _ => None,
        };
        self.muxer.take_packet(&header, data);
        Ok(())
    }

    /// Sends packets to the guest while there are both packets and buffers.
    fn receive(&mut self) -> Result<(), Broken> {
        let memory = self.receive.memory();
        self.receive.suppress_kicks(&memory)?;
        let sent = self.send_packets(&memory);
        // Other events may have to do with buffers that were not used, such as a mapping of the IOMMU that the driver
        // removes.
        for _ in self.taken.drain(..) {
            self.receive.undo_pop();
        }
        sent?;
        self.receive.notify(&memory)
    }

    fn send_packets(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        if !self.muxer.has_packets() {
            // The buffers stay for later; further ones need no notification.
            return self.receive.check_available(memory);
        }
        let mut budget = BUDGET;
        while self.muxer.has_packets() {
            if budget == 0 {
                self.receive.kick_self();
                break;
            }
            let Self { receive: queue, taken, .. } = self;
            let mut room = ReceiveRoom { queue, memory, taken, broken: None, failure: None };
            if room.taken.is_empty() && !room.take_buffer()? {
                if !self.receive.allow_kicks(memory)? {
                    break;
                }
                self.receive.suppress_kicks(memory)?;
                budget -= 1;
                continue;
            }
            let packet = self.muxer.next_packet(&mut room);
            let ReceiveRoom { broken, failure, .. } = room;
            if let Some(broken) = broken {
                return Err(broken);
            }
            if let Some(error) = failure {
                self.muxer.complain(&error);
            }
            let Some(packet) = packet else { break };
            budget = budget.saturating_sub(self.give(memory, &packet)?);
        }
        Ok(())
    }

    /// Gives the guest a packet, whose data are in the first buffers taken; returns the number of these.
    fn give(&mut self, memory: &GuestMemory, packet: &Outgoing) -> Result<u32, Broken> {
        let mut left_bytes = packet.len_bytes as u64;
        self.used.clear();
        while let Some(chain) = self.taken.pop_front() {
            let data_bytes = left_bytes.min(data_room_bytes(&chain) as u64);
            left_bytes -= data_bytes;
            let len_bytes = HEADER_BYTES as u64 + data_bytes;
            let data_bytes = u32::try_from(data_bytes).unwrap_or(0);
            let header = Header { len_bytes: data_bytes, ..packet.header };
            chain
                .writable
                .copy_in(memory, &header.to_bytes())
                .map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))?;
            chain.writable.mark_written(memory, len_bytes);
            self.used.push((chain.head, len_bytes));
            if left_bytes == 0 {
                break;
            }
        }
        self.receive.add_used_together(memory, &self.used)?;
        let count = u32::try_from(self.used.len()).unwrap_or(u32::MAX);
        self.muxer.count_given(count, packet.len_bytes as u64);
        Ok(count)
    }

    /// Tells the guest that its connections are gone, once it has a buffer for that.
    fn send_reset(&mut self) -> Result<(), Broken> {
        let memory = self.event.memory();
        while self.reset_is_due {
            if let Some(chain) = self.event.pop(&memory)? {
                let written = chain
                    .writable
                    .copy_in(&memory, &TRANSPORT_RESET)
                    .map_err(|_| self.event.bad_chain(chain.head, NOT_RAM))?;
                if written < TRANSPORT_RESET.len() {
                    return Err(self.event.bad_chain(chain.head, "is too short for an event"));
                }
                self.event.add_used(&memory, chain.head, TRANSPORT_RESET.len() as u64)?;
                self.event.notify(&memory)?;
                self.reset_is_due = false;
            } else if !self.event.allow_kicks(&memory)? {
                break;
            }
        }
        Ok(())
    }

    /// Serves both directions until neither can continue.
    fn serve(&mut self) -> Result<(), Broken> {
        for _ in 0..ROUNDS_MAX {
            self.receive()?;
            if !self.is_transmit_held || !self.muxer.has_room_for_answers() {
                return self.arm();
            }
            self.transmit()?;
        }
        // The answers are sent, and what is still held is taken, after other events.
        self.transmit.kick_self();
        self.arm()
    }

    /// Sets the timer to the first time limit of a connection.
    fn arm(&mut self) -> Result<(), Broken> {
        let deadline = self.muxer.first_deadline();
        if self.armed == deadline {
            return Ok(());
        }
        let armed = match deadline {
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                // Zero would disarm it.
                self.timer.reset(left.max(std::time::Duration::from_millis(1)), None)
            }
            None => self.timer.clear(),
        };
        self.armed = deadline;
        armed.map_err(|error| {
            log::error!("cannot set the timer of a socket device: {error}");
            Broken::Device("the host refused to set a timer")
        })
    }
}

impl ReceiveRoom<'_> {
    /// Takes another buffer from the ring; returns whether there is one.
    fn take_buffer(&mut self) -> Result<bool, Broken> {
        let Some(chain) = self.queue.pop_buffer(self.memory)? else { return Ok(false) };
        if data_room_bytes(&chain) == 0 {
            return Err(self.queue.bad_chain(chain.head, "is too short for a packet"));
        }
        self.taken.push_back(chain);
        Ok(true)
    }

    /// Where data go: into the first buffer, and into further ones, which are taken as needed, until there is room for
    /// `wanted_bytes`.
    fn ranges(
        &mut self,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> Result<HostRanges<&GuestMemory>, Broken> {
        let mut ranges = HostRanges::with_capacity(
            self.memory,
            if wanted_bytes > 1 { RANGES_EXPECTED } else { 1 },
        );
        let (mut room_bytes, mut ranges_count) = (0_usize, 0_usize);
        // A driver may add buffers as fast as they are taken.
        for index in 0..usize::from(self.queue.size()) {
            if index >= self.taken.len() && !self.take_buffer()? {
                break;
            }
            let Some(chain) = self.taken.get(index) else { break };
            let count = chain.writable.iter().count().saturating_add(chain.readable.iter().count());
            ranges_count = ranges_count.saturating_add(count);
            if index > 0 && ranges_count > TAKEN_RANGES_MAX {
                break;
            }
            let limit = data_room_bytes(chain).min(limit_bytes.saturating_sub(room_bytes));
            let pushed = ranges.push(&chain.writable, HEADER_BYTES as u64, limit);
            let pushed = pushed.map_err(|_| self.queue.bad_chain(chain.head, NOT_RAM))?;
            room_bytes = room_bytes.saturating_add(pushed);
            if room_bytes >= wanted_bytes.min(limit_bytes) {
                break;
            }
        }
        Ok(ranges)
    }
}

impl Room for ReceiveRoom<'_> {
    fn read(
        &mut self,
        stream: &UnixStream,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> io::Result<Filled> {
        let ranges = match self.ranges(wanted_bytes, limit_bytes) {
            Ok(ranges) => ranges,
            Err(broken) => {
                self.broken = Some(broken);
                return Err(io::ErrorKind::Other.into());
            }
        };
        let room_bytes = ranges.len_bytes();
        let read = ranges.read(stream);
        self.failure = read.as_ref().err().and_then(failure_of);
        let len_bytes = read?;
        Ok(Filled { len_bytes, is_full: len_bytes == room_bytes })
    }
}

/// An error that is neither the client's end nor a reason to try again later.
fn failure_of(error: &io::Error) -> Option<io::Error> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionReset => {
            None
        }
        _ => error.raw_os_error().map(io::Error::from_raw_os_error),
    }
}

/// Data of a packet that a receive buffer has room for, behind the header.
fn data_room_bytes(chain: &Chain) -> usize {
    let room_bytes = chain.writable.len_bytes().saturating_sub(HEADER_BYTES as u64);
    usize::try_from(room_bytes).unwrap_or(usize::MAX).min(DATA_BYTES_MAX)
}

impl Work for VsockWorker {
    fn kind(&self) -> &'static str {
        "device-vsock"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        // Not read, which would be a system call for each: what they announce is in the rings.
        watch.on_signal(RECEIVE_TOKEN, self.receive.kick().as_raw_fd())?;
        watch.on_signal(TRANSMIT_TOKEN, self.transmit.kick().as_raw_fd())?;
        watch.on_signal(EVENT_TOKEN, self.event.kick().as_raw_fd())?;
        watch.on(STREAMS_TOKEN, self.muxer.poll_fd())?;
        watch.on(TIMER_TOKEN, self.timer.as_raw_fd())?;
        self.send_reset()?;
        self.muxer.start();
        self.transmit()?;
        self.serve()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        match token {
            RECEIVE_TOKEN => {}
            TRANSMIT_TOKEN => self.transmit()?,
            EVENT_TOKEN => return self.send_reset(),
            STREAMS_TOKEN => self.muxer.serve_streams(),
            _ => {
                // It has expired, or was set again meanwhile: overdue connections are checked in any case.
                let _ = self.timer.clear();
                self.armed = None;
                self.muxer.end_overdue(Instant::now());
            }
        }
        self.serve()
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.muxer.stop();
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.receive.state(), self.transmit.state(), self.event.state()]
    }

    fn report_broken(&self) {
        self.receive.interrupt().needs_reset();
    }

    /// Closes all connections, and whatever clients connect later.
    fn start_broken(&mut self, watch: &mut Watch) {
        self.muxer.refuse_all();
        watch.on_if_possible(STREAMS_TOKEN, self.muxer.poll_fd());
        watch.on_if_possible(TIMER_TOKEN, self.timer.as_raw_fd());
        // The log has a line.
        let _ = self.arm();
    }

    fn ready_broken(&mut self, token: u64, _watch: &mut Watch) {
        match token {
            STREAMS_TOKEN => self.muxer.serve_streams(),
            TIMER_TOKEN => {
                // It has expired, or was set again meanwhile.
                let _ = self.timer.clear();
                self.armed = None;
                self.muxer.end_overdue(Instant::now());
            }
            // Taken from epoll before the queue broke.
            _ => return,
        }
        // The log has a line.
        let _ = self.arm();
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
