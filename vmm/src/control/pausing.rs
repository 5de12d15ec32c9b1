// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.pause` and `vm.resume`: what they wait for, and what may be asked meanwhile.
//!
//! Owns the machine while it stops or starts, on a thread of its own: a device finishes what it works
//! on, an image is locked and read anew, and either takes as long as the storage behind it takes. The
//! VMM thread answers other requests meanwhile, and takes a pause back when it is told so. A pause is
//! answered when what the guest has written is on its disks.

use std::time::Duration;

use super::inbox::Message;
use super::{Next, Pages, Vm, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, ApiResult, VmInfo};
use crate::control::describe;
use crate::events;
use crate::machine::{
    Consoles, GiveUp, Machine, MachineError, WriteBack, WriteBackError, complain_of_write_back,
};

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
    result: Result<(), MachineError>,
    responder: Option<Responder>,
}

impl Turn {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "paused, which waits until its devices have finished their requests",
            Self::Eject => "relieved of a device, which waits until that has finished its requests",
            Self::Resume | Self::StartRestored => {
                "resumed, which waits for its disks and network devices"
            }
        }
    }
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

    /// Has the live machine stop or start, or a device of it taken apart.
    pub(super) fn turn(&mut self, turn: Turn, responder: Option<Responder>) {
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
        let name = match turn {
            Turn::Pause => "pause",
            Turn::Resume | Turn::StartRestored => "resume",
            Turn::Eject => "eject",
        };
        let spawned =
            super::snapshot::spawn_with(name, (machine, responder), move |(machine, responder)| {
                let mut machine = machine;
                let result = match turn {
                    Turn::Pause => machine.pause(PAUSE_TIME_MAX, &|| own.is_told()),
                    Turn::Resume | Turn::StartRestored => machine.resume(),
                    Turn::Eject => {
                        machine.take_ejected();
                        Ok(())
                    }
                };
                let end = TurnEnd { machine, turn, result, responder };
                mailer.send(Message::Turned(Box::new(end)));
            });
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
        match (turn, result) {
            (Turn::Pause, Ok(())) => {
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
            (Turn::Resume, Ok(())) => {
                events::emit("vm", "resumed", &[]);
                answer(responder, Ok(ApiReply::Empty));
            }
            (Turn::Resume | Turn::Eject, result) => {
                let result = result.map(|()| ApiReply::Empty);
                let failed = |error| ApiError::from_error(ApiErrorKind::Failed, &error);
                answer(responder, result.map_err(failed));
            }
            (Turn::StartRestored, result) => {
                let result = result
                    .map_err(|error| ApiError::from_error(ApiErrorKind::Failed, &error))
                    .inspect(|()| events::emit("vm", "resumed", &[]))
                    .inspect_err(super::snapshot::tell_failed_restore);
                answer(responder, result.map(|()| ApiReply::Empty));
            }
        }
        for responder in resumers {
            match &self.vm {
                // The pause was taken back in time.
                Vm::Live(machine) if !machine.is_paused() => responder.answer(Ok(ApiReply::Empty)),
                _ => self.resume_for(responder),
            }
        }
        self.go_on_ending()
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
            _ => true,
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
