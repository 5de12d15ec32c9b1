// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option families that are recognised but not supported: vfio-user and the virtio real-time clock.
//!
//! Owns their definitions, so that option strings and JSON are still checked, and the error says that
//! the option is unsupported rather than unknown.

use std::path::PathBuf;

use super::codec::{File, Id, Int, One, Opt, Toggle};
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

option_family! {
    /// The virtio real-time clock device.
    RtcConfig "rtc" {
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>;
    }
}
