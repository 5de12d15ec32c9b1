// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a socket device: its three queues and all streams of the host.
//!
//! Owns which queue is served when. All that was ready together is handled first, then the guest's packets are taken, and
//! then it is given some: it is interrupted for both together. Its packets are taken only while there is room for answers
//! to them, so that a driver that sends and never receives is not answered forever.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd as _;
use std::time::Instant;

use memory::GuestMemory;
use virtio_queue::QueueState;
use vmm_sys_util::timerfd::TimerFd;

use super::muxer::{Muxer, Outgoing};
use super::notice::{HOLD_FOR, Notice, Turn};
use super::packet::{self, HEADER_BYTES, Header};
use super::receive::{Buffer, ReceiveRoom};
use super::transmit::{Outbox, Packet};
use crate::virtio::available::Available;
use crate::virtio::buffers::is_logged;
use crate::virtio::queue::{Broken, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const RECEIVE_TOKEN: u64 = 0;
const TRANSMIT_TOKEN: u64 = 1;
const EVENT_TOKEN: u64 = 2;
const TIMER_TOKEN: u64 = 3;
/// Maximum number of packets of one direction before other events.
const BUDGET: u32 = 256;
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
    /// Whether the driver has broken a rule.
    is_broken: bool,
    /// Whether the guest may have sent packets that were not looked at.
    is_transmit_due: bool,
    /// Whether packets of the guest wait, without a notification by it, for room for their answers.
    is_transmit_held: bool,
    notice: Notice,
    timer: TimerFd,
    /// When the timer expires.
    armed: Option<Instant>,
    /// Buffers that were used together, with the bytes put into each.
    used: Vec<(u16, u64)>,
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
        let notice = Notice::new(transmit.size());
        Ok(Self {
            receive,
            transmit,
            event,
            muxer,
            reset_is_due,
            is_broken: false,
            is_transmit_due: true,
            is_transmit_held: false,
            notice,
            timer,
            armed: None,
            used: Vec::new(),
        })
    }

    /// Handles packets of the guest while there is space for answers.
    fn transmit(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        let mut outbox = Outbox::new(memory);
        let mut available = self.transmit.available(memory);
        let taken = self.take_packets(&mut available, &mut outbox);
        // Those before a bad one are good.
        self.send(memory, &mut outbox)?;
        taken
    }

    fn take_packets<'a>(
        &mut self,
        available: &mut Available<'a>,
        outbox: &mut Outbox<'a>,
    ) -> Result<(), Broken> {
        let memory = available.memory();
        let mut budget = BUDGET;
        (self.is_transmit_due, self.is_transmit_held) = (false, false);
        loop {
            self.transmit.suppress_kicks(memory)?;
            while self.muxer.has_room_for_answers() {
                let Some(packet) = Packet::take(&mut self.transmit, available)? else { break };
                if !outbox.takes(&packet) {
                    self.send(memory, outbox)?;
                }
                let direct_bytes = |header: &Header| self.muxer.direct_bytes(header);
                if !outbox.add(packet, &self.transmit, direct_bytes)? {
                    self.send(memory, outbox)?;
                }
                budget -= 1;
                if budget == 0 {
                    self.transmit.kick_self();
                    return Ok(());
                }
            }
            self.send(memory, outbox)?;
            if !self.muxer.has_room_for_answers() {
                // This continues when the guest has taken answers.
                self.is_transmit_held = true;
                return Ok(());
            }
            if !self.transmit.allow_kicks(memory)? {
                return Ok(());
            }
        }
    }

    /// Hands packets of the guest over, and gives it its buffers back.
    fn send(&mut self, memory: &GuestMemory, outbox: &mut Outbox<'_>) -> Result<(), Broken> {
        let Some((header, count, data)) = outbox.contents() else { return Ok(()) };
        self.muxer.take_packets(count, &header, data);
        if let Some(error) = &outbox.failure {
            self.muxer.complain(error);
        }
        outbox.clear(&mut self.used);
        self.transmit.add_used_together(memory, &self.used)
    }

    /// Sends packets to the guest while there are both packets and buffers.
    fn receive(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        self.receive.suppress_kicks(memory)?;
        if !self.muxer.has_packets() {
            // The buffers stay for later; further ones need no notification.
            return self.receive.check_available(memory);
        }
        let mut taken = VecDeque::new();
        let given = self.give_packets(memory, &mut taken);
        // Other events may have to do with buffers that were not used, such as a mapping of the IOMMU that the driver
        // removes.
        for _ in &taken {
            self.receive.undo_pop();
        }
        given
    }

    fn give_packets<'m>(
        &mut self,
        memory: &'m GuestMemory,
        taken: &mut VecDeque<Buffer<'m>>,
    ) -> Result<(), Broken> {
        let mut available = self.receive.available(memory);
        let mut budget = BUDGET;
        while self.muxer.has_packets() {
            if budget == 0 {
                self.receive.kick_self();
                break;
            }
            let mut room = ReceiveRoom::new(&mut self.receive, &mut available, taken);
            if !room.has_buffer()? {
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
            budget = budget.saturating_sub(self.give(memory, taken, &packet)?);
        }
        Ok(())
    }

    /// Gives the guest a packet, whose data are in the first buffers taken; returns the number of these.
    fn give(
        &mut self,
        memory: &GuestMemory,
        taken: &mut VecDeque<Buffer<'_>>,
        packet: &Outgoing,
    ) -> Result<u32, Broken> {
        let mut left_bytes = packet.len_bytes;
        let mut header = packet.header.to_bytes();
        let is_logged = is_logged(memory);
        self.used.clear();
        while let Some(buffer) = taken.pop_front() {
            let data_bytes = left_bytes.min(buffer.room_bytes());
            left_bytes -= data_bytes;
            packet::set_len_bytes(&mut header, u32::try_from(data_bytes).unwrap_or(0));
            let finished = buffer.finish(memory, &header, data_bytes, is_logged);
            finished.map_err(|_| self.receive.bad_chain(buffer.head, NOT_RAM))?;
            self.used.push((buffer.head, (HEADER_BYTES + data_bytes) as u64));
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

    /// Serves both directions until neither can continue, and notifies the guest.
    fn serve(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        // Of all queues.
        let memory = self.transmit.memory();
        let untold_before = self.transmit.untold();
        for _ in 0..ROUNDS_MAX {
            if self.may_transmit() {
                self.transmit(&memory)?;
            }
            self.receive(&memory)?;
            if !self.may_transmit() {
                break;
            }
        }
        if self.may_transmit() {
            // The answers are given, and what is still held is taken, after other events.
            self.transmit.kick_self();
        }
        self.notify(&memory, untold_before, watch)?;
        self.arm()
    }

    /// Whether there may be packets of the guest that can be taken.
    fn may_transmit(&self) -> bool {
        self.is_transmit_due || self.is_transmit_held && self.muxer.has_room_for_answers()
    }

    /// Notifies the guest of what it was given, and of what was taken from it.
    fn notify(
        &mut self,
        memory: &GuestMemory,
        untold_before: u16,
        watch: &mut Watch,
    ) -> Result<(), Broken> {
        let untold = self.transmit.untold();
        let turn = Turn {
            untold,
            has_taken: untold != untold_before,
            has_given: self.receive.untold() > 0,
            has_timed_out: watch.has_timed_out(),
        };
        // First what its programs wait for.
        self.receive.notify(memory)?;
        if self.notice.is_due(turn) {
            return self.transmit.notify(memory);
        }
        watch.limit_wait(HOLD_FOR);
        Ok(())
    }

    /// Has the timer expire no later than at the first time limit of a connection. That it expires once more than needed
    /// costs less than to set it for each limit that comes and goes with a message.
    fn arm(&mut self) -> Result<(), Broken> {
        let Some(deadline) = self.muxer.first_deadline() else { return Ok(()) };
        if self.armed.is_some_and(|armed| armed <= deadline) {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero would disarm it.
        let set = self.timer.reset(left.max(std::time::Duration::from_millis(1)), None);
        self.armed = Some(deadline);
        set.map_err(|error| {
            log::error!("cannot set the timer of a socket device: {error}");
            Broken::Device("the host refused to set a timer")
        })
    }

    /// Handles the end of the timer.
    fn expire(&mut self) {
        self.armed = None;
        self.muxer.serve_overdue(Instant::now());
    }
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
        watch.on_signal(TIMER_TOKEN, self.timer.as_raw_fd())?;
        self.send_reset()?;
        self.muxer.start();
        self.is_transmit_due = true;
        self.serve(watch)
    }

    fn ready(&mut self, token: u64, watch: &mut Watch) -> Result<(), Broken> {
        match token {
            RECEIVE_TOKEN => {}
            TRANSMIT_TOKEN => self.is_transmit_due = true,
            EVENT_TOKEN => return self.send_reset(),
            TIMER_TOKEN => self.expire(),
            token => self.muxer.ready(token, watch.ready_for()),
        }
        Ok(())
    }

    fn settle(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        self.serve(watch)
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.muxer.stop();
        if self.is_broken {
            return Ok(());
        }
        let memory = self.transmit.memory();
        // A ring that cannot be read is found when it is served again: to break the device now would take the path again
        // that was just given back.
        let _ = self.transmit.notify(&memory);
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
        self.is_broken = true;
        self.muxer.refuse_all();
        watch.on_if_possible(TIMER_TOKEN, self.timer.as_raw_fd());
        self.armed = None;
        // The log has a line.
        let _ = self.arm();
    }

    fn ready_broken(&mut self, token: u64, watch: &mut Watch) {
        match token {
            // Taken from epoll before the queue broke.
            RECEIVE_TOKEN | TRANSMIT_TOKEN | EVENT_TOKEN => return,
            TIMER_TOKEN => {
                // It is polled for as long as it is expired.
                let _ = self.timer.clear();
                self.expire();
            }
            token => self.muxer.ready(token, watch.ready_for()),
        }
        // The log has a line.
        let _ = self.arm();
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
