// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM: what a VM is made of, the API that drives it, and the wiring of all rooms.
//!
//! Owns the life cycle of the VM, the configuration, the HTTP API and the event monitor. It must
//! never contain wire formats or ioctls; those belong to the rooms below.

pub mod api;
pub mod config;
pub mod control;
pub mod events;
pub mod machine;
pub mod migration;
pub mod options;
pub mod output_queue;
pub mod page_server;
pub mod panicking;

mod json_text;
#[cfg(test)]
mod testing;

pub use control::{RunError, run};
pub use options::{ExitReason, VmmOptions};
