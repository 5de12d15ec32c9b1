// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio entropy device (virtio 1.3, 5.4).
//!
//! Owns the source that the host's administrator chose. Where that has nothing to give, the
//! kernel's generator stands in, so a guest never waits for entropy.

mod device;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Rng, RngConfig, RngError};
