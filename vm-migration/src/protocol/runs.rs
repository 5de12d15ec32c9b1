// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sets of pages on the wire: the pending set of a postcopy handover.
//!
//! One region after the other: a tag, then either runs (pairs of gap and length as variable-length
//! numbers) or the plain bitmap, whichever is shorter, so that neither a nearly full nor a finely
//! scattered set is large. Decoding checks every number against the region before it is used.

use page_bitmap::PageBitmap;

use super::ProtocolError;
use super::codec::{PENDING_BYTES_MAX, put_varint, take_varint};
use crate::layout::{Layout, RegionInfo, to_usize};

const TAG_RUNS: u8 = 0;
const TAG_BITMAP: u8 = 1;

/// Encodes the sets of all regions, in order.
pub fn encode<'m>(maps: impl IntoIterator<Item = &'m PageBitmap>) -> Vec<u8> {
    let mut out = Vec::new();
    for map in maps {
        let bitmap_bytes = map.words().len() * 8;
        if let Some(mut body) = encode_runs(map, bitmap_bytes) {
            out.push(TAG_RUNS);
            out.append(&mut body);
        } else {
            out.push(TAG_BITMAP);
            out.reserve(bitmap_bytes);
            for word in map.words() {
                out.extend_from_slice(&word.to_le_bytes());
            }
        }
    }
    out
}

/// Refuses a guest whose set of missing pages may become longer than a message. That could otherwise show
/// at the handover, or only at a reconnection, where the migration could not continue. `layout` is the
/// destination's, in whose units a set counts.
///
/// # Errors
/// [`ProtocolError::TooManyPages`].
pub fn check_fits(layout: &Layout) -> Result<(), ProtocolError> {
    let regions = layout.regions();
    let encoded_bytes = |info: &RegionInfo| {
        let pages = info.len_bytes / info.host_page_bytes;
        1 + pages.div_ceil(64).saturating_mul(8)
    };
    let longest = regions.iter().map(encoded_bytes).fold(0, u64::saturating_add);
    if longest <= PENDING_BYTES_MAX {
        return Ok(());
    }
    let bytes = regions.iter().fold(0, |sum: u64, info| sum.saturating_add(info.len_bytes));
    Err(ProtocolError::TooManyPages { gib: bytes >> 30 })
}

/// The runs of a map; `None` if they take more than `bytes_max`. Runs are counted from the bitmap words
/// before any is encoded, because a scattered set has as many as half of its bits.
fn encode_runs(map: &PageBitmap, bytes_max: usize) -> Option<Vec<u8>> {
    let mut before = 0;
    let runs: u64 = map
        .words()
        .map(|word| {
            // A run begins at each set bit that follows a clear one.
            let begins = word & !(word << 1 | before);
            before = word >> 63;
            u64::from(begins.count_ones())
        })
        .sum();
    let mut body = Vec::new();
    put_varint(&mut body, runs);
    // Each run is two numbers of at least a byte each.
    if runs.saturating_mul(2).saturating_add(body.len() as u64) > bytes_max as u64 {
        return None;
    }
    let (mut at, mut left) = (0, runs);
    for run in map.runs().take(to_usize(runs)) {
        put_varint(&mut body, run.start - at);
        put_varint(&mut body, run.end - run.start);
        (at, left) = (run.end, left - 1);
        if body.len() > bytes_max {
            return None;
        }
    }
    // Concurrent clearing may have joined or removed runs; the raw bitmap has no count of runs.
    (left == 0).then_some(body)
}

/// Decodes the sets of all regions into maps that are empty before.
///
/// # Errors
/// When the bytes are cut off, name pages beyond a region, or are too many.
pub fn decode(mut bytes: &[u8], maps: &[PageBitmap]) -> Result<(), ProtocolError> {
    for map in maps {
        let (tag, rest) = bytes.split_first().ok_or(bad("it is cut off"))?;
        bytes = rest;
        match *tag {
            TAG_RUNS => take_runs(&mut bytes, map)?,
            TAG_BITMAP => take_bitmap(&mut bytes, map)?,
            _ => return Err(bad("it has an unknown form")),
        }
    }
    if bytes.is_empty() { Ok(()) } else { Err(bad("it is longer than the regions")) }
}

const fn bad(why: &'static str) -> ProtocolError {
    ProtocolError::Malformed { what: "set of pending pages", why }
}

fn take_runs(bytes: &mut &[u8], map: &PageBitmap) -> Result<(), ProtocolError> {
    let runs = take_varint(bytes).ok_or(bad("a number is cut off"))?;
    let mut at = 0u64;
    for _ in 0..runs {
        let gap = take_varint(bytes).ok_or(bad("a number is cut off"))?;
        let count = take_varint(bytes).ok_or(bad("a number is cut off"))?;
        let first = at.checked_add(gap);
        let end = first.and_then(|first| first.checked_add(count));
        let (Some(first), Some(end)) = (first, end) else {
            return Err(bad("a run is beyond its region"));
        };
        if count == 0 || end > map.len() {
            return Err(bad("a run is empty or beyond its region"));
        }
        map.set_range(first..end);
        at = end;
    }
    Ok(())
}

fn take_bitmap(bytes: &mut &[u8], map: &PageBitmap) -> Result<(), ProtocolError> {
    let len = map.words().len() * 8;
    let (bitmap, rest) = bytes.split_at_checked(len).ok_or(bad("a bitmap is cut off"))?;
    *bytes = rest;
    for (index, word) in (0..).zip(bitmap.as_chunks::<8>().0) {
        if !map.set_word(index, u64::from_le_bytes(*word)) {
            return Err(bad("a page is beyond its region"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use super::*;
    use crate::layout::{Backing, PAGE_BYTES};

    const TIB: u64 = 1 << 40;

    fn layout(len_bytes: &[u64], host_page_bytes: u64) -> Layout {
        let mut gpa = 0;
        let region = |len_bytes: &u64| {
            let name = String::new();
            let info = RegionInfo {
                name,
                gpa,
                len_bytes: *len_bytes,
                host_page_bytes,
                backing: Backing::Shared,
            };
            gpa += len_bytes;
            info
        };
        Layout::new(len_bytes.iter().map(region).collect()).unwrap()
    }

    #[test]
    fn a_guest_whose_missing_pages_may_not_fit_a_message_is_refused() {
        let small = 8 * TIB - (1 << 30);
        check_fits(&layout(&[small], PAGE_BYTES)).unwrap();
        check_fits(&layout(&[3 * TIB, 4 * TIB], PAGE_BYTES)).unwrap();
        check_fits(&layout(&[16 * TIB], 2 << 20)).unwrap();
        for sizes in [&[9 * TIB][..], &[4 * TIB, 5 * TIB]] {
            let refused = check_fits(&layout(sizes, PAGE_BYTES)).unwrap_err();
            assert!(matches!(refused, ProtocolError::TooManyPages { gib: 9216 }), "{refused}");
        }
    }

    #[test]
    fn a_scattered_set_is_as_long_as_the_check_expects_and_no_longer() {
        // Every other page: the maximum number of runs.
        let map = PageBitmap::new(1 << 20);
        for page in 0..1 << 19 {
            map.set(page * 2);
        }
        assert_eq!(encode([&map]).len(), 1 + (1 << 20) / 8);
    }
}
