// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The trusted platform module (`--tpm`).
//!
//! Owns its definition and the rules within it.

use std::path::PathBuf;

use super::codec::{File, One};
use super::error::ConfigError;
use super::family::option_family;

/// Longest path of a socket.
const SOCKET_BYTES_MAX: usize = 107;

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
    /// The path is empty or too long.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let problem = match self.socket.as_os_str().len() {
            0 => "needs a socket".to_owned(),
            1..=SOCKET_BYTES_MAX => return Ok(()),
            _ => format!("the path of its socket has more than {SOCKET_BYTES_MAX} bytes"),
        };
        Err(ConfigError::Device { what: "TPM", id: String::new(), problem })
    }
}
