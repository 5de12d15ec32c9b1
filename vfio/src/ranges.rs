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

/// Removes the pieces that begin in `range` and of which `goes` is true.
pub(super) fn remove_in<K: Ord + Copy, V>(
    pieces: &mut BTreeMap<K, V>,
    range: &Range<K>,
    goes: impl Fn(&K, &V) -> bool,
) {
    if range.is_empty() {
        return;
    }
    let going = pieces.range(range.start..range.end).filter(|(start, len)| goes(start, len));
    for start in going.map(|(start, _)| *start).collect::<Vec<_>>() {
        pieces.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp::Ordering;

    use super::*;

    thread_local! {
        /// Comparisons of addresses so far.
        static COMPARED: Cell<u64> = const { Cell::new(0) };
    }

    /// An address that counts comparisons.
    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Counted(u64);

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    #[test]
    fn a_piece_is_removed_without_a_look_at_the_others() {
        let mut pieces: BTreeMap<_, _> = (0..1 << 16).map(|at| (Counted(at * 2), 2)).collect();
        COMPARED.set(0);
        remove_in(&mut pieces, &(Counted(1000)..Counted(1004)), |start, _| start.0 != 1002);
        assert!(COMPARED.get() < 1000, "{} comparisons", COMPARED.get());
        assert_eq!(pieces.len(), (1 << 16) - 1);
        assert!(!pieces.contains_key(&Counted(1000)) && pieces.contains_key(&Counted(1002)));
        remove_in(&mut pieces, &(Counted(9)..Counted(7)), |_, _| true);
        assert_eq!(pieces.len(), (1 << 16) - 1, "an invalid range");
    }

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
