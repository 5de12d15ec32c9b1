// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Background collapse of migrated or restored guest memory into huge pages.
//!
//! Memory arrives in small pages: making huge ones at that moment costs time in which the guest, or
//! a thread that waits for it, is stopped. This module makes them afterwards, for zones that are to have huge
//! pages and whose host does not make them by itself.
//!
//! Owns one thread, which works for a tenth of the time. Must never populate memory, must not be used
//! while contents are still to arrive, and must stop soon after it is asked to.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;

use crate::populate::THP_BYTES;
use crate::region::RamRegion;

/// How much longer the thread rests than it works. Collapsing interrupts every processor, including those of
/// the guest.
const REST_FACTOR: u32 = 9;
/// Failed blocks, without a success, after which collapsing counts as unsupported by this kernel.
const FAILURES_MAX: u64 = 64;
/// Most bytes that one call collapses. Each call waits for every processor, which takes longer than making a
/// huge page; and the guest waits for memory that is being copied.
const RUN_BYTES_MAX: u64 = 8 * THP_BYTES;

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

/// State of the blocks at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collapsed {
    /// Blocks that are huge pages now.
    pub huge: u64,
    /// Blocks that were not populated in full, and left as they were.
    pub sparse: u64,
    /// Blocks that the kernel did not collapse: pages in use for I/O, or no huge page available.
    pub refused: u64,
}

/// A thread that collapses memory into huge pages. Dropping it stops the thread and waits for it.
#[derive(Debug)]
pub struct Collapse(StoppableThread<Collapsed>);

impl Collapse {
    /// Starts with those of `regions` that want huge pages; `None` if none does.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(regions: &[Arc<RamRegion>]) -> io::Result<Option<Self>> {
        let wanting = |region: &&Arc<RamRegion>| region.wants_collapse();
        let regions: Vec<_> = regions.iter().filter(wanting).cloned().collect();
        if regions.is_empty() {
            return Ok(None);
        }
        let stop = Arc::new(Stop::default());
        let for_thread = Arc::clone(&stop);
        let body = move || collapse_all(&regions, &for_thread);
        Ok(Some(Self(StoppableThread::spawn("huge-pages", move || stop.tell(), body)?)))
    }

    /// Requests that it stops soon. Collapsed blocks stay huge.
    pub fn cancel(&self) {
        self.0.stop();
    }

    /// Waits for the end; returns the state of the blocks.
    pub fn wait(self) -> Collapsed {
        self.0.join()
    }
}

fn collapse_all(regions: &[Arc<RamRegion>], stop: &Stop) -> Collapsed {
    let mut blocks = Collapsed::default();
    for region in regions {
        let mut left = region.huge_blocks().peekable();
        while let Some(first) = left.next() {
            let began = Instant::now();
            if region.is_populated(&first) {
                let mut run = first;
                let fits = |run: &Range<u64>| run.end - run.start < RUN_BYTES_MAX;
                while let Some(next) = left.next_if(|next| fits(&run) && region.is_populated(next))
                {
                    run.end = next.end;
                }
                let count = (run.end - run.start) / THP_BYTES;
                match region.collapse(&run) {
                    Ok(true) => blocks.huge += count,
                    Ok(false) | Err(_) => blocks.refused += count,
                }
            } else {
                blocks.sparse += 1;
            }
            let hopeless = blocks.huge == 0 && blocks.refused >= FAILURES_MAX;
            if hopeless || stop.within(began.elapsed() * REST_FACTOR) {
                return blocks;
            }
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;
    use crate::{Backing, GuestRam, RamConfig, RamLayout, ZoneSpec};

    const MIB: u64 = 1 << 20;

    fn ram(thp: bool) -> GuestRam {
        let zone =
            ZoneSpec { thp, shared: true, backing: Backing::Memfd, ..ZoneSpec::new("t", 32 * MIB) };
        GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap()
    }

    #[test]
    fn full_blocks_become_huge_and_keep_what_they_hold_while_others_stay() {
        let ram = ram(true);
        let region = &ram.regions()[0];
        let data: Vec<u8> = (0_u32..6 << 18).flat_map(u32::to_le_bytes).collect();
        region.write_range(0, &data).unwrap();
        region.write_range(8 * MIB, &data[..1 << 20]).unwrap();
        let before = region.populated_runs(&(0..32 * MIB)).unwrap();
        let Some(collapse) = Collapse::start(ram.regions()).unwrap() else {
            test_skip::skip!("this host gives huge pages to shared memory by itself");
            return;
        };
        let blocks = collapse.wait();
        if blocks.huge == 0 {
            test_skip::skip!("this kernel does not collapse");
            return;
        }
        assert_eq!(blocks, Collapsed { huge: 3, sparse: 13, refused: 0 });
        assert_eq!(region.populated_runs(&(0..32 * MIB)).unwrap(), before);
        let mut found = vec![0; data.len()];
        region.io_slice(&(0..6 * MIB)).unwrap().copy_to(&mut found[..]);
        assert!(found == data);
    }

    #[test]
    fn memory_that_is_to_have_small_pages_is_left_alone() {
        assert!(Collapse::start(ram(false).regions()).unwrap().is_none());
    }

    #[test]
    fn it_ends_when_it_is_told_to() {
        let ram = ram(true);
        ram.regions()[0].fill(&(0..32 * MIB)).unwrap();
        let stop = Stop::default();
        stop.tell();
        let blocks = collapse_all(ram.regions(), &stop);
        let begun = blocks.huge + blocks.sparse + blocks.refused;
        assert_eq!(begun * THP_BYTES, RUN_BYTES_MAX, "all at once, or more than one run");
    }
}
