// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What postcopy costs: `postcopy-latency`, `postcopy-throughput` and `postcopy-scaling`.
//!
//! | file | owns |
//! | --- | --- |
//! | `guest` | one migration, as the guest's own clock and records tell it |
//! | `latency` | a faulting access compared with the raw round trip, the floor and QEMU |
//! | `throughput` | the time until the last page compared with a raw copy |
//! | `scaling` | faulting threads on plain memory, without KVM |
//! | `floor` | the least that a fault over a socket costs |
//! | `stream` | a bulk stream alongside something |
//! | `uffd` | the kernel's interface, used as plainly as possible |
//!
//! Nothing here asks a VMM how well it did.

mod floor;
pub mod guest;
pub mod latency;
pub mod scaling;
mod stream;
pub mod throughput;
mod uffd;

/// Converts nanoseconds to microseconds.
fn us(ns: u64) -> f64 {
    crate::pair::float(ns) / 1e3
}
