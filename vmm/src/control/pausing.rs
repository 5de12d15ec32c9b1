// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.pause` and `vm.resume`, and devices that come and go: what they wait for, and what may be asked
//! meanwhile.
//!
//! Owns the machine while it stops, goes on or changes, on a thread of its own: a device finishes what it
//! works on, an image is opened, locked and read anew, and each takes as long as the storage behind it takes. The
//! VMM thread answers other requests meanwhile, and takes a pause back when it is told so. A pause is
//! answered when what the guest has written is on its disks.

use std::time::Duration;

use vm_migration::vm::DestinationVm as _;

use super::inbox::Message;
use super::{Next, Pages, RunError, Vm, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, ApiResult, VmInfo, VmState};
use crate::control::describe;
use crate::events;
use crate::machine::{
    Consoles, GiveUp, Machine, MachineError, WriteBack, WriteBackError, complain_of_write_back,
};
use crate::migration::destination::ArrivingMachine;

/// How long the devices may take to finish what they work on before a pause is given up and the guest
/// goes on. Its requests are not answered before they are done, but no new ones are taken: more than
/// this looks to a guest as if its disk were broken.
const PAUSE_TIME_MAX: Duration = Duration::from_mins(1);

/// The disks of a VM that was paused are written back, or not.
pub struct PauseEnd {
    /// Number of its machine.
    machine: u64,
    result: Result<(), WriteBackError>,
    responder: Responder,
}

/// What a machine does between running and not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It stops.
    Pause,
    /// It starts.
    Resume,
    /// It starts for the first time, after a restore.
    StartRestored,
    /// It starts although it was not started when it arrived: a person says that it runs nowhere else.
    StartArrived,
    /// A device is opened and added. It runs or not, as before.
    Add,
    /// Devices that its guest has let go of are taken apart. It runs or not, as before.
    Eject,
}

/// A machine that stops or starts.
pub struct Turning {
    /// Its description.
    pub info: Box<VmInfo>,
    /// Its consoles, for a process that ends without it.
    pub consoles: Consoles,
    /// What it does.
    pub turn: Turn,
    /// Has it stop stopping.
    pub give_up: GiveUp,
    /// Requests to resume, which take a pause back.
    resumers: Vec<Responder>,
}

/// A machine has stopped or started, or not.
pub struct TurnEnd {
    machine: Box<Machine>,
    turn: Turn,
    result: Result<ApiReply, MachineError>,
    responder: Option<Responder>,
}

/// A machine that has arrived and was not started has been, or not.
pub struct ArrivedEnd {
    result: Result<Box<Machine>, (Box<ArrivingMachine>, ApiError)>,
    /// Why it was not started at first.
    reason: String,
    responder: Responder,
}

impl Turn {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "paused, which waits until its devices have finished their requests",
            Self::Add => "given a device, which waits until that is open",
            Self::Eject => "relieved of a device, which waits until that has finished its requests",
            Self::Resume | Self::StartRestored | Self::StartArrived => {
                "resumed, which waits for its disks and network devices"
            }
        }
    }

    /// As `vm.info` has it.
    pub fn doing(self) -> &'static str {
        match self {
            Self::Pause => "paused",
            Self::Resume | Self::StartRestored | Self::StartArrived => "resumed",
            Self::Add | Self::Eject => "changed",
        }
    }

    /// Name of the thread that does it.
    fn thread_name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume | Self::StartRestored | Self::StartArrived => "resume",
            Self::Add => "add-device",
            Self::Eject => "eject",
        }
    }
}

fn tell_failed_resume(turn: Turn, error: &ApiError) {
    if turn == Turn::StartRestored {
        return super::snapshot::tell_failed_restore(error);
    }
    events::emit("vm", "resume-failed", &[("error", &error.to_string())]);
}

fn answer(responder: Option<Responder>, result: ApiResult) {
    if let Some(responder) = responder {
        responder.answer(result);
    }
}

impl Vmm {
    /// Pauses the VM, and answers when that is done and its disks are written back.
    pub(super) fn pause_for(&mut self, responder: Responder) {
        if let Err(error) = self.may_pause() {
            return responder.answer(Err(error));
        }
        events::emit("vm", "pausing", &[]);
        self.turn(Turn::Pause, Some(responder));
    }

    fn may_pause(&mut self) -> Result<(), ApiError> {
        if self.machine_mut()?.is_paused() {
            return Err(ApiError::new(ApiErrorKind::NotBooted, "the VM is paused already"));
        }
        // A vCPU that waits for a page cannot be stopped before it has it, and nothing may wait for
        // another host.
        self.refuse_without_all_pages()
    }

    /// Resumes the live machine, in whatever time it takes to get back what it has given away.
    pub(super) fn resume_live_for(&mut self, responder: Responder) {
        let may_wait = match self.machine_mut() {
            Ok(machine) => machine.is_paused() && machine.lacks_exclusive(),
            Err(error) => return responder.answer(Err(error)),
        };
        if may_wait && matches!(self.pages, Pages::Here) {
            events::emit("vm", "resuming", &[]);
            self.turn(Turn::Resume, Some(responder));
        } else {
            responder.answer(self.resume().map(|()| ApiReply::Empty));
        }
    }

    /// `vm.resume` while the machine turns; gives the responder back if it does not.
    pub(super) fn resume_turning(&mut self, responder: Responder) -> Option<Responder> {
        match &mut self.vm {
            Vm::Turning(turning) if turning.turn == Turn::Pause => {
                turning.give_up.now();
                turning.resumers.push(responder);
                None
            }
            _ => Some(responder),
        }
    }

    /// Starts a machine that has arrived and was not started.
    pub(super) fn start_arrived_for(&mut self, responder: Responder) {
        let (machine, reason) = match std::mem::replace(&mut self.vm, Vm::None) {
            Vm::Standing { machine, reason } => (machine, reason),
            other => {
                responder.answer(Err(other.why_not_live()));
                self.vm = other;
                return;
            }
        };
        events::emit("vm", "resuming", &[]);
        let turn = Turn::StartArrived;
        let info = Box::new(describe::of_machine(machine.machine()));
        let (consoles, give_up) = (machine.machine().consoles().clone(), GiveUp::default());
        let mailer = self.mailer.clone();
        let load = (machine, reason, responder);
        let spawned = super::snapshot::spawn_with(
            turn.thread_name(),
            load,
            move |(machine, reason, responder)| {
                let result = machine.run(true).map(Box::new).map_err(|(machine, error)| {
                    let error = ApiError::from_error(ApiErrorKind::Failed, error.as_ref());
                    (Box::new(machine), error)
                });
                let end = ArrivedEnd { result, reason, responder };
                mailer.send(Message::ArrivedStarted(Box::new(end)));
            },
        );
        match spawned {
            Ok(_detached) => {
                let resumers = Vec::new();
                self.vm = Vm::Turning(Turning { info, consoles, turn, give_up, resumers });
            }
            Err(((machine, reason, responder), error)) => {
                self.vm = Vm::Standing { machine, reason };
                responder.answer(Err(ApiError::from_error(ApiErrorKind::Failed, &error)));
            }
        }
    }

    /// Such a machine has been started, or not.
    pub(super) fn arrived_started(&mut self, end: ArrivedEnd) -> Next {
        let ArrivedEnd { result, reason, responder } = end;
        match result {
            Ok(machine) => {
                self.vm = Vm::Live(machine);
                events::emit("vm", "resumed", &[]);
                if matches!(self.pages, Pages::Here) {
                    self.whole();
                }
                responder.answer(Ok(ApiReply::Empty));
            }
            Err((machine, error)) => {
                self.vm = Vm::Standing { machine, reason };
                events::emit("vm", "resume-failed", &[("error", &error.to_string())]);
                responder.answer(Err(error));
            }
        }
        self.go_on_ending()
    }

    /// Has the live machine stop or go on, or what its guest has let go of taken apart.
    pub(super) fn turn(&mut self, turn: Turn, responder: Option<Responder>) {
        self.turn_with(turn, responder, move |machine, give_up| {
            match turn {
                Turn::Pause => machine.pause(PAUSE_TIME_MAX, &|| give_up.is_told())?,
                Turn::Resume | Turn::StartRestored | Turn::StartArrived => machine.resume()?,
                Turn::Add => {}
                Turn::Eject => machine.take_ejected(),
            }
            Ok(ApiReply::Empty)
        });
    }

    /// Has something done with the live machine that may take long.
    pub(super) fn turn_with(
        &mut self,
        turn: Turn,
        responder: Option<Responder>,
        work: impl FnOnce(&mut Machine, &GiveUp) -> Result<ApiReply, MachineError> + Send + 'static,
    ) {
        let machine = match std::mem::replace(&mut self.vm, Vm::None) {
            Vm::Live(machine) => machine,
            other => {
                answer(responder, Err(other.why_not_live()));
                self.vm = other;
                return;
            }
        };
        let info = Box::new(describe::of_machine(&machine));
        let (consoles, give_up) = (machine.consoles().clone(), GiveUp::default());
        let (mailer, own) = (self.mailer.clone(), give_up.clone());
        let spawned = super::snapshot::spawn_with(
            turn.thread_name(),
            (machine, responder),
            move |(mut machine, responder): (Box<Machine>, _)| {
                let result = work(&mut machine, &own);
                let end = TurnEnd { machine, turn, result, responder };
                mailer.send(Message::Turned(Box::new(end)));
            },
        );
        match spawned {
            Ok(_detached) => {
                let resumers = Vec::new();
                self.vm = Vm::Turning(Turning { info, consoles, turn, give_up, resumers });
            }
            Err(((mut machine, responder), error)) => {
                if turn == Turn::Eject {
                    machine.take_ejected();
                }
                self.vm = Vm::Live(machine);
                answer(responder, Err(ApiError::from_error(ApiErrorKind::Failed, &error)));
            }
        }
    }

    /// The machine has stopped or started, or not.
    pub(super) fn turned(&mut self, end: TurnEnd) -> Next {
        let TurnEnd { machine, turn, result, responder } = end;
        let resumers = match std::mem::replace(&mut self.vm, Vm::Live(machine)) {
            Vm::Turning(turning) => turning.resumers,
            _ => Vec::new(),
        };
        if std::mem::take(&mut self.memory_came) {
            self.memory_has_come();
        }
        let mut next = Next::Continue;
        match (turn, result) {
            (Turn::Pause, Ok(_)) => {
                if let Some(responder) = responder {
                    self.write_back_for(responder);
                }
            }
            (Turn::Pause, Err(error)) => {
                let kind = match error {
                    MachineError::PauseWithdrawn => ApiErrorKind::Conflict,
                    _ => ApiErrorKind::Failed,
                };
                let error = ApiError::from_error(kind, &error).context("the VM runs on");
                log::error!("{error}");
                events::emit("vm", "pause-failed", &[("error", &error.to_string())]);
                answer(responder, Err(error));
            }
            (Turn::Add | Turn::Eject, result) => {
                let failed = |error| ApiError::from_error(ApiErrorKind::Failed, &error);
                answer(responder, result.map_err(failed));
            }
            (turn, result) => {
                let result = result
                    .map_err(|error| ApiError::from_error(ApiErrorKind::Failed, &error))
                    .inspect(|_| events::emit("vm", "resumed", &[]))
                    .inspect_err(|error| tell_failed_resume(turn, error));
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
                // The pause was taken back in time.
                Vm::Live(machine) if !machine.is_paused() => responder.answer(Ok(ApiReply::Empty)),
                _ => self.resume_for(responder),
            }
        }
        next.and_then(|| self.go_on_ending())
    }

    /// Answers when the disks of the paused VM are written back.
    fn write_back_for(&mut self, responder: Responder) {
        let write_back = match self.machine_mut() {
            Ok(machine) => machine.write_back(),
            Err(error) => return responder.answer(Err(error)),
        };
        let machine = self.machine_number;
        if write_back.is_done() {
            // Nothing is waited for.
            let result = write_back.wait();
            return self.pause_is_over(PauseEnd { machine, result, responder });
        }
        let mailer = self.mailer.clone();
        let load = (write_back, responder);
        let spawned = super::snapshot::spawn_with("pause", load, move |(write_back, responder)| {
            let result = WriteBack::wait(write_back);
            mailer.send(Message::PauseEnd(Box::new(PauseEnd { machine, result, responder })));
        });
        if let Err(((_left_to_it, responder), error)) = spawned {
            let error = ApiError::from_error(ApiErrorKind::Failed, &error);
            responder.answer(Err(error.context(
                "the VM is paused, and that its disks are written back is not waited for",
            )));
        }
    }

    /// The disks are written back, or cannot be.
    pub(super) fn pause_is_over(&mut self, end: PauseEnd) {
        let PauseEnd { machine, result, responder } = end;
        let is_paused = match &self.vm {
            Vm::Live(live) => live.is_paused(),
            // Saved or sent, as it was.
            Vm::Busy(_) | Vm::Leaving { .. } => true,
            // It stays as it was, too.
            Vm::Turning(turning) if matches!(turning.turn, Turn::Add | Turn::Eject) => {
                turning.info.state == VmState::Paused
            }
            // It goes on, or has ended.
            _ => false,
        };
        if is_paused && machine == self.machine_number {
            events::emit("vm", "paused", &[]);
        }
        responder.answer(match result {
            Ok(()) => Ok(ApiReply::Empty),
            Err(error) => {
                complain_of_write_back(&error);
                Err(ApiError::from_error(ApiErrorKind::Failed, &error).context(
                    "the VM is paused, but its disks do not hold all that the guest has written; \
                     vm.resume lets it go on",
                ))
            }
        });
    }
}
