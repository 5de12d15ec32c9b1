// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A function of the host, opened through VFIO.
//!
//! Owns its descriptors. None of them may be left open when the group is released, so code that
//! holds mappings of its BARs drops those first.

mod migration;
mod reset;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use devices::{LogLimit, log_limited};
use hypervisor::AttachedFile;
use ioas::check_reach;
use memory::GuestRam;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX,
    VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    VFIO_PCI_ROM_REGION_INDEX, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
};
use vfio_ioctls::{VfioDevice, VfioRegionInfoCap};
use vmm_sys_util::eventfd::EventFd;

use crate::error::VfioError;
use crate::host::{DeviceEvent, HostBar, HostFunction, InterruptKind};
use crate::mapping::BarMapping;
use crate::space::{DmaSpace, OpenedFunction};
use crate::sysfs::HostPlace;
use pci::BARS_COUNT;

/// An open VFIO function, owned by this VM until dropped.
pub struct VfioFunction {
    id: String,
    /// A duplicate for reading and writing; closed before the device, which releases the group.
    file: File,
    device: VfioDevice,
    /// Closed after the device has left the IOMMU address space.
    _told: Option<AttachedFile>,
    config_len_bytes: u16,
    /// The host knows how to reset it alone.
    has_reset: bool,
    /// Guest memory may stay mapped in the address space until the device is closed.
    _memory: Arc<GuestRam>,
    log_limit: LogLimit,
}

impl VfioFunction {
    /// Opens the function at `place` and attaches it to `space`. `id` is for messages. An earlier process
    /// may have left state in it, so it must be reset before a guest gets it, which takes long.
    ///
    /// # Errors
    /// Names what the host lacks.
    pub fn attach(id: &str, place: HostPlace, space: &dyn DmaSpace) -> Result<Self, VfioError> {
        let has_reset = place.has_reset();
        let opened = space.open(place)?;
        check_memory(id, space)?;
        let OpenedFunction { device, told } = opened;
        // SAFETY: the device keeps its descriptor open across this statement.
        let file = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) };
        let file = file.try_clone_to_owned().map(File::from).map_err(|source| VfioError::Io {
            what: "duplicate the descriptor of the device",
            source,
        })?;
        let config_len = device.get_region_size(VFIO_PCI_CONFIG_REGION_INDEX);
        let config_len_bytes = u16::try_from(config_len.min(4096)).unwrap_or(0);
        let id = id.to_owned();
        let log_limit = LogLimit::default();
        let memory = space.memory();
        Ok(Self {
            id,
            file,
            device,
            _told: told,
            config_len_bytes,
            has_reset,
            _memory: memory,
            log_limit,
        })
    }

    /// The underlying VFIO device.
    fn device(&self) -> &VfioDevice {
        &self.device
    }

    /// Offset in the device's file of a range of a region.
    fn offset(&self, region: u32, offset: u64, len: usize) -> Option<u64> {
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        (end <= self.device.get_region_size(region))
            .then(|| self.device.get_region_offset(region).checked_add(offset))?
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        let at = self.offset(region, offset, data.len());
        let Some(at) = at else { return data.fill(0xff) };
        if let Err(error) = self.file.read_exact_at(data, at) {
            data.fill(0xff);
            self.complain("read", region, offset, &error);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        let Some(at) = self.offset(region, offset, data.len()) else { return };
        if let Err(error) = self.file.write_all_at(data, at) {
            self.complain("write", region, offset, &error);
        }
    }

    fn complain(&self, what: &str, region: u32, offset: u64, error: &io::Error) {
        log_limited!(
            self.log_limit,
            Warn,
            "passed-through device {}: cannot {what} region {region} at {offset:#x}: {error}",
            self.id
        );
    }

    fn refused(what: String) -> impl FnOnce(vfio_ioctls::VfioError) -> VfioError {
        move |source| VfioError::Refused { what, source }
    }
}

/// Checks that the memory of a space can be mapped for the function that was just opened in it.
fn check_memory(id: &str, space: &dyn DmaSpace) -> Result<(), VfioError> {
    match space.valid_ranges() {
        Ok(Some(valid)) => {
            let memory = space.memory();
            let ranges = memory.regions().iter();
            let ranges = ranges.map(|region| region.gpa()..region.gpa() + region.len_bytes());
            Ok(check_reach(&valid, &ranges.collect::<Vec<_>>())?)
        }
        Ok(None) => Ok(()),
        Err(error) => {
            // Memory that cannot be reached is then found while it is mapped.
            log::warn!("it is not known which addresses device '{id}' can reach by DMA: {error}");
            Ok(())
        }
    }
}

fn index_of(kind: InterruptKind) -> u32 {
    match kind {
        InterruptKind::Intx => VFIO_PCI_INTX_IRQ_INDEX,
        InterruptKind::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        InterruptKind::Msix => VFIO_PCI_MSIX_IRQ_INDEX,
    }
}

/// Duplicates of eventfds as the type that the ioctl crate takes.
fn duplicates(events: &[BorrowedFd<'_>]) -> Result<Vec<EventFd>, VfioError> {
    let duplicate = |event: &BorrowedFd<'_>| {
        let owned = event.try_clone_to_owned().map_err(|source| VfioError::Io {
            what: "duplicate an eventfd (is the limit on open files reached? see ulimit -n)",
            source,
        })?;
        // SAFETY: the descriptor is an eventfd's, and from here on belongs to the new value alone.
        Ok(unsafe { EventFd::from_raw_fd(owned.into_raw_fd()) })
    };
    events.iter().map(duplicate).collect()
}

impl HostFunction for VfioFunction {
    fn config_len_bytes(&self) -> u16 {
        self.config_len_bytes
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.read(VFIO_PCI_CONFIG_REGION_INDEX, offset.into(), data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.write(VFIO_PCI_CONFIG_REGION_INDEX, offset.into(), data);
    }

    fn bar(&self, index: u8) -> Option<HostBar> {
        let region = u32::from(index);
        let len_bytes = self.device.get_region_size(region);
        if index >= BARS_COUNT || len_bytes == 0 {
            return None;
        }
        let mut mappable = Vec::new();
        if self.device.get_region_flags(region) & VFIO_REGION_INFO_FLAG_MMAP != 0 {
            let sparse =
                self.device.get_region_caps(region).into_iter().find_map(|cap| match cap {
                    VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
                    _ => None,
                });
            mappable = match sparse {
                Some(areas) => areas
                    .iter()
                    .map(|area| area.offset..area.offset.saturating_add(area.size))
                    .collect(),
                None => std::iter::once(0..len_bytes).collect(),
            };
        }
        Some(HostBar { len_bytes, mappable })
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        self.read(index.into(), offset, data);
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        self.write(index.into(), offset, data);
    }

    fn rom_len_bytes(&self) -> u64 {
        let flags = self.device.get_region_flags(VFIO_PCI_ROM_REGION_INDEX);
        if flags & VFIO_REGION_INFO_FLAG_READ == 0 {
            return 0;
        }
        self.device.get_region_size(VFIO_PCI_ROM_REGION_INDEX)
    }

    fn read_rom(&self) -> io::Result<Vec<u8>> {
        let len = usize::try_from(self.rom_len_bytes()).map_err(io::Error::other)?;
        let start = self.device.get_region_offset(VFIO_PCI_ROM_REGION_INDEX);
        let mut contents = vec![0; len];
        let mut filled = 0;
        while let Some(rest) = contents.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, start.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if filled == 0 => return Err(error),
                Err(_) => break,
            }
        }
        contents.truncate(filled);
        Ok(contents)
    }

    fn map_bar(&self, index: u8, range: &Range<u64>) -> io::Result<Arc<BarMapping>> {
        let len_bytes = range.end.saturating_sub(range.start);
        let len = usize::try_from(len_bytes).map_err(io::Error::other)?;
        let at = self
            .offset(index.into(), range.start, len)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let bar_len_bytes = self.device.get_region_size(index.into());
        BarMapping::new(self.file.as_fd(), at, bar_len_bytes, range).map(Arc::new)
    }

    fn interrupts_count(&self, kind: InterruptKind) -> u32 {
        self.device.get_irq_info(index_of(kind)).map_or(0, |info| info.count)
    }

    fn connect(&self, kind: InterruptKind, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        let events = duplicates(events)?;
        // VFIO keeps its own reference to each eventfd, so the duplicates may be closed.
        self.device
            .enable_irq(index_of(kind), events.iter().collect())
            .map_err(Self::refused(format!("connect {} {kind:?} interrupts", events.len())))
    }

    fn connect_resample(&self, event: BorrowedFd<'_>) -> Result<bool, VfioError> {
        let events = duplicates(&[event])?;
        // The crate hides the ioctl's errno, so any error leads to the alternative.
        let answer =
            self.device.set_irq_resample_fd(VFIO_PCI_INTX_IRQ_INDEX, events.iter().collect());
        Ok(answer.is_ok())
    }

    fn unmask_pin(&self) -> Result<(), VfioError> {
        self.device
            .unmask_irq(VFIO_PCI_INTX_IRQ_INDEX)
            .map_err(Self::refused("unmask the interrupt pin".to_owned()))
    }

    fn connect_device_event(
        &self,
        notice: DeviceEvent,
        event: BorrowedFd<'_>,
    ) -> Result<bool, VfioError> {
        let index = match notice {
            DeviceEvent::Failed => VFIO_PCI_ERR_IRQ_INDEX,
            DeviceEvent::WantedBack => VFIO_PCI_REQ_IRQ_INDEX,
        };
        if self.device.get_irq_info(index).is_none_or(|info| info.count == 0) {
            return Ok(false);
        }
        let events = duplicates(&[event])?;
        self.device
            .enable_irq(index, events.iter().collect())
            .map_err(Self::refused(format!("tell that a device is {notice:?}")))?;
        Ok(true)
    }

    fn disconnect(&self, kind: InterruptKind) -> Result<(), VfioError> {
        self.device
            .disable_irq(index_of(kind))
            .map_err(Self::refused(format!("disconnect {kind:?} interrupts")))
    }

    fn reset(&self) -> Result<(), VfioError> {
        reset::reset(&self.id, self.file.as_fd(), self.has_reset)
    }
}
