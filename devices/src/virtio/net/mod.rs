// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio network device (virtio 1.3, 5.1) on a tap of the host.
//!
//! ```text
//!   receive queue  <--+                      +--  tap queue (one per pair)
//!   transmit queue ---+-- worker (per pair) -+
//!   control queue  ------ control worker ------>  offloads, pairs, MAC, announcement
//! ```
//!
//! Frames go between tap and guest memory without a copy. Owns the tap while the VM runs; a paused
//! VM can release it, so that another VMM takes it over.

mod announce;
mod config;
mod control;
mod counters;
mod device;
mod outlook;
mod slot;
mod state;
mod tap;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use announce::Announcer;
#[cfg(any(test, feature = "testing"))]
pub(super) use config::Link;
#[cfg(any(test, feature = "testing"))]
pub(super) use control::ControlWorker;
pub(super) use control::{ControlTarget, control_index, serve as serve_control};
pub use counters::NetCounters;
pub use device::{Net, NetConfig, NetError};
pub use outlook::TapOutlook;
pub use slot::{TapConfig, TapSlot};
#[cfg(any(test, feature = "testing"))]
pub(super) use tap::Tap;
pub use tap::{BadMacAddress, MacAddress, TapError};
