// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio transport: registers and queues.
//!
//! Owns the rule for positions of queues, which no document has: v53 takes the index in the used ring for both, so that a
//! device must have returned all that it took.

use cloud_hypervisor_state::{CommonConfig, Fixed, List, Queue, Transport, TransportData};
use pci::{QueueRegisterState, VirtioPciState};

use super::Seen;
use super::error::{ExportError, ensure, fits};
use super::functions::{self, Bar, Site};

/// Bits of the status register: all that a driver sets, and the last of them.
const KNOWN_STATUS: u8 = 0xf;
const DRIVER_OK: u8 = 4;
/// Offset of the index in a ring.
const RING_INDEX: u64 = 2;

/// The transport of a device, and the place of its BAR. `sizes` are the maximum sizes of its queues.
///
/// # Errors
/// Names what v53 could not take over.
pub fn convert(
    site: &Site<'_>,
    state: &VirtioPciState,
    sizes: &[u16],
    bar_len_bytes: u64,
    seen: &Seen<'_>,
) -> Result<(Transport, Bar), ExportError> {
    let what = site.what;
    let common = &state.common;
    let (status, active) = (common.status, common.active);
    let problem = || format!("its status is {status:#x}: it has failed, or needs a reset");
    ensure(status & !KNOWN_STATUS == 0, || what.to_owned(), problem)?;
    let problem = || format!("its status is {status:#x}, and whether it runs: {active}");
    ensure(active == (status & DRIVER_OK != 0), || what.to_owned(), problem)?;
    let problem = || "its driver has accepted a feature above bit 63".to_owned();
    ensure(!common.driver_features_beyond, || what.to_owned(), problem)?;
    let problem = || format!("it has {} queues, and {} of a size", state.queues.len(), sizes.len());
    ensure(sizes.len() == state.queues.len(), || what.to_owned(), problem)?;
    let mut function = functions::configuration(site, &state.config, bar_len_bytes)?;
    let access = functions::take_access(what, &mut function.configuration)?;
    let msix = functions::msix(what, &state.msix, &function.configuration)?;
    let mut queues = Vec::new();
    for ((index, queue), max_size) in state.queues.iter().enumerate().zip(sizes) {
        let source = Source { what, index, queue, seen };
        source.check(active)?;
        queues.push(Queue {
            max_size: *max_size,
            size: queue.size,
            ready: queue.enabled,
            desc_table: queue.desc_gpa,
            avail_ring: queue.driver_gpa,
            used_ring: queue.device_gpa,
        });
    }
    let vectors: Vec<u16> = state.queues.iter().map(|queue| queue.vector).collect();
    let transport = Transport {
        data: TransportData {
            device_activated: active,
            queues: fits(List::try_from(queues), || what.to_owned())?,
            interrupt_status: common.isr.into(),
            cap_pci_cfg_offset: access.offset,
            cap_pci_cfg: Fixed::from(access.bytes),
        },
        configuration: function.configuration,
        common: CommonConfig {
            driver_status: status,
            config_generation: common.config_generation,
            device_feature_select: common.device_feature_select,
            driver_feature_select: common.driver_feature_select,
            queue_select: common.queue_select,
            msix_config: common.config_vector,
            msix_queues: fits(List::try_from(vectors), || what.to_owned())?,
        },
        msix,
    };
    Ok((transport, function.bar))
}

/// A queue that is converted.
struct Source<'a> {
    what: &'a str,
    index: usize,
    queue: &'a QueueRegisterState,
    seen: &'a Seen<'a>,
}

impl Source<'_> {
    fn what(&self) -> String {
        format!("{}, queue {}", self.what, self.index)
    }

    /// Refuses a queue with which v53 would end its process, or go on elsewhere.
    fn check(&self, active: bool) -> Result<(), ExportError> {
        let QueueRegisterState { desc_gpa, driver_gpa, device_gpa, enabled, .. } = *self.queue;
        for (gpa, align) in [(desc_gpa, 16), (driver_gpa, 2), (device_gpa, 4)] {
            let problem = || format!("a ring at {gpa:#x} is not aligned");
            ensure(gpa.is_multiple_of(align), || self.what(), problem)?;
        }
        // Read there of each queue, whether it is in use or not.
        let index_gpa = device_gpa.saturating_add(RING_INDEX);
        let problem = || format!("its used ring at {device_gpa:#x} is not in memory");
        ensure(self.seen.layout.holds(index_gpa, 2), || self.what(), problem)?;
        let Some(progress) = self.queue.progress.filter(|_| active && enabled) else {
            return Ok(());
        };
        let failed = |source| ExportError::Guest { what: self.what(), gpa: index_gpa, source };
        let used = self.seen.guest.read_u16(index_gpa).map_err(failed)?;
        let (next_avail, next_used) = (progress.next_avail, progress.next_used);
        let problem = || {
            format!(
                "the device has taken {next_avail} requests and returned {next_used}, and the ring says {used}: it has \
                 not finished"
            )
        };
        ensure(next_avail == next_used && next_used == used, || self.what(), problem)
    }
}
