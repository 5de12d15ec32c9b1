// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM thread: the state machine of the VM, which handles one request at a time.
//!
//! Owns the VM in whatever form it has now. Requests and events reach it through queues, so
//! nothing here needs a lock; what takes long (a migration) runs elsewhere and owns the machine
//! meanwhile.
//!
//! ```text
//!             create              boot              send-migration
//!   None <-----------> Created <-------> Live <---------------------> Migrating -> (process ends)
//!     |      delete            shutdown   ^  ^   failure, cancel         |             ^
//!     | receive-migration                 |  | resume            postcopy v            |
//!     +-------------> Receiving ----------+  |                        Serving ---------+
//!                        |                   |                           | connection lost
//!                        +----------> NotStarted                         v
//!                     it did not start                               HandedOver
//!     | restore         snapshot, restore  |
//!     +-------------> Busy <---------------+
//!
//!   Created > Starting > Live, Created: boot
//!   Live > TearingDown > None, Created, Starting: delete, shutdown, reboot
//!   Live > Transitioning > Live: pause, resume, a device comes or goes; a disk is full, or has room again
//!   NotStarted > Transitioning > Live: resume
//!   Live > Migrating > Live: migrate-check
//!   Migrating > Unanswered: another program was told to run the guest, and its answer is lost
//!   Unanswered > Transitioning > Live, Unanswered: resume
//! ```
//!
//! | module | owns |
//! | --- | --- |
//! | `run` | the event loop of the VMM thread |
//! | `inbox` | messages of other threads to it |
//! | `signals` | signals as its events |
//! | `lifecycle` | create, resume, delete |
//! | `starting` | the start of a machine: boot, start of the process, reset |
//! | `teardown` | the end of a machine: shutdown, reboot, delete, end of the process |
//! | `ending` | the end of the process, also in the middle of a migration |
//! | `pausing` | pause and resume, device changes that wait for the machine |
//! | `deferred` | requests that meet a VM between two states |
//! | `hotplug` | `vm.add-*` and `vm.remove-device` |
//! | `resize` | memory and balloon size of a VM that exists |
//! | `full_disks` | a VM that is paused because a disk is full |
//! | `guest_events` | resets, shutdowns and crashes of the guest |
//! | `reset_pace` | how often a guest may reset its machine |
//! | `unread_events` | ACPI events that the guest has not read yet |
//! | `triple_faults` | guests that reset by a triple fault |
//! | `snapshot` | the threads that save and restore |
//! | `migrating` | begin and end of migrations |
//! | `checking` | checks of a migration, which move nothing |
//! | `sending`, `receiving` | the threads that own the machine while it moves |
//! | `postcopy` | start-postcopy and recover |
//! | `cancel` | which requests end a migration, and until when |
//! | `doubt` | a VM that has arrived, while it is unknown whether its source runs it |
//! | `unanswered` | a VM that was sent, while it is unknown whether its destination runs it |
//! | `successor` | a process that takes the place of another, with its guest |
//! | `observer` | migrations in log and events |
//! | `when_not_live` | what a request is told that meets no live VM |
//! | `describe`, `device_tree` | `vm.info` and `vm.counters` |
//! | `metrics` | what a scrape shows of the VM |
//! | `threads` | threads that own what the VMM thread has given them |

mod cancel;
mod checking;
mod confining;
mod core_dump;
mod deferred;
mod describe;
mod device_tree;
mod doubt;
mod ending;
mod full_disks;
mod guest_events;
mod hotplug;
mod inbox;
mod lifecycle;
mod metrics;
mod migrating;
mod observer;
mod pausing;
mod postcopy;
mod receiving;
mod reset_pace;
mod resize;
mod run;
mod sending;
mod snapshot;
mod starting;
mod successor;
#[cfg(test)]
mod table_tests;
mod teardown;
mod threads;
mod triple_faults;
mod unanswered;
mod unread_events;
mod when_not_live;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use vm_migration::destination::LateReconnects;
use vm_migration::destination::PostcopyPaused;
use vm_migration::source::Held;
use vm_migration::{Progress, Steering};

use crate::api::request::Responder;
use crate::api::watchers::Watchers;
use crate::api::{ApiCall, ApiError, ApiErrorKind, ApiReply, ApiResult, VmInfo, VmmRequest};
use crate::config::VmConfig;
use crate::events;
use crate::machine::{EventSink, Host, Machine, StoppedMemoryWork};
use crate::metrics::Hub;
use crate::migration::destination::ArrivingMachine;
use crate::migration::memory::MigratingRam;
use crate::migration::source::Remains;
use crate::options::{ChildLogging, ExitReason};
use crate::sandbox::landlock::Confinement;

pub(crate) use migrating::{WATCHER_TIME, exit_time};
pub(crate) use observer::{announce, report_end};
pub(crate) use postcopy::recover_request;
pub use run::{RunError, run};

use deferred::{Between, Deferred};
use ending::{EndSignals, Ending};
use full_disks::FullDisks;
use guest_events::GuestEvents;
use inbox::{InboxSender, Message};
use metrics::NotedMeters;
use pausing::Transition;
use receiving::Receiving;
use reset_pace::ResetPace;
use sending::Sending;
use snapshot::{Busy, MemoryFill, Work};
use starting::Starting;
use successor::Successor;
use teardown::Teardown;
use triple_faults::TripleFaults;
use unanswered::Unanswered;
use unread_events::UnreadEvents;

/// State of the VM in its life cycle, with what each state owns.
enum VmLifecycle {
    /// No VM.
    None,
    /// Configured, not booted.
    Created(Box<VmConfig>),
    /// Running or paused.
    Live(Box<Machine>),
    /// Being migrated; the migration thread owns the machine.
    Migrating { info: Box<VmInfo>, sending: Sending, stopped: StoppedMemoryWork },
    /// The destination owns the guest, and receives its pages from here.
    Serving(Sending),
    /// An incoming migration is awaited or in progress.
    Receiving(Receiving),
    /// A machine has arrived whole and could not be started; the operator decides.
    NotStarted { machine: Box<ArrivingMachine>, reason: String },
    /// Its destination was told to run it and has not answered; it is paused here, and the operator decides.
    Unanswered(Unanswered),
    /// Being saved or restored, on a thread that owns the machine.
    Busy(Busy),
    /// The machine is being created, which may block on the files and devices that it opens.
    Starting(Starting),
    /// Being paused, resumed or changed, which may block on its disks.
    Transitioning(Transition),
    /// The machine is being torn down, which may block likewise.
    TearingDown(Teardown),
    /// The guest runs elsewhere and may still need pages from here.
    HandedOver { reason: String, _memory: Box<HandedOverMemory> },
}

/// Memory of a handed-over VM, which must be kept while the guest elsewhere may need it.
struct HandedOverMemory {
    _remains: Remains,
    _held: Option<Held<MigratingRam>>,
}

/// State of the live machine's pages.
enum GuestPages {
    /// All are resident.
    Resident,
    /// Some are still arriving.
    Arriving { steering: Steering },
    /// Some are lost; threads that wait for them stay blocked while this exists.
    Lost(Box<PostcopyPaused<MigratingRam>>),
}

/// Next action of the event loop.
enum Next {
    /// Wait for the next event.
    Continue,
    /// End the process.
    Exit(ExitReason),
    /// End the process with an error.
    Fail(RunError),
}

impl Next {
    /// `None` for [`Self::Continue`], else the reason why the process ends.
    fn unless_continue(self) -> Option<Self> {
        (!matches!(self, Self::Continue)).then_some(self)
    }

    /// Runs `then`, unless the process ends.
    fn and_then(self, then: impl FnOnce() -> Self) -> Self {
        match self {
            Self::Continue => then(),
            end => end,
        }
    }
}

/// Emits an event of the VM without properties.
fn emit(event: &'static str) {
    events::emit("vm", event, &[]);
}

/// An operation that was attempted and failed.
fn failed(error: &dyn std::error::Error) -> ApiError {
    ApiError::from_error(ApiErrorKind::Failed, error)
}

/// State of the VMM thread.
struct Vmm {
    host: Arc<Host>,
    inbox_sender: InboxSender,
    vm: VmLifecycle,
    /// Number of the current machine; numbers are never reused.
    machine_number: u64,
    /// Number of the last machine whose guest was booted here, rather than migrated to here.
    started_number: u64,
    /// The terminal size has changed and the guest may not have been told.
    tell_size: bool,
    /// Guest events not acted on yet.
    guest_events: GuestEvents,
    /// How often the guest has reset its machine.
    reset_pace: ResetPace,
    /// Triple faults of the guests.
    triple_faults: TripleFaults,
    /// Disks whose backing storage is full.
    full: FullDisks,
    pages: GuestPages,
    /// The on-demand restore that is filling the live machine's memory.
    filling: Option<MemoryFill>,
    /// Whether to prefault stage-2 once the memory is resident, as the client that restored the VM asked.
    prefault_stage2: bool,
    /// The last page arrived while another thread owned the machine.
    memory_came: bool,
    /// Progress of the last migration.
    progress: Option<Arc<Progress>>,
    /// Handles to the counters of the last machine that was live.
    meters: Option<NotedMeters>,
    /// What scrapes show without this thread.
    hub: Arc<Hub>,
    /// Clients that follow a migration on a connection that they keep.
    watchers: Watchers,
    /// When a client last requested the progress of a migration.
    watched_at: Option<Instant>,
    /// When a client first read the end of it.
    end_seen_at: Option<Instant>,
    /// Progress requests that wait until the end of a failed migration has been processed.
    progress_askers: Vec<Responder>,
    /// A pending end of the process, which waits for a machine, a start or a migration to end.
    ending: Option<Ending>,
    no_shutdown: bool,
    /// Path of the API socket, if it has one.
    api_path: Option<PathBuf>,
    /// Landlock rulesets in force on this thread.
    confinement: Confinement,
    /// Logging configuration for child processes.
    child_logging: ChildLogging,
    /// Requests to delete a machine that was not started and still receives pages.
    deleters: Vec<Responder>,
    /// Handles reconnections of sources that may not know that their migration to here has ended.
    late_reconnects: LateReconnects,
    /// Set once the VM has migrated while a client may still read the result: when the process exits at the latest, and
    /// why. Cleared when another VM is created here.
    pending_exit: Option<(Instant, ExitReason)>,
    /// When the process ends at the latest, whatever has not finished.
    at_latest: Option<Instant>,
    /// A signal has requested the end of the process, which is still to come.
    told_by_signal: bool,
    /// When such signals came.
    end_signals: EndSignals,
    /// Requests deferred until the VM is in another state.
    deferred: Deferred,
    /// When the guest is told again of what it has not read.
    unread_events: UnreadEvents,
    /// Set in a process that is to take the place of another.
    successor: Option<Successor>,
}

impl Vmm {
    fn new(
        host: Host,
        inbox_sender: InboxSender,
        no_shutdown: bool,
        child_logging: ChildLogging,
    ) -> Self {
        Self {
            host: Arc::new(host),
            inbox_sender,
            vm: VmLifecycle::None,
            machine_number: 0,
            started_number: 0,
            tell_size: false,
            guest_events: GuestEvents::default(),
            reset_pace: ResetPace::default(),
            triple_faults: TripleFaults::default(),
            full: FullDisks::default(),
            pages: GuestPages::Resident,
            filling: None,
            prefault_stage2: false,
            memory_came: false,
            progress: None,
            meters: None,
            hub: Arc::default(),
            watchers: Watchers::default(),
            watched_at: None,
            end_seen_at: None,
            progress_askers: Vec::new(),
            ending: None,
            no_shutdown,
            api_path: None,
            confinement: Confinement::default(),
            child_logging,
            deleters: Vec::new(),
            late_reconnects: LateReconnects::default(),
            pending_exit: None,
            at_latest: None,
            told_by_signal: false,
            end_signals: EndSignals::default(),
            deferred: Deferred::default(),
            unread_events: UnreadEvents::default(),
            successor: None,
        }
    }

    /// The event sink for the next machine.
    fn new_sink(&mut self) -> EventSink {
        self.machine_number += 1;
        self.memory_came = false;
        let (number, inbox_sender) = (self.machine_number, self.inbox_sender.clone());
        Arc::new(move |event| inbox_sender.send(Message::Guest(number, event, Instant::now())))
    }

    /// Carries out a request, and answers it now or has it answered later. A request that meets a VM in
    /// transition is deferred: a transition is short unless a disk does not respond.
    fn call(&mut self, call: ApiCall) -> Next {
        let has_arrived = self.has_unprocessed_arrival();
        let between = Between { vm: &self.vm, has_arrived };
        if between.waits(call.request()) {
            self.deferred.push(between, call);
            return Next::Continue;
        }
        self.call_now(call)
    }

    fn call_now(&mut self, call: ApiCall) -> Next {
        self.note_meters();
        let (request, responder) = call.into_parts();
        log::debug!("request {}", responder.name());
        match self.dispatch(request, responder).unwrap_or_else(|| self.act_on_guest()) {
            Next::Continue => {}
            other => return other,
        }
        match self.exit_due() {
            Some((until, reason)) if until <= Instant::now() => Next::Exit(reason),
            _ => Next::Continue,
        }
    }

    /// Dispatches each request to its handler; the only place that does. The handler answers it or keeps
    /// the responder. Returns what to do next if the handler decides that.
    fn dispatch(&mut self, request: VmmRequest, responder: Responder) -> Option<Next> {
        let empty = |result: Result<(), ApiError>| result.map(|()| ApiReply::Empty);
        let answer = match request {
            VmmRequest::VmmShutdown { force } => return Some(self.vmm_shutdown(force, responder)),
            VmmRequest::ReceiveMigration(data) => {
                self.receive(&data, responder);
                return None;
            }
            VmmRequest::MigrateCheck(data) => {
                self.check_migration_for(&data, responder);
                return None;
            }
            VmmRequest::MigrationCancel => {
                self.cancel_migration(responder);
                return None;
            }
            VmmRequest::MigrationProgress => {
                self.progress_for(responder);
                return None;
            }
            VmmRequest::Delete { force } => {
                return self.delete_for(force, responder).unless_continue();
            }
            VmmRequest::Boot => return self.boot_for(Some(responder)).unless_continue(),
            VmmRequest::Shutdown => return self.shutdown_for(Some(responder)).unless_continue(),
            VmmRequest::Reboot => return self.reboot_for(Some(responder)).unless_continue(),
            VmmRequest::Pause => {
                self.pause_for(responder);
                return None;
            }
            VmmRequest::Resume { force } => {
                self.resume_for(force, responder);
                return None;
            }
            VmmRequest::Snapshot(config) => {
                self.snapshot(&config, responder);
                return None;
            }
            VmmRequest::CoreDump(config) => {
                self.core_dump(&config, responder);
                return None;
            }
            VmmRequest::SnapshotCancel => {
                self.cancel_snapshot(responder);
                return None;
            }
            VmmRequest::Restore(config) => {
                return self.restore_for(*config, Some(responder)).unless_continue();
            }
            VmmRequest::AddDevice(device) => {
                self.add_device_for(*device, responder);
                return None;
            }
            VmmRequest::Resize(data) => {
                self.resize_for(&data, responder);
                return None;
            }
            VmmRequest::ResizeDisk(data) => {
                self.resize_disk_for(data, responder);
                return None;
            }
            VmmRequest::RemoveDevice(data) => {
                self.remove_device_for(&data.id, responder);
                return None;
            }
            VmmRequest::Ping => Ok(ApiReply::Ping(crate::api::VmmPingResponse::default())),
            VmmRequest::Create(config) => empty(self.create(config)),
            VmmRequest::Info => self.info(),
            VmmRequest::Counters => {
                self.machine_mut().map(|machine| ApiReply::Counters(describe::counters(machine)))
            }
            // Of scrapes that have not waited for this thread there may be many.
            VmmRequest::Metrics if responder.is_abandoned() => return None,
            VmmRequest::Metrics => Ok(ApiReply::Metrics(Box::new(self.metrics()))),
            VmmRequest::PowerButton => empty(self.machine_mut().map(|machine| {
                machine.press_power_button();
            })),
            VmmRequest::Nmi => empty(self.machine_mut().map(|machine| machine.send_nmi())),
            VmmRequest::ResizeZone(data) => empty(self.resize_zone(&data)),
            VmmRequest::MigrationStartPostcopy => empty(self.start_postcopy()),
            VmmRequest::MigrationRecover(data) => empty(self.recover_migration(&data)),
            VmmRequest::SendMigration(data) => empty(self.send(&data)),
            VmmRequest::MigrationReport => self.migration_report(),
        };
        responder.answer(answer);
        None
    }

    /// The live machine, or the error that says why there is none.
    fn machine_mut(&mut self) -> Result<&mut Machine, ApiError> {
        match &mut self.vm {
            VmLifecycle::Live(machine) => Ok(machine),
            other => Err(other.why_not_live()),
        }
    }

    /// Handles a changed terminal size; a machine owned by another thread is told when it returns.
    fn terminal_resized(&mut self) {
        self.tell_size = true;
        self.report_size();
    }

    fn report_size(&mut self) {
        if self.tell_size
            && let VmLifecycle::Live(machine) = &self.vm
        {
            machine.follow_terminal();
            self.tell_size = false;
        }
    }

    fn info(&self) -> ApiResult {
        let info = match &self.vm {
            VmLifecycle::Created(config) => describe::of_config(config),
            VmLifecycle::Live(machine) => {
                VmInfo { postcopy_paused: self.postcopy_paused(), ..describe::of_machine(machine) }
            }
            VmLifecycle::Transitioning(Transition { info, .. }) => VmInfo {
                doing: self.vm.doing(),
                postcopy_paused: self.postcopy_paused(),
                ..info.as_ref().clone()
            },
            VmLifecycle::Migrating { info, .. }
            | VmLifecycle::Busy(Busy {
                work: Work::Snapshot(info) | Work::CoreDump(info), ..
            })
            | VmLifecycle::TearingDown(Teardown { info, .. }) => {
                VmInfo { doing: self.vm.doing(), ..info.as_ref().clone() }
            }
            VmLifecycle::Starting(starting) => starting.info(),
            VmLifecycle::NotStarted { machine, .. } => VmInfo {
                postcopy_paused: self.postcopy_paused(),
                ..describe::of_machine(machine.machine())
            },
            VmLifecycle::Unanswered(unanswered) => unanswered.info(),
            VmLifecycle::Receiving(Receiving { doubt: Some(doubtful), progress, .. }) => {
                let why = progress.snapshot().recovery.reason.unwrap_or_default();
                VmInfo { in_doubt: Some(why), ..doubtful.info.as_ref().clone() }
            }
            other => return Err(other.why_not_live()),
        };
        Ok(ApiReply::Info(Box::new(info)))
    }

    /// Handles a message from another thread, and then the guest events that were waiting for it.
    fn message(&mut self, message: Message) -> Next {
        match self.take_message(message) {
            Next::Continue => {
                self.report_size();
                self.act_on_guest()
            }
            other => other,
        }
    }

    fn take_message(&mut self, message: Message) -> Next {
        self.note_meters();
        match message {
            Message::Guest(number, event, at) => {
                self.note_guest_event(number, event, at);
                Next::Continue
            }
            Message::InDoubt(doubtful) => {
                self.doubt(doubtful);
                Next::Continue
            }
            Message::HandedOver => {
                self.handed_over();
                Next::Continue
            }
            Message::SendEnd(end) => self.send_ended(*end),
            Message::CheckEnd(end) => self.check_ended(*end),
            Message::ReceiveEnd(end) => self.receive_ended(*end),
            Message::PagesComplete(result) => self.pages_complete(result),
            Message::Saved(end) => {
                self.saved(*end);
                self.go_on_ending()
            }
            Message::Confine(request) => {
                self.confine(request);
                Next::Continue
            }
            Message::Populating => {
                self.deferred.populating(&self.vm);
                Next::Continue
            }
            Message::Started(end) => self.started(*end),
            Message::TransitionOver(end) => self.transition_over(*end),
            Message::ArrivedStarted(end) => self.arrived_started(*end),
            Message::TornDown => self.torn_down(),
            Message::PauseEnd(end) => {
                self.pause_is_over(*end);
                Next::Continue
            }
            Message::Restored(end) => self.restored(*end),
            Message::MemoryComplete(number) => {
                self.memory_complete(number);
                Next::Continue
            }
        }
    }
}
