// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queues that are set up, and what is put into them: requests with one thing wrong, and rubbish.
//!
//! Owns the rings of every function. The balloon gets page numbers of the arena and of no RAM alone, and the IOMMU such
//! addresses, from memory that no device writes: one gives up the pages that they name, the other leads devices there.

use core::sync::atomic::{Ordering, fence};

use super::{
    Attacker, Function, IOMMU, PFN_BYTES, QUEUES_MAX, RING_PAGES, is_guarded, low_half,
    low_quarter, notify, restore,
};
use crate::abi::PAGE_BYTES;
use crate::mem;
use crate::virtio::common;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const DESC_INDIRECT: u16 = 4;
const F_VERSION_1: u32 = 1;
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
            let elsewhere = !is_guarded(function.device_type) && self.one_in(200);
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
        // A guarded device's tables of descriptors lie nowhere: they could hold addresses of other RAM.
        let flags_mask = if is_guarded(function.device_type) { 3 } else { 7 };
        for _ in 0..=self.below(24) {
            let at = rings + self.below(QUEUE_SIZE_MAX) * 16;
            let flags = self.half() & flags_mask;
            let (gpa, len_bytes) = self.buffer(function.device_type, flags & DESC_WRITE != 0);
            let next =
                if self.one_in(4) { self.half() } else { low_quarter(self.below(QUEUE_SIZE_MAX)) };
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

    /// A buffer for a device, which what it takes orders from does not write.
    fn buffer(&mut self, device_type: u32, is_written: bool) -> (u64, u32) {
        if device_type == IOMMU && is_written {
            return (self.data(), self.length());
        }
        if !is_guarded(device_type) {
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
        let shape = self.write_header(function, queue);
        let device_type = function.device_type;
        let is_written = self.is_written(device_type, queue);
        let (data, len_bytes) = if self.one_in(8) || is_guarded(device_type) {
            self.buffer(device_type, is_written)
        } else {
            let len_bytes = (1 + self.below(64)) * 512;
            (self.data().min(self.arena.end - len_bytes), u32::try_from(len_bytes).unwrap_or(0))
        };
        let wrong_way = !is_guarded(device_type) && self.one_in(30);
        let mut parts = [
            (shape.header, shape.header_bytes, 0),
            (data, len_bytes, 0),
            (self.data(), shape.status_bytes, DESC_WRITE),
        ];
        if is_written != wrong_way {
            parts[1].2 = DESC_WRITE;
        }
        let table_at =
            if !is_guarded(device_type) && self.one_in(4) { self.data() & !15 } else { rings };
        let mut used = 0;
        for (part, (gpa, bytes, flags)) in parts.into_iter().enumerate() {
            if bytes == 0 && part != 1 || part == 1 && shape.without_data {
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
}

fn put_descriptor(at: u64, gpa: u64, len_bytes: u32, flags: u16, next: u16) {
    mem::store(at, gpa);
    mem::store32(at + 8, len_bytes);
    mem::store16(at + 12, flags);
    mem::store16(at + 14, next);
}
