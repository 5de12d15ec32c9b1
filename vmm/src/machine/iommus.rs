// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtual IOMMU of a machine, and the devices behind it.
//!
//! Owns which function has which number for the guest's driver, and what the guest's tables say of them. The IOMMU is
//! made before any device that is behind it, and has the highest free number in segment 0 as the watchdog has, so that
//! it is found there again after a move.

use arch::acpi::{AcpiIommu, PciFunction};
use devices::virtio::iommu::{Iommu, IommuConfig, IommuHandle};
use pci::{Bdf, PciDevice as _};

use super::virtio::{VirtioDevices, VirtioError};
use crate::config::VmConfig;
use crate::config::vm::IOMMU_ID;

/// Makes the IOMMU of a machine, if it has one.
///
/// # Errors
/// The host gives no eventfd.
pub(super) fn make(config: &VmConfig) -> Result<Option<Iommu>, VirtioError> {
    if !config.iommu {
        return Ok(None);
    }
    let address_bits = config.iommu_address_bits();
    let memory_bytes = config.memory.most_bytes().unwrap_or(u64::MAX);
    let iommu = Iommu::new(IommuConfig { id: IOMMU_ID.to_owned(), address_bits, memory_bytes });
    iommu.map(Some).map_err(VirtioError::Iommu)
}

fn function(bdf: Bdf) -> PciFunction {
    (bdf.segment(), bdf.routing_id())
}

/// The number of a function for the driver of the IOMMU.
pub(super) fn number(bdf: Bdf) -> u32 {
    AcpiIommu::endpoint(function(bdf))
}

impl VirtioDevices {
    /// The IOMMU, if there is one.
    pub(super) fn iommu(&self) -> Option<&IommuHandle> {
        self.iommu.as_ref()
    }

    /// The IOMMU and what is behind it, for the tables of a guest that boots.
    pub fn described_iommu(&self, config: &VmConfig) -> Option<AcpiIommu> {
        let place = |id: &str| {
            let mut functions = self.functions.iter();
            functions.find(|(_, it)| it.id() == id).map(|(bdf, _)| function(*bdf))
        };
        Some(AcpiIommu {
            place: place(IOMMU_ID)?,
            functions: config.named_behind_iommu().into_iter().filter_map(place).collect(),
            segments: config.iommu_segments().to_vec(),
        })
    }
}
