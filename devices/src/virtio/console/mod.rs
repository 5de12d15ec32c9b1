// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio console device with one port (virtio 1.3, 5.3).
//!
//! Owns only its queues: bytes come from and go to a
//! [`ConsoleEndpoint`](crate::endpoint::ConsoleEndpoint).

mod device;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Console, ConsoleConfig, ConsoleResizer};
