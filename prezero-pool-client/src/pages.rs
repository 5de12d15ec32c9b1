// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pages that a VMM asks for and that a pool gives, and where: as values and on the wire.
//!
//! Owns which of a pool's pages a zone can live on. Must never know how a pool makes them.

use crate::frame::ProtocolError;

/// A NUMA node that does not matter, on the wire.
pub(crate) const ANY_NODE: u32 = u32::MAX;

/// The pages that a zone wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagesWanted {
    /// 4 KiB pages, or huge ones that the kernel may split.
    Small,
    /// The same the other way round.
    Transparent,
    /// Pages of 2 MiB, nothing else.
    Huge2Mib,
    /// Pages of 1 GiB, nothing else.
    Huge1Gib,
}

/// The pages that a slot of the pool consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotPages {
    /// 4 KiB.
    Small,
    /// Transparent huge pages.
    Transparent,
    /// hugetlb pages of 2 MiB.
    Huge2Mib,
    /// hugetlb pages of 1 GiB.
    Huge1Gib,
}

impl PagesWanted {
    pub(crate) const ALL: [Self; 4] =
        [Self::Small, Self::Transparent, Self::Huge2Mib, Self::Huge1Gib];
}

impl SlotPages {
    pub(crate) const ALL: [Self; 4] =
        [Self::Small, Self::Transparent, Self::Huge2Mib, Self::Huge1Gib];

    /// Whether a zone that wants `pages` can live on these.
    pub fn suits(self, pages: PagesWanted) -> bool {
        match pages {
            PagesWanted::Small | PagesWanted::Transparent => {
                matches!(self, Self::Small | Self::Transparent)
            }
            PagesWanted::Huge2Mib => self == Self::Huge2Mib,
            PagesWanted::Huge1Gib => self == Self::Huge1Gib,
        }
    }

    /// Whether it is what the zone likes best.
    pub fn is_preferred(self, pages: PagesWanted) -> bool {
        self as u8 == pages as u8
    }

    /// The name that configuration and statistics use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "4K",
            Self::Transparent => "thp",
            Self::Huge2Mib => "2M",
            Self::Huge1Gib => "1G",
        }
    }
}

/// The pages that a code on the wire means.
pub(crate) fn known<T: Copy>(all: &[T], kind: u16, code: u8) -> Result<T, ProtocolError> {
    let value = u64::from(code);
    let found = all.get(usize::from(code)).copied();
    found.ok_or(ProtocolError::Value { kind, what: "page kind", value })
}
