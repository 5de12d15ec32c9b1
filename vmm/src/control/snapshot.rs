// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Snapshot and restore: their threads, and the results.
//!
//! Owns the machine while it is saved, on a separate thread, so that the VMM thread answers other
//! requests meanwhile; and, after an on-demand restore, the thread that waits for the last page.
//! If a page cannot be brought in, that thread ends the process: a vCPU or a device waits for
//! contents that are lost, and any other way to end the wait would show it zeros.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use memory::GuestRam;
use vm_migration::Cancel;
use vm_migration::snapshot::{FillEnd, Filling};

use super::inbox::Message;
use super::pausing::TransitionKind;
use super::starting::{EndRequest, refuse, start_cancelled};
use super::threads::{LastWord, spawn_with};
use super::{GuestPages, Next, RunError, VmLifecycle, Vmm, describe, emit, failed};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, VmInfo};
use crate::config::{RestoreConfig, SnapshotFormat, VmConfig, VmSnapshotConfig};
use crate::events;
use crate::machine::Machine;
use crate::migration::memory::MigratingRam;
use crate::migration::snapshot::{self, Restored, prefault_ram};
use crate::panicking;
use crate::sandbox::PathRule;

/// Exit code of a process whose guest has lost its memory.
const MEMORY_LOST: i32 = 1;

/// What a machine is away for, with the description of the VM where there is one.
pub enum Work {
    /// It is made from a snapshot.
    Restore,
    /// A snapshot is written.
    Snapshot(Box<VmInfo>),
    /// Its memory is dumped for debuggers.
    CoreDump(Box<VmInfo>),
}

/// A snapshot, core dump or restore in progress.
pub struct Busy {
    /// What is in progress.
    pub work: Work,
    /// Whether the command line asked for it.
    pub at_launch: bool,
    /// When the process ends although the restore is not complete: there is no guest yet that could lose
    /// data.
    pub until: Option<Instant>,
    cancel: Cancel,
    /// Requests to end the VM that cancelled a restore.
    end_requests: Vec<EndRequest>,
    /// Requests that cancelled a snapshot.
    cancellers: Vec<Responder>,
}

impl Work {
    /// The event of its begin.
    fn begin_event(&self) -> &'static str {
        match self {
            Self::CoreDump(_) => "coredumping",
            Self::Snapshot(_) => "snapshotting",
            Self::Restore => "restoring",
        }
    }

    /// The events of its end: that it is done, and that it has failed.
    fn end_events(&self) -> [&'static str; 2] {
        match self {
            Self::CoreDump(_) => ["coredumped", "coredump-failed"],
            Self::Snapshot(_) | Self::Restore => ["snapshotted", "snapshot-failed"],
        }
    }
}

impl Busy {
    pub(super) fn new(work: Work, cancel: Cancel) -> Self {
        let (end_requests, cancellers) = (Vec::new(), Vec::new());
        Self { work, at_launch: false, until: None, cancel, end_requests, cancellers }
    }

    /// The operation in progress, as text.
    pub fn name(&self) -> &'static str {
        match self.work {
            Work::Restore => "restored",
            Work::Snapshot(_) => "saved",
            Work::CoreDump(_) => "dumped",
        }
    }

    /// Whether there is no machine yet.
    pub fn is_restore(&self) -> bool {
        matches!(self.work, Work::Restore)
    }

    /// Whether memory is dumped for debuggers.
    pub fn is_core_dump(&self) -> bool {
        matches!(self.work, Work::CoreDump(_))
    }

    /// Cancels the operation; its result arrives in the inbox.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Cancels the operation for a request, which is answered at the end.
    pub fn end_for(&mut self, end_request: EndRequest) {
        self.cancel();
        self.end_requests.push(end_request);
    }
}

/// The end of a snapshot or core dump.
pub struct SaveEnd {
    machine: Box<Machine>,
    result: Result<(), ApiError>,
    responder: Responder,
}

/// The end of a restore.
pub struct RestoreEnd {
    restored: Result<Restored, ApiError>,
    resume: bool,
    prefault: bool,
    responder: Option<Responder>,
    last: LastWord,
}

/// The on-demand restore of the live machine's memory.
pub struct MemoryFill {
    stop: Cancel,
    thread: JoinHandle<()>,
}

impl MemoryFill {
    /// Ends the transfer; the guest must have ended.
    pub fn stop(self) {
        self.stop.cancel();
        let _ = self.thread.join();
    }
}

fn save(
    machine: &Machine,
    directory: &Path,
    format: SnapshotFormat,
    cancel: &Cancel,
) -> Result<(), ApiError> {
    let report = snapshot::take(machine, directory, format, cancel);
    let report = report.map_err(|error| failed(&error))?;
    log::info!(
        "saved to {}: {} of {} MiB in {} ms{}",
        directory.display(),
        report.data_bytes >> 20,
        report.memory_bytes >> 20,
        report.took.as_millis(),
        if report.direct { "" } else { ", through the page cache" }
    );
    Ok(())
}

impl Vmm {
    /// Starts the snapshot of the paused VM; answered when it is complete.
    pub(super) fn snapshot(&mut self, config: &VmSnapshotConfig, responder: Responder) {
        if let Err((error, responder)) = self.try_snapshot(config, responder) {
            events::emit("vm", "snapshot-failed", &[("error", &error.to_string())]);
            responder.answer(Err(error));
        }
    }

    fn try_snapshot(
        &mut self,
        config: &VmSnapshotConfig,
        responder: Responder,
    ) -> Result<(), (ApiError, Responder)> {
        let prepared = config
            .directory()
            .map_err(|error| ApiError::from_error(ApiErrorKind::BadConfig, &error))
            .and_then(|directory| {
                self.refuse_while_memory_arrives("saved")?;
                self.refuse_unmovable()?;
                let short_enough = self.machine_mut()?.check_state_len();
                short_enough.map_err(|e| ApiError::from_error(ApiErrorKind::Conflict, &e))?;
                if !self.machine_mut()?.is_paused() {
                    let why = "the VM runs; pause it before it is saved";
                    return Err(ApiError::new(ApiErrorKind::NotBooted, why));
                }
                Ok((directory, Cancel::new().map_err(|error| failed(&error))?))
            });
        let (directory, cancel) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err((error, responder)),
        };
        let (own_cancel, format) = (cancel.clone(), config.format);
        let job = move |machine: &Machine| save(machine, &directory, format, &own_cancel);
        self.lend(Work::Snapshot, cancel, responder, job)
    }

    /// Lends the live machine to a thread for a job, whose result arrives in the inbox.
    ///
    /// # Errors
    /// There is no live machine, or no thread; the responder comes back.
    pub(super) fn lend(
        &mut self,
        work: fn(Box<VmInfo>) -> Work,
        cancel: Cancel,
        responder: Responder,
        job: impl FnOnce(&Machine) -> Result<(), ApiError> + Send + 'static,
    ) -> Result<(), (ApiError, Responder)> {
        let machine = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Live(machine) => machine,
            other => {
                self.vm = other;
                return Err((self.vm.why_not_live(), responder));
            }
        };
        let work = work(Box::new(describe::of_machine(&machine)));
        emit(work.begin_event());
        let inbox_sender = self.inbox_sender.clone();
        let thread = spawn_with("snapshot", (machine, responder), move |(machine, responder)| {
            let result = job(&machine);
            inbox_sender.send(Message::Saved(Box::new(SaveEnd { machine, result, responder })));
        });
        match thread {
            Ok(_detached) => {
                self.vm = VmLifecycle::Busy(Busy::new(work, cancel));
                Ok(())
            }
            Err(((machine, responder), error)) => {
                self.vm = VmLifecycle::Live(machine);
                Err((failed(&error), responder))
            }
        }
    }

    pub(super) fn saved(&mut self, end: SaveEnd) {
        let SaveEnd { machine, result, responder } = end;
        let (cancellers, [done, has_failed]) =
            match std::mem::replace(&mut self.vm, VmLifecycle::Live(machine)) {
                VmLifecycle::Busy(busy) => (busy.cancellers, busy.work.end_events()),
                _ => (Vec::new(), ["snapshotted", "snapshot-failed"]),
            };
        for canceller in cancellers {
            canceller.answer(match &result {
                Ok(()) => Err(too_late()),
                Err(_) => Ok(ApiReply::Empty),
            });
        }
        match &result {
            Ok(()) => emit(done),
            Err(error) => {
                log::error!("{error}");
                events::emit("vm", has_failed, &[("error", &error.to_string())]);
            }
        }
        responder.answer(result.map(|()| ApiReply::Empty));
    }

    /// Cancels the snapshot or core dump being written.
    pub(super) fn cancel_snapshot(&mut self, responder: Responder) {
        match &mut self.vm {
            VmLifecycle::Busy(busy) if !busy.is_restore() => {
                busy.cancel();
                busy.cancellers.push(responder);
            }
            _ => responder.answer(Err(no_snapshot())),
        }
    }

    fn refuse_restore(&self) -> Result<(), ApiError> {
        if matches!(self.vm, VmLifecycle::None) {
            return self.refuse_a_vm_at_the_end();
        }
        let why = "there is a VM already; a VM can only be restored without one";
        Err(ApiError::new(ApiErrorKind::AlreadyCreated, why))
    }

    /// Starts to restore a VM; answered when it is complete. Without a responder it is the restore of the
    /// command line.
    pub(super) fn restore_for(
        &mut self,
        config: RestoreConfig,
        responder: Option<Responder>,
    ) -> Next {
        let cancel =
            self.refuse_restore().and_then(|()| Cancel::new().map_err(|error| failed(&error)));
        let cancel = match cancel {
            Ok(cancel) => cancel,
            Err(error) => return refuse(responder, error, RunError::Restore),
        };
        emit("restoring");
        self.prefault_stage2 = config.prefault_stage2;
        let at_launch = responder.is_none();
        let (host, sink) = (Arc::clone(&self.host), self.new_sink());
        let (inbox_sender, own_cancel) = (self.inbox_sender.clone(), cancel.clone());
        let confiner = self.confiner();
        let thread = spawn_with("restore", responder, move |responder| {
            let read = config.directory().ok().map(PathRule::read);
            let confiner = confiner.with(read);
            let confine = |config: &VmConfig| confiner.confine(config);
            let restored = snapshot::restore(&config, &host, sink, &own_cancel, &confine);
            inbox_sender.send(Message::Restored(Box::new(RestoreEnd {
                restored: restored.map_err(|error| failed(&error)),
                resume: config.resume,
                prefault: config.prefault,
                responder,
                last: LastWord::of_this_thread(),
            })));
        });
        match thread {
            Ok(_detached) => {
                self.pending_exit = None;
                self.vm = VmLifecycle::Busy(Busy { at_launch, ..Busy::new(Work::Restore, cancel) });
                Next::Continue
            }
            Err((responder, error)) => {
                let error = failed(&error);
                report_failed_restore(&error);
                refuse(responder, error, RunError::Restore)
            }
        }
    }

    pub(super) fn restored(&mut self, end: RestoreEnd) -> Next {
        let RestoreEnd { restored, resume, prefault, responder, last } = end;
        // Who has asked may look at the threads once it is answered.
        if responder.is_some() {
            last.wait();
        }
        let end_requests = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Busy(busy) => busy.end_requests,
            _ => Vec::new(),
        };
        // A process or VM that is ending does not start a guest.
        let is_cancelled = !end_requests.is_empty();
        let is_ending = is_cancelled || self.ending.is_some();
        match (self.finish_restore(restored, prefault), responder) {
            (_, Some(responder)) if is_cancelled => responder.answer(Err(start_cancelled())),
            (Ok(()), responder) if resume && !is_ending => {
                emit("resuming");
                self.begin_transition(TransitionKind::StartRestored, responder);
            }
            (result, Some(responder)) => responder.answer(result.map(|()| ApiReply::Empty)),
            (Err(error), None) if !is_ending => return Next::Fail(RunError::Restore(error)),
            (_, None) => {}
        }
        let is_there = matches!(self.vm, VmLifecycle::Live(_));
        let mut next = Next::Continue;
        for end_request in end_requests {
            if is_there {
                next = next.and_then(|| self.end_for(end_request));
            } else {
                // The VM does not exist, as requested.
                end_request.answer();
            }
        }
        next.and_then(|| self.go_on_ending())
    }

    /// Makes a restored machine the live one.
    fn finish_restore(
        &mut self,
        restored: Result<Restored, ApiError>,
        prefault: bool,
    ) -> Result<(), ApiError> {
        let result = restored.and_then(|restored| {
            let Restored { machine, filling } = restored;
            let fill = match filling {
                Some(filling) => Some(self.watch(filling, machine.ram(), prefault)?),
                None => None,
            };
            self.vm = VmLifecycle::Live(machine);
            self.filling = fill;
            if self.filling.is_none() {
                self.memory_has_come();
            }
            emit("restored");
            Ok(())
        });
        result.inspect_err(report_failed_restore)
    }

    fn watch(
        &self,
        filling: Filling<MigratingRam>,
        ram: &Arc<GuestRam>,
        prefault: bool,
    ) -> Result<MemoryFill, ApiError> {
        let stop = filling.stop_handle();
        let own_stop = stop.clone();
        let (ram, inbox_sender, number) =
            (Arc::clone(ram), self.inbox_sender.clone(), self.machine_number);
        let thread = spawn_with("restore-wait", filling, move |filling| {
            if wait_for_memory(filling, &ram, prefault, &own_stop) {
                inbox_sender.send(Message::MemoryComplete(number));
            }
        });
        let thread = thread.map_err(|(_, error)| failed(&error))?;
        Ok(MemoryFill { stop, thread })
    }

    /// Handles that all memory of a restored machine is resident.
    pub(super) fn memory_complete(&mut self, number: u64) {
        if number == self.machine_number
            && let Some(fill) = self.filling.take()
        {
            fill.stop();
            if matches!(self.vm, VmLifecycle::Live(_)) {
                self.memory_has_come();
            } else {
                self.memory_came = true;
            }
            emit("restore-memory-completed");
        }
    }

    /// Refuses an operation that needs all memory to be resident.
    pub(super) fn refuse_while_memory_arrives(&self, what: &str) -> Result<(), ApiError> {
        if matches!(self.pages, GuestPages::Arriving { .. }) || self.filling.is_some() {
            let why = format!("memory of the VM is still arriving; it can be {what} afterwards");
            return Err(ApiError::new(ApiErrorKind::Conflict, why));
        }
        if let GuestPages::Lost(paused) = &self.pages {
            return Err(ApiError::from_error(ApiErrorKind::Conflict, &paused.error)
                .context(format!("pages of the VM are lost, so it cannot be {what}")));
        }
        Ok(())
    }
}

fn too_late() -> ApiError {
    let why = "all was written before it could be cancelled";
    ApiError::new(ApiErrorKind::Conflict, why)
}

fn no_snapshot() -> ApiError {
    let why = "no snapshot or core dump is being written here that could be cancelled";
    ApiError::new(ApiErrorKind::NotCreated, why)
}

/// Reports that a VM could not be restored, or not be started afterwards.
pub(super) fn report_failed_restore(error: &ApiError) {
    log::error!("{error}");
    events::emit("vm", "restore-failed", &[("error", &error.to_string())]);
}

/// Waits for the last page; true when all memory is resident.
fn wait_for_memory(
    filling: Filling<MigratingRam>,
    ram: &GuestRam,
    prefault: bool,
    stop: &Cancel,
) -> bool {
    match filling.wait() {
        Ok(FillEnd::Complete(report)) => {
            let latency = report.faults.latency_us;
            let (p50, p99) = latency.map_or((0, 0), |latency| (latency.p50, latency.p99));
            log::info!(
                "all memory is here: {} MiB in {} ms, {} faults (median {} us, p99 {} us)",
                report.data_bytes >> 20,
                report.took.as_millis(),
                report.faults.seen.unwrap_or(0),
                p50,
                p99
            );
            if let Err(error) = prefault_ram(ram, prefault, stop) {
                log::warn!("{}", failed(&error));
            }
            true
        }
        Ok(FillEnd::Cancelled) => false,
        Err(stuck) => {
            let error = failed(&stuck.error)
                .context("memory of the VM cannot be restored; the VM is ended")
                .to_string();
            log::error!("{error}");
            events::emit("vm", "restore-failed", &[("error", &error)]);
            events::flush();
            log::logger().flush();
            panicking::put_back_at_end();
            // Blocked threads are not released: none may see a page without its contents.
            std::process::exit(MEMORY_LOST);
        }
    }
}
