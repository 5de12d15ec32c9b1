// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio 1.3 devices, and the trait by which a transport drives them.
//!
//! | module | what it is |
//! | --- | --- |
//! | `device` | the contract with the transport |
//! | `activation_thread` | the thread on which devices are activated |
//! | `worker` | the threads of a device: events, pause, resume, stop |
//! | `one_queue` | threads that serve one queue |
//! | `offer` | what of a device a platform offers |
//! | `queue`, `available`, `buffers` | rings and guest memory, with checks of everything that a driver wrote |
//! | `limiter` | limits on the bytes and operations of devices |
//! | [`balloon`], [`block`], [`console`], [`iommu`], [`mem`], [`net`], [`pmem`], [`rng`], [`rtc`], [`vdpa`], [`vhost_user`], [`vsock`], [`watchdog`] | the devices |
//!
//! If a driver breaks the rules of a queue, its device stops with DEVICE_NEEDS_RESET; an
//! impossible request is answered with an error. Neither ever makes
//! a device panic, wait forever or touch memory outside guest RAM.

mod activation_thread;
mod available;
pub mod balloon;
pub mod block;
mod buffers;
pub mod console;
mod counters;
mod device;
pub mod iommu;
mod limiter;
pub mod mem;
pub mod net;
mod offer;
mod one_queue;
pub mod pmem;
mod queue;
pub mod rng;
pub mod rtc;
pub mod vdpa;
pub mod vhost_user;
pub mod vsock;
pub mod watchdog;
mod worker;

#[cfg(any(test, feature = "testing"))]
pub mod fuzz;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod test_driver;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use activation_thread::{Activated, ActivationThread, DriverEvent, OnDriver};
pub use counters::Counters;
pub use device::{
    ActivateError, Activation, ActiveQueue, DeviceSnapshot, Kicks, StateError, VirtioDevice,
    VirtioInterrupt,
};
pub use limiter::{BucketConfig, RateLimiter};
pub use offer::{ALL_AS_THE_DEVICE, Offer, Offering};
pub use worker::{Pausing, PendingPause};

/// Features that every device offers.
pub(crate) const RING_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Handles a configuration read of any width and offset; bytes beyond the end read as zero.
pub(crate) fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    for (to, from) in data.iter_mut().zip(config.iter().skip(start)) {
        *to = *from;
    }
}
