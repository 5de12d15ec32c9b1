// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Benchmarks of postcopy: `postcopy-latency`, `postcopy-waits`, `postcopy-throughput` and
//! `postcopy-scaling`.
//!
//! | file | owns |
//! | --- | --- |
//! | `guest` | one migration, by the guest's own clock and records |
//! | `latency` | a faulting access compared with the raw round trip, the floor and QEMU |
//! | `waits` | the steps of a faulting access, and which of them wait for a processor |
//! | `throughput` | the time until the last page compared with a raw copy |
//! | `scaling` | faulting threads on plain memory, without KVM |
//! | `floor` | the lower bound of a fault over a socket |
//! | `stream` | a bulk stream in parallel with a measurement |
//! | `uffd` | minimal use of the kernel's interface |
//!
//! Nothing here relies on figures of a VMM.

mod floor;
pub mod guest;
pub mod latency;
pub mod scaling;
mod stream;
pub mod throughput;
mod uffd;
pub mod waits;

/// Converts nanoseconds to microseconds.
fn us(ns: u64) -> f64 {
    crate::pair::float(ns) / 1e3
}
