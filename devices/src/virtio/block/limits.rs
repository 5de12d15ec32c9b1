// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a disk accepts of a request that transfers no data, as its platform wants it.
//!
//! Owns the form and this program's own values. Longer ranges than a queue's thread may do at once are done in pieces
//! ([`super::long_transfer`]), so a limit may be any.

/// Limits of discards and writes of zeroes, which drivers read in the device configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLimits {
    /// Maximum number of ranges of a discard.
    pub discard_ranges_max: u32,
    /// Maximum number of sectors of a range to discard.
    pub discard_sectors_max: u32,
    /// Maximum number of ranges of a write of zeroes.
    pub zero_ranges_max: u32,
    /// Maximum number of sectors of a range to write zeroes to.
    pub zero_sectors_max: u32,
}

impl BlockLimits {
    /// For this program's own guests. Discards: 32 times 2 GiB, as no host writes data for it. Zeroes: 64 MiB, which is
    /// written out if the host has no better way.
    pub const GODWIT: Self = Self {
        discard_ranges_max: 32,
        discard_sectors_max: 1 << 22,
        zero_ranges_max: 1,
        zero_sectors_max: 1 << 17,
    };
}

impl Default for BlockLimits {
    fn default() -> Self {
        Self::GODWIT
    }
}
