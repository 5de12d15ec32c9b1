// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queues that are set up, and what is put into them: requests with one thing wrong, and rubbish.
//!
//! Owns the rings of every function. The balloon gets page numbers of the arena and of no RAM alone, from
//! memory that no device writes: it gives up the pages that they name.

use core::sync::atomic::{Ordering, fence};

use super::{
    Attacker, BALLOON, Function, PFN_BYTES, QUEUES_MAX, RING_PAGES, low_half, low_quarter, notify,
    restore,
};
use crate::abi::PAGE_BYTES;
use crate::mem;
use crate::virtio::common;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const DESC_INDIRECT: u16 = 4;
const F_VERSION_1: u32 = 1;
/// Of a network device with one pair of queues.
const CONTROL_QUEUE: u64 = 2;
const NET: u32 = 1;
const CONSOLE: u32 = 3;
const RNG: u32 = 4;
const BLOCK: u32 = 2;
const CLOCK: u32 = 17;
const MEM: u32 = 24;
/// Times that a register is looked at for a device to come out of its reset.
const LOOKS: u32 = 200;
/// Descriptors of a queue: their table fits its page.
const QUEUE_SIZE_MAX: u64 = 256;

impl Attacker {
    /// The number of a page that the balloon may have: of the arena, or of no RAM.
    pub(super) fn pfn(&mut self) -> u32 {
        let any = self.bits();
        let page = if self.one_in(2) { self.data() / PAGE_BYTES } else { u64::from(any) };
        let safe = if page * PAGE_BYTES < self.data_start() { page | 1 << 31 } else { page };
        u32::try_from(safe).unwrap_or(u32::MAX)
    }

    fn ring(&self, function: u64, queue: u64) -> u64 {
        let number = function * QUEUES_MAX + queue;
        self.arena.start + PFN_BYTES + number * RING_PAGES * PAGE_BYTES
    }

    /// Whether the device takes requests, or is to be sent some although it does not.
    pub(super) fn works(&mut self, function: Function) -> bool {
        if function.regions.common == 0 || self.one_in(16) {
            return true;
        }
        mem::load8(function.regions.common + common::STATUS) == 15
    }

    /// Drives a device as far as it goes, more or less as the standard has it.
    pub(super) fn set_up(&mut self, function: Function, number: u64) {
        let base = function.regions.common;
        if base == 0 {
            return;
        }
        restore(function);
        mem::store8(base + common::STATUS, 0);
        for _ in 0..LOOKS {
            if mem::load8(base + common::STATUS) == 0 {
                break;
            }
        }
        mem::store8(base + common::STATUS, 3);
        for select in 0..2 {
            mem::store32(base + common::DEVICE_FEATURE_SELECT, select);
            let offered = mem::load32(base + common::DEVICE_FEATURE);
            let mask = if self.one_in(2) { self.bits() | self.bits() } else { u32::MAX };
            // Version 1 is what the rest of this is about; without it is an attack of its own.
            let version = if select == 1 && !self.one_in(60) { F_VERSION_1 } else { 0 };
            let taken = offered & mask | version;
            let wrong = if self.one_in(60) { self.bits() } else { 0 };
            mem::store32(base + common::DRIVER_FEATURE_SELECT, select);
            mem::store32(base + common::DRIVER_FEATURE, taken | wrong);
        }
        mem::store8(base + common::STATUS, 11);
        let queues = u64::from(mem::load16(base + common::NUM_QUEUES)).min(QUEUES_MAX);
        for queue in 0..queues {
            self.set_up_queue(function, number, queue);
        }
        mem::store8(base + common::STATUS, 15);
    }

    fn set_up_queue(&mut self, function: Function, number: u64, queue: u64) {
        let base = function.regions.common;
        let rings = self.ring(number, queue);
        mem::store16(base + common::QUEUE_SELECT, low_quarter(queue));
        let size = match self.below(60) {
            0 => self.below(QUEUE_SIZE_MAX + 1),
            1 => 0,
            2 => 1,
            any => 4 << (any % 7),
        };
        mem::store16(base + common::QUEUE_SIZE, low_quarter(size));
        for page in 0..RING_PAGES - 1 {
            mem::clear(rings + page * PAGE_BYTES, PAGE_BYTES);
            let at = base + common::QUEUE_DESC + page * 8;
            let elsewhere = function.device_type != BALLOON && self.one_in(200);
            let gpa = if elsewhere { self.address() } else { rings + page * PAGE_BYTES };
            mem::store32(at, low_half(gpa));
            mem::store32(at + 4, low_half(gpa >> 32));
        }
        let vector = if self.one_in(3) { self.half() } else { 0 };
        mem::store16(base + common::QUEUE_MSIX_VECTOR, vector);
        mem::store16(base + common::QUEUE_ENABLE, u16::from(!self.one_in(100)));
    }

    fn some_queue(&mut self, function: Function) -> u64 {
        let queues = u64::from(mem::load16(function.regions.common + common::NUM_QUEUES));
        self.below(queues.clamp(1, QUEUES_MAX))
    }

    /// Descriptors that lead anywhere, in loops or out of the table, and heads that are none.
    pub(super) fn push_rubbish(&mut self, function: Function, number: u64) {
        if function.regions.common == 0 {
            return;
        }
        let queue = self.some_queue(function);
        let rings = self.ring(number, queue);
        // The inflate queue gets buffers of page numbers alone: it gives up the pages that they name.
        let balloon = function.device_type == BALLOON;
        for _ in 0..=self.below(24) {
            let at = rings + self.below(QUEUE_SIZE_MAX) * 16;
            let (gpa, len_bytes) = self.buffer(balloon);
            let next =
                if self.one_in(4) { self.half() } else { low_quarter(self.below(QUEUE_SIZE_MAX)) };
            // A balloon's tables of descriptors lie nowhere: they could hold addresses of other RAM.
            let flags = if balloon { self.half() & 3 } else { self.half() & 7 };
            put_descriptor(at, gpa, len_bytes, flags, next);
        }
        let steps = if self.one_in(10) { self.half() } else { low_quarter(self.below(16)) };
        for slot in 0..QUEUE_SIZE_MAX {
            let head =
                if self.one_in(8) { self.half() } else { low_quarter(self.below(QUEUE_SIZE_MAX)) };
            mem::store16(rings + PAGE_BYTES + 4 + slot * 2, head);
        }
        self.advance(function, rings, queue, steps);
    }

    fn buffer(&mut self, balloon: bool) -> (u64, u32) {
        if !balloon {
            return (self.address(), self.length());
        }
        if self.one_in(8) {
            return (self.random.number() | 1 << 45, self.length());
        }
        let at = self.below(PFN_BYTES / 4) * 4;
        let len_bytes = self.below(PFN_BYTES - at + 1);
        // Of pages that were reported as free the device may have made zeros.
        for index in 0..(len_bytes / 4).min(64) {
            let pfn = self.pfn();
            mem::store32(self.arena.start + at + index * 4, pfn);
        }
        (self.arena.start + at, u32::try_from(len_bytes).unwrap_or(0))
    }

    /// Makes `steps` more heads available and tells the device.
    fn advance(&mut self, function: Function, rings: u64, queue: u64, steps: u16) {
        let available = rings + PAGE_BYTES;
        if self.one_in(64) {
            let flags = self.half();
            mem::store16(available, flags);
        }
        let before = mem::load16(available + 2);
        mem::store16(available + 2, before.wrapping_add(steps));
        fence(Ordering::SeqCst);
        notify(function, queue);
    }

    /// A request as the device's own driver makes it, with values at and past their bounds.
    pub(super) fn push_request(&mut self, function: Function, number: u64) {
        if function.regions.common == 0 {
            return;
        }
        let queue = self.some_queue(function);
        let rings = self.ring(number, queue);
        let header = self.data() & !15;
        let (header_bytes, status_bytes) = self.write_header(function.device_type, queue, header);
        let (data, len_bytes) = if self.one_in(8) || function.device_type == BALLOON {
            self.buffer(function.device_type == BALLOON)
        } else {
            let len_bytes = (1 + self.below(64)) * 512;
            (self.data().min(self.arena.end - len_bytes), u32::try_from(len_bytes).unwrap_or(0))
        };
        let written = match function.device_type {
            // Page numbers are read; free pages are reported as parts to be written.
            BALLOON => queue > 2 && self.one_in(2),
            // Queues of even numbers receive.
            NET | CONSOLE => queue.is_multiple_of(2),
            RNG => true,
            _ => self.one_in(2),
        };
        let wrong_way = function.device_type != BALLOON && self.one_in(30);
        let mut parts = [
            (header, header_bytes, 0),
            (data, len_bytes, 0),
            (self.data(), status_bytes, DESC_WRITE),
        ];
        if written != wrong_way {
            parts[1].2 = DESC_WRITE;
        }
        // The requests of virtio-mem and of a clock, and control of a network device, have no data.
        let without_data = matches!(function.device_type, MEM | CLOCK) || header_bytes == 2;
        let table_at = if function.device_type != BALLOON && self.one_in(4) {
            self.data() & !15
        } else {
            rings
        };
        let mut used = 0;
        for (part, (gpa, bytes, flags)) in parts.into_iter().enumerate() {
            if bytes == 0 && part != 1 || part == 1 && without_data {
                continue;
            }
            if used > 0 {
                let before = table_at + (used - 1) * 16;
                mem::store16(before + 12, mem::load16(before + 12) | DESC_NEXT);
                mem::store16(before + 14, low_quarter(used));
            }
            put_descriptor(table_at + used * 16, gpa, bytes, flags, 0);
            used += 1;
        }
        if table_at != rings {
            let bytes = if self.one_in(8) { self.length() } else { low_half(used * 16) };
            put_descriptor(rings, table_at, bytes, DESC_INDIRECT, 0);
        }
        for slot in 0..QUEUE_SIZE_MAX {
            mem::store16(rings + PAGE_BYTES + 4 + slot * 2, 0);
        }
        self.advance(function, rings, queue, 1);
    }

    /// What stands before the data; its length, and that of the answer. No 16 bytes of it look like a
    /// descriptor of other RAM.
    fn write_header(&mut self, device_type: u32, queue: u64, at: u64) -> (u32, u32) {
        const NOT_AN_ADDRESS: u64 = 0x7f00_0000 << 32;
        let any = self.random.number();
        match device_type {
            BLOCK => {
                let known = [0, 1, 4, 8, 11, 13, 14];
                let pick = usize::try_from(self.below(known.len() as u64 + 1)).unwrap_or(0);
                let request = known.get(pick).copied().unwrap_or(any & 0xffff_ffff);
                let sector = match self.below(16) {
                    0 => any,
                    1 => u64::MAX - any % 16,
                    _ => any % 34_000,
                };
                mem::store(at, NOT_AN_ADDRESS | request);
                mem::store(at + 8, sector);
                (16, 1)
            }
            MEM => {
                let request = if self.one_in(4) { any & 0xffff } else { any & 3 };
                let block = self.below(1 << 16) << 21;
                let start = if self.one_in(2) { 4 << 30 | block } else { any };
                mem::store(at, NOT_AN_ADDRESS | request);
                mem::store(at + 8, start);
                mem::store(
                    at + 16,
                    NOT_AN_ADDRESS | any >> 48 & if self.one_in(2) { 15 } else { u64::MAX },
                );
                (24, 10)
            }
            CLOCK => {
                let request = if self.one_in(4) { any & 0xffff } else { any & 0x1003 };
                let clock = if self.one_in(4) { any >> 48 } else { 0 };
                mem::store(at, NOT_AN_ADDRESS | request);
                mem::store(at + 8, NOT_AN_ADDRESS | clock);
                (16, 16)
            }
            NET if queue == CONTROL_QUEUE => {
                mem::store(at, NOT_AN_ADDRESS | any & 0x0707);
                (2, 1)
            }
            NET if queue.is_multiple_of(2) => (0, 0),
            NET => {
                let header = if self.one_in(4) { any } else { 0 };
                mem::store(at, header | NOT_AN_ADDRESS);
                mem::store32(at + 8, low_half(header));
                (12, 0)
            }
            _ => (0, 0),
        }
    }
}

fn put_descriptor(at: u64, gpa: u64, len_bytes: u32, flags: u16, next: u16) {
    mem::store(at, gpa);
    mem::store32(at + 8, len_bytes);
    mem::store16(at + 12, flags);
    mem::store16(at + 14, next);
}
