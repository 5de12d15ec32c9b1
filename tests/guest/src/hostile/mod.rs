// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver that attacks: random but repeatable misuse of every PCI function's registers, queues, interrupts and
//! configuration space, of I/O ports, and of memory-mapped registers that are in no BAR.
//!
//! Owns the functions that it finds, and the arena, which is the end of RAM: rings and buffers lie
//! there or outside of RAM, so that a device that does as it is told leaves all test pages as they are, and
//! one that writes where it must not shows. Must never name an address of other RAM, nor make a device write
//! what another one would take for such an address; and must never wait for a device without an end.

mod ports;
mod registers;
mod requests;
mod rings;

use ports::Ports;

use crate::abi::{self, PAGE_BYTES};
use crate::layout::Span;
use crate::mem;
use crate::pattern::Random;
use crate::virtio::{self, Regions, common};

/// Functions that are attacked.
const FUNCTIONS_MAX: usize = 16;
/// Distance of the BARs of two functions that were moved below 4 GiB, and of two of one function.
const FUNCTION_DISTANCE: u64 = 16 << 20;
const BAR_DISTANCE: u64 = 2 << 20;
/// Queues of a function that get rings, and rings' pages of each: descriptors, available, used, one to spare.
const QUEUES_MAX: u64 = 8;
const RING_PAGES: u64 = 4;
/// Page numbers for the balloon; no device ever writes here.
const PFN_BYTES: u64 = 16 * PAGE_BYTES;
/// Requests whose layouts have addresses; nor here. It is a part of what the balloon takes no page numbers from.
const SHAPED_BYTES: u64 = 2 * PAGE_BYTES;

const CONFIG_BYTES: u64 = 4096;
const BAR_COUNT: usize = 6;
const BARS: u64 = 0x10;
const COMMAND: u64 = 0x04;
const COMMAND_MEMORY_AND_BUS_MASTER: u32 = 6;

const BALLOON: u32 = 5;
const IOMMU: u32 = 23;

/// Attacks after which functions are looked for again.
const ATTACKS_BETWEEN_LOOKS: u64 = 1024;
/// Of all kinds of attack, how many of each there are: most of it is what a driver does with one thing wrong, since the
/// rest gets no further than the first check.
const WEIGHTS: [u64; 14] = [1, 1, 1, 2, 5, 44, 1, 2, 2, 1, 2, 1, 1, 4];
const _: () = assert!(WEIGHTS.len() as u64 == abi::vcpu::ATTACK_KINDS);

/// Delivery mode of a message: any but "fixed" could be an NMI or INIT, by which the guest would end itself.
const DELIVERY_MODE: u32 = 0x700;

/// A function of the first bus.
#[derive(Clone, Copy, Default)]
struct Function {
    config_space: u64,
    bars: [u32; BAR_COUNT],
    command: u32,
    regions: Regions,
    id: u32,
    device_type: u32,
    queues: u16,
}

/// What is to be attacked, and with what.
#[derive(Clone, Copy)]
pub struct Orders {
    /// Configuration space.
    pub ecam: u64,
    /// Of the random numbers.
    pub seed: u64,
    /// The end of RAM.
    pub arena: Span,
    /// Where that is.
    pub ram_end: u64,
    /// A bit for each kind of attack; 0: all.
    pub kinds: u64,
    /// Type of the virtio devices; 0: all functions.
    pub device_type: u32,
    /// A vCPU that was never started.
    pub idle_vcpu: u64,
    /// Frequency of the TSC.
    pub khz: u64,
}

/// The driver.
pub struct Attacker {
    random: Random,
    orders: Orders,
    arena: Span,
    ram_end: u64,
    functions: [Function; FUNCTIONS_MAX],
    count: usize,
    steps: u64,
    /// Where the last pages of all addresses are seen.
    last_pages: u64,
    ports: Ports,
}

impl Attacker {
    /// Finds what configuration space shows. None without a function to attack or without an arena.
    pub fn start(orders: Orders) -> Option<Self> {
        let Orders { seed, arena, ram_end, .. } = orders;
        let rings = RING_PAGES * QUEUES_MAX * FUNCTIONS_MAX as u64 * PAGE_BYTES;
        if arena.end.saturating_sub(arena.start) < PFN_BYTES + SHAPED_BYTES + 2 * rings
            || arena.end != ram_end
        {
            return None;
        }
        let mut attacker = Self {
            random: Random::new(seed, u64::MAX),
            orders,
            arena,
            ram_end,
            functions: [Function::default(); FUNCTIONS_MAX],
            count: 0,
            steps: 0,
            last_pages: registers::map_last(),
            ports: Ports::new(orders.idle_vcpu, orders.khz),
        };
        attacker.look();
        for index in 0..PFN_BYTES / 4 {
            let pfn = attacker.pfn();
            mem::store32(arena.start + index * 4, pfn);
        }
        // Some kinds alone would meet devices that do nothing.
        for index in (0..attacker.count).filter(|_| orders.kinds != 0) {
            let function = attacker.functions.get(index).copied().unwrap_or_default();
            attacker.set_up(function, index as u64);
        }
        (attacker.count > 0).then_some(attacker)
    }

    /// Looks for functions, of which some may have come, and others may have gone and left their place.
    fn look(&mut self) {
        for config_space in virtio::functions(self.orders.ecam) {
            let id = mem::load32(config_space);
            let device_type = virtio::device_type(config_space).unwrap_or(0);
            if self.orders.device_type != 0 && device_type != self.orders.device_type {
                continue;
            }
            let mut known = self.functions.iter().take(self.count);
            let place = known.position(|function| function.config_space == config_space);
            let index = place.unwrap_or(self.count);
            let Some(slot) = self.functions.get_mut(index) else { break };
            if place.is_some() && slot.id == id {
                continue;
            }
            *slot = Function::at(config_space, index, device_type);
            self.count = self.count.max(index + 1);
        }
    }

    /// One attack; returns its kind, or `None` where it could not be made.
    pub fn step(&mut self) -> Option<u64> {
        self.steps = self.steps.wrapping_add(1);
        if self.steps.is_multiple_of(ATTACKS_BETWEEN_LOOKS) {
            self.look();
        }
        let index = self.below(self.count as u64);
        let function = *usize::try_from(index).ok().and_then(|at| self.functions.get(at))?;
        let kind = self.kind();
        if matches!(kind, 4 | 5) && !self.works(function) {
            self.set_up(function, index);
        }
        match kind {
            0 => self.write_config_space(function),
            1 => self.move_bar(function),
            2 => self.write_common(function),
            3 => self.set_up(function, index),
            4 => self.push_rubbish(function, index),
            5 => self.push_request(function, index),
            6 => self.notify_over_and_over(function),
            7 => self.write_msix(function),
            8 => self.write_device_config(function),
            9 => Self::reset_over_and_over(function),
            10 => restore(function),
            11 => self.read_anywhere(function),
            12 if !self.access_ports() => return None,
            12 => {}
            _ => self.access_registers(self.orders.ecam),
        }
        Some(kind)
    }

    /// One of the kinds that are wanted, by their weights.
    fn kind(&mut self) -> u64 {
        let kinds = self.orders.kinds;
        let is_wanted = |kind: u64| kinds == 0 || kinds >> kind & 1 == 1;
        let weight = |kind: u64, weight: u64| if is_wanted(kind) { weight } else { 0 };
        let all = || (0..).zip(WEIGHTS).map(|(kind, of)| (kind, weight(kind, of)));
        let mut left = self.below(all().map(|(_, weight)| weight).sum::<u64>().max(1));
        for (kind, weight) in all() {
            if left < weight {
                return kind;
            }
            left -= weight;
        }
        0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit)
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn bits(&mut self) -> u32 {
        low_half(self.random.number() >> 32)
    }

    fn half(&mut self) -> u16 {
        low_quarter(self.random.number() >> 48)
    }

    /// Requests with addresses.
    fn shaped(&self) -> u64 {
        self.arena.start + PFN_BYTES + RING_PAGES * QUEUES_MAX * FUNCTIONS_MAX as u64 * PAGE_BYTES
    }

    fn data_start(&self) -> u64 {
        self.arena.start
            + PFN_BYTES
            + SHAPED_BYTES
            + RING_PAGES * QUEUES_MAX * FUNCTIONS_MAX as u64 * PAGE_BYTES
    }

    /// An address in the part of the arena that devices may write.
    fn data(&mut self) -> u64 {
        let start = self.data_start();
        start + self.below(self.arena.end - start)
    }

    /// An address that a device may be told: of the arena, or of no RAM.
    fn address(&mut self) -> u64 {
        let found = match self.below(12) {
            0..6 => self.data(),
            6 => self.arena.end - 1 - self.below(64),
            7 => self.ram_end + self.below(1 << 33),
            8 => self.random.number(),
            9 => u64::MAX - self.below(PAGE_BYTES),
            10 => 0xe800_0000 + self.below(1 << 28),
            _ => 0xfec0_0000 + self.below(1 << 22),
        };
        if found < self.data_start() { found | 1 << 45 } else { found }
    }

    fn length(&mut self) -> u32 {
        let any = self.bits();
        match self.below(8) {
            0 => 0,
            1 => any % 64,
            2 => 512,
            3 => 4096,
            4 => any % (1 << 16),
            5 => any % (1 << 22),
            6 => u32::MAX - any % 4096,
            _ => any,
        }
    }

    /// Writes anything anywhere in configuration space, a few times.
    fn write_config_space(&mut self, function: Function) {
        for _ in 0..=self.below(8) {
            let at = if self.one_in(2) { self.below(256) } else { self.below(CONFIG_BYTES - 8) };
            let value = self.random.number();
            store_any(function.config_space + at, value, self.below(4));
        }
    }

    /// Any function whose registers may come to lie where those of `function` do. What is written to one
    /// of them may then reach the other, and rings of other devices would have the balloon give up pages.
    fn neighbour(&mut self, function: Function) -> Function {
        let index = usize::try_from(self.below(self.count as u64)).unwrap_or(0);
        let other = self.functions.get(index).copied().unwrap_or(function);
        let guarded = [function, other].iter().any(|one| is_guarded(one.device_type));
        if guarded { function } else { other }
    }

    /// Moves a BAR: over RAM, over another BAR, or out of every window.
    fn move_bar(&mut self, function: Function) {
        let bar = self.below(BAR_COUNT as u64);
        let other = self.below(BAR_COUNT as u64);
        let of_another = usize::try_from(other)
            .ok()
            .and_then(|at| self.neighbour(function).bars.get(at).copied());
        let to = match self.below(6) {
            0 => 0,
            1 => u32::MAX,
            2 => of_another.unwrap_or(0),
            3 => low_half(self.data()),
            4 => 0xe800_0000,
            _ => self.bits(),
        };
        mem::store32(function.config_space + BARS + bar * 4, to);
        if self.one_in(2) {
            let command = self.bits();
            mem::store32(function.config_space + COMMAND, command & 0xffff);
        }
    }

    /// Writes anything anywhere in the common configuration.
    fn write_common(&mut self, function: Function) {
        if function.regions.common == 0 {
            return;
        }
        for _ in 0..=self.below(16) {
            let at = self.below(72);
            let is_ring = (common::QUEUE_DESC..common::QUEUE_USED + 8).contains(&at);
            if is_ring && is_guarded(function.device_type) {
                continue;
            }
            let value = if is_ring { self.address() } else { self.random.number() };
            // Half an address of a ring could name other RAM, and what begins before them may reach into them.
            let (at, width) = match at {
                _ if is_ring => (at & !7, 3),
                24.. if at < common::QUEUE_DESC => (at & !3, 2),
                _ => (at, self.below(4)),
            };
            store_any(function.regions.common + at, value, width);
        }
    }

    /// Tells a device of work hundreds of times.
    fn notify_over_and_over(&mut self, function: Function) {
        if function.regions.notify == 0 {
            return;
        }
        for _ in 0..self.below(300) {
            let queue =
                if self.one_in(4) { u64::from(self.half()) } else { self.below(QUEUES_MAX) };
            notify(function, queue);
        }
    }

    /// Writes anything to the table of interrupts and to their pending bits.
    fn write_msix(&mut self, function: Function) {
        if function.regions.msix == 0 {
            return;
        }
        for _ in 0..=self.below(16) {
            let at = self.below(1 << 13) & !3;
            let value = self.bits();
            let value = if at & 15 == 8 { value & !DELIVERY_MODE } else { value };
            mem::store32(function.regions.msix + at, value);
        }
    }

    /// Writes anything to the device's own configuration.
    fn write_device_config(&mut self, function: Function) {
        if function.device_type == 0 {
            self.write_other(function);
        }
        if function.regions.config == 0 {
            return;
        }
        for _ in 0..=self.below(8) {
            let at = self.below(128);
            let value = self.random.number();
            store_any(function.regions.config + at, value, self.below(4));
        }
    }

    /// Writes to the first BAR of what is no virtio device. What could be an address of RAM is one that devices may have.
    fn write_other(&mut self, function: Function) {
        let [low, high, ..] = function.bars;
        if low & !0xf == 0 || low & 7 == 4 && high != 0 {
            return;
        }
        for _ in 0..=self.below(8) {
            let at = u64::from(low & !0xf) + self.below(8) * 8;
            let value = match self.below(4) {
                0 => self.address(),
                1 => self.below(8),
                2 => self.below(1 << 16),
                _ => self.random.number() | 1 << 45,
            };
            if self.one_in(4) {
                mem::store8(at, value.to_le_bytes()[0]);
            } else {
                mem::store(at, value);
            }
            mem::load(at);
        }
    }

    /// Resets a device again and again, and starts it in between.
    fn reset_over_and_over(function: Function) {
        let base = function.regions.common;
        if base == 0 {
            return;
        }
        for _ in 0..8 {
            mem::store8(base + common::STATUS, 15);
            mem::store8(base + common::STATUS, 0);
        }
    }

    /// Reads anything, also where nothing is.
    fn read_anywhere(&mut self, function: Function) {
        for _ in 0..=self.below(16) {
            let any = self.random.number();
            let at = match self.below(4) {
                0 => function.config_space + any % (CONFIG_BYTES - 8),
                1 if function.regions.common != 0 => function.regions.common + any % (1 << 14),
                2 if function.regions.notify != 0 => function.regions.notify + any % (1 << 14),
                _ => 0xe000_0000 + any % (1 << 24),
            };
            match self.below(4) {
                0 => _ = mem::load8(at),
                1 => _ = mem::load16(at),
                2 => _ = mem::load32(at),
                _ => _ = mem::load(at),
            }
        }
    }
}

impl Function {
    /// The function whose BARs get the place of number `index`.
    fn at(config_space: u64, index: usize, device_type: u32) -> Self {
        let gpa = virtio::BARS_GPA + index as u64 * FUNCTION_DISTANCE;
        virtio::place_bars(config_space, gpa, BAR_DISTANCE);
        let mut bars = [0; BAR_COUNT];
        for (bar, index) in bars.iter_mut().zip(0..) {
            *bar = mem::load32(config_space + BARS + index * 4);
        }
        let regions = virtio::regions(config_space);
        let queues =
            if regions.common == 0 { 0 } else { mem::load16(regions.common + common::NUM_QUEUES) };
        Self {
            config_space,
            bars,
            command: mem::load32(config_space + COMMAND) & 0xffff,
            regions,
            id: mem::load32(config_space),
            device_type,
            queues,
        }
    }
}

/// Whether a device is told of memory by what it reads, rather than by descriptors alone.
fn is_guarded(device_type: u32) -> bool {
    matches!(device_type, BALLOON | IOMMU)
}

/// Puts a function back to where it can be reached.
fn restore(function: Function) {
    mem::store32(function.config_space + COMMAND, 0);
    for (bar, index) in function.bars.iter().zip(0..) {
        mem::store32(function.config_space + BARS + index * 4, *bar);
    }
    let command = function.command | COMMAND_MEMORY_AND_BUS_MASTER;
    mem::store32(function.config_space + COMMAND, command);
}

fn notify(function: Function, queue: u64) {
    let Regions { notify, notify_multiplier, .. } = function.regions;
    if notify != 0 {
        mem::store16(notify + queue % 64 * notify_multiplier, low_quarter(queue));
    }
}

/// Writes 1, 2, 4 or 8 bytes.
fn store_any(at: u64, value: u64, width: u64) {
    match width {
        0 => mem::store8(at, value.to_le_bytes()[0]),
        1 => mem::store16(at, low_quarter(value)),
        2 => mem::store32(at, low_half(value)),
        _ => mem::store(at, value),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "what is above goes elsewhere or nowhere")]
fn low_half(value: u64) -> u32 {
    value as u32
}

#[expect(clippy::cast_possible_truncation, reason = "what is above goes elsewhere or nowhere")]
fn low_quarter(value: u64) -> u16 {
    value as u16
}
