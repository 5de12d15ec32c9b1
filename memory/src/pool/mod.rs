// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that a pool on this host has populated and zeroed in advance.
//!
//! Owns the language between a VMM and the pool (`protocol`) and the VMM's end of it (`client`).
//! Must never know how a pool keeps its memory, and must never wait for one for long.
//!
//! ```text
//!   VMM  --- take: size, pages, node --->  pool
//!        <-- granted + memfd, or refused ---
//!        ... the connection stays open for as long as the memory is used ...
//!        --- closed, however the VMM ended --->  the memory goes back
//! ```
//!
//! A pool may also keep memory that a device is ready to reach ([`PinnedGrant`]); it comes with the
//! device.

mod client;
mod pinned;
mod protocol;

pub use client::{PinnedMemory, PoolConnection, PoolError, PoolMemory};
pub use pinned::{DeviceAddress, PinnedGrant, PinnedRegion, TakePinned, pieces};
pub use protocol::{
    HEADER_BYTES, MESSAGE_BYTES_MAX, PagesWanted, ProtocolError, Refusal, Reply, Request,
    SlotPages, Take, fuzz_protocol,
};
