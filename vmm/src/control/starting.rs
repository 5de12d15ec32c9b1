// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Starting a machine: at `vm.boot`, at the start of the process, or after a reset.
//!
//! Owns what is known of the VM while its machine is made on a separate thread: a path is opened, a
//! kernel read, memory populated and a disk locked, and each takes as long as the underlying storage or memory does.
//! The VMM thread answers other requests meanwhile; the start is cancelled when the VM or the process is
//! to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::confining::Confiner;
use super::inbox::Message;
use super::threads::{LastWord, spawn_with};
use super::{Next, RunError, VmLifecycle, Vmm, describe, emit, failed};
use crate::api::request::Responder;
use crate::api::{ApiCall, ApiError, ApiErrorKind, ApiReply, VmInfo, VmmRequest};
use crate::config::VmConfig;
use crate::events;
use crate::machine::{
    BootPrefault, BootWatch, CancelToken, ConsoleError, Consoles, EventSink, Host, KeptForReboot,
    Machine, MachineError,
};

/// Origin of a machine that is created.
pub enum Start {
    /// `vm.boot` or the command line.
    Boot,
    /// A reboot, with what the machine before it has left.
    Reboot {
        /// The consoles, to which clients stay attached.
        consoles: Consoles,
        /// Locks and memory, kept so that no other VM takes them in between.
        kept: Box<KeptForReboot>,
    },
}

/// Poll interval for the orderly end of a guest that runs while its devices are still being opened.
const BEGUN_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A machine that is being created.
pub struct Starting {
    /// Its description for `vm.info`.
    info: Box<VmInfo>,
    /// Its configuration.
    config: Box<VmConfig>,
    is_reboot: bool,
    /// Whether the command line asked for it.
    pub at_launch: bool,
    cancel: CancelToken,
    end_requests: Vec<EndRequest>,
    begun: GuestBegun,
    /// Memory that is populated before the guest starts.
    prefault: BootPrefault,
    /// Its configuration with the terminals that were opened for it, once they are.
    opened: OpenedConfig,
    /// When the process ends although the machine is not complete, as long as there is no guest that could
    /// lose data.
    until: Option<Instant>,
}

/// The configuration of a VM that is being started, with the terminals that were opened for it.
type OpenedConfig = Arc<Mutex<Option<Box<VmConfig>>>>;

/// What the thread that creates a machine tells of its progress.
struct Progress {
    begun: GuestBegun,
    prefault: BootPrefault,
    opened: OpenedConfig,
}

/// Whether the guest may have started. It can before its start is complete, which waits some seconds for passed-through
/// devices to be opened.
#[derive(Clone, Default)]
struct GuestBegun(Arc<AtomicBool>);

impl GuestBegun {
    /// Marks the guest started; false if the start has been cancelled, in which case the guest must not
    /// start.
    fn begin(&self, cancel: &CancelToken) -> bool {
        // In this order: a later cancellation then treats it as a running guest.
        self.0.store(true, Ordering::SeqCst);
        let is_wanted = !cancel.is_cancelled();
        self.0.store(is_wanted, Ordering::SeqCst);
        is_wanted
    }

    /// Marks the guest as ended in order.
    fn is_over(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    fn has_begun(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A request that has cancelled a start or restore, and is answered at the end.
pub enum EndRequest {
    /// `vm.shutdown`.
    Shutdown(Responder),
    /// `vm.delete`.
    Delete(Responder),
}

impl EndRequest {
    /// Answers that the VM has ended.
    pub fn answer(self) {
        let (Self::Shutdown(responder) | Self::Delete(responder)) = self;
        responder.answer(Ok(ApiReply::Empty));
    }
}

/// The end of a start.
pub struct StartEnd {
    result: Result<Box<Machine>, ApiError>,
    /// `None` if the command line or the guest asked for it.
    responder: Option<Responder>,
    /// Of the thread, if there was one.
    last: Option<LastWord>,
}

/// The error for a request to start a VM, after another request has cancelled that.
pub(super) fn start_cancelled() -> ApiError {
    ApiError::new(ApiErrorKind::Conflict, "the VM was ended before it ran")
}

impl Starting {
    /// Name of the operation in `vm.info`.
    pub fn doing(&self) -> &'static str {
        if self.cancel.is_cancelled() { "ended" } else { self.name() }
    }

    /// Name of the operation in messages.
    pub fn name(&self) -> &'static str {
        if self.is_reboot { "rebooted" } else { "booted" }
    }

    /// Cancels the start; the partial machine is torn down and the thread reports the end.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Sets when the process ends, unless the guest has started.
    pub fn end_until(&mut self, until: Instant) {
        self.until = Some(until);
    }

    /// When the process ends although the machine is not complete. Later than `now` while there is a guest.
    pub fn until(&self, now: Instant) -> Option<Instant> {
        let until = self.until?;
        Some(if self.has_begun() { until.max(now + BEGUN_POLL_INTERVAL) } else { until })
    }

    /// Whether the guest may have started.
    pub fn has_begun(&self) -> bool {
        self.begun.has_begun()
    }

    /// Its description, with the progress of what is populated before the guest starts.
    pub fn info(&self) -> VmInfo {
        let mut info = self.info.as_ref().clone();
        if let Some(config) = &*self.opened.lock() {
            info.config = config.as_ref().clone();
        }
        info.prefault = self.prefault.progress().map(describe::prefault_in_progress);
        info.doing = Some(self.doing().to_owned());
        info
    }

    /// Since when memory is being populated.
    pub fn populating_since(&self) -> Option<Instant> {
        self.prefault.begun_at()
    }

    /// Reports that the start has failed.
    pub fn report_failed(&self, error: &ApiError) {
        let event = if self.is_reboot { "reboot-failed" } else { "boot-failed" };
        events::emit("vm", event, &[("error", &error.to_string())]);
    }

    fn fatal(&self) -> fn(ApiError) -> RunError {
        if self.is_reboot { RunError::Reboot } else { RunError::Start }
    }
}

impl Start {
    /// Confines the process to the paths of the VM, unless an earlier machine of it has had them.
    fn confine(&self, config: &VmConfig, confiner: &Confiner) -> Result<(), ApiError> {
        match self {
            Self::Boot => confiner.confine(config).map_err(|error| failed(&error)),
            Self::Reboot { .. } => Ok(()),
        }
    }

    /// Creates the machine and starts it. Kept resources that it does not take are returned.
    fn machine(
        self,
        mut config: VmConfig,
        host: &Host,
        sink: EventSink,
        cancel: &CancelToken,
        progress: &Progress,
    ) -> Result<Machine, ApiError> {
        let Progress { begun, prefault, opened } = progress;
        let console = |error: ConsoleError| failed(&error);
        let made = |error: MachineError| failed(&error);
        let (consoles, mut kept) = match self {
            Self::Boot => (Consoles::open(&mut config).map_err(console)?, Box::default()),
            Self::Reboot { consoles, kept } => (consoles, kept),
        };
        *opened.lock() = Some(Box::new(config.clone()));
        let watch = BootWatch { prefault, cancel };
        let machine = Machine::boot(config, consoles, host, sink, &mut kept, &watch);
        let mut machine = machine.map_err(made)?;
        if !begun.begin(cancel) {
            return Err(start_cancelled());
        }
        if let Err(error) = machine.resume().and_then(|()| machine.finish_opening(cancel)) {
            machine.end();
            // From here on no data is lost if what is left of the machine takes longer to end than the process lives.
            begun.is_over();
            return Err(made(error));
        }
        std::mem::take(&mut kept.disks).passed_on();
        Ok(machine)
    }
}

impl Vmm {
    /// `vm.boot`, or the VM of the command line.
    pub(super) fn boot_for(&mut self, responder: Option<Responder>) -> Next {
        let config = match &self.vm {
            VmLifecycle::Created(config) => config.clone(),
            VmLifecycle::Live(_) => {
                let error = ApiError::new(ApiErrorKind::NotBooted, "the VM runs already");
                return refuse(responder, error, RunError::Start);
            }
            other => return refuse(responder, other.why_not_live(), RunError::Start),
        };
        emit("booting");
        let info = Box::new(describe::of_config(&config));
        self.start(Start::Boot, config, info, responder)
    }

    /// Starts the thread that creates a machine.
    pub(super) fn start(
        &mut self,
        start: Start,
        config: Box<VmConfig>,
        info: Box<VmInfo>,
        responder: Option<Responder>,
    ) -> Next {
        let is_reboot = matches!(start, Start::Reboot { .. });
        let at_launch = responder.is_none() && !is_reboot;
        let (cancel, sink) = (CancelToken::default(), self.new_sink());
        let (host, inbox_sender, own) =
            (self.host.clone(), self.inbox_sender.clone(), cancel.clone());
        let (begun, opened) = (GuestBegun::default(), OpenedConfig::default());
        // A request that waits for the VM no longer does when memory is populated first.
        let populating = self.inbox_sender.clone();
        let prefault = BootPrefault::new(move || populating.send(Message::Populating));
        let progress = Progress {
            begun: begun.clone(),
            prefault: prefault.clone(),
            opened: Arc::clone(&opened),
        };
        let confiner = self.confiner();
        let name = if is_reboot { "vm-reboot" } else { "vm-boot" };
        let load = (start, config.clone(), responder);
        let spawned = spawn_with(name, load, move |(start, config, responder)| {
            let result = start
                .confine(&config, &confiner)
                .and_then(|()| start.machine(*config, &host, sink, &own, &progress));
            let result = result.map(Box::new);
            let last = Some(LastWord::of_this_thread());
            inbox_sender.send(Message::Started(Box::new(StartEnd { result, responder, last })));
        });
        let (end_requests, until) = (Vec::new(), None);
        let starting = Starting {
            info,
            config,
            is_reboot,
            at_launch,
            cancel,
            end_requests,
            begun,
            prefault,
            opened,
            until,
        };
        self.vm = VmLifecycle::Starting(starting);
        match spawned {
            Ok(_detached) => Next::Continue,
            Err(((start, _, responder), error)) => {
                // Dropping what was kept waits for the disks; so does the end of the process.
                drop(spawn_with("discard-vm", start, drop));
                let result = Err(failed(&error));
                self.started(StartEnd { result, responder, last: None })
            }
        }
    }

    /// `vm.shutdown` or `vm.delete` of a VM that is being started or restored, which is cancelled. Returns
    /// the responder if it is not.
    pub(super) fn end_starting(
        &mut self,
        is_delete: bool,
        responder: Responder,
    ) -> Option<Responder> {
        let end_request = if is_delete { EndRequest::Delete } else { EndRequest::Shutdown };
        match &mut self.vm {
            VmLifecycle::Starting(starting) => {
                starting.cancel();
                starting.end_requests.push(end_request(responder));
            }
            VmLifecycle::Busy(busy) if busy.is_restore() => busy.end_for(end_request(responder)),
            _ => return Some(responder),
        }
        None
    }

    /// Handles the end of a start.
    pub(super) fn started(&mut self, end: StartEnd) -> Next {
        let StartEnd { result, responder, last } = end;
        // Who has asked may look at the threads once it is answered.
        if let (Some(last), true) = (last, responder.is_some()) {
            last.wait();
        }
        let starting = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Starting(starting) => starting,
            other => {
                self.vm = other;
                return Next::Continue;
            }
        };
        let (name, fatal) = (starting.name(), starting.fatal());
        let is_cancelled = starting.cancel.is_cancelled();
        let mut next = Next::Continue;
        match result {
            Ok(machine) => {
                self.vm = VmLifecycle::Live(machine);
                self.started_number = self.machine_number;
                emit(name);
                if let Some(responder) = responder {
                    responder.answer(Ok(ApiReply::Empty));
                }
            }
            Err(error) => {
                starting.report_failed(&error);
                self.vm = VmLifecycle::Created(starting.config);
                if is_cancelled {
                    if let Some(responder) = responder {
                        responder.answer(Err(start_cancelled()));
                    }
                } else {
                    next = refuse(responder, error, fatal);
                }
            }
        }
        for end_request in starting.end_requests {
            next = next.and_then(|| self.end_for(end_request));
        }
        next.and_then(|| self.go_on_ending())
    }

    pub(super) fn end_for(&mut self, end_request: EndRequest) -> Next {
        match (end_request, &self.vm) {
            // It has not started, as requested.
            (EndRequest::Shutdown(responder), VmLifecycle::Created(_)) => {
                responder.answer(Ok(ApiReply::Empty));
                Next::Continue
            }
            // An earlier request ends the machine that started.
            (EndRequest::Shutdown(responder), VmLifecycle::TearingDown(_)) => {
                self.call(ApiCall::new(VmmRequest::Shutdown, responder))
            }
            (EndRequest::Delete(responder), VmLifecycle::TearingDown(_)) => {
                self.call(ApiCall::new(VmmRequest::Delete { force: false }, responder))
            }
            (EndRequest::Shutdown(responder), _) => self.shutdown_for(Some(responder)),
            (EndRequest::Delete(responder), _) => self.delete_for(false, responder),
        }
    }
}

/// Answers the request with the error; without a responder (the guest or the command line asked), the
/// process ends.
pub(super) fn refuse(
    responder: Option<Responder>,
    error: ApiError,
    fatal: fn(ApiError) -> RunError,
) -> Next {
    match responder {
        Some(responder) => {
            responder.answer(Err(error));
            Next::Continue
        }
        None => Next::Fail(fatal(error)),
    }
}

#[cfg(test)]
impl Starting {
    /// The start of the VM of the command line, of which no thread is at work.
    pub fn at_launch(prefault: BootPrefault) -> Self {
        let config = Box::<VmConfig>::default();
        Self {
            info: Box::new(describe::of_config(&config)),
            config,
            is_reboot: false,
            at_launch: true,
            cancel: CancelToken::default(),
            begun: GuestBegun::default(),
            prefault,
            opened: OpenedConfig::default(),
            end_requests: Vec::new(),
            until: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_may_run_is_not_cut_off() {
        let until = Instant::now();
        let mut starting = Starting::at_launch(BootPrefault::default());
        let thread = starting.begun.clone();
        starting.end_until(until);
        assert_eq!(starting.until(until), Some(until), "there is no guest");
        assert!(thread.begin(&starting.cancel));
        let later = until + Duration::from_hours(1);
        assert!(starting.until(later).is_some_and(|at| at > later), "the guest runs");
        thread.is_over();
        assert_eq!(starting.until(later), Some(until));
        // A start that was cancelled in time never starts the guest.
        starting.cancel();
        assert!(!thread.begin(&starting.cancel));
        assert_eq!(starting.until(later), Some(until));
    }
}
