// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--kernel`, `--initramfs`, `--cmdline`, `--firmware`: the guest's boot payload.
//!
//! Owns the JSON object. Whether the files can be read and loaded is decided at boot.

use std::path::PathBuf;

use super::codec::{File, Opt, Text};
use super::error::ConfigError;
use super::family::option_family;

/// Maximum length of the kernel command line on x86, without its terminating zero.
pub const MAX_CMDLINE_BYTES: usize = 2047;

option_family! {
    /// Boot payload of the guest.
    PayloadConfig "payload" {
        /// Firmware instead of a kernel: an ELF file with a PVH entry, which gets no command line
        /// and no initramfs.
        firmware: Option<PathBuf> = None, "firmware" as Opt<File>;
        /// Kernel: an ELF file with a PVH entry, or a bzImage.
        kernel: Option<PathBuf> = None, "kernel" as Opt<File>;
        /// Kernel command line.
        cmdline: Option<String> = None, "cmdline" as Opt<Text>;
        /// Initial RAM file system.
        initramfs: Option<PathBuf> = None, "initramfs" as Opt<File>;
        /// IGVM image.
        igvm: Option<PathBuf> = None, "igvm" as Opt<File>, unsupported();
        /// Host data of a confidential guest.
        host_data: Option<String> = None, "host_data" as Opt<Text>, unsupported();
    }
}

impl PayloadConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let given =
            |path: &Option<PathBuf>| path.as_ref().is_some_and(|path| !path.as_os_str().is_empty());
        match (given(&self.kernel), given(&self.firmware)) {
            (false, false) => return Err(ConfigError::KernelMissing),
            (true, true) => return Err(ConfigError::TwoPayloads),
            (true, false) | (false, true) => {}
        }
        let cmdline = self.cmdline.as_deref().unwrap_or_default();
        if cmdline.len() > MAX_CMDLINE_BYTES {
            return Err(ConfigError::CmdlineTooLong {
                bytes: cmdline.len(),
                max_bytes: MAX_CMDLINE_BYTES,
            });
        }
        if cmdline.contains('\0') {
            return Err(ConfigError::CmdlineHasNul);
        }
        Ok(())
    }
}
