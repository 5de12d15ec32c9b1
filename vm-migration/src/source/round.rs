// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One round of precopy: one pass over memory, shared by all connections.
//!
//! Owns what is sent and when its dirty bits are cleared. The connections claim slices from one
//! cursor, each as much as its pace allows. A slice's dirty bits are cleared and tracking re-armed
//! **just before** that slice is copied: a page that is dirtied while it waits for its turn goes
//! out once, and one dirtied after its copy goes out again in the next round. (With
//! [`DirtyClear::Round`] all bits are cleared at the beginning, for comparison.) Holes are never
//! read, so they stay holes: populated pages are held until they have been sent.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use page_bitmap::{PageBitmap, runs_in_words};
use rate_limit::RateLimit;

use super::announce::{Announcer, full_blocks};
use super::content::{Content, Run, divide, mask_tail, push, ranges};
use super::negotiate::Links;
use super::page_maps::empty_maps;
use super::send_stream::{Record, SendStream};
use super::switch::Switch;
use super::unit_space::{Slice, UNIT_BYTES, UNIT_PAGES, UNITS_MAX, UnitSpace};
use super::{Context, check_cancel};
use crate::channel::Channel;
use crate::cursor::Cursor;
use crate::error::{Cause, Failure, Step};
use crate::layout::{Layout, PAGE_BYTES, PageRun, to_usize};
use crate::options::DirtyClear;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap, Hold};
use crate::vm::{DirtyLog, FreePageHints};

/// Duration of what is claimed at once under a bandwidth limit.
const PACED_TIME: Duration = Duration::from_millis(50);

/// How often a wait for the bandwidth limit checks whether the round is to end.
const PACED_LOOK: Duration = Duration::from_millis(20);

/// Which pages of a slice are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundKind {
    /// All populated pages that are not zero: the destination's memory is zero already.
    First,
    /// All dirty pages; one that became zero must become zero at the destination.
    Dirty,
}

/// Parameters of a round, and what ends it early.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub kind: RoundKind,
    pub switch: &'a Switch<'a>,
    /// Pages that a first round need not send. The dirty bits of all memory were cleared before the guest
    /// was asked for these.
    pub hints: Option<&'a dyn FreePageHints>,
    /// Memory is announced to the destination before it is sent.
    pub announce: bool,
}

/// Result of a round.
pub(crate) struct Sent {
    /// Bytes of contents that were sent.
    pub bytes: u64,
    /// Pages, by region, that were not examined because the round was ended early, and that are not in the
    /// dirty bits of the next round; `None` if there are none. A bitmap, because for sparsely populated
    /// memory a run for every second page would be a hundred times as large.
    pub unsent: Option<Vec<PageBitmap>>,
}

/// Makes one pass over memory, or a part of it if the round is ended early. Everything that is sent is
/// acknowledged at the end.
pub(crate) fn send_round<M: GuestMemoryMap>(
    memory: &M,
    log: &impl DirtyLog,
    Pass { kind, switch, hints, announce }: Pass<'_>,
    control: &mut Channel,
    links: &mut Links,
    context: Context<'_>,
) -> Result<Sent, Failure> {
    let space = UnitSpace::new(memory.layout());
    let cleared = match context.options.dirty_clear {
        // Cleared before the guest was asked for hints.
        _ if hints.is_some() => Cleared::Before,
        DirtyClear::Slice => Cleared::BySlice,
        DirtyClear::Round => Cleared::AtOnce(clear_all(log, memory.layout())?),
    };
    let round = Round {
        memory,
        log,
        kind,
        zero_flags: links.terms.zero_pages(),
        cursor: Cursor::new(space.units),
        space,
        cleared,
        failed: AtomicBool::new(false),
        switch,
        hints,
        bandwidth_limit: RateLimit::new(context.options.bandwidth_bytes_per_s),
        context,
    };
    let streams = 1 + links.memory.len();
    while links.records.len() < streams {
        links.records.push(Record::new(context.options.compression)?);
    }
    let (round_trip, records, progress) = (links.round_trip, &mut links.records, context.progress);
    let borders = links.terms.borders();
    let stream = |(channel, record)| {
        SendStream::new(channel, record, round_trip, streams as u64, borders, progress)
    };
    let sent = {
        let channels = std::iter::once(&mut *control).chain(&mut links.memory);
        let announcer = announce.then(Announcer::default);
        round.send_on(channels.zip(records).map(stream).collect(), announcer)
    };
    let unsent = |bytes| Ok(Sent { bytes, unsent: round.unsent()? });
    sent.and_then(unsent).map_err(|failure| match failure.cause {
        // The first connection may carry a more specific reason than an extra one that has ended.
        Cause::Transport(error) if !links.memory.is_empty() => {
            Failure { step: failure.step, cause: control.explain(error) }
        }
        _ => failure,
    })
}

/// When the dirty bits of a round are cleared.
enum Cleared {
    /// Those of each slice just before it is copied.
    BySlice,
    /// All at the beginning of the round; their values, by region.
    AtOnce(Vec<Vec<u64>>),
    /// Before the round, which is the first one and does not need them.
    Before,
}

/// Clears the dirty bits of all memory at once; returns them by region.
pub(crate) fn clear_all(log: &impl DirtyLog, layout: &Layout) -> Result<Vec<Vec<u64>>, Failure> {
    let space = UnitSpace::new(layout);
    let words = |pages: u64| vec![0; to_usize(pages.div_ceil(64))];
    let mut all: Vec<_> = layout.regions().iter().map(|info| words(info.pages())).collect();
    for Slice { region, first, pages } in space.slices() {
        let words = to_usize(first / 64)..to_usize((first + pages).div_ceil(64));
        log.collect_and_clear(region, first..first + pages, &mut all[region][words])
            .map_err(Cause::Vm)
            .step("reading the dirty log")?;
    }
    Ok(all)
}

/// State that the senders of one round share.
struct Round<'a, M, L> {
    memory: &'a M,
    log: &'a L,
    kind: RoundKind,
    zero_flags: bool,
    space: UnitSpace,
    /// Claimed part of the unit space.
    cursor: Cursor,
    cleared: Cleared,
    /// Free pages, which are left out.
    hints: Option<&'a dyn FreePageHints>,
    /// One of the senders has failed; the others stop soon.
    failed: AtomicBool,
    /// Ends the round early.
    switch: &'a Switch<'a>,
    /// Limit for all connections together.
    bandwidth_limit: RateLimit,
    context: Context<'a>,
}

impl<'a, M: GuestMemoryMap, L: DirtyLog> Round<'a, M, L> {
    /// Runs a sender for each stream; the first one also sends the announcements.
    fn send_on(
        &self,
        mut streams: Vec<SendStream<'_>>,
        mut announcer: Option<Announcer>,
    ) -> Result<u64, Failure> {
        if let [stream] = &mut streams[..] {
            return self.work(stream, announcer);
        }
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for stream in &mut streams {
                let announcer = announcer.take();
                let spawned = stoppable_thread::spawn_scoped(scope, "mig-send", move || {
                    self.work(stream, announcer)
                });
                match spawned {
                    Ok(worker) => workers.push(worker),
                    Err(error) => {
                        self.failed.store(true, Ordering::Relaxed);
                        return Err(Cause::Resource(error)).step("starting a sender thread");
                    }
                }
            }
            let mut sent = 0;
            let mut first_failure = None;
            for worker in workers {
                match worker.join().unwrap_or_else(|panic| resume_unwind(panic)) {
                    Ok(bytes) => sent += bytes,
                    Err(failure) => first_failure = first_failure.or(Some(failure)),
                }
            }
            first_failure.map_or(Ok(sent), Err)
        })
    }

    /// Claims and sends slices until none is left.
    fn work(
        &self,
        stream: &mut SendStream<'_>,
        announcer: Option<Announcer>,
    ) -> Result<u64, Failure> {
        let result = self.send_slices(stream, announcer);
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        result
    }

    fn send_slices(
        &self,
        stream: &mut SendStream<'_>,
        mut announcer: Option<Announcer>,
    ) -> Result<u64, Failure> {
        let mut sent = 0;
        let mut words = vec![0; to_usize(UNITS_MAX * UNIT_PAGES / 64)];
        let mut content = Content::default();
        loop {
            if let Some(announcer) = &mut announcer {
                self.announce(announcer, stream)?;
            }
            if !content.held.is_empty() && !self.bandwidth_limit.reserve(0).is_zero() {
                // The held pages are not discarded before they are sent.
                sent += self.flush(stream, &mut content)?;
            }
            // Waiting before the claim means that the stream that can send now takes the next slice.
            stream.make_room()?;
            self.wait_for_turn()?;
            if self.switch.is_due() {
                break;
            }
            let wanted = |left| stream.claim_units(left).min(self.units_at_once());
            let slice = self.space.claim(&self.cursor, wanted);
            let Some(slice) = slice.filter(|_| !self.failed.load(Ordering::Relaxed)) else { break };
            // On a fast link nothing waits, and only waits check for the cancel.
            check_cancel(self.context.cancel, "sending memory")?;
            self.add_content(slice, &mut words, &mut content)?;
            let enough = stream.message_bytes().min(self.units_at_once() * UNIT_BYTES);
            if content.is_full() || content.data_bytes() >= enough {
                sent += self.flush(stream, &mut content)?;
            }
        }
        sent += self.flush(stream, &mut content)?;
        stream.wait_for_answers()?;
        Ok(sent)
    }

    /// Units that a connection may claim at once: no more than the bandwidth limit passes in a short time,
    /// or the peer would be idle for long and then get a burst.
    fn units_at_once(&self) -> u64 {
        let bytes = self.bandwidth_limit.bytes_in(PACED_TIME).unwrap_or(u64::MAX);
        (bytes / UNIT_BYTES).clamp(1, UNITS_MAX)
    }

    /// Waits until the bandwidth limit allows more. Nothing is claimed meanwhile, so that a page that is
    /// written during the wait is sent only once.
    fn wait_for_turn(&self) -> Result<(), Failure> {
        loop {
            let pause = self.bandwidth_limit.reserve(0);
            let over = self.switch.is_due() || self.failed.load(Ordering::Relaxed);
            if pause.is_zero() || over {
                return Ok(());
            }
            check_cancel(self.context.cancel, "sending memory")?;
            std::thread::sleep(pause.min(PACED_LOOK));
        }
    }

    /// Announces the next memory to the destination, if that is due.
    fn announce(
        &self,
        announcer: &mut Announcer,
        stream: &mut SendStream<'_>,
    ) -> Result<(), Failure> {
        while let Some(units) = announcer.due(self.cursor.reached(), self.space.units) {
            let mut coming = Vec::new();
            for slice in self.space.slices_of(units) {
                let Slice { region, first, pages } = slice;
                let _held = self.memory.hold(region, first..first + pages);
                for run in self.wanted(slice)?.0 {
                    for block in full_blocks(self.memory, region, run) {
                        push(&mut coming, block);
                    }
                }
            }
            if !coming.is_empty() {
                stream.send(&Message::Coming(ranges(self.memory, &coming, None)))?;
            }
        }
        Ok(())
    }

    /// The unclaimed pages that will not be found dirty later: in a first round all populated ones, in
    /// others those whose bits were cleared before.
    fn unsent(&self) -> Result<Option<Vec<PageBitmap>>, Failure> {
        let mut unsent: Option<Vec<PageBitmap>> = None;
        let mut words = vec![0; to_usize(UNITS_MAX * UNIT_PAGES / 64)];
        while let Some(slice) = self.space.claim(&self.cursor, |_| UNITS_MAX) {
            check_cancel(self.context.cancel, "looking for what is not sent")?;
            let Slice { region, first, pages } = slice;
            let runs: Vec<Run> = match (self.kind, &self.cleared) {
                (RoundKind::First, cleared) => {
                    if matches!(cleared, Cleared::BySlice) {
                        // Initially the log has every page, holes included. Pages that are populated from
                        // here on are found dirty later.
                        let words = &mut words[..to_usize(pages.div_ceil(64))];
                        self.log
                            .collect_and_clear(region, first..first + pages, words)
                            .map_err(Cause::Vm)
                            .step("reading the dirty log")?;
                    }
                    self.wanted(slice)?.0
                }
                (RoundKind::Dirty, Cleared::BySlice | Cleared::Before) => Vec::new(),
                (RoundKind::Dirty, Cleared::AtOnce(all)) => {
                    let start = to_usize(first / 64);
                    let end = start + to_usize(pages.div_ceil(64));
                    let mut words = all[region][start..end].to_vec();
                    mask_tail(&mut words, pages);
                    runs_in_words(&words, first).collect()
                }
            };
            let maps = unsent.get_or_insert_with(|| empty_maps(self.memory.layout()));
            for run in runs {
                maps[region].set_range(run);
            }
        }
        Ok(unsent)
    }

    /// The populated pages of a slice that are not known to be free, as runs, and the number of free
    /// pages.
    fn wanted(&self, slice: Slice) -> Result<(Vec<Run>, u64), Failure> {
        let Slice { region, first, pages } = slice;
        let runs = self.memory.populated_runs(region, first..first + pages);
        let runs = runs.map_err(Cause::Memory).step("finding populated memory")?;
        let Some(hints) = self.hints else {
            return Ok((runs, 0));
        };
        let mut free = vec![0; to_usize(pages.div_ceil(64))];
        hints.free_words(region, first..first + pages, &mut free);
        let mut populated = vec![0_u64; free.len()];
        for page in runs.into_iter().flatten().map(|page| page - first) {
            populated[to_usize(page / 64)] |= 1 << (page % 64);
        }
        let mut left_out = 0;
        for (word, free) in populated.iter_mut().zip(free) {
            left_out += u64::from((*word & free).count_ones());
            *word &= !free;
        }
        Ok((runs_in_words(&populated, first).collect(), left_out))
    }

    /// Splits dirty runs into populated pages and holes: the balloon has returned the latter, and reading
    /// them would populate them again. Called after the dirty bits were cleared, so that a page that is
    /// populated from now on is found dirty later. One query covers all runs of a slice.
    fn without_holes(
        &self,
        region: usize,
        dirty: Vec<Run>,
    ) -> Result<(Vec<Run>, Vec<Run>), Failure> {
        let (Some(first), Some(last)) = (dirty.first(), dirty.last()) else {
            return Ok((dirty, Vec::new()));
        };
        let populated = self.memory.populated_runs(region, first.start..last.end);
        let populated = populated.map_err(Cause::Memory).step("finding populated memory")?;
        Ok(divide(&dirty, &populated))
    }

    /// Clears the slice's dirty bits, and only then examines its pages.
    fn add_content(
        &self,
        slice: Slice,
        words: &mut [u64],
        content: &mut Content<'a>,
    ) -> Result<(), Failure> {
        let Slice { region, first, pages } = slice;
        let memory: &'a M = self.memory;
        // Held until the contents found below have been sent.
        let held;
        let words = &mut words[..to_usize(pages.div_ceil(64))];
        match &self.cleared {
            Cleared::Before => {}
            Cleared::AtOnce(all) => {
                let start = to_usize(first / 64);
                words.copy_from_slice(&all[region][start..start + words.len()]);
            }
            Cleared::BySlice => {
                self.log
                    .collect_and_clear(region, first..first + pages, words)
                    .map_err(Cause::Vm)
                    .step("reading the dirty log")?;
            }
        }
        let runs: Vec<Run> = match self.kind {
            RoundKind::First => {
                held = memory.hold(region, first..first + pages);
                let (runs, free) = self.wanted(slice)?;
                let counters = &self.context.progress.counters;
                counters.free_pages.fetch_add(free, Ordering::Relaxed);
                content.done_pages += pages;
                runs
            }
            RoundKind::Dirty => {
                mask_tail(words, pages);
                let dirty: Vec<Run> = runs_in_words(words, first).collect();
                content.done_pages += dirty.iter().map(|run| run.end - run.start).sum::<u64>();
                held = match (dirty.first(), dirty.last()) {
                    (Some(first), Some(last)) => memory.hold(region, first.start..last.end),
                    _ => Hold::default(),
                };
                let (populated, holes) = self.without_holes(region, dirty)?;
                for Run { start, end } in holes {
                    let run = PageRun { region, first: start, count: end - start };
                    content.add_zero(run, self.zero_flags);
                }
                populated
            }
        };
        let mut is_sent = false;
        for run in runs {
            for page in run.clone() {
                let run = PageRun { region, first: page, count: 1 };
                if !ram::is_zero(memory, run) {
                    push(&mut content.data, run);
                    is_sent = true;
                } else if self.kind == RoundKind::First {
                    content.skipped_zero_pages += 1;
                } else {
                    content.add_zero(run, self.zero_flags);
                }
            }
        }
        if is_sent {
            content.held.push(held);
        }
        Ok(())
    }

    /// Sends the collected content; returns the bytes of contents.
    fn flush(
        &self,
        stream: &mut SendStream<'_>,
        content: &mut Content<'a>,
    ) -> Result<u64, Failure> {
        let content = std::mem::take(content);
        if content.data_bytes() > 0 {
            self.bandwidth_limit.reserve(content.data_bytes());
        }
        if !content.data.is_empty() {
            stream.send_memory(self.memory, &content.data)?;
        }
        if !content.blank.is_empty() {
            stream.send_blank(self.memory, &content.blank)?;
        }
        if !content.zero.is_empty() {
            stream.send(&Message::ZeroPages(ranges(self.memory, &content.zero, None)))?;
        }
        let counters = &self.context.progress.counters;
        let data_bytes = content.data_bytes();
        counters.memory_bytes_sent.fetch_add(data_bytes, Ordering::Relaxed);
        let zero: u64 = content.zero.iter().map(|run| run.count).sum();
        counters.zero_pages.fetch_add(zero + content.skipped_zero_pages, Ordering::Relaxed);
        self.context.progress.sent_down(content.done_pages * PAGE_BYTES);
        self.context.progress.note_sample(false);
        Ok(data_bytes)
    }
}
