// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The error type of a failed ioctl.
//!
//! Owns the conversion from the ioctl crate's error. Must never be used where a caller would have
//! to match on the request: those cases have separate variants.

use std::io;

use thiserror::Error;

/// The kernel refused a request that names nothing but itself.
#[derive(Debug, Error)]
#[error("the kernel refused to {what}")]
pub struct KvmError {
    /// What was asked for, as an infinitive clause.
    pub what: &'static str,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

impl KvmError {
    /// The error number, zero when the error did not come from the kernel.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}

/// Names the request of a failed ioctl.
pub(crate) trait KvmContext<T> {
    /// `what` is an infinitive clause.
    fn context(self, what: &'static str) -> Result<T, KvmError>;
}

impl<T, E: Into<io::Error>> KvmContext<T> for Result<T, E> {
    fn context(self, what: &'static str) -> Result<T, KvmError> {
        self.map_err(|error| KvmError { what, source: error.into() })
    }
}
