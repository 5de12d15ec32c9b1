// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fault sources in which a vCPU's access fails, and its own thread resolves the fault.
//!
//! Owns two barriers on the same pages. One is for vCPUs: `KVM_RUN` returns at a missing
//! page, and the vCPU's thread resolves it. The other is userfaultfd on `main`, where all other threads
//! wait as usual. The first comes in two kinds:
//!
//! - a separate mapping for vCPUs, watched in SIGBUS mode: the host refuses the access;
//! - marks, which a KVM that supports them checks before the host's memory.
//!
//! Both mappings catch only pages that the file does not have. Small pages are put into the file
//! complete: from that moment on they are visible in both mappings. Large ones are in the file from their
//! first piece on, and those of ready memory from the beginning, so both mappings catch them until they are made visible
//! there. A mark is cleared after that. It must never resolve a vCPU's fault on another thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::{Uffd, UffdError};
use crate::bell::Bell;
use crate::fault::{
    Fault, FaultError, FaultResolver, FaultSource, FaultSourceKind, FaultWait, VcpuBarrier,
};
use crate::layout::{GpaRange, PAGE_BYTES, PageRun};
use crate::ram::GuestMemoryMap;

/// Outcome for a refused access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The access may be retried: the page is here, or the vCPU was kicked.
    TryAgain,
    /// No resolver is active: the access was refused before the release, or by something else.
    NoResolver,
    /// The address is not guest RAM.
    NotRam,
}

/// userfaultfd for all threads but vCPUs, which resolve their own faults.
pub struct OwnFaults<M: GuestMemoryMap> {
    others: Uffd<M>,
    memory: Arc<M>,
    /// The watch on the vCPUs' own mapping; `None` if the barrier uses marks instead.
    refusing: Option<Uffd<M>>,
    barrier: Box<dyn VcpuBarrier>,
    bells: Box<[Option<Arc<Bell>>]>,
    resolver: OnceLock<Weak<dyn FaultResolver>>,
    released: AtomicBool,
}

impl<M: GuestMemoryMap> std::fmt::Debug for OwnFaults<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnFaults").field("others", &self.others).finish_non_exhaustive()
    }
}

impl<M: GuestMemoryMap> OwnFaults<M> {
    /// Watches both mappings of all of `memory`, `main` with up to `descriptors` descriptors. Accesses of the threads of
    /// the vCPUs with the numbers `vcpus` may be refused; `barrier` is active meanwhile.
    ///
    /// # Errors
    /// See [`UffdError`].
    pub fn refusing(
        memory: Arc<M>,
        descriptors: usize,
        vcpus: impl IntoIterator<Item = usize>,
        barrier: Box<dyn VcpuBarrier>,
    ) -> Result<Self, UffdError> {
        let refusing = Uffd::register_refusing(Arc::clone(&memory))?;
        let others = Uffd::register_missing(Arc::clone(&memory), descriptors)?;
        let mut faults = Self::with(memory, others, vcpus, barrier)?;
        faults.refusing = Some(refusing);
        Ok(faults)
    }

    /// Watches `main` for all threads but vCPUs, which exit from the guest at pages that `barrier` has
    /// marked. All pages are marked initially.
    ///
    /// # Errors
    /// See [`UffdError`].
    pub fn marked(
        memory: Arc<M>,
        descriptors: usize,
        vcpus: impl IntoIterator<Item = usize>,
        barrier: Box<dyn VcpuBarrier>,
    ) -> Result<Self, UffdError> {
        let others = Uffd::register_missing(Arc::clone(&memory), descriptors)?;
        Self::with(memory, others, vcpus, barrier)
    }

    fn with(
        memory: Arc<M>,
        others: Uffd<M>,
        vcpus: impl IntoIterator<Item = usize>,
        barrier: Box<dyn VcpuBarrier>,
    ) -> Result<Self, UffdError> {
        let mut bells = Vec::new();
        for vcpu in vcpus {
            if bells.len() <= vcpu {
                bells.resize(vcpu + 1, None);
            }
            if let Some(bell) = bells.get_mut(vcpu) {
                *bell = Some(Arc::new(Bell::new().map_err(UffdError::Bell)?));
            }
        }
        let (resolver, released) = (OnceLock::new(), AtomicBool::new(false));
        let bells = bells.into_boxed_slice();
        Ok(Self { others, memory, refusing: None, barrier, bells, resolver, released })
    }

    /// Ends the wait of a vCPU's thread in [`refused`](Self::refused), or its next one: it has something else to do.
    pub fn kick(&self, vcpu: usize) {
        if let Some(Some(bell)) = self.bells.get(vcpu) {
            bell.ring();
        }
    }

    /// Resolves the refused access of the calling thread, vCPU `vcpu`, to the page at `gpa`.
    ///
    /// # Errors
    /// When the page cannot be resolved; the thread that waits for the last page gets the reason.
    pub fn refused(&self, vcpu: usize, gpa: u64) -> Result<Refused, FaultError> {
        let page = GpaRange { gpa: gpa & !(PAGE_BYTES - 1), len_bytes: PAGE_BYTES };
        let Ok(run) = self.memory.layout().locate(page) else { return Ok(Refused::NotRam) };
        let resolver = self.resolver.get().and_then(Weak::upgrade);
        let Some(resolver) = resolver.filter(|_| !self.released.load(Ordering::SeqCst)) else {
            return Ok(Refused::NoResolver);
        };
        let fault = Fault { region: run.region, page: run.first, thread: Some(thread_id()) };
        resolver.resolve(vcpu, fault).map(|()| Refused::TryAgain)
    }

    /// Makes visible to vCPUs what has been copied in.
    fn has_copied(&self, run: PageRun) -> Result<(), UffdError> {
        if let Some(refusing) = self.to_show_vcpus(run.region) {
            refusing.make_present(run)?;
        }
        self.barrier.unblock(run);
        Ok(())
    }

    /// The watch on the vCPUs' own mapping, if pages of the region have to be made visible there.
    fn to_show_vcpus(&self, region: usize) -> Option<&Uffd<M>> {
        self.refusing.as_ref().filter(|refusing| refusing.receives_in_place(region))
    }
}

/// Thread ID of the calling thread, as userfaultfd reports it for others. The kernel is asked once.
fn thread_id() -> u32 {
    thread_local! {
        static THREAD_ID: u32 = {
            // SAFETY: takes nothing and touches no memory.
            u32::try_from(unsafe { libc::gettid() }).unwrap_or(0)
        };
    }
    THREAD_ID.with(|id| *id)
}

impl<M: GuestMemoryMap> FaultSource for OwnFaults<M> {
    fn kind(&self) -> FaultSourceKind {
        if self.refusing.is_some() { FaultSourceKind::Sigbus } else { FaultSourceKind::Exit }
    }

    fn readers(&self) -> usize {
        self.others.readers()
    }

    fn bells(&self) -> &[Option<Arc<Bell>>] {
        &self.bells
    }

    fn set_resolver(&self, resolver: Weak<dyn FaultResolver>) {
        // A source has one engine, so this is set once.
        let _ = self.resolver.set(resolver);
    }

    fn next_faults(&self, reader: usize, faults: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        self.others.next_faults(reader, faults)
    }

    fn stop_readers(&self) {
        self.refusing.iter().for_each(Uffd::stop_readers);
        self.others.stop_readers();
    }

    fn receives_in_place(&self, region: usize) -> bool {
        self.others.receives_in_place(region)
    }

    fn prefers_copies_of_small_runs(&self, region: usize) -> bool {
        self.others.prefers_copies_of_small_runs(region)
    }

    fn holds_all_pages(&self, region: usize) -> bool {
        self.others.holds_all_pages(region)
    }

    // Visible to vCPUs first: a thread that the other mapping wakes may have KVM access the page for a vCPU, and
    // that access fails where a thread would wait.

    fn show_more(&self, run: PageRun) {
        if let Some(refusing) = self.to_show_vcpus(run.region) {
            refusing.show_more(run);
        }
        self.others.show_more(run);
        // A page that has stayed invisible waits in userfaultfd, as it does for other threads.
        self.barrier.unblock(run);
    }

    fn make_present(&self, run: PageRun) -> Result<(), UffdError> {
        if let Some(refusing) = self.to_show_vcpus(run.region) {
            refusing.make_present(run)?;
        }
        self.others.make_present(run)?;
        self.barrier.unblock(run);
        Ok(())
    }

    fn copy_in(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        self.others.copy_in(run, bytes)?;
        self.has_copied(run)
    }

    fn copy_in_now(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        self.others.copy_in_now(run, bytes)?;
        self.has_copied(run)
    }

    fn make_zero(&self, run: PageRun) -> Result<(), UffdError> {
        if let Some(refusing) = self.to_show_vcpus(run.region) {
            refusing.make_zero(run)?;
        }
        self.others.make_zero(run)?;
        self.barrier.unblock(run);
        Ok(())
    }

    fn wake(&self, run: PageRun) -> Result<(), UffdError> {
        self.others.wake(run)
    }

    fn release(&self) -> Result<(), UffdError> {
        // Clears all marks first, which takes no time: a vCPU that touches a page that stayed a hole must
        // not be refused again and again while the regions are processed.
        self.barrier.open();
        // A thread that is refused until this is done still resolves its page; that needs the watch for the
        // other threads, which is therefore released last.
        if let Some(refusing) = &self.refusing {
            refusing.release()?;
        }
        for region in 0..self.memory.layout().regions().len() {
            if let Err(error) = self.barrier.remove(region) {
                let why = error_text::chain(&error);
                log::warn!(
                    "the userfault bitmap of region {region}, which is clear, cannot be removed: {why}"
                );
            }
        }
        self.others.release()?;
        self.released.store(true, Ordering::SeqCst);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
#[path = "own_tests.rs"]
mod tests;
