// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a vDPA device: it starts, suspends and resets the device, and forwards its interrupts.
//!
//! Owns what happens when the device fails: it is reset, the driver is told, and the VM goes on. It must never read or
//! write a ring.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::counters::VdpaCounters;
use super::error::VdpaError;
use super::session::{Phase, Ring, Session};
use crate::virtio::device::VirtioInterrupt;
use crate::virtio::queue::Broken;
use crate::virtio::worker::{Watch, Work};
use crate::{LogLimit, log_limited};

/// Token of changes of the configuration; the others are positions of rings, for the device's signals.
const CONFIG: u64 = u64::MAX - 1;

/// Added to the position of a ring: the notifications that the kernel did not take.
const TRAPPED: u64 = 1 << 32;

pub(super) struct VdpaWorker {
    pub(super) id: String,
    pub(super) rings: Vec<Ring>,
    pub(super) features: u64,
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    /// Signalled by the device when its configuration has changed.
    pub(super) config_call: EventFd,
    pub(super) session: Session,
    pub(super) counters: Arc<VdpaCounters>,
    /// The driver can cause lines by starting the device again and again.
    pub(super) log: Arc<LogLimit>,
}

impl VdpaWorker {
    fn failed(&self, error: &VdpaError) -> Broken {
        if !matches!(error, VdpaError::Cancelled) {
            log_limited!(self.log, Warn, "'{}': {}", self.id, error_text::chain(error));
        }
        Broken::Device("the vDPA device has failed")
    }

    fn config_changed(&mut self) -> Result<(), Broken> {
        match self.session.needs_reset() {
            Ok(false) => {}
            Ok(true) => {
                self.session.reset();
                return Err(Broken::Device("the vDPA device needs a reset"));
            }
            Err(error) => {
                self.session.reset();
                return Err(self.failed(&error));
            }
        }
        self.interrupt.config_changed();
        Ok(())
    }
}

impl Work for VdpaWorker {
    fn kind(&self) -> &'static str {
        "device-vdpa"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        let begun = match self.session.phase() {
            Phase::Stopped => {
                for ring in &self.rings {
                    // What was notified of before is signalled by the start. Fails if there is nothing.
                    let _ = ring.trapped.read();
                }
                self.session.start(self.features, &self.rings, &self.config_call)
            }
            Phase::Suspended => self.session.resume(&self.rings),
            // It has gone on.
            Phase::Runs => Ok(()),
        };
        begun.map_err(|error| self.failed(&error))?;
        watch.on_signal(CONFIG, self.config_call.as_raw_fd())?;
        for (token, ring) in (0..).zip(&self.rings) {
            watch.on_signal(token, ring.call.as_raw_fd())?;
            watch.on(TRAPPED + token, ring.trapped.as_raw_fd())?;
        }
        Ok(())
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        if token == CONFIG {
            return self.config_changed();
        }
        let is_trapped = token >= TRAPPED;
        let position = if is_trapped { token - TRAPPED } else { token };
        let position = usize::try_from(position).unwrap_or(usize::MAX);
        let Some(ring) = self.rings.get(position) else { return Ok(()) };
        if is_trapped {
            // The kernel takes all notifications but those of firmware that cannot reach the BAR.
            let _ = ring.trapped.read();
            let sent = self.session.send_kick(ring);
            return sent.map_err(|error| {
                let broken = self.failed(&error);
                self.session.reset();
                broken
            });
        }
        self.counters.interrupts.add(1);
        self.interrupt.queue_used(ring.index);
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.session.suspend(&mut self.rings).map_err(|error| self.failed(&error))?;
        for ring in &self.rings {
            // For what the device has used last.
            self.interrupt.queue_used(ring.index);
        }
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        self.rings.iter().map(|ring| (ring.index, ring.queue.state())).collect()
    }

    fn report_broken(&self) {
        self.interrupt.needs_reset();
    }
}
