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

/// Guest RAM, in the form that the memory crate's regions are adapted to.
///
/// Page numbers count 4 KiB pages from the start of a region; `region` is an index into
/// [`layout`](Self::layout). All methods may be called from several threads.
///
/// # Safety
/// For every region, [`main`](Self::main) and (where they are `Some`) [`alias`](Self::alias) and
/// [`vcpus`](Self::vcpus) must point to at least `len_bytes` bytes that stay mapped readable and
/// writable for as long as the value lives, and the layout must never change.
pub unsafe trait GuestMemoryMap: Send + Sync + 'static {
    /// The regions.
    fn layout(&self) -> &Layout;

    /// Start of the mapping that the guest and the devices use, the one that userfaultfd watches.
    fn main(&self, region: usize) -> *mut u8;

    /// Start of the second mapping of the same pages, never watched; `None` for anonymous memory.
    fn alias(&self, region: usize) -> Option<*mut u8>;

    /// Start of the mapping of the same pages that vCPUs use instead of [`main`](Self::main), where
    /// they have one.
    fn vcpus(&self, region: usize) -> Option<*mut u8> {
        let _ = region;
        None
    }

    /// The file that a region's pages belong to, for handing it over; `None` for private memory.
    /// Regions of the same name have the same file.
    fn file(&self, region: usize) -> Option<BorrowedFd<'_>> {
        let _ = region;
        None
    }

    /// Where in its file a region begins.
    fn file_offset(&self, region: usize) -> u64 {
        let _ = region;
        0
    }

    /// Which of `pages` have ever been populated, as ascending runs. Must not populate any.
    /// Memory that cannot tell answers with the whole range.
    ///
    /// # Errors
    /// What the host's query reports.
    fn populated_runs(&self, region: usize, pages: Range<u64>) -> io::Result<Vec<Range<u64>>>;

    /// Keeps `pages` from being returned to the host until the answer is dropped, so that what
    /// [`populated_runs`](Self::populated_runs) finds can be read: a hole of shared memory that is read is
    /// one no more. Memory that is only read, or of which nothing is returned, needs do nothing.
    fn hold(&self, region: usize, pages: Range<u64>) -> Hold<'_> {
        let _ = (region, pages);
        Hold::default()
    }

    /// The pages have been discarded or are known to be zeros.
    fn mark_zero(&self, run: PageRun);

    /// Contents of the pages have arrived.
    fn mark_resident(&self, run: PageRun);

    /// The pages' contents are still to arrive (postcopy).
    fn mark_absent(&self, run: PageRun);

    /// Contents of the pages are about to arrive for the first time: gets pages from the host in
    /// one go, which costs a fraction of a fault for each. May do nothing.
    ///
    /// # Errors
    /// When the host has no memory left.
    fn populate(&self, run: PageRun) -> io::Result<()> {
        let _ = run;
        Ok(())
    }

    /// The same for more at a time and long before, so that huge pages are worth their time.
    ///
    /// # Errors
    /// When the host has no memory left.
    fn prepare(&self, run: PageRun) -> io::Result<()> {
        self.populate(run)
    }

    /// From now on the host gives only small pages to all mappings of shared memory, and makes no
    /// huge ones of them, or it does again what it did before. Single pages of it have to be missing
    /// where postcopy may follow, and a hole in a huge page that cannot be split is a page of zeros.
    /// Best effort; does nothing where the host's pages have another size.
    fn use_small_pages(&self, small: bool) {
        let _ = small;
    }

    /// Returns the pages to the host; they are missing afterwards, and read as zeros. Whole host pages
    /// only.
    ///
    /// # Errors
    /// What the host reports, or that devices have the pages mapped.
    fn discard(&self, run: PageRun) -> io::Result<()>;

    /// Makes the pages read as zeros: by [`discard`](Self::discard), or, where devices have them mapped,
    /// in place. Whole host pages only.
    ///
    /// # Errors
    /// What the host reports.
    fn make_zero(&self, run: PageRun) -> io::Result<()> {
        self.discard(run)
    }
}

/// Pages are not returned to the host until this is dropped.
#[derive(Default)]
pub struct Hold<'m>(Option<Box<dyn Send + 'm>>);

impl std::fmt::Debug for Hold<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Hold").field(&self.0.is_some()).finish()
    }
}

impl<'m> Hold<'m> {
    /// The pages are held until `held` is dropped.
    pub fn until_dropped(held: impl Send + 'm) -> Self {
        Self(Some(Box::new(held)))
    }
}

/// A piece of guest memory for the kernel to read from or write into.
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

    /// Copies bytes from the start of the slice. The guest must not run, or the bytes mean nothing.
    pub(crate) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.len_bytes);
        // SAFETY: the slice is mapped readable for its length (contract of `GuestMemoryMap`) and
        // `bytes` is ordinary memory of this process, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.start, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies the slice to the end of `bytes`, word by word. The guest may write meanwhile; the
    /// dirty log has the page then.
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
    /// True when every byte is zero. The guest may write meanwhile; the answer is then true or
    /// false, and the dirty log has the page.
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

/// The mapping through which this crate reads and writes: the alias, or `main` without one.
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

/// True when the pages hold nothing but zeros. Reads them, which populates holes: ask only about
/// populated pages.
pub(crate) fn is_zero<M: GuestMemoryMap>(memory: &M, run: PageRun) -> bool {
    slice(memory, run).is_zero()
}

/// Which pages of a run hold nothing but zeros, in order. Holes of shared memory stay holes: only pages that
/// the host has in memory are read through a mapping, the others from their file.
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

/// Whether a page of a file is all zeros, found by reading it, which makes no page of a hole.
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

/// Makes pages read as zeros before a guest runs on this memory. They are discarded where that may be;
/// devices that have them mapped keep them.
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
