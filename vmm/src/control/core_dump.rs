// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Core dumps of the guest.
//!
//! Owns the answer to `vm.coredump`; the machine is away on a thread meanwhile, as for a snapshot.

use std::path::Path;

use vm_migration::Cancel;

use super::snapshot::Work;
use super::{Vmm, failed};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::config::VmCoredumpData;
use crate::events;
use crate::machine::Machine;
use crate::migration::core_dump;

fn dump(machine: &Machine, path: &Path, cancel: &Cancel) -> Result<(), ApiError> {
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
        let own_cancel = cancel.clone();
        let job = move |machine: &Machine| dump(machine, &path, &own_cancel);
        self.lend(Work::CoreDump, cancel, responder, job)
    }
}
