// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Emulated devices: legacy PC devices and virtio devices.
//!
//! A device knows what it does, but not how the guest reaches it: it knows neither PCI nor KVM nor the
//! configuration file. Legacy devices are on a [`bus::Bus`], virtio devices behind
//! [`virtio::VirtioDevice`]. Serial port and virtio console share the [`endpoint`]s that connect
//! them to a terminal, a file or a socket.

pub mod bus;
pub mod endpoint;
pub mod legacy;
mod log_limit;
mod state;
mod syscalls;
pub mod tpm;
pub mod unix_connect;
pub mod virtio;

pub use log_limit::{LogLimit, SuppressedLines};
pub use state::Snapshot;
