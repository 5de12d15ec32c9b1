// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a vhost-user device: it starts and stops the back end's queues, forwards its interrupts, serves the control
//! queue of a network, and tells the driver of a configuration that has changed.
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

use super::channel::Channel;
use super::config_space::ConfigSpace;
use super::control::ControlQueue;
use super::counters::VhostUserCounters;
use super::device::CONFIG_LIMIT;
use super::error::VhostUserError;
use super::net_link::NetLink;
use super::ring::{Ring, RingStage};
use super::session::Session;
use crate::virtio::device::VirtioInterrupt;
use crate::virtio::net::{ControlTarget, serve_control};
use crate::virtio::queue::Broken;
use crate::virtio::worker::{Watch, Work};

/// Token of the connection; the others are positions of rings, for the back end's signals.
const CONNECTION: u64 = u64::MAX - 1;
/// Token of a change that the back end has told of.
const CHANGE: u64 = u64::MAX - 2;
/// Tokens of the control queue: its notifications that the kernel has taken, and the others.
const CONTROL: u64 = u64::MAX - 3;
const CONTROL_TRAPPED: u64 = u64::MAX - 4;

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
    /// The back end serves the rings that are wanted.
    pub(super) is_serving: bool,
    pub(super) config: Arc<ConfigSpace>,
    /// Of a network.
    pub(super) net: Option<Arc<NetLink>>,
    pub(super) control: Option<ControlQueue>,
    /// What a command of the driver has led to.
    pub(super) failure: Option<Broken>,
}

impl VhostUserWorker {
    fn lost(&mut self, why: &str) -> Broken {
        // Nothing is left to stop.
        self.is_serving = false;
        self.rings.iter_mut().for_each(|ring| ring.stage = RingStage::Stopped);
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

    /// Notes which rings are of pairs in use.
    fn note_wanted(&mut self) {
        let Some(net) = &self.net else { return };
        for ring in &mut self.rings {
            ring.is_wanted = net.is_in_use(ring.index);
        }
    }

    /// Carries out commands of the driver.
    fn serve_control(&mut self) -> Result<(), Broken> {
        let Some(mut control) = self.control.take() else { return Ok(()) };
        let features = self.features;
        let served = serve_control(&mut control.queue, self, features);
        self.control = Some(control);
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => served,
        }
    }

    /// Tells the driver of a configuration that has changed.
    fn take_change(&mut self) -> Result<(), Broken> {
        let mut session = self.session.lock();
        if !session.channel().is_some_and(Channel::take_change) {
            return Ok(());
        }
        let refreshed = self.config.refresh(&mut session, CONFIG_LIMIT);
        drop(session);
        if refreshed.map_err(|error| self.lost(&error_text::chain(&error)))? {
            self.counters.config_changes.add(1);
            self.interrupt.config_changed();
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), Broken> {
        for ring in &self.rings {
            // What was notified of before is signalled by the start. Fails if there is nothing.
            let _ = ring.trapped.read();
        }
        self.note_wanted();
        let memory = self.memory.memory();
        let started = self.session.lock().start(self.features, &memory, &mut self.rings);
        started.map_err(|error| self.not_started(&error))?;
        self.is_serving = true;
        Ok(())
    }

    fn stop(&mut self) -> Result<(), Broken> {
        if !std::mem::take(&mut self.is_serving) {
            return Ok(());
        }
        let memory = self.memory.memory();
        let were_started: Vec<_> =
            self.rings.iter().map(|ring| ring.stage != RingStage::Stopped).collect();
        let stopped = self.session.lock().stop(&mut self.rings);
        stopped.map_err(|error| self.lost(&error_text::chain(&error)))?;
        let rings = self.rings.iter_mut().zip(were_started);
        for (ring, _) in rings.filter(|(_, was_started)| *was_started) {
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
        {
            let session = self.session.lock();
            watch.on(CONNECTION, session.connection_fd())?;
            if let Some(channel) = session.channel() {
                watch.on(CHANGE, channel.changed_fd())?;
            }
        }
        for (token, ring) in (0..).zip(&self.rings) {
            watch.on_signal(token, ring.call.as_raw_fd())?;
            watch.on(TRAPPED + token, ring.trapped.as_raw_fd())?;
        }
        if let Some(control) = &mut self.control {
            control.watch(watch, CONTROL, CONTROL_TRAPPED)?;
        }
        self.serve_control()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        if token == CONNECTION {
            // It may have been the answer to an access of the configuration, which holds the session until then.
            if !self.session.lock().is_spoken_to() {
                return Ok(());
            }
            return Err(self.lost("it has closed the connection, or sent what was not asked for"));
        }
        if token == CHANGE {
            return self.take_change();
        }
        if token == CONTROL || token == CONTROL_TRAPPED {
            if let Some(control) = &self.control {
                control.take_kicks();
            }
            return self.serve_control();
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
        let control = self.control.as_ref().map(|control| control.queue.state());
        self.rings.iter().map(|ring| (ring.index, ring.queue.state())).chain(control).collect()
    }

    fn report_broken(&self) {
        self.interrupt.needs_reset();
    }
}

impl ControlTarget for VhostUserWorker {
    fn pairs_max(&self) -> u16 {
        self.net.as_ref().map_or(1, |net| net.pairs_max)
    }

    /// Not possible with pairs whose rings the driver has not set up, or has put outside of memory.
    fn set_pairs(&mut self, pairs: u16) -> bool {
        let Some(net) = self.net.clone() else { return false };
        let are_there = (0..pairs.saturating_mul(2))
            .all(|index| self.rings.iter().any(|ring| ring.index == index));
        if !are_there || !self.is_serving {
            return false;
        }
        let before = net.state().active_pairs;
        net.set_active_pairs(pairs);
        self.note_wanted();
        let memory = self.memory.memory();
        let served = self.session.lock().serve_wanted(&memory, &mut self.rings, CONFIG_LIMIT);
        let Err(error) = served else { return true };
        net.set_active_pairs(before);
        self.note_wanted();
        if !matches!(error, VhostUserError::Ring { .. }) {
            self.failure = Some(self.lost(&error_text::chain(&error)));
        }
        false
    }

    fn announced(&mut self) {
        if let Some(net) = &self.net {
            net.announced();
        }
    }
}
