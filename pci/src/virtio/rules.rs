// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a platform decides about virtio functions: identity, BAR, capabilities, command register.
//!
//! Owns the form of these rules, and what no platform may do. The values are those of the platforms; only the one that
//! this program's own guests see is here, as tests of this crate need one. Must never know a platform by its name.

use super::layout::{NOTIFY_MULTIPLIER, VIRTIO_QUEUES_MAX_COUNT};
use crate::msix;

/// A structure in the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarStructure {
    /// Offset in the BAR.
    pub offset: u32,
    /// Length in bytes.
    pub len_bytes: u32,
}

impl BarStructure {
    /// The offset in the structure of an offset in the BAR, if it is in the structure.
    pub(super) fn offset_of(self, bar_offset: u64) -> Option<u64> {
        bar_offset.checked_sub(self.offset.into()).filter(|offset| *offset < self.len_bytes.into())
    }

    const fn end(self) -> u64 {
        self.offset as u64 + self.len_bytes as u64
    }
}

/// A capability of a virtio function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtioCapability {
    /// MSI-X.
    MsiX,
    /// Common configuration.
    Common,
    /// ISR status.
    Isr,
    /// Device configuration.
    Device,
    /// Notifications.
    Notify,
    /// PCI configuration access.
    Access,
}

/// Whether Bus Master Enable has an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusMastering {
    /// A device for which the bit was once set does nothing while it is clear.
    Enforced,
    /// Devices work whatever the bit is.
    Ignored,
}

/// The rules of a platform for virtio functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtioPciRules {
    /// Length of BAR 0, a power of two.
    pub bar_len_bytes: u64,
    /// Common configuration.
    pub common: BarStructure,
    /// ISR status.
    pub isr: BarStructure,
    /// Device configuration.
    pub device: BarStructure,
    /// Notifications, [`NOTIFY_MULTIPLIER`] bytes for each queue.
    pub notify: BarStructure,
    /// MSI-X table.
    pub msix_table: BarStructure,
    /// MSI-X pending bits.
    pub msix_pba: BarStructure,
    /// The capabilities in their order; each starts at the next multiple of 4.
    pub capabilities: &'static [VirtioCapability],
    /// Device types that have no capability for a device configuration.
    pub without_device_config: &'static [u16],
    /// Class codes by device type.
    pub classes: &'static [(u16, u32)],
    /// Class code of all other device types.
    pub other_class: u32,
    /// Bits of the command register that guests can write.
    pub command_writable: u16,
    /// Whether Bus Master Enable has an effect.
    pub bus_mastering: BusMastering,
}

impl VirtioPciRules {
    /// Class code of a device type.
    pub(super) fn class(&self, virtio_device_id: u16) -> u32 {
        let own = self.classes.iter().find(|(device, _)| *device == virtio_device_id);
        own.map_or(self.other_class, |(_, class)| *class)
    }

    pub(super) fn lacks_device_config(&self, virtio_device_id: u16) -> bool {
        self.without_device_config.contains(&virtio_device_id)
    }

    /// Whether the structures fit into the BAR, follow one another, and have room for all queues; to be asserted where
    /// the rules of a platform are written.
    pub const fn are_sound(&self) -> bool {
        let order =
            [self.common, self.isr, self.device, self.notify, self.msix_table, self.msix_pba];
        let mut at = 1;
        while at < order.len() {
            if order[at - 1].end() > order[at].offset as u64 {
                return false;
            }
            at += 1;
        }
        let vectors = VIRTIO_QUEUES_MAX_COUNT as u64 + 1;
        self.bar_len_bytes.is_power_of_two()
            && self.msix_pba.end() <= self.bar_len_bytes
            && vectors * msix::ENTRY_LEN_BYTES <= self.msix_table.len_bytes as u64
            && vectors.div_ceil(64) * 8 <= self.msix_pba.len_bytes as u64
            && VIRTIO_QUEUES_MAX_COUNT as u64 * NOTIFY_MULTIPLIER as u64
                <= self.notify.len_bytes as u64
    }
}

const fn at(offset: u32, len_bytes: u32) -> BarStructure {
    BarStructure { offset, len_bytes }
}

/// The rules for this program's own guests. No two structures share a page.
pub const GODWIT: VirtioPciRules = VirtioPciRules {
    bar_len_bytes: 0x1_0000,
    common: at(0x0000, 0x40),
    isr: at(0x1000, 0x4),
    device: at(0x2000, 0x1000),
    notify: at(0x3000, 0x1000),
    msix_table: at(0x4000, 0x8000),
    msix_pba: at(0xc000, 0x1000),
    capabilities: &[
        VirtioCapability::MsiX,
        VirtioCapability::Common,
        VirtioCapability::Isr,
        VirtioCapability::Device,
        VirtioCapability::Notify,
        VirtioCapability::Access,
    ],
    without_device_config: &[],
    classes: &[
        (1, 0x02_00_00),  // network: Ethernet
        (2, 0x01_00_00),  // block: storage, SCSI
        (8, 0x01_00_00),  // SCSI host
        (26, 0x01_80_00), // file system: storage, other
        (27, 0x01_80_00), // persistent memory
        (3, 0x07_80_00),  // console: communication, other
        (19, 0x07_80_00), // socket
    ],
    other_class: 0xff_00_00,
    // Memory decoding, bus master, parity response, SERR, INTx disable; PCI Express hardwires the others to zero.
    command_writable: 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 10,
    bus_mastering: BusMastering::Enforced,
};

const _: () = assert!(GODWIT.are_sound());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_that_overlap_or_do_not_fit_are_found() {
        for wrong in [
            VirtioPciRules { isr: at(0x3f, 4), ..GODWIT },
            VirtioPciRules { msix_pba: at(0xc000, 0x4001), ..GODWIT },
            VirtioPciRules { msix_table: at(0x4000, 0x4000), ..GODWIT },
            VirtioPciRules { msix_pba: at(0xc000, 0x80), ..GODWIT },
            VirtioPciRules { notify: at(0x3000, 0x800), ..GODWIT },
            VirtioPciRules { bar_len_bytes: 0x1_8000, ..GODWIT },
        ] {
            assert!(!wrong.are_sound(), "{wrong:x?}");
        }
    }

    #[test]
    fn classes_are_those_of_the_device_type() {
        assert_eq!(
            (GODWIT.class(2), GODWIT.class(1), GODWIT.class(4)),
            (0x01_00_00, 0x02_00_00, 0xff_00_00)
        );
    }
}
