// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pool of prezeroed memory on this host: its wire protocol, and the VMM's end of a connection to it.
//!
//! Owns the form of the messages between a VMM and the pool (`protocol`, `pinned`, and below them `frame` and
//! `pages`) and the client (`client`). Must never know how a pool keeps its memory, nor what a VMM does with it, and
//! must never wait for a pool for long.
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
mod frame;
mod pages;
mod pinned;
mod protocol;

pub use client::{PinnedMemory, PoolConnection, PoolError, PoolMemory};
pub use frame::{HEADER_BYTES, ProtocolError};
pub use pages::{PagesWanted, SlotPages};
pub use pinned::{
    DEVICES_MAX, PinnedGrant, PinnedRegion, PinnedZone, TakePinned, ZONES_MAX, ZoneWanted, pieces,
};
#[cfg(any(test, feature = "testing"))]
pub use protocol::fuzz_protocol;
pub use protocol::{MESSAGE_BYTES_MAX, Refusal, Reply, Request, Take};
