// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! iommufd: one I/O address space for all passed-through functions of a VM, each of which is opened
//! by its character device.
//!
//! Owns the address space and a reference to guest RAM, which therefore outlives every mapping. Memory backed by
//! a file is mapped by the file (`IOMMU_IOAS_MAP_FILE`, Linux 6.14), so that the kernel need not walk
//! the process's page tables; other memory, and all memory on older kernels, by its address. Pieces are
//! pinned in parallel where several threads map: no lock is held during a call.
//!
//! The kernel pins memory only while a page table has it. The page table that it makes by itself is gone with the
//! last device that is attached. So an own one is made for the first device, which stays until the iommufd is closed:
//! memory stays mapped and pinned while the devices are closed and opened again for a reboot of the guest.
//!
//! An address space may also come from a pool, with all memory mapped and a filled page table
//! ([`IommufdSpace::prepinned`]): devices are then attached to that one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use hypervisor::{AttachedFile, VfioFiles, Vm};
use ioas::{Ioas, MapFileError, Mapped, knows_device};
use iommufd_ioctls::IommuFd;
use memory::{GuestRam, RamRegion};
use parking_lot::Mutex;
use prezero_pool_client::PinnedGrant;
use vfio_ioctls::{VfioDevice, VfioError as IoctlError, VfioIommufd};

use super::dma::DmaTarget;
use super::error::VfioError;
use super::limits::DmaLimits;
use super::p2p::P2pTarget;
use super::prepinned::mapped_pieces;
use super::ranges::remove_in;
use super::space::{Attachment, DmaSpace, Mapping, OpenedFunction, SpaceHold};
use super::sysfs::{HostPlace, SysfsFunction, is_node_of};

const IOMMUFD: &str = "/dev/iommu";

/// The page table (HWPT) that devices are attached to.
enum Table {
    /// One that the kernel makes, and destroys with the last device. In an iommufd that was passed in, another
    /// would keep memory pinned after this VM.
    Kernels,
    /// To be made for the first device.
    Unmade,
    /// Id of the one that stays until the iommufd is closed.
    Made(u32),
}

/// An iommufd address space (IOAS). The functions opened in it share ownership.
pub struct IommufdSpace {
    // Drop order matters: mappings end before the memory.
    space: Arc<VfioIommufd>,
    /// Id of the IOAS in use. Only in an iommufd that was passed in is it that of `space`, which destroys it in
    /// the end; else that one stays empty.
    space_id: u32,
    /// Held while a table is made.
    table: Mutex<Table>,
    /// Mapped ranges: guest physical addresses and lengths. Locked briefly, never during a call.
    mapped: Mutex<BTreeMap<u64, usize>>,
    /// Whether the kernel may support mapping files; cleared once it has refused.
    maps_files: AtomicBool,
    /// Whether the iommufd was passed in: then devices passed as descriptors may be bound to it already.
    is_given: bool,
    /// KVM's VFIO device; `None` between two VMs.
    files: Mutex<Option<VfioFiles>>,
    ram: Arc<GuestRam>,
}

impl IommufdSpace {
    /// An empty address space, in the given iommufd or in a new one.
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
        // KVM is told of each device separately: the crate would not undo that if the device cannot be
        // used.
        let space = VfioIommufd::new(iommufd, None, None).map_err(VfioError::AddressSpace)?;
        let (space_id, table) = if is_given {
            (space.ioas().id(), Table::Kernels)
        } else {
            let own = Ioas::new(space.iommufd()).map_err(VfioError::OwnSpace)?;
            (own.id(), Table::Unmade)
        };
        Ok(Self {
            space_id,
            table: Mutex::new(table),
            space: Arc::new(space),
            mapped: Mutex::default(),
            maps_files: AtomicBool::new(true),
            is_given,
            files: Mutex::new(Some(vm.vfio_files()?)),
            ram,
        })
    }

    /// The address space of a pool, in which all of `ram` is mapped according to `grant`.
    ///
    /// # Errors
    /// The mappings are not of this memory, or the iommufd does not know the device.
    pub fn prepinned(
        vm: &Vm,
        ram: Arc<GuestRam>,
        iommufd: OwnedFd,
        grant: &PinnedGrant,
    ) -> Result<Self, VfioError> {
        let mapped = mapped_pieces(&ram, grant)?;
        let space = Self::new(vm, ram, Some(iommufd))?;
        knows_device(space.space.iommufd(), grant.device_id).map_err(VfioError::NotInSlot)?;
        let in_words = |(gpa, len)| Some((gpa, usize::try_from(len).ok()?));
        Ok(Self {
            space_id: grant.space_id,
            table: Mutex::new(Table::Made(grant.table_id)),
            mapped: Mutex::new(mapped.into_iter().filter_map(in_words).collect()),
            // Its own device comes open and bound, others do not.
            is_given: false,
            ..space
        })
    }

    fn ioas(&self) -> Ioas<'_> {
        Ioas::with_id(self.space.iommufd(), self.space_id)
    }

    /// Maps a piece through its file; false if the kernel does not support that.
    fn map_file(&self, region: &RamRegion, start: u64, piece: &Mapping) -> io::Result<bool> {
        let Some(file) = region.file().filter(|_| self.maps_files.load(Ordering::Relaxed)) else {
            return Ok(false);
        };
        let offset = region.file_offset().saturating_add(start);
        match self.ioas().map_file(file.as_fd(), offset, mapped(piece.gpa, piece.len)) {
            Ok(()) => Ok(true),
            Err(MapFileError::NoMapFile) => {
                log::debug!("this kernel's iommufd maps memory by address only");
                self.maps_files.store(false, Ordering::Relaxed);
                Ok(false)
            }
            Err(MapFileError::Refused(error)) => match error.raw_os_error() {
                // Only memfd and hugetlb files are supported, not those of other file systems.
                Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(false),
                _ => Err(error),
            },
        }
    }

    fn map_address(&self, piece: &Mapping) -> io::Result<()> {
        // The piece lies in a region of `self.ram`, which outlives the address space and so its mappings
        // (this value and every function opened in it hold it). Guest RAM is reached only by volatile and
        // atomic accesses and by system calls: vCPUs write to it at any time, too.
        self.ioas().map_address(piece.address.addr() as u64, mapped(piece.gpa, piece.len))
    }

    /// Registers an open character device with KVM.
    fn tell(&self, node: &File) -> Result<AttachedFile, VfioError> {
        let files = self.files.lock().clone().ok_or(VfioError::NoVm)?;
        files.tell(node.as_fd()).map_err(|error| match error.errno() {
            libc::EINVAL => VfioError::NotANode(error),
            _ => VfioError::Kvm(error),
        })
    }

    /// The page table for a device, made for the first; `None` if the kernel makes none for it.
    fn table_for(&self, device: &VfioDevice) -> Option<u32> {
        let mut table = self.table.lock();
        if let Table::Made(id) = *table {
            return Some(id);
        }
        match self.ioas().new_table(device.iommufd_dev_id()?) {
            Ok(id) => {
                *table = Table::Made(id);
                Some(id)
            }
            Err(error) => {
                log::debug!("memory will not stay mapped for DMA when the guest reboots: {error}");
                None
            }
        }
    }

    /// Attaches a device that is bound; one behind another IOMMU, or behind none, gets a page table of its own.
    fn attach(&self, device: &VfioDevice) -> Result<(), VfioError> {
        if self.attaches_itself() {
            return Ok(());
        }
        let attached = match self.table_for(device).map(|table| device.attach_hwpt(table)) {
            Some(Err(IoctlError::VfioDeviceAttachIommufdPt(errno)))
                if matches!(errno.errno(), libc::EINVAL | libc::ENOENT) =>
            {
                device.attach_hwpt(self.space_id)
            }
            None => device.attach_hwpt(self.space_id),
            Some(other) => other,
        };
        attached.map_err(|source| VfioError::Attach { source })
    }

    /// Whether a device is attached to the address space when it is bound.
    fn attaches_itself(&self) -> bool {
        matches!(*self.table.lock(), Table::Kernels)
    }

    /// Attaches the pool's device to the address space that came with it.
    fn take_prepinned(&self, path: &Path, node: File) -> Result<OpenedFunction, VfioError> {
        let SysfsFunction { path, .. } = SysfsFunction::find(path)?;
        if !is_node_of(&path, &node) {
            return Err(VfioError::OtherDevice { path });
        }
        let told = self.tell(&node)?;
        let device = VfioDevice::new_from_bound_fd(node, Arc::clone(&self.space), false);
        let device = device.map_err(|source| VfioError::Attach { source })?;
        let start = Instant::now();
        self.attach(&device)?;
        let took_us = start.elapsed().as_micros();
        log::info!("the device at {} reaches all memory after {took_us} us", path.display());
        opened(device, told)
    }

    /// Binds an open character device and attaches it to the address space.
    fn take(&self, node: File, may_be_bound: bool) -> Result<OpenedFunction, VfioError> {
        // First: the kernel needs the VM when it opens the device.
        let told = self.tell(&node)?;
        let again = may_be_bound.then(|| node.try_clone()).transpose();
        let again = again.map_err(|source| VfioError::Io {
            what: "duplicate the descriptor of the device",
            source,
        })?;
        let to_space = self.attaches_itself();
        let bound = VfioDevice::new_from_fd(node, Arc::clone(&self.space), to_space);
        let device = match (bound, again) {
            // Bound already, as its descriptor is open elsewhere: in the owner's process, or before a
            // reboot.
            (Err(IoctlError::VfioDeviceBindIommufd(errno)), Some(node))
                if errno.errno() == libc::EINVAL =>
            {
                let device = VfioDevice::new_from_bound_fd(node, Arc::clone(&self.space), true);
                device.map_err(|error| match error {
                    // It is not bound, so binding failed for another reason.
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
        self.attach(&device)?;
        opened(device, told)
    }
}

fn opened(device: VfioDevice, told: AttachedFile) -> Result<OpenedFunction, VfioError> {
    // SAFETY: the device keeps its descriptor open across this statement.
    let file = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) };
    let file = file.try_clone_to_owned().map(File::from).map_err(|source| VfioError::Io {
        what: "duplicate the descriptor of the device",
        source,
    })?;
    Ok(OpenedFunction { file, attachment: Attachment::Iommufd { _device: device, _told: told } })
}

fn mapped(gpa: u64, len: usize) -> Mapped {
    Mapped { iova: gpa, len_bytes: len as u64 }
}

impl DmaSpace for IommufdSpace {
    fn open(&self, place: HostPlace) -> Result<OpenedFunction, VfioError> {
        let path = match place {
            HostPlace::Sysfs(path) => path,
            // Only for a passed-in iommufd may a descriptor be bound already.
            HostPlace::Descriptor(node) => return self.take(File::from(node), self.is_given),
            HostPlace::Prepinned { path, node } => {
                return self.take_prepinned(&path, File::from(node));
            }
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

    fn valid_ranges(&self) -> io::Result<Option<Vec<RangeInclusive<u64>>>> {
        self.ioas().valid_ranges().map(Some)
    }

    fn memory(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn outlive_vm(&self) -> Result<SpaceHold, &'static str> {
        // It keeps the VM in the kernel.
        *self.files.lock() = None;
        match *self.table.lock() {
            Table::Made(_) => Ok(Box::new(())),
            Table::Kernels => Err("an iommufd that was given may be open longer than the VM"),
            Table::Unmade => Err("it is mapped only as long as devices are open"),
        }
    }

    fn join_vm(&self, vm: &Vm) -> Result<(), VfioError> {
        *self.files.lock() = Some(vm.vfio_files()?);
        Ok(())
    }

    /// Device memory has no pages that `IOMMU_IOAS_MAP` could pin: every kernel refuses it.
    fn peer_target(self: Arc<Self>) -> Option<Arc<dyn P2pTarget>> {
        None
    }
}

impl DmaTarget for IommufdSpace {
    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        let piece = Mapping::of(&self.ram, region, range)?;
        if !self.map_file(region, range.start, &piece)? {
            self.map_address(&piece)?;
        }
        self.mapped.lock().insert(piece.gpa, piece.len);
        Ok(())
    }

    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()> {
        let len_bytes = gpa.end.saturating_sub(gpa.start);
        self.ioas().unmap(Mapped { iova: gpa.start, len_bytes })?;
        remove_in(&mut *self.mapped.lock(), gpa, |_, _| true);
        Ok(())
    }

    fn unmap_all(&self) {
        for (gpa, len) in std::mem::take(&mut *self.mapped.lock()) {
            if let Err(error) = self.ioas().unmap(mapped(gpa, len)) {
                log::warn!("{len:#x} bytes at {gpa:#x} stay mapped for DMA: {error}");
            }
        }
    }

    fn limits(&self) -> DmaLimits {
        DmaLimits::of_iommufd()
    }
}
