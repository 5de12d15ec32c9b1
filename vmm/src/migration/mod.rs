// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The machine as the migration sees it.
//!
//! Owns the adapters between [`crate::machine`] and the traits of the `vm-migration` crate. Knows
//! nothing of the wire and nothing of the HTTP API.

pub mod destination;
pub mod dirty;
mod disk_writer;
pub mod document;
mod fault_choice;
pub mod faults;
pub mod grants;
pub mod hints;
pub mod json_bound;
pub mod memory;
mod resident;
pub mod snapshot;
pub mod source;
mod updates;
