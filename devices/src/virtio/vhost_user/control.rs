// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue of a network device of vhost-user, which the VMM serves.
//!
//! Owns the eventfd by which the kernel takes the driver's notifications. The back end does not have it, unlike those of
//! the other queues, so it may be read here. What a command means is not known here.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use log::error;
use vmm_sys_util::eventfd::EventFd;

use crate::virtio::device::Kicks;
use crate::virtio::queue::{Broken, WorkQueue};
use crate::virtio::worker::Watch;

/// The control queue.
pub(super) struct ControlQueue {
    /// Its own eventfd is signalled by notifications that the kernel did not take.
    pub(super) queue: WorkQueue,
    kicks: Arc<dyn Kicks>,
    /// What the driver signals, once the queue is served.
    taken: Option<EventFd>,
}

impl ControlQueue {
    /// A queue that is not served yet.
    pub(super) fn new(queue: WorkQueue, kicks: Arc<dyn Kicks>) -> Self {
        Self { queue, kicks, taken: None }
    }

    /// Watches for notifications that the kernel takes, and for `trapped` ones.
    ///
    /// # Errors
    /// The host refuses that.
    pub(super) fn watch(
        &mut self,
        watch: &mut Watch,
        taken: u64,
        trapped: u64,
    ) -> Result<(), Broken> {
        watch.on(trapped, self.queue.kick().as_raw_fd())?;
        if self.taken.is_none() {
            let kick = self.kicks.renew(self.queue.index()).map_err(|error| {
                error!("the driver cannot notify the control queue: {error}");
                Broken::Device("the host refused an eventfd for the control queue")
            })?;
            self.taken = Some(kick);
        }
        match &self.taken {
            Some(kick) => watch.on(taken, kick.as_raw_fd()),
            None => Ok(()),
        }
    }

    /// Takes notifications, before the queue is served.
    pub(super) fn take_kicks(&self) {
        self.queue.take_kick();
        if let Some(kick) = &self.taken {
            // Fails if it was not signalled.
            let _ = kick.read();
        }
    }
}
