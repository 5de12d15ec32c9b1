// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of block devices.
//!
//! Owns the translation from options to devices, and the locks of the images.

use devices::virtio::block::{Block, BlockConfig, DiskError, DiskLock, LockGranularity};
use thiserror::Error;

use super::exclusive::KeptDisks;
use crate::config::{self, DiskConfig};

/// Why a disk is not there.
#[derive(Debug, Error)]
pub enum DiskWiringError {
    /// There is no path.
    #[error("disk '{0}' has no path")]
    NoPath(String),
    /// The device cannot be made.
    #[error("cannot make disk '{id}'")]
    Make {
        /// Its id.
        id: String,
        /// Why.
        #[source]
        source: DiskError,
    },
}

fn affinity(config: &DiskConfig) -> Vec<Vec<usize>> {
    let mut queues = vec![Vec::new(); usize::from(config.num_queues)];
    for entry in config.queue_affinity.iter().flatten() {
        if let Some(cpus) = queues.get_mut(usize::from(entry.queue_index)) {
            cpus.extend(entry.host_cpus.iter().filter_map(|cpu| usize::try_from(*cpu).ok()));
        }
    }
    queues
}

/// Opens the image of a disk, or takes it from `kept` with its lock; otherwise the lock is not taken
/// yet.
///
/// # Errors
/// Naming the disk and its image.
pub fn make(
    config: &DiskConfig,
    kept: &mut KeptDisks,
) -> Result<(Block, DiskLock), DiskWiringError> {
    let id = config.id.clone().unwrap_or_default();
    let path = config.path.clone().ok_or_else(|| DiskWiringError::NoPath(id.clone()))?;
    let config = BlockConfig {
        id: id.clone(),
        path,
        readonly: config.readonly,
        direct: config.direct,
        sparse: config.sparse,
        num_queues: config.num_queues,
        queue_size: config.queue_size,
        serial: config.serial.clone(),
        disable_io_uring: config.disable_io_uring,
        lock_granularity: match config.lock_granularity {
            config::LockGranularity::ByteRange => LockGranularity::ByteRange,
            config::LockGranularity::Full => LockGranularity::Full,
        },
        queue_affinity: affinity(config),
    };
    let block = match kept.take(&config) {
        Some(lock) => Block::over(config, &lock),
        None => Block::new(config),
    }
    .map_err(|source| DiskWiringError::Make { id, source })?;
    let lock = block.lock();
    Ok((block, lock))
}
