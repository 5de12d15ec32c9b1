// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of the balloon.
//!
//! Owns the translation from options to a device. A passed-through device forbids that
//! memory is returned with [`GuestRam::ban_discards`] before this is called: reports are not
//! offered to the guest then, and what it puts into the balloon goes only as far as it is unmapped.

use std::sync::Arc;
use std::time::Duration;

use devices::virtio::balloon::{Balloon, BalloonConfig as DeviceConfig, BalloonError};
use memory::GuestRam;
use thiserror::Error;

use crate::config::BalloonConfig;

/// Why the balloon cannot be resized.
#[derive(Debug, Error)]
pub enum ResizeBalloonError {
    /// The VM has no balloon.
    #[error("the VM has no balloon: start it with --balloon size=0")]
    None,
    /// The size is not possible.
    #[error(transparent)]
    Size(#[from] BalloonError),
}

/// Creates a balloon for this memory; `coming_bytes` more are still to be plugged.
///
/// # Errors
/// It does not fit the memory, or a host resource is not available.
pub fn make(
    config: &BalloonConfig,
    ram: &Arc<GuestRam>,
    coming_bytes: u64,
) -> Result<Balloon, BalloonError> {
    let interval = Duration::from_secs(config.statistics_interval_s.into());
    let device = DeviceConfig {
        id: config.id.clone().unwrap_or_default(),
        size_bytes: config.size,
        coming_bytes,
        deflate_on_oom: config.deflate_on_oom,
        free_page_reporting: config.free_page_reporting,
        free_page_hinting: config.free_page_hinting,
        statistics_every: Some(interval).filter(|every| !every.is_zero()),
        prezero_hints: config.prezero_hints,
    };
    Balloon::new(device, Arc::clone(ram))
}
