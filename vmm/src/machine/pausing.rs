// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pausing a machine within a time limit.
//!
//! Owns the order in which everything stops, and the way back while not everything has stopped: a device
//! waits for its backend, and storage that does not respond would stop the guest forever.
//! All devices finish their requests in parallel while the vCPUs continue to run; these stop when that is
//! done. If it takes too long, or the request is cancelled, the machine runs as before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use devices::virtio::PendingPause;
use hypervisor::ThreadsError;

use super::passthrough::{CallLimits, Patience};
use super::virtio::VirtioDevices;
use super::{Machine, MachineError};
use crate::config::vm::IOMMU_ID;

/// Poll interval for cancellation.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Minimum time for vCPUs to leave the guest, however short the pause is to be: on a busy host a thread may
/// not be scheduled for a while.
const VCPUS_TIME_MIN: Duration = Duration::from_secs(1);
/// Time that devices which have served all requests have to stop, at least.
const IDLE_TIME_MIN: Duration = Duration::from_millis(10);

/// Cancels a start, pause or hot-plug in progress; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Cancels the operation.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the operation was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Whether requests that devices have not taken when the guest stops are served.
#[derive(Clone, Copy)]
enum Queued {
    /// They stay in their queues.
    Stays,
    /// They are served first.
    IsServed,
}

/// Devices that are being paused; they resume when this is dropped.
#[derive(Default)]
struct PausingDevices {
    devices: Vec<(String, PendingPause)>,
    is_kept: bool,
}

impl PausingDevices {
    /// Waits until all are paused.
    fn wait(&self, within: Duration, is_cancelled: &dyn Fn() -> bool) -> Result<(), MachineError> {
        let until = Instant::now() + within;
        for (id, device) in &self.devices {
            while !device.wait_until(until.min(Instant::now() + POLL_INTERVAL)) {
                if is_cancelled() {
                    return Err(MachineError::PauseWithdrawn);
                }
                if Instant::now() >= until {
                    return Err(MachineError::DeviceBusy { id: id.clone(), within });
                }
            }
        }
        Ok(())
    }
}

impl Drop for PausingDevices {
    fn drop(&mut self) {
        if !self.is_kept {
            self.devices.iter().for_each(|(_, device)| device.withdraw());
        }
    }
}

impl VirtioDevices {
    /// Starts to pause all devices, except those being reset by a driver.
    fn begin_pause(&self) -> PausingDevices {
        self.begin_pause_of(|_| true)
    }

    /// The same while vCPUs run, which goes on for as long as the slowest device needs. The IOMMU is left out: Linux polls
    /// for its answers with interrupts off.
    fn begin_early_pause(&self) -> PausingDevices {
        self.begin_pause_of(|id| id != IOMMU_ID)
    }

    fn begin_pause_of(&self, is_meant: impl Fn(&str) -> bool) -> PausingDevices {
        let begin = |function: &pci::VirtioPciDevice| {
            let id = pci::PciDevice::id(function);
            let begun = if is_meant(id) { function.begin_pause() } else { None };
            begun.map(|begun| (id.to_owned(), begun))
        };
        let devices = self.functions().iter().filter_map(|(_, function)| begin(function));
        PausingDevices { devices: devices.collect(), is_kept: false }
    }
}

/// How long each passed-through device is waited for, whatever time the others have: one that has not stopped by then cannot
/// go on as before either.
fn patience(is_cancelled: &dyn Fn() -> bool) -> Patience<'_> {
    Patience { limits: CallLimits::default(), until: None, is_cancelled }
}

impl Machine {
    /// Pauses the vCPUs and everything else that writes guest memory. Devices have `within` to finish their
    /// requests, and once more for those that the guest makes meanwhile.
    ///
    /// # Errors
    /// [`MachineError::DeviceBusy`] names a device that takes longer, [`MachineError::PauseWithdrawn`] says
    /// that `is_cancelled`; or a vCPU or passed-through device cannot be stopped. A device that hangs is waited for longer,
    /// as [`CallLimits`] say, and lost to the guest. The machine is in its earlier state, except that in a machine that was
    /// paused already, the passed-through devices that could be stopped stay stopped.
    pub fn pause(
        &mut self,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        self.pause_with(Queued::Stays, within, is_cancelled)
    }

    /// The same, and no request is left in a queue: once the vCPUs have stopped, devices have `within` in all to serve what
    /// the guest has queued and to stop. In a machine that was paused already, requests stay.
    ///
    /// # Errors
    /// As [`Machine::pause`].
    pub fn pause_when_served(
        &mut self,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        self.pause_with(Queued::IsServed, within, is_cancelled)
    }

    fn pause_with(
        &mut self,
        queued: Queued,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        if self.paused {
            // The devices may have changed since the pause, and the caller relies on no further writes.
            return Ok(self.parts.passthrough.stop_within(&patience(is_cancelled))?);
        }
        let early = match queued {
            Queued::Stays => self.parts.devices.begin_early_pause(),
            // What the guest would queue meanwhile would have to be served while it is stopped.
            Queued::IsServed => PausingDevices::default(),
        };
        early.wait(within, is_cancelled)?;
        self.pause_vcpus(within.max(VCPUS_TIME_MIN), is_cancelled)?;
        let until = Instant::now() + within;
        let served = match queued {
            Queued::Stays => Ok(()),
            Queued::IsServed => {
                self.parts.devices.finish_queued(&self.parts.ram, within, is_cancelled)
            }
        };
        let left = match queued {
            Queued::Stays => within,
            Queued::IsServed => until.saturating_duration_since(Instant::now()).max(IDLE_TIME_MIN),
        };
        let stopped = served.and_then(|()| self.stop_devices(left, is_cancelled));
        match stopped {
            Ok(mut late) => {
                let mut early = early;
                (early.is_kept, late.is_kept) = (true, true);
                self.parts.devices.pause();
                self.parts.legacy.pause();
                self.paused = true;
                Ok(())
            }
            Err(error) => {
                drop(early);
                self.parts.passthrough.run();
                self.vcpus.resume_all();
                Err(error)
            }
        }
    }

    /// Pauses the devices again that the guest has used while the others finished. No vCPU is inside a
    /// device any more.
    fn stop_devices(
        &self,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<PausingDevices, MachineError> {
        self.parts.passthrough.stop_within(&patience(is_cancelled))?;
        let late = self.parts.devices.begin_pause();
        late.wait(within, is_cancelled)?;
        Ok(late)
    }

    pub(super) fn pause_vcpus(
        &self,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.vcpus.pause_all_within(left.min(VCPUS_TIME_MIN)) {
                Ok(()) => return Ok(()),
                Err(ThreadsError::Timeout { .. }) if is_cancelled() => {
                    return Err(MachineError::PauseWithdrawn);
                }
                Err(ThreadsError::Timeout { index, .. }) if left <= VCPUS_TIME_MIN => {
                    return Err(ThreadsError::Timeout { index, within }.into());
                }
                Err(ThreadsError::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Pauses the devices for a moment and resumes them, to find out whether they finish their requests
    /// within the time. The vCPUs keep running.
    ///
    /// # Errors
    /// As [`Machine::pause`].
    pub fn try_devices(
        &self,
        within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        if self.paused {
            return Ok(());
        }
        self.parts.devices.begin_early_pause().wait(within, is_cancelled)
    }
}
