// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of one queue pair of a network device.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use log::debug;
use memory::GuestMemory;
use virtio_bindings::virtio_net as abi;
use virtio_queue::QueueState;

use super::config::Link;
use super::counters::NetCounters;
use super::tap::{HEADER_BYTES, Tap};
use crate::virtio::buffers::HostRanges;
use crate::virtio::limiter::Throttle;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const RECEIVE_TOKEN: u64 = 0;
const TRANSMIT_TOKEN: u64 = 1;
const TAP_TOKEN: u64 = 2;
const RECEIVE_LIMIT_TOKEN: u64 = 3;
const TRANSMIT_LIMIT_TOKEN: u64 = 4;
/// Maximum number of frames handled before other events.
const BUDGET: u32 = 256;
/// Maximum length of a tap's frame: 64 KiB of IP with Ethernet and VLAN headers.
const FRAME_BYTES_MAX: usize = HEADER_BYTES + 14 + 4 + 65_535;
/// Frames in one buffer each after which buffers are taken one by one.
const SMALL_FRAMES_MAX: u8 = 16;
/// Ranges of buffers that are taken for one frame.
const TAKEN_RANGES_MAX: usize = 128;
/// Offset in the header of the flags, which are one byte.
const FLAGS_OFFSET: usize = 0;
/// Offset in the header of the number of buffers of a frame.
const NUM_BUFFERS_OFFSET: usize = 10;

/// Serves a queue pair.
pub(crate) struct NetWorker {
    receive: WorkQueue,
    transmit: WorkQueue,
    pair: u16,
    link: Arc<Link>,
    counters: Arc<NetCounters>,
    /// Whether the driver accepts a frame in several buffers.
    mergeable: bool,
    /// Whether the driver knows the flags about checksums, which are zero otherwise (virtio 1.3, 5.1.6.4.1).
    knows_flags: bool,
    /// Only while running: paused, the tap may be taken over by another process.
    tap: Option<Arc<Tap>>,
    /// Buffers taken from the ring for frames, in its order; none between two events.
    taken: VecDeque<Chain>,
    /// Frames since the last one that needed several buffers.
    small_frames: u8,
    /// Receives what does not fit into the buffers taken.
    tail: Box<[u8]>,
    /// A frame that waits for buffers.
    waiting: Option<Vec<u8>>,
    limits: PairLimits,
}

/// Limits of a queue pair, one for each direction.
#[derive(Default)]
pub(super) struct PairLimits {
    pub(super) receive: Option<Throttle>,
    pub(super) transmit: Option<Throttle>,
}

/// Why receiving has stopped for now.
enum Pause {
    /// Until the driver adds buffers.
    NoBuffers,
    /// Until the driver adds more buffers than these.
    FewBuffers(u16),
    /// Until the tap has a frame.
    NoFrame,
    /// Until the tap works again; checked at the next notification.
    NoTap,
    /// Until other events have been handled.
    Budget,
    /// Until the limit lets another frame pass.
    Limit,
}

/// Result of delivering a frame.
enum Delivery {
    /// It was delivered or dropped.
    Finished,
    /// It waits for more than this number of buffers.
    Waiting(u16),
}

impl NetWorker {
    pub(crate) fn new(
        receive: WorkQueue,
        transmit: WorkQueue,
        pair: u16,
        link: Arc<Link>,
        counters: Arc<NetCounters>,
        features: u64,
    ) -> Self {
        let has = |feature: u32| features & 1 << feature != 0;
        Self {
            receive,
            transmit,
            pair,
            link,
            counters,
            mergeable: has(abi::VIRTIO_NET_F_MRG_RXBUF),
            knows_flags: has(abi::VIRTIO_NET_F_GUEST_CSUM),
            tap: None,
            taken: VecDeque::new(),
            small_frames: SMALL_FRAMES_MAX,
            tail: vec![0; FRAME_BYTES_MAX].into_boxed_slice(),
            waiting: None,
            limits: PairLimits::default(),
        }
    }

    /// With these limits.
    pub(super) fn limited(mut self, limits: PairLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Sends the available frames.
    fn transmit(&mut self) -> Result<(), Broken> {
        let Self { transmit, tap, counters, limits, .. } = self;
        transmit.serve_while(BUDGET, |memory, chain| {
            if let Some(limit) = &mut limits.transmit
                && !limit.passes(frame_bytes(chain.readable.len_bytes()))
            {
                return Ok(None);
            }
            send(tap.as_deref(), counters, memory, chain);
            Ok(Some((0, 1)))
        })
    }

    /// Receives while there are both frames and buffers.
    fn receive(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        let memory = self.receive.memory();
        loop {
            self.receive.suppress_kicks(&memory)?;
            let stopped = self.receive_frames(&memory);
            self.receive.notify(&memory)?;
            match stopped? {
                Pause::NoBuffers => {
                    watch.off(TAP_TOKEN);
                    if !self.receive.allow_kicks(&memory)? {
                        return Ok(());
                    }
                }
                Pause::FewBuffers(count) => {
                    watch.off(TAP_TOKEN);
                    if !self.receive.allow_kicks_beyond(&memory, count)? {
                        return Ok(());
                    }
                }
                Pause::NoTap => {
                    watch.off(TAP_TOKEN);
                    // A buffer that arrives in this race is used at the next notification.
                    self.receive.allow_kicks(&memory)?;
                    return Ok(());
                }
                Pause::Limit => {
                    watch.off(TAP_TOKEN);
                    return Ok(());
                }
                Pause::NoFrame | Pause::Budget => {
                    // The tap is readable at once if there are more.
                    if let Some(tap) = &self.tap {
                        watch.on(TAP_TOKEN, tap.file().as_raw_fd())?;
                    }
                    return Ok(());
                }
            }
        }
    }

    /// The next receive buffer. One with a readable part is refused: a frame may keep all buffers of the ring,
    /// and only their writable parts are bounded by its length.
    fn pop_buffer(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, Broken> {
        let chain = self.receive.pop_buffer(memory)?;
        match chain {
            Some(chain) if chain.readable.len_bytes() > 0 => {
                Err(self.receive.bad_chain(chain.head, "is a receive buffer with a readable part"))
            }
            chain => Ok(chain),
        }
    }

    /// Receives until something is lacking. Buffers that are taken and not used are returned to the ring before this returns: other
    /// events may have to do with them, such as a mapping of the IOMMU that the driver removes.
    fn receive_frames(&mut self, memory: &GuestMemory) -> Result<Pause, Broken> {
        let result = self.receive_into_taken(memory);
        self.return_taken();
        result
    }

    fn return_taken(&mut self) {
        for _ in self.taken.drain(..) {
            self.receive.undo_pop();
        }
    }

    fn receive_into_taken(&mut self, memory: &GuestMemory) -> Result<Pause, Broken> {
        let Some(tap) = self.tap.clone() else { return Ok(Pause::NoTap) };
        for _ in 0..BUDGET {
            if !self.take_buffers(memory, self.wanted_bytes())? {
                return Ok(Pause::NoBuffers);
            }
            if let Some(chain) = self.taken.front()
                && chain.writable.len_bytes() < HEADER_BYTES as u64
            {
                return Err(self.receive.bad_chain(chain.head, "has no room for a frame"));
            }
            if let Some(frame) = self.waiting.take() {
                if self.pair >= self.link.state().active_pairs {
                    // The driver has put the pair out of use meanwhile (virtio 1.3, 5.1.6.5.6.2).
                    self.counters.dropped.add(1);
                    continue;
                }
                if let Delivery::Waiting(count) = self.deliver(memory, frame)? {
                    return Ok(Pause::FewBuffers(count));
                }
                continue;
            }
            if self.limits.receive.as_mut().is_some_and(|limit| !limit.may_begin()) {
                return Ok(Pause::Limit);
            }
            let (read, room_bytes) = self.read_frame(&tap, memory)?;
            let len_bytes = match read {
                Ok(len_bytes) if len_bytes >= HEADER_BYTES => len_bytes,
                Ok(_) => {
                    self.counters.dropped.add(1);
                    continue;
                }
                Err(error) => {
                    if error.kind() == io::ErrorKind::WouldBlock {
                        return Ok(Pause::NoFrame);
                    }
                    debug!("tap {} gives no frames: {error}", tap.name());
                    return Ok(Pause::NoTap);
                }
            };
            if let Some(limit) = &self.limits.receive {
                limit.charge(frame_bytes(len_bytes as u64));
            }
            if let Delivery::Waiting(count) = self.received(memory, room_bytes, len_bytes)? {
                return Ok(Pause::FewBuffers(count));
            }
        }
        Ok(Pause::Budget)
    }

    /// Room for which buffers are taken before a frame is read: one buffer, or enough for any frame while the frames need
    /// several. What does not fit has to be copied twice.
    fn wanted_bytes(&self) -> usize {
        if self.mergeable && self.small_frames < SMALL_FRAMES_MAX { FRAME_BYTES_MAX } else { 1 }
    }

    /// Takes buffers until there is this much room in them, or no more; false if there is none at all.
    fn take_buffers(&mut self, memory: &GuestMemory, wanted_bytes: usize) -> Result<bool, Broken> {
        let mut room_bytes = self.taken_bytes();
        let mut ranges_count: usize = self.taken.iter().map(|it| it.writable.iter().count()).sum();
        // Buffers may have no room at all, and a driver may add them as fast as they are taken.
        while room_bytes < wanted_bytes as u64
            && self.taken.len() < usize::from(self.receive.size())
        {
            let Some(chain) = self.pop_buffer(memory)? else { break };
            ranges_count = ranges_count.saturating_add(chain.writable.iter().count());
            if ranges_count > TAKEN_RANGES_MAX && !self.taken.is_empty() {
                // A call takes only so many, and a single buffer may have as many.
                self.receive.undo_pop();
                break;
            }
            room_bytes = room_bytes.saturating_add(chain.writable.len_bytes());
            self.taken.push_back(chain);
        }
        Ok(!self.taken.is_empty())
    }

    fn taken_bytes(&self) -> u64 {
        self.taken.iter().map(|chain| chain.writable.len_bytes()).fold(0, u64::saturating_add)
    }

    /// The buffers that a frame may have: all that were taken, or the first one of a driver that does not accept several.
    fn for_a_frame(&self) -> impl Iterator<Item = &Chain> {
        self.taken.iter().take(if self.mergeable { usize::MAX } else { 1 })
    }

    /// Reads a frame into the buffers taken, and the rest into the tail. Returns the room in the buffers as well.
    fn read_frame(
        &mut self,
        tap: &Tap,
        memory: &GuestMemory,
    ) -> Result<(io::Result<usize>, usize), Broken> {
        let mut ranges = HostRanges::with_capacity(memory, self.taken.len() + 1);
        let mut room_bytes = 0_usize;
        for chain in self.for_a_frame() {
            let pushed = ranges.push(&chain.writable, 0, usize::MAX);
            let pushed = pushed.map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))?;
            room_bytes = room_bytes.saturating_add(pushed);
        }
        // SAFETY: the tail is not moved, freed or otherwise used before `ranges` is dropped at the
        // end of this function.
        unsafe { ranges.push_own(self.tail.as_mut_ptr(), self.tail.len()) };
        Ok((ranges.read(tap.file()), room_bytes))
    }

    /// Completes a frame that was read into the buffers taken and possibly the tail.
    fn received(
        &mut self,
        memory: &GuestMemory,
        room_bytes: usize,
        len_bytes: usize,
    ) -> Result<Delivery, Broken> {
        let mut left_bytes = len_bytes.min(room_bytes) as u64;
        for chain in self.for_a_frame() {
            let bytes = left_bytes.min(chain.writable.len_bytes());
            chain.writable.mark_written(memory, bytes);
            left_bytes -= bytes;
            if left_bytes == 0 {
                break;
            }
        }
        if len_bytes <= room_bytes {
            let used = self.filled(len_bytes);
            let count = u16::try_from(used.len()).unwrap_or(u16::MAX).to_le_bytes();
            // The whole header is in the first one.
            if let Some(chain) = self.taken.front() {
                let set = |at: usize, to: &[u8]| {
                    let copied = chain.writable.copy_in_at(memory, at as u64, to);
                    copied.map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))
                };
                set(NUM_BUFFERS_OFFSET, &count)?;
                if !self.knows_flags {
                    set(FLAGS_OFFSET, &[0])?;
                }
            }
            self.finish(memory, &used, len_bytes)?;
            return Ok(Delivery::Finished);
        }
        if !self.mergeable {
            self.counters.dropped.add(1);
            return Ok(Delivery::Finished);
        }
        let mut frame = vec![0; room_bytes];
        let mut done = 0;
        for chain in &self.taken {
            let copied = chain.writable.copy_out(memory, frame.get_mut(done..).unwrap_or_default());
            done += copied.map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))?;
        }
        frame.extend_from_slice(self.tail.get(..len_bytes - room_bytes).unwrap_or_default());
        self.deliver(memory, frame)
    }

    /// The buffers that a frame of this length fills, with the bytes in each.
    fn filled(&self, len_bytes: usize) -> Vec<(u16, u64)> {
        let mut left_bytes = len_bytes as u64;
        let mut filled = Vec::with_capacity(1);
        for chain in &self.taken {
            let bytes = left_bytes.min(chain.writable.len_bytes());
            filled.push((chain.head, bytes));
            left_bytes = left_bytes.saturating_sub(bytes);
            if left_bytes == 0 {
                break;
            }
        }
        filled
    }

    /// Copies a frame to as many buffers as needed. If there are too few, the frame is kept.
    fn deliver(&mut self, memory: &GuestMemory, mut frame: Vec<u8>) -> Result<Delivery, Broken> {
        let mut room_bytes = self.taken_bytes();
        while room_bytes < frame.len() as u64 && self.taken.len() < usize::from(self.receive.size())
        {
            let Some(chain) = self.pop_buffer(memory)? else { break };
            room_bytes = room_bytes.saturating_add(chain.writable.len_bytes());
            self.taken.push_back(chain);
        }
        let count = self.taken.len();
        if room_bytes < frame.len() as u64 {
            if count >= usize::from(self.receive.size()) {
                // It can never fit. More of its buffers are taken than a call has ranges.
                self.counters.dropped.add(1);
                self.return_taken();
                return Ok(Delivery::Finished);
            }
            self.waiting = Some(frame);
            return Ok(Delivery::Waiting(u16::try_from(count).unwrap_or(u16::MAX)));
        }
        let used = self.filled(frame.len());
        let count = u16::try_from(used.len()).unwrap_or(u16::MAX).to_le_bytes();
        for (to, from) in frame.iter_mut().skip(NUM_BUFFERS_OFFSET).zip(count) {
            *to = from;
        }
        if let Some(flags) = frame.get_mut(FLAGS_OFFSET).filter(|_| !self.knows_flags) {
            *flags = 0;
        }
        let mut done = 0;
        for chain in self.taken.iter().take(used.len()) {
            let rest = frame.get(done..).unwrap_or_default();
            let copied = chain.writable.copy_in(memory, rest);
            done += copied.map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))?;
        }
        self.finish(memory, &used, frame.len())?;
        Ok(Delivery::Finished)
    }

    /// Gives the driver the first buffers taken, which have a frame.
    fn finish(
        &mut self,
        memory: &GuestMemory,
        used: &[(u16, u64)],
        len_bytes: usize,
    ) -> Result<(), Broken> {
        let is_small = used.len() <= 1;
        self.small_frames = if is_small { self.small_frames.saturating_add(1) } else { 0 };
        self.count_received(len_bytes);
        self.taken.drain(..used.len().min(self.taken.len()));
        match used {
            [(head, bytes)] => self.receive.add_used(memory, *head, *bytes),
            several => self.receive.add_used_together(memory, several),
        }
    }

    fn count_received(&self, len_bytes: usize) {
        self.counters.rx_bytes.add((len_bytes - HEADER_BYTES) as u64);
        self.counters.rx_frames.add(1);
    }
}

/// Bytes that the limit counts for a buffer of `len_bytes`, which is a frame behind a header. No frame is longer
/// than the longest, and what is longer is dropped.
fn frame_bytes(len_bytes: u64) -> u64 {
    len_bytes.min(FRAME_BYTES_MAX as u64).saturating_sub(HEADER_BYTES as u64)
}

/// Sends a frame or drops it; the contents are not validated.
fn send(tap: Option<&Tap>, counters: &NetCounters, memory: &GuestMemory, chain: &Chain) {
    let len_bytes = chain.readable.len_bytes();
    let sent = tap.is_some_and(|tap| {
        let in_range = len_bytes > HEADER_BYTES as u64 && len_bytes <= FRAME_BYTES_MAX as u64;
        let Ok(ranges) = chain.readable.host_ranges(memory) else { return false };
        in_range && ranges.write(tap.file()).is_ok()
    });
    if sent {
        counters.tx_bytes.add(len_bytes - HEADER_BYTES as u64);
        counters.tx_frames.add(1);
    } else {
        counters.dropped.add(1);
    }
}

impl Work for NetWorker {
    fn kind(&self) -> &'static str {
        "device-net"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        // One that has been in another process is opened before the device resumes: this thread may not open it.
        self.tap = self.link.tap.pair(self.pair);
        // A new tap may have the number of the old one, and must not be taken for watched.
        watch.off(TAP_TOKEN);
        // Not read, which would be a system call for each: what they announce is in the rings.
        watch.on_signal(RECEIVE_TOKEN, self.receive.kick().as_raw_fd())?;
        watch.on_signal(TRANSMIT_TOKEN, self.transmit.kick().as_raw_fd())?;
        let limits = [
            (RECEIVE_LIMIT_TOKEN, &self.limits.receive),
            (TRANSMIT_LIMIT_TOKEN, &self.limits.transmit),
        ];
        for (token, limit) in limits {
            if let Some(limit) = limit {
                watch.on_signal(token, limit.fd())?;
            }
        }
        self.transmit()?;
        self.receive(watch)
    }

    fn ready(&mut self, token: u64, watch: &mut Watch) -> Result<(), Broken> {
        match token {
            TRANSMIT_TOKEN | TRANSMIT_LIMIT_TOKEN => self.transmit(),
            _ => self.receive(watch),
        }
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.tap = None;
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.receive.state(), self.transmit.state()]
    }

    fn report_broken(&self) {
        self.receive.interrupt().needs_reset();
    }
}
