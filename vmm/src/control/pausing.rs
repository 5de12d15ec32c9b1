// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.pause` and `vm.resume`, and devices that come and go: what they wait for, and what may be asked
//! meanwhile.
//!
//! Owns the machine while it stops, continues or changes, on a thread of its own: a device finishes what it
//! works on, an image is opened, locked and read anew, and each takes as long as the storage behind it takes. The
//! VMM thread answers other requests meanwhile, and takes a pause back when it is told so. A pause is
//! answered when what the guest has written is on its disks. A VM that stops for a full disk, and continues when there
//! is room ([`super::full_disks`]), does so in the same way.

use std::io;
use std::time::Duration;

use thiserror::Error;
use vm_migration::vm::DestinationVm as _;

use super::inbox::Message;
use super::threads::spawn_with;
use super::{GuestPages, Next, RunError, VmLifecycle, Vmm, emit, failed};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, ApiResult, VmInfo, VmState};
use crate::control::describe;
use crate::events;
use crate::machine::{
    CancelToken, Consoles, Machine, MachineError, WriteBack, WriteBackError,
    report_write_back_failure,
};
use crate::migration::destination::ArrivingMachine;

use TransitionKind::{ResizeDisk, ResizeMemory, ResizeVcpus};

/// Time that the devices have to finish their requests before a pause is cancelled and the guest resumes.
/// Until then no new request is taken: the guest would consider its disk broken after a longer time.
const PAUSE_TIME_MAX: Duration = Duration::from_mins(1);
/// The same limit for a pause that a full disk requires, not a client.
const FULL_TIME_MAX: Duration = Duration::from_secs(5);

/// The end of writing back the disks of a paused VM.
pub struct PauseEnd {
    /// Number of the machine.
    machine: u64,
    result: Result<(), WriteBackError>,
    responder: Responder,
}

/// Kind of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitionKind {
    /// Pause.
    Pause,
    /// Pause, because the host has no space for what the guest writes.
    Full,
    /// Resume if there is space again.
    Retry,
    /// Resume.
    Resume,
    /// First start after a restore.
    StartRestored,
    /// Start of a machine that was not started when it arrived: the operator states that it runs nowhere
    /// else.
    StartArrived,
    /// Opening and adding a device; the machine stays paused or running.
    Add,
    /// Tearing down devices that the guest has ejected, and plugging those that were opened late; the machine stays
    /// paused or running.
    Eject,
    /// Giving a disk another size; the machine stays paused or running.
    ResizeDisk,
    /// Adding vCPUs, or asking the guest to eject some; the machine stays paused or running.
    ResizeVcpus,
    /// Adding memory; the machine stays paused or running.
    ResizeMemory,
}

/// A machine in transition, owned by another thread.
pub struct Transition {
    /// Description of the machine for `vm.info`.
    pub info: Box<VmInfo>,
    /// Its consoles, whose terminals are restored if the process ends during the transition.
    pub consoles: Consoles,
    /// Kind of the transition.
    pub kind: TransitionKind,
    /// Cancels a pause, or the opening of a device.
    pub cancel: CancelToken,
    /// Requests to resume, which cancel a pause.
    resumers: Vec<Responder>,
    /// Why it is not known whether the VM runs at its destination, if that is so while it is resumed.
    pub unanswered: Option<String>,
    /// The device that is being added, if any.
    adding: Option<Adding>,
}

/// A device that is being opened to be added.
struct Adding {
    id: String,
    /// Requests to remove it, which cancel its addition.
    removers: Vec<Responder>,
}

impl Transition {
    pub(super) fn new(
        kind: TransitionKind,
        info: Box<VmInfo>,
        consoles: Consoles,
        cancel: CancelToken,
    ) -> Self {
        let (resumers, unanswered, adding) = (Vec::new(), None, None);
        Self { info, consoles, kind, cancel, resumers, unanswered, adding }
    }

    /// Whether the device `id` is being added.
    pub fn is_adding(&self, id: &str) -> bool {
        self.adding.as_ref().is_some_and(|adding| adding.id == id)
    }
}

/// The end of a transition.
pub struct TransitionEnd {
    machine: Box<Machine>,
    kind: TransitionKind,
    result: Result<ApiReply, TransitionError>,
    responder: Option<Responder>,
}

/// Why a transition failed.
#[derive(Debug, Error)]
pub enum TransitionError {
    /// The machine could not do it.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The thread could not be started.
    #[error("its thread cannot be started")]
    Thread(#[source] io::Error),
}

/// The end of the start of a machine that had arrived and not been started.
pub struct ArrivedEnd {
    result: Result<Box<Machine>, (Box<ArrivingMachine>, ApiError)>,
    /// Why it was not started at first.
    reason: String,
    responder: Responder,
}

impl TransitionKind {
    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "paused, which waits until its devices have finished their requests",
            Self::Full => {
                "paused for a disk that is full, which waits until its devices have finished their \
                 requests"
            }
            Self::Retry => "resumed if a full disk has room again, which waits for that disk",
            Self::Add => {
                "given a device, which waits until that is open; vm.remove-device gives a disk or \
                 network device up"
            }
            Self::Eject => {
                "relieved of a device, which waits until that has finished its requests, or given one that was \
                 opened late"
            }
            Self::ResizeDisk => "given a disk of another size, which waits for its storage",
            Self::ResizeVcpus => "given another number of vCPUs",
            Self::ResizeMemory => "given more memory",
            Self::Resume | Self::StartRestored | Self::StartArrived => {
                "resumed, which waits for its disks and network devices"
            }
        }
    }

    /// Name in `vm.info`; `None` for a transition that may change nothing.
    pub fn doing(self) -> Option<&'static str> {
        match self {
            Self::Pause | Self::Full => Some("paused"),
            Self::Retry => None,
            Self::Resume | Self::StartRestored | Self::StartArrived => Some("resumed"),
            Self::Add | Self::Eject | Self::ResizeDisk | Self::ResizeVcpus | Self::ResizeMemory => {
                Some("changed")
            }
        }
    }

    /// Name of the thread.
    fn thread_name(self) -> &'static str {
        match self {
            Self::Pause | Self::Full => "pause",
            Self::Retry => "retry",
            Self::Resume | Self::StartRestored | Self::StartArrived => "resume",
            Self::Add => "add-device",
            Self::Eject => "eject",
            Self::ResizeDisk => "resize-disk",
            Self::ResizeVcpus => "resize-vcpus",
            Self::ResizeMemory => "resize-memory",
        }
    }
}

fn report_failed_resume(kind: TransitionKind, error: &ApiError) {
    if kind == TransitionKind::StartRestored {
        return super::snapshot::report_failed_restore(error);
    }
    events::emit("vm", "resume-failed", &[("error", &error.to_string())]);
}

fn report_failed_pause(error: &TransitionError, responder: Option<Responder>) {
    let kind = match error {
        TransitionError::Machine(MachineError::PauseWithdrawn) => ApiErrorKind::Conflict,
        _ => ApiErrorKind::Failed,
    };
    let error = ApiError::from_error(kind, error).context("the VM runs on");
    log::error!("{error}");
    events::emit("vm", "pause-failed", &[("error", &error.to_string())]);
    answer(responder, Err(error));
}

fn answer(responder: Option<Responder>, result: ApiResult) {
    if let Some(responder) = responder {
        responder.answer(result);
    }
}

impl Vmm {
    /// Pauses the VM; answered once it is paused and its disks are written back.
    pub(super) fn pause_for(&mut self, responder: Responder) {
        if self.waits_for_room() {
            // The pause is now that of a client: no automatic resume.
            self.look_for_no_room();
            emit("pausing");
            return self.write_back_for(responder);
        }
        if let Err(error) = self.may_pause() {
            return responder.answer(Err(error));
        }
        emit("pausing");
        self.begin_transition(TransitionKind::Pause, Some(responder));
    }

    fn may_pause(&mut self) -> Result<(), ApiError> {
        if self.machine_mut()?.is_paused() {
            return Err(ApiError::new(ApiErrorKind::NotBooted, "the VM is paused already"));
        }
        // A vCPU that waits for a page cannot be stopped before the page arrives, and the VMM thread must
        // not wait for another host.
        self.refuse_without_all_pages()
    }

    /// Resumes the live machine, on a thread if locks have to be taken again, disks checked for free
    /// space or passed-through devices set running.
    pub(super) fn resume_live_for(&mut self, responder: Responder) {
        let may_wait = match self.machine_mut() {
            Ok(machine) => {
                let waits = || {
                    machine.lacks_exclusive()
                        || machine.check_room().is_err()
                        || machine.has_stopped_devices()
                };
                machine.is_paused() && waits()
            }
            Err(error) => return responder.answer(Err(error)),
        };
        if may_wait && matches!(self.pages, GuestPages::Resident) {
            emit("resuming");
            self.begin_transition(TransitionKind::Resume, Some(responder));
        } else {
            responder.answer(self.resume().map(|()| ApiReply::Empty));
        }
    }

    /// `vm.resume` while the machine is in transition; returns the responder if it is not.
    pub(super) fn resume_in_transition(&mut self, responder: Responder) -> Option<Responder> {
        match &mut self.vm {
            VmLifecycle::Transitioning(transition) if transition.kind == TransitionKind::Pause => {
                transition.cancel.cancel();
                transition.resumers.push(responder);
                None
            }
            _ => Some(responder),
        }
    }

    /// Records which device is being added.
    pub(super) fn note_adding(&mut self, id: String) {
        if let VmLifecycle::Transitioning(transition) = &mut self.vm {
            transition.adding = Some(Adding { id, removers: Vec::new() });
        }
    }

    /// `vm.remove-device` of a device that is being added; returns the responder if it is not.
    pub(super) fn cancel_adding(&mut self, id: &str, responder: Responder) -> Option<Responder> {
        match &mut self.vm {
            VmLifecycle::Transitioning(Transition { adding: Some(adding), cancel, .. })
                if adding.id == id =>
            {
                cancel.cancel();
                adding.removers.push(responder);
                None
            }
            _ => Some(responder),
        }
    }

    /// Starts a machine that has arrived and was not started.
    pub(super) fn start_arrived_for(&mut self, responder: Responder) {
        let (machine, reason) = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::NotStarted { machine, reason } => (machine, reason),
            other => {
                responder.answer(Err(other.why_not_live()));
                self.vm = other;
                return;
            }
        };
        emit("resuming");
        let kind = TransitionKind::StartArrived;
        let info = Box::new(describe::of_machine(machine.machine()));
        let (consoles, cancel) = (machine.machine().consoles().clone(), CancelToken::default());
        let inbox_sender = self.inbox_sender.clone();
        let load = (machine, reason, responder);
        let spawned = spawn_with(kind.thread_name(), load, move |(machine, reason, responder)| {
            let result = machine.run(true).map(Box::new).map_err(|(machine, error)| {
                let error = ApiError::from_error(ApiErrorKind::Failed, error.as_ref());
                (Box::new(machine), error)
            });
            let end = ArrivedEnd { result, reason, responder };
            inbox_sender.send(Message::ArrivedStarted(Box::new(end)));
        });
        self.vm = VmLifecycle::Transitioning(Transition::new(kind, info, consoles, cancel));
        if let Err(((machine, reason, responder), error)) = spawned {
            let result = Err((machine, failed(&TransitionError::Thread(error))));
            let end = ArrivedEnd { result, reason, responder };
            self.inbox_sender.send(Message::ArrivedStarted(Box::new(end)));
        }
    }

    /// Handles the end of the start of such a machine.
    pub(super) fn arrived_started(&mut self, end: ArrivedEnd) -> Next {
        let ArrivedEnd { result, reason, responder } = end;
        match result {
            Ok(machine) => {
                self.vm = VmLifecycle::Live(machine);
                emit("resumed");
                if matches!(self.pages, GuestPages::Resident) {
                    self.memory_came = false;
                    self.all_pages_resident();
                }
                responder.answer(Ok(ApiReply::Empty));
            }
            Err((machine, error)) => {
                self.vm = VmLifecycle::NotStarted { machine, reason };
                events::emit("vm", "resume-failed", &[("error", &error.to_string())]);
                responder.answer(Err(error));
            }
        }
        self.go_on_ending()
    }

    /// Starts a transition of the live machine on a thread.
    pub(super) fn begin_transition(&mut self, kind: TransitionKind, responder: Option<Responder>) {
        self.begin_transition_with(kind, responder, move |machine, cancel| {
            match kind {
                TransitionKind::Pause => {
                    machine.pause(PAUSE_TIME_MAX, &|| cancel.is_cancelled())?;
                }
                TransitionKind::Full => machine.pause(FULL_TIME_MAX, &|| cancel.is_cancelled())?,
                TransitionKind::Retry
                | TransitionKind::Resume
                | TransitionKind::StartRestored
                | TransitionKind::StartArrived => {
                    machine.resume_with_room()?;
                }
                TransitionKind::Add
                | TransitionKind::ResizeDisk
                | TransitionKind::ResizeVcpus
                | TransitionKind::ResizeMemory => {}
                TransitionKind::Eject => machine.take_ejected(),
            }
            Ok(ApiReply::Empty)
        });
    }

    /// Runs an operation on the live machine on a thread, as it may block.
    pub(super) fn begin_transition_with(
        &mut self,
        kind: TransitionKind,
        responder: Option<Responder>,
        work: impl FnOnce(&mut Machine, &CancelToken) -> Result<ApiReply, MachineError> + Send + 'static,
    ) {
        let machine = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Live(machine) => machine,
            other => {
                answer(responder, Err(other.why_not_live()));
                self.vm = other;
                return;
            }
        };
        let info = Box::new(describe::of_machine(&machine));
        let (consoles, cancel) = (machine.consoles().clone(), CancelToken::default());
        let (inbox_sender, own) = (self.inbox_sender.clone(), cancel.clone());
        let spawned = spawn_with(
            kind.thread_name(),
            (machine, responder),
            move |(mut machine, responder): (Box<Machine>, _)| {
                let result = work(&mut machine, &own).map_err(TransitionError::from);
                let end = TransitionEnd { machine, kind, result, responder };
                inbox_sender.send(Message::TransitionOver(Box::new(end)));
            },
        );
        self.vm = VmLifecycle::Transitioning(Transition::new(kind, info, consoles, cancel));
        if let Err(((mut machine, responder), error)) = spawned {
            let result = if kind == TransitionKind::Eject {
                machine.take_ejected();
                Ok(ApiReply::Empty)
            } else {
                Err(TransitionError::Thread(error))
            };
            // Handled as if a thread had tried: events, answers, the end of the process.
            let end = TransitionEnd { machine, kind, result, responder };
            self.inbox_sender.send(Message::TransitionOver(Box::new(end)));
        }
    }

    /// Handles the end of a transition.
    pub(super) fn transition_over(&mut self, end: TransitionEnd) -> Next {
        let TransitionEnd { machine, kind, result, responder } = end;
        let (resumers, adding, unanswered) =
            match std::mem::replace(&mut self.vm, VmLifecycle::Live(machine)) {
                VmLifecycle::Transitioning(transition) => {
                    (transition.resumers, transition.adding, transition.unanswered)
                }
                _ => (Vec::new(), None, None),
            };
        if std::mem::take(&mut self.memory_came) {
            self.all_pages_resident();
        }
        let mut next = Next::Continue;
        match (kind, result) {
            (TransitionKind::Pause, Ok(_)) => {
                self.look_for_no_room();
                if let Some(responder) = responder {
                    self.write_back_for(responder);
                }
            }
            (TransitionKind::Full, Ok(_)) => self.stopped_for_room(),
            (TransitionKind::Pause | TransitionKind::Full, Err(error)) => {
                if kind == TransitionKind::Full {
                    self.cannot_stop_for_room();
                }
                report_failed_pause(&error, responder);
            }
            (TransitionKind::Add | TransitionKind::Eject, result) => {
                self.device_change_over(result, responder, adding);
            }
            (ResizeDisk | ResizeVcpus | ResizeMemory, result) => {
                Self::resize_over(result, responder);
            }
            (TransitionKind::Retry, Ok(_)) => {
                self.found_room();
                emit("resuming");
                emit("resumed");
            }
            // Whether there is space is unknown without a thread: check again later.
            (
                TransitionKind::Retry,
                Err(
                    TransitionError::Machine(MachineError::DisksFull(_))
                    | TransitionError::Thread(_),
                ),
            ) => self.found_no_room(),
            (TransitionKind::Retry, Err(error)) => {
                self.look_for_no_room();
                let error = failed(&error);
                log::error!("the VM stays paused: {error}");
                report_failed_resume(kind, &error);
            }
            (kind, result) => {
                if result.is_ok() {
                    self.found_room();
                }
                let doubt = unanswered.filter(|_| result.is_err());
                let doubt = doubt.and_then(|unanswered| self.still_unanswered(unanswered));
                let why = |error: TransitionError| {
                    let kind = match error {
                        TransitionError::Machine(MachineError::DisksFull(_)) => {
                            ApiErrorKind::Conflict
                        }
                        _ => ApiErrorKind::Failed,
                    };
                    let error = ApiError::from_error(kind, &error);
                    doubt.iter().fold(error, ApiError::context)
                };
                let result = result
                    .map_err(why)
                    .inspect(|_| emit("resumed"))
                    .inspect_err(|error| report_failed_resume(kind, error));
                match (result, responder) {
                    (Err(error), None) if self.ending.is_none() => {
                        next = Next::Fail(RunError::Restore(error));
                    }
                    (result, responder) => answer(responder, result),
                }
            }
        }
        for responder in resumers {
            match &self.vm {
                // The pause was cancelled in time.
                VmLifecycle::Live(machine) if !machine.is_paused() => {
                    responder.answer(Ok(ApiReply::Empty));
                }
                _ => self.resume_for(false, responder),
            }
        }
        next.and_then(|| self.go_on_ending())
    }

    /// Handles the end of adding a device, also if requests to remove it have cancelled that, or of tearing
    /// down ejected ones.
    fn device_change_over(
        &mut self,
        result: Result<ApiReply, TransitionError>,
        responder: Option<Responder>,
        adding: Option<Adding>,
    ) {
        let is_cancelled =
            matches!(result, Err(TransitionError::Machine(MachineError::AddWithdrawn { .. })));
        let kind = if is_cancelled { ApiErrorKind::Conflict } else { ApiErrorKind::Failed };
        answer(responder, result.map_err(|error| ApiError::from_error(kind, &error)));
        if let Some(Adding { id, removers }) = adding {
            for remover in removers {
                // It may have been added before the cancellation.
                let gone = if is_cancelled { Ok(()) } else { self.remove_device(&id) };
                remover.answer(gone.map(|()| ApiReply::Empty));
            }
        }
    }

    /// Answers once the disks of the paused VM are written back.
    fn write_back_for(&mut self, responder: Responder) {
        let write_back = match self.machine_mut() {
            Ok(machine) => machine.write_back(),
            Err(error) => return responder.answer(Err(error)),
        };
        let machine = self.machine_number;
        if write_back.is_done() {
            // There is nothing to wait for.
            let result = write_back.wait();
            return self.pause_is_over(PauseEnd { machine, result, responder });
        }
        let inbox_sender = self.inbox_sender.clone();
        let load = (write_back, responder);
        let spawned = spawn_with("pause", load, move |(write_back, responder)| {
            let result = WriteBack::wait(write_back);
            inbox_sender.send(Message::PauseEnd(Box::new(PauseEnd { machine, result, responder })));
        });
        if let Err(((_left_to_it, responder), error)) = spawned {
            emit("paused");
            responder.answer(Err(failed(&error)
                .context("the VM is paused, without waiting until its disks are written back")));
        }
    }

    /// Handles the end of writing the disks back.
    pub(super) fn pause_is_over(&mut self, end: PauseEnd) {
        let PauseEnd { machine, result, responder } = end;
        let is_paused = match &self.vm {
            VmLifecycle::Live(live) => live.is_paused(),
            // Being saved or sent, or sent and not answered: still paused.
            VmLifecycle::Busy(_) | VmLifecycle::Migrating { .. } | VmLifecycle::Unanswered(_) => {
                true
            }
            // Still paused as well.
            VmLifecycle::Transitioning(transition)
                if matches!(
                    transition.kind,
                    TransitionKind::Add
                        | TransitionKind::Eject
                        | TransitionKind::ResizeDisk
                        | TransitionKind::ResizeVcpus
                        | TransitionKind::ResizeMemory
                ) =>
            {
                transition.info.state == VmState::Paused
            }
            // It has resumed or ended.
            _ => false,
        };
        if is_paused && machine == self.machine_number {
            emit("paused");
        }
        responder.answer(match result {
            Ok(()) => Ok(ApiReply::Empty),
            Err(error) => {
                report_write_back_failure(&error);
                Err(ApiError::from_error(ApiErrorKind::Failed, &error).context(
                    "the VM is paused, but its disks do not hold all that the guest has written; \
                     vm.resume resumes it",
                ))
            }
        });
    }
}
