// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The code at the PC's reset vector, for kernels that restart the machine through the BIOS.
//!
//! Owns these few bytes. On hardware-reduced ACPI platforms Linux restarts through UEFI alone and,
//! where there is none, enters real mode and jumps to F000:FFF0 without ever trying the reset
//! register of the FADT. A machine that boots its kernel directly has no firmware there, so this
//! stands in for it. Must work with any segment registers and without a stack.

use crate::layout;

/// Real mode code that asks the power device for a reset and then halts.
pub(super) fn vector() -> [u8; 9] {
    let [port_low, port_high] = layout::ACPI_POWER_PORT.to_le_bytes();
    [
        0xba,
        port_low,
        port_high, // mov dx, port
        0xb0,
        layout::ACPI_POWER_RESET_VALUE, // mov al, value
        0xee,                           // out dx, al
        0xf4,                           // hlt, should the reset take a moment
        0xeb,
        0xfd, // jmp to the hlt
    ]
}
