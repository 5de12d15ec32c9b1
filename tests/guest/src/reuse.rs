// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The balloon workloads: a vCPU releases its pages, takes them again, and has them zeroed as a
//! kernel would that allocates them; pages that the device said come back zeroed it leaves alone.
//!
//! Owns the times of it. What every page holds is checked before it is used again: a device that
//! says too much is found out. Must never leave a page released when it returns.

use crate::abi::{PAGE_BYTES, vcpu, workload};
use crate::balloon::{Balloon, PAGES_MAX, RANGES_MAX, notes};
use crate::clock::Clock;
use crate::layout::{Layout, Own};
use crate::mem::{self, Block};

/// Linux reports blocks of this size.
const REPORT_PAGES: u64 = 512;
const REPORT_BYTES: u32 = 2 << 20;

/// The pages that are released, of a guest with one vCPU: test pages by number.
pub struct Reuse<'a> {
    /// Where pages are.
    pub layout: &'a Layout,
    /// Which.
    pub own: Own,
    /// The vCPU's block.
    pub block: Block,
}

impl Reuse<'_> {
    /// Gives all pages up in the way that the workload says, and takes them again: all of them are
    /// the guest's when this returns, and are zero as far as the device told the truth.
    pub fn round(&self, how: u64, balloon: &mut Balloon, clock: &mut Clock) {
        notes::clear();
        let start = clock.tick();
        if how == workload::BALLOON_REPORT {
            self.report(balloon, clock);
        } else {
            self.inflate(balloon, clock);
        }
        let given = clock.tick();
        self.block.add(vcpu::BALLOON_GIVE_TICKS, given - start);
        if how == workload::BALLOON_INFLATE {
            self.deflate(balloon, clock);
        }
        let back = clock.tick();
        self.block.add(vcpu::BALLOON_BACK_TICKS, back - given);
        self.take(clock);
        let taken = clock.tick();
        self.block.add(vcpu::BALLOON_TAKE_TICKS, taken - back);
    }

    /// Pages are there and zero afterwards.
    fn take(&self, clock: &mut Clock) {
        for page in self.pages() {
            let gpa = self.layout.gpa(page);
            if notes::has(page) {
                // The first use of it, of which the rest is the caller's.
                mem::store(gpa, 0);
            } else {
                mem::clear_page(gpa);
            }
            if page.is_multiple_of(REPORT_PAGES) {
                clock.tick();
            }
        }
    }

    fn pages(&self) -> core::ops::Range<u64> {
        self.own.first..self.own.first + self.own.count
    }

    fn report(&self, balloon: &mut Balloon, clock: &mut Clock) {
        let (mut blocks, mut gpas) = ([0; RANGES_MAX], [0; RANGES_MAX]);
        let (mut filled, mut at) = (0, self.own.first);
        while at < self.pages().end {
            let gpa = self.layout.gpa(at);
            let last = at + REPORT_PAGES - 1;
            let whole = gpa.is_multiple_of(u64::from(REPORT_BYTES))
                && last < self.pages().end
                && self.layout.gpa(last) == gpa + (REPORT_PAGES - 1) * PAGE_BYTES;
            if let (true, Some(block), Some(place)) =
                (whole, blocks.get_mut(filled), gpas.get_mut(filled))
            {
                (*block, *place) = (at, gpa);
                filled += 1;
            }
            at += if whole { REPORT_PAGES } else { 1 };
            if filled == RANGES_MAX || (filled > 0 && at >= self.pages().end) {
                let gpas = gpas.get(..filled).unwrap_or_default();
                let zeroed = balloon.report(gpas, REPORT_BYTES, || _ = clock.tick());
                self.block.add(vcpu::BALLOON_GIVEN, filled as u64 * REPORT_PAGES);
                for block in blocks.iter().take(zeroed.min(filled)) {
                    (*block..*block + REPORT_PAGES).for_each(notes::note);
                    self.block.add(vcpu::BALLOON_TOLD, REPORT_PAGES);
                }
                filled = 0;
            }
        }
    }

    fn in_requests(&self, mut request: impl FnMut(u64, u64)) {
        let mut at = self.own.first;
        while at < self.pages().end {
            let count = PAGES_MAX.min(self.pages().end - at);
            request(at, count);
            at += count;
        }
    }

    fn number(&self, page: u64) -> u64 {
        self.layout.gpa(page) / PAGE_BYTES
    }

    fn inflate(&self, balloon: &mut Balloon, clock: &mut Clock) {
        self.in_requests(|first, count| {
            balloon.inflate(count, |index| self.number(first + index), || _ = clock.tick());
            self.block.add(vcpu::BALLOON_GIVEN, count);
            for index in (0..count).filter(|index| Balloon::told(*index)) {
                notes::note(first + index);
                self.block.add(vcpu::BALLOON_TOLD, 1);
            }
        });
    }

    fn deflate(&self, balloon: &mut Balloon, clock: &mut Clock) {
        self.in_requests(|first, count| {
            balloon.deflate(count, |index| self.number(first + index), || _ = clock.tick());
        });
    }
}
