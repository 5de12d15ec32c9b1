// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio socket device (virtio 1.3, 5.10), with Unix sockets of the host as its other side.
//!
//! Owns the connections between ports of the guest and streams of the host. They are mapped as in
//! Firecracker and cloud-hypervisor: a client of the device's own socket names a port of the guest
//! (`CONNECT <port>`, answered by `OK <host port>`), and a guest that connects to port P of the host
//! is connected to the socket at the same path with `_P` appended.
//!
//! | module | owns |
//! | --- | --- |
//! | `packet` | headers |
//! | `connection` | one connection: its state, and its data on their way |
//! | `credit` | the credit of one connection |
//! | `greeting` | a client that has not named its port yet |
//! | `muxer` | all connections, and the packets to be sent to the guest |
//! | `socket` | the device's own path, which one VM has at a time |
//! | `worker` | the queues |
//! | `transmit` | packets of the guest that are taken and not used yet |
//! | `receive` | the guest's buffers while data are read into them |
//! | `notice` | when the guest is told that its packets were taken |
//!
//! Connections belong to the process: a guest that is migrated, or restored from a snapshot, is told
//! that all of them are closed. A client never makes the device wait, nor buffer more than
//! [`muxer::LARGE_BUFFER_BYTES`] for it; what it writes stays in its socket until the guest has room.

pub(super) mod connection;
mod counters;
mod credit;
mod device;
mod greeting;
pub(super) mod muxer;
mod notice;
pub(super) mod packet;
mod receive;
mod socket;
mod state;
#[cfg(test)]
mod tests;
mod transmit;
pub(super) mod worker;

pub use counters::VsockCounters;
pub use device::{Vsock, VsockConfig};
pub use socket::{VsockSocket, VsockSocketError};
