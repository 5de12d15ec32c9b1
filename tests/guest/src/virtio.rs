// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio device on the first PCI bus, driven without interrupts.
//!
//! Owns finding it, its registers and its rings. One request at a time in a queue, and the vCPU that sent
//! it looks until it is answered. Must never know what a request is about.

use core::sync::atomic::{Ordering, fence};

use crate::abi::{self, balloon_failure};
use crate::mem;

const VENDOR: u32 = 0x1af4;
/// Modern devices have their type behind this number.
const FIRST_MODERN: u32 = 0x1040;
const DEVICES: u64 = 32;
/// Distance of two devices in configuration space.
pub const CONFIG_BYTES: u64 = 8 * 4096;

const COMMAND: u64 = 0x04;
const COMMAND_MEMORY_AND_BUS_MASTER: u32 = 6;
const STATUS_CAPABILITIES: u32 = 1 << 20;
const BARS: u64 = 0x10;
const BAR_COUNT: u64 = 6;
const BAR_64: u32 = 4;
const CAPABILITIES: u64 = 0x34;
const CAPABILITY_VENDOR: u32 = 9;
const CAPABILITY_MSIX: u32 = 0x11;
/// More than any list has.
const CAPABILITIES_MAX: usize = 48;
const CAP_COMMON: u32 = 1;
const CAP_NOTIFY: u32 = 2;
const CAP_DEVICE: u32 = 4;

/// BARs that lie where nothing is mapped are moved here, 16 MiB apart: below the addresses that the
/// events are written to, in what every machine leaves to devices.
pub const BARS_GPA: u64 = 0xd000_0000;
const BARS_DISTANCE: u64 = 16 << 20;

/// Registers of the common configuration.
pub mod common {
    pub const DEVICE_FEATURE_SELECT: u64 = 0;
    pub const DEVICE_FEATURE: u64 = 4;
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    pub const DRIVER_FEATURE: u64 = 12;
    pub const CONFIG_MSIX_VECTOR: u64 = 16;
    pub const NUM_QUEUES: u64 = 18;
    pub const STATUS: u64 = 20;
    pub const QUEUE_SELECT: u64 = 22;
    pub const QUEUE_SIZE: u64 = 24;
    pub const QUEUE_MSIX_VECTOR: u64 = 26;
    pub const QUEUE_ENABLE: u64 = 28;
    pub const QUEUE_NOTIFY_OFF: u64 = 30;
    pub const QUEUE_DESC: u64 = 32;
    pub const QUEUE_AVAIL: u64 = 40;
    pub const QUEUE_USED: u64 = 48;
}

const ACKNOWLEDGE_AND_DRIVER: u8 = 3;
const FEATURES_OK: u8 = 8;
const DRIVER_OK: u8 = 4;
const F_VERSION_1: u64 = 1 << 32;
/// Offered by a device behind an IOMMU.
const F_ACCESS_PLATFORM: u64 = 1 << 33;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const AVAIL_NO_INTERRUPT: u16 = 1;
/// Descriptors of a queue; its rings fit a page.
pub const QUEUE_SIZE: u16 = 32;
/// Where the available ring is in the page of a queue's rings, its flags first.
pub const AVAIL_AT: u64 = 0x800;
const USED_AT: u64 = 0xc00;

/// A device that is being set up, or is.
pub struct Device {
    common: u64,
    notify: u64,
    notify_multiplier: u64,
    /// The device's own configuration.
    pub config: u64,
    /// Queues that it has.
    pub queues: u16,
    /// What it adds to addresses of memory, for an IOMMU to take away.
    pub offset: u64,
}

/// One queue.
pub struct Queue {
    rings: u64,
    notify: u64,
    index: u16,
    /// Descriptors, at most `QUEUE_SIZE`.
    size: u16,
    avail: u16,
    /// That of its device.
    offset: u64,
}

/// A part of a request.
#[derive(Clone, Copy, Default)]
pub struct Part {
    /// Where it is.
    pub gpa: u64,
    /// How long.
    pub len_bytes: u32,
    /// The device may write it.
    pub writable: bool,
}

fn register(function: u64, at: u64) -> u32 {
    mem::load32(function + at)
}

/// Configuration space of each function 0 of the first bus.
pub fn functions(ecam: u64) -> impl Iterator<Item = u64> {
    (0..DEVICES)
        .map(move |device| ecam + device * CONFIG_BYTES)
        .filter(|at| register(*at, 0) != u32::MAX)
}

/// What kind of modern virtio device a function is.
pub fn device_type(function: u64) -> Option<u32> {
    let id = register(function, 0);
    (id & 0xffff == VENDOR).then(|| (id >> 16).checked_sub(FIRST_MODERN))?
}

/// The function's configuration space, if a device of this type is there.
fn find(ecam: u64, wanted: u32) -> Option<u64> {
    functions(ecam).find(|at| device_type(*at) == Some(wanted))
}

/// The number that a device of this type has for an IOMMU: its place on the first bus.
pub fn number(ecam: u64, wanted: u32) -> Result<u32, u64> {
    let function = find(ecam, wanted).ok_or(balloon_failure::DEVICE)?;
    Ok(low_half((function - ecam) >> 12))
}

/// Where the registers of a function are; 0 for those that it does not have.
#[derive(Clone, Copy, Default)]
pub struct Regions {
    /// The common configuration.
    pub common: u64,
    /// The first notification register.
    pub notify: u64,
    /// The distance of two of them by their numbers.
    pub notify_multiplier: u64,
    /// The device's own configuration.
    pub config: u64,
    /// The table of MSI-X.
    pub msix: u64,
}

/// Where a BAR lies.
pub fn bar_gpa(function: u64, bar: u64) -> u64 {
    let at = BARS + bar.min(BAR_COUNT - 1) * 4;
    let low = register(function, at);
    let high = if low & 7 == BAR_64 { u64::from(register(function, at + 4)) << 32 } else { 0 };
    high | u64::from(low & !0xf)
}

/// Looks for the regions that a function's capabilities name.
pub fn regions(function: u64) -> Regions {
    let mut found = Regions::default();
    if register(function, COMMAND) & STATUS_CAPABILITIES == 0 {
        return found;
    }
    let base = |bar: u32| bar_gpa(function, bar.into());
    let mut at = u64::from(register(function, CAPABILITIES) & 0xfc);
    for _ in 0..CAPABILITIES_MAX {
        if at == 0 {
            break;
        }
        let head = register(function, at);
        if head & 0xff == CAPABILITY_VENDOR {
            let gpa =
                base(register(function, at + 4) & 0xff) + u64::from(register(function, at + 8));
            match head >> 24 {
                CAP_COMMON => found.common = gpa,
                CAP_NOTIFY => {
                    found.notify = gpa;
                    found.notify_multiplier = u64::from(register(function, at + 16));
                }
                CAP_DEVICE => found.config = gpa,
                _ => {}
            }
        } else if head & 0xff == CAPABILITY_MSIX {
            let table = register(function, at + 4);
            found.msix = base(table & 7) + u64::from(table & !7);
        }
        at = u64::from(head >> 8 & 0xfc);
    }
    found
}

/// Gives every BAR that is not below 4 GiB a place there, from `gpa` on in such distances, and lets the
/// device be reached.
pub fn place_bars(function: u64, gpa: u64, distance: u64) {
    let command = register(function, COMMAND) & 0xffff;
    mem::store32(function + COMMAND, command & !COMMAND_MEMORY_AND_BUS_MASTER);
    let mut bar = 0;
    while bar < BAR_COUNT {
        let at = function + BARS + bar * 4;
        let low = mem::load32(at);
        if low & 1 == 1 {
            bar += 1;
            continue;
        }
        let wide = low & 6 == BAR_64;
        let high = if wide { mem::load32(at + 4) } else { 0 };
        // A BAR that is not there reads as zero and stays so.
        if low & !0xf == 0 || high != 0 {
            mem::store32(at, low_half(gpa + bar * distance));
            if wide {
                mem::store32(at + 4, 0);
            }
        }
        bar += if wide { 2 } else { 1 };
    }
    mem::store32(function + COMMAND, command | COMMAND_MEMORY_AND_BUS_MASTER);
}

impl Device {
    /// Finds a device of this type and resets it.
    pub fn find(ecam: u64, device_type: u32) -> Result<Self, u64> {
        let function = find(ecam, device_type).ok_or(balloon_failure::DEVICE)?;
        place_bars(function, BARS_GPA, BARS_DISTANCE);
        let device = Self::reset(function)?;
        if device.config == 0 {
            return Err(balloon_failure::LEGACY);
        }
        Ok(device)
    }

    /// Resets a device that can be reached, where it lies.
    pub fn reset(function: u64) -> Result<Self, u64> {
        let Regions { common, notify, notify_multiplier, config, .. } = regions(function);
        if common == 0 || notify == 0 {
            return Err(balloon_failure::LEGACY);
        }
        mem::store8(common + common::STATUS, 0);
        while mem::load8(common + common::STATUS) != 0 {
            core::hint::spin_loop();
        }
        mem::store8(common + common::STATUS, ACKNOWLEDGE_AND_DRIVER);
        let queues = mem::load16(common + common::NUM_QUEUES);
        Ok(Self { common, notify, notify_multiplier, config, queues, offset: 0 })
    }

    /// Agrees on those of the wanted features that the device offers, and says which.
    pub fn agree(&self, wanted: u64) -> Result<u64, u64> {
        let half = |select: u32| {
            mem::store32(self.common + common::DEVICE_FEATURE_SELECT, select);
            u64::from(mem::load32(self.common + common::DEVICE_FEATURE))
        };
        let agreed = (half(0) | half(1) << 32) & (wanted | F_VERSION_1 | F_ACCESS_PLATFORM);
        for (select, half) in [(0, low_half(agreed)), (1, low_half(agreed >> 32))] {
            mem::store32(self.common + common::DRIVER_FEATURE_SELECT, select);
            mem::store32(self.common + common::DRIVER_FEATURE, half);
        }
        self.add_status(FEATURES_OK);
        let taken = mem::load8(self.common + common::STATUS) & FEATURES_OK != 0;
        if taken { Ok(agreed) } else { Err(balloon_failure::FEATURES) }
    }

    /// Sets up a queue whose rings are in the page `rings`.
    pub fn queue(&self, number: u16, rings: u64) -> Result<Queue, u64> {
        self.queue_of(number, rings, QUEUE_SIZE)
    }

    /// The same with fewer descriptors than `QUEUE_SIZE`.
    pub fn queue_of(&self, number: u16, rings: u64, size: u16) -> Result<Queue, u64> {
        mem::store16(self.common + common::QUEUE_SELECT, number);
        if mem::load16(self.common + common::QUEUE_SIZE) < size {
            return Err(balloon_failure::QUEUE);
        }
        mem::clear(rings, abi::PAGE_BYTES);
        mem::store16(rings + AVAIL_AT, AVAIL_NO_INTERRUPT);
        mem::store16(self.common + common::QUEUE_SIZE, size);
        for (register, gpa) in [
            (common::QUEUE_DESC, rings),
            (common::QUEUE_AVAIL, rings + AVAIL_AT),
            (common::QUEUE_USED, rings + USED_AT),
        ] {
            let address = gpa + self.offset;
            mem::store32(self.common + register, low_half(address));
            mem::store32(self.common + register + 4, low_half(address >> 32));
        }
        let offset = mem::load16(self.common + common::QUEUE_NOTIFY_OFF);
        mem::store16(self.common + common::QUEUE_ENABLE, 1);
        let notify = self.notify + u64::from(offset) * self.notify_multiplier;
        Ok(Queue { rings, notify, index: number, size, avail: 0, offset: self.offset })
    }

    /// Has changes of the configuration and answers of each queue announced, by vectors from 0 on.
    pub fn announce(&self) {
        mem::store16(self.common + common::CONFIG_MSIX_VECTOR, 0);
        for number in 0..self.queues {
            mem::store16(self.common + common::QUEUE_SELECT, number);
            mem::store16(self.common + common::QUEUE_MSIX_VECTOR, number + 1);
        }
    }

    /// The device may begin.
    pub fn ready(&self) {
        self.add_status(DRIVER_OK);
    }

    fn add_status(&self, bits: u8) {
        let status = mem::load8(self.common + common::STATUS);
        mem::store8(self.common + common::STATUS, status | bits);
    }
}

impl Queue {
    /// Sends a request of at most as many parts as it has descriptors and waits for the answer, calling `meanwhile`
    /// over and over; returns how many bytes the device says it wrote.
    pub fn request(&mut self, parts: &[Part], meanwhile: impl FnMut()) -> u32 {
        self.post(parts);
        self.wait(meanwhile)
    }

    /// The same without waiting; [`wait`](Self::wait) has to follow before the next.
    pub fn post(&mut self, parts: &[Part]) {
        let parts = parts.get(..usize::from(self.size).min(parts.len())).unwrap_or_default();
        for (part, number) in parts.iter().zip(0_u16..) {
            let at = self.rings + u64::from(number) * 16;
            let more = usize::from(number) + 1 < parts.len();
            let next = if more { DESC_NEXT } else { 0 };
            let write = if part.writable { DESC_WRITE } else { 0 };
            mem::store(at, part.gpa + self.offset);
            mem::store32(at + 8, part.len_bytes);
            mem::store16(at + 12, next | write);
            mem::store16(at + 14, number + 1);
        }
        let slot = u64::from(self.avail % self.size);
        mem::store16(self.rings + AVAIL_AT + 4 + slot * 2, 0);
        self.avail = self.avail.wrapping_add(1);
        mem::store16(self.rings + AVAIL_AT + 2, self.avail);
        fence(Ordering::SeqCst);
        mem::store16(self.notify, self.index);
    }

    /// Waits for the answer to what was posted.
    pub fn wait(&mut self, mut meanwhile: impl FnMut()) -> u32 {
        let slot = u64::from(self.avail.wrapping_sub(1) % self.size);
        while mem::load16(self.rings + USED_AT + 2) != self.avail {
            meanwhile();
            core::hint::spin_loop();
        }
        fence(Ordering::SeqCst);
        mem::load32(self.rings + USED_AT + 4 + slot * 8 + 4)
    }
}

/// Lets a function be reached where it lies, and reach memory.
pub fn enable(function: u64) {
    let command = register(function, COMMAND) & 0xffff;
    mem::store32(function + COMMAND, command | COMMAND_MEMORY_AND_BUS_MASTER);
}

/// Where the capability of MSI-X is among the registers of a function.
pub fn msix_capability(function: u64) -> Option<u64> {
    let mut at = u64::from(register(function, CAPABILITIES) & 0xfc);
    for _ in 0..CAPABILITIES_MAX {
        if at == 0 {
            break;
        }
        let head = register(function, at);
        if head & 0xff == CAPABILITY_MSIX {
            return Some(at);
        }
        at = u64::from(head >> 8 & 0xfc);
    }
    None
}

#[expect(clippy::cast_possible_truncation, reason = "the upper half is another register")]
fn low_half(value: u64) -> u32 {
    value as u32
}
