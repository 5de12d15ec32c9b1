// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One round of precopy: one pass over memory, shared by all connections.
//!
//! Owns what is sent and when its dirty bits are cleared. The connections claim slices from one
//! cursor, each as much as its pace allows. A slice's dirty bits are cleared and tracking re-armed
//! **just before** that slice is copied: a page that is dirtied while it waits for its turn goes
//! out once, and one dirtied after its copy goes out again in the next round. (With
//! [`DirtyClear::Round`] all bits are cleared at the beginning, for comparison.) In the first round
//! they are cleared some way ahead, and what the guest has written again by then is left to the
//! second: see [`Lookahead`]. Holes are never read, so they stay holes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::announce::{Announcer, full_blocks};
use super::lane::{Lane, Record, UNIT_PAGES, UNITS_MAX};
use super::line::{Line, Slice};
use super::lookahead::Lookahead;
use super::negotiate::Links;
use super::precopy::Switch;
use super::{Context, check_cancel};
use crate::bitmap::word_runs;
use crate::channel::Channel;
use crate::cursor::Cursor;
use crate::error::{Cause, Failure, Step};
use crate::layout::{GpaRange, Layout, PAGE_BYTES, PageRun, to_usize};
use crate::options::DirtyClear;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::vm::{DirtyLog, FreePageHints};

/// Most runs of pages in one message.
const MESSAGE_RUNS_MAX: usize = 512;

/// Which pages of a slice go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundKind {
    /// All that were ever populated and are not zero: the destination's memory is zero already.
    First,
    /// All that were dirtied; one that became zero must become so over there.
    Dirty,
}

/// What a round is, and what ends it early.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub kind: RoundKind,
    pub switch: &'a Switch<'a>,
    /// Which pages a first round need not send. The dirty bits of all memory were cleared before the
    /// guest was asked for these.
    pub hints: Option<&'a dyn FreePageHints>,
    /// The destination is told beforehand what will come.
    pub announce: bool,
}

/// What came of a round.
pub(crate) struct Sent {
    /// Bytes of contents.
    pub bytes: u64,
    /// Pages that were not looked at because the round was ended before, and that the next round's
    /// dirty bits do not have.
    pub unsent: Vec<PageRun>,
}

/// One pass over memory, or as much of it as there is time for. All that is sent is acknowledged
/// at the end.
pub(crate) fn send_round<M: GuestMemoryMap>(
    memory: &M,
    log: &impl DirtyLog,
    Pass { kind, switch, hints, announce }: Pass<'_>,
    control: &mut Channel,
    links: &mut Links,
    context: Context<'_>,
) -> Result<Sent, Failure> {
    let line = Line::new(memory.layout());
    let cleared = match context.options.dirty_clear {
        // Before the guest was asked for hints.
        _ if hints.is_some() => Cleared::Before,
        DirtyClear::Slice => Cleared::BySlice,
        DirtyClear::Round => Cleared::AtOnce(clear_all(log, memory.layout())?),
    };
    let round = Round {
        memory,
        log,
        kind,
        zero_flags: links.terms.zero_pages(),
        cursor: Cursor::new(line.units()),
        lookahead: lookahead(kind, &cleared, line.units()),
        line,
        cleared,
        postponed: AtomicU64::new(0),
        failed: AtomicBool::new(false),
        switch,
        hints,
        context,
    };
    let lanes = 1 + links.memory.len();
    while links.records.len() < lanes {
        links.records.push(Record::new(context.options.compression)?);
    }
    let (round_trip, records, progress) = (links.round_trip, &mut links.records, context.progress);
    let lane = |(channel, record)| Lane::new(channel, record, round_trip, lanes as u64, progress);
    let sent = {
        let channels = std::iter::once(&mut *control).chain(&mut links.memory);
        let announcer = announce.then(Announcer::default);
        round.send_on(channels.zip(records).map(lane).collect(), announcer)
    };
    let postponed = round.postponed.load(Ordering::Relaxed);
    if postponed > 0 {
        log::info!("{postponed} pages wait for the next round: the guest keeps writing them");
    }
    let unsent = |bytes| Ok(Sent { bytes, unsent: round.unsent()? });
    sent.and_then(unsent).map_err(|failure| match failure.cause {
        // An extra connection that ended says less than the first one may have to say.
        Cause::Transport(error) if !links.memory.is_empty() => {
            Failure { step: failure.step, cause: control.explain(error) }
        }
        _ => failure,
    })
}

/// When the dirty bits of a round are cleared.
enum Cleared {
    /// Each slice's just before it is copied.
    BySlice,
    /// All at the begin of the round: these, by region.
    AtOnce(Vec<Vec<u64>>),
    /// Before the round, which is the first one and has no need of them.
    Before,
}

/// Only a first round sends pages that nobody is known to have written, and so has something to gain.
fn lookahead(kind: RoundKind, cleared: &Cleared, units: u64) -> Option<Lookahead> {
    match (kind, cleared) {
        (RoundKind::First, Cleared::BySlice) => Some(Lookahead::new(units)),
        (RoundKind::First, Cleared::Before) => Some(Lookahead::cleared(units)),
        _ => None,
    }
}

/// Clears the dirty bits of all memory at once; returns them by region.
pub(crate) fn clear_all(log: &impl DirtyLog, layout: &Layout) -> Result<Vec<Vec<u64>>, Failure> {
    let line = Line::new(layout);
    let words = |pages: u64| vec![0; to_usize(pages.div_ceil(64))];
    let mut all: Vec<_> = layout.regions().iter().map(|info| words(info.pages())).collect();
    for Slice { region, first, pages, .. } in line.slices() {
        let words = to_usize(first / 64)..to_usize((first + pages).div_ceil(64));
        log.collect_and_clear(region, first..first + pages, &mut all[region][words])
            .map_err(Cause::Vm)
            .step("reading the dirty log")?;
    }
    Ok(all)
}

/// What the senders of one round share.
struct Round<'a, M, L> {
    memory: &'a M,
    log: &'a L,
    kind: RoundKind,
    zero_flags: bool,
    line: Line,
    /// Up to where the line is claimed.
    cursor: Cursor,
    cleared: Cleared,
    lookahead: Option<Lookahead>,
    /// Pages that it left to the next round.
    postponed: AtomicU64,
    /// Pages that are left out.
    hints: Option<&'a dyn FreePageHints>,
    /// One of the senders failed; the others stop soon.
    failed: AtomicBool,
    /// Ends the round early.
    switch: &'a Switch<'a>,
    context: Context<'a>,
}

impl<M: GuestMemoryMap, L: DirtyLog> Round<'_, M, L> {
    /// The first of the lanes makes the announcements.
    fn send_on(
        &self,
        mut lanes: Vec<Lane<'_>>,
        mut announcer: Option<Announcer>,
    ) -> Result<u64, Failure> {
        if let [lane] = &mut lanes[..] {
            return self.work(lane, announcer);
        }
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for lane in &mut lanes {
                let announcer = announcer.take();
                let spawned = std::thread::Builder::new()
                    .name("mig-send".into())
                    .spawn_scoped(scope, move || self.work(lane, announcer));
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
                let panicked = || Failure::new("sending memory", Cause::Panicked);
                match worker.join().unwrap_or_else(|_| Err(panicked())) {
                    Ok(bytes) => sent += bytes,
                    Err(failure) => first_failure = first_failure.or(Some(failure)),
                }
            }
            first_failure.map_or(Ok(sent), Err)
        })
    }

    /// Claims and sends slices until none is left.
    fn work(&self, lane: &mut Lane<'_>, announcer: Option<Announcer>) -> Result<u64, Failure> {
        let result = self.send_slices(lane, announcer);
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        result
    }

    fn send_slices(
        &self,
        lane: &mut Lane<'_>,
        mut announcer: Option<Announcer>,
    ) -> Result<u64, Failure> {
        let mut sent = 0;
        let mut words = vec![0; to_usize(UNITS_MAX * UNIT_PAGES / 64)];
        let mut content = Content::default();
        loop {
            if let Some(announcer) = &mut announcer {
                self.announce(announcer, lane)?;
            }
            // Before the claim: whoever can send now takes the next slice.
            lane.make_room()?;
            if self.switch.is_due() {
                break;
            }
            let slice = self.line.claim(&self.cursor, |start, left| {
                let room = self.lookahead.as_ref().map_or(u64::MAX, |ahead| ahead.room(start));
                lane.claim_units(left).min(room)
            });
            let Some(slice) = slice.filter(|_| !self.failed.load(Ordering::Relaxed)) else { break };
            // A fast link never waits, and only waits look at the cancel.
            check_cancel(self.context.cancel, "sending memory")?;
            self.add_content(slice, &mut words, &mut content)?;
            let is_full = content.data.len() + content.zero.len() >= MESSAGE_RUNS_MAX;
            if is_full || content.data_bytes() >= lane.message_bytes() {
                sent += self.flush(lane, &mut content)?;
            }
        }
        sent += self.flush(lane, &mut content)?;
        lane.settle()?;
        Ok(sent)
    }

    /// Tells the destination what will come next, if it is time to.
    fn announce(&self, announcer: &mut Announcer, lane: &mut Lane<'_>) -> Result<(), Failure> {
        while let Some(units) = announcer.due(self.cursor.reached(), self.line.units()) {
            let mut coming = Vec::new();
            for slice in self.line.slices_of(units, UNITS_MAX) {
                for run in self.wanted(slice, None)?.runs {
                    for block in full_blocks(self.memory, slice.region, run) {
                        push(&mut coming, block);
                    }
                }
            }
            if !coming.is_empty() {
                lane.send(&Message::Coming(ranges(self.memory, &coming)))?;
            }
        }
        Ok(())
    }

    /// What nobody has claimed, as far as it is not found dirty later: of a first round everything
    /// that is populated, of others what was cleared before.
    fn unsent(&self) -> Result<Vec<PageRun>, Failure> {
        let mut unsent = Vec::new();
        while let Some(slice) = self.line.claim(&self.cursor, |_, _| UNITS_MAX) {
            let Slice { region, first, pages, .. } = slice;
            let runs: Vec<(u64, u64)> = match (self.kind, &self.cleared) {
                (RoundKind::First, _) => self.wanted(slice, None)?.runs,
                (RoundKind::Dirty, Cleared::BySlice | Cleared::Before) => Vec::new(),
                (RoundKind::Dirty, Cleared::AtOnce(all)) => {
                    let start = to_usize(first / 64);
                    let end = start + to_usize(pages.div_ceil(64));
                    let mut words = all[region][start..end].to_vec();
                    mask_tail(&mut words, pages);
                    word_runs(&words, first)
                }
            };
            for (first, count) in runs {
                push(&mut unsent, PageRun { region, first, count });
            }
        }
        Ok(unsent)
    }

    /// What is populated of a slice, and neither known to be free nor among what has been `written`.
    fn wanted(&self, slice: Slice, written: Option<&[u64]>) -> Result<Wanted, Failure> {
        let Slice { region, first, pages, .. } = slice;
        let runs = self.memory.populated_runs(region, first..first + pages);
        let runs = runs.map_err(Cause::Memory).step("finding populated memory")?;
        let written = written.filter(|words| words.iter().any(|word| *word != 0));
        if self.hints.is_none() && written.is_none() {
            let runs = runs.into_iter().map(|run| (run.start, run.end - run.start)).collect();
            return Ok(Wanted { runs, ..Wanted::default() });
        }
        let mut wanted = vec![0_u64; to_usize(pages.div_ceil(64))];
        for page in runs.into_iter().flatten().map(|page| page - first) {
            wanted[to_usize(page / 64)] |= 1 << (page % 64);
        }
        let mut free = 0;
        if let Some(hints) = self.hints {
            let mut words = vec![0; wanted.len()];
            hints.free_words(region, first..first + pages, &mut words);
            free = leave_out(&mut wanted, &words);
        }
        let postponed = written.map_or(0, |written| leave_out(&mut wanted, written));
        Ok(Wanted { runs: word_runs(&wanted, first), free, postponed })
    }

    /// Clears the slice's dirty bits, and only then finds out what its pages hold.
    fn add_content(
        &self,
        slice: Slice,
        words: &mut [u64],
        content: &mut Content,
    ) -> Result<(), Failure> {
        let Slice { region, first, pages, .. } = slice;
        let words = &mut words[..to_usize(pages.div_ceil(64))];
        let ahead = self.lookahead.as_ref();
        let written = ahead.and_then(|ahead| ahead.written(slice, &self.line, self.log));
        match &self.cleared {
            _ if written.is_some() => {}
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
        let runs: Vec<(u64, u64)> = match self.kind {
            RoundKind::First => {
                let Wanted { runs, free, postponed } = self.wanted(slice, written)?;
                let counters = &self.context.progress.counters;
                counters.free_pages.fetch_add(free, Ordering::Relaxed);
                self.postponed.fetch_add(postponed, Ordering::Relaxed);
                runs
            }
            RoundKind::Dirty => {
                mask_tail(words, pages);
                word_runs(words, first)
            }
        };
        content.done_pages += match self.kind {
            RoundKind::First => pages,
            RoundKind::Dirty => runs.iter().map(|(_, count)| count).sum(),
        };
        for (first, count) in runs {
            for page in first..first + count {
                let run = PageRun { region, first: page, count: 1 };
                if !ram::is_zero(self.memory, run) {
                    push(&mut content.data, run);
                } else if self.kind == RoundKind::First {
                    content.skipped_zero_pages += 1;
                } else if self.zero_flags {
                    push(&mut content.zero, run);
                } else {
                    push(&mut content.data, run);
                }
            }
        }
        Ok(())
    }

    /// Sends what has come together; returns the bytes of contents.
    fn flush(&self, lane: &mut Lane<'_>, content: &mut Content) -> Result<u64, Failure> {
        let content = std::mem::take(content);
        if !content.data.is_empty() {
            lane.send_memory(self.memory, &content.data)?;
        }
        if !content.zero.is_empty() {
            lane.send(&Message::ZeroPages(ranges(self.memory, &content.zero)))?;
        }
        let counters = &self.context.progress.counters;
        let data_bytes = content.data_bytes();
        counters.memory_bytes_sent.fetch_add(data_bytes, Ordering::Relaxed);
        let zero: u64 = content.zero.iter().map(|run| run.count).sum();
        counters.zero_pages.fetch_add(zero + content.skipped_zero_pages, Ordering::Relaxed);
        self.context.progress.sent_down(content.done_pages * PAGE_BYTES);
        Ok(data_bytes)
    }
}

/// What a first round sends of a slice.
#[derive(Default)]
struct Wanted {
    /// First page and count.
    runs: Vec<(u64, u64)>,
    /// Pages that are left out because the guest does not use them.
    free: u64,
    /// Pages that are left to the next round.
    postponed: u64,
}

/// Takes bits out; returns how many of them were there.
fn leave_out(words: &mut [u64], out: &[u64]) -> u64 {
    let mut count = 0;
    for (word, out) in words.iter_mut().zip(out) {
        count += u64::from((*word & out).count_ones());
        *word &= !out;
    }
    count
}

/// Clears bits of the last word that are beyond the slice.
fn mask_tail(words: &mut [u64], pages: u64) {
    let tail = pages % 64;
    if let (1.., Some(last)) = (tail, words.last_mut()) {
        *last &= (1 << tail) - 1;
    }
}

/// Appends a page or run, joined with the one before where they touch.
pub(crate) fn push(runs: &mut Vec<PageRun>, run: PageRun) {
    match runs.last_mut() {
        Some(last) if last.region == run.region && last.end() == run.first => {
            last.count += run.count;
        }
        _ => runs.push(run),
    }
}

/// What some slices have to say.
#[derive(Default)]
struct Content {
    data: Vec<PageRun>,
    zero: Vec<PageRun>,
    skipped_zero_pages: u64,
    /// Pages that the round need not look at again.
    done_pages: u64,
}

impl Content {
    fn data_bytes(&self) -> u64 {
        self.data.iter().map(PageRun::len_bytes).sum()
    }
}

/// Runs as they travel.
pub(crate) fn ranges<M: GuestMemoryMap>(memory: &M, runs: &[PageRun]) -> Vec<GpaRange> {
    runs.iter().map(|run| memory.layout().range_of(*run)).collect()
}
