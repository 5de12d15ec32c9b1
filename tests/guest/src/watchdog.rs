// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver of the virtio watchdog, which sets it back about once a second.
//!
//! Owns its queue and the time of the next buffer. It uses the pages of the balloon and disk drivers, so that it runs
//! beside neither. Must never set the watchdog back but between two iterations of the workload.

use crate::abi;
use crate::clock;
use crate::virtio::{Device, Part, Queue};

const DEVICE_TYPE: u32 = 35;
/// Descriptors of the device's queue; one is used at a time.
const QUEUE_SIZE: u16 = 8;
const EVERY_NS: u64 = 1_000_000_000;

/// The driver.
pub struct Watchdog {
    queue: Queue,
    every_ticks: u64,
    /// When it is set back next.
    due: u64,
}

impl Watchdog {
    /// Starts the watchdog that configuration space at `ecam` shows.
    pub fn start(ecam: u64, khz: u64) -> Result<Self, u64> {
        let device = Device::find(ecam, DEVICE_TYPE)?;
        device.agree(0)?;
        let queue = device.queue_of(0, abi::BALLOON_RINGS_GPA, QUEUE_SIZE)?;
        device.ready();
        Ok(Self { queue, every_ticks: clock::ticks(EVERY_NS, khz), due: 0 })
    }

    /// Sets it back if it is time for that.
    pub fn set_back(&mut self, now: u64, meanwhile: impl FnMut()) {
        if now < self.due {
            return;
        }
        self.due = now + self.every_ticks;
        let part = Part { gpa: abi::BALLOON_REQUEST_GPA, len_bytes: 1, writable: true };
        self.queue.request(&[part], meanwhile);
    }
}
