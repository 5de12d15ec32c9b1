// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a vhost-user device: it starts and stops the back end's queues, and forwards its interrupts.
//!
//! Owns what happens when the back end fails: the driver is told that the device needs a reset, the VMM
//! that the back end is lost, once, and the VM goes on. It must never read or write a ring, nor an eventfd that
//! the back end has: that process may make it block.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::GuestMemoryHandle;
use parking_lot::Mutex;
use virtio_queue::{QueueState, QueueT};
use vm_memory::GuestAddressSpace;

use super::counters::VhostUserCounters;
use super::error::VhostUserError;
use super::session::{Ring, Session};
use crate::virtio::device::VirtioInterrupt;
use crate::virtio::queue::Broken;
use crate::virtio::worker::{Watch, Work};

/// Token of the connection; the others are positions of rings, for the back end's signals.
const CONNECTION: u64 = u64::MAX - 1;

/// Added to the position of a ring: the notifications that the kernel did not take.
const TRAPPED: u64 = 1 << 32;

/// Called when a back end is lost, with the reason.
pub type OnLost = Arc<dyn Fn(&str) + Send + Sync>;

pub(super) struct VhostUserWorker {
    pub(super) rings: Vec<Ring>,
    pub(super) features: u64,
    pub(super) memory: GuestMemoryHandle,
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) session: Arc<Mutex<Session>>,
    pub(super) counters: Arc<VhostUserCounters>,
    pub(super) on_lost: OnLost,
    /// The back end serves the rings.
    pub(super) is_serving: bool,
}

impl VhostUserWorker {
    fn lost(&mut self, why: &str) -> Broken {
        // Nothing is left to stop.
        self.is_serving = false;
        let mut session = self.session.lock();
        session.disconnect();
        let is_first = session.report_loss();
        drop(session);
        // The driver may try again as often as it wants.
        if is_first {
            (self.on_lost)(why);
        }
        Broken::Device("the vhost-user back end is lost")
    }

    /// A mistake of the driver costs it a reset of the device, not the back end.
    fn not_started(&mut self, error: &VhostUserError) -> Broken {
        if let VhostUserError::Ring { .. } = error {
            return Broken::Device("a ring is not in memory that the back end can reach");
        }
        self.lost(&error_text::chain(error))
    }

    fn serve(&mut self) -> Result<(), Broken> {
        for ring in &self.rings {
            // What was notified of before is signalled by the start. Fails if there is nothing.
            let _ = ring.trapped.read();
        }
        let memory = self.memory.memory();
        let started = self.session.lock().start(self.features, &memory, &self.rings);
        started.map_err(|error| self.not_started(&error))?;
        self.is_serving = true;
        Ok(())
    }

    fn stop(&mut self) -> Result<(), Broken> {
        if !std::mem::take(&mut self.is_serving) {
            return Ok(());
        }
        let memory = self.memory.memory();
        let stopped = self.session.lock().stop(&mut self.rings);
        stopped.map_err(|error| self.lost(&error_text::chain(&error)))?;
        for ring in &mut self.rings {
            if let Ok(used) = ring.queue.used_idx(&*memory, Ordering::Acquire) {
                ring.queue.set_next_used(used.0);
            }
            // For what the back end has used last.
            self.interrupt.queue_used(ring.index);
        }
        Ok(())
    }
}

impl Work for VhostUserWorker {
    fn kind(&self) -> &'static str {
        "device-vhost"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        // A pause that was withdrawn may have stopped them.
        if !self.is_serving {
            self.serve()?;
        }
        watch.on(CONNECTION, self.session.lock().connection_fd())?;
        for (token, ring) in (0..).zip(&self.rings) {
            watch.on_signal(token, ring.call.as_raw_fd())?;
            watch.on(TRAPPED + token, ring.trapped.as_raw_fd())?;
        }
        Ok(())
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        if token == CONNECTION {
            // It may have been the answer to an access of the configuration, which holds the session until then.
            if !self.session.lock().is_spoken_to() {
                return Ok(());
            }
            return Err(self.lost("it has closed the connection, or sent what was not asked for"));
        }
        if token >= TRAPPED {
            // The eventfd that the back end reads must not be written here, so the rings start with new ones, which are
            // signalled. Back ends do not take another for a ring that runs. It is rare: the kernel takes all
            // notifications but those of firmware that cannot reach the BAR.
            self.stop()?;
            return self.serve();
        }
        let position = usize::try_from(token).unwrap_or(usize::MAX);
        if let Some(ring) = self.rings.get(position) {
            self.counters.interrupts.add(1);
            self.interrupt.queue_used(ring.index);
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.stop()
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        self.rings.iter().map(|ring| (ring.index, ring.queue.state())).collect()
    }

    fn report_broken(&self) {
        self.interrupt.needs_reset();
    }
}
