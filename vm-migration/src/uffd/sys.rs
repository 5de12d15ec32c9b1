// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The kernel's userfaultfd interface: numbers, structures, one descriptor.
//!
//! May contain `unsafe`: ioctls and reads on the descriptor. Owns no policy: which range is
//! registered and what an event means is decided in the parent module.
//!
//! The crate `userfaultfd` is not used: when a run of zero pages meets a resident page, it does not report how
//! far it came, so the rest of the run would have to be filled page by page; it does not fall back to the
//! system call where `/dev/userfaultfd` exists but may not be opened; and its build needs libclang.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

const UFFD_API: u64 = 0xaa;
const USERFAULTFD_IOC_NEW: u64 = ioc(0, 0x00, 0);
const UFFDIO_API: u64 = ioc(3, 0x3f, 24);
const UFFDIO_REGISTER: u64 = ioc(3, 0x00, 32);
const UFFDIO_UNREGISTER: u64 = ioc(2, 0x01, 16);
const UFFDIO_WAKE: u64 = ioc(2, 0x02, 16);
const UFFDIO_COPY: u64 = ioc(3, 0x03, 40);
const UFFDIO_ZEROPAGE: u64 = ioc(3, 0x04, 32);
const UFFDIO_CONTINUE: u64 = ioc(3, 0x07, 32);

pub(super) const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
pub(super) const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
pub(super) const FEATURE_SIGBUS: u64 = 1 << 7;
pub(super) const FEATURE_THREAD_ID: u64 = 1 << 8;
pub(super) const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
pub(super) const FEATURE_MINOR_SHMEM: u64 = 1 << 10;

pub(super) const REGISTER_MISSING: u64 = 1 << 0;
pub(super) const REGISTER_MINOR: u64 = 1 << 2;

const EVENT_PAGEFAULT: u8 = 0x12;
const MESSAGE_BYTES: usize = 32;

/// Most events per read.
const EVENTS_MAX: usize = 64;

/// The kernel's `_IOC` macro for the userfaultfd type: 1 is write, 2 is read.
const fn ioc(direction: u64, number: u64, size: u64) -> u64 {
    direction << 30 | size << 16 | 0xaa << 8 | number
}

#[repr(C)]
struct Handshake {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyIn {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// UFFDIO_ZEROPAGE and UFFDIO_CONTINUE have one layout.
#[repr(C)]
struct Fill {
    range: Range,
    mode: u64,
    filled: i64,
}

/// A non-blocking userfaultfd.
#[derive(Debug)]
pub(super) struct Descriptor {
    file: File,
}

/// A page fault as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawFault {
    pub address: u64,
    pub thread: u32,
}

impl Descriptor {
    /// Opens a userfaultfd: through the device file, whose permissions then decide, otherwise by the system
    /// call.
    pub(super) fn open() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        if let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd") {
            // SAFETY: the ioctl takes its flags by value and touches no memory of ours.
            let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
            return Self::own(fd.into());
        }
        // SAFETY: the system call takes its flags by value.
        Self::own(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })
    }

    fn own(fd: i64) -> io::Result<Self> {
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
        Ok(Self { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// Drops all page table entries of a mapping of shared memory, whose pages stay in the page cache.
    pub(super) fn unmap_pages(start: u64, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let start = std::ptr::with_exposed_provenance_mut(
            usize::try_from(start).map_err(io::Error::other)?,
        );
        // SAFETY: the caller's mapping of a shared file: an access afterwards finds the same contents.
        let result = unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Negotiates features. Fails when the kernel lacks one.
    pub(super) fn handshake(&self, features: u64) -> io::Result<()> {
        let mut api = Handshake { api: UFFD_API, features, ioctls: 0 };
        self.ioctl(UFFDIO_API, &mut api)
    }

    /// Negotiates none, and returns all that the kernel has.
    pub(super) fn features(&self) -> io::Result<u64> {
        let mut api = Handshake { api: UFFD_API, features: 0, ioctls: 0 };
        self.ioctl(UFFDIO_API, &mut api)?;
        Ok(api.features)
    }

    /// Registers a mapping.
    pub(super) fn register(&self, start: u64, len: u64, mode: u64) -> io::Result<()> {
        let mut register = Register { range: Range { start, len }, mode, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut register)
    }

    pub(super) fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        self.ioctl(UFFDIO_UNREGISTER, &mut Range { start, len })
    }

    pub(super) fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut Range { start, len })
    }

    /// Maps pages that are in the page cache; returns the bytes done before an error.
    pub(super) fn show(&self, start: u64, len: u64) -> (u64, io::Result<()>) {
        let mut fill = Fill { range: Range { start, len }, mode: 0, filled: 0 };
        let result = self.ioctl(UFFDIO_CONTINUE, &mut fill);
        (u64::try_from(fill.filled).unwrap_or(0), result)
    }

    /// Maps zero pages where none are present; returns the bytes done before an error.
    pub(super) fn zero(&self, start: u64, len: u64) -> (u64, io::Result<()>) {
        let mut fill = Fill { range: Range { start, len }, mode: 0, filled: 0 };
        let result = self.ioctl(UFFDIO_ZEROPAGE, &mut fill);
        (u64::try_from(fill.filled).unwrap_or(0), result)
    }

    /// Copies pages in; returns the bytes done before an error.
    pub(super) fn copy(&self, start: u64, bytes: &[u8]) -> (u64, io::Result<()>) {
        let mut copy = CopyIn {
            dst: start,
            src: bytes.as_ptr().expose_provenance() as u64,
            len: bytes.len() as u64,
            mode: 0,
            copied: 0,
        };
        let result = self.ioctl(UFFDIO_COPY, &mut copy);
        (u64::try_from(copy.copied).unwrap_or(0), result)
    }

    fn ioctl<T>(&self, request: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: every request of this file is paired with the structure that the kernel expects
        // for it, exclusively borrowed. What the kernel does to guest memory is meant: it only
        // maps pages in ranges that were registered, or fails.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), request, argument) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Reads the pending faults; having none is not an error.
    pub(super) fn read_faults(&self, mut each: impl FnMut(RawFault)) -> io::Result<()> {
        let mut messages = [0u8; MESSAGE_BYTES * EVENTS_MAX];
        let len = match io::Read::read(&mut &self.file, &mut messages) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        };
        let (messages, _) = messages[..len].as_chunks::<MESSAGE_BYTES>();
        for message in messages.iter().filter(|message| message[0] == EVENT_PAGEFAULT) {
            let [.., a0, a1, a2, a3, a4, a5, a6, a7, t0, t1, t2, t3, _, _, _, _] = *message;
            each(RawFault {
                address: u64::from_ne_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
                thread: u32::from_ne_bytes([t0, t1, t2, t3]),
            });
        }
        Ok(())
    }
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
