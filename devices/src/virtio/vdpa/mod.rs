// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio devices whose queues a device of the host serves: vDPA, by the kernel's vhost-vdpa.
//!
//! | module | what it is |
//! | --- | --- |
//! | `device` | the device as the transport drives it |
//! | `offer` | what the guest is shown of it |
//! | `session` | the order of calls from its start to its reset, and what is mapped for it |
//! | `worker` | the thread that starts and stops it, and forwards interrupts |
//! | `backend`, `kernel` | the calls, and the kernel's form of them |
//!
//! The device reaches all guest memory by DMA, and the driver's notifications reach it without the VMM. It is trusted
//! with the guest, as passed-through devices are, and not with the VMM: what it says of itself is checked, and its
//! failure costs the guest this device alone.

mod backend;
mod counters;
mod device;
mod error;
mod kernel;
mod offer;
mod session;
mod worker;

#[cfg(any(test, feature = "testing"))]
pub(super) mod fuzz;
#[cfg(any(test, feature = "testing"))]
mod scripted;
#[cfg(test)]
mod tests;

pub use counters::VdpaCounters;
pub use device::{Vdpa, VdpaDeviceConfig, VdpaEnd};
pub use error::VdpaError;
