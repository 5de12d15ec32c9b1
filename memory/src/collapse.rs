// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Background collapse of migrated or restored guest memory into huge pages.
//!
//! Memory arrives in small pages: making huge ones at that moment costs time in which the guest, or
//! a thread that waits for it, is stopped. This module makes them afterwards, for zones that are to have huge
//! pages and whose memory did not come in them.
//!
//! Owns the threads and the order of the blocks. The threads neither rest nor yield: a guest that uses all of its memory
//! meets the block that a thread has locked again and again, and sleeps until that is copied, so that it loses about the
//! time that all takes (measured: several times as much with rests, or at a lower priority). Must never populate memory, must not be used
//! while contents are still to arrive, and must stop soon after it is asked to.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use process_facts::usable_processors;
use stoppable_thread::StoppableThread;

use crate::populate::THP_BYTES;
use crate::processors::threads_beside_guest;
use crate::region::{Collapsing, RamRegion};

/// Blocks of a region that cannot be collapsed, or that are in use, without a single one that can, after which the others
/// of the region are left alone.
const IMPOSSIBLE_MAX: u64 = 8;
const REFUSED_MAX: u64 = 64;
/// Runs after each other for which there is no huge page. Each makes the kernel look for one by moving memory.
const SHORTAGES_MAX: u32 = 8;
/// How often a block in use is tried again, and how long after.
const RETRIES: u32 = 3;
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Most bytes that one call collapses. Each call waits for every processor, which takes longer than making a
/// huge page; and pages that are not mapped meanwhile fault.
const RUN_BYTES_MAX: u64 = 8 * THP_BYTES;
/// A run that took longer, as the kernel has to make room for huge pages, is followed by one of half its length: a
/// migration that begins waits for the end of a run, as does a range that is to be returned to the host.
const LONG_RUN: Duration = Duration::from_millis(20);
/// What a thread takes from the others at a time.
const STRIPE_BYTES: u64 = 32 * THP_BYTES;

#[derive(Debug, Default)]
struct Stop {
    /// Locked briefly.
    told: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn tell(&self) {
        *self.told.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for `time`; returns true as soon as a stop is requested.
    fn within(&self, time: Duration) -> bool {
        let mut told = self.told.lock();
        self.changed.wait_while_for(&mut told, |told| !*told, time);
        *told
    }
}

/// Counts of the blocks that were looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collapsed {
    /// Blocks that are huge pages now.
    pub huge: u64,
    /// Blocks that were not populated in full, and left as they were.
    pub sparse: u64,
    /// Blocks that the kernel did not collapse: pages in use for I/O, or no huge page available.
    pub refused: u64,
}

/// Counts of the blocks of one region.
#[derive(Debug, Default)]
struct Tally {
    huge: AtomicU64,
    sparse: AtomicU64,
    refused: AtomicU64,
    /// Of the refused, those that no other try can help.
    impossible: AtomicU64,
}

impl Tally {
    fn so_far(&self) -> Collapsed {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Collapsed { huge: of(&self.huge), sparse: of(&self.sparse), refused: of(&self.refused) }
    }

    fn add(&self, blocks: u64, result: Collapsing) {
        if result == Collapsing::Done {
            self.huge.fetch_add(blocks, Ordering::Relaxed);
            return;
        }
        self.refused.fetch_add(blocks, Ordering::Relaxed);
        if result == Collapsing::Impossible {
            self.impossible.fetch_add(blocks, Ordering::Relaxed);
        }
    }

    /// Whether the rest of the region will not be collapsed either.
    fn is_hopeless(&self) -> bool {
        let Collapsed { huge, refused, .. } = self.so_far();
        let impossible = self.impossible.load(Ordering::Relaxed);
        huge == 0 && (impossible >= IMPOSSIBLE_MAX || refused >= REFUSED_MAX)
    }
}

/// What the threads share.
#[derive(Debug)]
struct Work {
    regions: Vec<(Arc<RamRegion>, Tally)>,
    /// Region and bytes of it.
    stripes: Vec<(usize, Range<u64>)>,
    /// The first stripe that no thread has taken.
    next: AtomicUsize,
    /// Locked while a run is unmapped. KVM has vCPUs wait for all ranges that are being unmapped, and what lies between.
    unmapping: Mutex<()>,
    threads: usize,
    began: Instant,
    /// Threads that have not ended; the last one reports.
    running: AtomicUsize,
    stop: Stop,
    /// Told when no thread runs any more.
    end: Stop,
}

/// A block to be tried again: the index of its region, and its bytes.
type Block = (usize, Range<u64>);

impl Work {
    fn new(regions: Vec<Arc<RamRegion>>, threads: usize) -> Self {
        let mut stripes = Vec::new();
        for (index, region) in regions.iter().enumerate() {
            let blocks = region.huge_blocks();
            let mut at = blocks.start;
            while at < blocks.end {
                let end = blocks.end.min(at.saturating_add(STRIPE_BYTES));
                stripes.push((index, at..end));
                at = end;
            }
        }
        let threads = threads.min(stripes.len()).max(1);
        Self {
            regions: regions.into_iter().map(|region| (region, Tally::default())).collect(),
            stripes,
            next: AtomicUsize::new(0),
            unmapping: Mutex::new(()),
            threads,
            began: Instant::now(),
            running: AtomicUsize::new(threads),
            stop: Stop::default(),
            end: Stop::default(),
        }
    }

    fn so_far(&self) -> Collapsed {
        self.regions.iter().fold(Collapsed::default(), |all, (_, tally)| {
            let Collapsed { huge, sparse, refused } = tally.so_far();
            Collapsed {
                huge: all.huge + huge,
                sparse: all.sparse + sparse,
                refused: all.refused + refused,
            }
        })
    }

    /// What each thread does.
    fn collapse_all(&self) {
        if let Some(again) = self.first_pass() {
            self.later_passes(again);
        }
        self.leave();
    }

    /// A thread has ended, or could not be started.
    fn leave(&self) {
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            let Collapsed { huge, sparse, refused } = self.so_far();
            let took_ms = self.began.elapsed().as_millis();
            log::info!(
                "guest memory was collapsed into {huge} huge pages in {took_ms} ms by {} threads; \
                 {sparse} blocks were not populated in full, and {refused} were refused",
                self.threads
            );
            self.end.tell();
        }
    }

    /// Takes stripes until none is left; returns the blocks in use. `None` when it was to stop.
    fn first_pass(&self) -> Option<Vec<Block>> {
        let mut again = Vec::new();
        let (mut shortages, mut run_bytes) = (0, RUN_BYTES_MAX);
        loop {
            let stripe = self.stripes.get(self.next.fetch_add(1, Ordering::Relaxed));
            let Some((index, stripe)) = stripe else { return Some(again) };
            let Some((region, tally)) = self.regions.get(*index) else { continue };
            let mut at = stripe.start;
            while at < stripe.end && !tally.is_hopeless() {
                let wanted = at..stripe.end.min(at + run_bytes);
                // What is returned to the host meanwhile would come back as zeros.
                let hold = region.hold(wanted.clone());
                let run = populated_run(region, wanted);
                if run.is_empty() {
                    tally.sparse.fetch_add(1, Ordering::Relaxed);
                    at += THP_BYTES;
                } else {
                    at = run.end;
                    self.unmap(region, &run);
                    let began = Instant::now();
                    let is_short = self.collapse_run(*index, &run, &mut again);
                    shortages = if is_short { shortages + 1 } else { 0 };
                    run_bytes = if began.elapsed() > LONG_RUN {
                        (run_bytes / 2).max(THP_BYTES)
                    } else {
                        (run_bytes * 2).min(RUN_BYTES_MAX)
                    };
                }
                drop(hold);
                if shortages >= SHORTAGES_MAX {
                    // The host has none for the other threads either.
                    self.next.store(self.stripes.len(), Ordering::Relaxed);
                    return None;
                }
                if self.stop.within(Duration::ZERO) {
                    return None;
                }
            }
        }
    }

    fn unmap(&self, region: &RamRegion, run: &Range<u64>) {
        let _alone = self.unmapping.lock();
        region.unmap(run);
    }

    /// Collapses a run, of which all is populated, and adds its blocks in use to `again`. Returns whether there was no
    /// huge page.
    fn collapse_run(&self, index: usize, run: &Range<u64>, again: &mut Vec<Block>) -> bool {
        let Some((region, tally)) = self.regions.get(index) else { return false };
        let whole = region.collapse(run);
        if whole == Collapsing::Done {
            tally.add((run.end - run.start) / THP_BYTES, whole);
            return false;
        }
        // The error is that of one block. Those that are huge by now take no time.
        for block in blocks_of(run) {
            let result = region.collapse(&block);
            tally.add(1, result);
            match result {
                Collapsing::InUse => again.push((index, block)),
                Collapsing::NoMemory => return true,
                Collapsing::Done | Collapsing::Impossible => {}
            }
        }
        false
    }

    /// Tries blocks in use again.
    fn later_passes(&self, mut left: Vec<Block>) {
        for _ in 0..RETRIES {
            if left.is_empty() || self.stop.within(RETRY_AFTER) {
                return;
            }
            let mut still = Vec::new();
            for (index, block) in left {
                let Some((region, tally)) = self.regions.get(index) else { continue };
                if tally.is_hopeless() {
                    continue;
                }
                let hold = region.hold(block.clone());
                let result =
                    if region.is_populated(&block) { Some(region.collapse(&block)) } else { None };
                drop(hold);
                let counted = match result {
                    Some(Collapsing::Done) => Some(&tally.huge),
                    None => Some(&tally.sparse),
                    Some(Collapsing::InUse) => {
                        still.push((index, block));
                        None
                    }
                    Some(Collapsing::NoMemory) => return,
                    Some(Collapsing::Impossible) => None,
                };
                if let Some(counted) = counted {
                    tally.refused.fetch_sub(1, Ordering::Relaxed);
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                if self.stop.within(Duration::ZERO) {
                    return;
                }
            }
            left = still;
        }
    }
}

fn blocks_of(run: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let starts = run.clone().step_by(crate::to_usize(THP_BYTES));
    starts.map(|start| start..start + THP_BYTES)
}

/// The blocks from the start of `range` that are populated in full.
fn populated_run(region: &RamRegion, range: Range<u64>) -> Range<u64> {
    let mut end = range.start;
    while end < range.end && region.is_populated(&(end..end + THP_BYTES)) {
        end += THP_BYTES;
    }
    range.start..end
}

/// The end of a collapse, for those that would rather work after it.
#[derive(Debug)]
pub struct CollapseEnd(Arc<Work>);

impl CollapseEnd {
    /// Waits for `time` at most; returns whether the threads have ended, with all of their work or because they
    /// were stopped.
    pub fn within(&self, time: Duration) -> bool {
        self.0.end.within(time)
    }

    /// Bytes of the memory that is looked through.
    pub fn len_bytes(&self) -> u64 {
        self.0.stripes.iter().map(|(_, stripe)| stripe.end - stripe.start).sum()
    }
}

/// Threads that collapse memory into huge pages. Dropping it stops them and waits for them.
#[derive(Debug)]
pub struct Collapse {
    threads: Vec<StoppableThread>,
    work: Arc<Work>,
}

impl Collapse {
    /// Starts with those of `regions` that want huge pages, beside a guest with so many vCPUs; `None` if
    /// none does.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(regions: &[Arc<RamRegion>], vcpus: u32) -> io::Result<Option<Self>> {
        let wanting = |region: &&Arc<RamRegion>| region.wants_collapse();
        let regions: Vec<_> = regions.iter().filter(wanting).cloned().collect();
        if regions.is_empty() {
            return Ok(None);
        }
        let processors = usable_processors();
        let work = Arc::new(Work::new(regions, threads_beside_guest(vcpus, processors)));
        let mut threads = Vec::new();
        for _ in 0..work.threads {
            let (to_stop, to_do) = (Arc::clone(&work), Arc::clone(&work));
            let body = move || to_do.collapse_all();
            match StoppableThread::spawn("huge-pages", move || to_stop.stop.tell(), body) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => return Err(error),
                // Those that run do all of it.
                Err(_) => work.leave(),
            }
        }
        Ok(Some(Self { threads, work }))
    }

    /// Its end.
    pub fn end(&self) -> CollapseEnd {
        CollapseEnd(Arc::clone(&self.work))
    }

    /// Waits for the end; returns the state of the blocks.
    pub fn wait(self) -> Collapsed {
        for thread in self.threads {
            thread.join();
        }
        self.work.so_far()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "collapse_tests.rs"]
mod tests;
