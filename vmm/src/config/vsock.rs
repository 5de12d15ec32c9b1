// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The socket device (`--vsock`).
//!
//! Owns its definition and the rules within it.

use std::path::PathBuf;

use super::codec::{File, Id, Int, One, Opt, Toggle};
use super::error::ConfigError;
use super::family::option_family;

/// Maximum length of the path, so that with `_` and a port appended it is a valid socket path (107 bytes).
const SOCKET_BYTES_MAX: usize = 107 - "_4294967295".len();

option_family! {
    /// A socket device (virtio-vsock).
    VsockConfig "vsock" {
        /// Context ID of the guest.
        cid: u64 = 3, "cid" as One<Int>, required(), range(3, 0xffff_fffe);
        /// Unix socket for connections to the guest. Connections from the guest to port P go to the socket at
        /// this path with `_P` appended.
        socket: PathBuf = PathBuf::new(), "socket" as One<File>, required();
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
    }
}

impl VsockConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let problem = match self.socket.as_os_str().len() {
            0 => "needs a socket".to_owned(),
            SOCKET_BYTES_MAX.. => {
                format!("the path of its socket has to be shorter than {SOCKET_BYTES_MAX} bytes")
            }
            _ => return Ok(()),
        };
        Err(ConfigError::Device { what: "vsock", id: self.id.clone().unwrap_or_default(), problem })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;
    use crate::config::Family as _;

    #[test]
    fn context_ids_with_a_meaning_of_their_own_are_refused() {
        for cid in ["2", "4294967295", "4294967296"] {
            let error = VsockConfig::parse(&format!("cid={cid},socket=/s")).unwrap_err();
            assert!(error.to_string().contains("4294967294"), "{error}");
        }
        for cid in ["3", "4294967294"] {
            VsockConfig::parse(&format!("cid={cid},socket=/s")).unwrap().validate().unwrap();
        }
    }

    #[test]
    fn a_path_leaves_room_for_every_port() {
        let of = |len: usize| {
            let socket = PathBuf::from("s".repeat(len));
            VsockConfig { socket, ..VsockConfig::default() }.validate()
        };
        of(SOCKET_BYTES_MAX - 1).unwrap();
        for len in [0, SOCKET_BYTES_MAX, 108] {
            let error = of(len).unwrap_err().to_string();
            assert!(error.contains("vsock") && error.contains("socket"), "{error}");
        }
    }
}
