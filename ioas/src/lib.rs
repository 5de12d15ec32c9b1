// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An I/O address space (IOAS) of iommufd by its number, for code that shares or passes on an IOAS.
//!
//! Owns the kernel's structures (Linux, `include/uapi/linux/iommufd.h`). Must never destroy anything: an
//! address space ends with its iommufd, or with the process that made it. Which addresses can be mapped is in `reach`.

mod reach;

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};

use iommufd_bindings::iommufd::{
    iommu_hw_info, iommu_hwpt_alloc, iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map,
    iommu_ioas_map_file, iommu_ioas_unmap, iommu_iova_range,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITEABLE,
};
use iommufd_ioctls::{IommuFd, IommufdError};
use thiserror::Error;

pub use reach::{HYPERTRANSPORT, HostReach, Unreachable, check_reach};

/// `IOMMU_IOAS_IOVA_RANGES`, which the crate of iommufd's ioctls lacks.
const IOVA_RANGES: libc::Ioctl = 0x3b84;
/// Ranges for which there is room at first: more than hosts are known to have.
const FIRST_RANGES_COUNT: usize = 64;
/// Limit on ranges, in case the kernel names an absurd number.
const RANGES_COUNT_MAX: usize = 1 << 16;

/// Memory that could not be mapped by the file that it is in.
#[derive(Debug, Error)]
pub enum MapFileError {
    /// Before Linux 6.14.
    #[error("this kernel maps memory for devices by address only: Linux 6.14 or newer is needed")]
    NoMapFile,
    /// The kernel's answer.
    #[error(transparent)]
    Refused(io::Error),
}

/// What is mapped, and where the device sees it; in bytes, all multiples of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Where the device sees it.
    pub iova: u64,
    /// How much.
    pub len_bytes: u64,
}

/// One address space.
#[derive(Clone, Copy)]
pub struct Ioas<'a> {
    iommufd: &'a IommuFd,
    id: u32,
}

fn size_of_u32<T>() -> u32 {
    // Structures of the kernel's interface have some dozens of bytes.
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

impl<'a> Ioas<'a> {
    /// The one with this number.
    pub fn with_id(iommufd: &'a IommuFd, id: u32) -> Self {
        Self { iommufd, id }
    }

    /// A new one, which is there for as long as the iommufd.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(iommufd: &'a IommuFd) -> Result<Self, IommufdError> {
        let size = size_of_u32::<iommu_ioas_alloc>();
        let mut new = iommu_ioas_alloc { size, ..Default::default() };
        iommufd.alloc_iommu_ioas(&mut new)?;
        Ok(Self::with_id(iommufd, new.out_ioas_id))
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// A new page table for a device that is bound to the iommufd, which holds what is mapped and will be.
    /// Without a table nothing is pinned.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new_table(&self, device_id: u32) -> Result<u32, IommufdError> {
        let size = size_of_u32::<iommu_hwpt_alloc>();
        let (dev_id, pt_id) = (device_id, self.id);
        let mut new = iommu_hwpt_alloc { size, dev_id, pt_id, ..Default::default() };
        self.iommufd.alloc_iommu_hwpt(&mut new)?;
        Ok(new.out_hwpt_id)
    }

    /// Maps a part of a file, from `offset` on, for reading and writing. Takes memfds and hugetlb files.
    ///
    /// # Errors
    /// The kernel cannot do that at all, or not with this file, or a limit is reached.
    pub fn map_file(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        what: Mapped,
    ) -> Result<(), MapFileError> {
        let map = iommu_ioas_map_file {
            size: size_of_u32::<iommu_ioas_map_file>(),
            flags: FIXED_IOVA | READABLE | WRITEABLE,
            ioas_id: self.id,
            fd: file.as_raw_fd(),
            start: offset,
            length: what.len_bytes,
            iova: what.iova,
        };
        self.iommufd.map_iommu_ioas_file(&map).map_err(|error| match error {
            IommufdError::IommuIoasMapFile(errno) if errno.errno() == libc::ENOTTY => {
                MapFileError::NoMapFile
            }
            IommufdError::IommuIoasMapFile(errno) => {
                MapFileError::Refused(io::Error::from_raw_os_error(errno.errno()))
            }
            other => MapFileError::Refused(io::Error::other(other)),
        })
    }

    /// Maps memory of this process, from `address` on, for reading and writing. It is pinned for as long as
    /// it is mapped, and devices reach it whatever the process does with the address meanwhile: only memory
    /// that is used as one that changes at any time may be mapped.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map_address(&self, address: u64, what: Mapped) -> io::Result<()> {
        let map = iommu_ioas_map {
            size: size_of_u32::<iommu_ioas_map>(),
            flags: FIXED_IOVA | READABLE | WRITEABLE,
            ioas_id: self.id,
            user_va: address,
            length: what.len_bytes,
            iova: what.iova,
            ..Default::default()
        };
        self.iommufd.map_iommu_ioas(&map).map_err(|error| match error {
            IommufdError::IommuIoasMap(errno) => io::Error::from_raw_os_error(errno.errno()),
            other => io::Error::other(other),
        })
    }

    /// The addresses that can be mapped for the devices that are attached: first and last of each range, in
    /// order.
    ///
    /// # Errors
    /// The kernel's.
    pub fn valid_ranges(&self) -> io::Result<Vec<RangeInclusive<u64>>> {
        let mut ranges = vec![iommu_iova_range::default(); FIRST_RANGES_COUNT];
        loop {
            let mut query = iommu_ioas_iova_ranges {
                size: size_of_u32::<iommu_ioas_iova_ranges>(),
                ioas_id: self.id,
                num_iovas: u32::try_from(ranges.len()).map_err(io::Error::other)?,
                allowed_iovas: ranges.as_mut_ptr().expose_provenance() as u64,
                ..Default::default()
            };
            // SAFETY: the kernel reads and writes the query, and writes as many ranges as it says are there.
            let result =
                unsafe { libc::ioctl(self.iommufd.as_raw_fd(), IOVA_RANGES, &raw mut query) };
            let count = usize::try_from(query.num_iovas).map_err(io::Error::other)?;
            if result == 0 {
                ranges.truncate(count);
                return Ok(ranges.iter().map(|range| range.start..=range.last).collect());
            }
            let error = io::Error::last_os_error();
            let is_longer = (ranges.len() + 1..=RANGES_COUNT_MAX).contains(&count);
            if error.raw_os_error() != Some(libc::EMSGSIZE) || !is_longer {
                return Err(error);
            }
            ranges.resize(count, iommu_iova_range::default());
        }
    }

    /// Unmaps what was mapped, whole mappings only.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unmap(&self, what: Mapped) -> io::Result<()> {
        let mut unmap = iommu_ioas_unmap {
            size: size_of_u32::<iommu_ioas_unmap>(),
            ioas_id: self.id,
            iova: what.iova,
            length: what.len_bytes,
        };
        self.iommufd.unmap_iommu_ioas(&mut unmap).map_err(io::Error::other)
    }
}

/// Whether a device is bound to the iommufd by this number.
///
/// # Errors
/// It is not.
pub fn knows_device(iommufd: &IommuFd, device_id: u32) -> Result<(), IommufdError> {
    let size = size_of_u32::<iommu_hw_info>();
    let mut info = iommu_hw_info { size, dev_id: device_id, ..Default::default() };
    iommufd.get_hw_info(&mut info)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    /// A file that is no iommufd answers as a kernel that lacks the call.
    #[test]
    fn a_kernel_without_the_call_is_told_from_a_refusal() {
        let iommufd = IommuFd::new_from_fd(File::open("/dev/null").unwrap());
        let (space, what) = (Ioas::with_id(&iommufd, 1), Mapped { iova: 0, len_bytes: 4096 });
        let file = File::open("/dev/null").unwrap();
        assert!(matches!(space.map_file(file.as_fd(), 0, what), Err(MapFileError::NoMapFile)));
        let errno = space.map_address(0, what).unwrap_err().raw_os_error();
        assert_eq!(errno, Some(libc::ENOTTY));
        assert!(space.unmap(what).is_err() && space.new_table(1).is_err());
        assert!(Ioas::new(&iommufd).is_err() && knows_device(&iommufd, 1).is_err());
    }
}
