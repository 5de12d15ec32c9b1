// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory statistics of the guest (virtio 1.3, 5.5.6.4).
//!
//! Owns the format of a statistics buffer. It comes from a guest: it may contain anything, and
//! nothing here depends on its values.

/// Names by tag; later tags are Linux's.
const NAMES: [&str; 16] = [
    "guest_swap_in_bytes",
    "guest_swap_out_bytes",
    "guest_major_faults",
    "guest_minor_faults",
    "guest_free_bytes",
    "guest_total_bytes",
    "guest_available_bytes",
    "guest_disk_cache_bytes",
    "guest_hugetlb_allocations",
    "guest_hugetlb_failures",
    "guest_oom_kills",
    "guest_allocation_stalls",
    "guest_async_scanned_pages",
    "guest_direct_scanned_pages",
    "guest_async_reclaimed_pages",
    "guest_direct_reclaimed_pages",
];

/// Length of an entry: a 16-bit tag and a 64-bit value.
const ENTRY_BYTES: usize = 10;

/// Maximum bytes of a buffer that are parsed: far more than there are tags, so order and repetition do not
/// matter.
pub(super) const STATISTICS_BYTES_MAX: u64 = 4096;

/// Statistics by tag, as far as the guest provides them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    values: [Option<u64>; NAMES.len()],
    /// Number of updates by the guest.
    updates: u64,
}

impl Statistics {
    /// Parses a buffer; unknown tags are ignored, and the last value of a repeated tag counts.
    pub(super) fn take(&mut self, buffer: &[u8]) {
        self.values = [None; NAMES.len()];
        for entry in buffer.chunks_exact(ENTRY_BYTES) {
            let (tag, value) = entry.split_at(2);
            let tag = tag.try_into().map(u16::from_le_bytes).map(usize::from);
            let value = value.try_into().map(u64::from_le_bytes);
            if let (Ok(tag), Ok(value)) = (tag, value)
                && let Some(known) = self.values.get_mut(tag)
            {
                *known = Some(value);
            }
        }
        self.updates = self.updates.wrapping_add(1);
    }

    /// The statistics by name, and the number of updates. Empty before the first.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        if self.updates == 0 {
            return Vec::new();
        }
        let values = NAMES.into_iter().zip(self.values);
        let mut named: Vec<_> =
            values.filter_map(|(name, value)| value.map(|value| (name, value))).collect();
        named.push(("statistics_updates", self.updates));
        named
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(tag: u16, value: u64) -> Vec<u8> {
        [&tag.to_le_bytes()[..], &value.to_le_bytes()[..]].concat()
    }

    #[test]
    fn tags_come_in_any_order_and_unknown_ones_are_ignored() {
        let mut statistics = Statistics::default();
        assert_eq!(statistics.named(), []);
        let buffer = [entry(5, 1 << 30), entry(999, 1), entry(4, 77), vec![1, 2, 3]].concat();
        statistics.take(&buffer);
        let expected =
            [("guest_free_bytes", 77), ("guest_total_bytes", 1 << 30), ("statistics_updates", 1)];
        assert_eq!(statistics.named(), expected);
        statistics.take(&entry(0, 5));
        assert_eq!(statistics.named(), [("guest_swap_in_bytes", 5), ("statistics_updates", 2)]);
    }

    proptest! {
        #[test]
        fn any_buffer_is_harmless(buffer: Vec<u8>) {
            let mut statistics = Statistics::default();
            statistics.take(&buffer);
            prop_assert!(statistics.named().len() <= NAMES.len() + 1);
        }
    }
}
