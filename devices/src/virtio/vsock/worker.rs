// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a socket device: its three queues and all streams of the host.
//!
//! Owns which queue is served when. The guest's packets are taken only while there is room for answers
//! to them, so that a driver that sends and never receives is not answered forever.

use std::io;
use std::os::fd::AsRawFd as _;
use std::time::Instant;

use memory::GuestMemory;
use virtio_queue::QueueState;
use vmm_sys_util::timerfd::TimerFd;

use super::muxer::{Muxer, Outgoing};
use super::packet::{DATA_BYTES_MAX, HEADER_BYTES, Header};
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const RECEIVE_TOKEN: u64 = 0;
const TRANSMIT_TOKEN: u64 = 1;
const EVENT_TOKEN: u64 = 2;
const STREAMS_TOKEN: u64 = 3;
const TIMER_TOKEN: u64 = 4;
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
    /// Whether packets of the guest wait, without a notification by it, for room for their answers.
    is_transmit_held: bool,
    timer: TimerFd,
    /// What the timer is set to.
    armed: Option<Instant>,
    /// Buffer for the data of one packet.
    data: Vec<u8>,
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
        for _ in 0..BUDGET {
            let Some(mut chain) = self.receive.pop(&memory)? else {
                if self.receive.allow_kicks(&memory)? {
                    self.receive.suppress_kicks(&memory)?;
                    continue;
                }
                return self.receive.notify(&memory);
            };
            if !self.muxer.has_packets() {
                // The buffers stay for later; further ones need no notification.
                self.receive.undo_pop();
                return self.receive.notify(&memory);
            }
            let header_at = chain.writable.split_front(HEADER_BYTES as u64);
            let too_short = || self.receive.bad_chain(chain.head, "is too short for a packet");
            let header_at = header_at.ok_or_else(too_short)?;
            let room = usize::try_from(chain.writable.len_bytes()).unwrap_or(usize::MAX);
            let room = self.data.get_mut(..room.min(DATA_BYTES_MAX)).unwrap_or_default();
            if room.is_empty() {
                return Err(too_short());
            }
            let Some(Outgoing { header, len_bytes }) = self.muxer.next_packet(room) else {
                self.receive.undo_pop();
                return self.receive.notify(&memory);
            };
            let data = room.get(..len_bytes).unwrap_or_default();
            let written = header_at
                .copy_in(&memory, &header.to_bytes())
                .and_then(|_| chain.writable.copy_in(&memory, data))
                .map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))?;
            let written = written.saturating_add(HEADER_BYTES);
            self.receive.add_used(&memory, chain.head, u64::try_from(written).unwrap_or(0))?;
        }
        self.receive.kick_self();
        self.receive.notify(&memory)
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
