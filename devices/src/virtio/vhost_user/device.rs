// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device of which a vhost-user back end serves the queues.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use log::warn;
use memory::GuestMemory;
use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net as net;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::config_space::ConfigSpace;
use super::control::ControlQueue;
use super::counters::VhostUserCounters;
use super::deadline::Deadline;
use super::error::VhostUserError;
use super::handle::VhostUserHandle;
use super::kind::{NET_QUEUES, VhostUserKind};
use super::net_link::NetLink;
use super::ring::{Ring, RingStage};
use super::session::Session;
use super::state;
use super::worker::{OnLost, VhostUserWorker};
use crate::virtio::device::{
    ActivateError, Activation, ActiveQueue, DeviceSnapshot, StateError, VirtioDevice,
};
use crate::virtio::net::control_index;
use crate::virtio::queue::WorkQueue;
use crate::virtio::read_config_bytes;
use crate::virtio::worker::{Pausing, Workers};

/// Time for the back end to stop its queues when the driver resets the device, or the device is removed: a vCPU or
/// the VMM thread waits for it. Guests complain of a vCPU that is absent for some 20 s.
const RESET_LIMIT: Duration = Duration::from_secs(3);
/// Time for an access of the configuration that the back end has, for which a vCPU waits.
pub(super) const CONFIG_LIMIT: Duration = RESET_LIMIT;
/// Bytes of a configuration that the protocol can speak of (vhost-user, "Virtio device config space").
const CONFIG_LEN_BYTES_MAX: u64 = 256;
/// Version of the saved state of all but networks and file systems, which is empty: the state that matters is the back end's.
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
    /// The VMM listens at the socket instead, and the back end connects.
    pub listens: bool,
    /// Number of request queues.
    pub num_queues: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
}

/// A vhost-user device.
pub struct VhostUser {
    id: String,
    queue_sizes: Vec<u16>,
    features: u64,
    config: Arc<ConfigSpace>,
    /// Of a network.
    net: Option<Arc<NetLink>>,
    /// Of a file system: the state that its back end has given last.
    given: Option<Arc<Mutex<Vec<u8>>>>,
    /// Locked by the thread of the device, and for its configuration if the back end has that.
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
        let needs = config.kind.needs(config.num_queues);
        let session = Session::open(&config.socket, config.listens, needs)?;
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
        let config = ConfigSpace::read(kind, &mut session, num_queues, CONFIG_LIMIT)?;
        let (kind, features) = (config.kind(), config.features());
        if features & 1 << VIRTIO_F_VERSION_1 == 0 {
            return Err(VhostUserError::Lacks("VIRTIO_F_VERSION_1"));
        }
        session.check_memory(memory)?;
        let net = if let VhostUserKind::Net { mac, mtu, .. } = kind {
            session.set_mtu(*mtu);
            if num_queues > NET_QUEUES && features & 1 << net::VIRTIO_NET_F_MQ == 0 {
                warn!(
                    "{id}: the guest can use one pair of queues: the back end does not offer \
                     VIRTIO_NET_F_MQ and VIRTIO_NET_F_CTRL_VQ"
                );
            }
            Some(Arc::new(NetLink::new(num_queues / 2, *mac)))
        } else {
            None
        };
        let is_fs = matches!(kind, VhostUserKind::Fs { .. });
        Ok(Self {
            id,
            given: is_fs.then(Arc::default),
            queue_sizes: kind.queue_sizes(num_queues, queue_size, features),
            features,
            config: Arc::new(config),
            net,
            deadline: session.deadline(),
            session: Arc::new(Mutex::new(session)),
            counters: Arc::default(),
            on_lost,
            workers: Workers::default(),
        })
    }

    /// Has the back end access its configuration, if there can be something; a vCPU waits for it. It is not waited for
    /// without a limit while the queues start or stop.
    fn with_config(
        &self,
        offset: u64,
        len: usize,
        access: impl FnOnce(&mut Session, u32) -> Result<(), VhostUserError>,
    ) {
        let end = offset.checked_add(len as u64).filter(|end| *end <= CONFIG_LEN_BYTES_MAX);
        let (Some(_), Ok(offset)) = (end, u32::try_from(offset)) else { return };
        let Some(mut session) = self.session.try_lock_for(CONFIG_LIMIT) else { return };
        if let Err(error) = access(&mut session, offset)
            && session.report_loss()
        {
            (self.on_lost)(&error_text::chain(&error));
        }
    }

    /// The queues that the back end serves, and the control queue.
    fn by_server(
        &self,
        queues: Vec<ActiveQueue>,
        features: u64,
    ) -> (Vec<ActiveQueue>, Option<ActiveQueue>) {
        let Some(net) = &self.net else { return (queues, None) };
        let index = control_index(net.pairs_max, features);
        let mut control = None;
        let mut rings = Vec::new();
        for queue in queues {
            if queue.index < index {
                rings.push(queue);
            } else if queue.index == index && features & 1 << net::VIRTIO_NET_F_CTRL_VQ != 0 {
                control = Some(queue);
            }
        }
        (rings, control)
    }

    /// What the VMM does with it beside the transport.
    pub fn handle(&self) -> VhostUserHandle {
        let (session, net, given) =
            (Arc::clone(&self.session), self.net.clone(), self.given.clone());
        VhostUserHandle { id: self.id.clone(), session, net, given }
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
        self.config.kind().device_id()
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
        if self.config.is_of_back_end() {
            data.fill(0);
            self.with_config(offset, data.len(), |session, offset| {
                session.read_config(offset, data, CONFIG_LIMIT).map(drop)
            });
            return;
        }
        let mut config = self.config.bytes();
        if let Some(net) = &self.net {
            net.add_status(&mut config);
        }
        read_config_bytes(&config, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.config.is_of_back_end() {
            self.with_config(offset, data.len(), |session, offset| {
                session.write_config(offset, data, CONFIG_LIMIT)
            });
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        if !queues.iter().any(|queue| queue.index == 0) {
            return Err(ActivateError::MissingQueue { index: 0 });
        }
        let (rings, control) = self.by_server(queues, features);
        let control = control.map(|active| {
            let kicks = Arc::clone(&active.kicks);
            ControlQueue::new(WorkQueue::new(active, &memory, &interrupt, features), kicks)
        });
        let ring = |active: ActiveQueue| {
            let call = EventFd::new(EFD_NONBLOCK)?;
            let size_max = self.queue_sizes.get(usize::from(active.index)).copied().unwrap_or(0);
            Ok(Ring {
                index: active.index,
                queue: active.queue,
                size_max,
                trapped: active.kick,
                kicks: active.kicks,
                call,
                interrupt: Arc::clone(&interrupt),
                stage: RingStage::Stopped,
                is_wanted: true,
            })
        };
        let rings = rings.into_iter().map(ring).collect::<std::io::Result<_>>();
        let rings = rings.map_err(|source| ActivateError::Resource {
            what: "make the eventfd of a queue",
            source,
        })?;
        if let Some(net) = &self.net
            && features & 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE != 0
        {
            net.set_interrupt(Some(Arc::clone(&interrupt)));
        }
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
            config: Arc::clone(&self.config),
            net: self.net.clone(),
            control,
            failure: None,
        };
        self.workers.spawn(&self.id, &[], worker)
    }

    fn reset(&mut self) {
        self.deadline.hurry(RESET_LIMIT);
        self.workers.stop();
        self.deadline.take_time();
        if let Some(net) = &self.net {
            net.reset();
        }
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        match (&self.net, &self.given) {
            (Some(net), _) => state::save(net, &self.config),
            (None, Some(given)) => state::save_fs(&std::mem::take(&mut *given.lock())),
            (None, None) => DeviceSnapshot {
                kind: self.config.kind().name().to_owned(),
                version: STATE_VERSION,
                data: serde_json::Value::Null,
            },
        }
    }

    /// An error for all but networks and file systems: the back end has no state of another process.
    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        if let Some(net) = &self.net {
            return state::restore(net, self.config.mtu(), state);
        }
        if self.given.is_some() {
            let given = state::fs_state(state)?;
            let loaded = self.session.lock().load_state(&given);
            return loaded.map_err(|error| state::not_taken(&error));
        }
        let why = "the state of a vhost-user device is in its back end".to_owned();
        Err(StateError::Invalid { kind: self.config.kind().name(), why })
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.reset();
    }
}
