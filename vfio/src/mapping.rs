// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A part of a BAR, mapped into this process so that KVM can map it into the guest, and the IOMMU for other
//! functions.
//!
//! Owns the mapping. Never reads or writes it: device memory is for the guest alone.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Mapped device memory, which keeps the device's file open in the kernel.
#[derive(Debug)]
pub struct BarMapping {
    address: *mut libc::c_void,
    len: usize,
}

// SAFETY: the address is never dereferenced here, and the mapping belongs to the process, not to a
// thread.
unsafe impl Send for BarMapping {}
// SAFETY: as above; there is nothing to be shared but two numbers.
unsafe impl Sync for BarMapping {}

impl BarMapping {
    /// Maps `len_bytes` of `file` from `offset`, shared, readable and writable.
    ///
    /// # Errors
    /// The kernel refuses, or the numbers are out of range.
    pub fn new(file: BorrowedFd<'_>, offset: u64, len_bytes: u64) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(len_bytes).map_err(|_| invalid())?;
        let offset = libc::off_t::try_from(offset).map_err(|_| invalid())?;
        // SAFETY: a new mapping at an address of the kernel's choice changes nothing that is there.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address, len })
    }

    /// Start address in this process.
    pub fn host_addr(&self) -> u64 {
        self.address.addr() as u64
    }

    /// Start address, to be passed to the kernel only.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.address.cast()
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` and is unmapped once; the caller that mapped it into a guest
        // held a share in it until that was over.
        unsafe { libc::munmap(self.address, self.len) };
    }
}
