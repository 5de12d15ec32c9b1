// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Changing the size of a disk of a machine.
//!
//! Owns the stop of vCPUs and device where the disk becomes smaller. Must never be called on a thread that may not wait for
//! storage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::PendingPause;
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
        if self.paused || !disk.cuts(size_bytes) {
            return Ok(disk.resize(size_bytes).map_err(failed)?);
        }
        let Some(device) = self.parts.devices.function_of(id) else {
            return Err(DiskSizeError::Unknown(id.to_owned()).into());
        };
        // What is under way is finished beside the running guest, and what it has requested meanwhile after it has
        // stopped: vCPUs that are out of the device cannot reset it either.
        let pending = finish_requests(id, &device, cancel)?;
        // The guest cannot reset it meanwhile.
        self.stop_watchdog();
        let stopped = self
            .pause_vcpus(FINISH_TIME_MAX, &|| cancel.is_cancelled())
            .and_then(|()| finish_requests(id, &device, cancel));
        let resized = match stopped {
            Ok(_) => {
                device.pause();
                let resized = disk.resize(size_bytes);
                device.resume();
                resized.map_err(|source| failed(source).into())
            }
            Err(error) => {
                pending.withdraw();
                Err(error)
            }
        };
        self.vcpus.resume_all();
        self.start_watchdog();
        resized
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

/// Has a device take no further requests and waits until it has finished all that it has. After an error it works as
/// before.
fn finish_requests(
    id: &str,
    device: &Arc<VirtioPciDevice>,
    cancel: &CancelToken,
) -> Result<PendingPause, MachineError> {
    let until = Instant::now() + FINISH_TIME_MAX;
    // Without a value a vCPU uses the device's registers, for a reset, say.
    let pending = device.begin_pause().unwrap_or_default();
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
    Ok(pending)
}
