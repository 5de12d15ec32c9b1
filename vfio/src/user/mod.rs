// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI functions that another process emulates, reached by the vfio-user protocol.
//!
//! Owns the client of the protocol: messages, the connection, what a device server says of its function, and guest
//! memory that it is handed. What a guest sees of the function is that of passed-through ones: [`UserFunction`] is one
//! more [`crate::HostFunction`].
//!
//! | module | owns |
//! | --- | --- |
//! | `protocol` | numbers and layouts of messages |
//! | `connection` | bytes and descriptors on the socket, with a time limit |
//! | `received` | descriptors that the server sends |
//! | `session` | one command after the other, what a server asks in between, the end after the first violation |
//! | `answers` | what answers have to say, and what they may |
//! | `function` | the function, as the rest of this crate sees it |
//! | `memory` | guest memory that the server has mapped |
//! | `watch` | the thread that hears of a server while nothing is asked of it |
//!
//! The server is not trusted: an answer that is wrong or late ends the session, after which the function reads as ones.
//! It must never be waited for without a limit, and nothing in this process may touch memory that it provides.

mod answers;
mod connection;
mod function;
#[cfg(any(test, feature = "testing"))]
mod fuzz;
mod memory;
mod protocol;
mod received;
mod session;
#[cfg(test)]
mod tests;
mod watch;

pub use crate::user_error::UserError;
pub(crate) use answers::sparse_areas;
pub use function::UserFunction;
#[cfg(any(test, feature = "testing"))]
pub use fuzz::fuzz_vfio_user;
pub use watch::{OnUserLost, Watch};
