// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of the interrupt controllers shared by all vCPUs.
//!
//! Owns the saved form of both PICs and the IOAPIC. Local APICs belong to vCPUs. Must never be
//! restored before those: see the documentation of the crate.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::blob::{Blob, BlobError};
use crate::error::{KvmContext, KvmError};
use crate::vm::Vm;

/// Version of [`IrqchipState`] that is written, and the only one read.
const VERSION: u32 = 1;

/// State of PICs and IOAPIC; untrusted until accepted by [`Vm::set_irqchips`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IrqchipState {
    /// Version of this structure.
    pub version: u32,
    /// The kernel's `struct kvm_irqchip` of the first PIC.
    pub pic_master: Blob,
    /// The kernel's `struct kvm_irqchip` of the second PIC.
    pub pic_slave: Blob,
    /// The kernel's `struct kvm_irqchip` of the IOAPIC.
    pub ioapic: Blob,
}

/// Why the interrupt controllers cannot be restored.
#[derive(Debug, Error)]
pub enum IrqchipStateError {
    /// The version is unknown.
    #[error("interrupt controller state has version {0}, and only {VERSION} is known here")]
    Version(u32),
    /// A part is too long.
    #[error("interrupt controller state is malformed")]
    Blob(#[source] BlobError),
    /// The kernel refused a part.
    #[error("interrupt controller state was not taken")]
    Kernel(#[source] KvmError),
}

impl Vm {
    /// Reads the state of PICs and IOAPIC. The vCPUs should be parked.
    pub fn irqchips(&self) -> Result<IrqchipState, KvmError> {
        let read = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            self.shared()
                .fd
                .get_irqchip(&mut chip)
                .context("read an interrupt controller's state")?;
            Ok(Blob::new(chip.as_bytes()))
        };
        Ok(IrqchipState {
            version: VERSION,
            pic_master: read(KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: read(KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: read(KVM_IRQCHIP_IOAPIC)?,
        })
    }

    /// Masks all lines of both PICs, for a guest that has none.
    pub(crate) fn mask_pics(&self) -> Result<(), KvmError> {
        for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            let fd = &self.shared().fd;
            fd.get_irqchip(&mut chip).context("read an interrupt controller's state")?;
            chip.chip.pic.imr = 0xff;
            fd.set_irqchip(&chip).context("set an interrupt controller's state")?;
        }
        Ok(())
    }

    /// Sets PICs and IOAPIC. The vCPUs must have their state already.
    pub fn set_irqchips(&self, state: &IrqchipState) -> Result<(), IrqchipStateError> {
        if state.version != VERSION {
            return Err(IrqchipStateError::Version(state.version));
        }
        let chips = [
            (KVM_IRQCHIP_PIC_MASTER, &state.pic_master),
            (KVM_IRQCHIP_PIC_SLAVE, &state.pic_slave),
            (KVM_IRQCHIP_IOAPIC, &state.ioapic),
        ];
        for (chip_id, blob) in chips {
            let mut bytes = [0; size_of::<kvm_irqchip>()];
            blob.fill(&mut bytes).map_err(IrqchipStateError::Blob)?;
            let mut chip = kvm_irqchip::read_from_bytes(&bytes).unwrap_or_default();
            // The chip id is not taken from the untrusted state.
            chip.chip_id = chip_id;
            self.shared()
                .fd
                .set_irqchip(&chip)
                .context("set an interrupt controller's state")
                .map_err(IrqchipStateError::Kernel)?;
        }
        Ok(())
    }
}
