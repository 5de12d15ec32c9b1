// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The HTTP API on a Unix socket, and the channel from it to the VMM thread.
//!
//! ```text
//! client ──HTTP──> http-server thread ──ApiCall──> VMM thread
//!                  (tokio, one task     <─ reply ─
//!                   per connection)
//! ```
//!
//! Owns the endpoints ([`endpoints`]: one table that routing and OpenAPI share), the server, the
//! messages and the client that `ch-remote` uses. It must never know how a request is carried
//! out, and a client must never be able to hold up another one or the VMM.
//!
//! | module | owns |
//! | --- | --- |
//! | `server` | accepts connections: one thread, one task per connection |
//! | `connection_slots` | which clients are connected, and which is closed for a new one |
//! | `timeout_stream`, `hangup` | timeouts of a client; whether it is gone |
//! | `connection` | one HTTP request, from head to response |
//! | `scrape` | metrics as an answer, on their own socket and as an endpoint |
//! | `rights` | descriptors with a request (SCM_RIGHTS) |
//! | `endpoints` | the table of endpoints: routing, OpenAPI, refusals |
//! | `encoding` | answers as bodies |
//! | `openapi`, `body`, `types` | the description, the schemas of bodies, and the answers as JSON |
//! | `request` | messages to the VMM thread and its replies |
//! | `socket` | the Unix socket |
//! | `successor` | where a process listens that takes the place of another |
//! | `client` | a blocking client |

pub mod body;
pub mod client;
pub mod endpoints;
pub mod openapi;
pub mod request;
pub mod server;
pub mod socket;
pub mod successor;
pub mod types;

mod connection;
mod connection_slots;
mod encoding;
mod hangup;
mod rights;
mod scrape;
mod timeout_stream;
pub mod watchers;

#[cfg(test)]
mod tests;

pub use request::{
    ApiCall, ApiError, ApiErrorKind, ApiHandle, ApiQueue, ApiReply, ApiResult, VmmRequest, channel,
};
pub use server::ApiServer;
pub use socket::{ApiListener, ApiSocket, SocketError, SocketFile};
pub use types::{
    DeviceNode, FullDiskInfo, MigrationCancelled, MigrationCheck, MigrationReport, PassthroughInfo,
    PciDeviceInfo, PinningState, PrefaultInfo, PrefaultState, ProgressDocument, VmCounters, VmInfo,
    VmState, VmmPingResponse, WithheldDeviceInfo, WithheldFor,
};
