// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests in the queues of a machine that is sent.
//!
//! Owns the rule that there are none. v53 has its devices serve their queues when it drops a VM that has never run there: late,
//! without its locks, and while the guest may go on elsewhere. Free buffers of the guest stay: what v53 could write into them
//! arrives from outside, and goes to its own copy of memory.

use pci::{VIRTIO_PCI_KIND, VirtioPciState};
use serde::Deserialize as _;

use super::error::{ExportError, ensure};
use crate::adopt::ReadGuest;
use crate::machine::{MachineState, has_free_buffers};

/// Offset of the index in a ring.
const RING_INDEX: u64 = 2;

/// Refuses a machine with a request that its device has not returned.
///
/// # Errors
/// Names the device and the queue.
pub fn check_queued(state: &MachineState, guest: &dyn ReadGuest) -> Result<(), ExportError> {
    for (id, function) in &state.pci {
        if function.state.kind != VIRTIO_PCI_KIND {
            continue;
        }
        let device = VirtioPciState::deserialize(&function.state.data)?;
        if !device.common.active {
            continue;
        }
        let (device_id, count) = (device.device_id, device.queues.len());
        let enabled = device.queues.iter().enumerate().filter(|(_, queue)| queue.enabled);
        for (index, queue) in enabled.filter(|(at, _)| !has_free_buffers(device_id, *at, count)) {
            let what = || format!("device '{id}', queue {index}");
            let read = |ring: u64| {
                let gpa = ring.saturating_add(RING_INDEX);
                let failed = |source| ExportError::Guest { what: what(), gpa, source };
                guest.read_u16(gpa).map_err(failed)
            };
            let (queued, returned) = (read(queue.driver_gpa)?, read(queue.device_gpa)?);
            let problem = || {
                let count = queued.wrapping_sub(returned);
                format!(
                    "{count} requests of the guest wait in it, and would be served there even if the VM stays here; send a VM \
                     that runs, so that they are served before"
                )
            };
            ensure(queued == returned, what, problem)?;
        }
    }
    Ok(())
}
