// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio memory device (virtio 1.3, 5.15).
//!
//! The device has a region of guest addresses and requests a size of it for the guest; the driver
//! plugs or unplugs blocks until that size is reached. Owns the driver's requests and the requested size.
//! Which blocks the guest has, and what happens to their pages, is known to the `memory` crate: see
//! [`memory::plugging`]. All of this happens on the device's own thread.

mod config;
mod device;
mod requests;
mod shared;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Mem, MemConfig, MemError, MemHandle};

pub(super) use shared::Shared;

/// The configuration names the NUMA node of the memory (virtio 1.3, 5.15.3).
const F_ACPI_PXM: u64 = 1 << 0;
/// The driver must not access unplugged blocks.
const F_UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;
