// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The fake guest: threads that write pages and check them, and the shadow table that moves along.
//!
//! Owns what every page must hold. A page with counter 0 is all zeros; every other page holds its
//! number, its counter twice and a mark made of both.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::memory::FakeMemory;
use crate::layout::to_usize;
use crate::ram::GuestMemoryMap;

/// Index of the last word of a page.
const LAST: u64 = 511;

/// Rate of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// As fast as it can.
    Full,
    /// With a pause after this many pages.
    Paced(u32, Duration),
}

/// The expected contents of guest memory, wherever it is.
#[derive(Debug)]
pub struct Guest {
    /// By region and page: the counter that the page must hold.
    shadow: Vec<Vec<AtomicU64>>,
    seed: u64,
    /// Number of pages in which a writer found other contents.
    errors: AtomicU64,
    /// Number of page visits.
    visits: AtomicU64,
}

fn mark(region: usize, page: u64, counter: u64) -> u64 {
    (counter ^ page << 20 ^ (region as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A small generator of reproducible numbers.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

impl Guest {
    /// A guest whose memory is all zeros.
    pub fn new(memory: &FakeMemory, seed: u64) -> Arc<Self> {
        let table = |pages| (0..pages).map(|_| AtomicU64::new(0)).collect();
        let shadow = memory.layout().regions().iter().map(|info| table(info.pages())).collect();
        let (errors, visits) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { shadow, seed: seed | 1, errors, visits })
    }

    /// Visits a page: checks it, then writes it or, with `zero`, clears it.
    pub fn visit(&self, memory: &FakeMemory, region: usize, page: u64, zero: bool) {
        let cell = &self.shadow[region][to_usize(page)];
        let counter = cell.load(Ordering::SeqCst);
        if !holds(memory, region, page, counter) {
            self.errors.fetch_add(1, Ordering::SeqCst);
        }
        let counter = if zero { 0 } else { counter + 1 };
        let (number, mark) = match counter {
            0 => (0, 0),
            _ => (page, mark(region, page, counter)),
        };
        for (word, value) in [(0, number), (1, counter), (300, mark), (LAST, counter)] {
            memory.word(region, page, word).store(value, Ordering::Relaxed);
        }
        memory.mark_dirty(region, page);
        cell.store(counter, Ordering::SeqCst);
        self.visits.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes a share of the pages, `of` percent.
    pub fn fill(&self, memory: &FakeMemory, of: u64) {
        let mut random = self.seed;
        for (region, pages) in self.shadow.iter().enumerate() {
            for page in 0..pages.len() as u64 {
                if next(&mut random) % 100 < of {
                    self.visit(memory, region, page, false);
                }
            }
        }
    }

    /// Writes every page of a range of a region.
    pub fn fill_all(&self, memory: &FakeMemory, region: usize, pages: Range<u64>) {
        for page in pages {
            self.visit(memory, region, page, false);
        }
    }

    /// Checks every page; returns the wrong ones as (region, page).
    pub fn wrong_pages(&self, memory: &FakeMemory) -> Vec<(usize, u64)> {
        let mut wrong = Vec::new();
        for (region, pages) in self.shadow.iter().enumerate() {
            for (page, counter) in (0u64..).zip(pages) {
                if !holds(memory, region, page, counter.load(Ordering::SeqCst)) {
                    wrong.push((region, page));
                }
            }
        }
        wrong
    }

    /// Number of errors that writers found.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::SeqCst)
    }

    /// Number of visits so far.
    pub fn visits(&self) -> u64 {
        self.visits.load(Ordering::Relaxed)
    }
}

fn holds(memory: &FakeMemory, region: usize, page: u64, counter: u64) -> bool {
    let word = |word| memory.word(region, page, word).load(Ordering::Relaxed);
    if counter == 0 {
        return (0..=LAST).all(|index| word(index) == 0);
    }
    [word(0), word(1), word(300), word(LAST)]
        == [page, counter, mark(region, page, counter), counter]
}

/// Running writers, the vCPUs of the fake machine. Dropping this stops them.
#[derive(Debug)]
pub struct Writers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    /// Starts `count` threads; each visits its own pages at random, in `hot` percent of memory.
    pub fn start(
        guest: &Arc<Guest>,
        memory: &Arc<FakeMemory>,
        count: u64,
        hot: u64,
        pace: Pace,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..count)
            .map(|index| {
                let (guest, memory, stop) =
                    (Arc::clone(guest), Arc::clone(memory), Arc::clone(&stop));
                let work = move || write(&guest, &memory, &stop, (index, count), hot, pace);
                stoppable_thread::spawn(format!("vcpu{index}"), work)
            })
            .map(|thread| thread.expect("a thread for the fake guest"))
            .collect();
        Self { stop, threads }
    }

    /// Stops the writers between two visits.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.join().expect("a fake vCPU does not panic");
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.end();
    }
}

fn write(
    guest: &Guest,
    memory: &FakeMemory,
    stop: &AtomicBool,
    (index, count): (u64, u64),
    hot: u64,
    pace: Pace,
) {
    let mut random = guest.seed ^ (index + 1).wrapping_mul(0x1234_5678_9abc_def1);
    let mut visits = 0u32;
    while !stop.load(Ordering::SeqCst) {
        let number = next(&mut random);
        let region = to_usize(number >> 8) % guest.shadow.len();
        let pages = guest.shadow[region].len() as u64;
        let hot_pages = (pages * hot / 100).max(count);
        // A page has one writer, which makes its counter checkable.
        let page = (next(&mut random) % hot_pages) / count * count + index;
        if page < pages {
            memory.enter(index, region, page);
            guest.visit(memory, region, page, number.is_multiple_of(16));
        }
        visits = visits.wrapping_add(1);
        if let Pace::Paced(every, pause) = pace
            && visits.is_multiple_of(every)
        {
            std::thread::sleep(pause);
        }
    }
}
