// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O addresses that an IOMMU can translate for a function, compared with guest memory.
//!
//! Owns what the host says of them: in sysfs before a function is opened, and the description of a type1
//! container or an iommufd once it is. Guest memory has its guest physical addresses as I/O addresses, so memory
//! that an IOMMU cannot reach is found before any of it is mapped.

use std::fs;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use crate::error::VfioError;
use crate::sysfs::{HostPlace, path_of_node};

/// I/O addresses that AMD's IOMMU keeps for HyperTransport.
pub const HYPERTRANSPORT: RangeInclusive<u64> = 0xfd_0000_0000..=0xff_ffff_ffff;

const LEAVE_OUT: &str = "; start the VM with --memory high_hole=hypertransport, which leaves these guest \
                         addresses without memory";

/// What sysfs says of the I/O addresses of a function. What it does not say is assumed to be reachable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReach {
    /// Address ranges that can be translated, in order.
    valid: Vec<RangeInclusive<u64>>,
}

impl HostReach {
    /// Of a function, which need not be open.
    pub fn of(place: &HostPlace) -> Self {
        path_of(place).map_or_else(|| Self::new(u64::MAX, Vec::new()), |path| Self::in_sysfs(&path))
    }

    /// Bytes of guest addresses that the BARs of a function may take, with what aligning them may leave free: each is
    /// aligned to its length.
    pub fn bars_bytes(place: &HostPlace) -> u64 {
        let text = path_of(place).and_then(|path| fs::read_to_string(path.join("resource")).ok());
        bars_bytes(&text.unwrap_or_default())
    }

    fn in_sysfs(path: &Path) -> Self {
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

    /// Compares with guest memory.
    ///
    /// # Errors
    /// Names the first address of it that cannot be reached.
    pub fn check(&self, memory: &[Range<u64>]) -> Result<(), VfioError> {
        check(&self.valid, memory)
    }
}

/// The function's directory in sysfs, if it is known.
fn path_of(place: &HostPlace) -> Option<PathBuf> {
    match place {
        HostPlace::Sysfs(path) | HostPlace::Prepinned { path, .. } => Some(path.clone()),
        HostPlace::Descriptor(node) => path_of_node(node),
    }
}

/// The bytes for [`HostReach::bars_bytes`] from the lines of `resource`, of which the first six are BARs: first address, last address, flags.
fn bars_bytes(lines: &str) -> u64 {
    let length = |line: &str| {
        let mut words = line.split_whitespace();
        let mut number = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        let (start, last) = (number()?, number()?);
        (last > start).then(|| (last - start).saturating_add(1))
    };
    let lengths = lines.lines().take(pci::BARS_COUNT.into()).filter_map(length);
    lengths.fold(0_u64, |sum, len| sum.saturating_add(len.saturating_mul(2)))
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

/// Compares guest memory with the ranges that an IOMMU can translate.
///
/// # Errors
/// Names the first address that cannot be reached.
pub fn check(valid: &[RangeInclusive<u64>], memory: &[Range<u64>]) -> Result<(), VfioError> {
    let mut valid = valid.to_vec();
    valid.sort_by_key(|range| *range.start());
    for part in memory.iter().filter(|part| !part.is_empty()) {
        let Some(gpa) = first_outside(&valid, &(part.start..=part.end - 1)) else { continue };
        let before = valid.iter().map(|range| *range.end()).filter(|end| *end < gpa).max();
        let after = valid.iter().map(|range| *range.start()).find(|start| *start > gpa);
        return Err(match after {
            Some(after) => VfioError::ReservedAddress {
                gpa,
                first: before.map_or(0, |end| end + 1),
                last: after - 1,
                remedy: if HYPERTRANSPORT.contains(&gpa) { LEAVE_OUT } else { "" },
            },
            None => VfioError::BeyondIommu { gpa, last: before.unwrap_or(0) },
        });
    }
    Ok(())
}

/// Type1's description of a container that has a group.
pub mod type1 {
    use super::RangeInclusive;

    /// Length in bytes of the description without capabilities, `struct vfio_iommu_type1_info`.
    pub const INFO_BYTES: usize = 24;
    /// Maximum length that is taken; the kernel lists ranges of 16 bytes, of which hosts have some dozens.
    pub const INFO_BYTES_MAX: usize = 1 << 16;
    const FLAGS: usize = 4;
    const CAPABILITIES: usize = 16;
    const HAS_CAPABILITIES: u32 = 1 << 1;
    /// Number of the capability with the ranges, and the version that is known.
    const IOVA_RANGES: (u16, u16) = (1, 1);
    const RANGES: usize = 16;

    fn word(info: &[u8], at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?))
    }

    fn half_word(info: &[u8], at: usize) -> Option<u16> {
        Some(u16::from_ne_bytes(*info.get(at..)?.first_chunk()?))
    }

    fn double_word(info: &[u8], at: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(*info.get(at..)?.first_chunk()?))
    }

    /// The ranges that can be mapped; `None` if the kernel does not say, as for mediated devices.
    pub fn valid_ranges(info: &[u8]) -> Option<Vec<RangeInclusive<u64>>> {
        if word(info, FLAGS)? & HAS_CAPABILITIES == 0 {
            return None;
        }
        let mut at = usize::try_from(word(info, CAPABILITIES)?).ok()?;
        // Each capability has a header of eight bytes, so that more of them than this are a circle.
        for _ in 0..info.len() / 8 {
            if at < INFO_BYTES {
                return None;
            }
            if (half_word(info, at)?, half_word(info, at + 2)?) == IOVA_RANGES {
                let count = usize::try_from(word(info, at + 8)?).ok()?;
                let ranges = (0..count).map(|index| {
                    let entry = at.checked_add(RANGES)?.checked_add(index.checked_mul(16)?)?;
                    Some(double_word(info, entry)?..=double_word(info, entry + 8)?)
                });
                return ranges.collect();
            }
            at = usize::try_from(word(info, at + 4)?).ok()?;
        }
        None
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
#[expect(clippy::single_range_in_vec_init, reason = "memory of one range")]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    /// As Linux shows the group of a device on a host of AMD's.
    const AMD: &str = "0x00000000fee00000 0x00000000feefffff msi\n\
                       0x000000fd00000000 0x000000ffffffffff reserved\n";

    fn sysfs(regions: &str, register: Option<&str>) -> HostReach {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let device = root.as_path();
        fs::create_dir_all(device.join("iommu_group")).unwrap();
        fs::write(device.join("iommu_group/reserved_regions"), regions).unwrap();
        if let Some(register) = register {
            fs::create_dir_all(device.join("iommu/intel-iommu")).unwrap();
            fs::write(device.join("iommu/intel-iommu/cap"), register).unwrap();
        }
        HostReach::of(&HostPlace::Sysfs(device.to_owned()))
    }

    fn text(result: Result<(), VfioError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn hypertransport_is_excluded_on_a_host_of_amd() {
        let reach = sysfs(AMD, None);
        assert!(reach.excludes(&HYPERTRANSPORT));
        assert!(!sysfs("", None).excludes(&HYPERTRANSPORT), "a host that says nothing");
        assert!(!reach.excludes(&(4 * GIB..=1012 * GIB - 1)));
        let split = [0..3 * GIB, 4 * GIB..1012 * GIB, 1024 * GIB..4096 * GIB];
        reach.check(&split).unwrap();
        let error = text(reach.check(&[0..3 * GIB, 4 * GIB..1013 * GIB]));
        assert!(error.contains("0xfd00000000 to 0xffffffffff"), "{error}");
        assert!(error.contains("high_hole=hypertransport"), "{error}");
    }

    #[test]
    fn other_regions_are_named_and_relaxable_ones_are_none() {
        let regions = "0x0000000020000000 0x000000002fffffff direct\n\
                       0x0000000040000000 0x000000004fffffff direct-relaxable\nnonsense\n";
        let reach = sysfs(regions, None);
        let error = text(reach.check(&[0..3 * GIB]));
        assert!(error.contains("0x20000000 to 0x2fffffff"), "{error}");
        assert!(!error.contains("high_hole"), "{error}");
        reach.check(&[0..0x2000_0000, 0x3000_0000..3 * GIB]).unwrap();
    }

    #[test]
    fn an_intel_iommu_has_so_many_address_bits() {
        // MGAW 38, so 39 bits.
        let reach = sysfs("", Some("1c0000c40660462\n"));
        assert_eq!(reach, HostReach { valid: vec![0..=(1 << 39) - 1] });
        reach.check(&[0..3 * GIB, 4 * GIB..512 * GIB]).unwrap();
        let error = text(reach.check(&[0..3 * GIB, 4 * GIB..513 * GIB]));
        assert!(error.contains("0x8000000000") && error.contains("0x7fffffffff"), "{error}");
        assert_eq!(sysfs("", Some("what\n")), HostReach { valid: vec![0..=u64::MAX] });
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
        check(&valid, &[0..0x2000, 0x4000..0x5000]).unwrap();
        let reserved = check(&valid, &[0..0x2000, 0x3000..0x5000]).unwrap_err();
        assert!(matches!(
            reserved,
            VfioError::ReservedAddress { gpa: 0x3000, first: 0x2000, last: 0x3fff, remedy: "" }
        ));
        let beyond = check(&valid, &[0x4000..0x6000]).unwrap_err();
        assert!(matches!(beyond, VfioError::BeyondIommu { gpa: 0x5000, last: 0x4fff }));
        assert!(check(&[], &[0..1]).is_err());
    }

    /// A description with another capability before the ranges.
    fn info(ranges: &[(u64, u64)]) -> Vec<u8> {
        let mut info = Vec::new();
        let words = |info: &mut Vec<u8>, words: &[u32]| {
            info.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        };
        let count = u32::try_from(ranges.len()).unwrap();
        words(&mut info, &[0, 0b11, 0x1000, 0, 24, 0]);
        words(&mut info, &[3 | 1 << 16, 40, 65535, 0]);
        words(&mut info, &[1 | 1 << 16, 0, count, 0]);
        info.extend(
            ranges.iter().flat_map(|(start, last)| [*start, *last]).flat_map(u64::to_ne_bytes),
        );
        info
    }

    #[test]
    fn a_container_lists_its_ranges() {
        let ranges = [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
        let valid = type1::valid_ranges(&info(&ranges));
        assert_eq!(valid, Some(vec![0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff]));
        let mut silent = info(&ranges);
        silent[4..8].copy_from_slice(&1_u32.to_ne_bytes());
        assert_eq!(type1::valid_ranges(&silent), None);
    }

    #[test]
    fn a_description_that_is_cut_or_goes_in_circles_says_nothing() {
        let whole = info(&[(0, 9), (20, 29)]);
        for len in 0..whole.len() {
            assert_eq!(type1::valid_ranges(&whole[..len]), None, "{len} bytes");
        }
        let mut circle = whole;
        circle[28..32].copy_from_slice(&24_u32.to_ne_bytes());
        assert_eq!(type1::valid_ranges(&circle), None);
        circle[28..32].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(type1::valid_ranges(&circle), None);
    }
}
