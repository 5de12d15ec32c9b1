// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks every word of every test page from outside, against the guest's shadow table.
//!
//! The guest must stand still: its VMM paused, or the guest held. A page that was being written
//! when it stopped is left out, one per vCPU at most. The shadow table itself is checked against
//! the sum that each vCPU keeps, so that a stale table together with stale pages shows as well.

use std::time::Instant;

use serde::Serialize;

use crate::abi::{self, PAGE_BYTES, control};
use crate::guest::{Guest, GuestError};
use crate::layout::Range;
use crate::memory::{MemoryError, Words};
use crate::pattern::Pattern;
use crate::status::VcpuStatus;

/// Pages read at a time.
const CHUNK_PAGES: usize = 256;
/// 64-bit words of a page.
const PAGE_WORDS: usize = 512;
/// Errors kept with their details.
const MAX_RECORDS: usize = 64;

/// What is wrong with a page.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum PageErrorKind {
    /// It has contents, and there are none.
    Missing,
    /// It is an earlier version of itself.
    Stale,
    /// It is a later version than its counter says.
    Newer,
    /// It belongs elsewhere.
    Misplaced,
    /// Its contents are no version of any page.
    Corrupt,
    /// It never was written and is not zero.
    NotZero,
}

/// A page that is not what it should be.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct PageError {
    /// Its number.
    pub page: u64,
    /// Its address.
    pub gpa: u64,
    /// What is wrong.
    pub kind: PageErrorKind,
    /// The counter it should have.
    pub counter: u64,
    /// The counter in its header.
    pub found_counter: u64,
    /// First wrong word.
    pub word: u64,
    /// What that should be.
    pub expected: u64,
    /// What it is.
    pub found: u64,
}

/// What a complete check came to.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Pages checked.
    pub pages: u64,
    /// Of these, how many the guest has written.
    pub written: u64,
    /// Of these, how many are resident.
    pub resident: u64,
    /// Pages left out because they were being written.
    pub in_flight: u64,
    /// Pages that are wrong.
    pub errors: u64,
    /// The first of them.
    pub records: Vec<PageError>,
    /// vCPUs whose counters do not add up: their part of the shadow table is wrong.
    pub wrong_sums: Vec<u64>,
    /// The guest moved meanwhile, so the result says nothing.
    pub moved: bool,
    /// How long it took.
    pub elapsed_ms: u64,
}

impl VerifyReport {
    /// Everything was checked and is right.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.wrong_sums.is_empty() && !self.moved
    }

    fn add(&mut self, other: Self) {
        self.pages += other.pages;
        self.written += other.written;
        self.resident += other.resident;
        self.in_flight += other.in_flight;
        self.errors += other.errors;
        self.records.extend(other.records);
    }
}

/// What all checking threads share.
struct Check<'a> {
    guest: &'a Guest,
    pattern: Pattern,
    counters: Vec<Vec<u8>>,
    in_flight: Vec<u64>,
}

impl Guest {
    /// Checks every test page with `threads` threads. The guest must stand still.
    pub fn verify_all(&self, threads: usize) -> Result<VerifyReport, GuestError> {
        let start = Instant::now();
        let page = self.control()?;
        let before = self.all_vcpus(&page)?;
        let ranges = Self::ranges(&page)?;
        let check = Check {
            guest: self,
            pattern: Pattern::new(page.at(control::SEED)),
            counters: self.shadow_table(&page)?,
            in_flight: before.iter().filter_map(|vcpu| vcpu.in_flight).collect(),
        };
        let mut report = check.run(ranges.as_slice(), threads.max(1) as u64)?;
        report.records.sort_by_key(|record| record.page);
        report.records.truncate(MAX_RECORDS);
        report.wrong_sums = (0..)
            .zip(before.iter().zip(&check.counters))
            .filter(|(index, (vcpu, table))| !sum_fits(vcpu, table, *index, before.len() as u64))
            .map(|(index, _)| index)
            .collect();
        let progress = |list: &[VcpuStatus]| -> Vec<(u64, u64)> {
            list.iter().map(|vcpu| (vcpu.iterations, vcpu.counter_sum)).collect()
        };
        report.moved = progress(&before) != progress(&self.all_vcpus(&page)?);
        report.elapsed_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(report)
    }

    fn all_vcpus(&self, page: &Words) -> Result<Vec<VcpuStatus>, GuestError> {
        (0..Self::vcpu_count(page)?)
            .map(|index| {
                let gpa = abi::vcpu_gpa(index);
                Ok(self.vcpu(index)?.ok_or(MemoryError::NotResident { gpa })?)
            })
            .collect()
    }

    /// Each vCPU's counters, as bytes; a part that is not resident reads as zero, as it would be
    /// for the guest.
    fn shadow_table(&self, page: &Words) -> Result<Vec<Vec<u8>>, GuestError> {
        let vcpus = Self::vcpu_count(page)?;
        let pages = page.at(control::PAGES);
        let (gpa, stride) = (page.at(control::SHADOW_GPA), page.at(control::SHADOW_STRIDE));
        if pages > self.memory().len_bytes() / PAGE_BYTES {
            return Err(GuestError::Nonsense { what: "page counts" });
        }
        let bytes = pages.div_ceil(vcpus) * 4;
        let fits = stride >= bytes && stride.checked_mul(vcpus).is_some_and(|all| all < 1 << 40);
        if !fits || gpa >= 1 << 40 {
            return Err(GuestError::Nonsense { what: "shadow table bounds" });
        }
        (0..vcpus)
            .map(|vcpu| {
                let mut table = vec![0; usize::try_from(bytes).unwrap_or(0)];
                self.memory().read_or_zero(gpa + stride * vcpu, &mut table)?;
                Ok(table)
            })
            .collect()
    }
}

fn counter(table: &[u8], index: u64) -> u64 {
    let offset = usize::try_from(index).ok().and_then(|index| index.checked_mul(4));
    let bytes = offset.and_then(|offset| table.get(offset..offset + 4));
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; 4]);
    u64::from(u32::from_le_bytes(bytes))
}

fn at(words: &[[u8; 8]], index: u64) -> u64 {
    usize::try_from(index)
        .ok()
        .and_then(|index| words.get(index))
        .map_or(0, |word| u64::from_le_bytes(*word))
}

/// Whether a vCPU's counters add up to the sum it keeps. A page in flight may be in the table and
/// not yet in the sum: one more, or anything when it was filled anew.
fn sum_fits(vcpu: &VcpuStatus, table: &[u8], index: u64, vcpus: u64) -> bool {
    let sum: u64 = (0..table.len() as u64 / 4).map(|own| counter(table, own)).sum();
    let Some(page) = vcpu.in_flight else { return sum == vcpu.counter_sum };
    let refilled = counter(table, page.saturating_sub(index) / vcpus) == 1;
    sum == vcpu.counter_sum || sum == vcpu.counter_sum.wrapping_add(1) || refilled
}

impl Check<'_> {
    fn run(&self, ranges: &[Range], threads: u64) -> Result<VerifyReport, GuestError> {
        let mut total = VerifyReport::default();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|thread| scope.spawn(move || self.every_nth_chunk(ranges, thread, threads)))
                .collect();
            workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for outcome in outcomes {
            match outcome {
                Ok(part) => total.add(part?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(total)
    }

    fn every_nth_chunk(
        &self,
        ranges: &[Range],
        thread: u64,
        threads: u64,
    ) -> Result<VerifyReport, GuestError> {
        let mut report = VerifyReport::default();
        let mut buffer = vec![0; CHUNK_PAGES * PAGE_WORDS * 8];
        let chunks = ranges.iter().flat_map(|range| {
            (0..range.pages).step_by(CHUNK_PAGES).map(move |offset| Range {
                gpa: range.gpa + offset * PAGE_BYTES,
                first: range.first + offset,
                pages: (CHUNK_PAGES as u64).min(range.pages - offset),
            })
        });
        for (_, chunk) in (0..).zip(chunks).filter(|(index, _)| index % threads == thread) {
            self.chunk(chunk, &mut buffer, &mut report)?;
        }
        Ok(report)
    }

    fn chunk(
        &self,
        chunk: Range,
        buffer: &mut [u8],
        report: &mut VerifyReport,
    ) -> Result<(), GuestError> {
        let memory = self.guest.memory();
        let chunk_bytes = chunk.pages * PAGE_BYTES;
        report.pages += chunk.pages;
        let mut pages = chunk.first..chunk.first + chunk.pages;
        let absent = memory.resident(chunk.gpa, chunk_bytes)? == (false, chunk_bytes);
        if absent && pages.all(|page| self.counter(page) == 0) {
            return Ok(());
        }
        let buffer = buffer.get_mut(..usize::try_from(chunk_bytes).unwrap_or(0)).unwrap_or(&mut []);
        let missing = memory.read_or_zero(chunk.gpa, buffer)?;
        report.resident += chunk.pages - missing / PAGE_BYTES;
        let (words, _) = buffer.as_chunks::<8>();
        for (number, words) in (chunk.first..).zip(words.chunks_exact(PAGE_WORDS)) {
            let gpa = chunk.gpa + (number - chunk.first) * PAGE_BYTES;
            self.page(number, gpa, words, report);
        }
        Ok(())
    }

    fn page(&self, page: u64, gpa: u64, words: &[[u8; 8]], report: &mut VerifyReport) {
        let counter = self.counter(page);
        if counter > 0 {
            report.written += 1;
        }
        if self.in_flight.contains(&page) {
            report.in_flight += 1;
            return;
        }
        let Err(mismatch) = self.pattern.check_full(page, counter, |word| at(words, word)) else {
            return;
        };
        report.errors += 1;
        if report.records.len() < MAX_RECORDS {
            report.records.push(PageError {
                page,
                gpa,
                kind: self.kind(page, counter, words),
                counter,
                found_counter: at(words, 1),
                word: mismatch.word,
                expected: mismatch.expected,
                found: mismatch.found,
            });
        }
    }

    fn counter(&self, page: u64) -> u64 {
        let vcpus = self.counters.len() as u64;
        let owner = usize::try_from(page % vcpus).ok().and_then(|v| self.counters.get(v));
        owner.map_or(0, |table| counter(table, page / vcpus))
    }

    fn kind(&self, page: u64, counter: u64, words: &[[u8; 8]]) -> PageErrorKind {
        let whole = |page, counter| {
            counter > 0 && self.pattern.check_full(page, counter, |word| at(words, word)).is_ok()
        };
        if counter == 0 {
            PageErrorKind::NotZero
        } else if words.iter().all(|word| *word == [0; 8]) {
            PageErrorKind::Missing
        } else if whole(page, at(words, 1)) {
            if at(words, 1) < counter { PageErrorKind::Stale } else { PageErrorKind::Newer }
        } else if whole(at(words, 0), at(words, 1)) {
            PageErrorKind::Misplaced
        } else {
            PageErrorKind::Corrupt
        }
    }
}
