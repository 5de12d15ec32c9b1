// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The console device.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::state;
use super::worker::ConsoleWorker;
use crate::endpoint::ConsoleEndpoint;
use crate::virtio::device::{
    ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice, VirtioInterrupt,
};
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of consoles.
const DEVICE_ID: u16 = 3;
const QUEUE_SIZE: u16 = 256;
const RECEIVE_QUEUE: u16 = 0;
const TRANSMIT_QUEUE: u16 = 1;
/// The configuration contains the console size (virtio 1.3, 5.3.3).
const F_SIZE: u64 = 1 << 0;
const CONFIG_BYTES: usize = 12;

/// Configuration of a console.
pub struct ConsoleConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// The back end.
    pub endpoint: Arc<ConsoleEndpoint>,
}

#[derive(Default)]
pub(super) struct Shared {
    size: (u16, u16),
    /// Set while a driver wants to be notified of changes.
    pub(super) interrupt: Option<Arc<dyn VirtioInterrupt>>,
}

/// Handle to change the console size while the transport owns the device.
#[derive(Clone)]
pub struct ConsoleResizer {
    endpoint: Arc<ConsoleEndpoint>,
    /// Only locked briefly.
    pub(super) shared: Arc<Mutex<Shared>>,
}

impl ConsoleResizer {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// The resizer of a console without a size yet.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn new(endpoint: Arc<ConsoleEndpoint>) -> Self {
        Self { endpoint, shared: Arc::default() }
    }

    pub(super) fn endpoint(&self) -> Arc<ConsoleEndpoint> {
        Arc::clone(&self.endpoint)
    }

    /// Adopts the current size of the terminal, if the back end is one.
    pub fn follow_terminal(&self) {
        // A pseudo terminal that no process has opened has no size.
        if let Some((columns, rows)) = self.endpoint.size().filter(|size| *size != (0, 0)) {
            self.resize(columns, rows);
        }
    }

    /// Sets the size, and notifies the driver of a change.
    pub fn resize(&self, columns: u16, rows: u16) {
        let mut shared = self.lock();
        if shared.size == (columns, rows) {
            return;
        }
        shared.size = (columns, rows);
        // Under the lock, for which a reset waits, so that no later driver is interrupted.
        if let Some(interrupt) = &shared.interrupt {
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
    /// A console with the size of its endpoint, if that has one.
    pub fn new(config: ConsoleConfig) -> Self {
        let size = config.endpoint.size().unwrap_or_default();
        let shared = Shared { size, interrupt: None };
        let endpoint = Arc::clone(&config.endpoint);
        let shared = ConsoleResizer { endpoint, shared: Arc::new(Mutex::new(shared)) };
        Self { config, shared, workers: Workers::default() }
    }

    /// The handle to change the size.
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

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(self.shared.lock().size)
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.shared.lock().size = state::check(state)?;
        Ok(())
    }
}
