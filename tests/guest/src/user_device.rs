// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Driver of a device that another process emulates over vfio-user: it copies memory, looks into a BAR that is mapped,
//! and interrupts.
//!
//! Owns the requests, one at a time, and the check of what each leads to. Interrupts are not taken: that one has come is
//! seen in the local APIC. Must never count a request before what it leads to was seen.

use crate::abi::{self, PAGE_BYTES, balloon_failure, disk_failure};
use crate::mem;
use crate::virtio::{BARS_GPA, functions, place_bars};

/// Vendor and device.
const ID: u32 = 0x0d0d_1234;
const BARS: u64 = 0x10;
/// The capability of MSI-X, and its control register.
const MSIX_CONTROL: u64 = 0x42;
const MSIX_ENABLE: u16 = 1 << 15;
const BARS_DISTANCE: u64 = 1 << 20;

/// Registers in BAR 0.
const SOURCE: u64 = 0x00;
const TARGET: u64 = 0x08;
const LEN: u64 = 0x10;
const ORDER: u64 = 0x18;
const DONE: u64 = 0x20;
const RESULT: u64 = 0x28;
const ORDER_COPY: u64 = 1;
const ORDER_INTERRUPT: u64 = 2;
const ORDER_LOOK: u64 = 3;

const LAPIC: u64 = 0xfee0_0000;
const SPURIOUS: u64 = LAPIC + 0xf0;
const APIC_ENABLED: u32 = 0x1ff;
/// Vectors, of which each is used once: nothing takes an interrupt from the local APIC.
const VECTORS: core::ops::Range<u32> = 0x60..0x80;
/// Where the local APIC says which of them are to be taken.
const REQUESTED: u64 = LAPIC + 0x230;
/// How often it is looked for; the device has sent it when its order is done.
const LOOKS: u64 = 1 << 20;

const FROM_GPA: u64 = abi::BALLOON_REQUEST_GPA;
const TO_GPA: u64 = FROM_GPA + PAGE_BYTES;
const COPY_BYTES: u64 = 512;

/// The device.
pub struct UserDevice {
    registers: u64,
    shared: u64,
    done: u64,
}

impl UserDevice {
    /// Starts the first such device, and has it interrupt once.
    pub fn start(ecam: u64) -> Result<Self, u64> {
        let function = functions(ecam).find(|at| mem::load32(*at) == ID);
        let function = function.ok_or(balloon_failure::DEVICE)?;
        place_bars(function, BARS_GPA, BARS_DISTANCE);
        let bar = |index: u64| u64::from(mem::load32(function + BARS + index * 4) & !0xf);
        let (registers, shared, table) = (bar(0), bar(1), bar(2));
        let mut device = Self { registers, shared, done: mem::load(registers + DONE) };
        mem::store32(SPURIOUS, APIC_ENABLED);
        let is_requested = |vector: u32| mem::load32(REQUESTED) & 1 << (vector % 32) != 0;
        let vector = VECTORS.into_iter().find(|vector| !is_requested(*vector));
        let vector = vector.ok_or(disk_failure::REQUEST)?;
        // The first vCPU, edge-triggered.
        for (at, word) in [(0, 0xfee0_0000), (4, 0), (8, vector), (12, 0)] {
            mem::store32(table + at, word);
        }
        mem::store16(function + MSIX_CONTROL, MSIX_ENABLE);
        device.order(ORDER_INTERRUPT, || ())?;
        for _ in 0..LOOKS {
            if is_requested(vector) {
                return Ok(device);
            }
        }
        Err(disk_failure::REQUEST)
    }

    /// Has what nothing else looks like copied, and looked at in the mapped BAR.
    pub fn ask(&mut self, number: u64, mut meanwhile: impl FnMut()) -> Result<(), u64> {
        let word = |at: u64| number * 1_000_003 + at;
        for at in (0..COPY_BYTES).step_by(8) {
            mem::store(FROM_GPA + at, word(at));
            mem::store(TO_GPA + at, 0);
        }
        for (register, value) in [(SOURCE, FROM_GPA), (TARGET, TO_GPA), (LEN, COPY_BYTES)] {
            mem::store(self.registers + register, value);
        }
        self.order(ORDER_COPY, &mut meanwhile)?;
        let mut words = (0..COPY_BYTES).step_by(8);
        let is_copied = words.all(|at| mem::load(TO_GPA + at) == word(at));
        mem::store(self.shared, word(1));
        self.order(ORDER_LOOK, &mut meanwhile)?;
        let is_seen = mem::load(self.registers + RESULT) == word(1);
        if is_copied && is_seen { Ok(()) } else { Err(disk_failure::CONTENT) }
    }

    /// Has an order carried out, and waits for that.
    fn order(&mut self, order: u64, mut meanwhile: impl FnMut()) -> Result<(), u64> {
        mem::store(self.registers + ORDER, order);
        self.done += 1;
        loop {
            meanwhile();
            match mem::load(self.registers + DONE) {
                done if done == self.done => return Ok(()),
                u64::MAX => return Err(disk_failure::REQUEST),
                _ => core::hint::spin_loop(),
            }
        }
    }
}
