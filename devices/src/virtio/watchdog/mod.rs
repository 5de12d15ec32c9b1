// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio watchdog device, as cloud-hypervisor has it (ID 35; the standard reserves the number only).
//!
//! Owns the clock that a driver starts with its first buffer and sets back with each further one. When it
//! has run out the guest is taken for stuck, and the owner of the machine is told; it must never end the guest
//! itself. The clock stands while the device is paused, and while memory of the guest is still to come, and begins
//! anew afterwards.

mod device;
mod handle;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Expired, Watchdog, WatchdogConfig};
pub use handle::WatchdogHandle;
