// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Core dumps of the guest.
//!
//! Owns the answer to `vm.coredump`; the machine is away on a thread meanwhile, as for a snapshot.

use std::path::Path;

use vm_migration::Cancel;

use super::snapshot::{Busy, SaveEnd, Work};
use super::threads::spawn_with;
use super::{VmLifecycle, Vmm, describe, emit, failed};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::config::VmCoredumpData;
use crate::control::inbox::Message;
use crate::events;
use crate::machine::Machine;
use crate::migration::core_dump;

fn dump_on_thread(machine: &Machine, path: &Path, cancel: &Cancel) -> Result<(), ApiError> {
    let report = core_dump::take(machine, path, cancel).map_err(|error| failed(&error))?;
    log::info!(
        "dumped to {}: {} of {} MiB in {} ms{}",
        path.display(),
        report.data_bytes >> 20,
        report.memory_bytes >> 20,
        report.took.as_millis(),
        if report.has_text { ", with the kernel's own description" } else { "" }
    );
    Ok(())
}

impl Vmm {
    /// Starts the core dump of the paused VM; answered when it is complete.
    pub(super) fn core_dump(&mut self, config: &VmCoredumpData, responder: Responder) {
        if let Err((error, responder)) = self.try_core_dump(config, responder) {
            events::emit("vm", "coredump-failed", &[("error", &error.to_string())]);
            responder.answer(Err(error));
        }
    }

    fn try_core_dump(
        &mut self,
        config: &VmCoredumpData,
        responder: Responder,
    ) -> Result<(), (ApiError, Responder)> {
        let prepared = config
            .file()
            .map_err(|error| ApiError::from_error(ApiErrorKind::BadConfig, &error))
            .and_then(|path| {
                self.refuse_while_memory_arrives("dumped")?;
                if !self.machine_mut()?.is_paused() {
                    let why = "the VM runs; pause it before its memory is dumped";
                    return Err(ApiError::new(ApiErrorKind::NotBooted, why));
                }
                Ok((path, Cancel::new().map_err(|error| failed(&error))?))
            });
        let (path, cancel) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err((error, responder)),
        };
        let VmLifecycle::Live(machine) = std::mem::replace(&mut self.vm, VmLifecycle::None) else {
            return Err((ApiError::not_booted(), responder));
        };
        let busy =
            Busy::new(Work::CoreDump(Box::new(describe::of_machine(&machine))), cancel.clone());
        emit("coredumping");
        let inbox_sender = self.inbox_sender.clone();
        let thread = spawn_with("snapshot", (machine, responder), move |(machine, responder)| {
            let result = dump_on_thread(&machine, &path, &cancel);
            inbox_sender.send(Message::Saved(Box::new(SaveEnd { machine, result, responder })));
        });
        match thread {
            Ok(_detached) => {
                self.vm = VmLifecycle::Busy(busy);
                Ok(())
            }
            Err(((machine, responder), error)) => {
                self.vm = VmLifecycle::Live(machine);
                Err((failed(&error), responder))
            }
        }
    }
}
