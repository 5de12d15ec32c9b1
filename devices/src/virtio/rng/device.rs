// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The entropy device.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use super::state;
use super::worker::RngWorker;
use crate::virtio::RING_FEATURES;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::one_queue::only_queue;
use crate::virtio::worker::{Pausing, Workers};

/// Virtio device ID of entropy devices.
const DEVICE_ID: u16 = 4;
const QUEUE_SIZE: u16 = 256;

/// Configuration of an entropy device.
#[derive(Clone, Debug)]
pub struct RngConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// Path of the entropy source.
    pub source: PathBuf,
}

impl Default for RngConfig {
    fn default() -> Self {
        Self { id: "rng".to_owned(), source: PathBuf::from("/dev/urandom") }
    }
}

/// Why an entropy device cannot be created.
#[derive(Debug, Error)]
pub enum RngError {
    /// The source cannot be opened.
    #[error("cannot open {path} as a source of entropy")]
    Open {
        /// Path of the source.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// An entropy device.
pub struct Rng {
    config: RngConfig,
    source: Arc<File>,
    workers: Workers,
}

impl Rng {
    /// Opens the source.
    pub fn new(config: RngConfig) -> Result<Self, RngError> {
        let source = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(&config.source)
            .map_err(|source| RngError::Open { path: config.source.clone(), source })?;
        Ok(Self { config, source: Arc::new(source), workers: Workers::default() })
    }
}

impl VirtioDevice for Rng {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let queue = only_queue(activation)?;
        let worker = RngWorker::new(queue, Arc::clone(&self.source), self.workers.log_limit());
        self.workers.spawn(&self.config.id, &[], worker)
    }

    fn reset(&mut self) {
        self.workers.stop();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save()
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        state::check(state)
    }
}
