// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio watchdog device, as in cloud-hypervisor (ID 35; the standard only reserves the number).
//!
//! Owns the timer that a driver starts with its first buffer and resets with each further one. When it
//! expires the guest is considered stuck, and the owner of the machine is told; the device must never end the
//! guest itself. The timer stops while the device is paused and while guest memory is still to arrive, and
//! starts anew afterwards.

mod device;
mod handle;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Expired, Watchdog, WatchdogConfig};
pub use handle::WatchdogHandle;
