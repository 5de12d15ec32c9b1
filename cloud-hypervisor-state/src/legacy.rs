// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices at fixed addresses, and the panic device's own state.

use serde::{Deserialize, Serialize};

use crate::lists::{Fixed, List};

/// Number of pins of the I/O APIC.
pub const IOAPIC_PINS_COUNT: usize = 24;
/// Maximum number of bytes of input that wait for the guest.
const INPUT_BYTES_MAX: usize = 1 << 20;

/// The I/O APIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ioapic {
    /// Its id, without the shift of the register.
    pub id_reg: u32,
    /// The selected register.
    pub reg_sel: u32,
    /// Redirection entries.
    pub reg_entries: Fixed<u64, IOAPIC_PINS_COUNT>,
    /// Which entries have been written.
    pub used_entries: Fixed<bool, IOAPIC_PINS_COUNT>,
    /// Its address.
    pub apic_address: u64,
}

/// The serial port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "registers")]
pub struct Serial {
    pub interrupt_enable: u8,
    pub interrupt_identification: u8,
    pub line_control: u8,
    pub line_status: u8,
    pub modem_control: u8,
    pub modem_status: u8,
    pub scratch: u8,
    pub baud_divisor: u16,
    /// What was received and not read by the guest.
    pub in_buffer: List<u8, INPUT_BYTES_MAX>,
}

/// The panic device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PvpanicData {
    /// The events that it lists.
    pub events: u8,
}
