// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device of which a vhost-user back end serves the queues.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use memory::GuestMemory;
use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::VhostUserCounters;
use super::deadline::Deadline;
use super::error::VhostUserError;
use super::kind::VhostUserKind;
use super::session::{Ring, Session};
use super::worker::{OnLost, VhostUserWorker};
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::read_config_bytes;
use crate::virtio::worker::{Pausing, Workers};

/// Time for the back end to stop its queues when the driver resets the device, or the device is removed: a vCPU or
/// the VMM thread waits for it. Guests complain of a vCPU that is absent for some 20 s.
const RESET_LIMIT: Duration = Duration::from_secs(3);
/// Version of its saved state, which is empty: the state that matters is the back end's.
const STATE_VERSION: u32 = 1;

/// Configuration of a vhost-user device.
#[derive(Clone, Debug)]
pub struct VhostUserConfig {
    /// Id of the device, for its thread name and messages.
    pub id: String,
    /// What the device is.
    pub kind: VhostUserKind,
    /// The socket at which the back end listens.
    pub socket: PathBuf,
    /// Number of request queues.
    pub num_queues: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
}

/// A vhost-user device.
pub struct VhostUser {
    id: String,
    kind: VhostUserKind,
    queue_sizes: Vec<u16>,
    features: u64,
    config: Vec<u8>,
    /// Locked by the thread of the device alone, once there is one.
    session: Arc<Mutex<Session>>,
    deadline: Arc<Deadline>,
    counters: Arc<VhostUserCounters>,
    on_lost: OnLost,
    workers: Workers,
}

impl VhostUser {
    /// Connects to the back end and negotiates with it, each within a time limit. `on_lost` is called when it is
    /// lost later, on the thread of the device.
    ///
    /// # Errors
    /// There is no connection, or the back end cannot serve the device or have the memory.
    pub fn connect(
        config: VhostUserConfig,
        memory: &GuestMemory,
        on_lost: OnLost,
    ) -> Result<Self, VhostUserError> {
        let queues = config.kind.queues(config.num_queues);
        let session = Session::open(&config.socket, queues, config.kind.queues_without_mq())?;
        Self::over(session, config, memory, on_lost)
    }

    /// The same with a session.
    pub(super) fn over(
        mut session: Session,
        config: VhostUserConfig,
        memory: &GuestMemory,
        on_lost: OnLost,
    ) -> Result<Self, VhostUserError> {
        let VhostUserConfig { id, kind, num_queues, queue_size, .. } = config;
        let features = kind.features(session.features(), num_queues);
        if features & 1 << VIRTIO_F_VERSION_1 == 0 {
            return Err(VhostUserError::Lacks("VIRTIO_F_VERSION_1"));
        }
        session.check_memory(memory)?;
        let of_back_end = match kind.config_len_bytes() {
            Some(len_bytes) => session.config(len_bytes)?,
            None => Vec::new(),
        };
        Ok(Self {
            id,
            queue_sizes: vec![queue_size; kind.queues(num_queues)],
            features,
            config: kind.config(of_back_end, num_queues),
            kind,
            deadline: session.deadline(),
            session: Arc::new(Mutex::new(session)),
            counters: Arc::default(),
            on_lost,
            workers: Workers::default(),
        })
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The counters of the device.
    pub fn counters(&self) -> Arc<VhostUserCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for VhostUser {
    fn device_id(&self) -> u16 {
        self.kind.device_id()
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn shares_kicks(&self) -> bool {
        true
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        if !queues.iter().any(|queue| queue.index == 0) {
            return Err(ActivateError::MissingQueue { index: 0 });
        }
        let ring = |active: crate::virtio::device::ActiveQueue| {
            let call = EventFd::new(EFD_NONBLOCK)?;
            let size_max = self.queue_sizes.get(usize::from(active.index)).copied().unwrap_or(0);
            Ok(Ring {
                index: active.index,
                queue: active.queue,
                size_max,
                kicks: active.kicks,
                call,
            })
        };
        let rings = queues.into_iter().map(ring).collect::<std::io::Result<_>>();
        let rings = rings.map_err(|source| ActivateError::Resource {
            what: "make the eventfd of a queue",
            source,
        })?;
        let worker = VhostUserWorker {
            rings,
            // Others that the driver has accepted are the transport's.
            features: features & self.features,
            memory,
            interrupt,
            session: Arc::clone(&self.session),
            counters: Arc::clone(&self.counters),
            on_lost: Arc::clone(&self.on_lost),
            is_serving: false,
        };
        self.workers.spawn(&self.id, &[], worker)
    }

    fn reset(&mut self) {
        self.deadline.hurry(RESET_LIMIT);
        self.workers.stop();
        self.deadline.take_time();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        DeviceSnapshot {
            kind: self.kind.name().to_owned(),
            version: STATE_VERSION,
            data: serde_json::Value::Null,
        }
    }

    /// Always an error: the back end has no state of another process.
    fn restore(&mut self, _state: &DeviceSnapshot) -> Result<(), StateError> {
        let why = "the state of a vhost-user device is in its back end".to_owned();
        Err(StateError::Invalid { kind: self.kind.name(), why })
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.reset();
    }
}
