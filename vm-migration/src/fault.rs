// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fault sources: how accesses to missing pages are caught, and how they continue once the page has arrived.
//!
//! Owns the traits only. The implementations are in [`crate::uffd`]: a fault waits in userfaultfd, or the
//! access is refused and the faulting thread requests its page itself. A fault source never decides what a
//! page contains: the engine in `destination::engine` does.

use std::fmt;
use std::io;
use std::sync::Weak;

use crate::layout::PageRun;
use crate::uffd::UffdError;

/// Mechanism that catches faults in postcopy.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum FaultSourceKind {
    /// userfaultfd, with reader threads.
    Uffd,
    /// userfaultfd in SIGBUS mode: the vCPU thread resolves its own fault.
    Sigbus,
    /// A patched KVM leaves the guest on a missing page.
    Exit,
}

impl fmt::Display for FaultSourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uffd => "uffd",
            Self::Sigbus => "sigbus",
            Self::Exit => "exit",
        })
    }
}

/// One access that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The region.
    pub region: usize,
    /// The page of 4 KiB in it.
    pub page: u64,
    /// The thread that waits, where the source knows it.
    pub thread: Option<u32>,
}

/// What a wait for faults ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultWait {
    /// Faults are there.
    Faults,
    /// The readers were asked to stop.
    Stopped,
}

/// Where a thread that was refused a page gets it.
pub trait FaultResolver: Send + Sync {
    /// Requests a page that the calling thread needs, unless it was requested, and returns when it is
    /// here, or as soon as the thread is unparked: then the caller sees to that, and comes
    /// again if it still needs the page. `vcpu` is the calling thread's own number.
    ///
    /// # Errors
    /// The page cannot be made visible; the source has been told why.
    fn resolve(&self, vcpu: usize, fault: Fault) -> Result<(), FaultError>;
}

/// A page that could not be made visible to the thread that needs it; the migration reports the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a missing page cannot be brought in")]
pub struct FaultError;

/// What stands before vCPUs alongside, or instead of, a watch on their mapping.
pub trait VcpuBarrier: Send + Sync {
    /// The run's pages are here and visible.
    fn unblock(&self, run: PageRun);

    /// Every page of all regions is here: from now on no vCPU is refused one. Takes effect at once
    /// and for all of memory, without a system call; [`remove`](Self::remove) follows, which may take
    /// long and may fail.
    fn open(&self);

    /// What stood before a region is not needed any more. vCPUs are not refused anything there, with
    /// it or without.
    ///
    /// # Errors
    /// What the host reports; the barrier stays, open.
    fn remove(&self, region: usize) -> io::Result<()>;
}

/// A registered memory whose missing pages make the accessor wait.
///
/// All methods may be called from several threads. Making a page present wakes the threads that wait for it;
/// doing so twice, or for a page that is present already, is harmless. Dropping the source lets
/// every waiter continue with whatever its page then holds: drop it only after
/// [`release`](Self::release), or when the guest is gone.
pub trait FaultSource: Send + Sync {
    /// The kind.
    fn kind(&self) -> FaultSourceKind;

    /// Number of independent queues of faults, each to be read by its own thread.
    fn readers(&self) -> usize;

    /// Number of threads whose accesses are refused instead of waiting, and that bring their pages
    /// themselves.
    fn vcpus(&self) -> usize {
        0
    }

    /// Where those threads get their pages from now on, for as long as it exists.
    fn set_resolver(&self, resolver: Weak<dyn FaultResolver>) {
        let _ = resolver;
    }

    /// Waits for faults of one queue and appends as many as one read gives.
    ///
    /// # Errors
    /// What the host reports.
    fn next_faults(&self, reader: usize, faults: &mut Vec<Fault>) -> Result<FaultWait, UffdError>;

    /// Makes every [`next_faults`](Self::next_faults) return [`FaultWait::Stopped`], for good, and ends
    /// every wait for memory of the host with an error.
    fn stop_readers(&self);

    /// True when pages are received in place (through the alias) and then made visible with
    /// [`make_present`](Self::make_present); otherwise [`copy_in`](Self::copy_in) is the way. Must
    /// be true for shared memory of large host pages: these come in pieces.
    fn receives_in_place(&self, region: usize) -> bool;

    /// True when [`copy_in`](Self::copy_in) works for memory that is received in place as well, and
    /// is faster for some few pages.
    fn prefers_copies_of_small_runs(&self) -> bool {
        false
    }

    /// Contents are complete in the alias: let the guest see them. Whole host pages.
    ///
    /// # Errors
    /// What the host reports.
    fn make_present(&self, run: PageRun) -> Result<(), UffdError>;

    /// Puts contents in, atomically for the guest. Whole host pages; `bytes` is as long as the run.
    /// Waits while the host has no memory: so does the guest.
    ///
    /// # Errors
    /// What the host reports.
    fn copy_in(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError>;

    /// Makes pages without contents present as zeros. Whole host pages. A page that has contents
    /// keeps and shows them.
    ///
    /// # Errors
    /// What the host reports.
    fn make_zero(&self, run: PageRun) -> Result<(), UffdError>;

    /// Lets waiters look again.
    ///
    /// # Errors
    /// What the host reports.
    fn wake(&self, run: PageRun) -> Result<(), UffdError>;

    /// All memory is complete, or about to be dropped: stop watching it and wake every waiter.
    ///
    /// # Errors
    /// What the host reports, of the first part of memory that stays watched. As many of the others as
    /// can be are not any more; to be called again for the rest.
    fn release(&self) -> Result<(), UffdError>;
}
