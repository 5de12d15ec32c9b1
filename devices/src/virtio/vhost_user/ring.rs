// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A descriptor ring that a vhost-user back end serves.
//!
//! Owns where the ring is in this process, and whether the back end serves it (vhost-user, "Ring states"). It must never
//! talk to the back end.

use std::sync::Arc;

use memory::GuestMemory;
use vhost::VringConfigData;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::eventfd::EventFd;

use super::error::VhostUserError;
use crate::virtio::device::{Kicks, VirtioInterrupt};

/// What the back end does with a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingStage {
    /// It does not access it, and may not have heard of it.
    Stopped,
    /// It was started, and is not served for the time being.
    Disabled,
    /// It is served.
    Enabled,
}

/// A descriptor ring of the device, with its eventfds.
pub(super) struct Ring {
    pub(super) index: u16,
    pub(super) queue: Queue,
    /// Maximum size of the queue.
    pub(super) size_max: u16,
    /// Signalled by notifications that the kernel did not take; the back end does not have it.
    pub(super) trapped: EventFd,
    /// What the driver signals when it notifies the queue; each start has another.
    pub(super) kicks: Arc<dyn Kicks>,
    /// Signalled when the back end has used buffers. It must never be read or written here: the back end may make
    /// that block.
    pub(super) call: EventFd,
    /// By which the driver is told of what was used while nothing was signalled.
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) stage: RingStage,
    /// It is to be served while the device works; only the pairs of a network that its driver does not use are not.
    pub(super) is_wanted: bool,
}

impl Ring {
    /// Where it is in this process, as the back end is told.
    ///
    /// # Errors
    /// It is outside of guest memory.
    pub(super) fn place(&self, memory: &GuestMemory) -> Result<VringConfigData, VhostUserError> {
        let queue = &self.queue;
        // Contiguous in the back end, so as a whole in one region.
        let host = |gpa: u64, len_bytes: usize| {
            let bytes = memory.get_slice(GuestAddress(gpa), len_bytes);
            bytes.map(|bytes| bytes.ptr_guard().as_ptr().addr() as u64)
        };
        let size = usize::from(queue.size());
        let outside = |_| VhostUserError::Ring { index: self.index };
        Ok(VringConfigData {
            queue_max_size: self.size_max,
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr: host(queue.desc_table(), 16 * size).map_err(outside)?,
            used_ring_addr: host(queue.used_ring(), 6 + 8 * size).map_err(outside)?,
            avail_ring_addr: host(queue.avail_ring(), 6 + 2 * size).map_err(outside)?,
            log_addr: None,
        })
    }
}
