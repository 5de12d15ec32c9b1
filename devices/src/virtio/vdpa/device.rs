// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vDPA device as the transport drives it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memory::{DiscardBan, GuestRam};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::backend::Backend;
use super::counters::VdpaCounters;
use super::error::VdpaError;
use super::kernel::KernelDevice;
use super::offer::Offer;
use super::session::{Ring, Session, check_reach};
use super::worker::VdpaWorker;
use crate::virtio::device::{
    ActivateError, Activation, ActiveQueue, DeviceSnapshot, StateError, VirtioDevice,
};
use crate::virtio::worker::{Pausing, Workers};
use crate::{LogLimit, log_limited};

/// Kind of its saved state.
const KIND: &str = "vdpa";
/// Version of its saved state, which is empty: the state that matters is the device's.
const STATE_VERSION: u32 = 1;
/// Why memory is not discarded, plugged or unplugged.
const BAN: &str = "guest memory is mapped for vDPA devices";

/// Configuration of a vDPA device.
#[derive(Clone, Debug)]
pub struct VdpaDeviceConfig {
    /// Id of the device, for its thread name and messages.
    pub id: String,
    /// The character device: `/dev/vhost-vdpa-N`.
    pub path: PathBuf,
    /// Number of queues.
    pub num_queues: u16,
}

/// Ends the start of a vDPA device, which maps all memory, for a VM that ends.
#[derive(Clone, Debug)]
pub struct VdpaEnd(Arc<AtomicBool>);

impl VdpaEnd {
    /// No more memory is mapped; what is, is unmapped with the device.
    pub fn end(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A vDPA device.
pub struct Vdpa {
    id: String,
    offer: Arc<Offer>,
    /// Also used by the thread of the device.
    backend: Arc<dyn Backend>,
    ram: Arc<GuestRam>,
    stops: Arc<AtomicBool>,
    counters: Arc<VdpaCounters>,
    log: Arc<LogLimit>,
    workers: Workers,
    /// Dropped last: what the device may write stays where it is.
    _ban: DiscardBan,
}

impl Vdpa {
    /// Opens the device, and asks it what it is. As long as this is there, nothing of guest memory is discarded, and no
    /// memory comes or goes.
    ///
    /// # Errors
    /// The device cannot be opened, or is none that this guest can be given.
    pub fn open(config: VdpaDeviceConfig, ram: &Arc<GuestRam>) -> Result<Self, VdpaError> {
        let opened = KernelDevice::open(&config.path, ram.guest_memory());
        let backend =
            opened.map_err(|source| VdpaError::Open { path: config.path.clone(), source })?;
        Self::over(Box::new(backend), config, ram)
    }

    /// The same with an open device.
    pub(super) fn over(
        mut backend: Box<dyn Backend>,
        config: VdpaDeviceConfig,
        ram: &Arc<GuestRam>,
    ) -> Result<Self, VdpaError> {
        let ban = ram.ban_discards(BAN);
        let offer = Offer::ask(backend.as_mut(), config.num_queues)?;
        check_reach(backend.as_ref(), ram)?;
        let workers = Workers::default();
        Ok(Self {
            id: config.id,
            offer: Arc::new(offer),
            backend: Arc::from(backend),
            ram: Arc::clone(ram),
            stops: Arc::default(),
            counters: Arc::default(),
            log: workers.log_limit(),
            workers,
            _ban: ban,
        })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The counters of the device.
    pub fn counters(&self) -> Arc<VdpaCounters> {
        Arc::clone(&self.counters)
    }

    /// The handle for the end of its VM.
    pub fn end_handle(&self) -> VdpaEnd {
        VdpaEnd(Arc::clone(&self.stops))
    }

    /// Whether it stops while the VM is paused; another goes on.
    pub fn can_suspend(&self) -> bool {
        self.offer.can_suspend
    }
}

impl VirtioDevice for Vdpa {
    fn device_id(&self) -> u16 {
        self.offer.device_id
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &self.offer.queue_sizes
    }

    fn features(&self) -> u64 {
        self.offer.features
    }

    fn shares_kicks(&self) -> bool {
        true
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Some((offset, len)) = self.offer.in_config(offset, data.len()) else { return };
        let Some(part) = data.get_mut(..len) else { return };
        if let Err(error) = self.backend.read_config(offset, part) {
            part.fill(0);
            log_limited!(
                self.log,
                Warn,
                "'{}': its configuration cannot be read: {error}",
                self.id
            );
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let Some((offset, len)) = self.offer.in_config(offset, data.len()) else { return };
        let Some(part) = data.get(..len) else { return };
        if let Err(error) = self.backend.write_config(offset, part) {
            log_limited!(
                self.log,
                Warn,
                "'{}': its configuration cannot be written: {error}",
                self.id
            );
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory: _, interrupt, queues, features } = activation;
        let eventfd = || {
            EventFd::new(EFD_NONBLOCK).map_err(|source| ActivateError::Resource {
                what: "make the eventfd of a queue",
                source,
            })
        };
        let ring = |active: ActiveQueue| {
            let ActiveQueue { index, queue, kick, kicks, dma: _ } = active;
            Ok(Ring { index, queue, trapped: kick, kicks, call: eventfd()? })
        };
        let rings = queues.into_iter().map(ring).collect::<Result<Vec<_>, ActivateError>>()?;
        self.stops.store(false, Ordering::Release);
        let session = Session::new(
            Arc::clone(&self.backend),
            Arc::clone(&self.ram),
            Arc::clone(&self.offer),
            Arc::clone(&self.stops),
            Arc::clone(&self.log),
        );
        let worker = VdpaWorker {
            id: self.id.clone(),
            rings,
            // Others that the driver has accepted are the transport's.
            features: features & self.offer.features,
            interrupt,
            config_call: eventfd()?,
            session,
            counters: Arc::clone(&self.counters),
            log: Arc::clone(&self.log),
        };
        self.workers.spawn(&self.id, &[], worker)
    }

    fn reset(&mut self) {
        self.stops.store(true, Ordering::Release);
        self.workers.stop();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        DeviceSnapshot {
            kind: KIND.to_owned(),
            version: STATE_VERSION,
            data: serde_json::Value::Null,
        }
    }

    /// Always an error: the device has no state of another.
    fn restore(&mut self, _state: &DeviceSnapshot) -> Result<(), StateError> {
        let why = "the state of a vDPA device is in the device".to_owned();
        Err(StateError::Invalid { kind: KIND, why })
    }
}

impl Drop for Vdpa {
    fn drop(&mut self) {
        self.reset();
    }
}
