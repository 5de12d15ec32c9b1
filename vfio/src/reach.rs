// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O addresses that an IOMMU can translate for a function, compared with guest memory.
//!
//! Owns where that is found: in sysfs before a function is opened, and in the description of a type1 container once it
//! is. The comparison is that of the crate `ioas`. Guest memory has its guest physical addresses as I/O addresses, so
//! memory that an IOMMU cannot reach is found before any of it is mapped.

use std::fs;
use std::ops::RangeInclusive;

use ioas::{HYPERTRANSPORT, HostReach, Unreachable};

use crate::error::VfioError;
use crate::sysfs::HostPlace;

const LEAVE_OUT: &str = "; start the VM with --memory high_hole=hypertransport, which leaves these guest \
                         addresses without memory";

/// What the host says of the I/O addresses of a function, which need not be open.
pub fn reach_of(place: &HostPlace) -> HostReach {
    place.directory().map_or_else(HostReach::unknown, |path| HostReach::in_sysfs(&path))
}

/// Bytes of guest addresses that the BARs of a function may take, with what aligning them may leave free: each is
/// aligned to its length.
pub fn bars_bytes_of(place: &HostPlace) -> u64 {
    let text = place.directory().and_then(|path| fs::read_to_string(path.join("resource")).ok());
    bars_bytes(&text.unwrap_or_default())
}

impl From<Unreachable> for VfioError {
    fn from(error: Unreachable) -> Self {
        match error {
            Unreachable::Reserved { iova: gpa, first, last } => {
                let remedy = if HYPERTRANSPORT.contains(&gpa) { LEAVE_OUT } else { "" };
                Self::ReservedAddress { gpa, first, last, remedy }
            }
            Unreachable::Beyond { iova: gpa, last } => Self::BeyondIommu { gpa, last },
        }
    }
}

/// The bytes for [`bars_bytes_of`] from the lines of `resource`, of which the first six are BARs: first address, last address, flags.
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
mod tests {
    use super::*;

    #[test]
    fn the_option_that_helps_is_named_where_it_does() {
        let error = |iova| {
            let (first, last) = (iova, iova + 0xfff);
            VfioError::from(Unreachable::Reserved { iova, first, last }).to_string()
        };
        let hypertransport = error(0xfd_0000_0000);
        assert!(hypertransport.contains("guest memory at 0xfd00000000"), "{hypertransport}");
        assert!(hypertransport.contains("high_hole=hypertransport"), "{hypertransport}");
        assert!(!error(0x2000_0000).contains("high_hole"));
        let beyond = VfioError::from(Unreachable::Beyond { iova: 1 << 39, last: (1 << 39) - 1 });
        assert!(beyond.to_string().contains("0x7fffffffff"), "{beyond}");
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
