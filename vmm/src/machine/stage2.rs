// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Filling the stage-2 tables of a migrated or restored guest.
//!
//! Owns the filling for a machine, and what is reported about it. Must not begin before all memory is resident, and
//! must never populate any.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::Stage2Filled;
use memory::{Collapse, GuestRam, RamRegion};

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

/// The guest physical ranges that have memory of the host. What a private mapping only shows of its file is left out: that
/// would be read, whether the guest ever touches it or not.
fn populated(ram: &GuestRam) -> Vec<Range<u64>> {
    let of = |region: &Arc<RamRegion>| {
        let gpa = region.gpa();
        let runs = region.own_runs(&(0..region.len_bytes()));
        runs.into_iter().map(move |run| gpa + run.start..gpa + run.end)
    };
    ram.regions().iter().flat_map(of).collect()
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

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use memory::{ImageRange, RamConfig, RamImage, RamLayout, RamSources, ZoneSpec};

    use super::*;

    const LEN_BYTES: u64 = 2 << 20;

    #[test]
    fn a_file_is_not_read_for_what_a_guest_may_never_touch() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; 2 << 20], 0).unwrap();
        let range = ImageRange { gpa: 0, len_bytes: LEN_BYTES, offset_bytes: 0 };
        let image = RamImage::new(Arc::new(file), vec![range]).unwrap();
        let config = RamConfig { zones: vec![ZoneSpec::new("z", LEN_BYTES)] };
        let sources = RamSources { image: Some(image), ..RamSources::default() };
        let ram = GuestRam::with_sources(&config, RamLayout::default(), &sources).unwrap();
        // It holds data, and the VM has none of it.
        let region = &ram.regions()[0];
        let shown = region.populated_runs(&(0..LEN_BYTES)).unwrap();
        assert!(shown.contains(&(0..LEN_BYTES)), "{shown:?}");
        assert_eq!(populated(&ram), []);
        region.write_range(4096, &[2]).unwrap();
        let own = populated(&ram);
        // Kernels before 6.7 do not tell.
        assert!(own.iter().all(|run| *run == (4096..8192)), "{own:?}");
    }
}
