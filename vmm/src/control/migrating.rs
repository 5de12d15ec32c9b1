// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migrations on the VMM thread: their start, their end, and answers to waiting clients.
//!
//! Owns the transitions of the VM into and out of a migration, and the time for which watchers may
//! still ask. What happens in between is on threads of its own ([`super::sending`],
//! [`super::receiving`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_migration::destination::PostcopyPaused;
use vm_migration::{Cancel, GuestLocation, Phase, Progress, ProgressDocument, Steering};

use super::receiving::{self, ReceiveContext, ReceiveEnd, ReceiveOutcome};
use super::sending::{self, SendEnd};
use super::threads::release_within;
use super::{GuestPages, HandedOverMemory, Next, VmLifecycle, Vmm, cancel, describe, observer};
use crate::api::request::Responder;
use crate::api::watchers::is_the_end;
use crate::api::{ApiError, ApiErrorKind, ApiQueue, ApiReply, ApiResult, VmmRequest};
use crate::config::{ReceiveMigrationData, SendMigrationData};
use crate::events;
use crate::machine::StoppedMemoryWork;
use crate::migration::faults::FaultPlan;
use crate::migration::memory::MigratingRam;
use crate::migration::page_server::{PageServerPlan, default_socket};
use crate::options::ExitReason;

/// Time that the process stays after a migration, from a client's last request for its progress, so that
/// the client can read the end. Long enough for a slow poll on a busy host.
pub(crate) const WATCHER_TIME: Duration = Duration::from_secs(10);

/// Time that the VMM thread waits for the remains of a migrated machine to be released: as long as for a
/// client, so that a request made meanwhile is still answered. A longer release may wait for an event that
/// never happens.
const REMAINS_TIME: Duration = Duration::from_secs(10);

/// Time that the process stays after one client has read the end for others that connect for each request: a few polls.
/// Those that keep their connections have [`WATCHER_TIME`].
const OTHER_WATCHERS_TIME: Duration = Duration::from_millis(300);

/// Time that the process stays at the most after a migration. `asked`: since the last request of a client that has not
/// read the end; `seen`: since the first one that has; `watchers`: clients that keep their connections and have not.
fn exit_delay(asked: Option<Duration>, seen: Option<Duration>, watchers: usize) -> Duration {
    match (asked, seen) {
        _ if watchers > 0 => WATCHER_TIME,
        (Some(asked), _) if asked < WATCHER_TIME => WATCHER_TIME,
        (_, Some(seen)) => OTHER_WATCHERS_TIME.saturating_sub(seen),
        _ => Duration::ZERO,
    }
}

/// When a process ends that stays until `latest`: before, once a client has read the end and no other one is connected that
/// has not.
pub(crate) fn exit_time(latest: Instant, seen: Option<Instant>, watchers: usize) -> Instant {
    match seen.and_then(|seen| seen.checked_add(OTHER_WATCHERS_TIME)) {
        Some(soon) if watchers == 0 => latest.min(soon),
        _ => latest,
    }
}

impl Vmm {
    /// Answers with the progress. If the migration has just ended and the VMM thread has not processed
    /// that, the answer waits: a client that reads the end may rely on the stated location of the guest,
    /// and send its next request at once.
    pub(super) fn progress_for(&mut self, responder: Responder) {
        if self.is_settled() {
            let answer = self.migration_progress();
            responder.answer(answer);
        } else {
            self.watched_at = Some(Instant::now());
            self.progress_askers.push(responder);
        }
    }

    /// Whether the VMM thread has processed the end of the migration, if there was one.
    fn is_settled(&self) -> bool {
        let phase = self.progress.as_ref().map(|progress| progress.phase());
        match (&self.vm, &self.pages) {
            // The progress is that of an earlier migration.
            (VmLifecycle::Migrating { sending, .. }, _) if sending.is_check => true,
            // The process of a successful source exits; requests are answered as it does.
            (VmLifecycle::Migrating { .. } | VmLifecycle::Serving(_), _) => {
                phase != Some(Phase::Failed)
            }
            (VmLifecycle::Receiving(_), _) => !matches!(phase, Some(Phase::Failed | Phase::Done)),
            (_, GuestPages::Arriving { .. }) => phase != Some(Phase::Done),
            _ => true,
        }
    }

    /// Whether an incoming migration has told its end, and the message that says so is on its way.
    pub(super) fn has_unprocessed_arrival(&self) -> bool {
        let phase = self.progress.as_ref().map(|progress| progress.phase());
        let arrives = matches!(self.vm, VmLifecycle::Receiving(_))
            || matches!(self.pages, GuestPages::Arriving { .. });
        arrives && phase == Some(Phase::Done)
    }

    /// Whether all pages of a postcopy migration are here, and the message that says so is on its way: for as long as
    /// telling the source takes, and ending its connections.
    pub(super) fn has_unprocessed_pages(&self) -> bool {
        matches!(self.pages, GuestPages::Arriving { .. })
            && self.progress.as_ref().is_some_and(|progress| progress.has_all_pages())
    }

    /// Answers the clients that asked while the end was being processed.
    pub(super) fn answer_progress_askers(&mut self) {
        for responder in std::mem::take(&mut self.progress_askers) {
            self.progress_for(responder);
        }
    }

    /// When the process ends after a migration, and why; `None` while nothing but clients would be waited for.
    pub(super) fn exit_due(&self) -> Option<(Instant, ExitReason)> {
        let (latest, reason) = self.pending_exit?;
        Some((exit_time(latest, self.end_seen_at, self.watchers.count()), reason))
    }

    /// Answers the progress requests that are still queued when the process ends.
    pub(super) fn answer_last_askers(&mut self, queue: &ApiQueue) {
        while let Some(call) = queue.take() {
            let (request, responder) = call.into_parts();
            if matches!(request, VmmRequest::MigrationProgress) {
                let answer = self.migration_progress();
                responder.answer(answer);
            }
        }
    }

    fn migration_progress(&mut self) -> ApiResult {
        // Also if there is no progress yet: a client that asks now is going to ask again.
        self.watched_at = Some(Instant::now());
        let progress = self.progress.as_ref().ok_or_else(nothing_migrated)?;
        let snapshot = progress.snapshot();
        if is_the_end(&snapshot) {
            // A client that has read the end, perhaps before the VMM thread has processed it, needs no more
            // time.
            self.watched_at = None;
            self.end_seen_at.get_or_insert_with(Instant::now);
        }
        Ok(ApiReply::Progress(Box::new(snapshot)))
    }

    /// Has watchers and scrapes see this migration from now on.
    fn follow(&mut self, progress: &Arc<Progress>) {
        self.hub.follow(progress);
        self.progress = Some(Arc::clone(progress));
    }

    pub(super) fn migration_report(&self) -> ApiResult {
        let progress = self.progress.as_ref().ok_or_else(nothing_migrated)?;
        Ok(ApiReply::Report(Box::new(progress.history())))
    }

    pub(super) fn send(&mut self, data: &SendMigrationData) -> Result<(), ApiError> {
        let vcpus = self.machine_mut()?.config().cpus.boot_vcpus;
        let mut options = data
            .options()
            .map_err(|error| ApiError::from_error(ApiErrorKind::BadRequest, &error))?;
        options.vcpus = Some(vcpus);
        options
            .load_tls()
            .map_err(|error| ApiError::from_error(ApiErrorKind::BadRequest, &error))?;
        self.refuse_while_memory_arrives("migrated")?;
        self.refuse_unmovable()?;
        if self.machine_mut()?.needs_all_pages() {
            sending::without_postcopy(&mut options)?;
        }
        let page_server = self.page_server(data)?;
        let VmLifecycle::Live(mut machine) = std::mem::replace(&mut self.vm, VmLifecycle::None)
        else {
            return Err(ApiError::not_booted());
        };
        let stopped = machine.stop_memory_work();
        let info = Box::new(describe::of_machine(&machine));
        match sending::start(machine, options, page_server, self.inbox_sender.clone()) {
            Ok(sending) => {
                events::emit("vm", "migration-starting", &[("destination", &data.destination_url)]);
                self.end_seen_at = None;
                self.follow(&sending.progress);
                self.vm = VmLifecycle::Migrating { info, sending, stopped };
                Ok(())
            }
            Err((mut machine, error)) => {
                machine.resume_memory_work(stopped);
                self.vm = VmLifecycle::Live(machine);
                Err(ApiError::from_error(ApiErrorKind::Failed, &error))
            }
        }
    }

    /// Starts the page server, if the request asks for one.
    pub(super) fn page_server(
        &mut self,
        data: &SendMigrationData,
    ) -> Result<Option<PageServerPlan>, ApiError> {
        if !data.page_server {
            return Ok(None);
        }
        let regions = self.machine_mut()?.ram().regions().iter();
        if let Some(private) = regions.clone().find(|region| region.file().is_none()) {
            return Err(ApiError::new(
                ApiErrorKind::Conflict,
                format!(
                    "a page server cannot have memory zone '{}', which is private memory; boot the \
                     VM with shared=on or hugepages=on, or leave page_server out",
                    private.zone_id()
                ),
            ));
        }
        let beside = self.api_path.as_deref().map(default_socket);
        let socket = data.page_server_socket.clone().or(beside).ok_or_else(|| {
            ApiError::new(
                ApiErrorKind::BadRequest,
                "this VMM's API socket has no path from which the page server's could be derived; name \
                 one with page_server_socket",
            )
        })?;
        Ok(Some(PageServerPlan { socket, child_logging: self.child_logging.clone() }))
    }

    pub(super) fn receive(&mut self, data: &ReceiveMigrationData, responder: Responder) {
        let error = match &self.vm {
            VmLifecycle::None => self.refuse_a_vm_at_the_end().err(),
            VmLifecycle::Receiving(_) => Some(ApiError::new(
                ApiErrorKind::Conflict,
                "a migration is awaited here already; vm.migration-cancel ends that",
            )),
            VmLifecycle::Serving(_) | VmLifecycle::HandedOver { .. } => {
                Some(self.vm.why_not_live())
            }
            _ => Some(ApiError::new(
                ApiErrorKind::AlreadyCreated,
                "there is a VM already; a migration can only be received without one",
            )),
        };
        if let Some(error) = error {
            return responder.answer(Err(error));
        }
        let faults = match FaultPlan::new(data.fault_source, data.memory_mode.0, &self.host) {
            Ok(faults) => faults,
            Err(error) => {
                let error = ApiError::from_error(ApiErrorKind::Failed, &error);
                return responder.answer(Err(error));
            }
        };
        let bound = Cancel::new()
            .map_err(|error| ApiError::from_error(ApiErrorKind::Failed, &error))
            .and_then(|cancel| {
                let target = receiving::bind(
                    &data.receiver_url,
                    data.tls_dir.as_deref(),
                    &self.late_reconnects,
                    &cancel,
                )?;
                Ok((target, cancel))
            });
        let (target, cancel) = match bound {
            Ok(bound) => bound,
            Err(error) => return responder.answer(Err(error)),
        };
        let context = ReceiveContext {
            host: Arc::clone(&self.host),
            sink: self.new_sink(),
            faults,
            fds: data.arriving_fds(),
            memory: data.memory_updates(),
            rules: data.allow.clone(),
            late_reconnects: self.late_reconnects.clone(),
            confiner: self.confiner(),
            inbox_sender: self.inbox_sender.clone(),
        };
        self.prefault_stage2 = data.prefault_stage2;
        match receiving::start(target, context, responder, cancel) {
            Ok(receiving) => {
                self.pending_exit = None;
                self.follow(&receiving.progress);
                self.vm = VmLifecycle::Receiving(receiving);
            }
            Err((responder, error)) => {
                responder.answer(Err(ApiError::from_error(ApiErrorKind::Failed, &error)));
            }
        }
    }

    /// Handles the handover: the guest belongs to the destination.
    pub(super) fn handed_over(&mut self) {
        match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Migrating { mut sending, .. } => {
                events::emit("vm", "migration-handed-over", &[]);
                cancel::refuse_all(&mut sending.cancellers, &cancel::at_destination());
                self.vm = VmLifecycle::Serving(sending);
            }
            other => self.vm = other,
        }
    }

    /// Handles the end of an outgoing migration.
    pub(super) fn send_ended(&mut self, end: SendEnd) -> Next {
        let next = self.end_send(end);
        self.answer_progress_askers();
        next
    }

    fn end_send(&mut self, end: SendEnd) -> Next {
        let (sending, stopped) = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Migrating { sending, stopped, .. } => (Some(sending), stopped),
            VmLifecycle::Serving(sending) => (Some(sending), StoppedMemoryWork::default()),
            _ => (None, StoppedMemoryWork::default()),
        };
        let (mut cancellers, deleters, mut resumers) = sending
            .map(|sending| (sending.cancellers, sending.deleters, sending.resumers))
            .unwrap_or_default();
        let is_deleted = !deleters.is_empty();
        let next = match end {
            SendEnd::Complete(remains) => {
                let last = self.progress.as_ref().map(|progress| progress.snapshot());
                report_end(last.as_ref());
                cancel::refuse_all(&mut cancellers, &cancel::at_destination());
                let age = |at: Instant| at.elapsed();
                let (asked, seen) = (self.watched_at.map(age), self.end_seen_at.map(age));
                let stay = exit_delay(asked, seen, self.watchers.count());
                // Tearing down a machine of many vCPUs and much memory takes time. Clients that ask
                // meanwhile are answered afterwards, and their time counts from then on.
                release_remains(remains);
                if stay.is_zero() {
                    Next::Exit(ExitReason::MigratedAway)
                } else {
                    self.pending_exit = Some((Instant::now() + stay, ExitReason::MigratedAway));
                    Next::Continue
                }
            }
            SendEnd::Returned(mut machine, stay) if stay.guest == GuestLocation::InDoubt => {
                machine.resume_memory_work(stopped);
                // What was asked for meanwhile was asked for without knowledge of that.
                cancellers.append(&mut resumers);
                let requests = std::mem::take(&mut cancellers);
                self.left_unanswered(machine, stay.reason, requests);
                Next::Continue
            }
            SendEnd::Returned(mut machine, stay) => {
                machine.resume_memory_work(stopped);
                if stay.is_cancelled {
                    cancel::tell("source", stay.guest);
                }
                events::emit("vm", "migration-failed", &[("error", &stay.reason)]);
                log::error!("{}", stay.reason);
                cancel::confirm_all(&mut cancellers, "source", stay.guest, &stay.reason);
                self.vm = VmLifecycle::Live(machine);
                for responder in resumers.drain(..) {
                    self.resume_live_for(responder);
                }
                self.go_on_ending()
            }
            SendEnd::Incomplete { remains, held, reason } => {
                events::emit("vm", "migration-failed", &[("error", &reason)]);
                log::error!("{reason}");
                cancel::refuse_all(&mut cancellers, &cancel::too_late(&reason));
                if is_deleted {
                    release_remains((remains, held));
                    events::emit("vm", "deleted", &[]);
                    // An earlier signal may have asked for the end.
                    self.go_on_ending()
                } else {
                    let memory = Box::new(HandedOverMemory { _remains: remains, _held: held });
                    self.vm = VmLifecycle::HandedOver { reason, _memory: memory };
                    self.stay_for_the_pages();
                    Next::Continue
                }
            }
        };
        cancel::refuse_all(&mut resumers, &cancel::at_destination());
        // The VM that they asked to delete is gone, either way.
        for responder in deleters {
            responder.answer(Ok(ApiReply::Empty));
        }
        next
    }

    /// Handles the end of an incoming migration, or the start of its guest.
    pub(super) fn receive_ended(&mut self, end: ReceiveEnd) -> Next {
        let next = self.end_receive(end);
        self.answer_progress_askers();
        next
    }

    fn end_receive(&mut self, end: ReceiveEnd) -> Next {
        let ReceiveEnd { outcome, responder } = end;
        let mut steering = Steering::new();
        let mut cancellers = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Receiving(mut receiving) => {
                let runs = match &outcome {
                    ReceiveOutcome::Runs { .. } => Some(Ok(())),
                    ReceiveOutcome::NotStarted { error, .. } => Some(Err(error.clone())),
                    ReceiveOutcome::Failed { .. } => None,
                };
                receiving.answer_decision_requests(runs.as_ref());
                steering = receiving.steering;
                receiving.cancellers
            }
            _ => Vec::new(),
        };
        let answer = |result: ApiResult| {
            if let Some(responder) = responder {
                responder.answer(result);
            }
        };
        let failed = |error: &ApiError| {
            events::emit("vm", "migration-receive-failed", &[("error", &error.to_string())]);
        };
        match outcome {
            ReceiveOutcome::Runs { machine, pages_missing } => {
                self.vm = VmLifecycle::Live(machine);
                if pages_missing {
                    self.pages = GuestPages::Arriving { steering };
                } else {
                    self.memory_has_come();
                }
                let last = self.progress.as_ref().map(|progress| progress.snapshot());
                if pages_missing {
                    observer::report_figures("migration-receive-finished", last.as_ref());
                } else {
                    observer::report_end("migration-receive-finished", last.as_ref());
                }
                cancel::refuse_all(&mut cancellers, &cancel::arrived());
                answer(self.succeed().map(|()| ApiReply::Empty));
            }
            ReceiveOutcome::NotStarted { machine, error, pages_missing } => {
                failed(&error);
                self.vm = VmLifecycle::NotStarted { machine, reason: error.to_string() };
                if pages_missing {
                    self.pages = GuestPages::Arriving { steering };
                }
                cancel::refuse_all(&mut cancellers, &self.vm.why_not_live());
                // The client that decides on the VM finds it where it was.
                let _ = self.succeed();
                answer(Err(error.context(
                    "the VM has arrived and was not started; vm.resume starts it, vm.delete gives \
                     it up",
                )));
            }
            ReceiveOutcome::Failed { error, is_cancelled, guest } => {
                if is_cancelled {
                    cancel::tell("destination", guest);
                }
                failed(&error);
                let reason = error.to_string();
                cancel::confirm_all(&mut cancellers, "destination", guest, &reason);
                answer(Err(error));
            }
        }
        match self.end_after_arrival() {
            Next::Continue => self.end_if_unneeded(),
            end => end,
        }
    }

    /// Handles the last page of an incoming postcopy migration, or its loss.
    pub(super) fn pages_complete(
        &mut self,
        result: Result<(), Box<PostcopyPaused<MigratingRam>>>,
    ) -> Next {
        let next = self.finish_page_transfer(result);
        self.answer_progress_askers();
        next
    }

    fn finish_page_transfer(
        &mut self,
        result: Result<(), Box<PostcopyPaused<MigratingRam>>>,
    ) -> Next {
        if self.is_abandoned() {
            // The threads that receive the pages end before the machine, which has never run: a device that
            // waits for a page would block its end, and the VMM thread.
            drop(result);
            self.delete_unstarted();
            return Next::Continue;
        }
        let next = match result {
            Ok(()) => {
                let last = self.progress.as_ref().map(|progress| progress.snapshot());
                observer::report_end("postcopy-migration-completed", last.as_ref());
                self.all_pages_resident();
                GuestPages::Resident
            }
            Err(paused) => {
                debug_assert_eq!(paused.error.guest, GuestLocation::PostcopyPaused);
                let reason = ApiError::from_error(ApiErrorKind::Failed, &paused.error).to_string();
                // The event was emitted by the phase in which it ended.
                log::error!("{reason}; {} pages are missing", paused.missing_pages());
                GuestPages::Lost(paused)
            }
        };
        let before = std::mem::replace(&mut self.pages, next);
        if !matches!(before, GuestPages::Arriving { .. }) {
            // The machine has ended in the meantime, and no thread waits for its pages.
            self.pages = GuestPages::Resident;
        }
        // A signal may have come after the last page and before this.
        self.go_on_ending()
    }
}

impl Vmm {
    /// Handles that all memory of the live machine is resident. If another thread owns the machine, this is
    /// done when it returns.
    pub(super) fn all_pages_resident(&mut self) {
        if matches!(self.vm, VmLifecycle::Transitioning(_)) {
            self.memory_came = true;
            return;
        }
        if let VmLifecycle::Live(machine) = &mut self.vm
            && let Err(error) = machine.restore_held_msrs()
        {
            let reason = ApiError::from_error(ApiErrorKind::Failed, &error);
            log::error!("the guest continues without asynchronous page faults: {reason}");
        }
        self.memory_has_come();
    }
}

/// Releases the remains of a migrated machine on a thread.
fn release_remains<T: Send + 'static>(remains: T) {
    release_within("vm-delete", "what is left of the VM", remains, REMAINS_TIME);
}

/// Emits the event of a VM that has moved, with the page server that holds its last pages.
fn report_end(last: Option<&ProgressDocument>) {
    let server = last.filter(|last| last.phase == Phase::HandedOn);
    let Some(server) = server.and_then(|last| last.page_server.as_ref()) else {
        observer::report_end("migration-finished", last);
        return;
    };
    let (pid, took_us) = (server.pid.to_string(), server.took_over_us.map(|us| us.to_string()));
    let figures = last.map(ProgressDocument::final_figures).unwrap_or_default();
    let mut properties = vec![("socket", server.socket.as_str()), ("pid", &pid)];
    properties.extend(took_us.as_deref().map(|us| ("took_us", us)));
    properties.extend(figures.iter().map(|(key, value)| (*key, value.as_str())));
    events::emit("vm", "migration-handed-on", &properties);
    let line = last.map(ProgressDocument::final_line).unwrap_or_default();
    log::info!("the VM has migrated: {line}; process {pid} sends its last pages");
}

fn nothing_migrated() -> ApiError {
    ApiError::new(ApiErrorKind::NotCreated, "this VMM has not migrated anything yet")
}

#[cfg(test)]
mod tests {
    use vm_migration::Side;

    use super::*;

    #[test]
    fn a_client_that_saw_a_migration_fail_does_not_keep_the_process_after_the_next() {
        let ends = |phase| {
            is_the_end(&ProgressDocument { phase, ..Progress::new(Side::Source).snapshot() })
        };
        assert!([Phase::Done, Phase::HandedOn, Phase::Failed].into_iter().all(ends));
        let more_comes = [Phase::Idle, Phase::Precopy, Phase::Serve, Phase::PostcopyPaused];
        assert!(!more_comes.into_iter().any(ends));
    }

    #[test]
    fn the_process_stays_for_those_who_have_not_seen_the_end() {
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(exit_delay(None, None, 0), Duration::ZERO, "no client watches");
        assert_eq!(exit_delay(ms(100), None, 0), WATCHER_TIME);
        // The time that the teardown has taken does not count.
        assert_eq!(exit_delay(ms(9_900), None, 0), WATCHER_TIME);
        assert_eq!(exit_delay(ms(10_100), None, 0), Duration::ZERO, "they have left");
        // One client has read the end, another that polls as often has not yet.
        assert_eq!(exit_delay(None, ms(100), 0), Duration::from_millis(200));
        assert_eq!(exit_delay(None, ms(400), 0), Duration::ZERO);
        assert_eq!(exit_delay(ms(50), ms(100), 0), WATCHER_TIME);
        // It is connected, and may be kept from asking.
        assert_eq!(exit_delay(None, ms(400), 1), WATCHER_TIME);
        assert_eq!(exit_delay(ms(10_100), None, 1), WATCHER_TIME);
    }

    #[test]
    fn the_last_connected_client_that_reads_the_end_is_waited_for() {
        let now = Instant::now();
        let latest = now + WATCHER_TIME;
        assert_eq!(exit_time(latest, None, 0), latest);
        assert_eq!(exit_time(latest, Some(now), 2), latest);
        assert_eq!(exit_time(latest, Some(now), 0), now + OTHER_WATCHERS_TIME);
        assert_eq!(exit_time(now, Some(now), 0), now, "never later");
    }
}
