// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The life cycle of one virtio device: negotiation, activation, pause, reset.
//!
//! Owns the device and the registers that control it; one lock serialises all calls to the
//! device. A driver's mistake leads to a register that keeps its
//! value, or to DEVICE_NEEDS_RESET, but never to a panic.

use std::sync::Arc;

use devices::virtio::iommu::Endpoint;
use devices::virtio::{Activation, ActiveQueue, PendingPause, VirtioDevice, VirtioInterrupt};
use devices::{LogLimit, log_limited};
use memory::{GuestMemory, GuestMemoryHandle};
use virtio_bindings::virtio_config as feature;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueState};
use vm_memory::GuestAddressSpace;

use super::bus_master::BusMaster;
use super::common::FeaturesBeyond;
use super::interrupt::PciInterrupt;
use super::notify::Notify;
use super::queue::{QueueError, QueueRegisters};
use super::shown_config::ShownConfig;
use super::state::QueueProgressState;
use super::status::{DeviceStatus, Phase, StatusRequest};

const VERSION_1: u64 = 1 << feature::VIRTIO_F_VERSION_1;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
/// Features that transport or queues do not support: packed rings, SR-IOV, notification data, queue reset,
/// admin queues. Never offered, even if a device lists them.
const UNSUPPORTED: u64 = 1 << feature::VIRTIO_F_RING_PACKED
    | 1 << feature::VIRTIO_F_SR_IOV
    | 1 << feature::VIRTIO_F_NOTIFICATION_DATA
    | 1 << feature::VIRTIO_F_NOTIF_CONFIG_DATA
    | 1 << feature::VIRTIO_F_RING_RESET
    | 1 << feature::VIRTIO_F_ADMIN_VQ;
/// The driver uses addresses that the IOMMU translates. Known to the transport alone.
const ACCESS_PLATFORM: u64 = 1 << feature::VIRTIO_F_ACCESS_PLATFORM;

/// The queues of a device that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningQueues {
    /// Type of the device.
    pub device_id: u16,
    /// Number of queues that it has.
    pub count: usize,
    /// Those that its driver has enabled.
    pub rings: Vec<Rings>,
}

/// The rings of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rings {
    /// Index of the queue.
    pub index: u16,
    /// Driver area: requests that the driver has made available.
    pub driver_gpa: u64,
    /// Device area: requests that the device has returned.
    pub device_gpa: u64,
}

/// Activation state of the device.
pub(super) enum Run {
    /// Not activated since the last reset.
    Stopped,
    /// Ready to be activated, with no access to guest memory yet: until the VM resumes, for a restored
    /// device, or until the driver sets Bus Master Enable.
    Prepared(Activation),
    /// Activated.
    Running,
    /// Paused, with the progress of its queues.
    Paused(Vec<(u16, QueueState)>),
}

/// A device with its transport registers.
pub(super) struct Transport {
    pub(super) id: String,
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) memory: GuestMemoryHandle,
    /// The device as the IOMMU knows it, if it is behind one.
    pub(super) endpoint: Option<Arc<Endpoint>>,
    pub(super) interrupt: Arc<PciInterrupt>,
    pub(super) notify: Arc<Notify>,
    pub(super) status: DeviceStatus,
    pub(super) device_feature_select: u32,
    pub(super) driver_feature_select: u32,
    pub(super) driver_features: u64,
    /// Which words above bit 63 have a feature that the driver accepted; none exists.
    pub(super) driver_features_beyond: FeaturesBeyond,
    pub(super) queue_select: u16,
    pub(super) shown_config: ShownConfig,
    pub(super) queues: Vec<QueueRegisters>,
    pub(super) run: Run,
    /// Progress of the queues at activation. A driver may enable queues of features that it has not
    /// accepted; a device that does not serve them reports no progress for them.
    pub(super) begun: Vec<(u16, QueueState)>,
    /// Whether the function may access guest memory.
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
        let shown_config = ShownConfig::new(device.as_ref());
        Self {
            id,
            device,
            memory,
            endpoint: None,
            interrupt,
            notify,
            status: DeviceStatus::RESET,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            driver_features_beyond: FeaturesBeyond::default(),
            queue_select: 0,
            shown_config,
            queues,
            run: Run::Stopped,
            begun: Vec::new(),
            bus_master: BusMaster::NotUsed,
            log_limit: LogLimit::default(),
        }
    }

    /// Features offered to the driver.
    pub(super) fn offered_features(&self) -> u64 {
        let of_place = if self.endpoint.is_some() { ACCESS_PLATFORM } else { 0 };
        self.device.features() & !(UNSUPPORTED | ACCESS_PLATFORM) | of_place
    }

    /// Those of the accepted features that the device knows.
    pub(super) fn device_features(features: u64) -> u64 {
        features & !ACCESS_PLATFORM
    }

    /// Guest memory in which rings must lie. What addresses behind the IOMMU lead to is found out by each access.
    pub(super) fn ring_memory(&self) -> Option<&GuestMemoryHandle> {
        self.endpoint.is_none().then_some(&self.memory)
    }

    /// Whether these features are acceptable at the end of negotiation. Behind the IOMMU addresses are translated
    /// whether the driver knows of it or not, so that it cannot choose; firmware may not know.
    pub(super) fn are_features_acceptable(&self, features: u64, beyond: bool) -> bool {
        features & !self.offered_features() == 0 && features & VERSION_1 != 0 && !beyond
    }

    /// Reads the device configuration.
    pub(super) fn read_device_config(&mut self, offset: u64, data: &mut [u8]) {
        let shown = self.shown_config.update(self.device.as_ref(), &self.interrupt);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match shown.get(start..start.saturating_add(data.len())) {
            Some(part) => data.copy_from_slice(part),
            None => self.device.read_config(offset, data),
        }
    }

    /// Counts changes of the device configuration, of which the device may not have told yet.
    pub(super) fn update_config_generation(&mut self) {
        self.shown_config.update(self.device.as_ref(), &self.interrupt);
    }

    pub(super) fn queue(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// The selected queue, if the driver may configure it now.
    pub(super) fn queue_in_setup(&mut self) -> Option<&mut QueueRegisters> {
        if self.status.phase >= Phase::DriverOk {
            return None;
        }
        self.queues.get_mut(usize::from(self.queue_select)).filter(|queue| !queue.enabled)
    }

    /// Handles a write to the status register.
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

    /// Advances to the next phase; false if it cannot be reached.
    fn advance(&mut self) -> bool {
        let Some(next) = self.status.phase.next() else { return false };
        if next == Phase::FeaturesOk {
            let features = self.driver_features;
            if !self.are_features_acceptable(features, self.driver_features_beyond.is_any()) {
                let offered = self.offered_features();
                self.log(|| format!("features {features:#x} refused, {offered:#x} are offered"));
                return false;
            }
            self.device.acknowledge_features(Self::device_features(features));
        }
        self.status.phase = next;
        if next == Phase::DriverOk {
            self.activate();
        }
        true
    }

    /// Validates all enabled queues and activates the device; sets DEVICE_NEEDS_RESET on failure.
    fn activate(&mut self) {
        let queues = self.build_queues(|_| QueueProgressState::default());
        let activation = match queues.and_then(|queues| self.check_areas().map(|()| queues)) {
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

    /// Refuses enabled queues whose areas the driver cannot mean, by the first one.
    fn check_areas(&self) -> Result<(), (u16, QueueError)> {
        let event_idx = self.driver_features & EVENT_IDX != 0;
        (0..)
            .zip(&self.queues)
            .filter(|(_, queue)| queue.enabled)
            .try_for_each(|(index, queue)| queue.check_areas(event_idx).map_err(|why| (index, why)))
    }

    /// The enabled queues, by index.
    pub(super) fn build_queues(
        &self,
        progress: impl Fn(u16) -> QueueProgressState,
    ) -> Result<Vec<(u16, Queue)>, (u16, QueueError)> {
        build_queues(&self.queues, self.driver_features, self.ring_memory(), progress)
    }

    /// Builds what the device needs for activation.
    pub(super) fn activation(&self, queues: Vec<(u16, Queue)>) -> std::io::Result<Activation> {
        let queues = queues
            .into_iter()
            .map(|(index, queue)| {
                let kicks = Arc::<Notify>::clone(&self.notify);
                let kick = self.notify.handle(index)?;
                let dma = self.endpoint.as_ref().map(Endpoint::queue);
                Ok(ActiveQueue { index, queue, kick, kicks, dma })
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Activation {
            memory: self.memory.clone(),
            interrupt: self.interrupt.clone(),
            queues,
            features: Self::device_features(self.driver_features),
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
                self.stop();
                self.run = Run::Stopped;
                self.interrupt.needs_reset();
            }
        }
    }

    /// Ends the device's work, which no notification starts again.
    fn stop(&mut self) {
        // First: a process that serves the device may take a notification for a request to continue.
        self.notify.disarm();
        self.device.reset();
    }

    /// Resets to the power-on state. Waits until the device has ended all work.
    pub(super) fn reset(&mut self) {
        self.run = Run::Stopped;
        // Called also on a device that is not activated, as it may hold accepted features.
        self.stop();
        self.interrupt.reset();
        self.status = DeviceStatus::RESET;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.driver_features = 0;
        self.driver_features_beyond = FeaturesBeyond::default();
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.size_max);
        }
    }

    /// Applies Bus Master Enable; called on the thread of a running vCPU.
    ///
    /// Without it the device must not access guest memory (PCI 3.0, 6.2.2): it stops, waits for requests in
    /// flight, and needs a reset. It does not continue when the bit is set again: a guest restarted in the
    /// same memory (kexec) sets the bit before it resets the device, and its rings have been reused by
    /// then. A device that became ready while the bit was clear has not started, and does so now.
    pub(super) fn set_bus_master(&mut self, bus_master: BusMaster) {
        self.bus_master = bus_master;
        let allows = bus_master.allows();
        match std::mem::replace(&mut self.run, Run::Stopped) {
            Run::Prepared(activation) if allows => self.start(activation),
            Run::Running | Run::Paused(_) if !allows => {
                self.stop();
                self.interrupt.needs_reset();
                self.log(|| "stopped, as the driver cleared Bus Master Enable".to_owned());
            }
            run => self.run = run,
        }
    }

    /// See [`super::VirtioPciDevice::kick_queues`].
    pub(super) fn kick_queues(&self) -> Option<RunningQueues> {
        let Run::Running = self.run else { return None };
        let enabled = (0_u16..).zip(&self.queues).filter(|(_, queue)| queue.enabled);
        let rings = enabled.map(|(index, queue)| {
            self.notify.kick(index);
            Rings { index, driver_gpa: queue.driver_gpa, device_gpa: queue.device_gpa }
        });
        let rings = rings.collect();
        Some(RunningQueues { device_id: self.device.device_id(), count: self.queues.len(), rings })
    }

    /// Starts to pause an activated device.
    pub(super) fn begin_pause(&mut self) -> PendingPause {
        match self.run {
            Run::Running => self.device.begin_pause(),
            _ => PendingPause::default(),
        }
    }

    /// Pauses an activated device.
    pub(super) fn pause(&mut self) {
        if matches!(self.run, Run::Running) {
            self.run = Run::Paused(self.device.pause());
        }
    }

    /// Resumes a paused or restored device.
    ///
    /// A notification may only have reached the eventfd of the machine at the source, and an interrupt may
    /// have been in flight in its irqfd. So each queue is notified and its interrupt raised once; both are
    /// harmless if spurious.
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

    /// Raises the configuration interrupt again if the driver has not handled it.
    fn raise_config_again(&self) {
        if self.interrupt.isr() & super::interrupt::ISR_CONFIG != 0 {
            self.interrupt.raise_config();
        }
    }

    /// Logs a driver's misbehaviour, within the device's rate limit.
    pub(super) fn log(&self, what: impl FnOnce() -> String) {
        log_limited!(self.log_limit, Warn, "virtio device {}: {}", self.id, what());
    }
}

/// Builds the enabled queues of `registers`, by index, or returns the first invalid one.
pub(super) fn build_queues(
    registers: &[QueueRegisters],
    features: u64,
    memory: Option<&GuestMemoryHandle>,
    progress: impl Fn(u16) -> QueueProgressState,
) -> Result<Vec<(u16, Queue)>, (u16, QueueError)> {
    let memory = memory.map(GuestAddressSpace::memory);
    let memory: Option<&GuestMemory> = memory.as_deref();
    let event_idx = features & EVENT_IDX != 0;
    (0..)
        .zip(registers)
        .filter(|(_, queue)| queue.enabled)
        .map(|(index, queue)| match queue.build(progress(index), event_idx, memory) {
            Ok(queue) => Ok((index, queue)),
            Err(error) => Err((index, error)),
        })
        .collect()
}

/// An error with its source, in one line.
fn with_source(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Whether a device offers VERSION_1, which is required of modern devices.
pub(super) fn offers_version_1(device: &dyn VirtioDevice) -> bool {
    device.features() & VERSION_1 != 0
}
