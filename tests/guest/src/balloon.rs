// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A balloon driver that makes use of what the device says of pages that come back zeroed.
//!
//! Owns the requests, and which pages it was told of. Must never believe a page to be zero that it
//! was not told of.

use crate::abi::{self, PAGE_BYTES};
use crate::mem;
use crate::virtio::{Device, Part, Queue};

const DEVICE_TYPE: u32 = 5;
const POISON_AT: u64 = 12;
const F_MUST_TELL_HOST: u64 = 1 << 0;
const F_PAGE_POISON: u64 = 1 << 4;
const F_REPORTING: u64 = 1 << 5;
/// Proposed: the used length of a report says how much of it comes back as zeros.
const F_INIT_REPORTED: u64 = 1 << 6;
/// Proposed: a bitmap behind the page numbers says which of them come back as zeros.
const F_INIT_INFLATED: u64 = 1 << 7;
const KNOWN: u64 =
    F_MUST_TELL_HOST | F_PAGE_POISON | F_REPORTING | F_INIT_REPORTED | F_INIT_INFLATED;

/// Page numbers of a request, as many as Linux sends.
pub const PAGES_MAX: u64 = 256;
/// Elements of a report, as many as Linux sends.
pub const RANGES_MAX: usize = 32;
/// Behind the page numbers.
const BITMAP_GPA: u64 = abi::BALLOON_REQUEST_GPA + PAGES_MAX * 4;

/// The driver.
pub struct Balloon {
    /// What driver and device agreed on.
    pub features: u64,
    inflate: Queue,
    deflate: Queue,
    reporting: Option<Queue>,
}

impl Balloon {
    /// Starts the device that configuration space at `ecam` shows.
    pub fn start(ecam: u64, accepted: u64, poison: u64) -> Result<Self, u64> {
        let device = Device::find(ecam, DEVICE_TYPE)?;
        let features = device.agree(KNOWN & accepted)?;
        let rings = |number: u16| abi::BALLOON_RINGS_GPA + u64::from(number) * PAGE_BYTES;
        let inflate = device.queue(0, rings(0))?;
        let deflate = device.queue(1, rings(1))?;
        let reporting = if features & F_REPORTING == 0 {
            None
        } else {
            // The last one, however many stand before it.
            Some(device.queue(device.queues.saturating_sub(1), rings(2))?)
        };
        if features & F_PAGE_POISON != 0 {
            #[expect(clippy::cast_possible_truncation, reason = "the register has 32 bits")]
            mem::store32(device.config + POISON_AT, poison as u32);
        }
        device.ready();
        Ok(Self { features, inflate, deflate, reporting })
    }

    /// Whether free pages can be reported.
    pub fn reports(&self) -> bool {
        self.reporting.is_some()
    }

    /// Reports free memory in elements of one size; returns how many of them come back as zeros.
    pub fn report(&mut self, gpas: &[u64], len_bytes: u32, meanwhile: impl FnMut()) -> usize {
        let mut parts = [Part::default(); RANGES_MAX];
        for (part, gpa) in parts.iter_mut().zip(gpas) {
            *part = Part { gpa: *gpa, len_bytes, writable: true };
        }
        let parts = parts.get(..gpas.len().min(RANGES_MAX)).unwrap_or_default();
        let Some(queue) = &mut self.reporting else { return 0 };
        let used = queue.request(parts, meanwhile);
        if self.features & F_INIT_REPORTED == 0 { 0 } else { (used / len_bytes) as usize }
    }

    /// Puts at most `PAGES_MAX` pages into the balloon, whose number is `number(0..count)`;
    /// afterwards `told` says which of them come back as zeros.
    pub fn inflate(&mut self, count: u64, number: impl Fn(u64) -> u64, meanwhile: impl FnMut()) {
        let numbers = Self::numbers(count, number);
        mem::clear(BITMAP_GPA, PAGES_MAX / 8);
        let bitmap = Part { gpa: BITMAP_GPA, len_bytes: bytes(count.div_ceil(8)), writable: true };
        if self.features & F_INIT_INFLATED == 0 {
            self.inflate.request(&[numbers], meanwhile);
        } else {
            self.inflate.request(&[numbers, bitmap], meanwhile);
        }
    }

    /// Takes pages out of the balloon; they may be used when this returns.
    pub fn deflate(&mut self, count: u64, number: impl Fn(u64) -> u64, meanwhile: impl FnMut()) {
        let numbers = Self::numbers(count, number);
        self.deflate.request(&[numbers], meanwhile);
    }

    /// Whether the device said so of page `index` of the last request of `inflate`.
    pub fn told(index: u64) -> bool {
        mem::load8(BITMAP_GPA + index / 8) & 1 << (index % 8) != 0
    }

    fn numbers(count: u64, number: impl Fn(u64) -> u64) -> Part {
        for index in 0..count {
            mem::store32(abi::BALLOON_REQUEST_GPA + index * 4, bytes(number(index)));
        }
        Part { gpa: abi::BALLOON_REQUEST_GPA, len_bytes: bytes(count * 4), writable: false }
    }
}

/// Notes of the pages that come back as zeros; pages beyond the map never do.
pub mod notes {
    use crate::abi;
    use crate::mem;

    /// Forgets all.
    pub fn clear() {
        mem::clear(abi::BALLOON_TOLD_GPA, abi::BALLOON_TOLD_PAGES / 8);
    }

    /// Notes a page.
    pub fn note(page: u64) {
        if page < abi::BALLOON_TOLD_PAGES {
            let at = abi::BALLOON_TOLD_GPA + page / 8;
            mem::store8(at, mem::load8(at) | 1 << (page % 8));
        }
    }

    /// Whether it was noted.
    pub fn has(page: u64) -> bool {
        page < abi::BALLOON_TOLD_PAGES
            && mem::load8(abi::BALLOON_TOLD_GPA + page / 8) & 1 << (page % 8) != 0
    }
}

/// A number that fits 32 bits, as page numbers of the balloon have to.
#[expect(clippy::cast_possible_truncation, reason = "test memory ends at 512 GiB")]
fn bytes(value: u64) -> u32 {
    value as u32
}
