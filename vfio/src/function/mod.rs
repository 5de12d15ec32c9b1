// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A function of the host, opened through VFIO.
//!
//! Owns its file, which has to be closed everywhere when the group is released, so code that
//! holds mappings of its BARs drops those first. Where the file comes from, and how the function leaves its address
//! space, is in its attachment.

mod file;
mod migration;
mod reset;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use devices::{LogLimit, log_limited};
use ioas::check_reach;
use memory::GuestRam;
use parking_lot::Mutex;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX,
    VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    VFIO_PCI_ROM_REGION_INDEX, VFIO_REGION_INFO_FLAG_READ,
};

use crate::error::VfioError;
use crate::host::{DeviceEvent, HostBar, HostFunction, InterruptKind};
use crate::mapping::BarMapping;
use crate::space::{Attachment, DmaSpace, OpenedFunction};
use crate::sysfs::HostPlace;
use file::DeviceFile;
use pci::BARS_COUNT;

/// An open VFIO function, owned by this VM until dropped.
pub struct VfioFunction {
    id: String,
    // Drop order matters: the files are closed before the function leaves its address space.
    /// The stream of the function's state, while it is saved or restored.
    state_stream: Mutex<Option<File>>,
    device: DeviceFile,
    attachment: Attachment,
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
        let OpenedFunction { file, attachment } = opened;
        let device =
            DeviceFile::new(file).map_err(Self::refused("describe the device".to_owned()))?;
        let config_len = device.region(VFIO_PCI_CONFIG_REGION_INDEX).len_bytes;
        Ok(Self {
            id: id.to_owned(),
            state_stream: Mutex::default(),
            device,
            attachment,
            config_len_bytes: u16::try_from(config_len.min(4096)).unwrap_or(0),
            has_reset,
            _memory: space.memory(),
            log_limit: LogLimit::default(),
        })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        let at = self.device.offset(region, offset, data.len());
        let Some(at) = at else { return data.fill(0xff) };
        if let Err(error) = self.device.file().read_exact_at(data, at) {
            data.fill(0xff);
            self.complain("read", region, offset, &error);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        let Some(at) = self.device.offset(region, offset, data.len()) else { return };
        if let Err(error) = self.device.file().write_all_at(data, at) {
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

    fn refused(what: String) -> impl FnOnce(io::Error) -> VfioError {
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
        let region = self.device.region(index.into());
        let has_bytes = index < BARS_COUNT && region.len_bytes > 0;
        let (len_bytes, mappable) = (region.len_bytes, &region.mappable);
        has_bytes.then(|| HostBar { len_bytes, mappable: mappable.clone() })
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        self.read(index.into(), offset, data);
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        self.write(index.into(), offset, data);
    }

    fn rom_len_bytes(&self) -> u64 {
        let rom = self.device.region(VFIO_PCI_ROM_REGION_INDEX);
        if rom.flags & VFIO_REGION_INFO_FLAG_READ == 0 { 0 } else { rom.len_bytes }
    }

    fn read_rom(&self) -> io::Result<Vec<u8>> {
        let len = usize::try_from(self.rom_len_bytes()).map_err(io::Error::other)?;
        let start = self.device.region(VFIO_PCI_ROM_REGION_INDEX).offset;
        let mut contents = vec![0; len];
        let mut filled = 0;
        while let Some(rest) = contents.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.device.file().read_at(rest, start.saturating_add(filled as u64)) {
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
            .device
            .offset(index.into(), range.start, len)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let bar_len_bytes = self.device.region(index.into()).len_bytes;
        BarMapping::new(self.device.as_fd(), at, bar_len_bytes, range).map(Arc::new)
    }

    fn interrupts_count(&self, kind: InterruptKind) -> u32 {
        self.device.irqs_count(index_of(kind))
    }

    fn connect(&self, kind: InterruptKind, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        self.device
            .connect(index_of(kind), events)
            .map_err(Self::refused(format!("connect {} {kind:?} interrupts", events.len())))
    }

    fn connect_resample(&self, event: BorrowedFd<'_>) -> Result<bool, VfioError> {
        // Whatever the error, there is another way.
        Ok(self.device.connect_resample(event).is_ok())
    }

    fn unmask_pin(&self) -> Result<(), VfioError> {
        self.device.unmask_pin().map_err(Self::refused("unmask the interrupt pin".to_owned()))
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
        if self.device.irqs_count(index) == 0 {
            return Ok(false);
        }
        self.device
            .connect(index, &[event])
            .map_err(Self::refused(format!("tell that a device is {notice:?}")))?;
        Ok(true)
    }

    fn disconnect(&self, kind: InterruptKind) -> Result<(), VfioError> {
        self.device
            .disconnect(index_of(kind))
            .map_err(Self::refused(format!("disconnect {kind:?} interrupts")))
    }

    fn reset(&self) -> Result<(), VfioError> {
        let lease = match &self.attachment {
            Attachment::Group(lease) => Some(lease),
            Attachment::Iommufd { .. } => None,
        };
        reset::reset(&self.id, self.device.as_fd(), self.has_reset, lease)
    }

    fn set_in_use(&self, is_used: bool) {
        if let Attachment::Group(lease) = &self.attachment {
            lease.set_in_use(is_used);
        }
    }

    fn note_left(&self, is_left: bool) {
        // A node of iommufd is bound once, and says so to the next one.
        if let Attachment::Group(lease) = &self.attachment {
            lease.note_left(is_left);
        }
    }
}
