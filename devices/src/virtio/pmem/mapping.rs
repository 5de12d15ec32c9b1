// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A file mapped into this process, for a memory slot of the guest.
//!
//! Owns the mapping. Never accesses it, and gives no reference to what is in it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::{self, NonNull};

use super::file::PMEM_ALIGN_BYTES;
use crate::syscalls::check;

/// Address space of a process that begins at a multiple of 2 MiB, like the guest address, so that huge pages of the
/// host can be huge pages of the guest.
pub struct PmemMapping {
    start: NonNull<libc::c_void>,
    len: usize,
}

// SAFETY: a range of addresses, which this type never accesses; unmapping it is possible on any thread.
unsafe impl Send for PmemMapping {}
// SAFETY: as above; nothing can be changed through a shared reference.
unsafe impl Sync for PmemMapping {}

/// Size of the pages of a file: that of its huge pages, if it has any, as addresses have to be a multiple of it.
pub(super) fn host_page_bytes(file: &File) -> io::Result<u64> {
    // SAFETY: statfs is a plain C struct for which all zeros is a valid value.
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one structure, which lives during the call; the descriptor is open.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut about) })?;
    if about.f_type != libc::HUGETLBFS_MAGIC {
        return Ok(4096);
    }
    u64::try_from(about.f_bsize).map_err(io::Error::other)
}

impl PmemMapping {
    /// Maps the first `len` bytes of a file, whole pages of it; with `is_private`, what the guest writes stays in this process.
    pub(super) fn new(file: &File, len: usize, is_private: bool) -> io::Result<Self> {
        let page_bytes = usize::try_from(host_page_bytes(file)?).map_err(io::Error::other)?;
        let align = PMEM_ALIGN_BYTES.max(page_bytes);
        let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
        let with_slack = len.checked_add(align).filter(|_| len > 0).ok_or_else(too_long)?;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses affects no other mapping.
        let reserved = unsafe {
            libc::mmap(
                ptr::null_mut(),
                with_slack,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Less than `align`, so that what follows stays within the reservation.
        let skip = reserved.addr().next_multiple_of(align).wrapping_sub(reserved.addr());
        let start = reserved.wrapping_byte_add(skip);
        let sharing = if is_private { libc::MAP_PRIVATE } else { libc::MAP_SHARED };
        // SAFETY: the range is within the reservation of this function, to which nothing refers, and is replaced as
        // a whole. The kernel checks the descriptor.
        let mapped = unsafe {
            libc::mmap(
                start,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                sharing | libc::MAP_FIXED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        let unmap = |at: *mut libc::c_void, len: usize| {
            if len > 0 {
                // SAFETY: a part of the reservation to which nothing refers. It can only fail for want of kernel
                // memory, and then address space is lost.
                unsafe { libc::munmap(at, len) };
            }
        };
        if mapped == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            unmap(reserved, with_slack);
            return Err(error);
        }
        unmap(reserved, skip);
        unmap(start.wrapping_byte_add(len), align - skip);
        let start = NonNull::new(mapped).ok_or_else(too_long)?;
        Ok(Self { start, len })
    }

    /// First address in this process.
    pub fn host_addr(&self) -> u64 {
        self.start.addr().get() as u64
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }
}

impl Drop for PmemMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made. No Rust reference to it exists, and a memory slot of KVM holds a share
        // of this value for as long as it refers to the addresses.
        unsafe { libc::munmap(self.start.as_ptr(), self.len) };
    }
}
