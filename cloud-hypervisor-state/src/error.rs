// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why bytes are not a document that is understood here.

use json_bound::TooManyValues;
use thiserror::Error;

/// Why a document is refused. The path names the node, and behind a colon the field in it.
#[derive(Debug, Error)]
pub enum DocumentError {
    /// More bytes than any document has.
    #[error("the document has {len_bytes} bytes, and can have {max_bytes}")]
    TooLong {
        /// Its length.
        len_bytes: usize,
        /// The limit.
        max_bytes: usize,
    },
    /// More values than any machine has.
    #[error("the document cannot be taken")]
    TooManyValues(#[from] TooManyValues),
    /// A text is not JSON, or not of the form that is known.
    #[error("{path}: {problem}")]
    Malformed {
        /// Where it is.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// A node that no known version has.
    #[error("{path}: unknown node")]
    UnknownNode {
        /// Where it is.
        path: String,
    },
    /// A node that every document has is not there.
    #[error("{path}: the node is missing")]
    MissingNode {
        /// Where it should be.
        path: String,
    },
    /// A node has no state.
    #[error("{path}: the node has no state")]
    NoState {
        /// Where it is.
        path: String,
    },
    /// A node has a state and should have none.
    #[error("{path}: the node has a state, and none is known for it")]
    UnknownState {
        /// Where it is.
        path: String,
    },
    /// A value is out of bounds.
    #[error("{path}: {problem}")]
    OutOfBounds {
        /// Where it is.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// A part that is known, and cannot be taken over.
    #[error("{path}: {what} cannot be taken over")]
    Unsupported {
        /// Where it is.
        path: String,
        /// Name of the part.
        what: &'static str,
    },
}
