// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a platform decides about the windows for BARs: where they are and how PCI segments share them; and where memory
//! is that comes later, as the 64-bit window begins after it.
//!
//! Owns the form of these rules and what follows from them for a machine's memory and address bits. Must never know a
//! platform by its name.

use crate::layout::{self, GpaRange, HighHole};

/// How segments share a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareRule {
    /// By [`layout::shares`], which suits large BARs.
    Nearest,
    /// In whole units, a page in the 32-bit window and 4 GiB in the other; the last segment has the rest too.
    Units,
}

/// The rules of a platform for the windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowRules {
    /// What the start of the 64-bit window is a multiple of, a power of two; it is the end of memory otherwise.
    pub start_align_bytes: u64,
    /// Bytes at the end of the guest's addresses that do not belong to the 64-bit window.
    pub end_bytes: u64,
    /// How segments share the windows.
    pub shares: ShareRule,
    /// What the start of memory that is added later is a multiple of, a power of two.
    pub later_memory_align_bytes: u64,
}

/// The rules for this program's own guests.
pub const GODWIT_WINDOWS: WindowRules = WindowRules {
    start_align_bytes: 1 << 30,
    end_bytes: 0x1_0000,
    shares: ShareRule::Nearest,
    later_memory_align_bytes: 2 << 30,
};

/// Unit of shares of the 32-bit window.
const LOW_UNIT_BYTES: u64 = layout::PAGE_BYTES;
/// Unit of shares of the 64-bit window.
const HIGH_UNIT_BYTES: u64 = 4 << 30;

impl WindowRules {
    /// The 64-bit window: from after `ram_end_gpa` (all memory that may be added later included) to the end of what
    /// `phys_bits` can address, but for what is kept there. `None` when RAM leaves no room.
    ///
    /// With a `hole` it is the larger of the two sides, since one window is simpler for all devices:
    /// peers of a passed-through device could not reach BARs in the hole.
    pub fn high(&self, ram_end_gpa: u64, phys_bits: u8, hole: HighHole) -> Option<GpaRange> {
        let limit_gpa = end_gpa(phys_bits).saturating_sub(self.end_bytes);
        let ram_end_gpa = ram_end_gpa.max(layout::HIGH_RAM_64_GPA);
        let start_gpa = ram_end_gpa.checked_next_multiple_of(self.start_align_bytes)?;
        let whole = GpaRange::between(start_gpa, limit_gpa);
        let window = match hole.range() {
            None => whole,
            Some(hole) => {
                let below = GpaRange::between(start_gpa, limit_gpa.min(hole.gpa));
                let above = GpaRange::between(start_gpa.max(hole.end_gpa()), limit_gpa);
                if above.len_bytes > below.len_bytes { above } else { below }
            }
        };
        (window.len_bytes > 0).then_some(window)
    }

    /// Shares of the 32-bit window by weight; `None` if one would be too short.
    pub fn low_shares(&self, window: GpaRange, weights: &[u32]) -> Option<Vec<GpaRange>> {
        self.shares_of(window, weights, LOW_UNIT_BYTES)
    }

    /// Shares of the 64-bit window by weight; `None` if one would be too short.
    pub fn high_shares(&self, window: GpaRange, weights: &[u32]) -> Option<Vec<GpaRange>> {
        self.shares_of(window, weights, HIGH_UNIT_BYTES)
    }

    fn shares_of(&self, window: GpaRange, weights: &[u32], unit: u64) -> Option<Vec<GpaRange>> {
        match self.shares {
            ShareRule::Nearest => layout::shares(window, weights),
            ShareRule::Units => in_units(window, weights, unit),
        }
    }
}

/// The 64-bit device window of this program's own guests: from the first GiB boundary after `ram_end_gpa` (all memory
/// that may be added later included) to the end of what `phys_bits` can address, but for the last 64 KiB. `None` when RAM
/// leaves no room.
pub fn mmio64_window(ram_end_gpa: u64, phys_bits: u8, hole: HighHole) -> Option<GpaRange> {
    GODWIT_WINDOWS.high(ram_end_gpa, phys_bits, hole)
}

/// First address beyond those of a guest.
pub fn end_gpa(phys_bits: u8) -> u64 {
    1_u64.checked_shl(u32::from(phys_bits)).unwrap_or(u64::MAX)
}

fn in_units(window: GpaRange, weights: &[u32], unit: u64) -> Option<Vec<GpaRange>> {
    let sum: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let share = window.len_bytes.checked_div(unit.checked_mul(sum)?)?.checked_mul(unit)?;
    let mut parts = Vec::new();
    let mut gpa = window.gpa;
    for (number, weight) in weights.iter().enumerate() {
        let is_last = number + 1 == weights.len();
        let end_gpa = if is_last {
            window.end_gpa()
        } else {
            gpa.checked_add(share.checked_mul(u64::from(*weight))?)?
        };
        let part = GpaRange::between(gpa, end_gpa);
        if part.len_bytes < layout::SHARE_MIN_BYTES {
            return None;
        }
        parts.push(part);
        gpa = end_gpa;
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    const UNITS: WindowRules = WindowRules {
        start_align_bytes: 4096,
        end_bytes: 0x11_0000,
        shares: ShareRule::Units,
        later_memory_align_bytes: 128 << 20,
    };

    #[test]
    fn a_window_begins_where_memory_ends() {
        let window = UNITS.high(0x1_4000_5000, 40, HighHole::None).unwrap();
        assert_eq!((window.gpa, window.end_gpa()), (0x1_4000_5000, (1 << 40) - 0x11_0000));
        assert_eq!(UNITS.high(1 << 29, 40, HighHole::None).unwrap().gpa, 4 << 30);
        assert_eq!(UNITS.high(1 << 40, 40, HighHole::None), None);
    }

    #[test]
    fn shares_are_whole_units_and_the_last_has_the_rest() {
        let low = GpaRange::between(layout::MMIO32_GPA, layout::ECAM_GPA);
        let parts = UNITS.low_shares(low, &[1, 2, 4]).unwrap();
        // 163840 pages by 7 are 23405, and 5 are left.
        let bytes: Vec<_> = parts.iter().map(|part| part.len_bytes / 4096).collect();
        assert_eq!(bytes, [23405, 2 * 23405, 4 * 23405 + 5]);
        assert_eq!(parts[1].gpa, layout::MMIO32_GPA + 23405 * 4096);
        let high = UNITS.high(4 << 30, 40, HighHole::None).unwrap();
        let parts = UNITS.high_shares(high, &[1, 1]).unwrap();
        // 254 whole units: 127 each, and the last has what is no whole one.
        assert_eq!(parts[0].len_bytes, 127 * HIGH_UNIT_BYTES);
        assert_eq!(parts[1].end_gpa(), high.end_gpa());
        assert_eq!(UNITS.low_shares(low, &[]), None);
        assert_eq!(UNITS.low_shares(low, &[0, 1]), None);
        assert_eq!(UNITS.high_shares(high, &[1; 300]), None);
    }
}
