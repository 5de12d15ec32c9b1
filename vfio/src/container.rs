// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The type1 container: one IOMMU address space for all passed-through functions of a VM.
//!
//! Owns it and a reference to guest RAM, which therefore outlives every mapping. What is mapped stays while a group is in the
//! container, with open devices or without: so groups that are held carry it over a reboot of the guest. The kernel holds one
//! lock while a call pins memory, so several threads map no faster than one; large calls on memory that is already populated
//! make it fast.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hypervisor::{VfioFiles, Vm};
use memory::{GuestRam, RamRegion};
use parking_lot::Mutex;
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_GROUP_FLAGS_CONTAINER_SET, VFIO_GROUP_FLAGS_VIABLE, VFIO_TYPE1v2_IOMMU,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
};

use super::dma::DmaTarget;
use super::error::VfioError;
use super::groups::{GroupStatus, Groups, Kernel, Told};
use super::ioctl::{self, answered, argument, number, u32_at};
use super::limits::DmaLimits;
use super::mapping::BarMapping;
use super::p2p::P2pTarget;
use super::ranges::remove_in;
use super::reach::type1;
use super::space::{Attachment, DmaSpace, Mapping, OpenedFunction, SpaceHold};
use super::sysfs::{HostPlace, SysfsFunction};

const CONTAINER: &str = "/dev/vfio/vfio";
/// Has a file for each IOMMU group with a device that VFIO may open.
const GROUPS: &str = "/dev/vfio";

/// The container's file, and KVM's VFIO device.
struct HostKernel {
    container: File,
    /// `None` between two VMs.
    files: Mutex<Option<VfioFiles>>,
}

fn len_of<T>() -> u32 {
    // Structures of the kernel's interface have some dozens of bytes.
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

impl HostKernel {
    fn open() -> io::Result<File> {
        let container = File::options().read(true).write(true).open(CONTAINER)?;
        // SAFETY: the call takes no argument.
        let version = unsafe { libc::ioctl(container.as_raw_fd(), number::API_VERSION) };
        if u32::try_from(answered(version)?).is_ok_and(|version| version != VFIO_API_VERSION) {
            return Err(io::Error::other(format!("version {version} of VFIO is not known here")));
        }
        // SAFETY: the call takes a number.
        let known = unsafe {
            libc::ioctl(container.as_raw_fd(), number::CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU)
        };
        match answered(known)? {
            0 => Err(io::Error::other("the kernel has no type1 (vfio_iommu_type1)")),
            _ => Ok(container),
        }
    }

    /// Maps `len` bytes at `address` for DMA.
    ///
    /// # Safety
    /// From here on until they are unmapped, devices may read and write these bytes at any time: they may be used as such
    /// memory only, and have to be there.
    unsafe fn map(&self, gpa: u64, len: usize, address: *mut u8) -> io::Result<()> {
        let map = vfio_iommu_type1_dma_map {
            argsz: len_of::<vfio_iommu_type1_dma_map>(),
            flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
            vaddr: address.expose_provenance() as u64,
            iova: gpa,
            size: len as u64,
        };
        // SAFETY: the kernel reads one vfio_iommu_type1_dma_map; what it does to the memory is the caller's promise.
        answered(unsafe {
            libc::ioctl(self.container.as_raw_fd(), number::MAP_DMA, &raw const map)
        })
        .map(|_| ())
    }

    /// Unmaps `len` bytes: one mapping, or several adjacent ones.
    fn unmap(&self, gpa: u64, len: usize) -> io::Result<()> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: len_of::<vfio_iommu_type1_dma_unmap>(),
            flags: 0,
            iova: gpa,
            size: len as u64,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes one vfio_iommu_type1_dma_unmap, and without flags nothing behind it.
        answered(unsafe {
            libc::ioctl(self.container.as_raw_fd(), number::UNMAP_DMA, &raw mut unmap)
        })?;
        if unmap.size == len as u64 {
            return Ok(());
        }
        Err(io::Error::other(format!("{:#x} bytes were unmapped", unmap.size)))
    }
}

impl Kernel for HostKernel {
    fn open_group(&self, group: &str) -> io::Result<OwnedFd> {
        let file = File::options().read(true).write(true).open(Path::new(GROUPS).join(group))?;
        Ok(file.into())
    }

    fn status(&self, group: BorrowedFd<'_>) -> io::Result<GroupStatus> {
        let mut status = argument(&[0]);
        ioctl::call(group, ioctl::GROUP_STATUS, &mut status)?;
        let has = |flag| u32_at(&status, 4) & flag != 0;
        let is_in_container = has(VFIO_GROUP_FLAGS_CONTAINER_SET);
        Ok(GroupStatus { is_viable: has(VFIO_GROUP_FLAGS_VIABLE), is_in_container })
    }

    fn join(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        let container = self.container.as_raw_fd();
        // SAFETY: the kernel reads one i32 there, which lives across the call.
        let answer = unsafe {
            libc::ioctl(group.as_raw_fd(), number::GROUP_SET_CONTAINER, &raw const container)
        };
        answered(answer).map(|_| ())
    }

    fn has_driver(&self) -> bool {
        // Of a container the driver describes itself; there is nothing else to answer.
        ioctl::call(self.container.as_fd(), ioctl::IOMMU_INFO, &mut [0; type1::INFO_BYTES]).is_ok()
    }

    fn set_driver(&self) -> io::Result<()> {
        let container = self.container.as_raw_fd();
        // SAFETY: the call takes a number.
        answered(unsafe { libc::ioctl(container, number::SET_IOMMU, VFIO_TYPE1v2_IOMMU) })
            .map(|_| ())
    }

    fn tell_kvm(&self, group: BorrowedFd<'_>) -> Result<Told, VfioError> {
        let files = self.files.lock().clone().ok_or(VfioError::NoVm)?;
        Ok(Box::new(files.tell(group)?))
    }

    fn open_device(&self, group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
        // SAFETY: the kernel reads a string there, which ends and lives across the call.
        let device =
            unsafe { libc::ioctl(group.as_raw_fd(), number::GROUP_DEVICE_FD, name.as_ptr()) };
        let device = answered(device)?;
        // SAFETY: the kernel has just made the descriptor for the caller, which nothing else knows.
        Ok(unsafe { OwnedFd::from_raw_fd(device) })
    }
}

/// A type 1 container. The functions opened in it share ownership.
pub struct Type1Container {
    // Drop order matters: mappings end before the memory.
    kernel: Arc<HostKernel>,
    groups: Arc<Groups>,
    /// How often it had been given a driver when what was mapped was to stay without devices.
    kept_since: Mutex<Option<u64>>,
    /// Mapped guest memory: guest physical addresses and lengths.
    mapped: Mutex<BTreeMap<u64, usize>>,
    /// Where BARs are mapped.
    bars: Mutex<BTreeSet<u64>>,
    /// Held during a call that pins or unpins guest memory. Threads that wait for the kernel's own lock spin
    /// while its owner runs, and would take the processors from the guest and from threads that populate.
    calls: Mutex<()>,
    ram: Arc<GuestRam>,
}

impl Type1Container {
    /// An empty container that registers its groups with KVM.
    ///
    /// # Errors
    /// The host has no VFIO.
    pub fn new(vm: &Vm, ram: Arc<GuestRam>) -> Result<Self, VfioError> {
        // First, for the most helpful error.
        let container = HostKernel::open().map_err(VfioError::Container)?;
        let files = Mutex::new(Some(vm.vfio_files()?));
        let kernel = Arc::new(HostKernel { container, files });
        Ok(Self {
            groups: Groups::new(Arc::<HostKernel>::clone(&kernel)),
            kernel,
            kept_since: Mutex::default(),
            mapped: Mutex::default(),
            bars: Mutex::default(),
            calls: Mutex::new(()),
            ram,
        })
    }

    /// The kernel's description of the container, of at most `len` bytes.
    fn describe(&self, len: usize) -> io::Result<Vec<u8>> {
        let mut info = vec![0; len];
        ioctl::call(self.kernel.container.as_fd(), ioctl::IOMMU_INFO, &mut info)?;
        Ok(info)
    }
}

impl DmaSpace for Type1Container {
    fn open(&self, place: HostPlace) -> Result<OpenedFunction, VfioError> {
        let HostPlace::Sysfs(path) = place else { return Err(VfioError::NeedsIommufd) };
        let (file, lease) = self.groups.open(&SysfsFunction::find(&path)?)?;
        Ok(OpenedFunction { file, attachment: Attachment::Group(lease) })
    }

    fn valid_ranges(&self) -> io::Result<Option<Vec<RangeInclusive<u64>>>> {
        let mut info = self.describe(type1::INFO_BYTES)?;
        // What it would have, if it had room.
        let len = usize::try_from(u32_at(&info, 0)).map_err(io::Error::other)?;
        if len > type1::INFO_BYTES {
            info = self.describe(len.min(type1::INFO_BYTES_MAX))?;
        }
        Ok(type1::valid_ranges(&info))
    }

    fn memory(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn outlive_vm(&self) -> Result<SpaceHold, &'static str> {
        let groups = self.groups.hold_all();
        *self.kept_since.lock() = Some(self.groups.drivers());
        // It keeps the VM in the kernel.
        *self.kernel.files.lock() = None;
        if groups.is_empty() {
            return Err("no device is open");
        }
        if !self.bars.lock().is_empty() {
            return Err("memory of a device stays mapped");
        }
        // Mappings end before the memory.
        Ok(Box::new((groups, Arc::clone(&self.ram))))
    }

    fn join_vm(&self, vm: &Vm) -> Result<(), VfioError> {
        *self.kernel.files.lock() = Some(vm.vfio_files()?);
        Ok(())
    }

    fn expect(&self, paths: &[PathBuf]) {
        // What cannot be found is reported when it is to be opened.
        self.groups.expect(paths.iter().filter_map(|path| SysfsFunction::find(path).ok()));
    }

    fn check_kept(&self) -> Result<(), &'static str> {
        if *self.kept_since.lock() == Some(self.groups.drivers()) {
            return Ok(());
        }
        self.mapped.lock().clear();
        Err("the host had taken the IOMMU groups of all devices meanwhile")
    }

    fn peer_target(self: Arc<Self>) -> Option<Arc<dyn P2pTarget>> {
        Some(self)
    }
}

impl P2pTarget for Type1Container {
    fn map_bar(&self, gpa: u64, memory: &BarMapping) -> io::Result<()> {
        let len = usize::try_from(memory.len_bytes()).map_err(io::Error::other)?;
        // SAFETY: the address and the length are those of one mapping of device memory, which nothing in
        // this process ever reads or writes, so nothing here can notice what functions do to it. Should
        // it be unmapped from the process first, the IOMMU keeps translating to the device alone.
        unsafe { self.kernel.map(gpa, len, memory.as_ptr()) }?;
        self.bars.lock().insert(gpa);
        Ok(())
    }

    fn unmap_bar(&self, gpa: &Range<u64>) -> io::Result<()> {
        let len = usize::try_from(gpa.end.saturating_sub(gpa.start)).map_err(io::Error::other)?;
        self.kernel.unmap(gpa.start, len)?;
        self.bars.lock().remove(&gpa.start);
        Ok(())
    }

    fn entries(&self) -> Option<u64> {
        DmaLimits::type1_entries()
    }
}

impl DmaTarget for Type1Container {
    /// Where populating holds the lock of the address space for long, as on older kernels, a thread that waits to
    /// account for what it pins blocks all others meanwhile. Huge pages are pinned almost instantly, and so are mapped
    /// when all are populated; with small pages mapping early is a net gain all the same.
    fn maps_last(&self, region: &RamRegion) -> bool {
        region.wants_huge_pages() && !region.is_prezeroed() && !region.can_spare_mmap_lock()
    }

    /// The kernel accounts for each run of pinned pages with the lock held for writing.
    fn takes_mmap_lock(&self) -> bool {
        true
    }

    /// The kernel pins pages through the process's page tables. Prezeroed memory is not in them yet, and
    /// would cost one fault per page while no other thread can map.
    fn prepare(&self, region: &RamRegion, range: &Range<u64>) {
        if region.is_prezeroed()
            && let Err(error) = region.map_present(range)
        {
            log::debug!(
                "pages of zone '{}' are faulted in one by one while they are pinned: {error}",
                region.zone_id()
            );
        }
    }

    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        let Mapping { gpa, len, address } = Mapping::of(&self.ram, region, range)?;
        let calls = self.calls.lock();
        // SAFETY: the range lies in a region of `self.ram`, which outlives the container and so its
        // mappings (this value and every function opened in it hold it). Guest RAM is reached only by
        // volatile and atomic accesses and by system calls: vCPUs write to it at any time, too.
        let mapped = unsafe { self.kernel.map(gpa, len, address) };
        drop(calls);
        mapped?;
        self.mapped.lock().insert(gpa, len);
        Ok(())
    }

    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()> {
        let len = usize::try_from(gpa.end.saturating_sub(gpa.start)).map_err(io::Error::other)?;
        let calls = self.calls.lock();
        self.kernel.unmap(gpa.start, len)?;
        drop(calls);
        remove_in(&mut *self.mapped.lock(), gpa, |_, _| true);
        Ok(())
    }

    fn unmap_all(&self) {
        for (gpa, len) in std::mem::take(&mut *self.mapped.lock()) {
            if let Err(error) = self.kernel.unmap(gpa, len) {
                log::warn!("{len:#x} bytes at {gpa:#x} stay mapped for DMA: {error}");
            }
        }
    }

    fn limits(&self) -> DmaLimits {
        DmaLimits::of_type1()
    }
}
