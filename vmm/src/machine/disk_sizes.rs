// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Changing the size of a disk of a machine.
//!
//! Owns the pause of its device where the disk becomes smaller. Must never be called on a thread that may not wait for
//! storage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::block::{DiskResizer, ResizeDiskError};
use pci::VirtioPciDevice;
use thiserror::Error;

use super::{CancelToken, Machine, MachineError};

/// Time that a device has to finish its requests before its disk stays as it is.
const FINISH_TIME_MAX: Duration = Duration::from_secs(30);
/// Time between looks at the cancellation.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Why a disk of a machine does not get another size.
#[derive(Debug, Error)]
pub enum DiskSizeError {
    /// No disk has this id.
    #[error("there is no disk '{0}'")]
    Unknown(String),
    /// Its device does not finish its requests.
    #[error(
        "disk '{id}' has not finished its requests within {} s: its storage does not answer",
        FINISH_TIME_MAX.as_secs()
    )]
    Busy {
        /// Id of the disk.
        id: String,
    },
    /// The disk cannot have this size.
    #[error("disk '{id}' cannot have another size")]
    Disk {
        /// Id of the disk.
        id: String,
        /// The cause.
        #[source]
        source: ResizeDiskError,
    },
}

impl Machine {
    /// Gives a disk another size, and notifies its driver.
    ///
    /// # Errors
    /// [`MachineError::DiskSize`], and [`MachineError::PauseWithdrawn`] if it is cancelled; the size is as before.
    pub fn resize_disk(
        &mut self,
        id: &str,
        size_bytes: u64,
        cancel: &CancelToken,
    ) -> Result<(), MachineError> {
        let disk = self.disk_resizer(id)?;
        let failed = |source| DiskSizeError::Disk { id: id.to_owned(), source };
        disk.check(size_bytes).map_err(failed)?;
        let device = self.parts.devices.function_of(id).filter(|_| !self.paused);
        let paused = match device.filter(|_| disk.cuts(size_bytes)) {
            Some(device) => {
                finish_requests(id, &device, cancel)?;
                Some(device)
            }
            None => None,
        };
        let resized = disk.resize(size_bytes);
        if let Some(device) = paused {
            device.resume();
        }
        Ok(resized.map_err(failed)?)
    }

    /// The disk with this id.
    ///
    /// # Errors
    /// [`DiskSizeError::Unknown`].
    pub fn disk_resizer(&self, id: &str) -> Result<DiskResizer, DiskSizeError> {
        let mut resizers = self.parts.devices.resizers.iter();
        let found = resizers.find(|(other, _)| other == id).map(|(_, resizer)| resizer.clone());
        found.ok_or_else(|| DiskSizeError::Unknown(id.to_owned()))
    }
}

/// Pauses a device, or leaves it as it is.
fn finish_requests(
    id: &str,
    device: &Arc<VirtioPciDevice>,
    cancel: &CancelToken,
) -> Result<(), MachineError> {
    let until = Instant::now() + FINISH_TIME_MAX;
    // Without a value a driver is resetting the device, which waits for its requests.
    if let Some(pending) = device.begin_pause() {
        while !pending.wait_until(until.min(Instant::now() + LOOK_EVERY)) {
            let is_late = until <= Instant::now();
            if is_late || cancel.is_cancelled() {
                pending.withdraw();
                return Err(if is_late {
                    DiskSizeError::Busy { id: id.to_owned() }.into()
                } else {
                    MachineError::PauseWithdrawn
                });
            }
        }
    }
    device.pause();
    Ok(())
}
