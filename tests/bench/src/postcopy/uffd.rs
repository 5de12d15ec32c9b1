// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Minimal use of userfaultfd: memory all of whose pages are missing, and one descriptor.
//!
//! Owns a mapping and its descriptor until it is dropped. The migration's own fault source is
//! measured against it, so it must never be built on that.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Feature that signals the faulting thread instead of making it wait.
pub const SIGBUS: u64 = 1 << 7;

const API: u64 = 0xaa;
const IOC_API: u64 = 0xc018_aa3f;
const IOC_REGISTER: u64 = 0xc020_aa00;
const IOC_COPY: u64 = 0xc028_aa03;
const MISSING: u64 = 1;
const EVENT_BYTES: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;

/// Watched shared memory, like that of guests.
pub struct Missing {
    address: *mut u8,
    len: usize,
    file: File,
}

// SAFETY: the mapping lives as long as the value, and its pages are only accessed one byte at a
// time, atomically, or by the kernel.
unsafe impl Send for Missing {}
// SAFETY: as above.
unsafe impl Sync for Missing {}

impl Missing {
    /// Creates `pages` pages; `features` are those of userfaultfd that are needed in addition.
    pub fn new(pages: usize, features: u64) -> io::Result<Self> {
        let len = pages * PAGE_BYTES;
        // SAFETY: the name is a C string; descriptors are checked before they are owned.
        let (memory, file) = unsafe {
            let memory = libc::memfd_create(c"bench-missing".as_ptr(), libc::MFD_CLOEXEC);
            let memory = owned(memory)?;
            let flags = libc::O_CLOEXEC;
            let uffd =
                owned(RawFd::try_from(libc::syscall(libc::SYS_userfaultfd, flags)).unwrap_or(-1))?;
            (memory, uffd)
        };
        memory.set_len(len as u64)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is replaced.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, flags, memory.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let missing = Self { address: address.cast(), len, file };
        missing.ioctl(IOC_API, &mut [API, features, 0])?;
        missing.ioctl(IOC_REGISTER, &mut [missing.start(), len as u64, MISSING, 0])?;
        Ok(missing)
    }

    /// Address of the first page.
    pub fn start(&self) -> u64 {
        self.address.expose_provenance() as u64
    }

    /// Writes to a page, which waits until it is there.
    pub fn touch(&self, page: usize) {
        assert!(page < self.len / PAGE_BYTES);
        // SAFETY: inside the mapping, and accessed atomically by all threads.
        let byte = unsafe { &*self.address.add(page * PAGE_BYTES).cast::<AtomicU8>() };
        byte.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for one fault; returns the address of its page.
    pub fn next_fault(&self) -> io::Result<u64> {
        loop {
            let mut event = [0_u8; EVENT_BYTES];
            (&self.file).read_exact(&mut event)?;
            let [kind, .., a0, a1, a2, a3, a4, a5, a6, a7, _, _, _, _, _, _, _, _] = event;
            if kind == EVENT_PAGEFAULT {
                let address = u64::from_ne_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
                return Ok(address & !(PAGE_BYTES as u64 - 1));
            }
        }
    }

    /// Copies a page in and wakes the waiting thread.
    pub fn fill(&self, address: u64, page: &[u8; PAGE_BYTES]) -> io::Result<()> {
        copy(self.file.as_raw_fd(), address, page)
    }

    /// The userfaultfd.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    fn ioctl<const N: usize>(&self, request: u64, words: &mut [u64; N]) -> io::Result<()> {
        ioctl(self.file.as_raw_fd(), request, words)
    }
}

impl Drop for Missing {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and it cannot be used without the value.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

/// Copies a page in. May be called from a signal handler.
pub fn copy(fd: RawFd, address: u64, page: &[u8; PAGE_BYTES]) -> io::Result<()> {
    let source = page.as_ptr().expose_provenance() as u64;
    ioctl(fd, IOC_COPY, &mut [address, source, PAGE_BYTES as u64, 0, 0])
}

fn ioctl<const N: usize>(fd: RawFd, request: u64, words: &mut [u64; N]) -> io::Result<()> {
    // SAFETY: each request of this file comes with as many words as the kernel reads and writes for
    // it; what it does to the mapping is meant.
    match unsafe { libc::ioctl(fd, request, words.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// # Safety
/// The descriptor, when it is one, must be new.
unsafe fn owned(fd: RawFd) -> io::Result<File> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { File::from_raw_fd(fd) })
}
