// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.pause`: answered when what the guest has written is on its disks.
//!
//! Owns the wait for that, on a thread of its own: a disk takes as long as it takes, and the VMM
//! thread answers other requests meanwhile. The VM is paused all that time.

use super::inbox::Message;
use super::{Vm, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply};
use crate::events;
use crate::machine::{WriteBack, WriteBackError, complain_of_write_back};

/// The disks of a VM that was paused are written back, or not.
pub struct PauseEnd {
    /// Number of its machine.
    machine: u64,
    result: Result<(), WriteBackError>,
    responder: Responder,
}

impl Vmm {
    /// Pauses the VM, and answers when its disks are written back.
    pub(super) fn pause_for(&mut self, responder: Responder) {
        let write_back = match self.pause() {
            Ok(write_back) => write_back,
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
        if let Err(((write_back, responder), error)) = spawned {
            log::debug!("the VMM waits for the disks itself: {error}");
            let result = write_back.wait();
            self.pause_is_over(PauseEnd { machine, result, responder });
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
