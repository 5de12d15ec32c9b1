// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Create, boot, pause, resume, reboot, shut down, delete.
//!
//! Owns the events that tell about it.

use memory::HeldFile;
use vm_migration::progress::Phase;
use vm_migration::vm::DestinationVm as _;

use super::{Next, Pages, RunError, Vm, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply};
use crate::config::VmConfig;
use crate::events;
use crate::machine::{Consoles, GuestEvent, Machine, MachineError};
use crate::options::ExitReason;

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
        let machine =
            self.start_machine(config, consoles, Vec::new()).map_err(|error| failed(&error))?;
        self.vm = Vm::Live(Box::new(machine));
        emit("booted");
        Ok(())
    }

    fn start_machine(
        &mut self,
        config: VmConfig,
        consoles: Consoles,
        held: Vec<HeldFile>,
    ) -> Result<Machine, MachineError> {
        let sink = self.new_sink();
        let mut machine = Machine::boot(config, consoles, &self.host, sink, held)?;
        machine.take_exclusive()?;
        machine.resume()?;
        machine.settle()?;
        Ok(machine)
    }

    pub(super) fn pause(&mut self) -> Result<(), ApiError> {
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
        emit("paused");
        Ok(())
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
        let Vm::Live(machine) = std::mem::replace(&mut self.vm, Vm::None) else {
            return Err(ApiError::not_booted());
        };
        let (config, consoles) = (machine.lasting_config(), machine.consoles().clone());
        let held = machine.ram().held_files();
        // Locks, taps and memory of the old machine go before the new one wants them; files of memory stay
        // locked, so that no other VM gets them meanwhile.
        drop(machine);
        self.stop_filling();
        match self.start_machine(config.clone(), consoles, held) {
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
            _ => responder.answer(self.delete().map(|()| ApiReply::Empty)),
        }
    }

    fn delete(&mut self) -> Result<(), ApiError> {
        match &self.vm {
            Vm::None => return Err(ApiError::not_created()),
            // What has arrived and was not started, or is kept for a guest elsewhere, is given up.
            Vm::Idle(_) | Vm::Standing { .. } | Vm::HandedOver { .. } => {}
            Vm::Live(_) => self.shutdown()?,
            Vm::Awaited(receiving) => {
                // The thread answers whoever asked, and the message that follows ends the wait.
                receiving.cancel.cancel();
                return Ok(());
            }
            other => return Err(other.why_not_live()),
        }
        self.vm = Vm::None;
        emit("deleted");
        Ok(())
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

    /// Acts on what the guest did.
    pub(super) fn guest_event(&mut self, event: GuestEvent) -> Next {
        if let Vm::Leaving { sending, pending, .. } = &mut self.vm {
            // A device that the guest has let go of is taken apart where the guest is then.
            if !matches!(event, GuestEvent::Ejected | GuestEvent::DeviceWanted { .. }) {
                log::info!(
                    "the guest ends or reboots while it is migrated: the migration is cancelled"
                );
                sending.cancel.cancel();
            }
            pending.push(event);
            return Next::Continue;
        }
        if let Vm::Busy(busy) = &mut self.vm {
            busy.pending.push(event);
            return Next::Continue;
        }
        if self.machine_mut().is_err() {
            return Next::Continue;
        }
        match (&mut self.pages, &event) {
            (
                Pages::Arriving { deferred, .. },
                GuestEvent::Reset | GuestEvent::Shutdown | GuestEvent::Ejected,
            ) => {
                log::info!("what the guest does ({event:?}) waits until its last page is here");
                deferred.push(event);
                return Next::Continue;
            }
            (Pages::Lost(_), GuestEvent::Reset | GuestEvent::Shutdown | GuestEvent::Ejected) => {
                log::warn!("the guest does {event:?}, and pages of it are lost: it stays as it is");
                return Next::Continue;
            }
            _ => {}
        }
        match event {
            GuestEvent::Reset => match self.reboot() {
                Ok(()) => Next::Continue,
                Err(error) => Next::Fail(RunError::Reboot(error)),
            },
            GuestEvent::Shutdown => {
                log::info!("the guest has shut down");
                match self.shutdown() {
                    Ok(()) if self.no_shutdown => Next::Continue,
                    Ok(()) => Next::Exit(ExitReason::GuestShutdown),
                    Err(error) => Next::Fail(RunError::Shutdown(error)),
                }
            }
            GuestEvent::Ejected => {
                self.devices_ejected();
                Next::Continue
            }
            GuestEvent::DeviceWanted { id } => {
                if let Err(error) = self.remove_device(&id) {
                    log::warn!("the guest cannot be asked to let go of '{id}': {error}");
                }
                Next::Continue
            }
            GuestEvent::VcpuStopped { index, reason } => {
                events::emit("guest", "panic", &[("vcpu", &index.to_string())]);
                Next::Fail(RunError::VcpuStopped { index, reason: format!("{reason:?}") })
            }
        }
    }
}
