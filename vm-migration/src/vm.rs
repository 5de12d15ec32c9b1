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

use crate::borders::Borders;
use crate::commit::destination::InDoubt;
use crate::fault::FaultSource;
use crate::options::MemoryMode;
use crate::page_server::PageServerHandle;
use crate::protocol::formats::Formats;
use crate::ram::GuestMemoryMap;

pub use crate::error::VmError;
pub use crate::protocol::blobs::{BLOB_BYTES_MAX, BlobInfo};
pub use crate::protocol::check::CheckFindings;

/// Longest machine state in bytes: no destination and no snapshot takes more. A machine whose state may be
/// longer refuses to be moved before its guest stops.
pub use crate::protocol::codec::STATE_BYTES_MAX;

/// Default of [`SourceVm::switch_over_time`].
pub const SWITCH_OVER_DEFAULT: Duration = Duration::from_millis(5);

/// The dirty log: pages that a vCPU, a device or a vhost-user process has written.
///
/// Tracking runs from [`SourceVm::start_dirty_log`] until the value is dropped. At the start every
/// page may be reported dirty (KVM's initially-set mode) or none.
pub trait DirtyLog: Send + Sync {
    /// Records the dirty pages of now, in addition to recorded ones that have not been collected, and returns
    /// the number of recorded pages. Called at the beginning of each round, with the guest running or (the
    /// last time) stopped together with all its devices.
    ///
    /// # Errors
    /// What the host reports.
    fn begin_round(&self) -> Result<u64, VmError>;

    /// The devices that may write every page until they stop, as no log has what they write: all memory is dirty
    /// then, at the last [`begin_round`](Self::begin_round). Known after each.
    fn devices_without_log(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the dirty bits of `pages` that [`begin_round`](Self::begin_round) recorded, clears them and
    /// re-arms tracking **before it returns**, so that a later write is reported by a later round. It may
    /// report more. `pages.start` is a multiple of 64; bit `i` of word `w` is page
    /// `pages.start + 64 * w + i`; `words` has exactly the words needed and is overwritten.
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

/// Keeps vCPUs out of the guest for a share of the time. Dropping it ends the throttling.
pub trait Throttle: Send {
    /// Sets the share, 0 to 99 percent of wall time. Takes effect within some milliseconds; the
    /// guest is never stopped for longer than a tenth of a second at a time.
    fn set(&mut self, percent: u8);
}

/// Pages that the guest reports as unused. Dropping this lets the guest use them again.
///
/// The contents of such a page at the time of the report are not needed any more. The guest may use it again
/// at any time: a page that was written since then is not free, and is in the dirty log.
pub trait FreePageHints: Send + Sync {
    /// Waits until the guest's report is complete, at most for `limit`; true if it is.
    fn wait(&self, limit: Duration) -> bool;

    /// A counter that increases whenever the guest reports pages.
    fn named(&self) -> u64;

    /// The free pages among `pages`, as far as they are known: bit `i` of word `w` is page
    /// `pages.start + 64 * w + i`. `pages.start` is a multiple of 64; `words` has exactly the words needed
    /// and is overwritten.
    fn free_words(&self, region: usize, pages: Range<u64>, words: &mut [u64]);
}

/// What a destination is that speaks plain version 0 alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlainPeer {
    /// An earlier version of this program.
    Own,
    /// Another program, which commits as it does: it takes exclusive resources with the state, and runs the guest before it
    /// answers the last message. It takes a range of memory only if it has none of these borders inside.
    Other(Borders),
}

/// A part of the state of a paused machine that is read as bytes. Dropping it ends the reading, at its end or before.
pub trait BlobSource: Send {
    /// Reads the next bytes, at least one; none at the end. May take as long as a device does, or without end, and is called on
    /// a thread that nothing else depends on, as is the drop: see [`PausedVm::leave_blob`].
    ///
    /// # Errors
    /// Names the device.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError>;
}

/// What takes such bytes at the destination. Its calls may take as long as a device does, or without end; those of one are on
/// one thread, that nothing else depends on.
pub trait BlobSink: Send + Sync {
    /// Makes the device take bytes. Called once, before the first of them.
    ///
    /// # Errors
    /// Names the device that cannot take that state; the text is shown at the source.
    fn begin(&self) -> Result<(), VmError> {
        Ok(())
    }

    /// Writes the next bytes. Not called by two threads at once.
    ///
    /// # Errors
    /// Names the device.
    fn write(&self, bytes: &[u8]) -> Result<(), VmError>;

    /// Leaves the device to the thread whose call does not return: from now on the machine and its end wait for neither.
    /// Returns what the device does, as a noun. Called on another thread, and must not wait.
    fn leave(&self) -> String;
}

/// A machine on the source whose guest may run.
pub trait SourceVm: Sized + Send {
    /// Type of its memory.
    type Memory: GuestMemoryMap;
    /// Type of its dirty log.
    type Log: DirtyLog;
    /// The paused machine.
    type Paused: PausedVm<Running = Self>;

    /// The configuration from which the destination builds the same machine.
    ///
    /// # Errors
    /// When this machine cannot be moved; names the device and the reason.
    fn config_json(&mut self) -> Result<Vec<u8>, VmError>;

    /// The least format versions that its configuration and state need, as far as that is known while the
    /// guest runs.
    fn formats(&self) -> Formats {
        Formats::default()
    }

    /// Sets the newest format versions that the destination reads, none below [`formats`](Self::formats).
    /// Called once, before the configuration is requested; documents that are written later keep to them.
    fn meet(&mut self, _newest: Formats) {}

    /// The destination speaks plain version 0 alone. Called once, before the configuration is requested, and in place of
    /// [`meet`](Self::meet) if it is another program; the configuration and the state are written for that one from then on.
    ///
    /// # Errors
    /// Why this machine cannot be moved there.
    fn meet_plain(&mut self) -> Result<PlainPeer, VmError> {
        Ok(PlainPeer::Own)
    }

    /// The parts of its state that are too long for the document. With `apart` they will be sent as bytes beside it, and are
    /// returned; otherwise they have to be in it. Called once, before the configuration is requested.
    ///
    /// # Errors
    /// Names what is too long to be sent like that.
    fn blobs(&mut self, apart: bool) -> Result<Vec<BlobInfo>, VmError> {
        let _ = apart;
        Ok(Vec::new())
    }

    /// How long they are together now, as far as that is known, however they are sent.
    fn blob_bytes(&self) -> u64 {
        0
    }

    /// Its memory, which stays mapped as long as a reference is held, also after the handover.
    fn memory(&self) -> Arc<Self::Memory>;

    /// Starts dirty logging, which ends when the log is dropped.
    ///
    /// # Errors
    /// When the host does not support it.
    fn start_dirty_log(&mut self) -> Result<Self::Log, VmError>;

    /// A throttle for its vCPUs while memory is copied, if there is one.
    fn throttle(&self) -> Option<Box<dyn Throttle>> {
        None
    }

    /// Requests free page hints from the guest, if it supports them. Called after the dirty bits of all
    /// memory have been cleared: see [`FreePageHints`].
    fn free_page_hints(&self) -> Option<Box<dyn FreePageHints>> {
        None
    }

    /// True when [`free_page_hints`](Self::free_page_hints) may return hints.
    fn may_give_hints(&self) -> bool {
        false
    }

    /// Starts the page server for the remaining pages of a postcopy, if this process is not to send them
    /// itself. Called once, before any memory is sent.
    ///
    /// # Errors
    /// Why it could not be started; the migration then fails and the guest continues.
    fn page_server(&mut self) -> Result<Option<Box<dyn PageServerHandle>>, VmError> {
        Ok(None)
    }

    /// Estimated downtime that does not depend on memory: pause, writing back disks, saving the state
    /// without its [`blobs`](Self::blobs), restoring it at a similar destination, and start. Rather too long; requested before each decision
    /// about the stop.
    fn switch_over_time(&self) -> Duration {
        SWITCH_OVER_DEFAULT
    }

    /// Does the work that would prolong the stop, as far as that is possible while the guest runs: writing
    /// back its disks. Called right before the stop, again if the guest continues after it, and may take
    /// long; returns soon once `is_cancelled` returns true.
    ///
    /// # Errors
    /// Names what keeps the guest from being moved.
    fn prepare_stop(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        let _ = is_cancelled;
        Ok(())
    }

    /// Stops the vCPUs and then everything else that writes guest memory, completed requests included;
    /// nothing writes it afterwards. Data written to disks is on stable storage before
    /// [`PausedVm::state_json`] returns, because the destination reads it. A machine that was paused before
    /// stays paused. May end with an error once the migration is cancelled, and has to before long.
    ///
    /// # Errors
    /// The running machine and the reason.
    fn pause(self) -> Result<Self::Paused, (Self, VmError)>;
}

/// A machine on the source whose guest is stopped.
pub trait PausedVm: Sized + Send {
    /// The running machine.
    type Running;
    /// What is left after the handover: memory and threads that are to end, but nothing that could run the
    /// guest.
    type Remains: Send;

    /// True when the guest ran before the migration paused it: the destination then starts it.
    fn ran_before(&self) -> bool;

    /// Begins to read the parts of the state that are sent beside it: those of [`SourceVm::blobs`], in order. Called once,
    /// and only if there are any.
    ///
    /// # Errors
    /// Names the device.
    fn open_blobs(&mut self) -> Result<Vec<Box<dyn BlobSource>>, VmError> {
        Ok(Vec::new())
    }

    /// Leaves the device of this part to the thread whose call does not return: from now on the machine, its guest and its end
    /// wait for neither. Returns what the device does, as a noun. Must not wait.
    fn leave_blob(&mut self, number: usize) -> String {
        let _ = number;
        "reading its state".to_owned()
    }

    /// The state of all devices and vCPUs. Parts of these lengths were sent beside it and are not in it.
    ///
    /// # Errors
    /// Names the device or vCPU.
    fn state_json(&mut self, blobs: &[u64]) -> Result<Vec<u8>, VmError>;

    /// Releases the resources that only one side may hold: disk locks, taps. Called once, right before the
    /// destination takes them. [`resume`](Self::resume) takes them again.
    ///
    /// # Errors
    /// Names the resource; the migration then fails and the guest resumes.
    fn release_exclusive(&mut self) -> Result<(), VmError>;

    /// Ends the pause after a failure, and takes the exclusive resources again first. A machine that was
    /// paused by its user stays paused and counts as resumed.
    ///
    /// # Errors
    /// The paused machine and the reason.
    fn resume(self) -> Result<Self::Running, (Self, VmError)>;

    /// Hands the guest over to the destination. Cannot fail: this cannot be undone.
    fn handed_over(self) -> Self::Remains;
}

/// Guest memory that the source on the same host has handed over as a file.
#[derive(Debug)]
pub struct GivenMemory {
    /// Name of the zone.
    pub name: String,
    /// The file with its pages. It comes from a peer: size, kind and seals must be checked before use.
    pub file: File,
}

/// What a source says of the migration that it asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskedMigration {
    /// When memory would be sent.
    pub mode: MemoryMode,
    /// Memory would be handed over as files.
    pub local: bool,
    /// Bytes of memory that would be moved.
    pub move_bytes: u64,
}

/// Finds out what an arrival would fail with, without one: nothing is allocated, changed or locked. Asked on a thread of its
/// own, with documents of a peer that is not trusted.
pub trait ArrivalCheck: Send + Sync {
    /// Everything that is lacking for a machine of this configuration.
    fn findings(&self, config_json: &[u8], asked: AskedMigration) -> CheckFindings;
}

/// Builds the machine on the destination.
pub trait DestinationBuilder: Send {
    /// The built machine.
    type Vm: DestinationVm;
    /// The machine when it has only its memory.
    type Mapped: MappedMachine<Vm = Self::Vm>;

    /// The newest format versions of configuration and state that it reads.
    fn formats(&self) -> Formats {
        Formats::default()
    }

    /// What answers checks of migrations while this builder waits for one, if anything does.
    fn check(&self) -> Option<Arc<dyn ArrivalCheck>> {
        None
    }

    /// Maps the machine's memory without populating it; it may be memory that is populated with zeros already. The
    /// source waits for this before it sends memory, so all other work belongs to [`MappedMachine::build`]. With `given`
    /// (a migration with `local=on`) the zones named there use these files. Whether memory arrives behind a running guest
    /// is up to `mode`.
    ///
    /// # Errors
    /// What is missing on this host; the text is shown at the source.
    fn map_memory(
        self,
        config_json: &[u8],
        given: Vec<GivenMemory>,
        mode: MemoryMode,
    ) -> Result<Self::Mapped, VmError>;
}

/// A machine on the destination that has its memory. Dropping it frees everything.
pub trait MappedMachine: Send + 'static {
    /// The built machine.
    type Vm: DestinationVm;

    /// Its memory, which stays mapped as long as a reference is held.
    fn memory(&self) -> Arc<<Self::Vm as DestinationVm>::Memory>;

    /// Builds the rest: creates vCPUs, and opens back ends as far as possible while the source still holds
    /// them. Runs on a thread of its own while memory arrives, so it must not touch guest memory. A machine
    /// that is built too long after the end of its migration is dropped on that thread.
    ///
    /// # Errors
    /// What is missing on this host; the text is shown at the source.
    fn build(self) -> Result<Self::Vm, VmError>;

    /// Whether it takes the state to know what the machine is made of. It is built by
    /// [`build_from_state`](Self::build_from_state) then, while the guest is stopped.
    fn is_built_from_state(&self) -> bool {
        false
    }

    /// Builds the rest as [`build`](Self::build) does, when all of memory and the state have arrived.
    /// [`DestinationVm::apply_state`] is called with an empty text afterwards.
    ///
    /// # Errors
    /// What of the state is not possible, or missing on this host.
    fn build_from_state(self, state_json: &[u8]) -> Result<Self::Vm, VmError>;
}

/// A machine on the destination that has not run yet. Dropping it frees everything.
pub trait DestinationVm: Sized + Send + 'static {
    /// Type of its memory.
    type Memory: GuestMemoryMap;
    /// The machine when the guest runs (or is paused by its user, as it was at the source).
    type Running: Send;

    /// vCPUs that may run; 0 if that is not known.
    fn vcpus(&self) -> u32 {
        0
    }

    /// A better way than userfaultfd to catch accesses to missing pages, if there is one.
    ///
    /// # Errors
    /// When there is one that cannot be set up.
    fn fault_source(&mut self) -> Result<Option<Arc<dyn FaultSource>>, VmError> {
        Ok(None)
    }

    /// Waits for what the machine needs before it takes a state and that can be done while the guest runs at
    /// the source: mapping all memory for devices. Called once, on the thread that built it, and not in
    /// postcopy; returns soon once `is_cancelled` returns true.
    ///
    /// # Errors
    /// What is not possible on this host, or that the wait was cancelled; the text is shown at the source.
    fn await_ready(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        let _ = is_cancelled;
        Ok(())
    }

    /// Returns what takes the bytes of each of these parts of the state, in order, without waiting for a device. Called at most once,
    /// when it is ready, with the guest still running at the source; [`apply_state`](Self::apply_state) follows when
    /// all of them have come.
    ///
    /// # Errors
    /// Names the device that is not here, or that cannot take that state; the text is shown at the source.
    fn open_blobs(&mut self, blobs: &[BlobInfo]) -> Result<Vec<Box<dyn BlobSink>>, VmError> {
        let _ = blobs;
        Ok(Vec::new())
    }

    /// Restores device and vCPU state. With postcopy, memory that this touches arrives on demand. Everything
    /// that can fail belongs here rather than in [`run`](Self::run).
    ///
    /// # Errors
    /// Names the device or vCPU; the guest then resumes on the source.
    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError>;

    /// Takes the exclusive resources early, for a source that has released them and learns only from the answer to its
    /// last message that the guest is here: what fails afterwards fails too late.
    ///
    /// # Errors
    /// Names what another VM holds; the guest then resumes on the source.
    fn take_exclusive(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Notes that it is in doubt which side has the guest: the machine stays as it is until that is known.
    /// Called when the doubt begins, and again (`lasts`) when the source can no longer use the
    /// acknowledgement and has not reported, or when as much time has passed with one that never reports.
    fn in_doubt(&mut self, doubt: InDoubt, lasts: bool) {
        let _ = (doubt, lasts);
    }

    /// Takes the exclusive resources (disk locks, taps), which the source has released, and runs the guest,
    /// or leaves it paused with `resume` false. The source cannot run it any more.
    ///
    /// # Errors
    /// The machine and the reason, so that the operator may try again.
    fn run(self, resume: bool) -> Result<Self::Running, (Self, VmError)>;
}
