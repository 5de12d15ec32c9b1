// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Layout of the BAR, and the capabilities that describe it (virtio 1.3, 4.1.4).
//!
//! The layout is that of the platform ([`VirtioPciRules`]), and the same for every device of a machine, whatever its
//! number of queues, so that saved states stay exchangeable.

use super::rules::{BarStructure, VirtioCapability, VirtioPciRules};
use crate::bar::{BarDescription, BarKind};
use crate::config_space::{ConfigError, ConfigSpace, ConfigSpaceState};
use crate::msix::{self, Msix};

/// Index of the transport's BAR.
pub const BAR_INDEX: u8 = 0;
/// Width of the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarWidth {
    /// Below 4 GiB if there is space: for a device that a guest drives before it has page tables for more,
    /// as firmware does with disks.
    Bits32,
    /// Above 4 GiB.
    Bits64,
}

impl BarWidth {
    fn kind(self) -> BarKind {
        match self {
            Self::Bits32 => BarKind::Memory32,
            Self::Bits64 => BarKind::Memory64,
        }
    }

    /// Width in a saved configuration space; 64 bits if it is not one of a virtio device.
    pub fn of(state: &ConfigSpaceState) -> Self {
        match state.bar_width(BAR_INDEX) {
            Some(BarKind::Memory32) => Self::Bits32,
            _ => Self::Bits64,
        }
    }

    /// Sets the width of the BAR.
    ///
    /// # Errors
    /// There is no such BAR.
    pub fn apply(self, config: &mut ConfigSpace) -> Result<(), ConfigError> {
        config.set_bar_width(BAR_INDEX, self.kind())
    }
}

/// Maximum number of queues of a device, limited by the page of notification addresses.
pub const VIRTIO_QUEUES_MAX_COUNT: u16 = 1024;
/// Distance in bytes between the notification addresses of adjacent queues.
pub const NOTIFY_MULTIPLIER: u32 = 4;

const VENDOR_CAPABILITY_ID: u8 = 0x09;
/// Length of `virtio_pci_cap`, and of the two variants with another word.
const CAPABILITY_LEN_BYTES: u8 = 16;
const CAPABILITY_LONG_LEN_BYTES: u8 = 20;

const CFG_TYPE_COMMON: u8 = 1;
const CFG_TYPE_NOTIFY: u8 = 2;
const CFG_TYPE_ISR: u8 = 3;
const CFG_TYPE_DEVICE: u8 = 4;
const CFG_TYPE_PCI: u8 = 5;

/// Target of an access to the BAR, with the offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Common configuration.
    Common(u64),
    /// ISR status.
    Isr(u64),
    /// Device configuration.
    Device(u64),
    /// Notifications.
    Notify(u64),
    /// MSI-X table.
    MsixTable(u64),
    /// MSI-X pending bits.
    MsixPba(u64),
    /// Unused.
    Hole,
}

impl Region {
    /// The target of an offset in the BAR.
    pub fn at(bar_offset: u64, rules: &VirtioPciRules) -> Self {
        let within = |structure: BarStructure| structure.offset_of(bar_offset);
        within(rules.common)
            .map(Self::Common)
            .or_else(|| within(rules.isr).map(Self::Isr))
            .or_else(|| within(rules.device).map(Self::Device))
            .or_else(|| within(rules.notify).map(Self::Notify))
            .or_else(|| within(rules.msix_table).map(Self::MsixTable))
            .or_else(|| within(rules.msix_pba).map(Self::MsixPba))
            .unwrap_or(Self::Hole)
    }
}

/// Offsets of the capabilities that the transport handles.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// MSI-X.
    msix: u16,
    /// The PCI configuration access capability.
    window: u16,
    bar_len_bytes: u64,
}

/// An access to the BAR through the PCI configuration access capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowAccess {
    /// Offset in the BAR.
    pub bar_offset: u64,
    /// Length: 1, 2 or 4.
    pub len_bytes: usize,
}

impl Capabilities {
    /// Adds the BAR and the capabilities of a device of this type.
    pub fn add(
        config: &mut ConfigSpace,
        msix: &Msix,
        width: BarWidth,
        rules: &VirtioPciRules,
        virtio_device_id: u16,
    ) -> Result<Self, ConfigError> {
        let bar_len_bytes = rules.bar_len_bytes;
        config.add_bar(BarDescription {
            index: BAR_INDEX,
            kind: width.kind(),
            prefetchable: false,
            len_bytes: bar_len_bytes,
        })?;
        let mut added = Self { msix: 0, window: 0, bar_len_bytes };
        for capability in rules.capabilities {
            let (cfg_type, structure) = match capability {
                VirtioCapability::MsiX => {
                    let (table, pba) = (rules.msix_table.offset, rules.msix_pba.offset);
                    let (body, writable) = msix.capability(BAR_INDEX, table, pba);
                    added.msix = config.add_capability(msix::CAPABILITY_ID, &body, &writable)?;
                    continue;
                }
                VirtioCapability::Device if rules.lacks_device_config(virtio_device_id) => continue,
                VirtioCapability::Access => {
                    added.window = add_window(config)?;
                    continue;
                }
                VirtioCapability::Common => (CFG_TYPE_COMMON, rules.common),
                VirtioCapability::Isr => (CFG_TYPE_ISR, rules.isr),
                VirtioCapability::Device => (CFG_TYPE_DEVICE, rules.device),
                VirtioCapability::Notify => (CFG_TYPE_NOTIFY, rules.notify),
            };
            if *capability == VirtioCapability::Notify {
                let body = capability_body(CAPABILITY_LONG_LEN_BYTES, cfg_type, structure);
                let mut notify = body.to_vec();
                notify.extend_from_slice(&NOTIFY_MULTIPLIER.to_le_bytes());
                config.add_capability(VENDOR_CAPABILITY_ID, &notify, &[])?;
            } else {
                let body = capability_body(CAPABILITY_LEN_BYTES, cfg_type, structure);
                config.add_capability(VENDOR_CAPABILITY_ID, &body, &[])?;
            }
        }
        Ok(added)
    }

    /// The message control register, if a write of `len_bytes` at `offset` may have changed it.
    pub fn written_msix_control(
        self,
        config: &ConfigSpace,
        offset: u16,
        len_bytes: usize,
    ) -> Option<u16> {
        overlaps(offset, len_bytes, self.msix + msix::CONTROL_OFFSET, 2)
            .then(|| self.msix_control(config))
    }

    /// The message control register.
    pub fn msix_control(self, config: &ConfigSpace) -> u16 {
        config.read_u16(self.msix + msix::CONTROL_OFFSET)
    }

    /// The BAR access for a configuration space access, if it touches the data field and the capability
    /// points to a valid location (virtio 1.3, 4.1.4.9).
    pub fn window_access(
        self,
        config: &ConfigSpace,
        offset: u16,
        len_bytes: usize,
    ) -> Option<WindowAccess> {
        if !overlaps(offset, len_bytes, self.window_data_offset(), 4) {
            return None;
        }
        let mut bar = [0];
        config.read(self.window + 4, &mut bar);
        let bar_offset = u64::from(config.read_u32(self.window + 8));
        let len_bytes = usize::try_from(config.read_u32(self.window + 12)).ok()?;
        let aligned = matches!(len_bytes, 1 | 2 | 4) && bar_offset.is_multiple_of(len_bytes as u64);
        (bar == [BAR_INDEX] && aligned && bar_offset < self.bar_len_bytes)
            .then_some(WindowAccess { bar_offset, len_bytes })
    }

    /// Offset of the data field.
    pub fn window_data_offset(self) -> u16 {
        self.window + u16::from(CAPABILITY_LEN_BYTES)
    }
}

/// Adds the PCI configuration access capability; returns its offset.
fn add_window(config: &mut ConfigSpace) -> Result<u16, ConfigError> {
    let nowhere = BarStructure { offset: 0, len_bytes: 0 };
    let mut window = capability_body(CAPABILITY_LONG_LEN_BYTES, CFG_TYPE_PCI, nowhere).to_vec();
    window.extend_from_slice(&[0; 4]);
    // The driver writes BAR, offset and length, and transfers data.
    let mut writable = [0xff; 18];
    writable[..2].fill(0);
    writable[3..6].fill(0);
    config.add_capability(VENDOR_CAPABILITY_ID, &window, &writable)
}

/// `virtio_pci_cap` from its length field on.
fn capability_body(len: u8, cfg_type: u8, structure: BarStructure) -> [u8; 14] {
    let mut body = [0; 14];
    body[..3].copy_from_slice(&[len, cfg_type, BAR_INDEX]);
    body[6..10].copy_from_slice(&structure.offset.to_le_bytes());
    body[10..].copy_from_slice(&structure.len_bytes.to_le_bytes());
    body
}

fn overlaps(offset: u16, len_bytes: usize, first: u16, count: u16) -> bool {
    let (start, first) = (usize::from(offset), usize::from(first));
    start < first + usize::from(count) && start.saturating_add(len_bytes) > first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::rules::GODWIT;

    #[test]
    fn regions_are_found() {
        let at = |offset| Region::at(offset, &GODWIT);
        assert_eq!(at(0x3f), Region::Common(0x3f));
        assert_eq!(at(0x40), Region::Hole);
        assert_eq!(at(0x3ffc), Region::Notify(0xffc));
        assert_eq!(at(0xbfff), Region::MsixTable(0x7fff));
        assert_eq!(at(u64::MAX), Region::Hole);
    }
}
