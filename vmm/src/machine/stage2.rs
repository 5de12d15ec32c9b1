// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Filling the stage-2 tables of a migrated or restored guest.
//!
//! Owns the filling for a machine, and what is reported about it. Must not begin before all memory is resident, and
//! must never populate any.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::Stage2Filled;
use memory::{Collapse, GuestRam, ZoneKind};

use super::Machine;
use crate::events;

/// How long memory that is being collapsed into huge pages is waited for: collapsing takes away what was filled for its
/// small pages. Of more memory than that, the tables are filled beside it.
const COLLAPSE_FIRST: Duration = Duration::from_secs(2);
const COLLAPSE_FIRST_BYTES: u64 = 8 << 30;

impl Machine {
    /// Starts to prefault stage-2 for all populated memory, on the vCPU threads; the guest may run
    /// meanwhile. Ends with the event `stage2-prefault-completed`. Skipped if KVM does not support it.
    pub fn prefault_stage2(&mut self) {
        if !self.parts.vm.capabilities().pre_fault_memory {
            log::debug!(
                "stage-2 tables are not prefaulted: this KVM has no KVM_PRE_FAULT_MEMORY \
                 (Linux 6.11 with two-dimensional paging has)"
            );
            return;
        }
        let ram = Arc::clone(&self.parts.ram);
        let collapsed = self.collapse.as_ref().map(Collapse::end);
        let runs = move || {
            if let Some(collapsed) = collapsed.filter(|it| it.len_bytes() <= COLLAPSE_FIRST_BYTES) {
                collapsed.within(COLLAPSE_FIRST);
            }
            populated(&ram)
        };
        self.stage2 = self
            .vcpus
            .fill_stage2(runs, report)
            .inspect_err(|error| {
                log::warn!("stage-2 tables are not prefaulted: no thread: {error}");
            })
            .ok();
    }

    /// Stops the stage-2 prefault; what is filled stays. Returns whether it had been started.
    pub(super) fn stop_stage2(&mut self) -> bool {
        self.stage2.take().is_some()
    }
}

/// The guest physical ranges that are populated on the host. A private mapping of a file is left out: what it may hold is
/// the whole file, which would be read, whether the guest ever touches it or not.
fn populated(ram: &GuestRam) -> Vec<Range<u64>> {
    let mut runs = Vec::new();
    for region in ram.regions().iter().filter(|region| region.kind() != ZoneKind::PrivateFile) {
        match region.populated_runs(&(0..region.len_bytes())) {
            Ok(found) => {
                let gpa = region.gpa();
                runs.extend(found.into_iter().map(|run| gpa + run.start..gpa + run.end));
            }
            Err(error) => log::debug!("memory zone '{}' is left out: {error}", region.zone_id()),
        }
    }
    runs
}

fn report(end: Stage2Filled) {
    let Stage2Filled { filled_bytes, took, error, is_stopped } = end;
    let (bytes, took_ms) = (filled_bytes.to_string(), took.as_millis().to_string());
    if let Some(error) = error {
        log::debug!("stage-2 tables are not filled any further: {error}: {}", error.source);
    } else if is_stopped {
        log::debug!("stage-2 tables were filled for {bytes} bytes when the prefault was stopped");
    } else {
        log::info!("stage-2 tables are filled for {} MiB, in {took_ms} ms", filled_bytes >> 20);
        let properties: &[(&'static str, &str)] =
            &[("filled_bytes", &bytes), ("took_ms", &took_ms)];
        events::emit("vm", "stage2-prefault-completed", properties);
    }
}
