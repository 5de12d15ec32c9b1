// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reading the capability lists of a function's configuration space.
//!
//! Owns the walk. The bytes come from hardware and firmware: a list may end anywhere, point anywhere
//! and run in circles.

use std::collections::BTreeSet;

use pci::register;

/// Null: a place without meaning, whose next pointer is valid.
pub const NONE: u8 = 0x00;
/// Power management (PCI Bus Power Management 1.2, 3.2).
pub const POWER_MANAGEMENT: u8 = 0x01;
/// Vital product data (PCI 3.0, appendix I).
pub const VITAL_PRODUCT_DATA: u8 = 0x03;
/// Vendor-specific; its length follows the header (PCI 3.0, appendix H).
pub const VENDOR_SPECIFIC: u8 = 0x09;
/// MSI (PCI 3.0, 6.8.1).
pub const MSI: u8 = 0x05;
/// MSI-X (PCI 3.0, 6.8.2).
pub const MSIX: u8 = 0x11;

/// PCI Express (PCI Express 4.0, 7.5.3).
pub const EXPRESS: u8 = 0x10;

/// Extended capabilities hidden from a guest, as they concern more than this function: SR-IOV, ARI, and
/// resizable BARs, whose size is up to the host.
pub const HIDDEN_EXTENDED: [u16; 4] = [0x0010, 0x000e, 0x0015, 0x0024];

const STATUS_CAPABILITIES: u8 = 1 << 4;
const FIRST_OFFSET: u16 = 0x40;
const CONVENTIONAL_END: u16 = 0x100;

/// An 8-bit register; `None` beyond the end.
pub fn byte(config: &[u8], offset: u16) -> Option<u8> {
    config.get(usize::from(offset)).copied()
}

/// A 16-bit register; `None` beyond the end.
pub fn word(config: &[u8], offset: u16) -> Option<u16> {
    Some(u16::from_le_bytes([byte(config, offset)?, byte(config, offset.checked_add(1)?)?]))
}

/// A 32-bit register; `None` beyond the end.
pub fn double_word(config: &[u8], offset: u16) -> Option<u32> {
    let low = word(config, offset)?;
    let high = word(config, offset.checked_add(2)?)?;
    Some(u32::from(high) << 16 | u32::from(low))
}

/// Offsets and ids of the conventional capabilities.
pub fn conventional(config: &[u8]) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    let has_list =
        byte(config, register::STATUS).is_some_and(|bits| bits & STATUS_CAPABILITIES != 0);
    let pointer = |at| byte(config, at).map(|offset| u16::from(offset & !3));
    let mut next = pointer(register::CAPABILITIES).filter(|_| has_list);
    let mut seen = BTreeSet::new();
    while let Some(offset) = next.filter(|at| (FIRST_OFFSET..CONVENTIONAL_END).contains(at))
        && seen.insert(offset)
    {
        let Some(id) = byte(config, offset) else { break };
        found.push((offset, id.into()));
        next = pointer(offset + 1);
    }
    found
}

/// Offset of the first capability with this id.
pub fn find(config: &[u8], id: u8) -> Option<u16> {
    let all = conventional(config);
    all.into_iter().find_map(|(offset, found)| (found == u16::from(id)).then_some(offset))
}

/// Offsets and ids of all extended capabilities.
pub fn extended(config: &[u8]) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    let mut offset = CONVENTIONAL_END;
    let mut seen = BTreeSet::new();
    while offset >= CONVENTIONAL_END && seen.insert(offset) {
        let Some(header) =
            double_word(config, offset).filter(|header| !matches!(header, 0 | 0xffff_ffff))
        else {
            break;
        };
        let [id_low, id_high, ..] = header.to_le_bytes();
        found.push((offset, u16::from_le_bytes([id_low, id_high])));
        offset = u16::try_from(header >> 20).unwrap_or(0) & !3;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_walked_and_circles_end() {
        let mut config = vec![0_u8; 4096];
        config[0x34] = 0x50;
        assert_eq!(find(&config, MSI), None, "no list without the status bit");
        config[6] = 0x10;
        config[0x50..0x52].copy_from_slice(&[0x01, 0x60]);
        config[0x60..0x62].copy_from_slice(&[MSI, 0x50]);
        assert_eq!(find(&config, MSI), Some(0x60));
        assert_eq!(find(&config, MSIX), None);
        config[0x100..0x104].copy_from_slice(&0x1401_0001_u32.to_le_bytes());
        config[0x140..0x144].copy_from_slice(&0x1001_0010_u32.to_le_bytes());
        assert_eq!(extended(&config), [(0x100, 1), (0x140, 0x10)]);
        assert_eq!(extended(&config[..256]), []);
    }
}
