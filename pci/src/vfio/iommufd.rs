// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! iommufd: one I/O address space for all passed-through functions of a VM, which are opened one by one
//! by their character devices.
//!
//! Owns the address space and a share in guest RAM, which so outlives every mapping. Memory that is a
//! file is mapped by the file (`IOMMU_IOAS_MAP_FILE`, Linux 6.14), which spares the kernel the look at
//! the process's page tables; other memory, and all memory on older kernels, by its address. Pieces are
//! pinned in parallel where several threads map.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use hypervisor::{VfioFiles, Vm};
use iommufd_ioctls::{IommuFd, IommufdError};
use memory::{GuestRam, RamRegion};
use vfio_ioctls::{VfioDevice, VfioError as IoctlError, VfioIommufd};

use super::dma::DmaTarget;
use super::error::VfioError;
use super::limits::{DmaLimits, LockedMemory};
use super::peers::PeerTarget;
use super::space::{DmaSpace, OpenedFunction, Piece};
use super::sysfs::{HostPlace, SysfsFunction};
use crate::locks::lock;

const IOMMUFD: &str = "/dev/iommu";

/// An address space of iommufd. Functions that were opened in it hold a share.
pub struct IommufdSpace {
    // Order matters on drop: the mappings go before what they map.
    space: Arc<VfioIommufd>,
    /// What is mapped: guest physical addresses and lengths.
    mapped: Mutex<BTreeMap<u64, usize>>,
    /// The kernel maps files; known not to after the first answer that says so.
    maps_files: AtomicBool,
    /// Devices that come as descriptors may have been bound to this iommufd before.
    is_given: bool,
    files: VfioFiles,
    ram: Arc<GuestRam>,
}

impl IommufdSpace {
    /// An empty address space, in the iommufd that is given or in one of its own.
    ///
    /// # Errors
    /// The host has no iommufd.
    pub fn new(vm: &Vm, ram: Arc<GuestRam>, given: Option<OwnedFd>) -> Result<Self, VfioError> {
        let is_given = given.is_some();
        let file = match given {
            Some(descriptor) => File::from(descriptor),
            None => {
                File::options().read(true).write(true).open(IOMMUFD).map_err(VfioError::Iommufd)?
            }
        };
        let iommufd = Arc::new(IommuFd::new_from_fd(file));
        // KVM is told of each device here: the crate would not take it back if it cannot be used.
        let space = VfioIommufd::new(iommufd, None, None).map_err(VfioError::AddressSpace)?;
        Ok(Self {
            space: Arc::new(space),
            mapped: Mutex::default(),
            maps_files: AtomicBool::new(true),
            is_given,
            files: vm.vfio_files()?,
            ram,
        })
    }

    /// Maps a piece by the file that it is in; false if the kernel cannot do that.
    fn map_file(&self, region: &RamRegion, start: u64, piece: &Piece) -> io::Result<bool> {
        let Some(file) = region.file().filter(|_| self.maps_files.load(Ordering::Relaxed)) else {
            return Ok(false);
        };
        let offset = region.file_offset().saturating_add(start);
        let ioas = self.space.ioas();
        match ioas.map_file(file.as_raw_fd(), offset, piece.len as u64, piece.gpa, true) {
            Ok(()) => Ok(true),
            Err(IommufdError::IommuIoasMapFile(errno)) => match errno.errno() {
                libc::ENOTTY => {
                    log::debug!("this kernel's iommufd maps memory by address only");
                    self.maps_files.store(false, Ordering::Relaxed);
                    Ok(false)
                }
                // A file of a file system: memfds and hugetlb only are taken.
                libc::EINVAL | libc::EOPNOTSUPP => Ok(false),
                errno => Err(io::Error::from_raw_os_error(errno)),
            },
            Err(other) => Err(io::Error::other(other)),
        }
    }

    fn map_address(&self, piece: &Piece) -> io::Result<()> {
        // SAFETY: the piece lies in a region of `self.ram`, which outlives the address space and so its
        // mappings (this value and every function opened in it hold it). Guest RAM is reached only by
        // volatile and atomic accesses and by system calls: vCPUs write to it at any time, too.
        let mapped = unsafe { self.space.vfio_dma_map(piece.gpa, piece.len, piece.address) };
        mapped.map_err(|error| match error {
            IoctlError::IommufdIoctlError(IommufdError::IommuIoasMap(errno)) => {
                io::Error::from_raw_os_error(errno.errno())
            }
            other => io::Error::other(other),
        })
    }

    /// Binds an open character device and puts it into the space.
    fn take(&self, node: File, may_be_bound: bool) -> Result<OpenedFunction, VfioError> {
        // First: the kernel wants to know the VM when it opens the device.
        let told = self.files.tell(node.as_fd()).map_err(|error| match error.errno() {
            libc::EINVAL => VfioError::NotANode(error),
            _ => VfioError::Kvm(error),
        })?;
        let again = may_be_bound.then(|| node.try_clone()).transpose();
        let again = again.map_err(|source| VfioError::Io {
            what: "duplicate the descriptor of the device",
            source,
        })?;
        let bound = VfioDevice::new_from_fd(node, Arc::clone(&self.space), true);
        let device = match (bound, again) {
            // Bound for as long as its descriptor is open somewhere: by its owner, or before a reboot.
            (Err(IoctlError::VfioDeviceBindIommufd(errno)), Some(node))
                if errno.errno() == libc::EINVAL =>
            {
                let device = VfioDevice::new_from_bound_fd(node, Arc::clone(&self.space), true);
                device.map_err(|error| match error {
                    // It is not, so that was not why it could not be bound.
                    IoctlError::VfioDeviceAttachIommufdPt(other)
                        if other.errno() == libc::EINVAL =>
                    {
                        IoctlError::VfioDeviceBindIommufd(errno)
                    }
                    error => error,
                })
            }
            (device, _) => device,
        };
        let device = device.map_err(|source| VfioError::Attach { source })?;
        Ok(OpenedFunction { device, told: Some(told) })
    }
}

impl DmaSpace for IommufdSpace {
    fn open(&self, place: HostPlace) -> Result<OpenedFunction, VfioError> {
        let path = match place {
            HostPlace::Sysfs(path) => path,
            // Only of the iommufd that came with it is it known that it may be bound to that.
            HostPlace::Descriptor(node) => return self.take(File::from(node), self.is_given),
        };
        let function = SysfsFunction::find(&path)?;
        let node = function.node();
        let path = function.path;
        let node = node.ok_or_else(|| VfioError::NoNode { path: path.clone() })?;
        let file = File::options()
            .read(true)
            .write(true)
            .open(&node)
            .map_err(|source| VfioError::OpenNode { path, node, source })?;
        self.take(file, false)
    }

    fn memory(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    /// Device memory has no pages that `IOMMU_IOAS_MAP` could pin: every kernel refuses it.
    fn peer_target(self: Arc<Self>) -> Option<Arc<dyn PeerTarget>> {
        None
    }
}

impl DmaTarget for IommufdSpace {
    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        let piece = Piece::of(&self.ram, region, range)?;
        if !self.map_file(region, range.start, &piece)? {
            self.map_address(&piece)?;
        }
        lock(&self.mapped).insert(piece.gpa, piece.len);
        Ok(())
    }

    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()> {
        let len = usize::try_from(gpa.end.saturating_sub(gpa.start)).map_err(io::Error::other)?;
        self.space.vfio_dma_unmap(gpa.start, len).map_err(io::Error::other)?;
        lock(&self.mapped).retain(|start, _| !gpa.contains(start));
        Ok(())
    }

    fn unmap_all(&self) {
        for (gpa, len) in std::mem::take(&mut *lock(&self.mapped)) {
            if let Err(error) = self.space.vfio_dma_unmap(gpa, len) {
                log::warn!("{len:#x} bytes at {gpa:#x} stay mapped for DMA: {error}");
            }
        }
    }

    fn limits(&self) -> DmaLimits {
        DmaLimits {
            entries: None,
            locked: LockedMemory::for_iommufd(),
            cgroup: DmaLimits::cgroup_memory(),
        }
    }
}
