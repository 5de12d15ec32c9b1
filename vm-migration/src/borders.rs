// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where a peer's mappings of guest memory meet.
//!
//! Owns the cut of a range of memory at these addresses, for a peer that takes a range only within one of its mappings. What
//! is one region here may be several mappings there.

use crate::layout::GpaRange;

/// The addresses at which a mapping begins or ends, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Borders(Vec<u64>);

impl Borders {
    /// The borders of these mappings.
    pub fn of(mappings: impl IntoIterator<Item = GpaRange>) -> Self {
        let ends = |it: GpaRange| [it.gpa, it.gpa.saturating_add(it.len_bytes)];
        let mut borders: Vec<u64> = mappings.into_iter().flat_map(ends).collect();
        borders.sort_unstable();
        borders.dedup();
        Self(borders)
    }

    /// The parts of a range, in order, none of which has a border inside.
    pub fn cut(&self, range: GpaRange) -> impl Iterator<Item = GpaRange> + '_ {
        let end = range.gpa.saturating_add(range.len_bytes);
        let first = self.0.partition_point(|border| *border <= range.gpa);
        let inside = self.0.iter().skip(first).copied().take_while(move |border| *border < end);
        let mut from = range.gpa;
        inside.chain(std::iter::once(end)).map(move |to| {
            let part = GpaRange { gpa: from, len_bytes: to.saturating_sub(from) };
            from = to;
            part
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(gpa: u64, len_bytes: u64) -> GpaRange {
        GpaRange { gpa, len_bytes }
    }

    #[test]
    fn a_range_is_cut_at_each_border_inside() {
        let borders = Borders::of([range(0x8000, 0x2000), range(0x2000, 0x6000), range(0, 0x1000)]);
        let cut = |gpa, len_bytes| borders.cut(range(gpa, len_bytes)).collect::<Vec<_>>();
        assert_eq!(cut(0x2000, 0x8000), [range(0x2000, 0x6000), range(0x8000, 0x2000)]);
        assert_eq!(
            cut(0x7000, 0x4000),
            [range(0x7000, 0x1000), range(0x8000, 0x2000), range(0xa000, 0x1000)]
        );
        // None is inside.
        for whole in [range(0x2000, 0x6000), range(0x3000, 0x1000), range(0x8000, 0x1000)] {
            assert_eq!(cut(whole.gpa, whole.len_bytes), [whole]);
        }
    }
}
