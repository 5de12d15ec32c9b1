// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Create, boot, pause, resume, reboot, shut down, delete.
//!
//! Owns the events that tell about it.

use vm_migration::commit::destination::Asked;
use vm_migration::progress::Phase;
use vm_migration::vm::DestinationVm as _;

use super::{Pages, Vm, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, VmState};
use crate::config::VmConfig;
use crate::events;
use crate::machine::{Consoles, KeptOverReboot, Machine, MachineError, WriteBack};

fn failed(error: &dyn std::error::Error) -> ApiError {
    ApiError::from_error(ApiErrorKind::Failed, error)
}

fn emit(event: &'static str) {
    events::emit("vm", event, &[]);
}

impl Vmm {
    pub(super) fn create(&mut self, config: Box<VmConfig>) -> Result<(), ApiError> {
        if !matches!(self.vm, Vm::None) {
            return Err(ApiError::new(
                ApiErrorKind::AlreadyCreated,
                "there is a VM already; delete it first",
            ));
        }
        self.refuse_a_vm_at_the_end()?;
        self.farewell = None;
        self.vm = Vm::Idle(config);
        emit("created");
        Ok(())
    }

    pub(super) fn boot(&mut self) -> Result<(), ApiError> {
        let config = match &self.vm {
            Vm::Idle(config) => config.as_ref().clone(),
            Vm::Live(_) => {
                return Err(ApiError::new(ApiErrorKind::NotBooted, "the VM runs already"));
            }
            other => return Err(other.why_not_live()),
        };
        emit("booting");
        let mut config = config;
        let consoles = Consoles::open(&mut config).map_err(|error| failed(&error))?;
        let kept = KeptOverReboot::default();
        let machine = self.start_machine(config, consoles, kept).map_err(|error| failed(&error))?;
        self.vm = Vm::Live(Box::new(machine));
        emit("booted");
        Ok(())
    }

    fn start_machine(
        &mut self,
        config: VmConfig,
        consoles: Consoles,
        mut kept: KeptOverReboot,
    ) -> Result<Machine, MachineError> {
        let sink = self.new_sink();
        let mut machine = Machine::boot(config, consoles, &self.host, sink, &mut kept)?;
        machine.resume()?;
        machine.settle()?;
        kept.disks.passed_on();
        Ok(machine)
    }

    /// Pauses the VM. What its guest has written to its disks is being written back then:
    /// [`Self::pause_for`] tells when that is done.
    pub(super) fn pause(&mut self) -> Result<WriteBack, ApiError> {
        let machine = self.machine_mut()?;
        if machine.is_paused() {
            return Err(ApiError::new(ApiErrorKind::NotBooted, "the VM is paused already"));
        }
        // A vCPU that waits for a page cannot be stopped before it has it, and nothing may make
        // the VMM thread wait for another host.
        self.refuse_without_all_pages()?;
        let machine = self.machine_mut()?;
        emit("pausing");
        machine.pause().map_err(|error| failed(&error))?;
        Ok(machine.write_back())
    }

    /// `vm.resume`.
    pub(super) fn resume_for(&mut self, responder: Responder) {
        if self.is_given_up() {
            return responder.answer(Err(ApiError::not_created()));
        }
        // A peer that says nothing may take long to be given up, and nothing has been sent to it yet.
        if let Vm::Leaving { info, sending } = &mut self.vm
            && info.state == VmState::Paused
            && sending.has_sent_nothing()
        {
            log::warn!(
                "the VM is to go on: its migration, which has not begun to send it, is cancelled"
            );
            sending.cancel.cancel();
            return sending.resumers.push(responder);
        }
        if let Some(responder) = self.decide_for(Asked::Resume, responder) {
            responder.answer(self.resume().map(|()| ApiReply::Empty));
        }
    }

    pub(super) fn resume(&mut self) -> Result<(), ApiError> {
        if matches!(self.vm, Vm::Standing { .. }) {
            return self.start_standing();
        }
        let machine = self.machine_mut()?;
        if !machine.is_paused() {
            return Err(ApiError::new(ApiErrorKind::NotBooted, "the VM is not paused"));
        }
        emit("resuming");
        machine.resume().map_err(|error| failed(&error))?;
        emit("resumed");
        Ok(())
    }

    /// Starts a machine that has arrived and was not started: a person says that it runs nowhere
    /// else.
    fn start_standing(&mut self) -> Result<(), ApiError> {
        let Vm::Standing { machine, reason } = std::mem::replace(&mut self.vm, Vm::None) else {
            return Err(ApiError::not_booted());
        };
        emit("resuming");
        match machine.run(true) {
            Ok(machine) => {
                self.vm = Vm::Live(Box::new(machine));
                emit("resumed");
                if matches!(self.pages, Pages::Here) {
                    self.whole();
                }
                Ok(())
            }
            Err((machine, error)) => {
                self.vm = Vm::Standing { machine: Box::new(machine), reason };
                Err(ApiError::from_error(ApiErrorKind::Failed, error.as_ref()))
            }
        }
    }

    /// Ends the machine and keeps what it was asked to be.
    pub(super) fn shutdown(&mut self) -> Result<(), ApiError> {
        self.machine_mut()?;
        self.refuse_without_all_pages()?;
        if let Vm::Live(machine) = std::mem::replace(&mut self.vm, Vm::None) {
            let config = machine.lasting_config();
            drop(machine);
            self.stop_filling();
            self.vm = Vm::Idle(Box::new(config));
        }
        emit("shutdown");
        Ok(())
    }

    pub(super) fn reboot(&mut self) -> Result<(), ApiError> {
        self.machine_mut()?;
        self.refuse_without_all_pages()?;
        emit("rebooting");
        let Vm::Live(mut machine) = std::mem::replace(&mut self.vm, Vm::None) else {
            return Err(ApiError::not_booted());
        };
        let (config, consoles) = (machine.lasting_config(), machine.consoles().clone());
        let files = machine.ram().held_files();
        let kept = KeptOverReboot { disks: machine.keep_disks(), files };
        // Taps and memory of the old machine go before the new one wants them.
        drop(machine);
        self.stop_filling();
        match self.start_machine(config.clone(), consoles, kept) {
            Ok(machine) => {
                self.vm = Vm::Live(Box::new(machine));
                emit("rebooted");
                Ok(())
            }
            Err(error) => {
                self.vm = Vm::Idle(Box::new(config));
                Err(failed(&error))
            }
        }
    }

    /// `vm.delete`.
    pub(super) fn delete_for(&mut self, force: bool, responder: Responder) {
        match &mut self.vm {
            Vm::Serving(sending) if force => {
                log::warn!("told to give up pages that a VM elsewhere needs: it is lost");
                sending.deleters.push(responder);
                sending.steering.give_up();
            }
            Vm::Awaited(_) => drop(self.decide_for(Asked::Delete { force }, responder)),
            Vm::Standing { .. } if matches!(self.pages, Pages::Arriving { .. }) => {
                self.give_up_standing(responder);
            }
            _ => responder.answer(self.delete().map(|()| ApiReply::Empty)),
        }
    }

    fn delete(&mut self) -> Result<(), ApiError> {
        match &self.vm {
            Vm::None => return Err(ApiError::not_created()),
            // What has arrived and was not started, or is kept for a guest elsewhere, is given up.
            Vm::Idle(_) | Vm::Standing { .. } | Vm::HandedOver { .. } => {}
            Vm::Live(_) => self.shutdown()?,
            other => return Err(other.why_not_live()),
        }
        self.vm = Vm::None;
        emit("deleted");
        Ok(())
    }

    /// Why the VM waits for pages that do not come, if it does.
    pub(super) fn postcopy_paused(&self) -> Option<String> {
        if let Pages::Lost(paused) = &self.pages {
            return Some(failed(&paused.error).to_string());
        }
        let progress =
            self.progress.as_ref().filter(|_| matches!(self.pages, Pages::Arriving { .. }));
        let document = progress?.snapshot();
        let lost = matches!(document.phase, Phase::PostcopyPaused | Phase::PostcopyRecover);
        lost.then(|| document.recovery.reason.unwrap_or_default())
    }

    /// Postcopy to here has lost its connections.
    fn holds_still(&self) -> bool {
        self.progress.as_ref().is_some_and(|progress| progress.phase() == Phase::PostcopyPaused)
    }

    pub(super) fn refuse_without_all_pages(&self) -> Result<(), ApiError> {
        match &self.pages {
            Pages::Here => Ok(()),
            Pages::Arriving { .. } if self.holds_still() => Err(ApiError::new(
                ApiErrorKind::Conflict,
                "the VM waits for pages from a source that cannot be reached; it goes on when the \
                 source has connected again (vm.migration-recover names a new address), and \
                 vmm.shutdown with force ends it with its VMM",
            )),
            Pages::Arriving { .. } => Err(ApiError::new(
                ApiErrorKind::Conflict,
                "pages of the VM are still arriving from another VMM; wait until they are here",
            )),
            Pages::Lost(paused) => Err(ApiError::from_error(ApiErrorKind::Conflict, &paused.error)
                .context(
                    "the VM waits for pages that are lost, and cannot go on or be taken apart; \
                     vmm.shutdown ends it with its VMM",
                )),
        }
    }

    /// Refuses to move or save a VM whose devices cannot be.
    pub(super) fn refuse_unmovable(&mut self) -> Result<(), ApiError> {
        let movable = self.machine_mut()?.check_movable();
        movable.map_err(|error| ApiError::from_error(ApiErrorKind::Conflict, &error))
    }
}
