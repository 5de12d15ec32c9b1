// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a platform decides about addresses of BARs that the VMM chooses.
//!
//! Owns the form of these rules. What a guest writes into a register is not their matter. Must never know a platform
//! by its name.

use vm_allocator::AllocPolicy;

use crate::bar::{BarDescription, BarKind};

/// The end from which a window is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilledFrom {
    /// Its lowest address.
    Start,
    /// Its highest address.
    End,
}

/// The rules of a platform for addresses of BARs. The window for 32-bit BARs is filled from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarRules {
    /// The end from which the window for 64-bit BARs is filled, and that of reserved ranges in it.
    pub wide_window: FilledFrom,
    /// What the address of a 64-bit BAR is a multiple of at least, a power of two; its length if that is more.
    pub wide_align_bytes: u64,
}

/// The rules for this program's own guests.
pub const GODWIT_BARS: BarRules = BarRules { wide_window: FilledFrom::Start, wide_align_bytes: 1 };

impl BarRules {
    /// How the window for 64-bit BARs is filled.
    pub(super) fn policy_64(self) -> AllocPolicy {
        match self.wide_window {
            FilledFrom::Start => AllocPolicy::FirstMatch,
            FilledFrom::End => AllocPolicy::LastMatch,
        }
    }

    /// What the chosen address of a BAR is a multiple of.
    pub(super) fn align_bytes(self, bar: &BarDescription) -> u64 {
        match bar.kind {
            BarKind::Memory64 => bar.len_bytes.max(self.wide_align_bytes),
            BarKind::Memory32 | BarKind::Ports | BarKind::Rom => bar.len_bytes,
        }
    }
}
