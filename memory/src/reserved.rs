// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reserved ranges of this process's addresses, in which a mapping is placed at a chosen address.
//!
//! Owns the reservation from mmap(2) to munmap(2), with all that was mapped into it since. Must never map anything
//! itself.

use std::io;

/// A reserved, inaccessible address range; unmapped on drop, with what was mapped into it.
#[derive(Debug)]
pub struct ReservedRange {
    start: *mut libc::c_void,
    len: usize,
}

// SAFETY: an address range is no data, and nothing here reads or writes what is mapped in it; it belongs to the process and
// not to a thread.
unsafe impl Send for ReservedRange {}
// SAFETY: as above; there is nothing to be shared but numbers.
unsafe impl Sync for ReservedRange {}

impl ReservedRange {
    /// Reserves `len` bytes at an address of the kernel's choice, without using memory.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice changes nothing that is there.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, len })
    }

    /// First address.
    pub fn start(&self) -> *mut libc::c_void {
        self.start
    }
}

impl Drop for ReservedRange {
    fn drop(&mut self) {
        // SAFETY: the range was reserved in `new` and is unmapped once. Whatever maps something into it keeps this as long
        // as anything may use that.
        unsafe { libc::munmap(self.start, self.len) };
    }
}
