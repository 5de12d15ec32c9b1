// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Teardown of a machine: shutdown, reboot, delete, or the end of the process.
//!
//! Owns the machine while it ends, on a separate thread: its devices finish their requests and its
//! disks are written back before their locks are released, which takes as long as the underlying storage
//! needs. What happens to the VM is decided before, and done by the VMM thread afterwards.

use std::sync::Arc;

use super::inbox::Message;
use super::snapshot::MemoryFill;
use super::starting::{Start, refuse};
use super::threads::spawn_with;
use super::{GuestPages, Next, RunError, VmLifecycle, Vmm, emit};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, VmInfo};
use crate::config::VmConfig;
use crate::control::describe;
use crate::events;
use crate::machine::{Consoles, KeptForReboot, LockedImages, Machine};
use crate::options::ExitReason;

/// What follows the end of a machine.
pub enum AfterTeardown {
    /// The VM stays configured.
    Created {
        /// The configuration.
        config: Box<VmConfig>,
        /// The responder of the request; `None` if the guest shut down.
        responder: Option<Responder>,
    },
    /// The VM is deleted.
    Deleted(Responder),
    /// The VM boots again.
    Reboot {
        /// The configuration.
        config: Box<VmConfig>,
        /// The consoles, to which clients stay attached.
        consoles: Consoles,
        /// Locks and memory, kept so that no other VM takes them in between.
        kept: Box<KeptForReboot>,
        /// The responder of the request; `None` if the guest reset itself.
        responder: Option<Responder>,
    },
    /// The process ends, with an error if there is one.
    End(Option<RunError>),
}

/// A machine that is being torn down.
pub struct Teardown {
    /// Its description for `vm.info`.
    pub info: Box<VmInfo>,
    /// Its consoles, whose terminals are restored if the process ends during the teardown.
    pub consoles: Consoles,
    pub(super) after: AfterTeardown,
}

impl AfterTeardown {
    fn name(&self) -> &'static str {
        match self {
            Self::Created { .. } | Self::End(_) => "vm-shutdown",
            Self::Deleted(_) => "vm-delete",
            Self::Reboot { .. } => "vm-reboot",
        }
    }
}

impl Teardown {
    /// Reports that the reboot has failed, if there was one.
    pub fn report_failed(&self) {
        if matches!(self.after, AfterTeardown::Reboot { .. }) {
            report_failed_reboot();
        }
    }
}

/// Error for a VM that was to reboot in a process that ends.
const TOLD_TO_END: &str = "the VMM has been told to end";

fn report_failed_reboot() {
    events::emit("vm", "reboot-failed", &[("error", TOLD_TO_END)]);
}

impl Vmm {
    /// `vm.shutdown`, or a shutdown by the guest.
    pub(super) fn shutdown_for(&mut self, responder: Option<Responder>) -> Next {
        let Some(responder) = responder else { return self.shutdown_live(None) };
        match self.end_starting(false, responder) {
            Some(responder) => self.shutdown_live(Some(responder)),
            None => Next::Continue,
        }
    }

    fn shutdown_live(&mut self, responder: Option<Responder>) -> Next {
        match self.config_after(Machine::lasting_config) {
            Ok(config) => self.tear_down(AfterTeardown::Created { config, responder }),
            Err(error) => refuse(responder, error, RunError::Shutdown),
        }
    }

    /// `vm.reboot`, or a reset by the guest.
    pub(super) fn reboot_for(&mut self, responder: Option<Responder>) -> Next {
        let config = match self.config_after(Machine::rebooting_config) {
            Ok(config) => config,
            Err(error) => return refuse(responder, error, RunError::Reboot),
        };
        emit("rebooting");
        let VmLifecycle::Live(machine) = &mut self.vm else { return Next::Continue };
        let (consoles, files) = (machine.consoles().clone(), machine.ram().locked_files());
        let ram = Some(Arc::clone(machine.ram()));
        let mut disks = machine.take_locked_images();
        let going = disks.not_in(&config);
        let (dma, pool) = (machine.keep_dma(), machine.keep_pool());
        let kept = Box::new(KeptForReboot { is_reboot: true, disks, files, ram, dma, pool });
        self.tear_down_with(AfterTeardown::Reboot { config, consoles, kept, responder }, going)
    }

    fn config_after(
        &mut self,
        config: fn(&Machine) -> VmConfig,
    ) -> Result<Box<VmConfig>, ApiError> {
        self.machine_mut()?;
        self.refuse_without_all_pages()?;
        let machine = self.machine_mut()?;
        let config = config(machine);
        // Devices that the guest was asked to eject are removed with the machine, and so are those that cannot be opened again.
        for id in machine.config().ids_not_in(&config) {
            events::emit("vm", "device-removed", &[("id", &id)]);
        }
        Ok(Box::new(config))
    }

    /// Starts to tear down the live machine.
    pub(super) fn tear_down(&mut self, after: AfterTeardown) -> Next {
        self.tear_down_with(after, LockedImages::default())
    }

    /// Like [`Self::tear_down`]; the locks in `going` are released too, as no later machine takes them.
    fn tear_down_with(&mut self, after: AfterTeardown, going: LockedImages) -> Next {
        let machine = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Live(machine) => machine,
            other => {
                self.vm = other;
                return Next::Continue;
            }
        };
        let info = Box::new(describe::of_machine(&machine));
        let consoles = machine.consoles().clone();
        let name = after.name();
        let is_reboot = matches!(after, AfterTeardown::Reboot { .. });
        self.vm = VmLifecycle::TearingDown(Teardown { info, consoles, after });
        let inbox_sender = self.inbox_sender.clone();
        let load = (machine, self.filling.take(), going);
        type Load = (Box<Machine>, Option<MemoryFill>, LockedImages);
        let end = move |(mut machine, filling, going): Load| {
            if is_reboot {
                // The guest does not run any more, and the devices are not closed yet.
                machine.end();
                machine.renew_pool();
            }
            drop(machine);
            // The memory being restored is no longer needed.
            if let Some(filling) = filling {
                filling.stop();
            }
            drop(going);
        };
        let spawned = spawn_with(name, load, move |load| {
            end(load);
            inbox_sender.send(Message::TornDown);
        });
        match spawned {
            Ok(_detached) => Next::Continue,
            Err((load, error)) => {
                log::warn!("the VMM waits for the devices itself: {error}");
                end(load);
                self.torn_down()
            }
        }
    }

    /// Releases what was kept for a machine that is not created, and then continues to end.
    fn release_kept(
        &mut self,
        kept: KeptForReboot,
        (info, consoles): (Box<VmInfo>, Consoles),
    ) -> Next {
        self.vm =
            VmLifecycle::TearingDown(Teardown { info, consoles, after: AfterTeardown::End(None) });
        let inbox_sender = self.inbox_sender.clone();
        let spawned = spawn_with("vm-shutdown", kept, move |kept| {
            drop(kept);
            inbox_sender.send(Message::TornDown);
        });
        match spawned {
            Ok(_detached) => Next::Continue,
            Err((kept, _)) => {
                drop(kept);
                self.torn_down()
            }
        }
    }

    /// Handles the end of the machine.
    pub(super) fn torn_down(&mut self) -> Next {
        let teardown = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::TearingDown(teardown) => teardown,
            other => {
                self.vm = other;
                return Next::Continue;
            }
        };
        let mut next = Next::Continue;
        match teardown.after {
            AfterTeardown::Created { config, responder } => {
                self.vm = VmLifecycle::Created(config);
                emit("shutdown");
                match responder {
                    Some(responder) => responder.answer(Ok(ApiReply::Empty)),
                    // Requests to end the process are answered as it ends.
                    None if self.no_shutdown || self.ending.is_some() => {}
                    None => next = Next::Exit(ExitReason::GuestShutdown),
                }
            }
            AfterTeardown::Deleted(responder) => {
                emit("shutdown");
                emit("deleted");
                responder.answer(Ok(ApiReply::Empty));
            }
            AfterTeardown::Reboot { kept, responder, .. } if self.ending.is_some() => {
                report_failed_reboot();
                if let Some(responder) = responder {
                    responder.answer(Err(ApiError::new(ApiErrorKind::Conflict, TOLD_TO_END)));
                }
                return self.release_kept(*kept, (teardown.info, teardown.consoles));
            }
            AfterTeardown::Reboot { config, consoles, kept, responder } => {
                let start = Start::Reboot { consoles, kept };
                return self.start(start, config, teardown.info, responder);
            }
            AfterTeardown::End(error) => {
                emit("shutdown");
                if let Some(error) = error {
                    next = Next::Fail(error);
                }
            }
        }
        match next {
            Next::Continue => self.go_on_ending(),
            other => other,
        }
    }

    /// Ends the live machine and then the process, with an error if there is one. A machine with missing
    /// pages is never torn down: a thread that waits for a page must not see other contents in its place,
    /// or they would be written to a disk. The end of the process ends such threads.
    pub(super) fn end_with_machine(&mut self, error: Option<RunError>) -> Next {
        if matches!(self.pages, GuestPages::Resident) {
            return self.tear_down(AfterTeardown::End(error));
        }
        let machine = std::mem::replace(&mut self.vm, VmLifecycle::None);
        let waiting = std::mem::replace(&mut self.pages, GuestPages::Resident);
        std::mem::forget((machine, waiting));
        emit("shutdown");
        match error {
            Some(error) => Next::Fail(error),
            None => self.go_on_ending(),
        }
    }
}
