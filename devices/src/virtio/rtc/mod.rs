// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio real-time clock (device 17 of the draft of virtio 1.4; linux/virtio_rtc.h).
//!
//! Owns one clock, which is the host's, and its answers to requests. Linux makes a PTP clock of it, by which a guest
//! follows the host's time. There is no alarm, and no reading together with a counter of the processor: Linux does not ask
//! for one on this architecture, and `ptp_kvm` has it.

mod device;
mod request;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Rtc, RtcConfig};
