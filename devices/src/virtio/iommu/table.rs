// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The mappings of one domain: from addresses that endpoints use to addresses of guest memory.
//!
//! Owns what overlaps, what may be removed, and how a range is translated. It must never access guest memory, nor
//! does it check that a mapping leads there: that is found out by each access.

use std::collections::BTreeMap;

/// An access of an endpoint, as flags of a mapping have it (virtio 1.3, 5.13.6.5).
pub(crate) const READ: u32 = 1;
/// The same for writes.
pub(crate) const WRITE: u32 = 2;

/// What a range of addresses, whose first one is known, leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    /// The last address of the range.
    pub(super) last: u64,
    /// Where the first one leads. The last one has a place as well.
    pub(super) gpa: u64,
    /// `READ` and `WRITE`.
    pub(super) access: u32,
}

/// Why a table was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableError {
    /// A part of the range is mapped already.
    Overlaps,
    /// A mapping would have to be cut.
    Cuts,
    /// The range is empty, or leads beyond the last address.
    Impossible,
}

/// The mappings of a domain, by their first addresses.
#[derive(Debug, Default)]
pub(super) struct Table(BTreeMap<u64, Mapping>);

impl Table {
    /// Number of mappings.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// All mappings with their first addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Mapping)> {
        self.0.iter().map(|(first, mapping)| (*first, *mapping))
    }

    /// Adds a mapping of the addresses from `first`.
    pub(super) fn map(&mut self, first: u64, mapping: Mapping) -> Result<(), TableError> {
        let length_less_one = mapping.last.checked_sub(first).ok_or(TableError::Impossible)?;
        mapping.gpa.checked_add(length_less_one).ok_or(TableError::Impossible)?;
        if self.overlapping(first, mapping.last).next().is_some() {
            return Err(TableError::Overlaps);
        }
        self.0.insert(first, mapping);
        Ok(())
    }

    /// Removes all mappings of a range; returns how many there were. None is cut.
    pub(super) fn unmap(&mut self, first: u64, last: u64) -> Result<usize, TableError> {
        if first > last {
            return Err(TableError::Impossible);
        }
        let is_cut = |(at, mapping): &(u64, Mapping)| *at < first || mapping.last > last;
        if self.overlapping(first, last).any(|entry| is_cut(&entry)) {
            return Err(TableError::Cuts);
        }
        let gone: Vec<u64> = self.overlapping(first, last).map(|(at, _)| at).collect();
        for at in &gone {
            self.0.remove(at);
        }
        Ok(gone.len())
    }

    /// The mapping that has an address, with its first address.
    pub(super) fn find(&self, iova: u64) -> Option<(u64, Mapping)> {
        let (first, mapping) = self.0.range(..=iova).next_back()?;
        (mapping.last >= iova).then_some((*first, *mapping))
    }

    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = (u64, Mapping)> {
        // Mappings do not overlap each other: of those that begin before, only the last one may reach into the range.
        let before = self.0.range(..first).next_back().filter(move |(_, it)| it.last >= first);
        let within = if first <= last { Some(self.0.range(first..=last)) } else { None };
        before.into_iter().chain(within.into_iter().flatten()).map(|(at, it)| (*at, *it))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;

    use super::*;

    fn mapping(last: u64, gpa: u64) -> Mapping {
        Mapping { last, gpa, access: READ }
    }

    #[test]
    fn the_ends_of_the_address_space_can_be_mapped() {
        let mut table = Table::default();
        table.map(0, mapping(0xfff, 0)).unwrap();
        table.map(!0xfff, mapping(u64::MAX, 0x1000)).unwrap();
        assert_eq!(table.find(u64::MAX), Some((!0xfff, mapping(u64::MAX, 0x1000))));
        assert_eq!(table.find(0x1000), None);
        assert_eq!(table.map(0x1000, mapping(0x1fff, !0xffe)), Err(TableError::Impossible));
        assert_eq!(table.map(0x2000, mapping(0x1fff, 0)), Err(TableError::Impossible));
        assert_eq!(table.unmap(1, 0), Err(TableError::Impossible));
        assert_eq!(table.unmap(0, u64::MAX), Ok(2));
        table.map(0, mapping(u64::MAX, 0)).unwrap();
        assert_eq!(table.map(7, mapping(7, 0)), Err(TableError::Overlaps));
        assert_eq!((table.unmap(0, 7), table.len()), (Err(TableError::Cuts), 1));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Map(u8, u8, u8),
        Unmap(u8, u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (any::<u8>(), 0_u8..20, any::<u8>()).prop_map(|(at, more, gpa)| Step::Map(
                at,
                at.saturating_add(more),
                gpa
            )),
            (any::<u8>(), 0_u8..60).prop_map(|(at, more)| Step::Unmap(at, at.saturating_add(more))),
        ]
    }

    proptest! {
        /// Against a model with an entry for each address: which mapping it is of, and where it leads.
        #[test]
        fn the_table_is_as_its_model(steps in prop::collection::vec(step(), 0..80)) {
            let mut table = Table::default();
            let mut model: Vec<Option<(u8, u8, u64)>> = vec![None; 256];
            for step in steps {
                match step {
                    Step::Map(first, last, gpa) => {
                        let range = usize::from(first)..=usize::from(last);
                        let is_free = model[range].iter().all(Option::is_none);
                        let done = table.map(first.into(), mapping(last.into(), gpa.into()));
                        prop_assert_eq!(done, if is_free { Ok(()) } else { Err(TableError::Overlaps) });
                        if is_free {
                            for at in first..=last {
                                let leads = u64::from(gpa) + u64::from(at - first);
                                model[usize::from(at)] = Some((first, last, leads));
                            }
                        }
                    }
                    Step::Unmap(first, last) => {
                        let range = usize::from(first)..=usize::from(last);
                        let inside: Vec<_> = model[range.clone()].iter().flatten().copied().collect();
                        let is_cut = inside.iter().any(|(from, to, _)| *from < first || *to > last);
                        let count = inside.iter().map(|(from, ..)| *from).collect::<std::collections::BTreeSet<_>>().len();
                        let done = table.unmap(first.into(), last.into());
                        prop_assert_eq!(done, if is_cut { Err(TableError::Cuts) } else { Ok(count) });
                        if !is_cut {
                            model[range].fill(None);
                        }
                    }
                }
            }
            for (at, expected) in (0_u64..).zip(&model) {
                let leads = table.find(at).map(|(first, found)| found.gpa + (at - first));
                prop_assert_eq!(leads, expected.map(|(_, _, leads)| leads));
            }
        }
    }
}
