// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of functions that another process emulates.
//!
//! Owns the messages, and which of them end a session. Apart from the client, as the errors of all functions have these
//! among them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

/// Why a device server is of no use.
#[derive(Debug, Error)]
pub enum UserError {
    /// Nothing listens at the socket.
    #[error("cannot connect to {path}, where the device server has to listen within {limit_ms} ms")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// How long it was tried.
        limit_ms: u128,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The device was not to be added any more.
    #[error("it was cancelled before the device server was given guest memory")]
    Withdrawn,
    /// The host lacks something.
    #[error("cannot {what}")]
    Resource {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The connection has failed.
    #[error("the connection to the device server has failed")]
    Connection(#[source] io::Error),
    /// The server has closed the connection.
    #[error("the device server has closed the connection")]
    HungUp,
    /// An answer is late.
    #[error("the device server has not answered {command} within {limit_ms} ms")]
    Late {
        /// The command.
        command: &'static str,
        /// The time limit.
        limit_ms: u128,
    },
    /// An answer is wrong.
    #[error("the device server's answer to {command} is wrong: {problem}")]
    Answer {
        /// The command.
        command: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A message that is no answer is wrong.
    #[error("the device server has sent what it may not: {0}")]
    Message(String),
    /// The server has said that it does not carry out a command.
    #[error("the device server refuses {command}")]
    Refused {
        /// The command.
        command: &'static str,
        /// What it says.
        #[source]
        source: io::Error,
    },
    /// The session has ended before.
    #[error("the device server is lost: {0}")]
    Lost(Arc<str>),
    /// The device or the server cannot do what is needed.
    #[error("the device server cannot be used: {0}")]
    Lacks(String),
    /// Guest memory cannot be handed over.
    #[error("guest memory at {gpa:#x} is private: vfio-user needs shared=on")]
    PrivateMemory {
        /// Guest physical address.
        gpa: u64,
    },
}

impl UserError {
    /// Whether nothing may be asked any more: the server has not just refused a command.
    pub(crate) fn ends_session(&self) -> bool {
        !matches!(
            self,
            Self::Refused { .. } | Self::Lost(_) | Self::Lacks(_) | Self::PrivateMemory { .. }
        )
    }

    /// Whether the server has closed the connection.
    pub(crate) fn is_hang_up(&self) -> bool {
        match self {
            Self::HungUp => true,
            Self::Connection(error) => {
                matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
            }
            _ => false,
        }
    }
}
