// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The interrupt vectors of MSI.
//!
//! Owns one vector for each message that the function can send, and keeps them in line with the
//! guest's registers. A masked vector remembers interrupts that arrive meanwhile.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use hypervisor::irq::{IrqError, MsiMessage, MsiSource, MsiVector};

use super::config::MsiRegisters;

/// The MSI vectors of one function.
pub struct Msi {
    vectors: Vec<Arc<dyn MsiVector>>,
}

impl Msi {
    /// Vectors for `count` messages, all masked.
    pub fn new(count: u16, source: &dyn MsiSource) -> Result<Self, IrqError> {
        let vectors = (0..count).map(|_| source.create_vector()).collect::<Result<_, _>>()?;
        Ok(Self { vectors })
    }

    /// The eventfds of the first `count` messages.
    pub fn events(&self, count: u16) -> Vec<BorrowedFd<'_>> {
        self.vectors.iter().take(count.into()).map(|vector| vector.eventfd()).collect()
    }

    /// Pending bits of messages that arrived while masked.
    pub fn pending(&self) -> u32 {
        let mut pending = 0;
        for (index, vector) in (0_u32..).zip(&self.vectors) {
            if vector.take_pending() {
                pending |= 1_u32.checked_shl(index).unwrap_or(0);
                if let Err(error) = vector.trigger() {
                    log::warn!("an interrupt that was pending while masked is lost: {error}");
                }
            }
        }
        pending
    }

    /// Sets pending messages. All must be masked.
    ///
    /// # Errors
    /// The host refuses.
    pub fn set_pending(&self, pending: u32) -> Result<(), IrqError> {
        let is_set = |index: u32| pending.checked_shr(index).unwrap_or(0) & 1 != 0;
        let waiting = (0_u32..).zip(&self.vectors).filter(|(index, _)| is_set(*index));
        waiting.map(|(_, vector)| vector).try_for_each(|vector| vector.trigger())
    }

    /// Updates all vectors from the registers. With a message that KVM refuses all are masked.
    ///
    /// # Errors
    /// The interrupt controller refuses.
    pub fn apply(&self, registers: &MsiRegisters) -> Result<(), IrqError> {
        for (index, vector) in (0_u16..).zip(&self.vectors) {
            let masked = registers.masks.checked_shr(index.into()).unwrap_or(0) & 1 != 0;
            let is_refused = registers.message.is_refused();
            if registers.enabled && index < registers.count && !masked && !is_refused {
                let MsiMessage { address, data } = registers.message;
                // The function replaces the low bits of the data with the message number.
                let data = data & !u32::from(registers.count - 1) | u32::from(index);
                vector.program(MsiMessage { address, data })?;
            } else {
                vector.mask()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use pci::fakes::FakeMsiSource;

    use super::*;

    #[test]
    fn a_message_that_kvm_refuses_masks_its_vectors() {
        let source = FakeMsiSource::new(2);
        let msi = Msi::new(2, &source).unwrap();
        let apply = |address| {
            let message = MsiMessage { address, data: 4 };
            msi.apply(&MsiRegisters { enabled: true, count: 2, message, masks: 0 })
        };
        let programmed = || [0, 1].map(|at| source.vector(at).unwrap().record().programmed);
        apply(0xfee0_1000).unwrap();
        assert!(programmed().iter().all(Option::is_some));
        apply(0x80_fee0_1000).unwrap();
        assert_eq!(programmed(), [None, None]);
    }
}
