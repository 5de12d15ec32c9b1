// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that a device server sends.
//!
//! Owns them until it is known what they are. A server may send a file of a file system that it serves itself, and then
//! each call that this file system gets, also that at the end of a descriptor, would wait for the server. So none is
//! looked at before the kernel has said, by itself, that the file is memory; another is closed on a thread of its own.

use std::fs::File;
use std::os::fd::OwnedFd;

/// A descriptor that has come.
#[derive(Debug)]
pub struct ReceivedFd(Option<OwnedFd>);

impl ReceivedFd {
    /// The file, if it is memory that can be mapped page by page: a memfd, or on a tmpfs. Of a file of huge pages the
    /// kernel maps more than was asked for, over what is behind.
    pub fn into_memory(mut self) -> Option<File> {
        let fd = self.0.take_if(|fd| is_memory(fd) && !is_huge(fd))?;
        Some(File::from(fd))
    }
}

impl From<OwnedFd> for ReceivedFd {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

/// Whether the kernel has seals for the file, which it has for memory, without asking a file system.
fn is_memory(fd: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// Whether memory is on a hugetlbfs, or its file system cannot be known. Asks the file system: only for memory.
fn is_huge(fd: &OwnedFd) -> bool {
    !rustix::fs::fstatfs(fd).is_ok_and(|found| found.f_type != libc::HUGETLBFS_MAGIC)
}

impl Drop for ReceivedFd {
    fn drop(&mut self) {
        let Some(fd) = self.0.take_if(|fd| !is_memory(fd)) else { return };
        // A host that gives no thread has it closed here.
        drop(stoppable_thread::spawn("vfio-user", move || drop(fd)));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn memory_in_huge_pages_is_not_mapped_by_the_page() {
        let small = memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
        assert!(ReceivedFd::from(small).into_memory().is_some());
        // Needs no page as long as nothing is mapped.
        let huge = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let huge = memfd_create("huge", huge).unwrap();
        assert!(ReceivedFd::from(huge).into_memory().is_none());
    }
}
