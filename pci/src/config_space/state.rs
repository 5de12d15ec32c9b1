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

/// Version of [`ConfigSpaceState`] that this program writes, and the newest that it reads.
const VERSION: u32 = 1;
/// Ports or memory, and the type of memory.
const BAR_WIDTH_BITS: u32 = 0b111;
const STANDARD_REGISTERS_COUNT: usize = EXTENDED_OFFSET as usize / 4;

/// A saved configuration space: plain and untrusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigSpaceState {
    /// Version of this structure.
    pub version: u32,
    /// The 64 registers of the first 256 bytes.
    pub registers: Vec<u32>,
    /// Offset and value of the registers beyond them that are not zero, rising.
    pub extended_registers: Vec<(u16, u32)>,
}

impl ConfigSpaceState {
    /// How wide a memory BAR is; `None` for anything else that the register may say (PCI 3.0, 6.2.5.1).
    pub fn bar_width(&self, index: u8) -> Option<BarKind> {
        let register = usize::from(register::BAR0 / 4).saturating_add(index.into());
        match self.registers.get(register)? & BAR_WIDTH_BITS {
            0 => Some(BarKind::Memory32),
            BAR_TYPE_64 => Some(BarKind::Memory64),
            _ => None,
        }
    }
}

/// Why a saved configuration space was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigStateError {
    /// A newer program wrote it.
    #[error(
        "configuration space state version {found} is not known here (newest known: {VERSION})"
    )]
    Version {
        /// Version found.
        found: u32,
    },
    /// The number of registers is not that of a configuration space.
    #[error("the configuration space state has {found} registers instead of 64")]
    Length {
        /// Registers found.
        found: usize,
    },
    /// An extended register lies outside, is not aligned or is out of order.
    #[error("the configuration space state names an impossible register at {offset:#x}")]
    Offset {
        /// Its offset.
        offset: u16,
    },
    /// Bits that a guest cannot have changed are different.
    #[error(
        "the register at {offset:#x} of the saved configuration space is {found:#010x}, which does \
         not fit this device ({expected:#010x}, writable bits {writable:#010x})"
    )]
    ReadOnly {
        /// Offset of the register.
        offset: u16,
        /// Value in the state.
        found: u32,
        /// Value that this device has.
        expected: u32,
        /// Bits that may differ.
        writable: u32,
    },
}

impl ConfigSpace {
    /// The state to save.
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

    /// The configuration space that a saved state describes, with the layout of this one.
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
        // What is left could not be matched: misaligned, out of order or outside.
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
