// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory as migration sees it: a trait with two mappings, and slices that only the kernel
//! and race-tolerant readers access.
//!
//! May contain `unsafe`: it turns the raw mappings promised by [`GuestMemoryMap`] into bounded
//! [`GuestSlice`]s, and reads guest words with atomics, because a guest writes at the same time.
//! It must never make a `&[u8]` or `&mut [u8]` of guest memory.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::layout::{Layout, PAGE_BYTES, PageRun, to_usize};

/// Guest RAM, as migration and snapshot use it; implemented for the memory crate's regions.
///
/// Page numbers count 4 KiB pages from the start of a region; `region` is an index into
/// [`layout`](Self::layout). All methods may be called from several threads.
///
/// # Safety
/// For every region, [`main`](Self::main) and (where they are `Some`) [`alias`](Self::alias) and
/// [`vcpus`](Self::vcpus) must point to at least `len_bytes` bytes that stay mapped readable and
/// writable for as long as the value lives, and the layout must never change.
pub unsafe trait GuestMemoryMap: Send + Sync + 'static {
    /// The layout of the regions.
    fn layout(&self) -> &Layout;

    /// Start of the mapping that guest and devices use, which userfaultfd watches.
    fn main(&self, region: usize) -> *mut u8;

    /// Start of the second mapping of the same pages, which is never watched; `None` for anonymous memory, and for
    /// memory that has none, as nothing arrives behind a guest.
    fn alias(&self, region: usize) -> Option<*mut u8>;

    /// Start of the mapping of the same pages that vCPUs use instead of [`main`](Self::main), if they have
    /// their own.
    fn vcpus(&self, region: usize) -> Option<*mut u8> {
        let _ = region;
        None
    }

    /// The file with a region's pages, for handing it over; `None` for private memory. Regions of the same
    /// name have the same file.
    fn file(&self, region: usize) -> Option<BorrowedFd<'_>> {
        let _ = region;
        None
    }

    /// Offset of a region in its file.
    fn file_offset(&self, region: usize) -> u64 {
        let _ = region;
        0
    }

    /// The populated pages among `pages`, as ascending runs. Must not populate any. Memory that cannot tell
    /// returns the whole range.
    ///
    /// # Errors
    /// What the host's query reports.
    fn populated_runs(&self, region: usize, pages: Range<u64>) -> io::Result<Vec<Range<u64>>>;

    /// Keeps `pages` from being discarded until the result is dropped, so that what
    /// [`populated_runs`](Self::populated_runs) finds can be read: reading a hole of shared memory populates
    /// it. Memory that is only read, or of which nothing is discarded, need not do anything.
    fn hold(&self, region: usize, pages: Range<u64>) -> Hold<'_> {
        let _ = (region, pages);
        Hold::default()
    }

    /// Notes that pages have been discarded or are known to be zero.
    fn mark_zero(&self, run: PageRun);

    /// Notes that contents of the pages have arrived.
    fn mark_resident(&self, run: PageRun);

    /// Notes that contents of the pages are still to arrive (postcopy).
    fn mark_absent(&self, run: PageRun);

    /// Populates pages in one call before contents arrive for the first time, at a fraction of the cost of a
    /// fault for each. May do nothing.
    ///
    /// # Errors
    /// When the host has no memory left.
    fn populate(&self, run: PageRun) -> io::Result<()> {
        let _ = run;
        Ok(())
    }

    /// Like [`populate`](Self::populate), for larger ranges long before they arrive, so that huge pages pay
    /// off.
    ///
    /// # Errors
    /// When the host has no memory left.
    fn prepare(&self, run: PageRun) -> io::Result<()> {
        self.populate(run)
    }

    /// Makes the host back all mappings of shared memory with small pages only, without collapsing any, or
    /// restores what it did before. Where postcopy may follow, single pages have to be missing, and a hole in
    /// a huge page that cannot be split is a page of zeros. Best effort; does nothing where host pages have
    /// another size.
    fn use_small_pages(&self, small: bool) {
        let _ = small;
    }

    /// Discards the pages; they are missing afterwards, and read as zeros. Whole host pages only.
    ///
    /// # Errors
    /// What the host reports, or that devices have the pages mapped.
    fn discard(&self, run: PageRun) -> io::Result<()>;

    /// True for shared memory all of whose pages were populated with zeros, for this machine, before it was mapped.
    /// Where contents arrive behind the guest, such pages are missing by not being mapped, and are received in
    /// place; so are those whose contents have arrived before and are outdated.
    fn is_ready(&self, region: usize) -> bool {
        let _ = region;
        false
    }

    /// The pages of a run that may hold anything but zeros, in order. Memory that cannot tell returns the whole run.
    fn data_runs(&self, run: PageRun) -> Vec<PageRun> {
        vec![run]
    }

    /// Makes the pages read as zeros: by [`discard`](Self::discard), or in place where devices have them
    /// mapped and where they are [ready](Self::is_ready). Whole host pages only.
    ///
    /// # Errors
    /// What the host reports.
    fn make_zero(&self, run: PageRun) -> io::Result<()> {
        self.discard(run)
    }
}

/// Keeps pages from being discarded until it is dropped.
#[derive(Default)]
pub struct Hold<'m>(Option<Box<dyn Send + 'm>>);

impl std::fmt::Debug for Hold<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Hold").field(&self.0.is_some()).finish()
    }
}

impl<'m> Hold<'m> {
    /// A hold that lasts until `held` is dropped.
    pub fn until_dropped(held: impl Send + 'm) -> Self {
        Self(Some(Box::new(held)))
    }
}

/// A slice of guest memory that the kernel reads from or writes to.
#[derive(Clone, Copy, Debug)]
pub struct GuestSlice<'m> {
    start: *mut u8,
    len_bytes: usize,
    memory: PhantomData<&'m ()>,
}

// SAFETY: the pointer is only handed to the kernel or read with atomics, and the memory that it
// points to is shared with the guest anyway; no thread has more right to it than another.
unsafe impl Send for GuestSlice<'_> {}

impl GuestSlice<'_> {
    /// First byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len_bytes
    }

    /// The slice without its first `len_bytes` bytes.
    pub(crate) fn skip(self, len_bytes: usize) -> Self {
        assert!(len_bytes <= self.len_bytes);
        // SAFETY: stays within the slice, or one past its end.
        let start = unsafe { self.start.add(len_bytes) };
        Self { start, len_bytes: self.len_bytes - len_bytes, memory: PhantomData }
    }

    /// Its first `len_bytes` bytes.
    pub(crate) fn first(self, len_bytes: usize) -> Self {
        assert!(len_bytes <= self.len_bytes);
        Self { len_bytes, ..self }
    }

    /// Copies bytes to the start of the slice.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len_bytes);
        // SAFETY: the slice is mapped writable for its length (contract of `GuestMemoryMap`) and
        // `bytes` is ordinary memory of this process, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, bytes.len()) };
    }

    /// Copies bytes from the start of the slice. The guest must be stopped, or the bytes may be torn.
    pub(crate) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.len_bytes);
        // SAFETY: the slice is mapped readable for its length (contract of `GuestMemoryMap`) and
        // `bytes` is ordinary memory of this process, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.start, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Appends the slice to `bytes`, word by word. The guest may write meanwhile; the page is then in the
    /// dirty log.
    #[expect(clippy::cast_ptr_alignment, reason = "slices begin at pages")]
    pub(crate) fn append_to(&self, bytes: &mut Vec<u8>) {
        bytes.reserve(self.len_bytes);
        for offset in (0..self.len_bytes).step_by(size_of::<u64>()) {
            // SAFETY: pages are aligned and whole, and so are the words that a slice is cut into, so an
            // aligned word lies inside the slice; atomic loads may race with any writer.
            let word = unsafe { &*self.start.add(offset).cast::<AtomicU64>() };
            bytes.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
    }

    #[expect(clippy::cast_ptr_alignment, reason = "slices begin at pages")]
    /// True when every byte is zero. If the guest writes meanwhile, the result may be either, and the page is
    /// in the dirty log.
    fn is_zero(&self) -> bool {
        const WORDS: usize = 8;
        let step = WORDS * size_of::<u64>();
        debug_assert!(self.len_bytes.is_multiple_of(step));
        let mut offset = 0;
        while offset < self.len_bytes {
            // SAFETY: pages are aligned to 4 KiB and whole, so eight aligned words lie inside the
            // slice; atomic loads may race with any writer.
            let words: &[AtomicU64; WORDS] =
                unsafe { &*self.start.add(offset).cast::<[AtomicU64; WORDS]>() };
            if words.iter().fold(0, |all, word| all | word.load(Ordering::Relaxed)) != 0 {
                return false;
            }
            offset += step;
        }
        true
    }
}

/// The mapping through which this crate reads and writes: the alias, or `main` without one, which then is not
/// watched.
///
/// # Panics
/// When the run does not lie in the memory's layout: runs come from checked constructors.
pub(crate) fn slice<M: GuestMemoryMap>(memory: &M, run: PageRun) -> GuestSlice<'_> {
    let base = memory.alias(run.region).unwrap_or_else(|| memory.main(run.region));
    slice_of(memory, base, run)
}

fn slice_of<M: GuestMemoryMap>(memory: &M, base: *mut u8, run: PageRun) -> GuestSlice<'_> {
    let info = &memory.layout().regions()[run.region];
    assert!(run.first.checked_add(run.count).is_some_and(|end| end <= info.pages()));
    // SAFETY: the run lies inside the region (asserted), which is mapped for `len_bytes` bytes
    // from `base` for as long as `memory` is borrowed (contract of `GuestMemoryMap`).
    let start = unsafe { base.add(to_usize(run.first * PAGE_BYTES)) };
    GuestSlice { start, len_bytes: to_usize(run.len_bytes()), memory: PhantomData }
}

/// True when the pages are all zeros. Reading populates holes: call this only for populated pages.
pub(crate) fn is_zero<M: GuestMemoryMap>(memory: &M, run: PageRun) -> bool {
    slice(memory, run).is_zero()
}

/// Which pages of a run are all zeros, in order. Holes of shared memory stay holes: only pages that the host
/// has in memory are read through a mapping, all others from their file.
pub(crate) fn zero_pages<M: GuestMemoryMap>(memory: &M, run: PageRun) -> Vec<bool> {
    let page = |first| PageRun { region: run.region, first, count: 1 };
    let Some(file) = memory.file(run.region) else {
        return (run.first..run.end()).map(|first| is_zero(memory, page(first))).collect();
    };
    let whole = slice(memory, run);
    let mut residence = vec![0_u8; to_usize(run.count)];
    // SAFETY: mincore reads page tables only, of a slice that is mapped, and writes one byte for each page of
    // it into `residence`, which has as many.
    let asked =
        unsafe { libc::mincore(whole.as_ptr().cast(), whole.len(), residence.as_mut_ptr()) };
    let is_hole = |first: u64| {
        let at = memory.file_offset(run.region) + first * PAGE_BYTES;
        reads_as_zero(file, at).unwrap_or(false)
    };
    let is_zero = |(first, residence): (u64, u8)| {
        asked == 0 && residence & 1 == 0 && is_hole(first) || is_zero(memory, page(first))
    };
    (run.first..).zip(residence).map(is_zero).collect()
}

/// True when a page of a file is all zeros. Reading the file does not populate a hole.
fn reads_as_zero(file: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    let mut page = [0_u8; 4096];
    let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
    // SAFETY: `page` has as many bytes as are asked for, and the descriptor is open.
    let read = unsafe { libc::pread(file.as_raw_fd(), page.as_mut_ptr().cast(), page.len(), at) };
    match usize::try_from(read) {
        Ok(len) => Ok(len == page.len() && page.iter().all(|byte| *byte == 0)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Zeroes pages before a guest runs on this memory: discards them where that is allowed, and clears pages in
/// place that devices have mapped.
pub(crate) fn clear<M: GuestMemoryMap>(memory: &M, run: PageRun) -> io::Result<()> {
    let info = &memory.layout().regions()[run.region];
    let host_page = info.host_page_bytes / PAGE_BYTES;
    let whole = run.first.is_multiple_of(host_page) && run.count.is_multiple_of(host_page);
    if whole {
        memory.make_zero(run)?;
    } else {
        const ZEROS: [u8; 4096] = [0; 4096];
        for page in run.first..run.end() {
            slice(memory, PageRun { region: run.region, first: page, count: 1 }).write(&ZEROS);
        }
    }
    memory.mark_zero(run);
    Ok(())
}

/// Populates pages by reading one byte of each host page, through the unwatched mapping.
pub(crate) fn touch<M: GuestMemoryMap>(memory: &M, run: PageRun) {
    let step = memory.layout().regions()[run.region].host_page_bytes;
    let slice = slice(memory, run);
    for offset in (0..run.len_bytes()).step_by(to_usize(step)) {
        // SAFETY: inside the slice, which is mapped readable; a volatile read may race.
        let _ = unsafe { slice.start.add(to_usize(offset)).read_volatile() };
    }
}
