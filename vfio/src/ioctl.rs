// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Calls of VFIO.
//!
//! Owns their numbers, and the bytes of arguments that begin with their length. Numbers and structures are those of Linux's
//! `include/uapi/linux/vfio.h`. It must never tell the kernel of another length than the argument has.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// A call whose argument begins with its length in bytes, has no address in it, and of which the kernel reads and writes no
/// more than that length.
#[derive(Clone, Copy, Debug)]
pub struct Call(libc::Ioctl);

pub const GROUP_STATUS: Call = Call(0x3b67);
pub const DEVICE_INFO: Call = Call(0x3b6b);
pub const REGION_INFO: Call = Call(0x3b6c);
pub const IRQ_INFO: Call = Call(0x3b6d);
pub const SET_IRQS: Call = Call(0x3b6e);
pub const HOT_RESET_INFO: Call = Call(0x3b70);
pub const HOT_RESET: Call = Call(0x3b71);
/// Of a container; the number has another meaning for a device.
pub const IOMMU_INFO: Call = Call(0x3b70);

/// Calls with other arguments.
pub mod number {
    pub const API_VERSION: libc::Ioctl = 0x3b64;
    pub const CHECK_EXTENSION: libc::Ioctl = 0x3b65;
    pub const SET_IOMMU: libc::Ioctl = 0x3b66;
    pub const GROUP_SET_CONTAINER: libc::Ioctl = 0x3b68;
    pub const GROUP_DEVICE_FD: libc::Ioctl = 0x3b6a;
    pub const RESET: libc::Ioctl = 0x3b6f;
    pub const MAP_DMA: libc::Ioctl = 0x3b71;
    pub const UNMAP_DMA: libc::Ioctl = 0x3b72;
    pub const FEATURE: libc::Ioctl = 0x3b75;
}

/// The answer of an `ioctl`, or its error.
pub fn answered(answer: libc::c_int) -> io::Result<libc::c_int> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Makes a call. The first four bytes of the argument are set to its length.
///
/// # Errors
/// The kernel's.
pub fn call(file: BorrowedFd<'_>, call: Call, argument: &mut [u8]) -> io::Result<()> {
    let len = u32::try_from(argument.len()).map_err(io::Error::other)?;
    let head = argument.first_chunk_mut::<4>().ok_or(io::ErrorKind::InvalidInput)?;
    *head = len.to_ne_bytes();
    // SAFETY: the kernel reads and writes no more than the first four bytes say, which is what the slice has, and any bits
    // are valid there.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), call.0, argument.as_mut_ptr()) };
    answered(answer).map(|_| ())
}

/// The bytes of 32-bit words, the first of which is left for the length.
pub fn argument(words: &[u32]) -> Vec<u8> {
    let words = std::iter::once(&0).chain(words);
    words.flat_map(|word| word.to_ne_bytes()).collect()
}

/// The 32 bits at a place of an answer; zero if it does not have them.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.map_or(0, |part| u32::from_ne_bytes(*part))
}

/// The 64 bits at a place of an answer; zero if it does not have them.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.map_or(0, |part| u64::from_ne_bytes(*part))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn an_argument_begins_with_its_length() {
        let file = File::open("/dev/null").unwrap();
        let mut bytes = argument(&[7, 8]);
        assert_eq!((bytes.len(), u32_at(&bytes, 4), u32_at(&bytes, 8)), (12, 7, 8));
        let error = call(file.as_fd(), IRQ_INFO, &mut bytes).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY), "the call was made");
        assert_eq!(u32_at(&bytes, 0), 12);
        let error = call(file.as_fd(), IRQ_INFO, &mut [0; 3]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn what_an_answer_does_not_have_is_zero() {
        let bytes = [1, 0, 0, 0, 2, 0, 0, 0, 3];
        assert_eq!((u32_at(&bytes, 0), u32_at(&bytes, 4), u32_at(&bytes, 6)), (1, 2, 0));
        assert_eq!((u64_at(&bytes, 0), u64_at(&bytes, 2)), (2 << 32 | 1, 0));
        assert_eq!(u32_at(&bytes, usize::MAX), 0);
    }
}
