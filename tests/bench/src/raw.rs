// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A raw copy of the same bytes over the same loopback: from one populated memfd to another, over
//! one TCP connection. It is the lower bound for a migration with one stream; for one that must
//! allocate the destination's memory, the lower bound is a copy into new memory.
//!
//! Owns both memfds and both ends. Must never touch a guest.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

/// Bytes handed to the kernel at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Destination of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// Populated memory.
    Populated,
    /// Memory whose pages the host allocates and clears when their first byte arrives.
    New,
}

/// Copies `len_bytes`; returns the time, without the preparation.
pub fn copy(len_bytes: u64, to: To) -> io::Result<Duration> {
    let len = usize::try_from(len_bytes).map_err(io::Error::other)?;
    let mut source = Mapped::populated(len)?;
    let mut destination = match to {
        To::Populated => Mapped::populated(len)?,
        To::New => Mapped::new(len)?,
    };
    source.bytes().fill(0x5a);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut to = TcpStream::connect(listener.local_addr()?)?;
    let (mut from, _) = listener.accept()?;
    to.set_nodelay(true)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            destination.bytes().chunks_mut(CHUNK_BYTES).try_for_each(|part| from.read_exact(part))
        });
        source.bytes().chunks(CHUNK_BYTES).try_for_each(|part| to.write_all(part))?;
        receiver.join().map_err(|_| io::Error::other("the receiving thread panicked"))?
    })?;
    let took = start.elapsed();
    if destination.bytes().iter().step_by(4096).any(|byte| *byte != 0x5a) {
        return Err(io::Error::other("the raw copy arrived wrong"));
    }
    Ok(took)
}

/// Has the host allocate this much memory, and frees it: a machine that is itself a guest may have
/// returned its free memory, and would pay for that during the measurement.
pub fn warm(len_bytes: u64) -> io::Result<()> {
    Mapped::populated(usize::try_from(len_bytes).map_err(io::Error::other)?).map(drop)
}

/// A mapped memfd.
struct Mapped {
    address: *mut libc::c_void,
    len: usize,
}

impl Mapped {
    /// With all pages populated.
    fn populated(len: usize) -> io::Result<Self> {
        let mut mapped = Self::new(len)?;
        // Every page is written, so that the copy need not clear or fault in any.
        mapped.bytes().iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        Ok(mapped)
    }

    /// With no page populated.
    fn new(len: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string; the descriptor is checked before it is owned.
        let file = unsafe {
            let fd = libc::memfd_create(c"bench-raw".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            std::fs::File::from(OwnedFd::from_raw_fd(fd))
        };
        file.set_len(len as u64)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is replaced.
        let address = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address, len })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length, is readable and writable, lives as long as `self`,
        // and it is used nowhere else.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no slice of it outlives `self`.
        unsafe { libc::munmap(self.address, self.len) };
    }
}

// SAFETY: the mapping belongs to this value alone and may be used from any one thread at a time.
unsafe impl Send for Mapped {}

#[cfg(test)]
mod tests {
    use super::{To, copy};

    #[test]
    fn copies_what_is_no_multiple_of_anything() {
        for to in [To::Populated, To::New] {
            assert!(copy(3 * (1 << 20) + 4097, to).is_ok());
        }
    }
}
