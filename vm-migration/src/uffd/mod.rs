// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The fault source of stock kernels: userfaultfd on the mapping that the guest uses.
//!
//! Owns the descriptors and knows which part of which region each of them watches. Memory is split
//! over several descriptors by address, because one descriptor's queue is one lock. Shared memory
//! is watched for missing pages and for pages that are in the page cache but not mapped (minor
//! faults): bytes are received through the alias while the guest cannot see them, and made visible with
//! one UFFDIO_CONTINUE per run. Memory that is populated from the beginning has no other faults than those, and pages
//! of zeros need nothing else. Anonymous memory is filled with UFFDIO_COPY. It must never fill a
//! page with contents that its caller did not provide.

mod copies;
mod own;
mod survey;
mod sys;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::cancel::Cancel;
pub use crate::fault::UffdError;
use crate::fault::{Fault, FaultSource, FaultSourceKind, FaultWait};
use crate::layout::{Backing, PAGE_BYTES, PageRun, RegionInfo};
use crate::ram::{self, GuestMemoryMap};
use crate::transport::{WaitEnd, wait_readable};
pub use own::{OwnFaults, Refused};
pub use survey::{Features, survey};
use sys::Descriptor;

/// Most retries of an operation that fails because mappings are changing.
const AGAIN_MAX: u32 = 10_000;

/// Pause before an operation is retried for which the host had no memory.
const NO_MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Most pages in a run that are found to be mapped before the rest of it is left alone.
const MAPPED_MAX: u32 = 8;

/// Smallest part of a region with a descriptor of its own.
const PART_BYTES_MIN: u64 = HOST_PAGE_BYTES_MAX;

/// Largest host page for which a fault is short enough.
const HOST_PAGE_BYTES_MAX: u64 = 2 << 20;

/// Checks, before anything starts, whether [`Uffd::register`] can work for this memory.
///
/// # Errors
/// Why it cannot, and the remedy.
pub fn check(regions: &[RegionInfo]) -> Result<(), UffdError> {
    open(features_for(regions)?).map(drop)
}

fn features_for(regions: &[RegionInfo]) -> Result<u64, UffdError> {
    let mut features = survey::wanted(false, false);
    for region in regions {
        if region.host_page_bytes > HOST_PAGE_BYTES_MAX {
            let name = region.name.clone();
            return Err(UffdError::PageSize { name, page_bytes: region.host_page_bytes });
        }
        let is_shared = region.backing == Backing::Shared;
        features |= survey::wanted(is_shared, region.host_page_bytes > PAGE_BYTES);
    }
    Ok(features)
}

fn open(features: u64) -> Result<Descriptor, UffdError> {
    let descriptor = Descriptor::open().map_err(survey::not_opened)?;
    descriptor.handshake(features).map_err(UffdError::Features)?;
    Ok(descriptor)
}

/// A part of a region and the descriptor that watches it.
#[derive(Clone, Copy, Debug)]
struct Part {
    region: usize,
    first: u64,
    pages: u64,
    /// Address of the part's first page in the watched mapping.
    address: u64,
    descriptor: usize,
    host_page_bytes: u64,
    shared: bool,
    receipt: Receipt,
}

/// How contents get into a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receipt {
    /// They are copied into pages that are missing.
    Copied,
    /// They may be received in place: pages that are in the page cache and not mapped are caught as well.
    InPlace,
    /// The same, and all pages are in the page cache already, with zeros or what has arrived before: there is none to
    /// copy into.
    Ready,
}

impl Receipt {
    /// For a region; `shared` says whether all shared memory is received in place.
    fn of<M: GuestMemoryMap>(memory: &M, region: usize, shared: bool) -> Self {
        let info = &memory.layout().regions()[region];
        // Large pages are put together from pieces in any case.
        let is_large = info.host_page_bytes > PAGE_BYTES;
        let is_shared = info.backing == Backing::Shared;
        if is_shared && memory.is_ready(region) {
            Self::Ready
        } else if is_shared && (is_large || shared) {
            Self::InPlace
        } else {
            Self::Copied
        }
    }

    fn is_in_place(self) -> bool {
        self != Self::Copied
    }
}

/// Watches all guest memory with userfaultfd.
pub struct Uffd<M: GuestMemoryMap> {
    memory: Arc<M>,
    descriptors: Vec<Descriptor>,
    /// Sorted by region and page.
    parts: Vec<Part>,
    /// Those of them that are still to be released. Locked during the release.
    watched: Mutex<Vec<Part>>,
    /// By region.
    receipts: Vec<Receipt>,
    stop: Cancel,
    /// Nothing is watched any more: memory that is not registered needs no filling.
    released: AtomicBool,
}

impl<M: GuestMemoryMap> std::fmt::Debug for Uffd<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uffd").field("parts", &self.parts).finish_non_exhaustive()
    }
}

impl<M: GuestMemoryMap> Uffd<M> {
    /// Watches all of `memory`, split over up to `descriptors` descriptors.
    ///
    /// # Errors
    /// See [`UffdError`].
    pub fn register(memory: Arc<M>, descriptors: usize) -> Result<Self, UffdError> {
        Self::watch(memory, Watch { of: Mapping::Main, descriptors, in_place: true })
    }

    /// Like [`register`](Self::register) for memory most of which is resident: resident pages are not
    /// caught, and missing ones are copied in. There are two exceptions. Large host pages of shared memory are
    /// assembled from pieces, which must not be visible before the last, and there are few of
    /// them to catch. Of [ready](GuestMemoryMap::is_ready) memory every page is resident, and each is caught once.
    ///
    /// # Errors
    /// See [`UffdError`].
    pub fn register_missing(memory: Arc<M>, descriptors: usize) -> Result<Self, UffdError> {
        Self::watch(memory, Watch { of: Mapping::Main, descriptors, in_place: false })
    }

    /// Refuses vCPUs access to missing pages, in the vCPUs' own mapping. Large host pages and those of ready memory are
    /// refused until [`make_present`](FaultSource::make_present), because they exist in the file before their
    /// contents are complete.
    ///
    /// # Errors
    /// See [`UffdError`].
    fn register_refusing(memory: Arc<M>) -> Result<Self, UffdError> {
        Self::watch(memory, Watch { of: Mapping::Vcpus, descriptors: 1, in_place: false })
    }

    fn watch(memory: Arc<M>, watch: Watch) -> Result<Self, UffdError> {
        let Watch { of, descriptors, in_place } = watch;
        let receipts = 0..memory.layout().regions().len();
        let receipts: Vec<_> =
            receipts.map(|region| Receipt::of(&*memory, region, in_place)).collect();
        let regions = memory.layout().regions();
        let features = features_for(regions)? | of.features();
        let total: u64 = regions.iter().map(|region| region.len_bytes).sum();
        let wanted = u64::try_from(descriptors.max(1)).unwrap_or(1);
        let part_bytes = total.div_ceil(wanted).max(PART_BYTES_MIN);
        let stop = Cancel::new().map_err(UffdError::Events)?;
        let parts = split(&*memory, part_bytes, of, &receipts)?;
        let count = parts.iter().map(|part| part.descriptor + 1).max().unwrap_or(1);
        let descriptors = (0..count).map(|_| open(features)).collect::<Result<Vec<_>, _>>()?;
        let released = AtomicBool::new(false);
        let watched = Mutex::new(parts.clone());
        let uffd = Self { memory, descriptors, parts, watched, receipts, stop, released };
        for part in &uffd.parts {
            let mode = if part.receipt.is_in_place() {
                sys::REGISTER_MISSING | sys::REGISTER_MINOR
            } else {
                sys::REGISTER_MISSING
            };
            uffd.descriptors[part.descriptor]
                .register(part.address, part.pages * PAGE_BYTES, mode)
                .map_err(|source| pages_error("watch", part.run(), source))?;
            part.forget_mapped()?;
        }
        Ok(uffd)
    }

    /// The parts that overlap a run, each with its piece of the run.
    fn pieces(&self, run: PageRun) -> impl Iterator<Item = (&Part, PageRun)> {
        self.parts.iter().filter_map(move |part| {
            let first = run.first.max(part.first);
            let end = run.end().min(part.first + part.pages);
            (part.region == run.region && first < end)
                .then(|| (part, PageRun { region: run.region, first, count: end - first }))
        })
    }

    /// True when an operation failed because nothing is watched any more.
    fn is_over(&self, error: &io::Error) -> bool {
        error.raw_os_error() == Some(libc::ENOENT) && self.released.load(Ordering::SeqCst)
    }

    /// Fills a piece in steps, skipping pages that are present. `fill` fills as much as possible from
    /// an address on and returns the length; `present` is called for each host page that `fill` found
    /// present.
    fn fill(
        &self,
        what: &'static str,
        part: &Part,
        piece: PageRun,
        mut fill: impl FnMut(&Descriptor, u64, u64) -> (u64, io::Result<()>),
        mut present: impl FnMut(&Descriptor, u64) -> io::Result<()>,
    ) -> Result<(), UffdError> {
        let descriptor = &self.descriptors[part.descriptor];
        let start = part.address_of(piece.first);
        let end = start + piece.len_bytes();
        let mut at = start;
        let mut again = 0;
        let mut short_of_memory = false;
        while at < end {
            let (done, result) = fill(descriptor, at, end - at);
            at += done;
            let Err(error) = result else { continue };
            match error.raw_os_error() {
                Some(libc::EEXIST) => {
                    match present(descriptor, at) {
                        Err(error) if self.is_over(&error) => return Ok(()),
                        result => result.map_err(|error| pages_error(what, piece, error))?,
                    }
                    at += part.host_page_bytes;
                }
                Some(libc::EAGAIN) if done > 0 => {}
                Some(libc::ENOMEM) if !self.stop.is_cancelled() => {
                    if !short_of_memory {
                        log::warn!("the host has no memory for the guest's pages: waiting for it");
                    }
                    short_of_memory = true;
                    std::thread::sleep(NO_MEMORY_PAUSE);
                }
                Some(libc::EAGAIN) if again < AGAIN_MAX => {
                    again += 1;
                    std::thread::yield_now();
                }
                _ if self.is_over(&error) => return Ok(()),
                _ => return Err(pages_error(what, piece, error)),
            }
        }
        Ok(())
    }
}

impl<M: GuestMemoryMap> Uffd<M> {
    fn copy_zeros(&self, part: &Part, piece: PageRun) -> Result<(), UffdError> {
        let zeros = vec![0; crate::layout::to_usize(part.host_page_bytes)];
        let copy = |descriptor: &Descriptor, at, _| descriptor.copy(at, &zeros);
        self.fill("zero", part, piece, copy, |descriptor, at| {
            descriptor.wake(at, part.host_page_bytes)
        })
    }
}

/// Maps pages that are in the page cache. Where the guest has given one back since, that is a page of zeros.
fn show_or_zero(descriptor: &Descriptor, start: u64, len: u64) -> (u64, io::Result<()>) {
    match descriptor.show(start, len) {
        (0, Err(error)) if error.raw_os_error() == Some(libc::EFAULT) => {
            descriptor.zero(start, PAGE_BYTES)
        }
        (done, Err(error)) if error.raw_os_error() == Some(libc::EFAULT) => (done, Ok(())),
        shown => shown,
    }
}

/// Maps pages that are in the page cache, up to the first that is not: what the guest has given back stays so. A call
/// ends at a page that is mapped, so where many are it is left at that.
fn show_present(descriptor: &Descriptor, part: &Part, piece: PageRun) {
    let mut at = part.address_of(piece.first);
    let end = at + piece.len_bytes();
    let mut mapped = 0;
    while at < end && mapped < MAPPED_MAX {
        let (done, shown) = descriptor.show(at, end - at);
        at += done;
        match shown.map_err(|error| error.raw_os_error()) {
            Ok(()) => {}
            Err(Some(libc::EEXIST)) => {
                at += part.host_page_bytes;
                mapped += 1;
            }
            Err(Some(libc::EAGAIN)) if done > 0 => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
thread_local! {
    /// How often the host reports a lack of memory when the calling thread stops watching.
    pub(crate) static SHORT_OF_MEMORY: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
fn test_short_of_memory(part: &Part) -> Result<(), UffdError> {
    let left = SHORT_OF_MEMORY.get();
    SHORT_OF_MEMORY.set(left.saturating_sub(1));
    let error = io::Error::from_raw_os_error(libc::ENOMEM);
    if left > 0 { Err(pages_error("stop watching", part.run(), error)) } else { Ok(()) }
}

impl Part {
    fn run(&self) -> PageRun {
        PageRun { region: self.region, first: self.first, count: self.pages }
    }

    fn address_of(&self, page: u64) -> u64 {
        self.address + (page - self.first) * PAGE_BYTES
    }

    /// Makes pages of ready memory that were accessed before fault again: in one call, of which only mapped pages are
    /// the work, and contents arrive through another mapping. Other memory has no such pages yet.
    fn forget_mapped(&self) -> Result<(), UffdError> {
        if self.receipt != Receipt::Ready {
            return Ok(());
        }
        let is_hugetlb = self.host_page_bytes > PAGE_BYTES;
        match Descriptor::unmap_pages(self.address, self.pages * PAGE_BYTES) {
            // Linux before 5.18 cannot. Nothing is known to access it so early.
            Err(error) if is_hugetlb && error.raw_os_error() == Some(libc::EINVAL) => {
                log::debug!("pages of region {} may be mapped already: {error}", self.region);
                Ok(())
            }
            // What is mapped would show old contents.
            unmapped => unmapped.map_err(|source| pages_error("unmap", self.run(), source)),
        }
    }
}

fn pages_error(what: &'static str, run: PageRun, source: io::Error) -> UffdError {
    UffdError::Pages { what, region: run.region, first: run.first, pages: run.count, source }
}

/// A mapping of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mapping {
    /// The mapping on which accesses wait.
    Main,
    /// The mapping on which accesses of vCPUs are refused.
    Vcpus,
}

impl Mapping {
    fn features(self) -> u64 {
        match self {
            Self::Main => 0,
            Self::Vcpus => sys::FEATURE_SIGBUS,
        }
    }

    /// Start address of a region.
    fn start<M: GuestMemoryMap>(self, memory: &M, region: usize) -> Result<u64, UffdError> {
        let start = match self {
            Self::Main => Some(memory.main(region)),
            Self::Vcpus => memory.vcpus(region),
        };
        start.map(|start| start.expose_provenance() as u64).ok_or_else(|| {
            let name = memory.layout().regions()[region].name.clone();
            UffdError::NoVcpuMapping { name }
        })
    }
}

/// Which mapping is watched, and how.
#[derive(Clone, Copy, Debug)]
struct Watch {
    of: Mapping,
    descriptors: usize,
    in_place: bool,
}

/// Cuts the regions into parts of about `part_bytes`, in multiples of 2 MiB, and distributes them over
/// the descriptors.
fn split<M: GuestMemoryMap>(
    memory: &M,
    part_bytes: u64,
    of: Mapping,
    receipts: &[Receipt],
) -> Result<Vec<Part>, UffdError> {
    let part_pages = part_bytes.next_multiple_of(HOST_PAGE_BYTES_MAX) / PAGE_BYTES;
    let mut parts = Vec::new();
    let mut filled = 0;
    let mut descriptor = 0;
    for ((region, info), receipt) in memory.layout().regions().iter().enumerate().zip(receipts) {
        let start = of.start(memory, region)?;
        let mut first = 0;
        while first < info.pages() {
            if filled >= part_pages {
                descriptor += 1;
                filled = 0;
            }
            let pages = (part_pages - filled).min(info.pages() - first);
            // A part must not end in the middle of a host page.
            let pages = pages.next_multiple_of(info.host_page_bytes / PAGE_BYTES);
            parts.push(Part {
                region,
                first,
                pages,
                address: start + first * PAGE_BYTES,
                descriptor,
                host_page_bytes: info.host_page_bytes,
                shared: info.backing == Backing::Shared,
                receipt: *receipt,
            });
            first += pages;
            filled += pages;
        }
    }
    Ok(parts)
}

impl<M: GuestMemoryMap> FaultSource for Uffd<M> {
    fn kind(&self) -> FaultSourceKind {
        FaultSourceKind::Uffd
    }

    fn readers(&self) -> usize {
        self.descriptors.len()
    }

    fn next_faults(&self, reader: usize, faults: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        let descriptor = &self.descriptors[reader];
        loop {
            let had = faults.len();
            descriptor
                .read_faults(|raw| {
                    let part = self.parts.iter().find(|part| {
                        (part.address..part.address + part.pages * PAGE_BYTES)
                            .contains(&raw.address)
                    });
                    // The kernel reports only registered ranges; any other address is not from this
                    // memory.
                    if let Some(part) = part {
                        faults.push(Fault {
                            region: part.region,
                            page: part.first + (raw.address - part.address) / PAGE_BYTES,
                            thread: Some(raw.thread),
                        });
                    }
                })
                .map_err(UffdError::Events)?;
            if faults.len() > had {
                return Ok(FaultWait::Faults);
            }
            match wait_readable(&[descriptor.as_raw_fd()], &self.stop, None) {
                Ok(WaitEnd::Cancelled) => return Ok(FaultWait::Stopped),
                Ok(_) => {}
                Err(error) => return Err(UffdError::Events(error)),
            }
        }
    }

    fn stop_readers(&self) {
        self.stop.cancel();
    }

    fn receives_in_place(&self, region: usize) -> bool {
        self.receipts[region].is_in_place()
    }

    fn prefers_copies_of_small_runs(&self, region: usize) -> bool {
        self.receipts[region] != Receipt::Ready
    }

    fn holds_all_pages(&self, region: usize) -> bool {
        self.receipts[region] == Receipt::Ready
    }

    fn show_more(&self, run: PageRun) {
        for (part, piece) in self.pieces(run) {
            show_present(&self.descriptors[part.descriptor], part, piece);
        }
    }

    fn make_present(&self, run: PageRun) -> Result<(), UffdError> {
        for (part, piece) in self.pieces(run) {
            self.fill("show", part, piece, Descriptor::show, |descriptor, address| {
                descriptor.wake(address, part.host_page_bytes)
            })?;
        }
        Ok(())
    }

    fn copy_in(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        self.copy_with(run, bytes, Descriptor::copy)
    }

    fn copy_in_now(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        self.copy_now(run, bytes)
    }

    fn make_zero(&self, run: PageRun) -> Result<(), UffdError> {
        for (part, piece) in self.pieces(run) {
            if part.host_page_bytes > PAGE_BYTES {
                // hugetlb has no zero page. A read through the alias creates one of zeros where there is none.
                if !part.receipt.is_in_place() {
                    self.copy_zeros(part, piece)?;
                    continue;
                }
                ram::touch(&*self.memory, piece);
                self.make_present(piece)?;
                continue;
            }
            if part.receipt == Receipt::Ready {
                self.fill("zero", part, piece, show_or_zero, |descriptor, address| {
                    descriptor.wake(address, PAGE_BYTES)
                })?;
                continue;
            }
            let show = |descriptor: &Descriptor, address| {
                if part.receipt.is_in_place() {
                    // There is a page already, whose contents the guest may not see yet.
                    match descriptor.show(address, PAGE_BYTES).1 {
                        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
                        _ => descriptor.wake(address, PAGE_BYTES),
                    }
                } else {
                    descriptor.wake(address, PAGE_BYTES)
                }
            };
            self.fill("zero", part, piece, Descriptor::zero, show)?;
        }
        Ok(())
    }

    fn wake(&self, run: PageRun) -> Result<(), UffdError> {
        for (part, piece) in self.pieces(run) {
            self.descriptors[part.descriptor]
                .wake(part.address_of(piece.first), piece.len_bytes())
                .map_err(|source| pages_error("wake waiters of", piece, source))?;
        }
        Ok(())
    }

    fn release(&self) -> Result<(), UffdError> {
        #[cfg(test)]
        test_short_of_memory(&self.parts[0])?;
        self.released.store(true, Ordering::SeqCst);
        let mut result = Ok(());
        self.watched.lock().retain(|part| {
            let gone = self.descriptors[part.descriptor]
                .unregister(part.address, part.pages * PAGE_BYTES)
                .map_err(|source| pages_error("stop watching", part.run(), source));
            let stays = gone.is_err();
            if result.is_ok() {
                result = gone;
            }
            stays
        });
        result
    }
}
