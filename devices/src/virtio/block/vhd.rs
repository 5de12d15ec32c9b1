// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fixed VHD: a raw disk followed by a footer of one sector.
//!
//! Owns parsing the footer, and never writes it. The data in front of it are handled as a raw disk.

use super::formatted::FormatError;
use super::image::SECTOR_BYTES;

/// Length of the footer.
pub(super) const FOOTER_BYTES: usize = 512;
const COOKIE: &[u8] = b"conectix";
const CURRENT_SIZE_OFFSET: usize = 48;
const DISK_TYPE_OFFSET: usize = 60;
const CHECKSUM_OFFSET: usize = 64;
const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;

/// Size of the disk according to the footer.
pub(super) fn size_bytes(
    footer: &[u8; FOOTER_BYTES],
    file_len_bytes: u64,
) -> Result<u64, FormatError> {
    if !footer.starts_with(COOKIE) {
        return Err(FormatError::Signature("fixed VHD"));
    }
    let (stated, disk_type) = (number(footer, CHECKSUM_OFFSET), number(footer, DISK_TYPE_OFFSET));
    if stated != checksum(footer) {
        return Err(FormatError::Damaged("the checksum of its footer is wrong".to_owned()));
    }
    match disk_type {
        FIXED => {}
        DYNAMIC => return Err(FormatError::Unsupported("dynamic allocation".to_owned())),
        DIFFERENCING => return Err(FormatError::Unsupported("a parent image".to_owned())),
        other => return Err(FormatError::Unsupported(format!("disk type {other}"))),
    }
    let [high, low] = [0, 4].map(|at| u64::from(number(footer, CURRENT_SIZE_OFFSET + at)));
    let size_bytes = high << 32 | low;
    let room_bytes = file_len_bytes.saturating_sub(FOOTER_BYTES as u64);
    if size_bytes == 0 || size_bytes > room_bytes || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(FormatError::Damaged(format!(
            "its disk has {size_bytes} bytes, and there are {room_bytes} before its footer"
        )));
    }
    Ok(size_bytes)
}

fn number(footer: &[u8; FOOTER_BYTES], at: usize) -> u32 {
    let bytes = footer.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().map_or(0, u32::from_be_bytes)
}

/// Complement of the sum of all bytes except the checksum.
fn checksum(footer: &[u8; FOOTER_BYTES]) -> u32 {
    let counts = |at: usize| !(CHECKSUM_OFFSET..CHECKSUM_OFFSET + 4).contains(&at);
    let bytes = footer.iter().enumerate().filter(|(at, _)| counts(*at));
    !bytes.map(|(_, byte)| u32::from(*byte)).sum::<u32>()
}

/// A footer, for tests.
#[cfg(test)]
pub(super) fn footer(size_bytes: u64, disk_type: u32) -> [u8; FOOTER_BYTES] {
    let mut footer = [0; FOOTER_BYTES];
    footer[..8].copy_from_slice(COOKIE);
    footer[12..16].copy_from_slice(&0x1_0000_u32.to_be_bytes());
    footer[16..24].copy_from_slice(&u64::MAX.to_be_bytes());
    footer[48..56].copy_from_slice(&size_bytes.to_be_bytes());
    footer[60..64].copy_from_slice(&disk_type.to_be_bytes());
    let sum = checksum(&footer);
    footer[64..68].copy_from_slice(&sum.to_be_bytes());
    footer
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn the_footer_of_a_fixed_image_states_the_size() {
        assert_eq!(size_bytes(&footer(1 << 20, FIXED), (1 << 20) + 512).unwrap(), 1 << 20);
        // Some tools leave room before the footer.
        assert_eq!(size_bytes(&footer(1 << 20, FIXED), 2 << 20).unwrap(), 1 << 20);
    }

    #[test]
    fn another_footer_is_refused_and_says_why() {
        let refused = |footer: &[u8; FOOTER_BYTES], len_bytes| {
            size_bytes(footer, len_bytes).unwrap_err().to_string()
        };
        let len_bytes = (1 << 20) + 512;
        assert!(refused(&[0; FOOTER_BYTES], len_bytes).contains("not a fixed VHD"));
        assert!(refused(&footer(1 << 20, DYNAMIC), len_bytes).contains("dynamic"));
        assert!(refused(&footer(1 << 20, DIFFERENCING), len_bytes).contains("parent"));
        assert!(refused(&footer(1 << 20, 7), len_bytes).contains("type 7"));
        for size_bytes in [0, 513, (1 << 20) + 512, u64::MAX] {
            assert!(refused(&footer(size_bytes, FIXED), len_bytes).contains("damaged"));
        }
        let mut changed = footer(1 << 20, FIXED);
        changed[100] ^= 1;
        assert!(refused(&changed, len_bytes).contains("checksum"));
    }
}
