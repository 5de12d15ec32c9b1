// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The console device.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use virtio_queue::QueueState;

use super::state;
use super::worker::ConsoleWorker;
use crate::endpoint::ConsoleEndpoint;
use crate::virtio::device::{
    ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice, VirtioInterrupt,
};
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{PendingPause, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of consoles.
const DEVICE_ID: u16 = 3;
const QUEUE_SIZE: u16 = 256;
const RECEIVE_QUEUE: u16 = 0;
const TRANSMIT_QUEUE: u16 = 1;
/// The configuration has the console's size (virtio 1.3, 5.3.3).
const F_SIZE: u64 = 1 << 0;
const CONFIG_BYTES: usize = 12;

/// What a console is made from.
pub struct ConsoleConfig {
    /// Name of the device, for its thread.
    pub id: String,
    /// What it is connected to.
    pub endpoint: Arc<ConsoleEndpoint>,
}

#[derive(Default)]
struct Shared {
    size: (u16, u16),
    /// Set while the driver wants to know about changes.
    interrupt: Option<Arc<dyn VirtioInterrupt>>,
}

/// Tells the guest about a new size of the terminal, while the transport owns the device.
#[derive(Clone)]
pub struct ConsoleResizer {
    endpoint: Arc<ConsoleEndpoint>,
    /// Held only to look and to set.
    shared: Arc<Mutex<Shared>>,
}

impl ConsoleResizer {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// The resizer of a console that has no size yet.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn new(endpoint: Arc<ConsoleEndpoint>) -> Self {
        Self { endpoint, shared: Arc::default() }
    }

    pub(super) fn endpoint(&self) -> Arc<ConsoleEndpoint> {
        Arc::clone(&self.endpoint)
    }

    /// Takes the size that the terminal has now, if the console is connected to one.
    pub fn follow_terminal(&self) {
        // A pseudo terminal that nothing has opened has no size.
        if let Some((columns, rows)) = self.endpoint.size().filter(|size| *size != (0, 0)) {
            self.resize(columns, rows);
        }
    }

    /// Sets the size; the driver is notified if it changed.
    pub fn resize(&self, columns: u16, rows: u16) {
        let interrupt = {
            let mut shared = self.lock();
            if shared.size == (columns, rows) {
                return;
            }
            shared.size = (columns, rows);
            shared.interrupt.clone()
        };
        if let Some(interrupt) = interrupt {
            interrupt.config_changed();
        }
    }
}

/// A console device.
pub struct Console {
    config: ConsoleConfig,
    shared: ConsoleResizer,
    workers: Workers,
}

impl Console {
    /// A console whose size is that of its endpoint, as far as it has one.
    pub fn new(config: ConsoleConfig) -> Self {
        let size = config.endpoint.size().unwrap_or_default();
        let shared = Shared { size, interrupt: None };
        let endpoint = Arc::clone(&config.endpoint);
        let shared = ConsoleResizer { endpoint, shared: Arc::new(Mutex::new(shared)) };
        Self { config, shared, workers: Workers::default() }
    }

    /// The handle by which the size is changed.
    pub fn resizer(&self) -> ConsoleResizer {
        self.shared.clone()
    }
}

impl VirtioDevice for Console {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &[QUEUE_SIZE; 2]
    }

    fn features(&self) -> u64 {
        RING_FEATURES | F_SIZE
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let (columns, rows) = self.shared.lock().size;
        let mut config = [0; CONFIG_BYTES];
        config[..2].copy_from_slice(&columns.to_le_bytes());
        config[2..4].copy_from_slice(&rows.to_le_bytes());
        // One port.
        config[4..8].copy_from_slice(&1_u32.to_le_bytes());
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        let mut receive = None;
        let mut transmit = None;
        for queue in queues {
            match queue.index {
                RECEIVE_QUEUE => receive = Some(queue),
                TRANSMIT_QUEUE => transmit = Some(queue),
                _ => {}
            }
        }
        let missing = |index| ActivateError::MissingQueue { index };
        let receive = receive.ok_or_else(|| missing(RECEIVE_QUEUE))?;
        let transmit = transmit.ok_or_else(|| missing(TRANSMIT_QUEUE))?;
        let worker = ConsoleWorker::new(
            WorkQueue::new(receive, &memory, &interrupt, features),
            WorkQueue::new(transmit, &memory, &interrupt, features),
            self.resizer(),
        );
        self.workers.spawn(&self.config.id, &[], worker)?;
        if features & F_SIZE != 0 {
            self.shared.lock().interrupt = Some(interrupt);
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.shared.lock().interrupt = None;
        self.workers.stop();
    }

    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        self.workers.pause()
    }

    fn begin_pause(&mut self) -> PendingPause {
        self.workers.begin_pause()
    }

    fn resume(&mut self) {
        self.workers.resume();
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(self.shared.lock().size)
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.shared.lock().size = state::check(state)?;
        Ok(())
    }
}
