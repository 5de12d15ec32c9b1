// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The target of a balloon while hot-plugged memory is still to be plugged in.
//!
//! Owns the rule for it. A guest boots with its boot memory only, also if memory devices are to give it
//! more, and if it had more before a reboot. A balloon of the full size would take away memory that it
//! boots with. So memory that is still to be plugged in counts as if it were in the balloon: the guest never
//! has more memory than in the end, and, if the balloon is no larger than the memory still to come, never
//! less than it boots with.

use super::PAGE_BYTES;

/// A balloon target that is reduced until the guest has all of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StagedTarget {
    /// Final size in pages.
    wanted_pages: u32,
    /// Memory of the guest then in bytes, including the balloon.
    full_bytes: u64,
}

impl StagedTarget {
    /// A target of `wanted_pages`, at most `full_bytes`, for when the guest has `full_bytes`.
    pub(super) fn new(wanted_pages: u32, full_bytes: u64) -> Self {
        let full_pages = u32::try_from(full_bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        Self { wanted_pages: wanted_pages.min(full_pages), full_bytes }
    }

    /// The target in pages while the guest has `usable_bytes`.
    pub(super) fn pages_at(self, usable_bytes: u64) -> u32 {
        let missing_pages = self.full_bytes.saturating_sub(usable_bytes).div_ceil(PAGE_BYTES);
        self.wanted_pages.saturating_sub(u32::try_from(missing_pages).unwrap_or(u32::MAX))
    }

    /// Whether the final target has been reached.
    pub(super) fn is_over(self, target_pages: u32) -> bool {
        target_pages >= self.wanted_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const GIB_PAGES: u32 = 1 << 18;

    #[test]
    fn what_is_still_to_come_counts_as_if_it_were_in_the_balloon() {
        // 1 GiB at boot, 8 GiB to be plugged, 4 GiB in the balloon: 5 GiB remain.
        let staged = StagedTarget::new(4 * GIB_PAGES, 9 * GIB);
        let expected = [(1, 0), (4, 0), (5, 0), (6, 1), (8, 3), (9, 4), (12, 4)];
        for (usable, target) in expected {
            assert_eq!(staged.pages_at(usable * GIB), target * GIB_PAGES, "{usable} GiB");
            assert_eq!(staged.is_over(target * GIB_PAGES), target == 4);
        }
    }

    #[test]
    fn a_guest_that_is_to_get_nothing_more_has_the_whole_balloon_at_once() {
        let staged = StagedTarget::new(GIB_PAGES, 4 * GIB);
        assert_eq!(staged.pages_at(4 * GIB), GIB_PAGES);
        // Limited to all of memory.
        let staged = StagedTarget::new(u32::MAX, 4 * GIB);
        assert_eq!((staged.pages_at(4 * GIB), staged.pages_at(0)), (4 * GIB_PAGES, 0));
    }
}
