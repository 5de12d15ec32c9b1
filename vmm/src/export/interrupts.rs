// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O APIC. The PICs that KVM has are not there for these guests, and are not written.

use cloud_hypervisor_state::{Fixed, IOAPIC_PINS_COUNT, Ioapic};
use hypervisor::IrqchipState;

use super::error::{ExportError, fits};

/// Address of the messages that it sends, which is what the document has as its own.
const MESSAGES: u64 = 0xfee0_0000;
/// An entry that was never written: masked.
const ENTRY_AT_RESET: u64 = 0x1_0000;
/// Where things are in the kernel's structure.
const SELECTED: usize = 16;
const ID: usize = 20;
const REQUESTS: usize = 24;
const ENTRIES: usize = 32;
/// Length of the kernel's structure: number of the chip, padding, state.
const CHIP_BYTES: usize = 520;

/// The I/O APIC; an interrupt that waits in it is added to `losses`.
///
/// # Errors
/// The saved one is longer than the kernel's structure.
pub fn convert(irqchips: &IrqchipState, losses: &mut Vec<String>) -> Result<Ioapic, ExportError> {
    let mut chip = [0; CHIP_BYTES];
    fits(irqchips.ioapic.fill(&mut chip), || "the I/O APIC".to_owned())?;
    let word = |at: usize| {
        let found = chip.get(at..).and_then(<[u8]>::first_chunk).copied();
        u32::from_le_bytes(found.unwrap_or_default())
    };
    let requests = word(REQUESTS);
    if requests != 0 {
        losses.push(format!("interrupts that wait in the I/O APIC ({requests:#x}) are lost there"));
    }
    let entry = |pin: usize| {
        let found = chip.get(ENTRIES.saturating_add(pin.saturating_mul(8))..);
        u64::from_le_bytes(found.and_then(<[u8]>::first_chunk).copied().unwrap_or_default())
    };
    let entries: [u64; IOAPIC_PINS_COUNT] = std::array::from_fn(entry);
    Ok(Ioapic {
        id_reg: word(ID),
        reg_sel: word(SELECTED),
        reg_entries: Fixed::from(entries),
        used_entries: Fixed::from(entries.map(|entry| entry != ENTRY_AT_RESET)),
        apic_address: MESSAGES,
    })
}
