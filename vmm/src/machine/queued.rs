// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests that the guest has queued and that its devices have not returned.
//!
//! Owns which queues have requests at all, and the wait until there are none. A queue of the other kind has free buffers, which
//! a device fills when something arrives.

use std::time::{Duration, Instant};

use memory::{GuestMemory, GuestRam};
use pci::{PciDevice as _, Rings, RunningQueues};
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::MachineError;
use super::pausing::POLL_INTERVAL;
use super::virtio::VirtioDevices;

/// Between two looks at the rings, with the guest stopped.
const LOOK_INTERVAL: Duration = Duration::from_micros(100);

/// Offset of the index in a ring.
const RING_INDEX: u64 = 2;

const NET: u16 = 1;
const CONSOLE: u16 = 3;
const CLOCK: u16 = 17;
const VSOCK: u16 = 19;
const IOMMU: u16 = 23;

/// Whether a queue has free buffers instead of requests, by the type of its device and the number of its queues.
pub fn has_free_buffers(device_id: u16, index: usize, count: usize) -> bool {
    match device_id {
        // Pairs, and a last one for control.
        NET => index.is_multiple_of(2) && index.saturating_add(1) < count,
        CONSOLE => index == 0,
        CLOCK | IOMMU => index == 1,
        // What arrives, and events.
        VSOCK => index != 1,
        _ => false,
    }
}

/// Whether the device has returned all requests of a queue. One whose rings are not in memory has none.
fn is_served(memory: &GuestMemory, rings: &Rings) -> bool {
    let index = |ring: u64| {
        let gpa = ring.checked_add(RING_INDEX)?;
        memory.read_obj::<u16>(GuestAddress(gpa)).ok()
    };
    let (queued, returned) = (index(rings.driver_gpa), index(rings.device_gpa));
    queued.zip(returned).is_none_or(|(queued, returned)| queued == returned)
}

fn has_requests(queues: &RunningQueues, rings: &Rings) -> bool {
    !has_free_buffers(queues.device_id, rings.index.into(), queues.count)
}

impl VirtioDevices {
    /// Waits until the devices have returned all requests. The vCPUs have stopped, so that there are no new ones.
    ///
    /// # Errors
    /// [`MachineError::DeviceBusy`] names a device that takes longer than `within`.
    pub(super) fn finish_queued(
        &self,
        ram: &GuestRam,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        let until = Instant::now() + within;
        let mut asked = Instant::now();
        let guest = ram.guest_memory().memory();
        for (_, function) in self.functions() {
            // A vCPU may have stopped before it has notified the device.
            let Some(queues) = function.kick_queues() else { continue };
            let requests = queues.rings.iter().filter(|rings| has_requests(&queues, rings));
            for rings in requests {
                while !is_served(&guest, rings) {
                    let now = Instant::now();
                    if now >= until {
                        let id = function.id().to_owned();
                        return Err(MachineError::DeviceBusy { id, within });
                    }
                    if now.duration_since(asked) >= POLL_INTERVAL {
                        asked = now;
                        if is_cancelled() {
                            return Err(MachineError::PauseWithdrawn);
                        }
                    }
                    std::thread::sleep(LOOK_INTERVAL);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_receives_is_no_request() {
        let free = |device_id, count| -> Vec<usize> {
            (0..count).filter(|index| has_free_buffers(device_id, *index, count)).collect()
        };
        assert_eq!(free(NET, 2), [0]);
        assert_eq!(free(NET, 3), [0]);
        assert_eq!(free(NET, 5), [0, 2]);
        assert_eq!(free(CONSOLE, 2), [0]);
        assert_eq!(free(VSOCK, 3), [0, 2]);
        let none: [usize; 0] = [];
        for device_id in [2, 4, 5, 24, 27, 35] {
            assert_eq!(free(device_id, 4), none);
        }
    }
}
