// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Detection of populated guest memory without populating the rest.
//!
//! Owns the three ways to ask the kernel: holes of a file, page tables of this process, and for hugetlb
//! the tables of our mappings and what the file reads as. Must never answer "no data" when in doubt, and must never
//! touch guest memory: reading a hole of shared memory would fill it.
//!
//! All offsets are bytes; runs are sorted, not adjacent, and multiples of 4 KiB pages.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::zero::is_zero;
use crate::{PAGE_BYTES, to_usize};

/// Appends `run` to `runs`, and merges it with the last one if they touch.
pub fn push_run(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        Some(last) if last.end >= run.start => last.end = last.end.max(run.end),
        _ => runs.push(run),
    }
}

/// The parts of `range` of `file` that are not holes, as offsets in the file.
///
/// Exact for memfds (swapped pages count as data, pages that were only reserved as holes); a file system may
/// report a hole as data, but never the reverse.
pub fn file_data_runs(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut runs = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let Some(data) = seek(file, at, libc::SEEK_DATA)? else { break };
        if data >= range.end {
            break;
        }
        // There is always a hole at the end of the file.
        let hole = seek(file, data, libc::SEEK_HOLE)?.unwrap_or(range.end);
        let start = data - data % PAGE_BYTES;
        let end = hole.next_multiple_of(PAGE_BYTES).min(range.end);
        push_run(&mut runs, start.max(range.start)..end);
        at = end.max(at + PAGE_BYTES);
    }
    Ok(runs)
}

/// Most pages per `mincore` call: 64 MiB, one byte each.
const RESIDENCE_PAGES: usize = 16384;

/// Pages of the first call: the cost of a call equals about that of this many pages.
const RESIDENCE_PAGES_FIRST: usize = 32;

/// The same as [`file_data_runs`] for a file in memory whose `range` is mapped at `hva`.
///
/// `SEEK_HOLE` walks page by page to the end of the data, so that querying a full memfd piece by piece takes
/// quadratic time. Here `mincore` tells which pages are in the page cache, in one call for many. It examines
/// each page, present or not, so it is called only where the file has data, found with `SEEK_DATA`, which
/// skips holes of any size at once; and for more pages at a time the longer the data continues. Pages that
/// are not in the cache may still be swapped out, which the file reports.
///
/// # Safety
///
/// `range`, which is whole pages, must be mapped from `hva` on.
pub unsafe fn mapped_data_runs(
    file: &File,
    range: Range<u64>,
    hva: u64,
) -> io::Result<Vec<Range<u64>>> {
    let mut runs = Vec::new();
    let mut residence = vec![0_u8; RESIDENCE_PAGES];
    let mut window = RESIDENCE_PAGES_FIRST;
    let Some(mut at) = next_data(file, range.start, &range)? else { return Ok(runs) };
    while at < range.end {
        let pages = (range.end - at).div_ceil(PAGE_BYTES).min(window as u64);
        let first = std::ptr::with_exposed_provenance_mut::<libc::c_void>(to_usize(
            hva + (at - range.start),
        ));
        // SAFETY: mincore reads no memory of ours but the page tables of a range that the caller
        // promises to be mapped, and writes one byte a page into `residence`, which has as many.
        let asked =
            unsafe { libc::mincore(first, to_usize(pages * PAGE_BYTES), residence.as_mut_ptr()) };
        if asked != 0 {
            return data_runs_by_page(file, range);
        }
        let end = at + pages * PAGE_BYTES;
        let mut page_at = at;
        while page_at < end {
            let index = to_usize((page_at - at) / PAGE_BYTES);
            if residence[index] & 1 == 0 {
                match next_data(file, page_at, &range)? {
                    None => return Ok(runs),
                    Some(data) if data > page_at => {
                        page_at = data;
                        continue;
                    }
                    // Swapped out.
                    Some(_) => {}
                }
            }
            push_run(&mut runs, page_at..(page_at + PAGE_BYTES).min(range.end));
            page_at += PAGE_BYTES;
        }
        let goes_on = page_at == end;
        window = if goes_on { (window * 4).min(RESIDENCE_PAGES) } else { RESIDENCE_PAGES_FIRST };
        at = page_at;
    }
    Ok(runs)
}

/// The same as [`file_data_runs`] in time that grows with `range` alone, at one call for each page with data.
///
/// For a file of which [`mincore_tells`] nothing: `SEEK_HOLE` would walk to the end of the data with each query.
pub fn data_runs_by_page(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut runs = Vec::new();
    let mut at = range.start;
    while let Some(data) = next_data(file, at, &range)? {
        at = (data + PAGE_BYTES).min(range.end);
        push_run(&mut runs, data..at);
    }
    Ok(runs)
}

/// Whether `mincore` tells this process which pages of a mapped file are in memory. To a user that neither owns
/// the file nor may write to it, the kernel says that all are: so it does of memory that a pool of another user
/// has given. False if in doubt: root may be told all by a capability, but not each of its threads has that.
pub fn mincore_tells(file: &File) -> bool {
    // SAFETY: takes nothing and cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    file.metadata().is_ok_and(|file| tells_of((file.uid(), file.gid(), file.mode()), user, group))
}

fn tells_of((owner, owning_group, mode): (u32, u32, u32), user: u32, group: u32) -> bool {
    // Other groups of the process are not looked up: they count as the file's, and as not.
    let writers = if group == owning_group { 0o020 } else { 0o022 };
    user == owner || mode & writers == writers
}

/// The first page at or after `at` that has data; `None` if there is none in `range`.
fn next_data(file: &File, at: u64, range: &Range<u64>) -> io::Result<Option<u64>> {
    let data = seek(file, at, libc::SEEK_DATA)?.filter(|data| *data < range.end);
    Ok(data.map(|data| (data - data % PAGE_BYTES).max(at)))
}

/// Calls `lseek`; `None` where neither data nor hole of that kind follows. The file position changes, but is
/// not used: all accesses are by mapping or offset.
fn seek(file: &File, at: u64, whence: i32) -> io::Result<Option<u64>> {
    let offset = libc::off_t::try_from(at).map_err(io::Error::other)?;
    // SAFETY: takes and returns numbers; the descriptor is open for as long as `file` lives.
    let found = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    if let Ok(found) = u64::try_from(found) {
        return Ok(Some(found));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        error => Err(error),
    }
}

/// The kernel's argument of `PAGEMAP_SCAN`.
#[repr(C)]
#[derive(Default)]
struct ScanRequest {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Category of pages of a file, which a private mapping of it shows until it has its own.
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// Category of pages that were only read: the shared zero page.
pub const PAGE_IS_ZERO_PAGE: u64 = 1 << 5;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;

/// Present or swapped pages of `range` in this process, except those of a category in `but_not`; `range` and
/// the result are offsets from `base`.
///
/// # Errors
/// When the kernel has no `PAGEMAP_SCAN` (before 6.7), or refuses.
pub fn scan_pagemap(
    pagemap: &File,
    base: *const u8,
    range: Range<u64>,
    but_not: u64,
) -> io::Result<Vec<Range<u64>>> {
    const REGIONS_PER_CALL: usize = 512;
    let base = base.addr() as u64;
    let end = base + range.end;
    let mut found = [ScanRegion::default(); REGIONS_PER_CALL];
    let mut runs = Vec::new();
    let mut at = base + range.start;
    while at < end {
        let mut request = ScanRequest {
            size: size_of::<ScanRequest>() as u64,
            start: at,
            end,
            vec: found.as_mut_ptr().addr() as u64,
            vec_len: REGIONS_PER_CALL as u64,
            category_inverted: but_not,
            category_mask: but_not,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            ..ScanRequest::default()
        };
        // SAFETY: both structures have the kernel's layout and outlive the call; `vec_len` is the
        // number of regions that `found` has room for.
        let count = unsafe {
            libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(&mut request))
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        };
        for region in found.iter().take(count) {
            push_run(&mut runs, region.start - base..region.end - base);
        }
        if request.walk_end <= at {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        at = request.walk_end;
    }
    Ok(runs)
}

/// The parts of private memory that have a page of their own, present or swapped.
///
/// Pages that were only read map the shared zero page: they do not count as data where the kernel can tell,
/// and otherwise do.
pub fn private_runs(
    pagemap: &File,
    mapping: &Mapping,
    range: Range<u64>,
) -> io::Result<Vec<Range<u64>>> {
    match scan_pagemap(pagemap, mapping.start(), range.clone(), PAGE_IS_ZERO_PAGE) {
        Ok(runs) => Ok(runs),
        Err(_) => read_pagemap(pagemap, mapping.start(), range),
    }
}

/// The pages of a private mapping of a file that are copies, and not the file's.
///
/// # Errors
/// When the kernel has no `PAGEMAP_SCAN` (before 6.7), or refuses.
pub fn copied_runs(
    pagemap: &File,
    mapping: &Mapping,
    range: Range<u64>,
) -> io::Result<Vec<Range<u64>>> {
    scan_pagemap(pagemap, mapping.start(), range, PAGE_IS_ZERO_PAGE | PAGE_IS_FILE)
}

/// The same on kernels without the scan: eight bytes are read per page.
fn read_pagemap(pagemap: &File, base: *const u8, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
    let mut buffer = vec![0; 64 << 10];
    let mut runs = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let pages = ((range.end - at) / PAGE_BYTES).min(buffer.len() as u64 / 8);
        let entries = &mut buffer[..to_usize(pages * 8)];
        pagemap.read_exact_at(entries, (base.addr() as u64 + at) / PAGE_BYTES * 8)?;
        for entry in entries.as_chunks::<8>().0 {
            if u64::from_ne_bytes(*entry) & PRESENT_OR_SWAPPED != 0 {
                push_run(&mut runs, at..at + PAGE_BYTES);
            }
            at += PAGE_BYTES;
        }
    }
    Ok(runs)
}

/// A mapping of a hugetlb file and the file offset at which it begins.
#[derive(Debug)]
pub struct HugetlbMapping {
    pub mapping: Arc<Mapping>,
    pub file_offset: u64,
}

/// The populated parts of `range` of a hugetlb file.
///
/// hugetlbfs cannot list its holes, and a page shows only in the page tables of a process that touched it. So
/// the mappings of this process are examined first, and what none of them shows is read from the file, which
/// does not populate a hole: zeros are no data. For the whole file this is skipped if the file has no more
/// pages than the mappings show. The time grows with `range` alone: of a page that extends beyond it, only
/// the part inside is examined and read.
pub fn hugetlb_runs(
    file: &File,
    file_bytes: u64,
    page_bytes: u64,
    mappings: &[HugetlbMapping],
    range: Range<u64>,
) -> io::Result<Vec<Range<u64>>> {
    let allocated_bytes = file.metadata()?.blocks().saturating_mul(512);
    if allocated_bytes == 0 || range.is_empty() {
        return Ok(Vec::new());
    }
    let pages = range.start / page_bytes..range.end.div_ceil(page_bytes);
    let mut seen = vec![false; to_usize(pages.end - pages.start)];
    for mapped in mappings {
        mark_present(mapped, page_bytes, &range, &mut seen)?;
    }
    let seen_pages = seen.iter().filter(|seen| **seen).count() as u64;
    let is_whole = range == (0..file_bytes);
    let none_hidden = is_whole && seen_pages * page_bytes >= allocated_bytes;
    let mut runs = Vec::new();
    let mut buffer = Vec::new();
    for (page, seen) in pages.zip(seen) {
        let start = page * page_bytes;
        let part = start.max(range.start)..(start + page_bytes).min(range.end);
        if seen || !none_hidden && !reads_as_zero(file, &part, &mut buffer)? {
            push_run(&mut runs, part);
        }
    }
    Ok(runs)
}

/// True when `range` of a file is all zeros, by reading it. `buffer` is reused between calls.
fn reads_as_zero(file: &File, range: &Range<u64>, buffer: &mut Vec<u8>) -> io::Result<bool> {
    /// Fits a processor's cache.
    const STEP_BYTES: u64 = 128 << 10;
    buffer.resize(to_usize(STEP_BYTES), 0);
    let mut at = range.start;
    while at < range.end {
        let piece = &mut buffer[..to_usize(STEP_BYTES.min(range.end - at))];
        file.read_exact_at(piece, at)?;
        if !is_zero(piece) {
            return Ok(false);
        }
        at += piece.len() as u64;
    }
    Ok(true)
}

/// Notes which of the huge pages that `range` of the file overlaps a mapping shows.
fn mark_present(
    mapped: &HugetlbMapping,
    page_bytes: u64,
    range: &Range<u64>,
    seen: &mut [bool],
) -> io::Result<()> {
    /// Divided by 4 KiB the result length of one call.
    const STEP_BYTES: u64 = 256 << 20;
    let (start, first) = (mapped.file_offset, range.start / page_bytes);
    let mut at = range.start.max(start);
    let end = range.end.min(start + mapped.mapping.len_bytes());
    let mut answer = vec![0; to_usize(STEP_BYTES.min(end.saturating_sub(at)).div_ceil(PAGE_BYTES))];
    while at < end {
        let step_end = end.min(at + STEP_BYTES);
        mapped.mapping.mincore(&(at - start..step_end - start), &mut answer)?;
        // All base pages of a huge page agree, so one of each is enough.
        let mut probe = at;
        while probe < step_end {
            let present =
                answer.get(to_usize((probe - at) / PAGE_BYTES)).is_some_and(|b| b & 1 == 1);
            let page = probe / page_bytes;
            if let Some(seen) = seen.get_mut(to_usize(page - first)) {
                *seen |= present;
            }
            probe = (page + 1) * page_bytes;
        }
        at = step_end;
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::mapping::MapRequest;
    use crate::mapping::tests::mincore_pages;

    #[test]
    fn holes_are_rounded_to_pages() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(file_data_runs(&file, 0..1 << 20).unwrap(), []);
        file.write_all_at(&[1], 0x2_0001).unwrap();
        file.write_all_at(&[1], 0x3_0001).unwrap();
        let runs = file_data_runs(&file, 0..1 << 20).unwrap();
        for (offset, data) in [(0x2_0000, true), (0x3_0fff, true), (0, false), (0x8_0000, false)] {
            assert_eq!(runs.iter().any(|run| run.contains(&offset)), data, "{offset:#x}");
        }
        assert_eq!(file_data_runs(&file, 0x8_0000..0x9_0000).unwrap(), []);
    }

    #[test]
    fn a_file_of_another_user_is_looked_at_page_by_page() {
        let file = crate::backing::memfd("runs", 0).unwrap();
        file.set_len(1 << 20).unwrap();
        for page in [0, 1, 2, 100, 102, 255] {
            file.write_all_at(&[1], page * PAGE_BYTES).unwrap();
        }
        for range in [0..1 << 20, 0x1000..0x3000, 0x64000..0x67000, 0xff000..1 << 20, 0..0] {
            let runs = file_data_runs(&file, range.clone()).unwrap();
            assert_eq!(data_runs_by_page(&file, range).unwrap(), runs);
        }
        assert!(mincore_tells(&file));
        let of_user = (1000, 1000, 0o600);
        assert!(tells_of(of_user, 1000, 5) && !tells_of(of_user, 7, 7));
        assert!(!tells_of(of_user, 0, 0), "a thread of root without capabilities is told nothing");
        assert!(tells_of((1000, 1000, 0o620), 7, 1000) && !tells_of((1000, 1000, 0o620), 7, 7));
        assert!(tells_of((1000, 1000, 0o622), 7, 7));
    }

    #[test]
    fn the_mapped_way_agrees_with_the_file() {
        let len_bytes = 256 << 20;
        let file = crate::backing::memfd("runs", 0).unwrap();
        file.set_len(len_bytes).unwrap();
        let dense = (1000..1200).chain((5000..9000).step_by(2));
        for page in [0, 1, 2, 700, 16383, 16384, 16385, 40000, 65535].into_iter().chain(dense) {
            file.write_all_at(&[1], page * PAGE_BYTES).unwrap();
        }
        let mapping = Mapping::new(&MapRequest {
            len_bytes,
            align_bytes: PAGE_BYTES,
            congruent_to: 0,
            file: Some((&file, 0)),
            shared: true,
            reserve: false,
        })
        .unwrap();
        let hva = mapping.start().expose_provenance() as u64;
        for range in [0..len_bytes, 0x1000..0x2c_0000, 700 * 4096..701 * 4096, 3 * 4096..0x20_0000]
        {
            // SAFETY: the range lies in the mapping, whose first byte is the file's.
            let mapped = unsafe { mapped_data_runs(&file, range.clone(), hva + range.start) };
            assert_eq!(mapped.unwrap(), file_data_runs(&file, range).unwrap());
        }
    }

    /// The pages for postcopy are listed while the guest is stopped, and most memory of a large guest may
    /// never have been touched.
    #[test]
    fn what_was_never_touched_costs_no_time() {
        let len_bytes = 4 << 40;
        let file = crate::backing::memfd("runs", 0).unwrap();
        file.set_len(len_bytes).unwrap();
        let request = MapRequest {
            len_bytes,
            align_bytes: PAGE_BYTES,
            congruent_to: 0,
            file: Some((&file, 0)),
            shared: true,
            reserve: false,
        };
        let Ok(mapping) = Mapping::new(&request) else {
            test_skip::skip!("this host maps no sparse 4 TiB");
            return;
        };
        let pages = [5, 1 << 20, (1 << 30) - 1];
        for page in pages {
            file.write_all_at(&[1], page * PAGE_BYTES).unwrap();
        }
        let hva = mapping.start().expose_provenance() as u64;
        let mut found = Vec::new();
        let began = std::time::Instant::now();
        // In steps, as a migration does.
        for start in (0..len_bytes).step_by(256 << 20) {
            let range = start..start + (256 << 20);
            // SAFETY: the range lies in the mapping, whose first byte is the file's.
            found.extend(unsafe { mapped_data_runs(&file, range, hva + start) }.unwrap());
        }
        let expected: Vec<_> =
            pages.map(|page| page * PAGE_BYTES..(page + 1) * PAGE_BYTES).into_iter().collect();
        assert_eq!(found, expected);
        // Examining each page would take more than ten seconds on any host.
        assert!(began.elapsed() < std::time::Duration::from_secs(4), "{:?}", began.elapsed());
    }

    /// Bytes that this thread has read from files.
    fn bytes_read() -> Option<u64> {
        let text = std::fs::read_to_string("/proc/thread-self/io").ok()?;
        text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok())
    }

    /// A migration asks for a slice of at most 4 MiB at a time, which may be a small part of a huge page.
    #[test]
    fn a_part_of_a_huge_page_costs_no_look_at_the_rest() {
        const PAGE: u64 = 256 << 20;
        const SLICE: u64 = 4 << 20;
        let len_bytes = 2 * PAGE;
        // A memfd of small pages answers as hugetlb does, but that the pages of a huge one may differ.
        let file = crate::backing::memfd("huge", 0).unwrap();
        file.set_len(len_bytes).unwrap();
        file.write_all_at(&[1], PAGE + SLICE).unwrap();
        let request = MapRequest {
            len_bytes: PAGE,
            align_bytes: PAGE_BYTES,
            congruent_to: 0,
            file: Some((&file, PAGE)),
            shared: true,
            reserve: false,
        };
        let mapping = Arc::new(Mapping::new(&request).unwrap());
        let mappings = [HugetlbMapping { mapping: Arc::clone(&mapping), file_offset: PAGE }];
        let asked = mincore_pages();
        let ask = |range: Range<u64>| {
            let before = bytes_read();
            let runs = hugetlb_runs(&file, len_bytes, PAGE, &mappings, range).unwrap();
            (runs, bytes_read().zip(before).map(|(after, before)| after - before))
        };
        // Shown by the mapping.
        let slice = PAGE + SLICE..PAGE + 2 * SLICE;
        let (runs, read) = ask(slice.clone());
        assert_eq!(runs, [slice]);
        assert!(read.is_none_or(|read| read < SLICE / 2), "{read:?}");
        assert_eq!(mincore_pages() - asked, SLICE / PAGE_BYTES);
        // Shown by none, and not asked either.
        let (runs, read) = ask(PAGE - SLICE..PAGE);
        assert_eq!(runs, []);
        assert!(read.is_none_or(|read| (SLICE..2 * SLICE).contains(&read)), "{read:?}");
        assert_eq!(mincore_pages() - asked, SLICE / PAGE_BYTES);
        // Across two pages and the start of the mapping.
        let (runs, _) = ask(PAGE - SLICE..PAGE + 2 * SLICE);
        assert!(runs.iter().eq([&(PAGE..PAGE + 2 * SLICE)]), "{runs:x?}");
    }

    #[test]
    fn scan_and_pagemap_agree_on_private_memory() {
        let len_bytes = 1 << 20;
        let mapping = Mapping::new(&MapRequest {
            len_bytes,
            align_bytes: PAGE_BYTES,
            congruent_to: 0,
            file: None,
            shared: false,
            reserve: false,
        })
        .unwrap();
        let write = |page: usize| {
            // SAFETY: inside the mapping, which is writable.
            unsafe { mapping.start().add(page * 4096).write_volatile(1) }
        };
        [3, 4, 5, 200].into_iter().for_each(write);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let expected = vec![0x3000..0x6000, 200 * 4096..201 * 4096];
        let read = read_pagemap(&pagemap, mapping.start(), 0..len_bytes).unwrap();
        assert_eq!(read, expected);
        assert_eq!(private_runs(&pagemap, &mapping, 0..len_bytes).unwrap(), expected);
        let part = private_runs(&pagemap, &mapping, 0x4000..0x5000).unwrap();
        assert_eq!(part, vec![0x4000..0x5000]);
    }

    #[test]
    fn runs_that_touch_are_joined() {
        let mut runs = Vec::new();
        for run in [0..1, 1..2, 4..6, 5..7, 9..10] {
            push_run(&mut runs, run);
        }
        assert_eq!(runs, vec![0..2, 4..7, 9..10]);
    }
}
