// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Base address registers of a function: which there are, and what they decode at present.
//!
//! Owns the descriptions that devices, configuration space and placement share. It must never decide where a BAR is
//! placed or mapped: see `bar_placement`.

/// Type of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit memory address, one register.
    Memory32,
    /// 64-bit memory address, two registers.
    Memory64,
    /// I/O ports, one register.
    Ports,
    /// The expansion ROM: a 32-bit memory address with an enable bit of its own, in a register apart from the
    /// others.
    Rom,
}

/// Index of the expansion ROM, as VFIO and Linux count: after all other BARs.
pub const ROM_INDEX: u8 = 6;

impl BarKind {
    /// Number of registers.
    pub fn registers_count(self) -> u8 {
        match self {
            Self::Memory32 | Self::Ports | Self::Rom => 1,
            Self::Memory64 => 2,
        }
    }
}

/// One BAR of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarDescription {
    /// Index of its (first) register, 0 to 5; [`ROM_INDEX`] for the expansion ROM.
    pub index: u8,
    /// Type of the BAR.
    pub kind: BarKind,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
    /// Length in bytes, a power of two.
    pub len_bytes: u64,
}

/// The BAR registers and decode bits of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarDecode {
    /// Whether memory decoding is enabled.
    pub enabled: bool,
    /// Whether I/O decoding is enabled.
    pub ports_enabled: bool,
    /// The expansion ROM's own enable bit; it decodes memory if both are set.
    pub rom_enabled: bool,
    /// Index and address of each BAR.
    pub gpas: Vec<(u8, u64)>,
}
