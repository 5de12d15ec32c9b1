// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The life cycle of one virtio device: negotiation, activation, pause, reset.
//!
//! Owns the device and the registers that control it; one lock serialises all calls to the
//! device. A driver's mistake leads to a register that keeps its
//! value, or to DEVICE_NEEDS_RESET, but never to a panic.

use std::sync::Arc;

use devices::virtio::{Activation, ActiveQueue, PendingPause, VirtioDevice, VirtioInterrupt};
use devices::{LogLimit, log_limited};
use memory::GuestMemoryHandle;
use virtio_bindings::virtio_config as feature;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueState};
use vm_memory::GuestAddressSpace;

use super::bus_master::BusMaster;
use super::interrupt::PciInterrupt;
use super::notify::Notify;
use super::queue::{QueueError, QueueRegisters};
use super::state::QueueProgressState;
use super::status::{DeviceStatus, Phase, StatusRequest};

const VERSION_1: u64 = 1 << feature::VIRTIO_F_VERSION_1;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
/// Features that need a transport or queue that we do not have: packed rings, virtual functions,
/// notifications with data, reset of single queues, administration queues. Never offered, even if
/// a device names them.
const UNSUPPORTED: u64 = 1 << feature::VIRTIO_F_RING_PACKED
    | 1 << feature::VIRTIO_F_SR_IOV
    | 1 << feature::VIRTIO_F_NOTIFICATION_DATA
    | 1 << feature::VIRTIO_F_NOTIF_CONFIG_DATA
    | 1 << feature::VIRTIO_F_RING_RESET
    | 1 << feature::VIRTIO_F_ADMIN_VQ;

/// What the device does now.
pub(super) enum Run {
    /// Not activated, or reset since.
    Stopped,
    /// Ready, and not activated yet, so that it touches no guest memory: until the VM resumes, of a
    /// restored device, and until the driver sets Bus Master Enable.
    Prepared(Activation),
    /// Works on its queues.
    Running,
    /// Holds still; where its queues stand.
    Paused(Vec<(u16, QueueState)>),
}

/// A device and the registers that steer it.
pub(super) struct Transport {
    pub(super) id: String,
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) memory: GuestMemoryHandle,
    pub(super) interrupt: Arc<PciInterrupt>,
    pub(super) notify: Arc<Notify>,
    pub(super) status: DeviceStatus,
    pub(super) device_feature_select: u32,
    pub(super) driver_feature_select: u32,
    pub(super) driver_features: u64,
    /// The driver accepted a feature beyond bit 63; there are none.
    pub(super) driver_features_beyond: bool,
    pub(super) queue_select: u16,
    pub(super) queues: Vec<QueueRegisters>,
    pub(super) run: Run,
    /// Where the queues stood when the device was activated. A driver may enable queues that belong to
    /// features it has not accepted; a device that serves none of them reports nothing about them.
    pub(super) begun: Vec<(u16, QueueState)>,
    /// Whether the function may reach guest memory.
    pub(super) bus_master: BusMaster,
    log_limit: LogLimit,
}

impl Transport {
    pub(super) fn new(
        id: String,
        device: Box<dyn VirtioDevice>,
        memory: GuestMemoryHandle,
        interrupt: Arc<PciInterrupt>,
        notify: Arc<Notify>,
    ) -> Self {
        let queues = device.queue_sizes_max().iter().copied().map(QueueRegisters::new).collect();
        Self {
            id,
            device,
            memory,
            interrupt,
            notify,
            status: DeviceStatus::RESET,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            driver_features_beyond: false,
            queue_select: 0,
            queues,
            run: Run::Stopped,
            begun: Vec::new(),
            bus_master: BusMaster::NotUsed,
            log_limit: LogLimit::default(),
        }
    }

    /// Features that the driver may accept.
    pub(super) fn offered_features(&self) -> u64 {
        self.device.features() & !UNSUPPORTED
    }

    /// Whether the driver may end negotiation with these features.
    pub(super) fn are_features_acceptable(&self, features: u64, beyond: bool) -> bool {
        features & !self.offered_features() == 0 && features & VERSION_1 != 0 && !beyond
    }

    pub(super) fn queue(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// The selected queue, if the driver may set it up now.
    pub(super) fn queue_in_setup(&mut self) -> Option<&mut QueueRegisters> {
        if self.status.phase >= Phase::DriverOk {
            return None;
        }
        self.queues.get_mut(usize::from(self.queue_select)).filter(|queue| !queue.enabled)
    }

    /// Takes a write to the status register.
    pub(super) fn write_status(&mut self, value: u8) {
        match self.status.request(value) {
            StatusRequest::Reset => self.reset(),
            StatusRequest::Fail => {
                self.status.failed = true;
                self.log(|| "the driver gave up".to_owned());
            }
            StatusRequest::Advance(target) => while self.status.phase < target && self.advance() {},
            StatusRequest::Nonsense => {
                let bits = self.status.bits(self.interrupt.is_reset_needed());
                self.log(|| format!("the driver wrote status {value:#x} while it is {bits:#x}"));
            }
        }
    }

    /// Goes to the next phase; false if it cannot be reached.
    fn advance(&mut self) -> bool {
        let Some(next) = self.status.phase.next() else { return false };
        if next == Phase::FeaturesOk {
            let features = self.driver_features;
            if !self.are_features_acceptable(features, self.driver_features_beyond) {
                let offered = self.offered_features();
                self.log(|| format!("features {features:#x} refused, {offered:#x} are offered"));
                return false;
            }
            self.device.acknowledge_features(features);
        }
        self.status.phase = next;
        if next == Phase::DriverOk {
            self.activate();
        }
        true
    }

    /// Checks all enabled queues and starts the device; DEVICE_NEEDS_RESET if that fails.
    fn activate(&mut self) {
        let activation = match self.build_queues(|_| QueueProgressState::default()) {
            Ok(queues) => self.activation(queues),
            Err((index, error)) => {
                self.log(|| format!("queue {index} cannot be used: {}", with_source(&error)));
                return self.interrupt.needs_reset();
            }
        };
        match activation {
            Ok(activation) if self.bus_master.allows() => self.start(activation),
            Ok(activation) => {
                self.log(|| "starts when the driver sets Bus Master Enable".to_owned());
                self.run = Run::Prepared(activation);
            }
            Err(error) => {
                self.log(|| format!("no eventfd for its queues: {error}"));
                self.interrupt.needs_reset();
            }
        }
    }

    /// The enabled queues, rising.
    pub(super) fn build_queues(
        &self,
        progress: impl Fn(u16) -> QueueProgressState,
    ) -> Result<Vec<(u16, Queue)>, (u16, QueueError)> {
        build_queues(&self.queues, self.driver_features, &self.memory, progress)
    }

    /// What the device needs to start.
    pub(super) fn activation(&self, queues: Vec<(u16, Queue)>) -> std::io::Result<Activation> {
        let queues = queues
            .into_iter()
            .map(|(index, queue)| {
                Ok(ActiveQueue { index, queue, kick: self.notify.handle(index)? })
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Activation {
            memory: self.memory.clone(),
            interrupt: self.interrupt.clone(),
            queues,
            features: self.driver_features,
        })
    }

    fn start(&mut self, activation: Activation) {
        self.notify.arm(activation.queues.iter().map(|queue| queue.index).collect());
        let positions = activation.queues.iter().map(|queue| (queue.index, queue.queue.state()));
        self.begun = positions.collect();
        match self.device.activate(activation) {
            Ok(()) => self.run = Run::Running,
            Err(error) => {
                self.log(|| format!("cannot be activated: {}", with_source(&error)));
                self.device.reset();
                self.notify.disarm();
                self.run = Run::Stopped;
                self.interrupt.needs_reset();
            }
        }
    }

    /// Back to the state after power-on. Waits for the device to end all work.
    pub(super) fn reset(&mut self) {
        self.run = Run::Stopped;
        // Called even on a device that was not active: it may hold features that the driver
        // accepted.
        self.device.reset();
        self.notify.disarm();
        self.interrupt.reset();
        self.status = DeviceStatus::RESET;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.driver_features = 0;
        self.driver_features_beyond = false;
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.size_max);
        }
    }

    /// Takes Bus Master Enable as the driver has set it; called on the thread of a running vCPU.
    ///
    /// Without it the device must not touch guest memory (PCI 3.0, 6.2.2): it ends its work, waits
    /// for what is in flight, and needs a reset. It does not continue where it was when the bit is set
    /// again: a guest that started anew in the same memory (kexec) sets the bit before it resets
    /// the device, and its rings are memory of something else by then. A device that became ready
    /// after the bit was cleared has not begun, and does so now.
    pub(super) fn set_bus_master(&mut self, bus_master: BusMaster) {
        self.bus_master = bus_master;
        let allows = bus_master.allows();
        match std::mem::replace(&mut self.run, Run::Stopped) {
            Run::Prepared(activation) if allows => self.start(activation),
            Run::Running | Run::Paused(_) if !allows => {
                self.device.reset();
                self.notify.disarm();
                self.interrupt.needs_reset();
                self.log(|| "stopped, as the driver cleared Bus Master Enable".to_owned());
            }
            run => self.run = run,
        }
    }

    /// Tells an active device to hold still.
    pub(super) fn begin_pause(&mut self) -> PendingPause {
        match self.run {
            Run::Running => self.device.begin_pause(),
            _ => PendingPause::default(),
        }
    }

    /// Makes an active device hold still.
    pub(super) fn pause(&mut self) {
        if matches!(self.run, Run::Running) {
            self.run = Run::Paused(self.device.pause());
        }
    }

    /// Lets a paused or restored device continue.
    ///
    /// A notification may have reached the eventfd of the machine that was left and no other, an
    /// interrupt may have been under way in an irqfd that is gone. So each queue is signalled and
    /// each of its interrupts raised once; both are harmless when there is nothing to do.
    pub(super) fn resume(&mut self) {
        match std::mem::replace(&mut self.run, Run::Stopped) {
            Run::Stopped => {
                if self.interrupt.is_reset_needed() {
                    self.raise_config_again();
                }
                return;
            }
            Run::Running => {
                self.run = Run::Running;
                return;
            }
            Run::Prepared(activation) if self.bus_master.allows() => self.start(activation),
            Run::Prepared(activation) => {
                self.run = Run::Prepared(activation);
                return;
            }
            Run::Paused(_) => {
                self.device.resume();
                self.run = Run::Running;
            }
        }
        if !matches!(self.run, Run::Running) {
            return;
        }
        for (index, _) in (0..).zip(&self.queues).filter(|(_, queue)| queue.enabled) {
            self.notify.kick(index);
            self.interrupt.queue_used(index);
        }
        self.raise_config_again();
    }

    /// Raises the interrupt of configuration changes if the driver has not looked at one.
    fn raise_config_again(&self) {
        if self.interrupt.isr() & super::interrupt::ISR_CONFIG != 0 {
            self.interrupt.raise_config();
        }
    }

    /// Logs what the driver did, as far as the device's limit allows.
    pub(super) fn log(&self, what: impl FnOnce() -> String) {
        log_limited!(self.log_limit, Warn, "virtio device {}: {}", self.id, what());
    }
}

/// The enabled ones of `registers` as queues, rising, or the first that cannot be one.
pub(super) fn build_queues(
    registers: &[QueueRegisters],
    features: u64,
    memory: &GuestMemoryHandle,
    progress: impl Fn(u16) -> QueueProgressState,
) -> Result<Vec<(u16, Queue)>, (u16, QueueError)> {
    let memory = memory.memory();
    let event_idx = features & EVENT_IDX != 0;
    (0..)
        .zip(registers)
        .filter(|(_, queue)| queue.enabled)
        .map(|(index, queue)| match queue.build(progress(index), event_idx, &memory) {
            Ok(queue) => Ok((index, queue)),
            Err(error) => Err((index, error)),
        })
        .collect()
}

/// An error and what caused it, in one line.
fn with_source(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Whether a device names the feature without which there is no modern device.
pub(super) fn offers_version_1(device: &dyn VirtioDevice) -> bool {
    device.features() & VERSION_1 != 0
}
