// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accesses to memory-mapped registers that are in no BAR, and to addresses where nothing is.
//!
//! Owns the mapping of the pages below the end of the machine's addresses, where some platforms have their registers of
//! hot-plug. Must never reach a BAR, whose registers could be told of other RAM, nor the local APIC, nor have the IOAPIC
//! send what is no plain interrupt: the guest would end itself.

use core::arch::x86_64::__cpuid;

use super::{Attacker, DELIVERY_MODE, low_half, store_any};
use crate::abi::{self, PAGE_BYTES};
use crate::boot;
use crate::mem;

const IOAPIC: u64 = 0xfec0_0000;
const IOAPIC_WINDOW: u64 = 0x10;
const TPM: u64 = 0xfed4_0000;
/// Registers of the TPM, and its buffer of commands.
const TPM_LOCALITY: u64 = TPM + 0x08;
const TPM_REQUEST: u64 = TPM + 0x40;
const TPM_START: u64 = TPM + 0x4c;
const TPM_BUFFER: u64 = TPM + 0x80;
const LAPIC_END: u64 = 0xfee0_1000;
/// Behind the configuration space of the first bus.
const OTHER_BUSES: u64 = 1 << 20;

const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Present, writable, user, accessed, dirty, large.
const LARGE_PAGE_FLAGS: u64 = 0xe7;
const TABLE_FLAGS: u64 = 7;
/// The last GiB of the first 512 has the last 2 MiB of all addresses; the directory is where other drivers have rings.
const LAST_ENTRY: u64 = 511;
const DIRECTORY_GPA: u64 = abi::BALLOON_RINGS_GPA + 2 * PAGE_BYTES;
const LAST_VIRTUAL: u64 = LAST_ENTRY << 30;

/// Where pages of registers begin, from the end of all addresses, and how many there can be.
const FIRST_BELOW_END: u64 = 0x1_1000;
const PAGES: u64 = 4;
/// Offsets of what a register of hot-plug is selected and told by.
const SELECT: u64 = 0;
const STATE: u64 = 4;
const EJECT: u64 = 8;
const MEMORY_STATE: u64 = 20;

/// As many address bits as a machine has by default, where the processor has more. A KVM that cannot intercept CPUID
/// shows the processor's own, beyond which KVM refuses addresses.
const ADDRESS_BITS_MAX: u64 = 46;

/// Maps the last 2 MiB of the machine's addresses, and says where those are now.
pub(super) fn map_last() -> u64 {
    let bits = u64::from(__cpuid(0x8000_0008).eax & 0xff).clamp(36, ADDRESS_BITS_MAX);
    let last = (1 << bits) - LARGE_PAGE_BYTES;
    mem::clear(DIRECTORY_GPA, PAGE_BYTES);
    mem::store(DIRECTORY_GPA, last | LARGE_PAGE_FLAGS);
    mem::store(&raw const boot::pdpt as u64 + LAST_ENTRY * 8, DIRECTORY_GPA | TABLE_FLAGS);
    LAST_VIRTUAL
}

impl Attacker {
    /// Reads and writes in one place, a few times.
    pub(super) fn access_registers(&mut self, ecam: u64) {
        for _ in 0..=self.below(24) {
            match self.below(16) {
                0 => self.write_ioapic(),
                1 => self.command_tpm(),
                2 => self.access(TPM, PAGE_BYTES),
                3 => self.access(abi::MMIO_FIRST_GPA, PAGE_BYTES),
                4 => self.access(LAPIC_END, 1 << 16),
                5 => self.access(ecam + OTHER_BUSES, 15 << 20),
                6 => self.access(IOAPIC + PAGE_BYTES, 1 << 18),
                7..12 => self.hotplug(),
                _ => {
                    let page = self.register_page();
                    // Also what reaches from one page to the next.
                    let len_bytes = if self.one_in(4) { PAGE_BYTES } else { 32 };
                    self.access(page, len_bytes);
                }
            }
        }
    }

    /// A page of registers, or at times one before or behind them.
    fn register_page(&mut self) -> u64 {
        let first = self.last_pages + LARGE_PAGE_BYTES - FIRST_BELOW_END;
        let below = if self.one_in(8) { self.below(PAGES + 2) } else { 1 + self.below(PAGES) };
        first + PAGE_BYTES - below * PAGE_BYTES
    }

    /// What a driver of hot-plug does: selects, looks, acknowledges, ejects.
    fn hotplug(&mut self) {
        let page = self.register_page();
        let number = if self.one_in(8) { self.bits() } else { low_half(self.below(8)) };
        let bits = self.below(256).to_le_bytes()[0];
        match self.below(6).min(3) {
            0 => {
                let ejected = if self.one_in(2) { 1 << (number & 31) } else { number };
                mem::store32(page + EJECT, ejected);
            }
            1 => _ = mem::load32(page + self.below(8) * 4),
            3 => {
                mem::store32(page + SELECT, number);
                mem::load8(page + STATE);
                mem::store8(page + STATE, bits);
            }
            _ => {
                mem::store8(page + SELECT, number.to_le_bytes()[0]);
                mem::load8(page + MEMORY_STATE);
                mem::store8(page + MEMORY_STATE, bits);
            }
        }
    }

    /// Any access in a range that is no RAM.
    fn access(&mut self, first: u64, len_bytes: u64) {
        let at = first + self.below(len_bytes - 16);
        let value = self.random.number();
        match self.below(8) {
            0 => _ = mem::load8(at),
            1 => _ = mem::load16(at),
            2 => _ = mem::load32(at),
            3 => _ = mem::load(at),
            4 if self.one_in(4) => {
                let count = self.below(64).min((first + len_bytes - at) / 4);
                mem::fill32(at, low_half(value), count);
            }
            5 if self.one_in(4) => mem::store128(at, value),
            _ => {
                let width = self.below(4);
                store_any(at, if self.one_in(2) { value } else { value & 0xf }, width);
            }
        }
    }

    /// Writes registers of the IOAPIC, whose messages stay plain interrupts, and reads them.
    fn write_ioapic(&mut self) {
        let index = self.below(256).to_le_bytes()[0];
        let value = self.bits() & !DELIVERY_MODE;
        mem::store32(IOAPIC, u32::from(index));
        mem::load32(IOAPIC + IOAPIC_WINDOW);
        match self.below(3) {
            0 => mem::store32(IOAPIC + IOAPIC_WINDOW, value),
            1 => mem::store8(IOAPIC + IOAPIC_WINDOW, value.to_le_bytes()[0]),
            _ => _ = mem::load16(IOAPIC + self.below(64)),
        }
    }

    /// Gives the TPM a command with a header that may be wrong, or starts what is in its buffer.
    fn command_tpm(&mut self) {
        mem::store32(TPM_LOCALITY, 1);
        mem::store32(TPM_REQUEST, 1);
        let len_bytes = match self.below(4) {
            0 => self.bits(),
            1 => low_half(self.below(0x2000)),
            _ => 10 + low_half(self.below(64)),
        };
        let code = 0x11f + low_half(self.below(0x80));
        mem::store16(TPM_BUFFER, if self.one_in(8) { self.half() } else { 0x0180 });
        mem::store16(TPM_BUFFER + 2, low_half_of(len_bytes.swap_bytes(), 0));
        mem::store16(TPM_BUFFER + 4, low_half_of(len_bytes.swap_bytes(), 16));
        mem::store32(TPM_BUFFER + 6, code.swap_bytes());
        mem::store(TPM_BUFFER + 10, self.random.number());
        mem::store32(TPM_START, 1);
        mem::load32(TPM_START);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the rest is another register")]
fn low_half_of(word: u32, shift: u32) -> u16 {
    (word >> shift) as u16
}
