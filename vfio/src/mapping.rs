// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A part of a BAR, mapped into this process so that KVM can map it into the guest, and the IOMMU for other
//! functions.
//!
//! Owns the mapping, and where it lies. VFIO uses a huge page where the offset in the BAR and the address here
//! agree, KVM one where the guest's address and the one here do, in their bits below the size of the page. A
//! BAR is aligned to its length wherever the guest moves it, so an address here that agrees with the offset in
//! the BAR agrees with all of them: a BAR of 128 GiB takes 128 entries of a page table, not 33 million.
//!
//! Never reads or writes what is mapped: device memory is for the guest alone.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use memory::ReservedRange;

/// Sizes of the huge pages of x86-64, largest first.
const HUGE_PAGES_BYTES: [u64; 2] = [1 << 30, 2 << 20];
const PAGE_BYTES: u64 = 4096;

/// Modulus in bytes by which the address of a part of a BAR has to agree with its offset: the largest page
/// that fits, but no more than the BAR's own alignment in the guest.
fn modulus_bytes(bar_len_bytes: u64, len_bytes: u64) -> u64 {
    let fits = |page: &u64| *page <= len_bytes;
    let page_bytes = HUGE_PAGES_BYTES.into_iter().find(fits).unwrap_or(PAGE_BYTES);
    let natural = bar_len_bytes.checked_next_power_of_two().unwrap_or(page_bytes);
    page_bytes.min(natural).max(PAGE_BYTES)
}

/// Mapped device memory, which keeps the device's file open in the kernel.
#[derive(Debug)]
pub struct BarMapping {
    address: *mut libc::c_void,
    len: usize,
    /// The address range that contains the mapping; unmapped as a whole.
    _reserved: ReservedRange,
}

// SAFETY: the addresses are never dereferenced here, and the mapping belongs to the process, not to a
// thread.
unsafe impl Send for BarMapping {}
// SAFETY: as above; there is nothing to be shared but numbers.
unsafe impl Sync for BarMapping {}

impl BarMapping {
    /// Maps `range`, whole pages of a BAR of `bar_len_bytes`, shared, readable and writable. In `file` it begins
    /// at `offset`.
    ///
    /// # Errors
    /// The kernel refuses, or the numbers are out of range.
    pub fn new(
        file: BorrowedFd<'_>,
        offset: u64,
        bar_len_bytes: u64,
        range: &Range<u64>,
    ) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let len_bytes = range.end.checked_sub(range.start).ok_or_else(invalid)?;
        if len_bytes == 0
            || ![range.start, range.end].iter().all(|at| at.is_multiple_of(PAGE_BYTES))
        {
            return Err(invalid());
        }
        let len = usize::try_from(len_bytes).map_err(|_| invalid())?;
        let offset = libc::off_t::try_from(offset).map_err(|_| invalid())?;
        let modulus_bytes = modulus_bytes(bar_len_bytes, len_bytes);
        // Addresses are multiples of a page, so that much is enough to reach any of them.
        let slack = usize::try_from(modulus_bytes - PAGE_BYTES).map_err(|_| invalid())?;
        let reserved = ReservedRange::new(len.checked_add(slack).ok_or_else(invalid)?)?;
        let before = range.start.wrapping_sub(reserved.start().addr() as u64) & (modulus_bytes - 1);
        let before = usize::try_from(before).map_err(|_| invalid())?;
        // SAFETY: `before` is a multiple of the page size below `modulus_bytes`, so at most `slack`, and the
        // mapping replaces only a part of what was reserved just now.
        let address = unsafe {
            libc::mmap(
                reserved.start().byte_add(before),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                offset,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address, len, _reserved: reserved })
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn file() -> File {
        let file = vmm_sys_util::tempfile::TempFile::new().unwrap().into_file();
        file.set_len(8 * GIB).unwrap();
        file
    }

    #[test]
    fn the_largest_page_that_fits_decides() {
        for (bar, len, modulus) in [
            (128 * GIB, 128 * GIB, GIB),
            (4 * GIB, GIB, GIB),
            (4 * GIB, GIB - 4096, 2 * MIB),
            (16 * MIB, 16 * MIB, 2 * MIB),
            (16 * MIB, MIB, 4096),
            (MIB, MIB, 4096),
            // No power of two, as mediated devices may have them.
            (3 * MIB, 3 * MIB, 2 * MIB),
            (u64::MAX, 4 * GIB, GIB),
        ] {
            assert_eq!(modulus_bytes(bar, len), modulus, "{len:#x} bytes of {bar:#x}");
        }
    }

    #[test]
    fn addresses_agree_with_offsets_in_the_bar() {
        let file = file();
        for (bar, range) in [
            (4 * GIB, 0..4 * GIB),
            (4 * GIB, 0x4000..4 * GIB),
            (16 * MIB, 0x3000..16 * MIB),
            (16 * MIB, 5 * MIB..9 * MIB),
            (0x4000, 0x1000..0x4000),
        ] {
            let len = range.end - range.start;
            let mapping = BarMapping::new(file.as_fd(), range.start, bar, &range).unwrap();
            let disagreement = mapping.host_addr() ^ range.start;
            assert_eq!(disagreement & (modulus_bytes(bar, len) - 1), 0, "{range:x?} of {bar:#x}");
            assert_eq!(mapping.len_bytes(), len);
        }
    }

    #[test]
    fn the_whole_range_is_mapped_and_unmapped_in_the_end() {
        let file = file();
        let shown = |address: u64| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let line = maps.lines().find(|line| {
                let range = line.split(' ').next().and_then(|range| range.split_once('-')).unwrap();
                let number = |text| u64::from_str_radix(text, 16).unwrap();
                (number(range.0)..number(range.1)).contains(&address)
            });
            line.map(|line| line.split(' ').nth(1).unwrap().to_owned())
        };
        let mapping = BarMapping::new(file.as_fd(), 0, 4 * GIB, &(0..4 * GIB)).unwrap();
        let (first, last) = (mapping.host_addr(), mapping.host_addr() + 4 * GIB - 1);
        assert_eq!([shown(first), shown(last)], [Some("rw-s".to_owned()), Some("rw-s".to_owned())]);
        drop(mapping);
        // Another thread may have taken the addresses since, but for another purpose.
        assert_ne!(shown(first), Some("rw-s".to_owned()));
    }

    #[test]
    fn ranges_that_are_no_pages_are_refused() {
        let file = file();
        #[expect(clippy::reversed_empty_ranges, reason = "it is to be refused")]
        for range in [0..0, 0x2000..0x1000, 1..0x1000, 0..0x1001] {
            assert!(BarMapping::new(file.as_fd(), 0, 0x4000, &range).is_err(), "{range:x?}");
        }
    }
}
