// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rings that a back end has started, and how they begin.
//!
//! Owns all that the back end was told of each, so that it can be told again without the thread of the device: a log begins
//! and ends while rings are served. Must never decide which rings are to be served.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::{VhostBackend as _, VringConfigData};
use virtio_queue::QueueT as _;
use vmm_sys_util::eventfd::EventFd;

use super::error::VhostUserError;
use super::ring::Ring;
use super::session::Session;
use crate::virtio::device::{Kicks, VirtioInterrupt};

/// A ring that the back end has started.
pub(super) struct RunningRing {
    pub(super) index: u16,
    /// Where it is, without what concerns a log.
    pub(super) place: VringConfigData,
    /// Guest address of its used ring.
    pub(super) used_gpa: u64,
    pub(super) is_enabled: bool,
    size: u16,
    kicks: Arc<dyn Kicks>,
    call: EventFd,
    interrupt: Arc<dyn VirtioInterrupt>,
}

fn no_eventfd(source: io::Error) -> VhostUserError {
    VhostUserError::Resource { what: "make the eventfd of a queue", source }
}

impl RunningRing {
    /// A ring that the back end has not been told of.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub(super) fn of(ring: &Ring, place: VringConfigData) -> Result<Self, VhostUserError> {
        Ok(Self {
            index: ring.index,
            place,
            used_gpa: ring.queue.used_ring(),
            is_enabled: false,
            size: ring.queue.size(),
            kicks: Arc::clone(&ring.kicks),
            call: ring.call.try_clone().map_err(no_eventfd)?,
            interrupt: Arc::clone(&ring.interrupt),
        })
    }
}

impl Session {
    /// Whether a ring has to be stopped before the back end is told an address of it, or that it is served again.
    ///
    /// Back ends built on vhost-user-backend read the used index when they are told an address, and lose entries that are
    /// used meanwhile; they also drop a signal for a ring that is not enabled. That crate has no RARP, which is how they are
    /// recognised. For others a ring must not be stopped: to DPDK that is the end of the whole device.
    pub(super) fn must_restart_rings(&self) -> bool {
        !self.protocol.contains(VhostUserProtocolFeatures::RARP)
    }

    /// Has the back end begin with a ring at an entry of its available ring; it is neither enabled nor notified of.
    pub(super) fn set_up(&mut self, ring: RunningRing, next: u16) -> Result<(), VhostUserError> {
        let (index, place) = (usize::from(ring.index), self.logged(&ring));
        self.request("SET_VRING_NUM", |to| to.set_vring_num(index, ring.size))?;
        self.request("SET_VRING_ADDR", |to| to.set_vring_addr(index, &place))?;
        self.request("SET_VRING_BASE", |to| to.set_vring_base(index, next))?;
        self.request("SET_VRING_CALL", |to| to.set_vring_call(index, &ring.call))?;
        self.running.push(ring);
        self.has_run = true;
        Ok(())
    }

    /// Has the back end serve rings that it has been told of.
    pub(super) fn begin(&mut self, rings: &[u16]) -> Result<(), VhostUserError> {
        // Before the eventfds: they are signalled, and back ends built on vhost-user-backend before 0.22 drop a signal
        // for a ring that is not enabled. After them once more: two versions of it disable a ring that gets one.
        for index in rings {
            self.enable(*index, true)?;
        }
        for index in rings {
            self.send_kick(*index)?;
        }
        for index in rings {
            self.enable(*index, true)?;
        }
        // The back end answers when it has carried out all before.
        self.await_done()
    }

    fn send_kick(&mut self, index: u16) -> Result<(), VhostUserError> {
        let ring = self.running.iter().find(|ring| ring.index == index);
        let Some(ring) = ring else { return Ok(()) };
        // Signalled already: what the driver has notified of before, or while the ring was stopped.
        let kick = ring.kicks.renew(index).map_err(no_eventfd)?;
        self.request("SET_VRING_KICK", |to| to.set_vring_kick(usize::from(index), &kick))
    }

    /// Stops a ring that is not enabled; returns the index of its next available entry.
    pub(super) fn stop_ring(&mut self, index: u16) -> Result<u16, VhostUserError> {
        let base = self.request("GET_VRING_BASE", |to| to.get_vring_base(usize::from(index)))?;
        self.running.retain(|running| running.index != index);
        // The upper half is for packed rings, which are not offered.
        Ok(u16::try_from(base & 0xffff).unwrap_or(0))
    }

    /// Stops all rings, and starts them with the features and the log that there are now. What the driver notifies of
    /// meanwhile is signalled by the start.
    pub(super) fn restart(&mut self) -> Result<(), VhostUserError> {
        // Requests in flight are completed first, as at any stop.
        self.deadline.begin(Duration::ZERO);
        let begun = self.stop_and_start();
        if begun.is_err() {
            // Also if it was the host that refused: no thread knows of rings that do not run.
            self.disconnect();
        }
        begun
    }

    fn stop_and_start(&mut self) -> Result<(), VhostUserError> {
        let rings = std::mem::take(&mut self.running);
        for ring in rings.iter().filter(|ring| ring.is_enabled) {
            self.enable(ring.index, false)?;
        }
        let mut stopped = Vec::with_capacity(rings.len());
        for ring in rings {
            let next = self.stop_ring(ring.index)?;
            stopped.push((ring, next));
        }
        self.send_features()?;
        let served = stopped.iter().filter(|(ring, _)| ring.is_enabled);
        let served: Vec<_> = served.map(|(ring, _)| ring.index).collect();
        for (ring, next) in stopped {
            self.set_up(RunningRing { is_enabled: false, ..ring }, next)?;
        }
        self.begin(&served)?;
        for ring in &self.running {
            // A stopped ring has no eventfd for what the back end has used last.
            ring.interrupt.queue_used(ring.index);
        }
        Ok(())
    }
}
