// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The socket device.

use std::path::PathBuf;
use std::sync::Arc;

use super::counters::VsockCounters;
use super::muxer::Muxer;
use super::socket::VsockSocket;
use super::state;
use super::worker::VsockWorker;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Pausing, Watch, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of vsock devices.
const DEVICE_ID: u16 = 19;
const QUEUE_SIZE: u16 = 256;
const QUEUES: usize = 3;

/// Configuration of a vsock device.
#[derive(Clone, Debug)]
pub struct VsockConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// Context ID of the guest.
    pub cid: u64,
    /// Path of the device's listening socket.
    pub path: PathBuf,
}

/// A vsock device.
pub struct Vsock {
    config: VsockConfig,
    socket: Arc<VsockSocket>,
    counters: Arc<VsockCounters>,
    /// Whether the driver still has to be told that the connections of another process are gone.
    reset_is_due: bool,
    workers: Workers,
}

impl Vsock {
    /// A device that does not listen yet.
    pub fn new(config: VsockConfig) -> Self {
        let socket = Arc::new(VsockSocket::new(config.path.clone()));
        Self {
            config,
            socket,
            counters: Arc::default(),
            reset_is_due: false,
            workers: Workers::default(),
        }
    }

    /// The listening socket, to be bound before the guest runs.
    pub fn socket(&self) -> Arc<VsockSocket> {
        Arc::clone(&self.socket)
    }

    /// The counters of the device.
    pub fn counters(&self) -> Arc<VsockCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &[QUEUE_SIZE; QUEUES]
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config.cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        let mut slots: [Option<WorkQueue>; QUEUES] = Default::default();
        for queue in queues {
            if let Some(slot) = slots.get_mut(usize::from(queue.index)) {
                *slot = Some(WorkQueue::new(queue, &memory, &interrupt, features));
            }
        }
        let [receive, transmit, event] = slots;
        let queue =
            |queue: Option<WorkQueue>, index| queue.ok_or(ActivateError::MissingQueue { index });
        let (receive, transmit, event) =
            (queue(receive, 0)?, queue(transmit, 1)?, queue(event, 2)?);
        let resource = |source| ActivateError::Resource {
            what: "watch the clients of the socket device",
            source,
        };
        let watch = Watch::new().map_err(resource)?;
        let muxer = Muxer::new(
            self.config.cid,
            Arc::clone(&self.socket),
            Arc::clone(&self.counters),
            self.workers.log_limit(),
            watch.epoll(),
        );
        let worker = VsockWorker::new(receive, transmit, event, muxer, self.reset_is_due);
        let worker = worker.map_err(resource)?;
        self.workers.spawn_with(&self.config.id, worker, watch)
    }

    fn reset(&mut self) {
        self.workers.stop();
        self.reset_is_due = false;
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save()
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        state::check(state)?;
        self.reset_is_due = true;
        Ok(())
    }
}
