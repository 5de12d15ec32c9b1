// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that is mapped for a device in advance.
//!
//! Owns the iommufd and the device until they are handed over with the memory, and then nothing of them:
//! the holder of an iommufd controls every address space in it, so there is one for each slot. Must never
//! attach the device: it reaches nothing before its user says so.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ioas::{Ioas, MapFileError, Mapped};
use iommufd_ioctls::{IommuFd, IommufdError};
use memory::{GuestRam, ProvidedFile, RamConfig, RamError, RamLayout};
use pci_address::Bdf;
use prezero_pool_client::{PinnedGrant, PinnedRegion, pieces};
use thiserror::Error;
use vfio_ioctls::{VfioDevice, VfioError, VfioIommufd};

use crate::config::Class;
use crate::parallel;
use crate::slot::{PoolSlotError, SlotMemory, ZONE, zone_of};

const IOMMUFD: &str = "/dev/iommu";
const DEVICES: &str = "/sys/bus/pci/devices";
/// What is mapped by one call: not larger than needed for the kernel to pin large runs at once, and the
/// smallest thing that a VM can return.
const PIECE_BYTES: u64 = 64 << 20;

/// Memory that could not be mapped for its device.
#[derive(Debug, Error)]
pub enum PinError {
    /// The kernel has no iommufd, or the pool may not use it.
    #[error("cannot open {IOMMUFD} (a kernel with CONFIG_IOMMUFD, and the right to open it)")]
    Iommufd(#[source] io::Error),
    /// The device is not there for passing through.
    #[error(
        "cannot open device {0} (is it bound to vfio-pci, has the kernel CONFIG_VFIO_DEVICE_CDEV, may \
         the pool open its node in /dev/vfio/devices?)"
    )]
    Open(Bdf, #[source] VfioError),
    /// Another process has it.
    #[error("cannot use device {0}: a VM or another process uses it")]
    Bind(Bdf, #[source] VfioError),
    /// An object of iommufd.
    #[error("cannot create the iommufd objects for device {0}")]
    Object(Bdf, #[source] IommufdError),
    /// Pinning.
    #[error(
        "cannot map {len_bytes} bytes at {gpa:#x} for device {device} (ENOMEM: raise LimitMEMLOCK, or \
         give the pool CAP_IPC_LOCK)"
    )]
    Map {
        /// For which.
        device: Bdf,
        /// Where.
        gpa: u64,
        /// How much.
        len_bytes: u64,
        /// The kernel's answer.
        #[source]
        source: MapFileError,
    },
    /// The layout of the VM's memory.
    #[error("this memory cannot be that of a VM")]
    Layout(#[source] RamError),
    /// An own open file of the memory.
    #[error("cannot map memory")]
    File(#[source] PoolSlotError),
    /// Descriptors.
    #[error("cannot duplicate a descriptor")]
    Duplicate(#[source] io::Error),
    /// A slot without a device.
    #[error("the slot has no device")]
    NoDevice,
}

/// A device, its iommufd, and what is mapped there.
#[derive(Debug)]
pub struct Prepinned {
    pub iommufd: File,
    pub device: File,
    pub grant: PinnedGrant,
}

/// Where the VM has the memory: the same rule that its VMM goes by.
fn regions(
    class: &Class,
    memory: &SlotMemory,
) -> Result<(Arc<File>, Vec<PinnedRegion>, u64), PinError> {
    let file = Arc::new(memory.lease().map_err(PinError::File)?);
    let config = RamConfig { zones: vec![zone_of(class)] };
    let given = [ProvidedFile::file(ZONE, Arc::clone(&file))];
    let ram =
        GuestRam::with_provided(&config, RamLayout::default(), &given).map_err(PinError::Layout)?;
    let page_bytes = ram.regions().first().map_or(0, |region| region.page_bytes());
    let of_region = |region: &Arc<memory::RamRegion>| PinnedRegion {
        gpa: region.gpa(),
        len_bytes: region.len_bytes(),
        offset: region.file_offset(),
    };
    Ok((file, ram.regions().iter().map(of_region).collect(), page_bytes))
}

impl Prepinned {
    /// Opens the device, maps the memory at the VM's addresses and fills a page table with it, on so many
    /// threads.
    ///
    /// # Errors
    /// Saying what the host lacks; the device is as before.
    pub fn new(
        class: &Class,
        memory: &SlotMemory,
        threads: NonZeroUsize,
    ) -> Result<Self, PinError> {
        let address = class.device.as_ref().ok_or(PinError::NoDevice)?.address;
        let (file, regions, page_bytes) = regions(class, memory)?;
        let iommufd =
            File::options().read(true).write(true).open(IOMMUFD).map_err(PinError::Iommufd)?;
        let path = Path::new(DEVICES).join(address.to_string());
        let device =
            VfioDevice::open_cdev(&path).map_err(|source| PinError::Open(address, source))?;
        let object = |source| PinError::Object(address, source);

        // The crate's values are for an owner that keeps them: these have duplicates, and what they undo when
        // they are dropped is an address space of their own and no attachment.
        let copy = iommufd.try_clone().map_err(PinError::Duplicate)?;
        let control = Arc::new(IommuFd::new_from_fd(copy));
        let space = VfioIommufd::new(Arc::clone(&control), None, None);
        let space = space.map_err(|source| PinError::Open(address, source))?;
        let copy = device.try_clone().map_err(PinError::Duplicate)?;
        let bound = VfioDevice::new_from_fd(copy, Arc::new(space), false)
            .map_err(|source| PinError::Bind(address, source))?;
        let device_id = bound.iommufd_dev_id().ok_or(PinError::NoDevice)?;

        let space = Ioas::new(&control).map_err(object)?;
        // First, so that each piece is pinned as it is mapped: without a table nothing is.
        let table_id = space.new_table(device_id).map_err(object)?;
        let all = regions.iter().flat_map(|region| pieces(*region, PIECE_BYTES, page_bytes));
        let all: Vec<_> = all.collect();
        let next = AtomicUsize::new(0);
        parallel::run(threads, || {
            while let Some(piece) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let PinnedRegion { gpa, len_bytes, offset } = *piece;
                let mapped = space.map_file(file.as_fd(), offset, Mapped { iova: gpa, len_bytes });
                mapped.map_err(|source| {
                    // The other threads end with their piece.
                    next.store(all.len(), Ordering::Relaxed);
                    PinError::Map { device: address, gpa, len_bytes, source }
                })?;
            }
            Ok(())
        })?;
        let grant = PinnedGrant {
            size_bytes: class.size_bytes,
            pages: class.pages,
            piece_bytes: PIECE_BYTES,
            device_id,
            space_id: space.id(),
            table_id,
            regions,
        };
        Ok(Self { iommufd, device, grant })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use prezero_pool_client::SlotPages;

    use super::*;
    use crate::config::SlotDevice;
    use crate::slot::ZeroingOptions;
    use crate::sys::Users;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_where_a_vm_has_it() {
        let address = "0000:65:00.0".parse().unwrap();
        let device = Some(SlotDevice { address, users: Vec::new() });
        let (pages, node) = (SlotPages::Small, None);
        let class = Class { size_bytes: 4 * MIB, pages, node, count: 1, device };
        let memory = SlotMemory::build(&class, &ZeroingOptions::unlimited()).unwrap();
        let (file, regions, page_bytes) = regions(&class, &memory).unwrap();
        assert_eq!(regions, [PinnedRegion { gpa: 0, len_bytes: 4 * MIB, offset: 0 }]);
        assert_eq!(page_bytes, 4096);
        // What iommufd holds of it keeps it from being used again.
        assert_eq!(memory.users(), Users::Others);
        drop(file);
        assert_eq!(memory.users(), Users::OnlyUs);
    }
}
