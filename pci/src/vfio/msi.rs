// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The vectors behind MSI.
//!
//! Owns one vector for each message that the function can send, and keeps them in line with the
//! guest's registers. A vector that is held back remembers what came meanwhile.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use hypervisor::irq::{IrqError, MsiMessage, MsiSource, MsiVector};

use super::config::MsiRegisters;

/// The vectors of one function.
pub struct Msi {
    vectors: Vec<Arc<dyn MsiVector>>,
}

impl Msi {
    /// Vectors for `count` messages, all held back.
    pub fn new(count: u16, source: &dyn MsiSource) -> Result<Self, IrqError> {
        let vectors = (0..count).map(|_| source.create_vector()).collect::<Result<_, _>>()?;
        Ok(Self { vectors })
    }

    /// The eventfds of the first `count` messages.
    pub fn events(&self, count: u16) -> Vec<BorrowedFd<'_>> {
        self.vectors.iter().take(count.into()).map(|vector| vector.eventfd()).collect()
    }

    /// Brings all vectors in line with the registers.
    ///
    /// # Errors
    /// The interrupt controller refuses.
    pub fn apply(&self, registers: &MsiRegisters) -> Result<(), IrqError> {
        for (index, vector) in (0_u16..).zip(&self.vectors) {
            let masked = registers.masks.checked_shr(index.into()).unwrap_or(0) & 1 != 0;
            if registers.enabled && index < registers.count && !masked {
                let MsiMessage { address, data } = registers.message;
                // The function replaces the low bits of the data by the number of the message.
                let data = data & !u32::from(registers.count - 1) | u32::from(index);
                vector.program(MsiMessage { address, data })?;
            } else {
                vector.mask()?;
            }
        }
        Ok(())
    }
}
