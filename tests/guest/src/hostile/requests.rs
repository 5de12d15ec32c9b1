// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requests as a device's own driver makes them, with values at and past their bounds.
//!
//! Owns the layouts. What a device could take for an address of RAM is in a part of the arena that no device writes,
//! and names the rest of the arena or no RAM.

use super::{Attacker, BALLOON, Function, IOMMU, SHAPED_BYTES, low_half, low_quarter};
use crate::mem;

/// Of a network device with one pair of queues.
const CONTROL_QUEUE: u64 = 2;
const NET: u32 = 1;
const BLOCK: u32 = 2;
const CONSOLE: u32 = 3;
const RNG: u32 = 4;
const CLOCK: u32 = 17;
const VSOCK: u32 = 19;
const MEM: u32 = 24;
const PMEM: u32 = 27;
const WATCHDOG: u32 = 35;

/// Room of one request in the part that no device writes.
const SHAPE_BYTES: u64 = 128;
/// Where a virtual IOMMU may have the rest of a request that asks for properties.
const PROBE_BYTES: u32 = 512;

/// A request's parts besides its data.
#[derive(Clone, Copy, Default)]
pub(super) struct Shape {
    /// Where what stands before the data is.
    pub header: u64,
    pub header_bytes: u32,
    /// Length of the answer behind it.
    pub status_bytes: u32,
    pub without_data: bool,
}

impl Attacker {
    /// Whether the device writes the data of a request.
    pub(super) fn is_written(&mut self, device_type: u32, queue: u64) -> bool {
        match device_type {
            // Page numbers are read; free pages are reported as parts to be written.
            BALLOON => queue > 2 && self.one_in(2),
            // Queues of even numbers receive.
            NET | CONSOLE => queue.is_multiple_of(2),
            // So do the first one, and that of events.
            VSOCK => queue != 1,
            RNG | WATCHDOG => true,
            _ => self.one_in(2),
        }
    }

    /// Writes what stands before the data. No 16 bytes of it look like a descriptor of other RAM, unless they are where
    /// no device writes.
    pub(super) fn write_header(&mut self, function: Function, queue: u64) -> Shape {
        const NOT_AN_ADDRESS: u64 = 0x7f00_0000 << 32;
        let any = self.random.number();
        let at = self.data() & !15;
        let shape = |header_bytes, status_bytes| Shape {
            header: at,
            header_bytes,
            status_bytes,
            without_data: false,
        };
        match function.device_type {
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
                shape(16, 1)
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
                Shape { without_data: true, ..shape(24, 10) }
            }
            CLOCK => {
                let request = if self.one_in(4) { any & 0xffff } else { any & 0x1003 };
                let clock = if self.one_in(4) { any >> 48 } else { 0 };
                mem::store(at, NOT_AN_ADDRESS | request);
                mem::store(at + 8, NOT_AN_ADDRESS | clock);
                Shape { without_data: true, ..shape(16, 16) }
            }
            NET if queue == function.control_queue() => {
                mem::store(at, NOT_AN_ADDRESS | any & 0x0707);
                Shape { without_data: true, ..shape(2, 1) }
            }
            NET if queue.is_multiple_of(2) => shape(0, 0),
            NET => {
                let header = if self.one_in(4) { any } else { 0 };
                mem::store(at, header | NOT_AN_ADDRESS);
                mem::store32(at + 8, low_half(header));
                shape(12, 0)
            }
            VSOCK if queue == 1 => self.write_packet(),
            IOMMU if queue == 0 => self.write_iommu_request(),
            PMEM => {
                let request = if self.one_in(8) { low_half(any) } else { 0 };
                mem::store32(at, request);
                mem::store32(at + 4, low_half(NOT_AN_ADDRESS >> 32));
                Shape { without_data: !self.one_in(8), ..shape(4, 4) }
            }
            _ => shape(0, 0),
        }
    }

    /// Room for a request where no device writes.
    fn room(&mut self) -> u64 {
        self.shaped() + self.below(SHAPED_BYTES / SHAPE_BYTES) * SHAPE_BYTES
    }

    /// A packet of a socket: of one of a few connections, or of none that can be.
    fn write_packet(&mut self) -> Shape {
        let at = self.room();
        let any = self.random.number();
        let pick = |list: [u32; 4], other: u32, of: u64| {
            let index = usize::try_from(of & 7).unwrap_or(0);
            list.get(index).copied().unwrap_or(other)
        };
        mem::store(at, if self.one_in(24) { any } else { 3 });
        mem::store(at + 8, if self.one_in(24) { any >> 1 } else { 2 });
        let (from, to) = (pick([0, 1, 2, 1024], low_half(any), any), self.bits());
        mem::store32(at + 16, 4000 + from % 16);
        mem::store32(at + 20, if self.one_in(8) { to } else { 1024 + to % 2 });
        let len_bytes = match self.below(8) {
            0 => self.length(),
            1 => u32::MAX,
            2 => 0,
            _ => (1 + low_half(self.below(64))) * 512,
        };
        mem::store32(at + 24, len_bytes);
        let kind = if self.one_in(16) { self.half() } else { 1 };
        let operation = if self.one_in(16) { self.half() } else { low_quarter(self.below(9)) };
        mem::store32(at + 28, u32::from(kind) | u32::from(operation) << 16);
        mem::store32(at + 32, if self.one_in(2) { low_half(any >> 32) & 3 } else { self.bits() });
        let credit = [0, 1, 4096, u32::MAX];
        mem::store32(at + 36, pick(credit, 1 << 18, any >> 8));
        mem::store32(at + 40, pick(credit, self.bits(), any >> 16));
        Shape { header: at, header_bytes: 44, status_bytes: 0, without_data: len_bytes == 0 }
    }

    /// A request to the IOMMU. Memory that it maps is the arena's, or there is none.
    fn write_iommu_request(&mut self) -> Shape {
        let at = self.room();
        let request = if self.one_in(12) { self.bits() } else { 1 + low_half(self.below(5)) };
        let domain = if self.one_in(12) { self.bits() } else { low_half(self.below(3)) };
        let endpoint = if self.one_in(12) { self.bits() } else { low_half(self.below(32)) << 3 };
        // The address that is mapped stays where it is in each request: an unfinished one has none of other RAM.
        let (start, len_bytes) = if self.one_in(3) {
            (self.random.number(), self.random.number())
        } else {
            let start = self.address() & !0xfff;
            (start, (1 + self.below(64)) * 4096 - u64::from(!self.one_in(8)))
        };
        let gpa = self.address();
        let gpa = if self.one_in(8) { gpa } else { gpa & !0xfff };
        let gpa = if gpa < self.data_start() { 1 << 45 } else { gpa };
        mem::store(at + 24, gpa);
        let flags = if self.one_in(8) { self.bits() } else { 3 };
        mem::store32(at + 32, flags);
        match request {
            1 | 2 => {
                mem::store32(at + 8, endpoint);
                mem::store32(at + 12, u32::from(self.one_in(4)));
                mem::store32(at + 16, 0);
            }
            5 => mem::store32(at + 8, 0),
            _ => {
                mem::store(at + 8, start);
                mem::store(at + 16, start.wrapping_add(len_bytes));
            }
        }
        mem::store32(at + 4, if request == 5 { endpoint } else { domain });
        mem::store32(at, request);
        let (header_bytes, status_bytes) = match request {
            1 | 2 => (20, 4),
            3 => (36, 4),
            4 => (28, 4),
            5 => (72, PROBE_BYTES + 4),
            _ => (8 + low_half(self.below(SHAPE_BYTES - 8)), 4),
        };
        Shape { header: at, header_bytes, status_bytes, without_data: !self.one_in(24) }
    }
}

impl Function {
    /// The queue by which a network device is controlled: the last.
    fn control_queue(self) -> u64 {
        if self.queues == 0 { CONTROL_QUEUE } else { u64::from(self.queues) - 1 }
    }
}
