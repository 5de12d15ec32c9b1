// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Precopy: rounds over all memory while the guest runs.
//!
//! Owns what is sent and when its dirty bits are cleared. Memory is cut into slices that the
//! connections claim from one counter, so a slow connection does not hold up the others. A slice's
//! dirty bits are cleared and tracking re-armed **just before** that slice is copied: a page that
//! is dirtied while it waits for its turn goes out once, and one dirtied after its copy goes out
//! again in the next round. Holes are never read, so they stay holes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::convergence::{Convergence, Decision, rate, time_for};
use super::negotiate::{Links, Terms};
use super::{Context, Setback, check_cancel};
use crate::bitmap::{ClaimMap, word_runs};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::{GpaRange, Layout, PAGE_BYTES, PageRun, to_usize};
use crate::options::MemoryMode;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::Part;
use crate::vm::{DirtyLog, SourceVm};

/// Length of a slice: its dirty bits are cleared by one call and its contents are one message.
/// At a gigabyte a second a page waits 4 ms between the two; KVM clears 1,024 bits in
/// microseconds.
const SLICE_PAGES: u64 = 1024;

/// Messages on one connection that may wait for their answers: enough to never let the link idle,
/// few enough that a refusal is noticed soon.
const UNANSWERED_MAX: usize = 4;

/// Least that must be sent for a low rate to mean anything.
const RATE_BYTES_MIN: u64 = 1 << 20;

/// Both sides agree, the destination has built the machine; the guest runs here.
pub(crate) struct Negotiated<V: SourceVm> {
    pub vm: V,
    pub memory: Arc<V::Memory>,
    pub control: Channel,
    pub links: Links,
}

/// Everything that can be done while the guest runs is done.
pub(crate) struct Copied<V: SourceVm> {
    pub vm: V,
    pub memory: Arc<V::Memory>,
    pub control: Channel,
    pub links: Links,
    pub log: V::Log,
    pub cargo: Cargo,
}

/// How the rest of memory goes.
pub(crate) enum Cargo {
    /// What is still dirty is sent with the guest stopped.
    Rest,
    /// These pages had been populated when the scan passed; together with what was dirtied since
    /// then they are served after the handover.
    Later(Vec<ClaimMap>),
}

impl<V: SourceVm> Negotiated<V> {
    /// Sends memory until stopping costs little enough; in postcopy, only finds out which pages
    /// there are.
    pub(crate) fn precopy(mut self, context: Context<'_>) -> Result<Copied<V>, Setback<V>> {
        let result = self.start_log().and_then(|log| {
            let cargo = match context.options.memory_mode {
                MemoryMode::Precopy => self.rounds(&log, context)?,
                MemoryMode::Postcopy => Cargo::Later(scan(&*self.memory, &log)?),
            };
            Ok((log, cargo))
        });
        let Self { vm, memory, control, links } = self;
        match result {
            Ok((log, cargo)) => Ok(Copied { vm, memory, control, links, log, cargo }),
            Err(failure) => Err(Setback::Running(vm, Some(control), failure)),
        }
    }

    fn start_log(&mut self) -> Result<V::Log, Failure> {
        self.vm.start_dirty_log().map_err(Cause::Vm).step("starting the dirty log")
    }

    fn rounds(&mut self, log: &V::Log, context: Context<'_>) -> Result<Cargo, Failure> {
        let options = context.options;
        let counters = &context.progress.counters;
        let mut policy =
            Convergence::new(options.downtime, options.timeout, options.timeout_strategy);
        let start = Instant::now();
        let mut link_rate = 0;
        let total_bytes = self.memory.layout().pages() * PAGE_BYTES;
        let mut remaining_bytes = total_bytes;
        log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
        for number in 1u32.. {
            check_cancel(context.cancel, "sending memory")?;
            context.progress.begin_round(number, remaining_bytes);
            let began = Instant::now();
            let kind = if number == 1 { RoundKind::First } else { RoundKind::Dirty };
            let sent = self.send_round(log, kind, context)?;
            let took = began.elapsed();
            // A short round says less than the link can do.
            let measured = rate(sent, took);
            link_rate = if sent >= RATE_BYTES_MIN { measured } else { link_rate.max(measured) };
            // What is dirty now decides, and is what the next round sends.
            let dirty = log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
            remaining_bytes = dirty * PAGE_BYTES;
            let expected = time_for(remaining_bytes, link_rate);
            let decision = policy.decide(remaining_bytes, expected, start.elapsed());
            counters.link_bytes_per_s.store(link_rate, Ordering::Relaxed);
            counters.dirty_bytes_per_s.store(rate(remaining_bytes, took), Ordering::Relaxed);
            let expected_us = u64::try_from(expected.as_micros()).unwrap_or(u64::MAX);
            counters.expected_downtime_us.store(expected_us, Ordering::Relaxed);
            counters.stalled_rounds.store(policy.stalled_rounds(), Ordering::Relaxed);
            match decision {
                Decision::Round => {}
                Decision::Stop => break,
                Decision::GiveUp => {
                    return Err(not_converging(
                        number,
                        start.elapsed(),
                        expected,
                        options.downtime,
                    ))
                    .step("waiting for the guest to converge");
                }
            }
        }
        Ok(Cargo::Rest)
    }

    fn send_round(
        &mut self,
        log: &V::Log,
        kind: RoundKind,
        context: Context<'_>,
    ) -> Result<u64, Failure> {
        send_round(&*self.memory, log, kind, &mut self.control, &mut self.links, context)
    }
}

fn not_converging(rounds: u32, elapsed: Duration, expected: Duration, downtime: Duration) -> Cause {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Cause::NotConverging {
        rounds,
        elapsed_s: elapsed.as_secs(),
        expected_ms: ms(expected),
        downtime_ms: ms(downtime),
    }
}

/// Which pages of a slice go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundKind {
    /// All that were ever populated and are not zero: the destination's memory is zero already.
    First,
    /// All that were dirtied; one that became zero must become so over there.
    Dirty,
}

#[derive(Clone, Copy, Debug)]
struct Slice {
    region: usize,
    first: u64,
    pages: u64,
}

fn slices(layout: &Layout) -> Vec<Slice> {
    let mut all = Vec::new();
    for (region, info) in layout.regions().iter().enumerate() {
        for first in (0..info.pages()).step_by(to_usize(SLICE_PAGES)) {
            all.push(Slice { region, first, pages: SLICE_PAGES.min(info.pages() - first) });
        }
    }
    all
}

/// One pass over memory; returns the bytes of contents sent. All are acknowledged at the end.
pub(crate) fn send_round<M: GuestMemoryMap>(
    memory: &M,
    log: &impl DirtyLog,
    kind: RoundKind,
    control: &mut Channel,
    links: &mut Links,
    context: Context<'_>,
) -> Result<u64, Failure> {
    let round = Round {
        memory,
        log,
        kind,
        zero_flags: links.terms.zero_pages(),
        slices: slices(memory.layout()),
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        context,
    };
    if links.memory.is_empty() {
        return round.work(control);
    }
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for channel in std::iter::once(control).chain(&mut links.memory) {
            let spawned = std::thread::Builder::new()
                .name("mig-send".into())
                .spawn_scoped(scope, || round.work(channel));
            match spawned {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    round.failed.store(true, Ordering::Relaxed);
                    return Err(Cause::Resource(error)).step("starting a sender thread");
                }
            }
        }
        let mut sent = 0;
        let mut first_failure = None;
        for worker in workers {
            match worker.join().unwrap_or(Err(Failure::new("sending memory", Cause::Panicked))) {
                Ok(bytes) => sent += bytes,
                Err(failure) => first_failure = first_failure.or(Some(failure)),
            }
        }
        first_failure.map_or(Ok(sent), Err)
    })
}

/// What the senders of one round share.
struct Round<'a, M, L> {
    memory: &'a M,
    log: &'a L,
    kind: RoundKind,
    zero_flags: bool,
    slices: Vec<Slice>,
    /// The next slice that nobody has claimed.
    next: AtomicUsize,
    /// One of the senders failed; the others stop soon.
    failed: AtomicBool,
    context: Context<'a>,
}

impl<M: GuestMemoryMap, L: DirtyLog> Round<'_, M, L> {
    /// Claims and sends slices until none is left.
    fn work(&self, channel: &mut Channel) -> Result<u64, Failure> {
        let result = self.send_slices(channel);
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        result
    }

    fn send_slices(&self, channel: &mut Channel) -> Result<u64, Failure> {
        let mut sent = 0;
        let mut unanswered = 0;
        let mut words = vec![0; to_usize(SLICE_PAGES / 64)];
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(slice) = self.slices.get(index) else { break };
            if self.failed.load(Ordering::Relaxed) {
                break;
            }
            // A fast link never waits, and only waits look at the cancel.
            check_cancel(self.context.cancel, "sending memory")?;
            let content = self.content_of(*slice, &mut words)?;
            for (message, data) in content.messages(self.memory) {
                if unanswered == UNANSWERED_MAX {
                    channel.answer_to_memory()?;
                    unanswered -= 1;
                }
                channel.send_memory(self.memory, &message, &data)?;
                unanswered += 1;
            }
            sent += content.data_bytes();
            self.account(*slice, &content);
        }
        for _ in 0..unanswered {
            channel.answer_to_memory()?;
        }
        Ok(sent)
    }

    /// Clears the slice's dirty bits, and only then finds out what its pages hold.
    fn content_of(&self, slice: Slice, words: &mut [u64]) -> Result<Content, Failure> {
        let pages = slice.first..slice.first + slice.pages;
        let words = &mut words[..to_usize(slice.pages.div_ceil(64))];
        self.log
            .collect_and_clear(slice.region, pages.clone(), words)
            .map_err(Cause::Vm)
            .step("reading the dirty log")?;
        let runs: Vec<(u64, u64)> = match self.kind {
            RoundKind::First => self
                .memory
                .populated_runs(slice.region, pages)
                .map_err(Cause::Memory)
                .step("finding populated memory")?
                .into_iter()
                .map(|run| (run.start, run.end - run.start))
                .collect(),
            RoundKind::Dirty => {
                mask_tail(words, slice.pages);
                word_runs(words, slice.first)
            }
        };
        let mut content = Content::default();
        for (first, count) in runs {
            content.dirty_pages += count;
            for page in first..first + count {
                let run = PageRun { region: slice.region, first: page, count: 1 };
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
        Ok(content)
    }

    fn account(&self, slice: Slice, content: &Content) {
        let counters = &self.context.progress.counters;
        counters.memory_bytes_sent.fetch_add(content.data_bytes(), Ordering::Relaxed);
        let zero: u64 = content.zero.iter().map(|run| run.count).sum();
        counters.zero_pages.fetch_add(zero + content.skipped_zero_pages, Ordering::Relaxed);
        let done_pages = match self.kind {
            RoundKind::First => slice.pages,
            RoundKind::Dirty => content.dirty_pages,
        };
        self.context.progress.sent_down(done_pages * PAGE_BYTES);
    }
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

/// What a slice has to say.
#[derive(Default)]
struct Content {
    data: Vec<PageRun>,
    zero: Vec<PageRun>,
    skipped_zero_pages: u64,
    dirty_pages: u64,
}

impl Content {
    fn data_bytes(&self) -> u64 {
        self.data.iter().map(PageRun::len_bytes).sum()
    }

    /// The messages, each with the runs whose contents follow it.
    fn messages<M: GuestMemoryMap>(&self, memory: &M) -> Vec<(Message, Vec<PageRun>)> {
        let mut all = Vec::new();
        if !self.data.is_empty() {
            all.push((Message::Memory(ranges(memory, &self.data)), self.data.clone()));
        }
        if !self.zero.is_empty() {
            all.push((Message::ZeroPages(ranges(memory, &self.zero)), Vec::new()));
        }
        all
    }
}

/// Runs as they travel.
pub(crate) fn ranges<M: GuestMemoryMap>(memory: &M, runs: &[PageRun]) -> Vec<GpaRange> {
    runs.iter().map(|run| memory.layout().range_of(*run)).collect()
}

impl Channel {
    fn answer_to_memory(&mut self) -> Result<(), Failure> {
        let limit = self.connection.stall_timeout();
        self.answer(limit).map(drop).step("waiting for memory to be acknowledged")
    }

    fn send_memory<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        message: &Message,
        data: &[PageRun],
    ) -> Result<(), Failure> {
        let head = message.encode();
        let mut parts = Vec::with_capacity(1 + data.len());
        parts.push(Part::Bytes(&head));
        parts.extend(data.iter().map(|run| Part::Guest(ram::slice(memory, *run))));
        let sent = self.connection.send_parts(&parts);
        sent.map_err(|error| self.explain(error)).step("sending memory")
    }
}

/// Notes which pages there are, for postcopy. The dirty bits are cleared first, so that a page
/// that the scan misses because it is populated only later is found dirty at the stop.
fn scan<M: GuestMemoryMap>(memory: &M, log: &impl DirtyLog) -> Result<Vec<ClaimMap>, Failure> {
    log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
    let layout = memory.layout();
    let maps: Vec<ClaimMap> =
        layout.regions().iter().map(|info| ClaimMap::new(info.pages())).collect();
    let mut words = vec![0; to_usize(SLICE_PAGES / 64)];
    for slice in slices(layout) {
        let pages = slice.first..slice.first + slice.pages;
        let words = &mut words[..to_usize(slice.pages.div_ceil(64))];
        log.collect_and_clear(slice.region, pages.clone(), words)
            .map_err(Cause::Vm)
            .step("reading the dirty log")?;
        let runs = memory
            .populated_runs(slice.region, pages)
            .map_err(Cause::Memory)
            .step("finding populated memory")?;
        for run in runs {
            maps[slice.region].set_run(run.start, run.end - run.start);
        }
    }
    Ok(maps)
}

impl Links {
    /// The unit in which pages of a region travel, in pages of 4 KiB: the destination's host page,
    /// because it can only show whole ones.
    pub(crate) fn unit_pages(&self, region: usize) -> u64 {
        match &self.terms {
            Terms::Plain => 1,
            Terms::Negotiated { layout, .. } => {
                layout.regions()[region].host_page_bytes / PAGE_BYTES
            }
        }
    }
}
