// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver of persistent memory that writes numbered pages and flushes each.
//!
//! Owns the table that maps the memory, and the requests, one at a time. Must never count a page before the device said
//! that it is stable.

use crate::abi::{self, PAGE_BYTES, balloon_failure, disk, disk_failure};
use crate::boot;
use crate::mem;
use crate::virtio::{Device, Part, Queue};

const DEVICE_TYPE: u32 = 27;
const FLUSH: u32 = 0;
const REQUEST_GPA: u64 = abi::BALLOON_REQUEST_GPA;
const RESPONSE_GPA: u64 = REQUEST_GPA + 64;
/// Rings of a queue that this device does not have.
const DIRECTORY_GPA: u64 = abi::BALLOON_RINGS_GPA + 2 * PAGE_BYTES;

const GIB: u64 = 1 << 30;
const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Present, writable, user, accessed, dirty, large.
const LARGE_PAGE_FLAGS: u64 = 0xe7;
const TABLE_FLAGS: u64 = 7;
/// Words of a page that are written, checked and compared.
const WORDS_AT: [u64; 3] = [0, PAGE_BYTES / 2, PAGE_BYTES - 8];

/// The driver.
pub struct Pmem {
    queue: Queue,
    start: u64,
}

impl Pmem {
    /// Starts the first persistent memory that configuration space at `ecam` shows, of which the first GiB is used.
    pub fn start(ecam: u64) -> Result<Self, u64> {
        let device = Device::find(ecam, DEVICE_TYPE)?;
        device.agree(0)?;
        let queue = device.queue(0, abi::BALLOON_RINGS_GPA)?;
        device.ready();
        let word = |at| mem::load(device.config + at);
        let (start, len_bytes) = (word(0), word(8));
        let first = start / GIB;
        let last = (start + disk::BLOCKS * PAGE_BYTES - 1) / GIB;
        if !(4..512).contains(&first) || last != first || len_bytes < disk::BLOCKS * PAGE_BYTES {
            return Err(balloon_failure::DEVICE);
        }
        for slot in 0..512 {
            let gpa = first * GIB + slot * LARGE_PAGE_BYTES;
            mem::store(DIRECTORY_GPA + slot * 8, gpa | LARGE_PAGE_FLAGS);
        }
        mem::store(&raw const boot::pdpt as u64 + first * 8, DIRECTORY_GPA | TABLE_FLAGS);
        Ok(Self { queue, start })
    }

    /// Checks what was written to the place of page `number` last, writes the page, and has it made stable.
    pub fn write(&mut self, number: u64, meanwhile: impl FnMut()) -> Result<(), u64> {
        let page = self.start + number % disk::BLOCKS * PAGE_BYTES;
        if let Some(before) = number.checked_sub(disk::BLOCKS)
            && WORDS_AT.iter().any(|at| mem::load(page + at) != before + 1)
        {
            return Err(disk_failure::CONTENT);
        }
        for at in WORDS_AT {
            mem::store(page + at, number + 1);
        }
        mem::store32(REQUEST_GPA, FLUSH);
        mem::store32(RESPONSE_GPA, u32::MAX);
        let parts = [
            Part { gpa: REQUEST_GPA, len_bytes: 4, writable: false },
            Part { gpa: RESPONSE_GPA, len_bytes: 4, writable: true },
        ];
        self.queue.request(&parts, meanwhile);
        if mem::load32(RESPONSE_GPA) == 0 { Ok(()) } else { Err(disk_failure::REQUEST) }
    }
}
