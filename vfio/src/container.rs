// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The type1 container: one IOMMU address space for all passed-through functions of a VM.
//!
//! Owns it and a reference to guest RAM, which therefore outlives every mapping. The kernel holds one lock
//! while a call pins memory, so several threads map no faster than one; large calls on memory that is already
//! populated make it fast.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use hypervisor::Vm;
use memory::{GuestRam, RamRegion};
use parking_lot::Mutex;
use vfio_ioctls::{VfioContainer, VfioDevice, VfioDeviceFd, VfioError as IoctlError};

use super::dma::DmaTarget;
use super::error::VfioError;
use super::limits::{DmaLimits, LockedMemory};
use super::mapping::BarMapping;
use super::p2p::P2pTarget;
use super::ranges::remove_in;
use super::reach::type1;
use super::space::{DmaSpace, Mapping, OpenedFunction};
use super::sysfs::{HostPlace, SysfsFunction};

const CONTAINER: &str = "/dev/vfio/vfio";
/// Has a file for each IOMMU group with a device that VFIO may open.
const GROUPS: &str = "/dev/vfio";

/// A type 1 container. The functions opened in it share ownership.
pub struct Type1Container {
    // Drop order matters: mappings end before the memory.
    container: Arc<VfioContainer>,
    /// Mapped guest memory: guest physical addresses and lengths.
    mapped: Mutex<BTreeMap<u64, usize>>,
    /// Held during a call that pins or unpins guest memory. Threads that wait for the kernel's own lock spin
    /// while its owner runs, and would take the processors from the guest and from threads that populate.
    calls: Mutex<()>,
    /// For each IOMMU group a lock, held while a device of it is opened; the map's own is held briefly.
    groups: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    ram: Arc<GuestRam>,
}

impl Type1Container {
    /// An empty container that registers its groups with KVM.
    ///
    /// # Errors
    /// The host has no VFIO.
    pub fn new(vm: &Vm, ram: Arc<GuestRam>) -> Result<Self, VfioError> {
        // Checked first, for the most helpful error.
        File::options()
            .read(true)
            .write(true)
            .open(CONTAINER)
            .map_err(|error| VfioError::Container(IoctlError::OpenContainer(error)))?;
        let tell_kvm = VfioDeviceFd::new_from_kvm(vm.create_vfio_device()?);
        let container =
            VfioContainer::new(Some(Arc::new(tell_kvm))).map_err(VfioError::Container)?;
        Ok(Self {
            container: Arc::new(container),
            mapped: Mutex::default(),
            calls: Mutex::new(()),
            groups: Mutex::default(),
            ram,
        })
    }

    /// Waits until no other process opens or closes a device of the group, as the kernel has each open of the
    /// group's file wait for. `vfio_ioctls` opens it with a lock that each device here needs when it is opened or
    /// closed. Another holder of the lock of the group would be refused the file meanwhile.
    fn await_group(group: &str) {
        // Opening it in earnest says what is wrong.
        drop(File::options().read(true).write(true).open(Path::new(GROUPS).join(group)));
    }
}

/// `VFIO_IOMMU_GET_INFO` of Linux's `include/uapi/linux/vfio.h`.
const GET_INFO: libc::Ioctl = 0x3b70;

impl Type1Container {
    /// Writes the kernel's description of the container to `info`, as far as it fits, and returns the length
    /// in bytes that it has.
    fn describe(&self, info: &mut [u64]) -> io::Result<usize> {
        let [first, ..] = &mut *info else { return Err(io::ErrorKind::InvalidInput.into()) };
        // The length, and no flags.
        let len = u32::try_from(size_of_val(&*first) * info.len()).map_err(io::Error::other)?;
        let mut head = [0; 8];
        head[..4].copy_from_slice(&len.to_ne_bytes());
        info[0] = u64::from_ne_bytes(head);
        // SAFETY: the kernel writes at most as many bytes as the first four say, which `info` has, and any
        // bits are valid there.
        let result =
            unsafe { libc::ioctl(self.container.as_raw_fd(), GET_INFO, info.as_mut_ptr()) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let len = u32::from_ne_bytes(*info[0].to_ne_bytes().first_chunk::<4>().unwrap_or(&[0; 4]));
        usize::try_from(len).map_err(io::Error::other)
    }
}

impl DmaSpace for Type1Container {
    fn open(&self, place: HostPlace) -> Result<OpenedFunction, VfioError> {
        let HostPlace::Sysfs(path) = place else { return Err(VfioError::NeedsIommufd) };
        let SysfsFunction { path, group } = SysfsFunction::find(&path)?;
        // The kernel opens the devices of a group one after another as well.
        let lock = Arc::clone(self.groups.lock().entry(group.clone()).or_default());
        let _one_of_group = lock.lock();
        Self::await_group(&group);
        // The container registers the group with KVM.
        let device = VfioDevice::new(&path, self.container.clone(), false)
            .map_err(|source| VfioError::Open { path, group, source })?;
        Ok(OpenedFunction { device, told: None })
    }

    fn valid_ranges(&self) -> io::Result<Option<Vec<RangeInclusive<u64>>>> {
        let mut info = vec![0; type1::INFO_BYTES / 8];
        let len = self.describe(&mut info)?;
        if len > type1::INFO_BYTES {
            info = vec![0; len.min(type1::INFO_BYTES_MAX).div_ceil(8)];
            self.describe(&mut info)?;
        }
        let bytes: Vec<u8> = info.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(type1::valid_ranges(&bytes))
    }

    fn memory(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn peer_target(self: Arc<Self>) -> Option<Arc<dyn P2pTarget>> {
        Some(self)
    }
}

fn errno_of(error: IoctlError) -> io::Error {
    match error {
        IoctlError::IommuDmaMap(errno) | IoctlError::IommuDmaUnmap(errno) => {
            io::Error::from_raw_os_error(errno.errno())
        }
        other => io::Error::other(other),
    }
}

impl P2pTarget for Type1Container {
    fn map_bar(&self, gpa: u64, memory: &BarMapping) -> io::Result<()> {
        let len = usize::try_from(memory.len_bytes()).map_err(io::Error::other)?;
        // SAFETY: the address and the length are those of one mapping of device memory, which nothing in
        // this process ever reads or writes, so nothing here can notice what functions do to it. Should
        // it be unmapped from the process first, the IOMMU keeps translating to the device alone.
        unsafe { self.container.vfio_dma_map(gpa, len, memory.as_ptr()) }.map_err(errno_of)
    }

    fn unmap_bar(&self, gpa: &Range<u64>) -> io::Result<()> {
        let len = usize::try_from(gpa.end.saturating_sub(gpa.start)).map_err(io::Error::other)?;
        self.container.vfio_dma_unmap(gpa.start, len).map_err(errno_of)
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
        let mapped = unsafe { self.container.vfio_dma_map(gpa, len, address) };
        drop(calls);
        mapped.map_err(errno_of)?;
        self.mapped.lock().insert(gpa, len);
        Ok(())
    }

    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()> {
        let len = usize::try_from(gpa.end.saturating_sub(gpa.start)).map_err(io::Error::other)?;
        let calls = self.calls.lock();
        self.container.vfio_dma_unmap(gpa.start, len).map_err(io::Error::other)?;
        drop(calls);
        remove_in(&mut *self.mapped.lock(), gpa, |_, _| true);
        Ok(())
    }

    fn unmap_all(&self) {
        for (gpa, len) in std::mem::take(&mut *self.mapped.lock()) {
            if let Err(error) = self.container.vfio_dma_unmap(gpa, len) {
                log::warn!("{len:#x} bytes at {gpa:#x} stay mapped for DMA: {error}");
            }
        }
    }

    fn limits(&self) -> DmaLimits {
        DmaLimits {
            entries: DmaLimits::type1_entries(),
            locked: LockedMemory::of_this_process(),
            cgroup: DmaLimits::cgroup_memory(),
        }
    }
}
