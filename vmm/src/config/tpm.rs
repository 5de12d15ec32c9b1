// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The trusted platform module (`--tpm`).
//!
//! Owns its definition and the rules within it.

use std::path::PathBuf;

use super::codec::{File, One};
use super::error::ConfigError;
use super::family::option_family;

option_family! {
    /// A trusted platform module (TPM 2.0), which swtpm implements.
    TpmConfig "tpm" {
        /// Control socket of the process that implements it (swtpm's `--ctrl type=unixio,path=`).
        socket: PathBuf = PathBuf::new(), "socket" as One<File>, required();
    }
}

impl TpmConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The path is empty.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.socket.as_os_str().is_empty() {
            let problem = "needs a socket".to_owned();
            return Err(ConfigError::Device { what: "TPM", id: String::new(), problem });
        }
        Ok(())
    }
}
