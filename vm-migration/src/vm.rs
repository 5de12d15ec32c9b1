// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Traits that the VMM implements to migrate its machines.
//!
//! Owns the traits and the contract between the migration and the machine. The type that is owned shows
//! the phase: a [`SourceVm`] can run the guest, a [`PausedVm`] can be resumed or handed over, and what
//! is left after the handover ([`PausedVm::Remains`]) has no way to run it. Nothing here may know
//! what a machine consists of.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::commit::destination::InDoubt;
use crate::fault::FaultSource;
use crate::page_server::PageServerHandle;
use crate::protocol::formats::Formats;
use crate::ram::GuestMemoryMap;

pub use crate::error::VmError;

/// The longest state of a machine, in bytes: no destination takes more, and no snapshot holds more. A
/// machine that may have more refuses to be moved before its guest stops.
pub use crate::protocol::codec::STATE_BYTES_MAX;

/// [`SourceVm::switch_over_time`] of a machine that does not know.
pub const SWITCH_OVER_DEFAULT: Duration = Duration::from_millis(5);

/// The dirty log: pages that a vCPU, a device or a vhost-user process wrote.
///
/// Tracking runs from [`SourceVm::start_dirty_log`] until the value is dropped. At the start every
/// page may be reported dirty (KVM's initially-set mode) or none.
pub trait DirtyLog: Send + Sync {
    /// Takes note of what is dirty now, in addition to what was noted and not collected yet, and
    /// returns the number of noted pages. Called at the beginning of each round, with the guest
    /// running or (the last time) stopped together with all its devices.
    ///
    /// # Errors
    /// What the host reports.
    fn begin_round(&self) -> Result<u64, VmError>;

    /// Returns the dirty bits of `pages` that the last [`begin_round`](Self::begin_round) noted,
    /// clears them and re-arms tracking **before it returns**, so that a later write is reported
    /// by a later round. It may report more. `pages.start` is a multiple of 64; bit `i` of word
    /// `w` is page `pages.start + 64 * w + i`; `words` holds just enough words and is overwritten.
    ///
    /// # Errors
    /// What the host reports.
    fn collect_and_clear(
        &self,
        region: usize,
        pages: Range<u64>,
        words: &mut [u64],
    ) -> Result<(), VmError>;
}

/// Keeps vCPUs out of the guest for a share of the time. Dropping it lets them run freely.
pub trait Throttle: Send {
    /// Sets the share, 0 to 99 percent of wall time. Takes effect within some milliseconds; the
    /// guest is never stopped for longer than a tenth of a second at a time.
    fn set(&mut self, percent: u8);
}

/// Pages that the guest says it does not use. Dropping it lets the guest use them again.
///
/// What a page held when the guest was asked is not needed any more. The guest may use it again at
/// any time: a page that was written since then is not free, and the dirty log has it.
pub trait FreePageHints: Send + Sync {
    /// Waits until the guest has told all, at most for `limit`; true if it has.
    fn wait(&self, limit: Duration) -> bool;

    /// A number that grows whenever the guest names pages.
    fn named(&self) -> u64;

    /// The free pages among `pages`, as far as they are known: bit `i` of word `w` is page
    /// `pages.start + 64 * w + i`. `pages.start` is a multiple of 64; `words` holds just enough
    /// words and is overwritten.
    fn free_words(&self, region: usize, pages: Range<u64>, words: &mut [u64]);
}

/// A machine on the source that may run.
pub trait SourceVm: Sized + Send {
    /// Its memory.
    type Memory: GuestMemoryMap;
    /// Its dirty log.
    type Log: DirtyLog;
    /// The machine when it does not run.
    type Paused: PausedVm<Running = Self>;

    /// The configuration from which the destination builds the same machine.
    ///
    /// # Errors
    /// When this machine cannot move; say which device and why.
    fn config_json(&mut self) -> Result<Vec<u8>, VmError>;

    /// What its configuration and its state need at least of a destination, as far as it can be known
    /// while the guest runs.
    fn formats(&self) -> Formats {
        Formats::default()
    }

    /// The newest versions that the destination reads, none below [`formats`](Self::formats). Said once,
    /// before the configuration is asked for; what is written later keeps to them.
    fn meet(&mut self, _newest: Formats) {}

    /// Its memory. It stays mapped as long as a reference is held, also after the handover.
    fn memory(&self) -> Arc<Self::Memory>;

    /// Starts to record writes. The log stops when it is dropped.
    ///
    /// # Errors
    /// When the host cannot.
    fn start_dirty_log(&mut self) -> Result<Self::Log, VmError>;

    /// A means to slow its vCPUs down while memory is copied, if there is one.
    fn throttle(&self) -> Option<Box<dyn Throttle>> {
        None
    }

    /// Asks the guest which pages it does not use, if it is one that can tell. Called when the dirty
    /// bits of all memory have been cleared: see [`FreePageHints`].
    fn free_page_hints(&self) -> Option<Box<dyn FreePageHints>> {
        None
    }

    /// Whether [`free_page_hints`](Self::free_page_hints) may have an answer.
    fn may_give_hints(&self) -> bool {
        false
    }

    /// Starts what is to send the pages that are left when the guest has gone (postcopy), if this
    /// process is not to do so itself. Called once, before any memory is sent.
    ///
    /// # Errors
    /// Why there is none; the migration then fails and the guest continues.
    fn page_server(&mut self) -> Result<Option<Box<dyn PageServerHandle>>, VmError> {
        Ok(None)
    }

    /// How long the guest is stopped whatever is left of its memory: pause, disks written back,
    /// saving the state, putting it in at a destination of the same kind, starting. An estimate,
    /// rather too long; asked for before each decision about the stop.
    fn switch_over_time(&self) -> Duration {
        SWITCH_OVER_DEFAULT
    }

    /// Does what would keep the guest standing still for long, as far as it can be done while it
    /// runs: has its disks written back. Called right before the stop, again if the guest runs on
    /// after it, and may take long; returns soon when `is_cancelled` says so.
    ///
    /// # Errors
    /// Naming what would keep the guest from being moved.
    fn prepare_stop(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        let _ = is_cancelled;
        Ok(())
    }

    /// Stops the vCPUs and then everything else that writes guest memory, finished requests
    /// included. After it nothing writes. What was written to disks is put on stable storage before
    /// [`PausedVm::state_json`] returns: the destination reads them. A machine that was paused before stays so.
    ///
    /// # Errors
    /// The running machine comes back with the reason.
    fn pause(self) -> Result<Self::Paused, (Self, VmError)>;
}

/// A machine on the source that does not run.
pub trait PausedVm: Sized + Send {
    /// The machine when it runs.
    type Running;
    /// What is left after the guest went: memory and threads to end, and no way to run it.
    type Remains: Send;

    /// True when the guest ran before the migration paused it, so the destination starts it.
    fn ran_before(&self) -> bool;

    /// State of all devices and vCPUs.
    ///
    /// # Errors
    /// Naming the device or vCPU.
    fn state_json(&mut self) -> Result<Vec<u8>, VmError>;

    /// Releases what only one side may hold: disk locks, taps. Called once, right before the
    /// destination takes them. [`resume`](Self::resume) takes them back.
    ///
    /// # Errors
    /// Naming the resource; the migration then fails and the guest resumes.
    fn release_exclusive(&mut self) -> Result<(), VmError>;

    /// Ends the pause after a failure, exclusive resources taken back first. A machine that was
    /// paused by its user stays paused and counts as resumed.
    ///
    /// # Errors
    /// The paused machine comes back with the reason.
    fn resume(self) -> Result<Self::Running, (Self, VmError)>;

    /// The destination owns the guest now. Cannot fail: there is no way back.
    fn handed_over(self) -> Self::Remains;
}

/// Memory of the guest that the source has handed over as a file, on one host.
#[derive(Debug)]
pub struct GivenMemory {
    /// The zone of which it is.
    pub name: String,
    /// Its pages. It comes from a peer: size, kind and seals are to be checked before use.
    pub file: File,
}

/// What builds the machine on the destination.
pub trait DestinationBuilder: Send {
    /// The machine that it builds.
    type Vm: DestinationVm;
    /// The machine when it has memory and nothing else yet.
    type Mapped: MappedMachine<Vm = Self::Vm>;

    /// The newest versions of configuration and state that it reads.
    fn formats(&self) -> Formats {
        Formats::default()
    }

    /// Maps the machine's memory, populating nothing. The source waits for this before it sends
    /// memory, so whatever else there is to do belongs to [`MappedMachine::build`]. With `given`
    /// (a migration with `local=on`) the zones named there consist of these files.
    ///
    /// # Errors
    /// Say what is missing here; the text is shown at the source.
    fn map_memory(
        self,
        config_json: &[u8],
        given: Vec<GivenMemory>,
    ) -> Result<Self::Mapped, VmError>;
}

/// A machine on the destination that has its memory. Dropping it frees everything.
pub trait MappedMachine: Send + 'static {
    /// The machine that it becomes.
    type Vm: DestinationVm;

    /// Its memory. It stays mapped as long as a reference is held.
    fn memory(&self) -> Arc<<Self::Vm as DestinationVm>::Memory>;

    /// Builds the rest: vCPUs created, back ends opened as far as that is possible while the
    /// source still holds them. Runs on a thread of its own while memory arrives, so it must not
    /// touch guest memory. A machine that is built too long after the end of its migration is dropped
    /// on that thread.
    ///
    /// # Errors
    /// Say what is missing here; the text is shown at the source.
    fn build(self) -> Result<Self::Vm, VmError>;
}

/// A machine on the destination that has not run yet. Dropping it frees everything.
pub trait DestinationVm: Sized + Send + 'static {
    /// Its memory.
    type Memory: GuestMemoryMap;
    /// The machine when it runs (or is paused by its user, when it was so at the source).
    type Running: Send;

    /// A way to catch accesses to missing pages that is better than userfaultfd, if there is one.
    ///
    /// # Errors
    /// When one is there and cannot be set up.
    fn fault_source(&mut self) -> Result<Option<Arc<dyn FaultSource>>, VmError> {
        Ok(None)
    }

    /// Puts device and vCPU state in. With postcopy, memory that this touches arrives on demand.
    /// Everything that can fail belongs here rather than in [`run`](Self::run).
    ///
    /// # Errors
    /// Naming the device or vCPU; the guest then resumes on the source.
    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError>;

    /// Which side has the guest is in doubt: the machine stays as it is until that is known. Called
    /// when the doubt begins, and again (`lasts`) when the source can act on the acknowledgement no
    /// more and has not been heard.
    fn in_doubt(&mut self, doubt: InDoubt, lasts: bool) {
        let _ = (doubt, lasts);
    }

    /// Takes exclusive resources (disk locks, taps), which the source has released, and runs the
    /// guest, or leaves it paused with `resume` false. The source cannot run it any more.
    ///
    /// # Errors
    /// The machine comes back with the reason, so that the operator may try again.
    fn run(self, resume: bool) -> Result<Self::Running, (Self, VmError)>;
}
