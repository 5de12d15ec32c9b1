// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bus Master Enable of a virtio device: whether it may do DMA.
//!
//! Owns one rule: the bit has an effect from the moment at which it is set for the first time. A function
//! without it must not touch guest memory (PCI 3.0, 6.2.2), but some firmware (for example
//! rust-hypervisor-firmware) drives virtio devices without ever setting it, because hypervisors
//! have ignored it. A driver that clears the bit, however, means it.

use super::rules::BusMastering;

/// State of Bus Master Enable of a virtio function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BusMaster {
    /// Without effect on this platform.
    Ignored,
    /// Never set.
    NotUsed,
    /// Set.
    On,
    /// Cleared after having been set.
    Off,
}

impl BusMaster {
    /// That of a new device.
    pub(super) fn under(rule: BusMastering) -> Self {
        match rule {
            BusMastering::Enforced => Self::NotUsed,
            BusMastering::Ignored => Self::Ignored,
        }
    }

    /// The state after a write to the command register.
    pub(super) fn written(self, is_set: bool) -> Self {
        match (self, is_set) {
            (Self::Ignored, _) => Self::Ignored,
            (_, true) => Self::On,
            (Self::NotUsed, false) => Self::NotUsed,
            (Self::On | Self::Off, false) => Self::Off,
        }
    }

    /// The state of a new device after a restore: a device that works without the bit has a driver that never sets it, and
    /// one that needs a reset was stopped by clearing it.
    pub(super) fn restored(self, is_set: bool, needs_reset: bool) -> Self {
        match (self, is_set, needs_reset) {
            (Self::Ignored, _, _) => Self::Ignored,
            (_, true, _) => Self::On,
            (_, false, true) => Self::Off,
            (_, false, false) => Self::NotUsed,
        }
    }

    /// Whether the device may access guest memory and send messages.
    pub(super) fn allows(self) -> bool {
        self != Self::Off
    }
}
