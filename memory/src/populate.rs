// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Populating a range of guest memory, with huge pages where wanted.
//!
//! Owns the choice between the kernel's own populate, huge pages by collapse, and touching. Must
//! never change what the guest reads, must never end the process by SIGBUS, and must not be used on
//! memory whose content is still to arrive.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::host::Host;
use crate::mapping::{Advice, Mapping};
use crate::touch::touch;
use crate::{PAGE_BYTES, to_usize};

/// The size of a transparent huge page.
pub const THP_BYTES: u64 = 2 << 20;

/// Why memory could not be populated.
#[derive(Debug, thiserror::Error)]
pub enum PopulateError {
    /// The hugetlb pool is exhausted.
    #[error(
        "memory zone '{zone}' got no further huge page: raise the number in {pool}, or release \
         huge pages that others hold"
    )]
    HugetlbShortage {
        /// The zone.
        zone: String,
        /// File that sets the pool's size.
        pool: String,
    },
    /// The host or a cgroup is out of memory.
    #[error(
        "memory zone '{zone}' could not be populated at byte {at:#x}: the host (or this process's \
         cgroup, or the NUMA node that the zone is bound to) is out of memory"
    )]
    OutOfMemory {
        /// The zone.
        zone: String,
        /// Offset in the region.
        at: u64,
    },
    /// A hardware memory error.
    #[error(
        "memory zone '{zone}' has a page with a hardware memory error at byte {at:#x}: take the \
         faulty memory out of use"
    )]
    HardwarePoison {
        /// The zone.
        zone: String,
        /// Offset in the region.
        at: u64,
    },
    /// Any other error, such as a full file system.
    #[error("memory zone '{zone}' could not be populated at byte {at:#x}")]
    Failed {
        /// The zone.
        zone: String,
        /// Offset in the region.
        at: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// What is populated, and how.
#[derive(Debug)]
pub struct PopulateTarget<'a> {
    pub zone: &'a str,
    pub mapping: &'a Mapping,
    pub file: Option<(&'a File, u64)>,
    pub page_bytes: u64,
    pub hugetlb: bool,
    /// Collapse into huge pages: for shared memory that gets small pages by the host's settings.
    pub collapse: bool,
    /// Transparent huge pages are wanted.
    pub thp: bool,
    /// Page faults leave the lock of the address space alone.
    pub faults_spare_mmap_lock: bool,
}

/// How to populate; all but the first are fallbacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Advise,
    Touch,
}

impl PopulateTarget<'_> {
    /// Populates `range`, in offsets of the mapping. With `spare` the lock of the address space is held for short
    /// times only, where the kernel allows, which is slower for small pages.
    pub fn populate(&self, range: Range<u64>, spare: bool) -> Result<(), PopulateError> {
        let rest = self.touch(&range, spare)..range.end;
        if rest.is_empty() {
            return Ok(());
        }
        if spare && !self.hugetlb {
            return self.populate_in_blocks(rest);
        }
        self.populate_by(Method::Advise, rest)
    }

    /// Populates by page faults where they need no lock of the address space. Returns the offset from which on pages
    /// are still to be populated, or looked at: of a transparent huge page one byte is touched, and whether it has
    /// become one is not known.
    fn touch(&self, range: &Range<u64>, spare: bool) -> u64 {
        if !spare || !self.faults_spare_mmap_lock || self.collapse {
            return range.start;
        }
        if self.thp && !self.hugetlb {
            let blocks = aligned_inside(self.mapping.start().addr() as u64, range);
            touch(self.mapping, &blocks, THP_BYTES);
            return range.start;
        }
        touch(self.mapping, range, self.page_bytes)
    }

    /// Populates block by block, so that none holds the lock of the address space for longer than it takes to make
    /// one of small pages.
    fn populate_in_blocks(&self, range: Range<u64>) -> Result<(), PopulateError> {
        if self.collapse
            && let Err(error) = self.collapse_blocks(&range)
            // The kernel is older than the advice (5.14), which is found for each block then.
            && error.raw_os_error() != Some(libc::EINVAL)
        {
            return Err(self.explain(range.start, error));
        }
        let small = PopulateTarget { collapse: false, ..*self };
        let base = self.mapping.start().addr() as u64;
        let mut at = range.start;
        while at < range.end {
            let end = ((base + at + 1).next_multiple_of(THP_BYTES) - base).min(range.end);
            small.populate_by(Method::Advise, at..end)?;
            at = end;
        }
        Ok(())
    }

    pub fn populate_by(&self, method: Method, range: Range<u64>) -> Result<(), PopulateError> {
        let result = match method {
            Method::Advise => self.advise(&range),
            Method::Touch => self.allocate_then_touch(&range),
        };
        match result {
            // The kernel is older than this advice (5.14).
            Err(error)
                if method == Method::Advise && error.raw_os_error() == Some(libc::EINVAL) =>
            {
                self.populate_by(Method::Touch, range)
            }
            result => result.map_err(|source| self.explain(range.start, source)),
        }
    }

    /// Populates by the kernel's advice alone. Fails with `EINVAL` on kernels without it.
    pub fn populate_small(mapping: &Mapping, range: &Range<u64>) -> io::Result<()> {
        retry(|| mapping.advise(range, Advice::PopulateWrite))
    }

    /// Populates by the kernel's advice: huge pages by collapse where they are wanted, then the
    /// rest. Fails with `EINVAL` on kernels without the advice.
    pub fn advise(&self, range: &Range<u64>) -> io::Result<()> {
        if self.collapse {
            self.collapse_blocks(range)?;
        }
        Self::populate_small(self.mapping, range)
    }

    /// Makes huge pages of whole blocks that are almost empty: populates one page of each, then
    /// collapses. Works whatever `shmem_enabled` is set to (except `deny`), and is faster than
    /// populating small pages. Failures are not errors, because small pages follow then.
    fn collapse_blocks(&self, range: &Range<u64>) -> io::Result<()> {
        let blocks = aligned_inside(self.mapping.start().addr() as u64, range);
        for block in blocks.clone().step_by(to_usize(THP_BYTES)) {
            let first_page = block..block + PAGE_BYTES;
            retry(|| self.mapping.advise(&first_page, Advice::PopulateWrite))?;
        }
        if !blocks.is_empty() {
            let _ = self.mapping.advise(&blocks, Advice::Collapse);
        }
        Ok(())
    }

    /// For a file the pages are allocated first, by a call that reports errors; touching a page
    /// that the file cannot get would cause a SIGBUS.
    #[expect(clippy::cast_ptr_alignment, reason = "the word at the start of a page is aligned")]
    fn allocate_then_touch(&self, range: &Range<u64>) -> io::Result<()> {
        if let Some((file, offset)) = self.file {
            let at = libc::off_t::try_from(offset + range.start).map_err(io::Error::other)?;
            let len = libc::off_t::try_from(range.end - range.start).map_err(io::Error::other)?;
            retry(|| {
                // SAFETY: takes numbers only; the descriptor is open.
                match unsafe { libc::fallocate(file.as_raw_fd(), 0, at, len) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            })?;
        }
        for offset in range.clone().step_by(to_usize(self.page_bytes)) {
            // SAFETY: inside the mapping and aligned to a page.
            let word = unsafe { self.mapping.start().add(to_usize(offset)) }.cast::<u64>();
            // SAFETY: as above; an atomic may alias whatever else writes this memory.
            let word = unsafe { AtomicU64::from_ptr(word) };
            // A write that changes nothing, whatever other threads write: if the value differs from
            // the one just read, the page has been written already.
            let now = word.load(Ordering::Relaxed);
            let _ = word.compare_exchange(now, now, Ordering::Relaxed, Ordering::Relaxed);
        }
        Ok(())
    }

    fn explain(&self, at: u64, source: io::Error) -> PopulateError {
        let zone = self.zone.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOMEM | libc::EFAULT | libc::ENOSPC) if self.hugetlb => {
                let pool = Host::hugetlb_path(self.page_bytes).display().to_string();
                PopulateError::HugetlbShortage { zone, pool }
            }
            Some(libc::EHWPOISON) => PopulateError::HardwarePoison { zone, at },
            Some(libc::ENOMEM) => PopulateError::OutOfMemory { zone, at },
            _ => PopulateError::Failed { zone, at, source },
        }
    }
}

/// The part of `range` that consists of whole huge pages by host addresses.
pub fn aligned_inside(base: u64, range: &Range<u64>) -> Range<u64> {
    let start = (base + range.start).next_multiple_of(THP_BYTES) - base;
    let end = base + range.end;
    let end = (end - end % THP_BYTES).saturating_sub(base);
    start..end.max(start)
}

/// Repeats calls that were interrupted or met a transient shortage in the kernel.
fn retry(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    /// `EAGAIN` is transient; a kernel that keeps returning it is broken.
    const TRIES_MAX: u32 = 1000;
    for _ in 1..TRIES_MAX {
        match call() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            result => return result,
        }
    }
    call()
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::host::testing::is_mapped;
    use crate::mapping::MapRequest;

    const LEN_BYTES: u64 = 1 << 20;

    fn target<'a>(mapping: &'a Mapping, file: Option<&'a File>) -> PopulateTarget<'a> {
        PopulateTarget {
            zone: "z",
            mapping,
            file: file.map(|file| (file, 0)),
            page_bytes: PAGE_BYTES,
            hugetlb: false,
            collapse: false,
            thp: false,
            faults_spare_mmap_lock: false,
        }
    }

    fn map(file: Option<&File>) -> Mapping {
        Mapping::new(&MapRequest {
            len_bytes: LEN_BYTES,
            align_bytes: PAGE_BYTES,
            congruent_to: 0,
            file: file.map(|file| (file, 0)),
            shared: file.is_some(),
            reserve: false,
        })
        .unwrap()
    }

    #[test]
    fn both_methods_populate_and_change_nothing() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN_BYTES).unwrap();
        for file in [None, Some(&file)] {
            for method in [Method::Advise, Method::Touch] {
                let mapping = map(file);
                // SAFETY: inside the mapping, for as long as it lives.
                let byte = unsafe { mapping.start().add(0x5000) };
                // SAFETY: as above.
                unsafe { byte.write_volatile(0xa5) };
                assert!(!is_mapped(mapping.start()));
                target(&mapping, file).populate_by(method, 0..LEN_BYTES).unwrap();
                for page in 0..LEN_BYTES / PAGE_BYTES {
                    // SAFETY: inside the mapping; the address is not read.
                    let at = unsafe { mapping.start().add(to_usize(page * PAGE_BYTES)) };
                    assert!(is_mapped(at), "{method:?} page {page}");
                }
                // SAFETY: as above.
                assert_eq!(unsafe { byte.read_volatile() }, 0xa5);
            }
        }
    }

    #[test]
    fn a_file_that_lost_its_end_is_an_error_and_not_a_signal() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN_BYTES).unwrap();
        let mapping = map(Some(&file));
        file.set_len(PAGE_BYTES).unwrap();
        let error = target(&mapping, Some(&file)).populate(0..LEN_BYTES, false).unwrap_err();
        assert!(matches!(error, PopulateError::Failed { .. }), "{error}");
        assert!(error.to_string().contains("'z'"));
    }

    #[test]
    fn sparing_the_lock_populates_all_and_changes_nothing() {
        const LEN: u64 = 6 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN).unwrap();
        for number in 0..32_u8 {
            let is_set = |bit: u8| number & (1 << bit) != 0;
            let file = is_set(0).then_some(&file);
            let mapping = Mapping::new(&MapRequest {
                len_bytes: LEN,
                align_bytes: PAGE_BYTES,
                congruent_to: 0,
                file: file.map(|file| (file, 0)),
                shared: file.is_some(),
                reserve: false,
            })
            .unwrap();
            let target = PopulateTarget {
                thp: is_set(1),
                collapse: is_set(2),
                faults_spare_mmap_lock: is_set(3),
                ..target(&mapping, file)
            };
            // SAFETY: inside the mapping, for as long as it lives.
            let byte = unsafe { mapping.start().add(0x20_5000) };
            // SAFETY: as above.
            unsafe { byte.write_volatile(0xa5) };
            // From a page that is no beginning of a block, to another.
            let range = PAGE_BYTES..LEN - 3 * PAGE_BYTES;
            target.populate(range.clone(), is_set(4)).unwrap();
            for at in range.step_by(to_usize(PAGE_BYTES)) {
                // SAFETY: inside the mapping; the address is not read.
                let page = unsafe { mapping.start().add(to_usize(at)) };
                assert!(is_mapped(page), "{number:#b}, {at:#x}");
            }
            // SAFETY: as above.
            assert_eq!(unsafe { byte.read_volatile() }, 0xa5);
            // SAFETY: as above: the first page after the range.
            let behind = unsafe { mapping.start().add(to_usize(LEN - PAGE_BYTES)) };
            assert!(is_set(1) || is_set(2) || !is_mapped(behind), "{number:#b}");
        }
    }

    #[test]
    fn faults_populate_where_they_spare_the_lock() {
        let mapping = map(None);
        let touched = |spares, hugetlb, collapse, spare| {
            let target = PopulateTarget {
                faults_spare_mmap_lock: spares,
                hugetlb,
                collapse,
                ..target(&mapping, None)
            };
            target.touch(&(PAGE_BYTES..LEN_BYTES), spare)
        };
        assert_eq!(touched(true, false, false, true), LEN_BYTES);
        assert_eq!(touched(true, true, false, true), LEN_BYTES);
        assert_eq!(touched(true, true, false, false), PAGE_BYTES, "not asked for");
        assert_eq!(touched(true, false, true, true), PAGE_BYTES, "collapsed");
        assert_eq!(touched(false, true, false, true), PAGE_BYTES);
    }

    #[test]
    fn what_cannot_be_touched_is_an_error_and_not_a_signal() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN_BYTES).unwrap();
        let mapping = map(Some(&file));
        file.set_len(3 * PAGE_BYTES).unwrap();
        let target =
            PopulateTarget { faults_spare_mmap_lock: true, ..target(&mapping, Some(&file)) };
        let error = target.populate(0..LEN_BYTES, true).unwrap_err();
        assert!(matches!(error, PopulateError::Failed { at: 0x3000, .. }), "{error}");
    }

    #[test]
    fn errors_say_what_to_do() {
        let mapping = map(None);
        let explain = |hugetlb, errno| {
            let target =
                PopulateTarget { hugetlb, page_bytes: THP_BYTES, ..target(&mapping, None) };
            target.explain(0, io::Error::from_raw_os_error(errno)).to_string()
        };
        let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
        assert!(explain(true, libc::EFAULT).contains(pool));
        assert!(explain(true, libc::ENOMEM).contains(pool));
        assert!(explain(false, libc::ENOMEM).contains("out of memory"));
        assert!(explain(false, libc::EHWPOISON).contains("hardware memory error"));
    }

    #[test]
    fn blocks_are_aligned_by_host_address() {
        let huge = THP_BYTES;
        assert_eq!(aligned_inside(0, &(0..2 * huge)), 0..2 * huge);
        assert_eq!(aligned_inside(4096, &(0..3 * huge)), huge - 4096..3 * huge - 4096);
        assert!(aligned_inside(4096, &(0..huge)).is_empty());
        assert!(aligned_inside(10 * huge, &(4096..8192)).is_empty());
    }
}
