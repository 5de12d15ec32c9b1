// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupt controllers: the I/O APIC as KVM's, and two PICs with all lines masked.
//!
//! The guest has found no PIC. KVM has them, so they must be unable to raise an interrupt, which the local APIC's LINT0
//! would pass on.

use cloud_hypervisor_state::Ioapic;
use hypervisor::{Blob, IrqchipState};

use super::error::{AdoptError, ensure};

const PATH: &str = "device-manager/__ioapic";
const ADDRESS: u64 = 0xfec0_0000;
/// Address of the messages that it sends, which is what the document has as its own.
const MESSAGES: u64 = 0xfee0_0000;
/// An entry that was never written: masked.
const ENTRY_AT_RESET: u64 = 0x1_0000;
/// Length of the kernel's structure: number of the chip, padding, state.
const CHIP_BYTES: usize = 520;
const STATE: usize = 8;
/// In the state of a PIC: mask of its lines, and the lines that can be level-triggered.
const PIC_IMR: usize = STATE + 2;
const PIC_ELCR_MASK: usize = STATE + 15;
const PIC_MASTER_ELCR_MASK: u8 = 0xf8;
const PIC_SLAVE_ELCR_MASK: u8 = 0xde;
/// In the state of the I/O APIC.
const IOAPIC_SELECTED: usize = STATE + 8;
const IOAPIC_ID: usize = STATE + 12;
const IOAPIC_ENTRIES: usize = STATE + 24;

/// The interrupt controllers.
///
/// # Errors
/// The I/O APIC has a state that no guest can have given it.
pub fn convert(ioapic: &Ioapic) -> Result<IrqchipState, AdoptError> {
    let at = |field: &str| format!("{PATH}: {field}");
    ensure(
        ioapic.apic_address == MESSAGES,
        || at("apic_address"),
        || format!("{:#x} is not {MESSAGES:#x}", ioapic.apic_address),
    )?;
    let (id, selected) = (ioapic.id_reg, ioapic.reg_sel);
    ensure(id <= 15, || at("id_reg"), || format!("{id} is no id of an I/O APIC"))?;
    ensure(selected <= 0xff, || at("reg_sel"), || format!("{selected:#x} is no register"))?;
    let entries = ioapic.reg_entries.iter().zip(ioapic.used_entries.iter());
    for (pin, (entry, is_used)) in entries.enumerate() {
        ensure(
            *is_used || *entry == ENTRY_AT_RESET,
            || at(&format!("reg_entries[{pin}]")),
            || format!("{entry:#x}, and used_entries says that it was never written"),
        )?;
    }
    let mut chip = [0; CHIP_BYTES];
    put(&mut chip, 0, &2_u32.to_le_bytes());
    put(&mut chip, STATE, &ADDRESS.to_le_bytes());
    put(&mut chip, IOAPIC_SELECTED, &selected.to_le_bytes());
    put(&mut chip, IOAPIC_ID, &id.to_le_bytes());
    let entries: Vec<u8> =
        ioapic.reg_entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    put(&mut chip, IOAPIC_ENTRIES, &entries);
    Ok(IrqchipState {
        version: 1,
        pic_master: masked_pic(0, PIC_MASTER_ELCR_MASK),
        pic_slave: masked_pic(1, PIC_SLAVE_ELCR_MASK),
        ioapic: Blob::new(&chip),
    })
}

/// A PIC that was never initialised, with all lines masked.
fn masked_pic(number: u32, elcr_mask: u8) -> Blob {
    let mut chip = [0; CHIP_BYTES];
    put(&mut chip, 0, &number.to_le_bytes());
    put(&mut chip, PIC_IMR, &[0xff]);
    put(&mut chip, PIC_ELCR_MASK, &[elcr_mask]);
    Blob::new(&chip)
}

/// Copies bytes into a structure that has room for them.
fn put(structure: &mut [u8], at: usize, bytes: &[u8]) {
    structure.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
}
