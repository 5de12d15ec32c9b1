// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One mapping of guest memory into this process, and advice to the kernel about it.
//!
//! Owns an address range from `mmap` to `munmap`. Must never hand out a reference to what is
//! mapped: the guest writes it at any time.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use crate::reserved::ReservedRange;
use crate::to_usize;

/// Parameters of a mapping.
#[derive(Debug)]
pub struct MapRequest<'a> {
    pub len_bytes: u64,
    /// A power of two, at least the page size of the backing.
    pub align_bytes: u64,
    /// The address is made congruent to this, modulo `align_bytes`: for huge pages, guest address,
    /// host address and file offset must agree.
    pub congruent_to: u64,
    /// The file and the offset in it; `None` for anonymous memory.
    pub file: Option<(&'a File, u64)>,
    pub shared: bool,
    pub reserve: bool,
}

/// Advice for the kernel that does not change the contents of memory, unless stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Advice {
    HugePage = libc::MADV_HUGEPAGE,
    NoHugePage = libc::MADV_NOHUGEPAGE,
    Mergeable = libc::MADV_MERGEABLE,
    PopulateWrite = libc::MADV_POPULATE_WRITE,
    PopulateRead = libc::MADV_POPULATE_READ,
    Collapse = libc::MADV_COLLAPSE,
    /// Private memory reads as zero (anonymous) or as the file afterwards. Shared memory keeps its contents, and is
    /// mapped again by the next access.
    DontNeed = libc::MADV_DONTNEED,
}

/// Least inaccessible memory on either side of a mapping.
const GUARD_BYTES: usize = 4096;

/// A mapped range; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    len_bytes: u64,
    flags: i32,
    /// The reservation that contains the range.
    _reserved: ReservedRange,
}

// SAFETY: the mapping is an address range, not Rust data; it is only reached through raw pointers
// whose users answer for their accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps as requested, readable and writable, without populating.
    ///
    /// # Errors
    /// The error of `mmap`: `ENOMEM` when the reservation is refused (overcommit, hugetlb pool).
    pub fn new(request: &MapRequest<'_>) -> io::Result<Self> {
        let len = to_usize(request.len_bytes);
        let align = to_usize(request.align_bytes);
        // Room to align, and a page on either side that is never mapped: an access beyond guest
        // memory faults instead of reaching other data.
        let room = len
            .checked_add(align)
            .and_then(|room| room.checked_add(GUARD_BYTES))
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let reserved = ReservedRange::new(room)?;
        let wanted = to_usize(request.congruent_to % request.align_bytes);
        let lowest = reserved.start().addr() + GUARD_BYTES;
        let before = GUARD_BYTES + (wanted.wrapping_sub(lowest) & (align - 1));

        let sharing = if request.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let reserving = if request.reserve { 0 } else { libc::MAP_NORESERVE };
        let anonymous = if request.file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let flags = sharing | reserving | anonymous;
        let (fd, offset) = request.file.map_or((-1, 0), |(file, at)| (file.as_raw_fd(), at));
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: addresses, `align` and `wanted` are multiples of the page size, so `before` is at
        // most `align` and `before + len + GUARD_BYTES <= room`: MAP_FIXED replaces only what was
        // reserved just now.
        let mapped = unsafe {
            libc::mmap(
                reserved.start().byte_add(before),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                fd,
                offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let (start, len_bytes) = (mapped.cast(), request.len_bytes);
        Ok(Self { start, len_bytes, flags, _reserved: reserved })
    }

    pub const fn start(&self) -> *mut u8 {
        self.start
    }

    pub const fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The `mmap` flags of the mapping, without `MAP_FIXED`.
    pub const fn flags(&self) -> i32 {
        self.flags
    }

    /// The address of `range.start`, if `range` lies inside.
    fn at(&self, range: &Range<u64>) -> io::Result<*mut u8> {
        if range.start > range.end || range.end > self.len_bytes {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        // SAFETY: the offset was just checked to lie inside the mapping.
        Ok(unsafe { self.start.add(to_usize(range.start)) })
    }

    /// Advises the kernel about `range` (bytes from the start, page aligned).
    pub fn advise(&self, range: &Range<u64>, advice: Advice) -> io::Result<()> {
        let address = self.at(range)?;
        let len = to_usize(range.end - range.start);
        // SAFETY: the range is ours, and none of the advices unmaps it; what `DontNeed` does to
        // the contents is what its caller asks for.
        match unsafe { libc::madvise(address.cast(), len, advice as i32) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Which pages of `range` are resident in this mapping: a byte per 4 KiB, of which the lowest
    /// bit counts.
    pub fn mincore(&self, range: &Range<u64>, pages: &mut [u8]) -> io::Result<()> {
        let address = self.at(range)?;
        let len = to_usize(range.end - range.start);
        if pages.len() < len.div_ceil(4096) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        #[cfg(all(test, not(loom)))]
        tests::MINCORE_PAGES.set(tests::mincore_pages() + len.div_ceil(4096) as u64);
        // SAFETY: the range is ours and `pages` has room for its answer, as checked.
        match unsafe { libc::mincore(address.cast(), len, pages.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Binds the whole mapping (for shared memory: the pages of the file) to a NUMA node.
    pub fn bind_to_node(&self, node: u32) -> io::Result<()> {
        const MPOL_BIND: libc::c_int = 2;
        let mut mask = [0_u64; 16];
        let word = mask
            .get_mut(node as usize / 64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        *word = 1 << (node % 64);
        let mask_bits = u64::BITS as usize * mask.len();
        // SAFETY: the range is ours; `mask` is read for `mask_bits` bits (the kernel counts one
        // more than it reads) and outlives the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start,
                to_usize(self.len_bytes),
                MPOL_BIND,
                mask.as_ptr(),
                mask_bits,
                0,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(all(test, not(loom)))]
pub mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Pages that this thread has asked about.
        pub static MINCORE_PAGES: Cell<u64> = const { Cell::new(0) };
    }

    pub fn mincore_pages() -> u64 {
        MINCORE_PAGES.get()
    }

    fn maps() -> Vec<(usize, usize, String)> {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        let parse = |line: &str| {
            let (range, rest) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            (number(start), number(end), rest.to_owned())
        };
        text.lines().map(parse).collect()
    }

    #[test]
    fn mappings_are_aligned_and_guarded() {
        for (align_bytes, congruent_to) in [(4096, 0), (2 << 20, 0), (2 << 20, 5 << 12)] {
            let request = MapRequest {
                len_bytes: 3 << 20,
                align_bytes,
                congruent_to,
                file: None,
                shared: false,
                reserve: false,
            };
            let mapping = Mapping::new(&request).unwrap();
            let start = mapping.start().addr();
            assert_eq!(start as u64 % align_bytes, congruent_to % align_bytes);
            let maps = maps();
            let access = |address: usize| {
                let found = maps.iter().find(|(start, end, _)| (*start..*end).contains(&address));
                found.map(|(_, _, rest)| rest[..4].to_owned()).unwrap()
            };
            assert_eq!(access(start), "rw-p");
            assert_eq!(access(start + (3 << 20) - 1), "rw-p");
            assert_eq!(access(start - 1), "---p");
            assert_eq!(access(start + (3 << 20)), "---p");
        }
    }

    #[test]
    fn ranges_outside_are_refused() {
        let request = MapRequest {
            len_bytes: 8192,
            align_bytes: 4096,
            congruent_to: 0,
            file: None,
            shared: false,
            reserve: false,
        };
        let mapping = Mapping::new(&request).unwrap();
        assert!(mapping.advise(&(4096..8192), Advice::DontNeed).is_ok());
        assert!(mapping.advise(&(4096..12288), Advice::DontNeed).is_err());
        assert!(mapping.mincore(&(0..8192), &mut [0]).is_err());
        assert!(mapping.bind_to_node(u32::MAX).is_err());
    }
}
