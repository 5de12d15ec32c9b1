// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O addresses that an IOMMU can translate for a PCI function, compared with those that memory is to have.
//!
//! Owns what the host says of them in sysfs, where no function has to be open, and the comparison itself. Must never
//! know whose memory it is.

use std::fs;
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use thiserror::Error;

/// I/O addresses that AMD's IOMMU keeps for HyperTransport.
pub const HYPERTRANSPORT: RangeInclusive<u64> = 0xfd_0000_0000..=0xff_ffff_ffff;

/// Memory that an IOMMU cannot reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unreachable {
    /// It is at addresses that are kept for other purposes.
    #[error(
        "memory at {iova:#x} cannot be mapped: the host's IOMMU keeps the addresses from {first:#x} to {last:#x} \
         for other purposes"
    )]
    Reserved {
        /// The first address of it that cannot be mapped.
        iova: u64,
        /// First address that is kept.
        first: u64,
        /// Last address that is kept.
        last: u64,
    },
    /// It is above all addresses of the IOMMU.
    #[error(
        "memory at {iova:#x} cannot be mapped: the last address that the host's IOMMU reaches is {last:#x}"
    )]
    Beyond {
        /// The first address of it that cannot be mapped.
        iova: u64,
        /// Last address that can be mapped.
        last: u64,
    },
}

/// What sysfs says of the I/O addresses of a function. What it does not say is assumed to be reachable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReach {
    /// Address ranges that can be translated, in order.
    valid: Vec<RangeInclusive<u64>>,
}

impl HostReach {
    /// Of a function of which nothing is known.
    pub fn unknown() -> Self {
        Self::new(u64::MAX, Vec::new())
    }

    /// Of the function with this directory in sysfs.
    pub fn in_sysfs(path: &Path) -> Self {
        let text = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
        let last = match intel_address_bits(&text("iommu/intel-iommu/cap")) {
            Some(bits @ 1..=63) => (1 << bits) - 1,
            _ => u64::MAX,
        };
        Self::new(last, reserved_regions(&text("iommu_group/reserved_regions")))
    }

    fn new(last: u64, mut reserved: Vec<RangeInclusive<u64>>) -> Self {
        reserved.sort_by_key(|range| *range.start());
        let mut valid = Vec::new();
        let mut next = Some(0);
        for range in reserved {
            let Some(start) = next.filter(|start| start <= range.end()) else { continue };
            if start < *range.start() {
                valid.push(start..=last.min(range.start() - 1));
            }
            next = range.end().checked_add(1);
        }
        valid.extend(next.map(|start| start..=last));
        valid.retain(|range| !range.is_empty());
        Self { valid }
    }

    /// Whether an address of `range` cannot be translated.
    pub fn excludes(&self, range: &RangeInclusive<u64>) -> bool {
        first_outside(&self.valid, range).is_some()
    }

    /// Compares with memory.
    ///
    /// # Errors
    /// Names the first address of it that cannot be reached.
    pub fn check(&self, memory: &[Range<u64>]) -> Result<(), Unreachable> {
        check_reach(&self.valid, memory)
    }
}

/// Width of the I/O addresses of an Intel IOMMU in bits, from its capability register: MGAW, bits 21 to 16.
fn intel_address_bits(register: &str) -> Option<u32> {
    let value = u64::from_str_radix(register.trim().trim_start_matches("0x"), 16).ok()?;
    u32::try_from((value >> 16 & 0x3f) + 1).ok()
}

/// The regions that are never mapped, from the lines of `reserved_regions`: first address, last address, type.
/// Regions of type `direct-relaxable` are not kept for a function that a VM has.
fn reserved_regions(lines: &str) -> Vec<RangeInclusive<u64>> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let mut number = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        let (start, last) = (number()?, number()?);
        (words.next()? != "direct-relaxable" && start <= last).then_some(start..=last)
    };
    lines.lines().filter_map(parse).collect()
}

/// The first address of `range` that no range of `valid`, which is in order, has.
fn first_outside(valid: &[RangeInclusive<u64>], range: &RangeInclusive<u64>) -> Option<u64> {
    let mut gpa = *range.start();
    for valid in valid.iter().filter(|valid| !valid.is_empty()) {
        if valid.contains(&gpa) {
            if valid.end() >= range.end() {
                return None;
            }
            gpa = valid.end() + 1;
        }
    }
    Some(gpa)
}

/// Compares memory with the ranges that an IOMMU can translate.
///
/// # Errors
/// Names the first address that cannot be reached.
pub fn check_reach(
    valid: &[RangeInclusive<u64>],
    memory: &[Range<u64>],
) -> Result<(), Unreachable> {
    let mut valid = valid.to_vec();
    valid.sort_by_key(|range| *range.start());
    for part in memory.iter().filter(|part| !part.is_empty()) {
        let Some(iova) = first_outside(&valid, &(part.start..=part.end - 1)) else { continue };
        let before = valid.iter().map(|range| *range.end()).filter(|end| *end < iova).max();
        let after = valid.iter().map(|range| *range.start()).find(|start| *start > iova);
        return Err(match after {
            Some(after) => {
                let first = before.map_or(0, |end| end + 1);
                Unreachable::Reserved { iova, first, last: after - 1 }
            }
            None => Unreachable::Beyond { iova, last: before.unwrap_or(0) },
        });
    }
    Ok(())
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]
#[expect(clippy::single_range_in_vec_init, reason = "memory of one range")]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    /// As Linux shows the group of a device on a host of AMD's.
    const AMD: &str = "0x00000000fee00000 0x00000000feefffff msi\n\
                       0x000000fd00000000 0x000000ffffffffff reserved\n";

    fn sysfs(regions: &str, register: Option<&str>) -> HostReach {
        let root = tempfile::tempdir().unwrap();
        let device = root.path();
        fs::create_dir_all(device.join("iommu_group")).unwrap();
        fs::write(device.join("iommu_group/reserved_regions"), regions).unwrap();
        if let Some(register) = register {
            fs::create_dir_all(device.join("iommu/intel-iommu")).unwrap();
            fs::write(device.join("iommu/intel-iommu/cap"), register).unwrap();
        }
        HostReach::in_sysfs(device)
    }

    fn reserved(iova: u64, first: u64, last: u64) -> Result<(), Unreachable> {
        Err(Unreachable::Reserved { iova, first, last })
    }

    #[test]
    fn hypertransport_is_excluded_on_a_host_of_amd() {
        let reach = sysfs(AMD, None);
        assert!(reach.excludes(&HYPERTRANSPORT));
        assert!(!sysfs("", None).excludes(&HYPERTRANSPORT), "a host that says nothing");
        assert!(!HostReach::unknown().excludes(&(0..=u64::MAX)));
        assert!(!reach.excludes(&(4 * GIB..=1012 * GIB - 1)));
        let split = [0..3 * GIB, 4 * GIB..1012 * GIB, 1024 * GIB..4096 * GIB];
        reach.check(&split).unwrap();
        let whole = reach.check(&[0..3 * GIB, 4 * GIB..1013 * GIB]);
        assert_eq!(whole, reserved(1012 * GIB, 0xfd_0000_0000, 0xff_ffff_ffff));
    }

    #[test]
    fn other_regions_are_named_and_relaxable_ones_are_none() {
        let regions = "0x0000000020000000 0x000000002fffffff direct\n\
                       0x0000000040000000 0x000000004fffffff direct-relaxable\nnonsense\n";
        let reach = sysfs(regions, None);
        assert_eq!(reach.check(&[0..3 * GIB]), reserved(0x2000_0000, 0x2000_0000, 0x2fff_ffff));
        reach.check(&[0..0x2000_0000, 0x3000_0000..3 * GIB]).unwrap();
    }

    #[test]
    fn an_intel_iommu_has_so_many_address_bits() {
        // MGAW 38, so 39 bits.
        let reach = sysfs("", Some("1c0000c40660462\n"));
        assert_eq!(reach, HostReach { valid: vec![0..=(1 << 39) - 1] });
        reach.check(&[0..3 * GIB, 4 * GIB..512 * GIB]).unwrap();
        let beyond = reach.check(&[0..3 * GIB, 4 * GIB..513 * GIB]);
        assert_eq!(beyond, Err(Unreachable::Beyond { iova: 1 << 39, last: (1 << 39) - 1 }));
        assert_eq!(sysfs("", Some("what\n")), HostReach::unknown());
    }

    #[test]
    fn regions_that_overlap_or_touch_the_ends_leave_the_rest() {
        let reach = HostReach::new(u64::MAX, vec![10..=19, 15..=17, 20..=29, 0..=4]);
        assert_eq!(reach.valid, [5..=9, 30..=u64::MAX]);
        assert_eq!(HostReach::new(99, vec![50..=u64::MAX]).valid, [0..=49]);
        assert_eq!(HostReach::new(99, vec![0..=u64::MAX]).valid, []);
        assert_eq!(HostReach::new(99, vec![200..=300]).valid, [0..=99]);
    }

    #[test]
    fn memory_may_lie_in_adjacent_ranges() {
        let valid = [0x1000..=0x1fff, 0..=0xfff, 0x4000..=0x4fff];
        check_reach(&valid, &[0..0x2000, 0x4000..0x5000]).unwrap();
        let kept = check_reach(&valid, &[0..0x2000, 0x3000..0x5000]);
        assert_eq!(kept, reserved(0x3000, 0x2000, 0x3fff));
        let beyond = check_reach(&valid, &[0x4000..0x6000]);
        assert_eq!(beyond, Err(Unreachable::Beyond { iova: 0x5000, last: 0x4fff }));
        assert!(check_reach(&[], &[0..1]).is_err());
    }
}
