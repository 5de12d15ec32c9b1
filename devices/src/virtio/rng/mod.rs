// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio entropy device (virtio 1.3, 5.4).
//!
//! Owns the source that the host's administrator chose. When that has no data, the
//! kernel's generator is used, so a guest never waits for entropy.

mod device;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Rng, RngConfig, RngError};
