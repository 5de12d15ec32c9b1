// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Base address registers of a function: which there are, and what they decode at present.
//!
//! Owns the descriptions that devices, configuration space and placement share. It must never decide where a BAR is
//! placed or mapped: see `bar_placement`.

/// What a BAR decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit address, one register.
    Memory32,
    /// 64-bit address, two registers.
    Memory64,
    /// Ports, one register.
    Ports,
}

impl BarKind {
    /// How many registers it takes.
    pub fn registers_count(self) -> u8 {
        match self {
            Self::Memory32 | Self::Ports => 1,
            Self::Memory64 => 2,
        }
    }
}

/// One BAR of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarDescription {
    /// Index of its (first) register, 0 to 5.
    pub index: u8,
    /// What it decodes.
    pub kind: BarKind,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
    /// Size, a power of two.
    pub len_bytes: u64,
}

/// What a function's BAR registers say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarDecode {
    /// Memory decode is on.
    pub enabled: bool,
    /// I/O decode is on.
    pub ports_enabled: bool,
    /// Index and address of each BAR.
    pub gpas: Vec<(u8, u64)>,
}
