// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Dispatch of port and memory accesses to devices.
//!
//! Owns the map from address ranges to devices of one address space (ports or memory). Accesses
//! come from all vCPUs at once and take no lock here: the map is immutable and is replaced
//! when a range is added, removed or moved. A bus never knows what a device does, and a device
//! never learns its address.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use thiserror::Error;

/// A device that handles accesses to an address range.
///
/// Methods take `&self`, as several vCPUs may access a device concurrently; a device that needs it has its
/// own lock, held only for the access. `data` is 1, 2, 4 or 8 bytes long (little endian); any other length,
/// and any offset, must be harmless.
pub trait BusDevice: Send + Sync {
    /// Handles a guest read at `offset` from the start of the range.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Handles a guest write at `offset` from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a range cannot be added, removed or moved.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BusError {
    /// The range is empty or reaches beyond the end of the address space.
    #[error("the range of {name} at {base:#x}, {len_bytes:#x} bytes long, is empty or overflows")]
    BadRange {
        /// Name of the range.
        name: String,
        /// Its first address.
        base: u64,
        /// Its length in bytes.
        len_bytes: u64,
    },
    /// The range overlaps another one.
    #[error(
        "the range of {name} at {base:#x}, {len_bytes:#x} bytes long, overlaps that of {other} at {other_base:#x}"
    )]
    Overlap {
        /// Name of the range.
        name: String,
        /// Its first address.
        base: u64,
        /// Its length in bytes.
        len_bytes: u64,
        /// Name of the existing range.
        other: String,
        /// First address of the existing range.
        other_base: u64,
    },
    /// No range starts at the address.
    #[error("no range begins at {base:#x}")]
    NotFound {
        /// The address.
        base: u64,
    },
}

#[derive(Clone)]
struct Range {
    base: u64,
    /// Last address, inclusive, so that a range may end at the top of the address space.
    last: u64,
    name: Arc<str>,
    device: Arc<dyn BusDevice>,
}

/// The devices of one address space.
#[derive(Default)]
pub struct Bus {
    /// Sorted by base, disjoint.
    ranges: ArcSwap<Vec<Range>>,
    /// Held while a new map is built from the old one; never on the access path.
    change: Mutex<()>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `device` at `base` for `len_bytes` bytes; `name` is used in errors.
    pub fn insert(
        &self,
        name: &str,
        base: u64,
        len_bytes: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        let range = new_range(name, base, len_bytes, device)?;
        self.change(|ranges| place(ranges, range))
    }

    /// Removes the range that starts at `base`.
    ///
    /// An access that has already found the device may still be in progress on return.
    pub fn remove(&self, base: u64) -> Result<Arc<dyn BusDevice>, BusError> {
        self.change(|ranges| take(ranges, base).map(|range| range.device))
    }

    /// Moves the range that starts at `from` to `to` (BAR relocation). On failure it stays where it was.
    pub fn move_range(&self, from: u64, to: u64) -> Result<(), BusError> {
        self.change(|ranges| {
            let old = take(ranges, from)?;
            let last = to.checked_add(old.last - old.base).ok_or_else(|| BusError::BadRange {
                name: old.name.to_string(),
                base: to,
                len_bytes: (old.last - old.base).saturating_add(1),
            })?;
            place(ranges, Range { base: to, last, ..old })
        })
    }

    /// Reads from the device at `address`. All bits read as ones without a device, or if the access crosses
    /// the end of its range. Returns whether a device handled it.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        let ranges = self.ranges.load();
        if let Some((range, offset)) = find(&ranges, address, data.len()) {
            range.device.read(offset, data);
            return true;
        }
        data.fill(0xff);
        false
    }

    /// Writes to the device at `address`. Ignored without a device, or if the access crosses the end of its
    /// range. Returns whether a device handled it.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        let ranges = self.ranges.load();
        if let Some((range, offset)) = find(&ranges, address, data.len()) {
            range.device.write(offset, data);
            return true;
        }
        false
    }

    fn change<T>(
        &self,
        edit: impl FnOnce(&mut Vec<Range>) -> Result<T, BusError>,
    ) -> Result<T, BusError> {
        let _guard = self.change.lock();
        let mut ranges = Vec::clone(&self.ranges.load());
        let outcome = edit(&mut ranges)?;
        self.ranges.store(Arc::new(ranges));
        Ok(outcome)
    }
}

fn new_range(
    name: &str,
    base: u64,
    len_bytes: u64,
    device: Arc<dyn BusDevice>,
) -> Result<Range, BusError> {
    let last = len_bytes.checked_sub(1).and_then(|rest| base.checked_add(rest));
    let last = last.ok_or_else(|| BusError::BadRange { name: name.to_owned(), base, len_bytes })?;
    Ok(Range { base, last, name: name.into(), device })
}

fn find(ranges: &[Range], address: u64, len_bytes: usize) -> Option<(&Range, u64)> {
    let after = ranges.partition_point(|range| range.base <= address);
    let range = ranges.get(after.checked_sub(1)?)?;
    let rest = u64::try_from(len_bytes).ok()?.checked_sub(1)?;
    let last = address.checked_add(rest)?;
    (last <= range.last).then(|| (range, address - range.base))
}

fn place(ranges: &mut Vec<Range>, range: Range) -> Result<(), BusError> {
    let index = ranges.partition_point(|other| other.base < range.base);
    let before = index.checked_sub(1).and_then(|i| ranges.get(i));
    let in_the_way = before
        .filter(|other| other.last >= range.base)
        .or_else(|| ranges.get(index).filter(|other| other.base <= range.last));
    if let Some(other) = in_the_way {
        return Err(BusError::Overlap {
            name: range.name.to_string(),
            base: range.base,
            len_bytes: (range.last - range.base).saturating_add(1),
            other: other.name.to_string(),
            other_base: other.base,
        });
    }
    ranges.insert(index, range);
    Ok(())
}

fn take(ranges: &mut Vec<Range>, base: u64) -> Result<Range, BusError> {
    let index = ranges
        .binary_search_by_key(&base, |range| range.base)
        .map_err(|_| BusError::NotFound { base })?;
    Ok(ranges.remove(index))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;

    struct Fake {
        mark: u8,
        writes: Mutex<Vec<(u64, Vec<u8>)>>,
    }

    impl Fake {
        fn new(mark: u8) -> Arc<Self> {
            Arc::new(Self { mark, writes: Mutex::default() })
        }
    }

    impl BusDevice for Fake {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(self.mark.wrapping_add(u8::try_from(offset & 0xf).unwrap()));
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.writes.lock().push((offset, data.to_vec()));
        }
    }

    fn read(bus: &Bus, address: u64) -> u8 {
        let mut data = [0];
        bus.read(address, &mut data);
        data[0]
    }

    #[test]
    fn access_reaches_the_device_with_the_offset_in_its_range() {
        let bus = Bus::new();
        let (low, high) = (Fake::new(0x10), Fake::new(0x20));
        bus.insert("high", 0x200, 8, high.clone()).unwrap();
        bus.insert("low", 0x100, 8, low.clone()).unwrap();

        assert_eq!(read(&bus, 0x103), 0x13);
        assert_eq!(read(&bus, 0x207), 0x27);
        assert!(bus.write(0x204, &[1, 2]));
        assert_eq!(*high.writes.lock(), [(4, vec![1, 2])]);
        assert!(low.writes.lock().is_empty());
    }

    #[test]
    fn unassigned_reads_are_ones_and_writes_are_ignored() {
        let bus = Bus::new();
        let device = Fake::new(0);
        bus.insert("device", 0x100, 8, device.clone()).unwrap();

        let mut data = [0; 4];
        assert!(!bus.read(0xff, &mut data));
        assert_eq!(data, [0xff; 4]);
        assert!(!bus.write(0x108, &[1]));
        assert!(!bus.read(0x100, &mut []), "an empty access reaches nothing");
        assert!(device.writes.lock().is_empty());
    }

    #[test]
    fn access_across_the_end_of_a_range_is_unassigned() {
        let bus = Bus::new();
        let device = Fake::new(0);
        bus.insert("device", 0x100, 8, device.clone()).unwrap();
        bus.insert("next", 0x108, 8, Fake::new(1)).unwrap();

        let mut data = [0; 4];
        assert!(!bus.read(0x106, &mut data));
        assert_eq!(data, [0xff; 4]);
        assert!(!bus.write(0x105, &[0; 8]));
        assert!(device.writes.lock().is_empty());
    }

    #[test]
    fn overlaps_are_refused_by_name() {
        let bus = Bus::new();
        bus.insert("serial", 0x3f8, 8, Fake::new(0)).unwrap();
        for (base, len_bytes) in [(0x3f8, 8), (0x3ff, 1), (0x3f0, 9), (0x3f0, 0x100), (0x3fa, 1)] {
            let error = bus.insert("other", base, len_bytes, Fake::new(0)).unwrap_err();
            assert!(error.to_string().contains("that of serial at 0x3f8"), "{error}");
        }
        bus.insert("before", 0x3f0, 8, Fake::new(0)).unwrap();
        bus.insert("after", 0x400, 1, Fake::new(0)).unwrap();
    }

    #[test]
    fn empty_and_overflowing_ranges_are_refused_and_the_last_byte_is_usable() {
        let bus = Bus::new();
        assert!(matches!(bus.insert("empty", 5, 0, Fake::new(0)), Err(BusError::BadRange { .. })));
        assert!(matches!(
            bus.insert("over", u64::MAX, 2, Fake::new(0)),
            Err(BusError::BadRange { .. })
        ));
        bus.insert("top", u64::MAX, 1, Fake::new(0x40)).unwrap();
        assert_eq!(read(&bus, u64::MAX), 0x40);
        assert!(!bus.write(u64::MAX, &[0; 2]));
    }

    #[test]
    fn a_moved_range_answers_at_its_new_place_only() {
        let bus = Bus::new();
        bus.insert("bar", 0x1000, 0x100, Fake::new(0x30)).unwrap();
        bus.insert("fixed", 0x3000, 0x100, Fake::new(0x50)).unwrap();

        bus.move_range(0x1000, 0x1080).unwrap();
        assert_eq!(read(&bus, 0x1000), 0xff);
        assert_eq!(read(&bus, 0x1080), 0x30);

        let error = bus.move_range(0x1080, 0x2f01).unwrap_err();
        assert!(error.to_string().contains("that of fixed"), "{error}");
        assert_eq!(read(&bus, 0x1080), 0x30, "a failed move changes nothing");
        assert_eq!(bus.move_range(1, 2), Err(BusError::NotFound { base: 1 }));
        assert!(bus.move_range(0x1080, u64::MAX).is_err());
    }

    /// Moves its range when written to, like the BARs of a PCI device.
    struct Mover(std::sync::Weak<Bus>);

    impl BusDevice for Mover {
        fn read(&self, _offset: u64, data: &mut [u8]) {
            data.fill(1);
        }
        fn write(&self, _offset: u64, data: &[u8]) {
            let bus = self.0.upgrade().unwrap();
            bus.move_range(0x10, u64::from(data[0])).unwrap();
        }
    }

    #[test]
    fn a_device_may_change_the_bus_while_it_is_accessed() {
        let bus = Arc::new(Bus::new());
        bus.insert("mover", 0x10, 4, Arc::new(Mover(Arc::downgrade(&bus)))).unwrap();
        bus.write(0x10, &[0x80]);
        assert_eq!((read(&bus, 0x10), read(&bus, 0x80)), (0xff, 1));
    }

    #[test]
    fn a_removed_range_is_unassigned() {
        let bus = Bus::new();
        bus.insert("device", 0x10, 1, Fake::new(0x30)).unwrap();
        bus.remove(0x10).unwrap();
        assert_eq!(read(&bus, 0x10), 0xff);
        assert!(matches!(bus.remove(0x10), Err(BusError::NotFound { base: 0x10 })));
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_linear_search(
            ranges in proptest::collection::vec((0_u64..200, 1_u64..20), 0..20),
            accesses in proptest::collection::vec((0_u64..240, 1_usize..9), 0..40),
        ) {
            let bus = Bus::new();
            let mut kept: Vec<(u64, u64, u8)> = Vec::new();
            for (index, (base, len)) in ranges.into_iter().enumerate() {
                let mark = u8::try_from(index).unwrap() * 8;
                let free = kept.iter().all(|(b, l, _)| base + len <= *b || b + l <= base);
                let inserted = bus.insert("r", base, len, Fake::new(mark)).is_ok();
                prop_assert_eq!(inserted, free);
                if free {
                    kept.push((base, len, mark));
                }
            }
            for (address, len) in accesses {
                let end = address + u64::try_from(len).unwrap();
                let expected = kept.iter().find(|(b, l, _)| *b <= address && end <= b + l);
                let mut data = vec![0; len];
                let found = bus.read(address, &mut data);
                prop_assert_eq!(found, expected.is_some());
                let first = expected.map_or(0xff, |(b, _, mark)| {
                    mark.wrapping_add(u8::try_from((address - b) & 0xf).unwrap())
                });
                prop_assert_eq!(data[0], first);
            }
        }
    }
}
