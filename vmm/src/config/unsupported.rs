// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The option family that is recognised but not supported: vfio-user.
//!
//! Owns its definition, so that option strings and JSON are still checked, and the error says that
//! the option is unsupported rather than unknown.

use std::path::PathBuf;

use super::codec::{File, Id, Int, One, Opt};
use super::family::option_family;

option_family! {
    /// A device emulated by another process (vfio-user).
    UserDeviceConfig "user-device" {
        /// Socket of that process.
        socket: PathBuf = PathBuf::new(), "socket" as One<File>, required();
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
    }
}
