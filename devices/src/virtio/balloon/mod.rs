// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio memory balloon (virtio 1.3, 5.5).
//!
//! | queue | what the guest sends | what happens to it |
//! | --- | --- | --- |
//! | inflate, deflate | pages that enter and leave the balloon | discarded in merged runs |
//! | statistics | the guest's memory statistics | kept until requested |
//! | hinting | pages that are free while a migration asks | skipped by its first round |
//! | reporting | pages that are free now | discarded in merged runs |
//!
//! Owns what the guest has reported about its pages. The `memory` crate decides what may be discarded:
//! see [`memory::GuestRam::discard`]. All of this happens on the device's own thread, and a
//! guest is answered once memory and maps are as the answer says. A pause waits for requests in
//! progress, so that a paused guest's memory does not change.

mod config;
mod counters;
mod device;
#[cfg(test)]
mod growing_tests;
mod hinting;
mod pages;
mod queues;
mod shared;
mod state;
mod statistics;
mod target;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use counters::BalloonCounters;
pub use device::{Balloon, BalloonConfig, BalloonError, BalloonHandle};
pub use hinting::FreePageHints;
pub use statistics::Statistics;

#[cfg(any(test, feature = "testing"))]
pub(super) use queues::Queues;
#[cfg(any(test, feature = "testing"))]
pub(super) use shared::Shared;

/// Unit of balloon sizes, whatever the guest's page size (virtio 1.3, 5.5.6).
const PAGE_BYTES: u64 = 4096;

/// The driver notifies the device before it uses pages of the balloon.
const F_MUST_TELL_HOST: u64 = 1 << 0;
/// There is a statistics queue.
const F_STATS_VQ: u64 = 1 << 1;
/// The driver may deflate the balloon when it runs out of memory.
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
/// There is a free page hinting queue.
const F_FREE_PAGE_HINT: u64 = 1 << 3;
/// The driver reports the value with which it fills free pages.
const F_PAGE_POISON: u64 = 1 << 4;
/// There is a free page reporting queue.
const F_PAGE_REPORTING: u64 = 1 << 5;
/// Reported pages are returned initialised up to the used length. Proposed (virtio-spec issue 244), as
/// posted in 2026.
const F_DEVICE_INIT_REPORTED: u64 = 1 << 6;
/// The device reports which inflated pages are returned initialised. Proposed with the above.
const F_DEVICE_INIT_ON_INFLATE: u64 = 1 << 7;
