// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved form of a configuration space.
//!
//! The whole register file is saved, read-only parts included, so that a state can only be
//! restored into a function of exactly the same layout. Restoring applies the same masks as a
//! guest's write.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{BAR_TYPE_64, CONFIG_SPACE_LEN_BYTES, ConfigSpace, EXTENDED_OFFSET, register};
use crate::bar::BarKind;

/// Version of [`ConfigSpaceState`] that is written, and the newest that is read.
const VERSION: u32 = 1;
/// Type bits of a BAR: I/O or memory, and width.
const BAR_WIDTH_BITS: u32 = 0b111;
const STANDARD_REGISTERS_COUNT: usize = EXTENDED_OFFSET as usize / 4;

/// State of a configuration space; plain data, untrusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigSpaceState {
    /// Version of this structure.
    pub version: u32,
    /// The 64 registers of the first 256 bytes.
    pub registers: Vec<u32>,
    /// Offset and value of the non-zero registers beyond them, ascending.
    pub extended_registers: Vec<(u16, u32)>,
}

impl ConfigSpaceState {
    /// Width of a memory BAR; `None` for anything else in the register (PCI 3.0, 6.2.5.1).
    pub fn bar_width(&self, index: u8) -> Option<BarKind> {
        let register = usize::from(register::BAR0 / 4).saturating_add(index.into());
        match self.registers.get(register)? & BAR_WIDTH_BITS {
            0 => Some(BarKind::Memory32),
            BAR_TYPE_64 => Some(BarKind::Memory64),
            _ => None,
        }
    }
}

/// Why a saved configuration space is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigStateError {
    /// The version is unknown.
    #[error(
        "configuration space state version {found} is not known here (newest known: {VERSION})"
    )]
    Version {
        /// Version found.
        found: u32,
    },
    /// The number of registers is wrong.
    #[error("the configuration space state has {found} registers instead of 64")]
    Length {
        /// Number of registers.
        found: usize,
    },
    /// The offset of an extended register is out of range, misaligned or out of order.
    #[error("the configuration space state names an impossible register at {offset:#x}")]
    Offset {
        /// Its offset.
        offset: u16,
    },
    /// A read-only bit differs.
    #[error(
        "the register at {offset:#x} of the saved configuration space is {found:#010x}, which does \
         not fit this device ({expected:#010x}, writable bits {writable:#010x})"
    )]
    ReadOnly {
        /// Offset of the register.
        offset: u16,
        /// Value in the state.
        found: u32,
        /// Value of this device.
        expected: u32,
        /// Writable bits, which may differ.
        writable: u32,
    },
}

impl ConfigSpace {
    /// Saves the configuration space.
    pub fn save(&self) -> ConfigSpaceState {
        let standard = (0..EXTENDED_OFFSET).step_by(4);
        let extended = (EXTENDED_OFFSET..CONFIG_SPACE_LEN_BYTES).step_by(4);
        ConfigSpaceState {
            version: VERSION,
            registers: standard.map(|offset| self.read_u32(offset)).collect(),
            extended_registers: extended
                .map(|offset| (offset, self.read_u32(offset)))
                .filter(|(_, value)| *value != 0)
                .collect(),
        }
    }

    /// The configuration space with the saved register values and the layout of this one.
    pub fn restored(&self, state: &ConfigSpaceState) -> Result<Self, ConfigStateError> {
        if state.version != VERSION {
            return Err(ConfigStateError::Version { found: state.version });
        }
        if state.registers.len() != STANDARD_REGISTERS_COUNT {
            return Err(ConfigStateError::Length { found: state.registers.len() });
        }
        let mut extended = state.extended_registers.iter().copied().peekable();
        let mut restored = self.clone();
        let standard = (0..EXTENDED_OFFSET).step_by(4).zip(state.registers.iter().copied());
        for (offset, found) in standard {
            restored.restore_register(offset, found)?;
        }
        for offset in (EXTENDED_OFFSET..CONFIG_SPACE_LEN_BYTES).step_by(4) {
            let found = extended.next_if(|(at, _)| *at == offset).map_or(0, |(_, value)| value);
            restored.restore_register(offset, found)?;
        }
        // A remaining register is misaligned, out of order or out of range.
        match extended.next() {
            Some((offset, _)) => Err(ConfigStateError::Offset { offset }),
            None => Ok(restored),
        }
    }

    fn restore_register(&mut self, offset: u16, found: u32) -> Result<(), ConfigStateError> {
        let expected = self.read_u32(offset);
        let at = usize::from(offset);
        let mut writable = [0; 4];
        for (mask, byte) in self.writable.iter().skip(at).zip(&mut writable) {
            *byte = *mask;
        }
        let writable = u32::from_le_bytes(writable);
        if (found ^ expected) & !writable != 0 {
            return Err(ConfigStateError::ReadOnly { offset, found, expected, writable });
        }
        self.write(offset, &found.to_le_bytes());
        Ok(())
    }
}
