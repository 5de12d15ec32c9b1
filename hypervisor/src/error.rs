// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The error type of a failed ioctl.
//!
//! Owns the conversion from the ioctl crate's error. Must never be used where a caller would have
//! to match on the request: those cases have separate variants.

use std::io;

use thiserror::Error;

/// A failed KVM call.
#[derive(Debug, Error)]
#[error("the kernel refused to {what}")]
pub struct KvmError {
    /// What was attempted, as an infinitive clause.
    pub what: &'static str,
    /// The cause.
    #[source]
    pub source: io::Error,
}

impl KvmError {
    /// The errno, or zero if the error did not come from the kernel.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}

/// Adds the name of the request to a failed ioctl.
pub(crate) trait KvmContext<T> {
    /// `what` is an infinitive clause.
    fn context(self, what: &'static str) -> Result<T, KvmError>;
}

impl<T, E: Into<io::Error>> KvmContext<T> for Result<T, E> {
    fn context(self, what: &'static str) -> Result<T, KvmError> {
        self.map_err(|error| KvmError { what, source: error.into() })
    }
}
