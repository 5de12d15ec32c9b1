// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory from memfds with three mappings (or anonymous with one), and a dirty log over it.
//!
//! May contain `unsafe`: mappings. Owns its mappings until it is dropped.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use page_bitmap::PageBitmap;
use parking_lot::Mutex;

use super::leaving::Leaving;
use super::machine::Calls;
use crate::fault::VcpuBarrier;
use crate::layout::{Backing, Layout, PAGE_BYTES, PageRun, RegionInfo, to_usize};
use crate::ram::{GuestMemoryMap, Hold};
use crate::uffd::{OwnFaults, UffdError};
use crate::vm::{DirtyLog, VmError};

/// Why fake memory could not be created.
pub type FakeMemoryError = Box<dyn std::error::Error + Send + Sync>;

struct Region {
    file: Option<File>,
    main: *mut u8,
    alias: Option<*mut u8>,
    vcpus: Option<*mut u8>,
    len: usize,
    dirty: Vec<AtomicU64>,
    /// Pages that may hold anything but zeros, as far as a destination was told.
    data: PageBitmap,
}

/// Fake guest RAM for tests.
pub struct FakeMemory {
    layout: Layout,
    regions: Vec<Region>,
    /// A busy log over it has nothing to record.
    calm: AtomicBool,
    /// Number of calls that discarded pages, and of the pages discarded.
    discards: (AtomicU64, AtomicU64),
    /// Number of queries of what is populated.
    looks: AtomicU64,
    /// One more than a page that stays when it is discarded; 0 for none.
    kept: AtomicU64,
    /// Devices have it mapped, so that its pages stay.
    pinned: AtomicBool,
    /// Small pages were requested.
    small: AtomicBool,
    /// All of it was populated before anything arrived.
    ready: AtomicBool,
    /// Discards of the guest during scans.
    leaving: Leaving,
    /// The fault source that refuses vCPUs, if any.
    refusing: OnceLock<Weak<OwnFaults<FakeMemory>>>,
}

/// A barrier that does nothing: only the watch refuses fake vCPUs.
struct NoBarrier;

impl VcpuBarrier for NoBarrier {
    fn unblock(&self, _: PageRun) {}

    fn open(&self) {}

    fn remove(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

// SAFETY: the raw pointers are mappings that live as long as the value; what they show is shared
// with threads that write at any time anyway, through atomics or the kernel.
unsafe impl Send for FakeMemory {}
// SAFETY: as above.
unsafe impl Sync for FakeMemory {}

impl std::fmt::Debug for FakeMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeMemory").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl FakeMemory {
    /// Creates regions as (gpa, pages of 4 KiB), all with the same backing.
    ///
    /// # Errors
    /// When the host has no memory or no hugetlb pages for it.
    pub fn new(
        regions: &[(u64, u64)],
        backing: Backing,
        host_page_bytes: u64,
    ) -> Result<Arc<Self>, FakeMemoryError> {
        let layout = layout(regions, backing, host_page_bytes)?;
        let regions = layout.regions().iter().map(Region::new).collect::<io::Result<_>>()?;
        Ok(Arc::new(Self::with(layout, regions)))
    }

    /// Populates all of it, which is then ready for what arrives.
    ///
    /// # Errors
    /// When the host has no memory for it.
    pub fn make_ready(&self) -> io::Result<()> {
        for (region, info) in self.layout.regions().iter().enumerate() {
            self.populate(PageRun { region, first: 0, count: info.pages() })?;
        }
        self.ready.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// It is not ready any more, as a page that could not be written was replaced.
    pub fn make_unready(&self) {
        self.ready.store(false, Ordering::SeqCst);
    }

    /// Asserts that nothing of it was discarded, and that it is populated.
    ///
    /// # Panics
    /// When it is not so.
    pub fn assert_ready(&self) {
        assert_eq!(self.discards(), (0, 0), "pages that were there were discarded");
        for (region, info) in self.layout.regions().iter().enumerate() {
            let populated = self.populated_bytes(region).expect("the host tells");
            assert_eq!(populated, info.len_bytes, "of region {region}");
        }
    }

    /// True when a page is mapped where the guest accesses it (`vcpus`: where vCPUs do).
    ///
    /// # Errors
    /// When the host does not tell.
    pub fn is_mapped(&self, region: usize, page: u64, vcpus: bool) -> io::Result<bool> {
        let mapping = if vcpus { self.vcpus(region) } else { Some(self.main(region)) };
        let start = mapping.ok_or(io::ErrorKind::Unsupported)?.addr() as u64;
        let mut entry = [0; 8];
        let pagemap = File::open("/proc/self/pagemap")?;
        pagemap.read_exact_at(&mut entry, (start / PAGE_BYTES + page) * 8)?;
        Ok(u64::from_ne_bytes(entry) >> 63 == 1)
    }

    fn with(layout: Layout, regions: Vec<Region>) -> Self {
        Self {
            layout,
            regions,
            calm: AtomicBool::new(false),
            discards: (AtomicU64::new(0), AtomicU64::new(0)),
            looks: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            pinned: AtomicBool::new(false),
            small: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            leaving: Leaving::default(),
            refusing: OnceLock::new(),
        }
    }

    /// Shared memory that claims to have large host pages, for tests in which no kernel call depends on
    /// them.
    ///
    /// # Errors
    /// When the host has no memory for it.
    pub fn pretending(
        regions: &[(u64, u64)],
        host_page_bytes: u64,
    ) -> Result<Arc<Self>, FakeMemoryError> {
        let pretended = layout(regions, Backing::Shared, host_page_bytes)?;
        let real = layout(regions, Backing::Shared, PAGE_BYTES)?;
        let regions = real.regions().iter().map(Region::new).collect::<io::Result<_>>()?;
        Ok(Arc::new(Self::with(pretended, regions)))
    }

    /// Another mapping of the same memory, from the files of its regions, in order.
    ///
    /// # Errors
    /// When the host cannot map them.
    pub fn over(layout: &Layout, files: Vec<File>) -> Result<Arc<Self>, FakeMemoryError> {
        if files.len() != layout.regions().len() {
            return Err("another number of files than regions".into());
        }
        let regions = layout.regions().iter().zip(files);
        let regions = regions.map(|(info, file)| Region::over(info, file));
        let regions = regions.collect::<io::Result<_>>()?;
        Ok(Arc::new(Self::with(layout.clone(), regions)))
    }

    /// Populates all of it and pins it for devices: no page may be discarded from here on.
    ///
    /// # Errors
    /// When the host has no memory for it.
    pub fn pin(&self) -> io::Result<()> {
        self.pinned.store(true, Ordering::SeqCst);
        for (region, info) in self.layout.regions().iter().enumerate() {
            self.populate(PageRun { region, first: 0, count: info.pages() })?;
        }
        Ok(())
    }

    /// Word number `word` of a page, through the guest's mapping.
    pub fn word(&self, region: usize, page: u64, word: u64) -> &AtomicU64 {
        assert!(page < self.layout.regions()[region].pages() && word < PAGE_BYTES / 8);
        let offset = to_usize(page * PAGE_BYTES + word * 8);
        // SAFETY: inside the mapping (asserted) and aligned; all threads use atomics.
        unsafe { &*self.regions[region].main.add(offset).cast() }
    }

    /// Makes `vcpus` vCPUs be refused missing pages, so that they resolve their own faults.
    ///
    /// # Errors
    /// When the host does not allow watching this memory.
    pub fn refuse_missing_pages(
        self: &Arc<Self>,
        vcpus: usize,
    ) -> Result<Arc<OwnFaults<Self>>, UffdError> {
        let faults = OwnFaults::refusing(Arc::clone(self), 1, 0..vcpus, Box::new(NoBarrier))?;
        let faults = Arc::new(faults);
        let _ = self.refusing.set(Arc::downgrade(&faults));
        Ok(faults)
    }

    /// Accesses a page as a vCPU: at once, or after it has resolved the fault.
    pub fn enter(&self, vcpu: u64, region: usize, page: u64) {
        let Some(refusing) = self.refusing.get() else { return };
        let gpa = self.layout.regions()[region].gpa + page * PAGE_BYTES;
        while self.vcpu_reads(region, page).is_err() {
            if let Some(faults) = refusing.upgrade() {
                faults.refused(to_usize(vcpu), gpa).expect("the page is brought");
            }
        }
    }

    /// Reads the first byte of a page by a system call from the vCPUs' mapping, because the kernel fails
    /// that in the same way as `KVM_RUN`.
    ///
    /// # Errors
    /// EFAULT when the page is refused.
    pub fn vcpu_reads(&self, region: usize, page: u64) -> io::Result<u8> {
        let start = self.regions[region].vcpus.ok_or(io::ErrorKind::Unsupported)?;
        let at = start.wrapping_add(to_usize(page * PAGE_BYTES));
        let mut byte = 0_u8;
        let ours = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let theirs = libc::iovec { iov_base: at.cast(), iov_len: 1 };
        let this = libc::pid_t::try_from(std::process::id()).map_err(io::Error::other)?;
        // SAFETY: one byte is written, to `byte`; the kernel checks the address that is read.
        let read =
            unsafe { libc::process_vm_readv(this, &raw const ours, 1, &raw const theirs, 1, 0) };
        if read == 1 { Ok(byte) } else { Err(io::Error::last_os_error()) }
    }

    /// Marks a page as dirty, as the hardware or a device model would.
    pub fn mark_dirty(&self, region: usize, page: u64) {
        let word = &self.regions[region].dirty[to_usize(page / 64)];
        word.fetch_or(1 << (page % 64), Ordering::SeqCst);
    }

    /// Sets whether a busy log over this memory records only what was written, or everything.
    pub fn set_calm(&self, calm: bool) {
        self.calm.store(calm, Ordering::SeqCst);
    }

    pub(super) fn leaving(&self) -> &Leaving {
        &self.leaving
    }

    /// Number of calls that discarded pages, and of the pages discarded.
    pub fn discards(&self) -> (u64, u64) {
        let (calls, pages) = &self.discards;
        (calls.load(Ordering::SeqCst), pages.load(Ordering::SeqCst))
    }

    /// Number of queries of what is populated.
    pub fn looks(&self) -> u64 {
        self.looks.load(Ordering::SeqCst)
    }

    /// Makes this page of the first region stay in the host when it is discarded, like a part of a huge
    /// page that the kernel cannot split: it reads as zeros and is present.
    pub fn keep_discarded(&self, page: u64) {
        self.kept.store(page + 1, Ordering::SeqCst);
    }

    /// True when small pages were requested last.
    pub fn wants_small_pages(&self) -> bool {
        self.small.load(Ordering::SeqCst)
    }

    /// Bytes of memory that the host has allocated for a region.
    ///
    /// # Errors
    /// What the host reports.
    pub fn populated_bytes(&self, region: usize) -> io::Result<u64> {
        let pages = 0..self.layout.regions()[region].pages();
        let runs = self.populated_runs(region, pages)?;
        Ok(runs.iter().map(|run| (run.end - run.start) * PAGE_BYTES).sum())
    }
}

fn layout(
    regions: &[(u64, u64)],
    backing: Backing,
    host_page_bytes: u64,
) -> Result<Layout, FakeMemoryError> {
    let infos = regions.iter().enumerate().map(|(index, (gpa, pages))| RegionInfo {
        name: format!("ram{index}"),
        gpa: *gpa,
        len_bytes: pages * PAGE_BYTES,
        host_page_bytes,
        backing,
    });
    Ok(Layout::new(infos.collect())?)
}

impl Region {
    fn new(info: &RegionInfo) -> io::Result<Self> {
        match info.backing {
            Backing::Anonymous => {
                let len = to_usize(info.len_bytes);
                let (main, dirty) = (map(None, len)?, Self::clean(info));
                let data = PageBitmap::new(info.pages());
                Ok(Self { file: None, main, alias: None, vcpus: None, len, dirty, data })
            }
            Backing::Shared => Self::over(info, memfd(info)?),
        }
    }

    fn over(info: &RegionInfo, file: File) -> io::Result<Self> {
        let len = to_usize(info.len_bytes);
        let (main, alias) = (map(Some(&file), len)?, map(Some(&file), len)?);
        let (alias, vcpus) = (Some(alias), Some(map(Some(&file), len)?));
        let (dirty, data) = (Self::clean(info), PageBitmap::new(info.pages()));
        Ok(Self { file: Some(file), main, alias, vcpus, len, dirty, data })
    }

    fn clean(info: &RegionInfo) -> Vec<AtomicU64> {
        (0..info.pages().div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        for start in [Some(self.main), self.alias, self.vcpus].into_iter().flatten() {
            // SAFETY: our own mapping, unmapped once; no code can use it without the region.
            unsafe { libc::munmap(start.cast(), self.len) };
        }
    }
}

fn memfd(info: &RegionInfo) -> io::Result<File> {
    let huge = if info.host_page_bytes > PAGE_BYTES {
        libc::MFD_HUGETLB | info.host_page_bytes.trailing_zeros() << libc::MFD_HUGE_SHIFT
    } else {
        0
    };
    // SAFETY: a constant, terminated name.
    let fd = unsafe { libc::memfd_create(c"fake-ram".as_ptr(), libc::MFD_CLOEXEC | huge) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(info.len_bytes)?;
    Ok(file)
}

fn map(file: Option<&File>, len: usize) -> io::Result<*mut u8> {
    let (fd, flags) = match file {
        Some(file) => (file.as_raw_fd(), libc::MAP_SHARED | libc::MAP_NORESERVE),
        None => (-1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start.cast()) }
}

// SAFETY: all mappings are `len` bytes, readable and writable, and live as long as the value.
unsafe impl GuestMemoryMap for FakeMemory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn main(&self, region: usize) -> *mut u8 {
        self.regions[region].main
    }

    fn alias(&self, region: usize) -> Option<*mut u8> {
        self.regions[region].alias
    }

    fn vcpus(&self, region: usize) -> Option<*mut u8> {
        self.regions[region].vcpus
    }

    fn file(&self, region: usize) -> Option<BorrowedFd<'_>> {
        self.regions[region].file.as_ref().map(File::as_fd)
    }

    fn hold(&self, region: usize, pages: Range<u64>) -> Hold<'_> {
        self.hold_pages(region, pages)
    }

    fn populated_runs(&self, region: usize, pages: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        let index = region;
        let region = &self.regions[index];
        if region.file.is_none() {
            return Ok(vec![pages]);
        }
        // A page of a memfd is in memory if it was ever populated: tests do not swap.
        let mut present = vec![0_u8; to_usize(pages.end - pages.start)];
        // For large host pages the kernel reports only what a mapping has touched.
        for mapping in std::iter::once(region.main).chain(region.alias) {
            let mut seen = vec![0_u8; present.len()];
            // SAFETY: a range of our own mapping, and a byte for each of its pages.
            let result = unsafe {
                let start = mapping.add(to_usize(pages.start * PAGE_BYTES));
                libc::mincore(start.cast(), seen.len() * 4096, seen.as_mut_ptr())
            };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
            present.iter_mut().zip(seen).for_each(|(present, seen)| *present |= seen);
        }
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in pages.clone().filter(|page| present[to_usize(page - pages.start)] & 1 == 1) {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        self.looked_at(index, &runs);
        Ok(runs)
    }

    fn mark_zero(&self, run: PageRun) {
        self.regions[run.region].data.claim_range(run.first..run.end());
    }

    fn mark_resident(&self, run: PageRun) {
        self.regions[run.region].data.set_range(run.first..run.end());
    }

    fn mark_absent(&self, _: PageRun) {}

    fn populate(&self, run: PageRun) -> io::Result<()> {
        let region = &self.regions[run.region];
        let start = region.alias.unwrap_or(region.main);
        // SAFETY: a range of our own mapping; populating changes no contents.
        let result = unsafe {
            let start = start.add(to_usize(run.first * PAGE_BYTES));
            libc::madvise(start.cast(), to_usize(run.len_bytes()), libc::MADV_POPULATE_WRITE)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn use_small_pages(&self, small: bool) {
        self.small.store(small, Ordering::SeqCst);
        let advice = if small { libc::MADV_NOHUGEPAGE } else { libc::MADV_HUGEPAGE };
        for region in self.regions.iter().filter(|region| region.file.is_some()) {
            for start in [Some(region.main), region.alias, region.vcpus].into_iter().flatten() {
                // SAFETY: our own mapping; the advice changes no contents.
                unsafe { libc::madvise(start.cast(), region.len, advice) };
            }
        }
    }

    fn is_ready(&self, _: usize) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    fn data_runs(&self, run: PageRun) -> Vec<PageRun> {
        let runs = self.regions[run.region].data.runs_in(run.first..run.end());
        runs.map(|data| PageRun { first: data.start, count: data.end - data.start, ..run })
            .collect()
    }

    fn make_zero(&self, run: PageRun) -> io::Result<()> {
        if !self.pinned.load(Ordering::SeqCst) && !self.is_ready(run.region) {
            return self.discard(run);
        }
        self.mark_zero(run);
        for page in run.first..run.end() {
            crate::ram::slice(self, PageRun { region: run.region, first: page, count: 1 })
                .write(&[0; 4096]);
        }
        Ok(())
    }

    fn discard(&self, run: PageRun) -> io::Result<()> {
        if self.pinned.load(Ordering::SeqCst) {
            return Err(io::Error::other("devices have this memory mapped"));
        }
        let (calls, pages) = &self.discards;
        calls.fetch_add(1, Ordering::SeqCst);
        pages.fetch_add(run.count, Ordering::SeqCst);
        self.discard_quietly(run)?;
        let kept = self.kept.load(Ordering::SeqCst).checked_sub(1);
        if kept.is_some_and(|page| run.region == 0 && (run.first..run.end()).contains(&page)) {
            self.populate(PageRun { region: 0, first: kept.unwrap_or(0), count: 1 })?;
        }
        Ok(())
    }
}

impl FakeMemory {
    fn discard_quietly(&self, run: PageRun) -> io::Result<()> {
        self.mark_zero(run);
        let region = &self.regions[run.region];
        let (offset, len) = (run.first * PAGE_BYTES, run.len_bytes());
        let result = if let Some(file) = &region.file {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (offset, len) = (offset.cast_signed(), len.cast_signed());
            // SAFETY: a call on our own file.
            unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) }
        } else {
            // SAFETY: a range of our own mapping, discarded on purpose.
            unsafe {
                let start = region.main.add(to_usize(offset));
                libc::madvise(start.cast(), to_usize(len), libc::MADV_DONTNEED)
            }
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A dirty log that behaves like KVM's: collecting recorded pages re-arms them at that moment, and a
/// write to a recorded page before that is not reported again.
pub struct FakeLog {
    memory: Arc<FakeMemory>,
    noted: Mutex<Vec<Vec<u64>>>,
    busy: bool,
    calls: Calls,
    without_log: &'static [&'static str],
}

impl Drop for FakeLog {
    fn drop(&mut self) {
        self.calls.lock().push("log ends");
    }
}

impl FakeLog {
    /// Starts with every page recorded; a busy log records every page again in each round. Its end is
    /// recorded in `calls`.
    pub fn new(memory: Arc<FakeMemory>, busy: bool, calls: Calls) -> Self {
        let noted = memory.regions.iter().map(|region| vec![u64::MAX; region.dirty.len()]);
        let noted = Mutex::new(noted.collect());
        Self { memory, noted, busy, calls, without_log: &[] }
    }

    /// These devices are not in it.
    #[must_use]
    pub fn without_log_of(mut self, devices: &'static [&'static str]) -> Self {
        self.without_log = devices;
        self
    }
}

impl DirtyLog for FakeLog {
    fn begin_round(&self) -> Result<u64, VmError> {
        let mut noted = self.noted.lock();
        let mut count = 0;
        for (noted, region) in noted.iter_mut().zip(&self.memory.regions) {
            for (noted, dirty) in noted.iter_mut().zip(&region.dirty) {
                *noted |= dirty.swap(0, Ordering::SeqCst);
                if self.busy && !self.memory.calm.load(Ordering::SeqCst) {
                    *noted = u64::MAX;
                }
                count += u64::from(noted.count_ones());
            }
        }
        Ok(count)
    }

    fn devices_without_log(&self) -> Vec<String> {
        self.without_log.iter().map(|device| (*device).to_owned()).collect()
    }

    fn collect_and_clear(
        &self,
        region: usize,
        pages: Range<u64>,
        words: &mut [u64],
    ) -> Result<(), VmError> {
        assert!(pages.start.is_multiple_of(64));
        assert_eq!(words.len() as u64, (pages.end - pages.start).div_ceil(64));
        let mut noted = self.noted.lock();
        for (index, word) in words.iter_mut().enumerate() {
            let index = to_usize(pages.start / 64) + index;
            *word = std::mem::take(&mut noted[region][index]);
            self.memory.regions[region].dirty[index].fetch_and(!*word, Ordering::SeqCst);
        }
        Ok(())
    }
}
