// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The form of a platform's rules for PCI device numbers.
//!
//! Owns which rules there are. Numbers that options request come first on every platform; who gets which of the others
//! is up to the rules.

use super::offers::DeviceKind;

/// Numbers of devices for which no option names one: virtio-mem devices, the watchdog, the IOMMU, the panic device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlisted {
    /// Counted down from the highest, so that they are the same on another host, whatever was plugged before.
    FromHighest,
    /// The lowest free ones, as other devices have them. They are kept with the configuration from the first boot on.
    LowestFree,
}

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberRules {
    /// The kinds of virtio devices in the order in which devices of a booting machine get their numbers and addresses.
    /// Every kind is in it once.
    pub order: &'static [DeviceKind],
    /// Numbers of devices for which no option names one.
    pub unlisted: Unlisted,
}
