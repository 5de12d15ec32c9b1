// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The real-time clock device (`--rtc`).
//!
//! Owns its definition.

use super::codec::{Id, Int, One, Opt, Toggle};
use super::family::option_family;

option_family! {
    /// The virtio real-time clock device; `--rtc` alone stands for the defaults.
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
