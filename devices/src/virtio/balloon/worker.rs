// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a balloon: all of its queues.
//!
//! Owns reading requests and answering them. Memory is discarded here, off the vCPUs. What a
//! request names is bounded, so that a pause does not wait long.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use memory::GuestMemory;
use virtio_queue::QueueState;
use vmm_sys_util::timerfd::TimerFd;

use super::pages::BalloonPages;
use super::queues::Queues;
use super::shared::Shared;
use super::statistics::STATISTICS_BYTES_MAX;
use super::{F_DEVICE_INIT_ON_INFLATE, F_MUST_TELL_HOST, PAGE_BYTES, hinting};
use crate::log_limited;
use crate::virtio::buffers::Segments;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const INFLATE_TOKEN: u64 = 0;
const DEFLATE_TOKEN: u64 = 1;
const STATISTICS_TOKEN: u64 = 2;
const HINTING_TOKEN: u64 = 3;
const REPORTING_TOKEN: u64 = 4;
const TIMER_TOKEN: u64 = 5;
const RETRY_TOKEN: u64 = 6;

/// Maximum number of chains handled before other events.
const BUDGET: u32 = 16;

/// Maximum number of page numbers handled before other events, such as a pause. Each may be a range of its
/// own, which costs a system call.
const PAGES_BUDGET: u32 = 32 << 10;

/// Maximum number of page numbers of a chain: 128 MiB of memory. Linux sends 256, Windows 1024.
const CHAIN_PFNS_MAX: u64 = PAGES_BUDGET as u64;

/// Bytes of a request that are read at a time.
const PIECE_BYTES: u64 = 64 << 10;

/// Serves the queues of a balloon.
pub(crate) struct BalloonWorker {
    queues: Queues<WorkQueue>,
    shared: Arc<Shared>,
    pages: BalloonPages,
    features: u64,
    /// The statistics buffer kept to request the next statistics.
    kept: Option<u16>,
    timer: Option<(TimerFd, Duration)>,
}

/// Copies the front of a buffer.
fn read(memory: &GuestMemory, from: &Segments, len_bytes: u64) -> Result<Vec<u8>, &'static str> {
    let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
    from.copy_out(memory, &mut bytes).map_err(|_| NOT_RAM)?;
    Ok(bytes)
}

/// The page numbers of a request.
fn pfns(memory: &GuestMemory, chain: &mut Chain) -> Result<Vec<u32>, &'static str> {
    let mut left = chain.readable.len_bytes() / 4 * 4;
    if left > CHAIN_PFNS_MAX * 4 {
        return Err("names more pages than a request may");
    }
    let mut pfns = Vec::new();
    while left > 0 {
        let len_bytes = left.min(PIECE_BYTES);
        left -= len_bytes;
        let Some(piece) = chain.readable.split_front(len_bytes) else { break };
        let bytes = read(memory, &piece, len_bytes)?;
        pfns.extend(bytes.chunks_exact(4).filter_map(|pfn| {
            let pfn: [u8; 4] = pfn.try_into().ok()?;
            Some(u32::from_le_bytes(pfn))
        }));
    }
    Ok(pfns)
}

/// Cost of a request in [`PAGES_BUDGET`].
fn cost(pfns: &[u32]) -> u32 {
    u32::try_from(pfns.len()).unwrap_or(u32::MAX).max(PAGES_BUDGET / BUDGET)
}

/// The ranges of a buffer of which only the addresses matter; those that overflow are empty.
fn ranges(segments: &Segments) -> Vec<Range<u64>> {
    let range = |(gpa, len_bytes): (u64, u32)| gpa..gpa.saturating_add(u64::from(len_bytes));
    segments.iter().map(range).collect()
}

impl BalloonWorker {
    /// `statistics_every` is the interval of statistics.
    pub(crate) fn new(
        queues: Queues<WorkQueue>,
        shared: &Arc<Shared>,
        features: u64,
        statistics_every: Option<Duration>,
    ) -> io::Result<Self> {
        let timer = match statistics_every.filter(|_| queues.statistics.is_some()) {
            Some(every) => Some((TimerFd::new().map_err(io::Error::from)?, every)),
            None => None,
        };
        let pages = BalloonPages::new(shared, features & F_MUST_TELL_HOST != 0)?;
        Ok(Self { queues, shared: Arc::clone(shared), pages, features, kept: None, timer })
    }

    fn inflate(&mut self) -> Result<(), Broken> {
        let Self { queues, shared, pages, features, .. } = self;
        queues.inflate.serve_by_cost(PAGES_BUDGET, |memory, chain| {
            let pfns = pfns(memory, chain)?;
            let discarded = pages.inflate(&pfns, &shared.counters);
            if *features & F_DEVICE_INIT_ON_INFLATE == 0 || shared.config().poison != 0 {
                return Ok((0, cost(&pfns)));
            }
            let mut zeroed = vec![0_u8; pfns.len().div_ceil(8)];
            for (bits, pfns) in zeroed.iter_mut().zip(pfns.chunks(8)) {
                for (bit, pfn) in pfns.iter().enumerate() {
                    let gpa = u64::from(*pfn) * PAGE_BYTES;
                    if discarded.covers(&(gpa..gpa + PAGE_BYTES)) {
                        *bits |= 1 << bit;
                    }
                }
            }
            let written = chain.writable.copy_in(memory, &zeroed).map_err(|_| NOT_RAM)?;
            Ok((u64::try_from(written).unwrap_or(0), cost(&pfns)))
        })
    }

    fn deflate(&mut self) -> Result<(), Broken> {
        let Self { queues, shared, pages, .. } = self;
        queues.deflate.serve_by_cost(PAGES_BUDGET, |memory, chain| {
            let pfns = pfns(memory, chain)?;
            pages.deflate(&pfns, &shared.counters);
            Ok((0, cost(&pfns)))
        })
    }

    fn report(&mut self) -> Result<(), Broken> {
        let Self { queues, shared, pages, .. } = self;
        let Some(queue) = &mut queues.reporting else { return Ok(()) };
        queue.serve(BUDGET, |_, chain| {
            let ranges = ranges(&chain.writable);
            // Returned pages are zero, and the guest relies on another value.
            if shared.config().poison != 0 {
                return Ok(0);
            }
            let discarded = pages.report(ranges.clone(), &shared.counters);
            // The used length counts from the start of the buffer.
            let whole = ranges.iter().take_while(|range| discarded.covers(range));
            Ok(whole.map(|range| range.end - range.start).sum())
        })
    }

    fn hints(&mut self) -> Result<(), Broken> {
        let Self { queues, shared, .. } = self;
        let Some(queue) = &mut queues.hinting else { return Ok(()) };
        queue.serve(BUDGET, |memory, chain| {
            if chain.readable.len_bytes() >= 4 {
                let command = read(memory, &chain.readable, 4)?;
                let command = command.try_into().map_or(0, u32::from_le_bytes);
                shared.hinting.driver_said(command);
            }
            if let Some(maps) = shared.hinting.taking() {
                for hint in ranges(&chain.writable) {
                    shared.counters.hinted_bytes.add(hinting::note(&shared.ram, &maps, &hint));
                }
            }
            Ok(0)
        })
    }

    /// Discards what could not be discarded, or was populated since.
    fn retry(&mut self) {
        self.pages.retry(self.shared.take_populated(), &self.shared.counters);
    }

    fn take_retry(&mut self) {
        // Another wake-up may have cleared it, which does not matter.
        let _ = self.shared.retry().read();
        self.retry();
    }

    /// Reads statistics, and keeps the buffer to request the next ones.
    fn statistics(&mut self) -> Result<(), Broken> {
        let Some(queue) = &mut self.queues.statistics else { return Ok(()) };
        let memory = queue.memory();
        while self.kept.is_none() {
            let Some(chain) = queue.pop(&memory)? else {
                if queue.allow_kicks(&memory)? {
                    continue;
                }
                return Ok(());
            };
            self.kept = Some(chain.head);
            let len_bytes = chain.readable.len_bytes().min(STATISTICS_BYTES_MAX);
            let bytes = read(&memory, &chain.readable, len_bytes)
                .map_err(|why| queue.bad_chain(chain.head, why))?;
            self.shared.take_statistics(&bytes);
        }
        Ok(())
    }

    /// Returns the kept buffer, upon which the driver fills it again.
    fn ask_for_statistics(&mut self) -> Result<(), Broken> {
        if let (Some(queue), Some(head)) = (&mut self.queues.statistics, self.kept.take()) {
            let memory = queue.memory();
            queue.add_used(&memory, head, 0)?;
            queue.notify(&memory)?;
        }
        self.statistics()
    }
}

impl Work for BalloonWorker {
    fn kind(&self) -> &'static str {
        "device-balloon"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        let Queues { inflate, deflate, statistics, hinting, reporting } = &self.queues;
        watch.on(INFLATE_TOKEN, inflate.kick().as_raw_fd())?;
        watch.on(DEFLATE_TOKEN, deflate.kick().as_raw_fd())?;
        let optional = [
            (STATISTICS_TOKEN, statistics),
            (HINTING_TOKEN, hinting),
            (REPORTING_TOKEN, reporting),
        ];
        for (token, queue) in optional {
            if let Some(queue) = queue {
                watch.on(token, queue.kick().as_raw_fd())?;
            }
        }
        watch.on(RETRY_TOKEN, self.shared.retry().as_raw_fd())?;
        if let Some((timer, every)) = &mut self.timer {
            if let Err(error) = timer.reset(*every, Some(*every)) {
                log_limited!(
                    self.shared.log,
                    Warn,
                    "the guest is not asked for statistics: {error}"
                );
            }
            watch.on(TIMER_TOKEN, timer.as_raw_fd())?;
        }
        self.retry();
        self.inflate()?;
        self.deflate()?;
        self.statistics()?;
        self.hints()?;
        self.report()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        match token {
            INFLATE_TOKEN => {
                self.queues.inflate.take_kick();
                self.inflate()
            }
            DEFLATE_TOKEN => {
                self.queues.deflate.take_kick();
                self.deflate()
            }
            STATISTICS_TOKEN => {
                self.queues.statistics.iter().for_each(WorkQueue::take_kick);
                self.statistics()
            }
            HINTING_TOKEN => {
                self.queues.hinting.iter().for_each(WorkQueue::take_kick);
                self.hints()
            }
            REPORTING_TOKEN => {
                self.queues.reporting.iter().for_each(WorkQueue::take_kick);
                self.report()
            }
            TIMER_TOKEN => {
                if let Some((timer, _)) = &mut self.timer {
                    // It is readable; an error only leads to another request.
                    let _ = timer.wait();
                }
                self.ask_for_statistics()
            }
            _ => {
                self.take_retry();
                Ok(())
            }
        }
    }

    fn drain(&mut self) -> Result<(), Broken> {
        if let Some((timer, _)) = &mut self.timer
            && let Err(error) = timer.clear()
        {
            log_limited!(
                self.shared.log,
                Warn,
                "the timer of the statistics cannot be stopped: {error}"
            );
        }
        // The next thread that serves the queue takes the kept buffer again.
        if let (Some(queue), Some(_)) = (&mut self.queues.statistics, self.kept.take()) {
            queue.undo_pop();
        }
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        self.queues.all().map(WorkQueue::state).collect()
    }

    fn report_broken(&self) {
        self.queues.inflate.interrupt().needs_reset();
    }

    /// Memory that the guest has given goes on being returned to the host.
    fn start_broken(&mut self, watch: &mut Watch) {
        watch.on_if_possible(RETRY_TOKEN, self.shared.retry().as_raw_fd());
        self.retry();
    }

    fn ready_broken(&mut self, token: u64, _watch: &mut Watch) {
        // Others may have been taken from epoll before a queue broke.
        if token == RETRY_TOKEN {
            self.take_retry();
        }
    }
}
