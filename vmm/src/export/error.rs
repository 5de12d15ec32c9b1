// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a VM cannot be written as one of cloud-hypervisor.

use std::error::Error;
use std::fmt::Display;

use thiserror::Error;

/// Why a VM cannot be converted. Nothing has been written, and the guest can go on here.
#[derive(Debug, Error)]
pub enum ExportError {
    /// A part that cloud-hypervisor v53 does not have, or has not in this state.
    #[error("{what}: {problem}")]
    Refused {
        /// The part: a key of the configuration, a device, a vCPU.
        what: String,
        /// Why it cannot be written.
        problem: String,
    },
    /// Guest memory that has to be looked at cannot be read.
    #[error("{what}: cannot read guest memory at {gpa:#x}")]
    Guest {
        /// What is there.
        what: String,
        /// The address.
        gpa: u64,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A value has no JSON form.
    #[error("a value cannot be written as JSON")]
    Json(#[from] serde_json::Error),
}

impl ExportError {
    pub(super) fn refused(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), problem: problem.into() }
    }
}

/// Refuses a part unless a condition holds.
pub(super) fn ensure(
    holds: bool,
    what: impl FnOnce() -> String,
    problem: impl FnOnce() -> String,
) -> Result<(), ExportError> {
    if holds { Ok(()) } else { Err(ExportError::refused(what(), problem())) }
}

/// Refuses a list that is longer than a document can have it.
pub(super) fn fits<T, E: Display>(
    list: Result<T, E>,
    what: impl FnOnce() -> String,
) -> Result<T, ExportError> {
    list.map_err(|error| ExportError::refused(what(), error.to_string()))
}
