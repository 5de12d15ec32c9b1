// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM thread: what becomes of the VM, one request at a time.
//!
//! Owns the VM in whatever form it has now. Requests and events reach it through queues, so
//! nothing here needs a lock; what takes long (a migration) runs elsewhere and owns the machine
//! meanwhile.
//!
//! ```text
//!             create            boot               send-migration
//!   None <-----------> Idle <---------> Live <---------------------> Leaving --> (process ends)
//!     |      delete          shutdown    ^          failure             |
//!     | receive-migration                |                              v
//!     +-------------> Awaited -----------+                         HandedOver
//!     | restore         snapshot, restore|
//!     +-------------> Busy <-------------+
//! ```

mod describe;
mod inbox;
mod lifecycle;
mod observer;
mod receiving;
mod run;
mod sending;
mod signals;
mod snapshot;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_migration::Progress;
use vm_migration::source::Held;

use crate::api::request::Responder;
use crate::api::{ApiCall, ApiError, ApiErrorKind, ApiReply, ApiResult, VmInfo, VmmRequest};
use crate::config::{ReceiveMigrationData, SendMigrationData, VmConfig};
use crate::events;
use crate::machine::{EventSink, GuestEvent, Host, Machine};
use crate::migration::memory::MigratingRam;
use crate::migration::source::Remains;
use crate::options::ExitReason;

pub use run::{RunError, run};

use inbox::{Mailer, Message};
use receiving::{Arrival, Receiving, Reception};
use sending::{Departure, Sending};
use snapshot::{Busy, Fill};

/// Whoever asked for the progress of a migration has this long to ask once more and see its end,
/// before the process ends. Long enough for a slow poll on a busy host.
const WATCHER_TIME: Duration = Duration::from_secs(10);

/// The VM, in the form that it has now.
enum Vm {
    /// There is none.
    None,
    /// It has a configuration and does not run.
    Idle(Box<VmConfig>),
    /// It runs or is paused.
    Live(Box<Machine>),
    /// It is being sent; its machine belongs to the migration.
    Leaving {
        info: Box<VmInfo>,
        sending: Sending,
        /// What the guest did meanwhile, to be acted on if it stays.
        pending: Vec<GuestEvent>,
    },
    /// One is awaited.
    Awaited(Receiving),
    /// It is being saved or restored, on a thread that owns its machine.
    Busy(Busy),
    /// The guest is elsewhere and may still need pages from here.
    HandedOver { reason: String, _kept: Box<Kept> },
}

/// What must not end while a guest elsewhere may need it.
struct Kept {
    _remains: Remains,
    _held: Option<Held<MigratingRam>>,
}

/// What the event loop does next.
enum Next {
    /// Waits for the next event.
    Continue,
    /// Ends the process.
    Exit(ExitReason),
    /// Ends the process with an error.
    Fail(RunError),
}

/// The VMM.
struct Vmm {
    host: Arc<Host>,
    mailer: Mailer,
    vm: Vm,
    /// Number of the machine that is live; each has its own.
    machine_number: u64,
    /// Pages of the live machine are still on their way.
    pages_missing: bool,
    /// Memory of the live machine that is being brought in from a snapshot.
    filling: Option<Fill>,
    /// Of the last migration.
    progress: Option<Arc<Progress>>,
    /// Somebody has asked for the progress of the migration from here.
    is_watched: bool,
    no_shutdown: bool,
    /// Set when all is over but somebody may still want to see how it went.
    farewell: Option<(Instant, ExitReason)>,
}

impl Vmm {
    fn new(host: Host, mailer: Mailer, no_shutdown: bool) -> Self {
        Self {
            host: Arc::new(host),
            mailer,
            vm: Vm::None,
            machine_number: 0,
            pages_missing: false,
            filling: None,
            progress: None,
            is_watched: false,
            no_shutdown,
            farewell: None,
        }
    }

    /// Where the next machine's events go.
    fn new_sink(&mut self) -> EventSink {
        self.machine_number += 1;
        let (number, mailer) = (self.machine_number, self.mailer.clone());
        Arc::new(move |event| mailer.send(Message::Guest(number, event)))
    }

    /// Carries out a request and answers it, or sees to it that it is answered later.
    fn call(&mut self, call: ApiCall) -> Next {
        let (request, responder) = call.into_parts();
        log::debug!("request {}", request.name());
        match request {
            VmmRequest::VmmShutdown => {
                let result = self.shut_vmm_down();
                let next = if result.is_ok() {
                    Next::Exit(ExitReason::ApiShutdown)
                } else {
                    Next::Continue
                };
                responder.answer(result);
                return next;
            }
            VmmRequest::ReceiveMigration(data) => self.receive(&data, responder),
            VmmRequest::Snapshot(config) => self.snapshot(&config, responder),
            VmmRequest::Restore(config) => self.restore(*config, responder),
            request => responder.answer(self.carry_out(request)),
        }
        match self.farewell {
            Some((until, reason)) if until <= Instant::now() => Next::Exit(reason),
            _ => Next::Continue,
        }
    }

    fn carry_out(&mut self, request: VmmRequest) -> ApiResult {
        let empty = |result: Result<(), ApiError>| result.map(|()| ApiReply::Empty);
        match request {
            VmmRequest::Ping => Ok(ApiReply::Ping(crate::api::VmmPingResponse::default())),
            VmmRequest::Create(config) => empty(self.create(config)),
            VmmRequest::Boot => empty(self.boot()),
            VmmRequest::Info => self.info(),
            VmmRequest::Counters => Ok(ApiReply::Counters(describe::counters(self.machine_mut()?))),
            VmmRequest::Pause => empty(self.pause()),
            VmmRequest::Resume => empty(self.resume()),
            VmmRequest::Shutdown => empty(self.shutdown()),
            VmmRequest::Reboot => empty(self.reboot()),
            VmmRequest::PowerButton => {
                self.machine_mut()?.press_power_button();
                Ok(ApiReply::Empty)
            }
            VmmRequest::Delete => empty(self.delete()),
            VmmRequest::SendMigration(data) => empty(self.send(&data)),
            VmmRequest::MigrationProgress => self.migration_progress(),
            // Handled by `call`.
            VmmRequest::ReceiveMigration(_)
            | VmmRequest::Snapshot(_)
            | VmmRequest::Restore(_)
            | VmmRequest::VmmShutdown => Ok(ApiReply::Empty),
        }
    }

    /// The live machine, or the reason why there is none.
    fn machine_mut(&mut self) -> Result<&mut Machine, ApiError> {
        match &mut self.vm {
            Vm::Live(machine) => Ok(machine),
            other => Err(other.why_not_live()),
        }
    }

    fn info(&self) -> ApiResult {
        let info = match &self.vm {
            Vm::Idle(config) => describe::of_config(config),
            Vm::Live(machine) => describe::of_machine(machine),
            Vm::Leaving { info, .. } | Vm::Busy(Busy { info: Some(info), .. }) => {
                info.as_ref().clone()
            }
            other => return Err(other.why_not_live()),
        };
        Ok(ApiReply::Info(Box::new(info)))
    }

    fn migration_progress(&mut self) -> ApiResult {
        let progress = self.progress.as_ref().ok_or_else(|| {
            ApiError::new(ApiErrorKind::NotCreated, "this VMM has not migrated anything yet")
        })?;
        let document = serde_json::to_value(progress.snapshot())
            .map_err(|error| ApiError::from_error(ApiErrorKind::Failed, &error))?;
        self.is_watched = true;
        if let Some((until, _)) = &mut self.farewell {
            // The watcher has seen the end.
            *until = Instant::now();
        }
        Ok(ApiReply::Progress(document))
    }

    fn send(&mut self, data: &SendMigrationData) -> Result<(), ApiError> {
        let options = sending::options(data)?;
        self.machine_mut()?;
        self.refuse_while_memory_arrives("migrated")?;
        let Vm::Live(machine) = std::mem::replace(&mut self.vm, Vm::None) else {
            return Err(ApiError::not_booted());
        };
        let info = Box::new(describe::of_machine(&machine));
        match sending::start(machine, options, self.mailer.clone()) {
            Ok(sending) => {
                events::emit("vm", "migration-starting", &[("destination", &data.destination_url)]);
                self.progress = Some(Arc::clone(&sending.progress));
                self.is_watched = false;
                self.vm = Vm::Leaving { info, sending, pending: Vec::new() };
                Ok(())
            }
            Err((machine, error)) => {
                self.vm = Vm::Live(machine);
                Err(ApiError::from_error(ApiErrorKind::Failed, &error))
            }
        }
    }

    fn receive(&mut self, data: &ReceiveMigrationData, responder: Responder) {
        if !matches!(self.vm, Vm::None) {
            responder.answer(Err(ApiError::new(
                ApiErrorKind::AlreadyCreated,
                "there is a VM already; a migration can only be received without one",
            )));
            return;
        }
        let listener = match receiving::bind(&data.receiver_url) {
            Ok(listener) => listener,
            Err(error) => return responder.answer(Err(error)),
        };
        let reception = Reception {
            host: Arc::clone(&self.host),
            sink: self.new_sink(),
            mailer: self.mailer.clone(),
        };
        match receiving::start(listener, reception, responder) {
            Ok(receiving) => {
                self.progress = Some(Arc::clone(&receiving.progress));
                self.vm = Vm::Awaited(receiving);
            }
            Err((responder, error)) => {
                responder.answer(Err(ApiError::from_error(ApiErrorKind::Failed, &error)));
            }
        }
    }

    /// Acts on what another thread told.
    fn message(&mut self, message: Message) -> Next {
        match message {
            Message::Guest(number, event) if number == self.machine_number => {
                self.guest_event(event)
            }
            Message::Guest(..) => Next::Continue,
            Message::Departed(departure) => self.departed(*departure),
            Message::Arrived(arrival) => {
                self.arrived(*arrival);
                Next::Continue
            }
            Message::Saved(end) => {
                let pending = self.saved(*end);
                self.act_on(pending)
            }
            Message::Restored(end) => {
                self.restored(*end);
                Next::Continue
            }
            Message::MemoryComplete(number) => {
                self.memory_complete(number);
                Next::Continue
            }
            Message::PagesComplete(result) => {
                self.pages_complete(&result);
                Next::Continue
            }
        }
    }

    fn departed(&mut self, departure: Departure) -> Next {
        let pending = match std::mem::replace(&mut self.vm, Vm::None) {
            Vm::Leaving { pending, .. } => pending,
            _ => Vec::new(),
        };
        match departure {
            Departure::Gone(remains) => {
                events::emit("vm", "migration-finished", &[]);
                log::info!("the VM has moved");
                drop(remains);
                if self.is_watched {
                    self.farewell = Some((Instant::now() + WATCHER_TIME, ExitReason::MigratedAway));
                    return Next::Continue;
                }
                Next::Exit(ExitReason::MigratedAway)
            }
            Departure::Stayed(machine, reason) => {
                events::emit("vm", "migration-failed", &[("error", &reason)]);
                log::error!("{reason}");
                self.vm = Vm::Live(machine);
                self.act_on(pending)
            }
            Departure::Incomplete { remains, held, reason } => {
                events::emit("vm", "migration-failed", &[("error", &reason)]);
                log::error!("{reason}");
                let kept = Box::new(Kept { _remains: remains, _held: held });
                self.vm = Vm::HandedOver { reason, _kept: kept };
                Next::Continue
            }
        }
    }

    /// Acts on what the guest did while its machine was elsewhere.
    fn act_on(&mut self, events: Vec<GuestEvent>) -> Next {
        for event in events {
            match self.guest_event(event) {
                Next::Continue => {}
                other => return other,
            }
        }
        Next::Continue
    }

    fn arrived(&mut self, arrival: Arrival) {
        let Arrival { machine, pages_missing, responder } = arrival;
        match machine {
            Ok(machine) => {
                self.vm = Vm::Live(machine);
                self.pages_missing = pages_missing;
                events::emit("vm", "migration-receive-finished", &[]);
                responder.answer(Ok(ApiReply::Empty));
            }
            Err(error) => {
                self.vm = Vm::None;
                events::emit("vm", "migration-receive-failed", &[("error", &error.to_string())]);
                responder.answer(Err(error));
            }
        }
    }

    fn pages_complete(&mut self, result: &Result<(), String>) {
        match result {
            Ok(()) => {
                self.pages_missing = false;
                events::emit("vm", "postcopy-migration-completed", &[]);
                log::info!("the last page has arrived");
            }
            Err(reason) => {
                events::emit("vm", "postcopy-migration-paused", &[("error", reason)]);
                log::error!("{reason}");
            }
        }
    }
}

impl Vm {
    /// Why a request that needs a machine cannot be carried out.
    fn why_not_live(&self) -> ApiError {
        match self {
            Self::None | Self::Live(_) => ApiError::not_created(),
            Self::Idle(_) => ApiError::not_booted(),
            Self::Leaving { .. } => ApiError::new(
                ApiErrorKind::Conflict,
                "the VM is being migrated; wait until that is over",
            ),
            Self::Busy(busy) => ApiError::new(
                ApiErrorKind::Conflict,
                format!("the VM is being {}; wait until that is over", busy.what),
            ),
            Self::Awaited(_) => ApiError::new(
                ApiErrorKind::NotCreated,
                "a migration is awaited here; there is no VM yet",
            ),
            Self::HandedOver { reason, .. } => ApiError::new(
                ApiErrorKind::NotCreated,
                format!("the VM belongs to another VMM, which may need pages from here: {reason}"),
            ),
        }
    }
}
