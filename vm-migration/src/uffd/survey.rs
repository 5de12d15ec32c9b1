// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What this process may do with userfaultfd, asked before there is memory to watch.
//!
//! Owns the names of the features that are told to users. Must never register anything.

use std::io;

use super::sys;
use crate::fault::UffdError;
use crate::layout::RegionInfo;

/// Features of the kernel's userfaultfd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// Those of these bits of the kernel's interface.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Each feature that matters here, by name, and whether the kernel has it.
    pub fn each(self) -> [(&'static str, bool); 6] {
        [
            ("missing-shmem", sys::FEATURE_MISSING_SHMEM),
            ("missing-hugetlb", sys::FEATURE_MISSING_HUGETLBFS),
            ("minor-shmem", sys::FEATURE_MINOR_SHMEM),
            ("minor-hugetlb", sys::FEATURE_MINOR_HUGETLBFS),
            ("thread-id", sys::FEATURE_THREAD_ID),
            ("sigbus", sys::FEATURE_SIGBUS),
        ]
        .map(|(name, bit)| (name, self.0 & bit != 0))
    }

    /// Whether memory of these regions can arrive in postcopy.
    ///
    /// # Errors
    /// As [`super::check`].
    pub fn check(self, regions: &[RegionInfo]) -> Result<(), UffdError> {
        let wanted = super::features_for(regions)?;
        if self.0 & wanted == wanted {
            return Ok(());
        }
        Err(UffdError::Features(io::Error::from_raw_os_error(libc::EINVAL)))
    }
}

/// The features by which memory with these properties is watched.
pub(super) fn wanted(is_shared: bool, is_hugetlb: bool) -> u64 {
    let faults = match (is_shared, is_hugetlb) {
        (false, _) => 0,
        (true, false) => sys::FEATURE_MISSING_SHMEM | sys::FEATURE_MINOR_SHMEM,
        (true, true) => sys::FEATURE_MISSING_HUGETLBFS | sys::FEATURE_MINOR_HUGETLBFS,
    };
    faults | sys::FEATURE_THREAD_ID
}

/// Why no userfaultfd could be opened.
pub(super) fn not_opened(error: io::Error) -> UffdError {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => UffdError::NotPermitted(error),
        _ => UffdError::NotThere(error),
    }
}

/// Opens a userfaultfd and closes it again.
///
/// # Errors
/// The process may not, or the kernel has none.
pub fn survey() -> Result<Features, UffdError> {
    let descriptor = sys::Descriptor::open().map_err(not_opened)?;
    descriptor.features().map(Features).map_err(UffdError::Features)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Backing;

    #[test]
    fn shared_memory_takes_minor_faults_and_private_memory_does_not() {
        let region = |backing, host_page_bytes| RegionInfo {
            name: "mem0".to_owned(),
            gpa: 0,
            len_bytes: 1 << 30,
            host_page_bytes,
            backing,
        };
        let memory = [
            [region(Backing::Anonymous, 4096)],
            [region(Backing::Shared, 4096)],
            [region(Backing::Shared, 2 << 20)],
        ];
        let serves = |bits| memory.clone().map(|region| Features(bits).check(&region).is_ok());
        assert_eq!(serves(u64::MAX), [true; 3]);
        assert_eq!(serves(0), [false; 3]);
        assert_eq!(serves(!sys::FEATURE_MINOR_SHMEM), [true, false, true]);
        assert_eq!(serves(!sys::FEATURE_MINOR_HUGETLBFS), [true, true, false]);
        let giant = Features(u64::MAX).check(&[region(Backing::Shared, 1 << 30)]);
        assert!(matches!(giant, Err(UffdError::PageSize { .. })), "{giant:?}");
        let each = Features(sys::FEATURE_SIGBUS).each();
        assert!(each.contains(&("sigbus", true)) && each.contains(&("minor-shmem", false)));
    }
}
