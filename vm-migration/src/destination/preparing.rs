// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Populates memory that has been announced but has not arrived.
//!
//! Owns the threads that populate it, so that receiving threads find pages (huge ones, where these are
//! wanted) and only copy. Huge pages cost far less than small ones on a host that has free ones, and far more
//! on one that has to compact memory or is itself a guest; so both are tried, and the cheaper is used.
//! Memory that has begun to arrive is left alone. A failure does not fail the migration: if there is no
//! memory, receiving will report it. It must stop before the guest may run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;

use super::unpopulated::Unpopulated;
use crate::layout::PageRun;
use crate::ram::GuestMemoryMap;

/// Most pages that one call populates: each call has a fixed cost, and the end of a migration waits for one.
const CHUNK_PAGES: u64 = 8192;

/// Most chunks that may be queued, 2 TiB: the peer's announcements are not trusted.
const CHUNKS_MAX: usize = 1 << 16;

/// Most threads: four clear memory faster than any link fills it.
const THREADS_MAX: usize = 4;

/// One thread per this many processors; on fewer there is none to spare besides those that receive.
const PROCESSORS_PER_THREAD: usize = 4;

/// The slower method is tried again after this many chunks, as hosts change.
const RETRY_AFTER: u32 = 64;

/// How pages are populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Huge,
    Small,
}

/// Cost of each method to a thread, in nanoseconds per page; 0 before it was tried.
#[derive(Debug, Default)]
struct Costs {
    huge: u64,
    small: u64,
    since_retry: u32,
}

impl Costs {
    fn way(&self) -> Method {
        let (cheaper, other) = if self.huge <= self.small {
            (Method::Huge, Method::Small)
        } else {
            (Method::Small, Method::Huge)
        };
        match (self.huge, self.small) {
            (0, _) => Method::Huge,
            (_, 0) => Method::Small,
            _ if self.since_retry >= RETRY_AFTER => other,
            _ => cheaper,
        }
    }

    fn took(&mut self, way: Method, pages: u64, time: Duration) {
        let now = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) / pages.max(1);
        let both_tried = self.huge > 0 && self.small > 0;
        self.since_retry =
            if both_tried && self.since_retry < RETRY_AFTER { self.since_retry + 1 } else { 0 };
        let cost = match way {
            Method::Huge => &mut self.huge,
            Method::Small => &mut self.small,
        };
        *cost = if *cost == 0 { now } else { *cost / 2 + now / 2 }.max(1);
    }
}

#[derive(Debug, Default)]
struct QueueState {
    chunks: VecDeque<PageRun>,
    ended: bool,
}

#[derive(Debug, Default)]
struct Queue {
    /// Locked briefly, once a chunk.
    todo: Mutex<QueueState>,
    changed: Condvar,
}

impl Queue {
    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        change(&mut self.todo.lock());
        self.changed.notify_all();
    }

    /// The next chunk, as soon as there is one; `None` at the end.
    fn next(&self) -> Option<PageRun> {
        let mut todo = self.todo.lock();
        let idle = |todo: &mut QueueState| todo.chunks.is_empty() && !todo.ended;
        self.changed.wait_while(&mut todo, idle);
        if todo.ended { None } else { todo.chunks.pop_front() }
    }
}

/// Threads that populate announced memory. Dropping this ends them after the chunks in progress.
#[derive(Debug)]
pub(super) struct Preparing {
    queue: Arc<Queue>,
    threads: Vec<StoppableThread>,
    threads_max: usize,
}

impl Preparing {
    /// With this number of threads, or as many as this host has to spare.
    pub(super) fn new(threads: Option<usize>) -> Self {
        let threads_max = threads.unwrap_or_else(spare_threads);
        Self { queue: Arc::default(), threads: Vec::new(), threads_max }
    }

    /// Queues runs that will be sent.
    pub(super) fn add<M: GuestMemoryMap>(
        &mut self,
        memory: &Arc<M>,
        fresh: &Arc<Unpopulated>,
        runs: &[PageRun],
    ) {
        if self.threads_max == 0 {
            return;
        }
        self.queue.change(|todo| {
            let room = CHUNKS_MAX.saturating_sub(todo.chunks.len());
            todo.chunks.extend(runs.iter().flat_map(chunks).take(room));
        });
        if !self.threads.is_empty() {
            return;
        }
        for _ in 0..self.threads_max {
            let (queue, memory, fresh) =
                (Arc::clone(&self.queue), Arc::clone(memory), Arc::clone(fresh));
            let stop = {
                let queue = Arc::clone(&queue);
                move || queue.change(|todo| todo.ended = true)
            };
            let body = move || prepare_all(&queue, &*memory, &fresh);
            let spawned = StoppableThread::spawn("mig-prepare", stop, body);
            match spawned {
                Ok(thread) => self.threads.push(thread),
                Err(error) => log::debug!("no thread to populate memory ahead: {error}"),
            }
        }
    }
}

/// Number of threads that this host has to spare.
pub(super) fn spare_threads() -> usize {
    (process_facts::usable_processors() / PROCESSORS_PER_THREAD).min(THREADS_MAX)
}

fn prepare_all<M: GuestMemoryMap>(queue: &Queue, memory: &M, fresh: &Unpopulated) {
    let mut costs = Costs::default();
    while let Some(run) = queue.next() {
        if !fresh.take(run) {
            continue;
        }
        let way = costs.way();
        let began = Instant::now();
        let prepared = match way {
            Method::Huge => memory.prepare(run),
            Method::Small => memory.populate(run),
        };
        if let Err(error) = prepared {
            log::debug!("memory is not populated ahead: {error}");
            return;
        }
        costs.took(way, run.count, began.elapsed());
    }
    log::debug!("prepared memory: {costs:?}");
}

/// Cuts a run into pieces that end at multiples of a chunk.
fn chunks(run: &PageRun) -> impl Iterator<Item = PageRun> + use<> {
    let PageRun { region, first, .. } = *run;
    let (mut at, end) = (first, run.end());
    std::iter::from_fn(move || {
        let stop = (at / CHUNK_PAGES + 1).saturating_mul(CHUNK_PAGES).min(end);
        let chunk = PageRun { region, first: at, count: stop.saturating_sub(at) };
        at = stop;
        (chunk.count > 0).then_some(chunk)
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use super::*;
    use crate::layout::{Backing, PAGE_BYTES};
    use crate::testing::FakeMemory;

    fn run(first: u64, count: u64) -> PageRun {
        PageRun { region: 0, first, count }
    }

    #[test]
    fn a_run_is_all_of_its_chunks() {
        let all = |first, count| chunks(&run(first, count)).collect::<Vec<_>>();
        assert_eq!(all(5, 10), [run(5, 10)]);
        let second = run(CHUNK_PAGES, CHUNK_PAGES);
        assert_eq!(
            all(CHUNK_PAGES - 1, CHUNK_PAGES + 3),
            [run(CHUNK_PAGES - 1, 1), second, run(2 * CHUNK_PAGES, 2)]
        );
        assert_eq!(all(7, 0), []);
    }

    #[test]
    fn what_was_announced_gets_pages_unless_it_has_begun_to_arrive() {
        let pages = 4 * CHUNK_PAGES;
        let memory = FakeMemory::new(&[(0, pages)], Backing::Shared, PAGE_BYTES).unwrap();
        let fresh = Arc::new(Unpopulated::new(memory.layout()));
        fresh.populate(&*memory, run(0, 64)).unwrap();
        let populated = || memory.populated_bytes(0).unwrap() / PAGE_BYTES;
        assert_eq!(populated(), 64);
        let mut preparing = Preparing::new(Some(2));
        preparing.add(&memory, &fresh, &[run(0, 512), run(CHUNK_PAGES, 2 * CHUNK_PAGES)]);
        let began = Instant::now();
        while populated() < 64 + 2 * CHUNK_PAGES {
            assert!(began.elapsed() < Duration::from_secs(30), "{} pages", populated());
            std::thread::yield_now();
        }
        drop(preparing);
        assert_eq!(populated(), 64 + 2 * CHUNK_PAGES);
        fresh.populate(&*memory, run(0, 512)).unwrap();
        assert_eq!(populated(), 512 + 2 * CHUNK_PAGES, "what was left alone is still fresh");
    }

    #[test]
    fn both_ways_are_tried_and_the_cheaper_one_is_used() {
        let host = |huge_us: u64, small_us: u64| {
            let mut costs = Costs::default();
            let mut ways = Vec::new();
            for _ in 0..2 + 2 * (RETRY_AFTER + 1) {
                let way = costs.way();
                ways.push(way);
                let us = if way == Method::Huge { huge_us } else { small_us };
                costs.took(way, CHUNK_PAGES, Duration::from_micros(us));
            }
            ways
        };
        for (ways, cheaper) in
            [(host(4_000, 20_000), Method::Huge), (host(65_000, 20_000), Method::Small)]
        {
            assert_eq!(ways[..2], [Method::Huge, Method::Small]);
            let others = ways[2..].iter().filter(|way| **way != cheaper).count();
            assert_eq!(others, 2, "{ways:?}");
            assert_eq!(ways[2], cheaper);
        }
    }

    #[test]
    fn it_ends_before_all_is_prepared() {
        let memory = FakeMemory::new(&[(0, 64)], Backing::Shared, PAGE_BYTES).unwrap();
        let fresh = Arc::new(Unpopulated::new(memory.layout()));
        let mut preparing = Preparing::new(Some(1));
        preparing.queue.change(|todo| todo.ended = true);
        preparing.add(&memory, &fresh, &[run(0, 64)]);
        drop(preparing);
        assert_eq!(memory.populated_bytes(0).unwrap(), 0);
    }
}
