// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Range look-ups in records of DMA mappings: ordered maps from the first address of each disjoint piece to its length.
//!
//! Owns that a look-up costs what the asked range holds, never what the whole VM has mapped: with 4 TiB of
//! memory there may be two million pieces, of which the balloon concerns one at a time.

use std::collections::BTreeMap;
use std::ops::Range;

/// The pieces that overlap `range`, in order.
pub(super) fn overlapping(
    pieces: &BTreeMap<u64, u64>,
    range: &Range<u64>,
) -> impl Iterator<Item = (u64, u64)> {
    let before = pieces.range(..range.start).next_back();
    let first = before.filter(|(start, len)| start.saturating_add(**len) > range.start);
    let others = pieces.range(range.start..range.end.max(range.start));
    first.into_iter().chain(others).map(|(start, len)| (*start, *len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_that_begins_before_the_range_overlaps_it() {
        let pieces = BTreeMap::from([(0, 4), (4, 4), (12, 4)]);
        let found = |range: Range<u64>| overlapping(&pieces, &range).collect::<Vec<_>>();
        assert_eq!(found(3..5), [(0, 4), (4, 4)]);
        assert_eq!(found(8..12), []);
        assert_eq!(found(7..13), [(4, 4), (12, 4)]);
        assert_eq!(found(5..5), [(4, 4)]);
        assert_eq!(found(Range { start: 9, end: 3 }), []);
    }
}
