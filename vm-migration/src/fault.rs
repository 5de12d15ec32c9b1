// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fault sources: how accesses to missing pages are caught, and how they continue once the page has arrived.
//!
//! Owns the traits only. The implementations are in [`crate::uffd`]: a fault waits in userfaultfd, or the
//! access is refused and the faulting thread requests its page itself. A fault source never decides what a
//! page contains: the engine in `destination::engine` does.

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};

use crate::bell::Bell;
use crate::layout::PageRun;

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

/// An access to a missing page that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The region.
    pub region: usize,
    /// The page of 4 KiB in it.
    pub page: u64,
    /// The waiting thread, where the fault source knows it.
    pub thread: Option<u32>,
}

/// Why userfaultfd cannot be used, or failed.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    /// The process has no permission for it.
    #[error(
        "this process may not use userfaultfd, which postcopy needs; give it access to \
         /dev/userfaultfd (chmod or setfacl), or CAP_SYS_PTRACE, or run \
         'sysctl -w vm.unprivileged_userfaultfd=1'"
    )]
    NotPermitted(#[source] io::Error),
    /// The kernel does not have it.
    #[error(
        "this kernel has no userfaultfd, which postcopy needs (CONFIG_USERFAULTFD); use \
         memory_mode=precopy"
    )]
    NotThere(#[source] io::Error),
    /// The kernel is too old for a kind of memory.
    #[error(
        "this kernel's userfaultfd lacks features that postcopy needs for this memory (minor \
         faults on shared memory are there since Linux 5.14); use memory_mode=precopy"
    )]
    Features(#[source] io::Error),
    /// Host pages that are too large.
    #[error(
        "region {name} is backed by pages of {page_bytes} bytes: postcopy with userfaultfd would \
         stop the guest for the transfer of each; use pages of at most 2 MiB or memory_mode=precopy"
    )]
    PageSize {
        /// The region.
        name: String,
        /// Its page size.
        page_bytes: u64,
    },
    /// A region without a second mapping.
    #[error(
        "vCPUs have no mapping of their own of memory region {name}, which fault_source=sigbus \
         needs; give the VM shared memory (shared=on or hugepages=on), or use fault_source=uffd"
    )]
    NoVcpuMapping {
        /// The region.
        name: String,
    },
    /// An operation on pages failed.
    #[error("userfaultfd cannot {what} {pages} pages at page {first} of memory region {region}")]
    Pages {
        /// The operation.
        what: &'static str,
        /// Region index.
        region: usize,
        /// First page.
        first: u64,
        /// Number of pages.
        pages: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// vCPUs that wait for pages could not be woken.
    #[error("no eventfd can be opened for a vCPU that waits for its pages")]
    Bell(#[source] io::Error),
    /// Reading faults failed.
    #[error("userfaultfd cannot report faults")]
    Events(#[source] io::Error),
}

/// Result of a wait for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultWait {
    /// There are faults.
    Faults,
    /// The readers were asked to stop.
    Stopped,
}

/// Gets the pages of vCPU threads whose accesses were refused.
pub trait FaultResolver: Send + Sync {
    /// Requests a page that the calling thread needs, unless it is requested already, and returns when it is
    /// here, or as soon as the vCPU's bell rings: the caller then handles the reason, and calls again if it
    /// still needs the page. `vcpu` is the number of the calling thread's vCPU.
    ///
    /// # Errors
    /// When the page cannot be made visible; the source has been told why.
    fn resolve(&self, vcpu: usize, fault: Fault) -> Result<(), FaultError>;
}

/// The error for a page that could not be made visible to the thread that needs it; the migration reports
/// the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a missing page cannot be made resident")]
pub struct FaultError;

/// Refuses vCPUs access to missing pages, in addition to a watch on their mapping or instead of it.
pub trait VcpuBarrier: Send + Sync {
    /// Stops refusing a run, whose pages are here and visible.
    fn unblock(&self, run: PageRun);

    /// Stops refusing pages altogether: every page of all regions is here. Takes effect at once and for all
    /// of memory, without a system call; [`remove`](Self::remove) follows, which may take long and may fail.
    fn open(&self);

    /// Removes the barrier of a region. vCPUs are not refused anything there any more, whether this succeeds
    /// or not.
    ///
    /// # Errors
    /// What the host reports; the barrier stays, open.
    fn remove(&self, region: usize) -> io::Result<()>;
}

/// Watches guest memory: an access to a missing page waits until the page is made present.
///
/// All methods may be called from several threads. Making a page present wakes the threads that wait for it;
/// doing so twice, or for a page that is present already, is harmless. Dropping the source lets
/// every waiter continue with whatever its page then holds: drop it only after
/// [`release`](Self::release), or when the guest is gone.
pub trait FaultSource: Send + Sync {
    /// The mechanism.
    fn kind(&self) -> FaultSourceKind;

    /// Number of independent queues of faults, each read by its own thread.
    fn readers(&self) -> usize;

    /// The bells of the vCPUs whose accesses are refused instead of waiting, and whose threads resolve their own
    /// faults; by number, where there is a vCPU of that number.
    fn bells(&self) -> &[Option<Arc<Bell>>] {
        &[]
    }

    /// Sets the resolver that those threads use from now on, for as long as it exists.
    fn set_resolver(&self, resolver: Weak<dyn FaultResolver>) {
        let _ = resolver;
    }

    /// Waits for faults of one queue and appends those that one read returns.
    ///
    /// # Errors
    /// What the host reports.
    fn next_faults(&self, reader: usize, faults: &mut Vec<Fault>) -> Result<FaultWait, UffdError>;

    /// Makes every [`next_faults`](Self::next_faults) return [`FaultWait::Stopped`], permanently, and ends
    /// every wait for host memory with an error.
    fn stop_readers(&self);

    /// True when pages are received in place (through the alias) and then made visible with
    /// [`make_present`](Self::make_present); otherwise [`copy_in`](Self::copy_in) is used. Must be true for
    /// shared memory of large host pages, which are assembled from pieces.
    fn receives_in_place(&self, region: usize) -> bool;

    /// True when [`copy_in`](Self::copy_in) also works for a region that is received in place, and is faster
    /// for a few pages.
    fn prefers_copies_of_small_runs(&self, region: usize) -> bool {
        let _ = region;
        false
    }

    /// True for regions all of whose pages are in the host's memory, whether their contents are here or not: a page is
    /// missing by not being mapped, and nothing of it is discarded.
    fn holds_all_pages(&self, region: usize) -> bool {
        let _ = region;
        false
    }

    /// Makes pages visible whose contents are here, although no thread is known to wait for them: fewer threads will.
    /// Best effort; takes no memory.
    fn show_more(&self, run: PageRun) {
        let _ = run;
    }

    /// Makes pages visible to the guest whose contents are complete in the alias. Whole host pages only.
    ///
    /// # Errors
    /// What the host reports.
    fn make_present(&self, run: PageRun) -> Result<(), UffdError>;

    /// Copies contents in, atomically for the guest. Whole host pages only; `bytes` is as long as the run.
    /// Waits while the host has no memory, and so does the guest.
    ///
    /// # Errors
    /// What the host reports.
    fn copy_in(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError>;

    /// The same for one host page, without waiting for memory of the host: a thread that does not get it has to be
    /// able to do something else.
    ///
    /// # Errors
    /// As [`copy_in`](Self::copy_in), and ENOMEM if it would wait; nothing has changed then.
    fn copy_in_now(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        self.copy_in(run, bytes)
    }

    /// Makes pages without contents present as zeros. Whole host pages only. A page that has contents keeps
    /// them and becomes visible with them.
    ///
    /// # Errors
    /// What the host reports.
    fn make_zero(&self, run: PageRun) -> Result<(), UffdError>;

    /// Wakes the waiters of a run to repeat their accesses.
    ///
    /// # Errors
    /// What the host reports.
    fn wake(&self, run: PageRun) -> Result<(), UffdError>;

    /// Stops watching all memory and wakes every waiter: memory is complete, or about to be dropped.
    ///
    /// # Errors
    /// What the host reports for the first part of memory that stays watched. As many of the other parts as
    /// possible are released; call again for the rest.
    fn release(&self) -> Result<(), UffdError>;
}
