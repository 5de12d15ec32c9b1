// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Other sizes for a VM that is there: its balloon.
//!
//! Owns the answers to `vm.resize`.

use super::{Vm, Vmm};
use crate::api::{ApiError, ApiErrorKind};
use crate::config::VmResize;
use crate::events;
use crate::machine::ResizeBalloonError;

impl Vmm {
    /// `vm.resize`.
    pub(super) fn resize(&mut self, wanted: &VmResize) -> Result<(), ApiError> {
        let machine = self.machine_mut().map_err(|mut error| {
            // As clients know it from this request.
            if error.kind == ApiErrorKind::Conflict {
                error.kind = ApiErrorKind::NotNow;
            }
            error
        })?;
        let config = machine.config();
        let vcpus = config.cpus.boot_vcpus;
        let others = wanted.desired_vcpus.is_some_and(|wanted| wanted != vcpus)
            || wanted.desired_ram.is_some_and(|wanted| Some(wanted) != config.memory.total_bytes());
        if others {
            return Err(ApiError::new(
                ApiErrorKind::NotSupported,
                "the number of vCPUs and the size of memory of a VM that runs cannot be changed by \
                 this version; desired_balloon can",
            ));
        }
        let Some(size_bytes) = wanted.desired_balloon else { return Ok(()) };
        machine.resize_balloon(size_bytes).map_err(|error| {
            let kind = match error {
                ResizeBalloonError::None => ApiErrorKind::BadConfig,
                ResizeBalloonError::Size(_) => ApiErrorKind::BadRequest,
            };
            ApiError::from_error(kind, &error)
        })?;
        events::emit("vm", "balloon-resized", &[("size", &size_bytes.to_string())]);
        Ok(())
    }

    /// All of memory is here: what the guest put into its balloon before may go, the rest gets its
    /// huge pages back, and vCPUs get their tables filled.
    pub(super) fn memory_has_come(&mut self) {
        if let Vm::Live(machine) = &mut self.vm {
            if let Some(balloon) = machine.balloon() {
                balloon.retry();
            }
            machine.restore_huge_pages();
            if self.prefault_stage2 {
                machine.prefault_stage2();
            }
        }
    }
}
