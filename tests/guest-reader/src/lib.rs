// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Looks at the test guest from outside, through the memory of the VMM process that runs it.
//!
//! [`Guest::attach`] finds guest RAM in a process (a memfd by name, or private anonymous memory),
//! and from then on status, histograms and contents are read page by page. Reading never brings a
//! page into memory: a hole is recognised before it is read, and is reported as not resident, so
//! that a migration can be watched without helping it. Only [`Guest::set`], [`Guest::hold`] and
//! [`Guest::release`] write, to the parameter page.
//!
//! This crate must never depend on the VMM: it judges it.

#[path = "../../guest/src/abi.rs"]
pub mod abi;
#[path = "../../guest/src/cmdline.rs"]
pub mod cmdline;
#[path = "../../guest/src/layout.rs"]
pub mod layout;
#[path = "../../guest/src/pattern.rs"]
pub mod pattern;

mod guest;
mod histogram;
pub mod image;
mod memory;
mod process;
mod pulse;
pub mod rtt;
mod status;
#[cfg(test)]
mod tests;
pub mod tsc;
mod verify;

pub use guest::{AttachOptions, Guest, GuestError, Patience};
pub use histogram::{AboveCut, Histogram, Summary};
pub use memory::{GuestMemory, MemoryError, Segment};
pub use process::{Backing, ProcessError};
pub use pulse::Pulse;
pub use status::{BalloonStatus, ErrorRecord, Gap, Status, VcpuStatus};
pub use verify::{PageError, PageErrorKind, VerifyReport};
