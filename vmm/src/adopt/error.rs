// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a VM of cloud-hypervisor cannot be taken over.

use std::error::Error;

use thiserror::Error;

use crate::config::ConfigError;

/// Why a VM cannot be converted. The guest is unharmed at its source.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// A key of the configuration has a value that is not possible here.
    #[error("the configuration has {key}={value}, which cannot be taken over")]
    Key {
        /// The key, with those around it.
        key: String,
        /// Its value.
        value: String,
    },
    /// The configuration is not one of this program.
    #[error("the configuration cannot be read")]
    Malformed(#[source] serde_json::Error),
    /// The configuration breaks a rule.
    #[error("the configuration is not possible here")]
    Config(#[source] ConfigError),
    /// A part of the state cannot be taken over.
    #[error("{path}: {problem}")]
    Refused {
        /// Path of the node, and of the value in it.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// Guest memory that a position is in cannot be read.
    #[error("{path}: cannot read guest memory at {gpa:#x}")]
    Guest {
        /// What is there.
        path: String,
        /// The address.
        gpa: u64,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

impl AdoptError {
    pub(super) fn refused(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Refused { path: path.into(), problem: problem.into() }
    }
}

/// Refuses a value unless a condition holds.
pub(super) fn ensure(
    holds: bool,
    path: impl FnOnce() -> String,
    problem: impl FnOnce() -> String,
) -> Result<(), AdoptError> {
    if holds { Ok(()) } else { Err(AdoptError::refused(path(), problem())) }
}
