// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ranges of the window for 64-bit BARs that something else than a BAR is mapped in.
//!
//! Owns their record. A BAR that the guest lays over one is not mapped, as over another BAR. Must never map anything.

use vm_allocator::{AllocPolicy, RangeInclusive};

use super::{BarPlacement, Claim, MmioRange, PlacementError, WINDOW_ABOVE_4G};

/// What every address of a memory slot is a multiple of.
const PAGE_BYTES: u64 = 4096;

/// A range of the window for 64-bit BARs that is to be kept free of BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeWish {
    /// Its first address; any free one if `None`.
    pub start_gpa: Option<u64>,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// What an address that is chosen is a multiple of, a power of two.
    pub align_bytes: u64,
}

impl BarPlacement {
    /// Keeps a range of the window for 64-bit BARs free of BARs, for something else that is mapped there.
    ///
    /// # Errors
    /// There is no such range, or a BAR or another reservation has a part of it.
    pub fn reserve(&mut self, wish: RangeWish) -> Result<MmioRange, PlacementError> {
        let RangeWish { start_gpa: at, len_bytes, align_bytes } = wish;
        let window = WINDOW_ABOVE_4G;
        let policy = at.map_or_else(|| self.rules.policy_64(), AllocPolicy::ExactMatch);
        let is_free = self.is_free(window, at, len_bytes);
        let taken = PlacementError::RangeTaken { at: at.unwrap_or(0), len_bytes };
        let Some(allocator) = self.windows.get_mut(window).filter(|_| is_free) else {
            return Err(taken);
        };
        // An address that is asked for was aligned where it was chosen.
        let align_bytes = if at.is_some() { PAGE_BYTES } else { align_bytes };
        let (start_gpa, last_gpa) = (allocator.base(), allocator.end());
        let no_range =
            |source| PlacementError::NoRange { at, len_bytes, start_gpa, last_gpa, source };
        let range = allocator.allocate(len_bytes, align_bytes, policy).map_err(no_range)?;
        self.reserved.push(Claim { window, range });
        Ok(MmioRange { start_gpa: range.start(), len_bytes })
    }

    /// Whether nothing has a part of a range; the allocator returns an exact range even inside one that is taken.
    fn is_free(&self, window: usize, at: Option<u64>, len_bytes: u64) -> bool {
        let Some(start) = at else { return true };
        let last = len_bytes.checked_sub(1).and_then(|rest| start.checked_add(rest));
        let Some(range) = last.and_then(|last| RangeInclusive::new(start, last).ok()) else {
            return false;
        };
        let wanted = Claim { window, range };
        let bars = self.bars.iter().filter_map(|bar| bar.claim);
        let mut taken = bars.chain(self.reserved.iter().copied());
        !taken.any(|claim| claim.overlaps(&wanted))
    }

    /// Gives a reserved range back to BARs.
    pub fn release(&mut self, range: MmioRange) {
        let is_meant = |claim: &Claim| claim.range.start() == range.start_gpa;
        if let Some(at) = self.reserved.iter().position(is_meant) {
            let claim = self.reserved.swap_remove(at);
            self.free(claim);
            self.resolve_claims();
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::sync::Arc;

    use super::*;
    use crate::bar_placement::{GODWIT_BARS, MmioWindows};
    use crate::fakes::FakeMapper;

    const LOW: MmioRange = MmioRange { start_gpa: 0xc000_0000, len_bytes: 0x10_0000 };
    const HIGH: MmioRange = MmioRange { start_gpa: 0x40_0000_1000, len_bytes: 0x100_0000 };
    const ALIGN: u64 = 2 << 20;

    fn placement() -> BarPlacement {
        let windows = MmioWindows { below_4g: LOW, above_4g: HIGH };
        let mapper = Arc::new(FakeMapper::new(vec![LOW, HIGH]));
        BarPlacement::new(windows, GODWIT_BARS, mapper, None).unwrap()
    }

    fn any(len_bytes: u64) -> RangeWish {
        RangeWish { start_gpa: None, len_bytes, align_bytes: ALIGN }
    }

    fn at(start_gpa: u64, len_bytes: u64) -> RangeWish {
        RangeWish { start_gpa: Some(start_gpa), ..any(len_bytes) }
    }

    #[test]
    fn ranges_are_aligned_and_apart_and_can_be_given_back() {
        let mut placement = placement();
        // Not a power of two.
        let first = placement.reserve(any(3 * ALIGN)).unwrap();
        assert_eq!((first.start_gpa, first.len_bytes), (0x40_0020_0000, 3 * ALIGN));
        let second = placement.reserve(any(ALIGN)).unwrap();
        assert_eq!(second.start_gpa, first.start_gpa + first.len_bytes);
        let refused = placement.reserve(any(4 * ALIGN)).unwrap_err();
        assert!(matches!(refused, PlacementError::NoRange { at: None, .. }), "{refused}");
        placement.release(first);
        placement.release(first);
        assert_eq!(placement.reserve(any(2 * ALIGN)).unwrap().start_gpa, first.start_gpa);
    }

    #[test]
    fn an_address_that_is_asked_for_is_given_or_refused() {
        let mut placement = placement();
        let start = HIGH.start_gpa + 0xf000 + ALIGN;
        let range = placement.reserve(at(start, ALIGN)).unwrap();
        assert_eq!(range, MmioRange { start_gpa: start, len_bytes: ALIGN });
        for (start, len) in [(start, ALIGN), (start - ALIGN, 2 * ALIGN), (start + 4096, 4096)] {
            let refused = placement.reserve(at(start, len)).unwrap_err();
            assert!(matches!(refused, PlacementError::RangeTaken { .. }), "{refused}");
        }
        let end = HIGH.start_gpa + HIGH.len_bytes;
        for start in [0, LOW.start_gpa, HIGH.start_gpa - ALIGN, end - 4096, end, !0xfff, u64::MAX] {
            placement.reserve(at(start, ALIGN)).unwrap_err();
        }
        for len in [0, u64::MAX] {
            placement.reserve(at(HIGH.start_gpa, len)).unwrap_err();
            placement.reserve(any(len)).unwrap_err();
        }
        placement.reserve(at(end - ALIGN, ALIGN)).unwrap();
    }
}
