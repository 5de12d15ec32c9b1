// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sets of pages on the wire: the pending set of a postcopy handover.
//!
//! One region after the other: a tag, then either runs (pairs of gap and length as variable-length
//! numbers) or the plain bitmap, whichever is shorter, so that neither a nearly full nor a finely
//! scattered set is large. Decoding checks every number against the region before it is used.

use super::ProtocolError;
use super::codec::{put_varint, take_varint};
use crate::bitmap::{ClaimMap, WORD_BITS};
use crate::layout::to_usize;

const TAG_RUNS: u8 = 0;
const TAG_BITMAP: u8 = 1;

/// Encodes the sets of all regions, in order.
pub fn encode<'m>(maps: impl IntoIterator<Item = &'m ClaimMap>) -> Vec<u8> {
    let mut out = Vec::new();
    for map in maps {
        let runs = map.runs();
        let bitmap_bytes = to_usize(map.len().div_ceil(WORD_BITS)) * 8;
        let mut body = Vec::new();
        put_varint(&mut body, runs.len() as u64);
        let mut at = 0;
        for (first, count) in &runs {
            put_varint(&mut body, first - at);
            put_varint(&mut body, *count);
            at = first + count;
            if body.len() > bitmap_bytes {
                break;
            }
        }
        if body.len() <= bitmap_bytes {
            out.push(TAG_RUNS);
            out.append(&mut body);
        } else {
            out.push(TAG_BITMAP);
            put_bitmap(&mut out, &runs, bitmap_bytes);
        }
    }
    out
}

fn put_bitmap(out: &mut Vec<u8>, runs: &[(u64, u64)], bitmap_bytes: usize) {
    let start = out.len();
    out.resize(start + bitmap_bytes, 0);
    for (first, count) in runs {
        for bit in *first..first + count {
            out[start + to_usize(bit / 8)] |= 1 << (bit % 8);
        }
    }
}

/// Decodes the sets of all regions into maps that are clear before.
///
/// # Errors
/// When the bytes are cut off, name pages beyond a region, or are too many.
pub fn decode(mut bytes: &[u8], maps: &[ClaimMap]) -> Result<(), ProtocolError> {
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

fn take_runs(bytes: &mut &[u8], map: &ClaimMap) -> Result<(), ProtocolError> {
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
        map.set_run(first, count);
        at = end;
    }
    Ok(())
}

fn take_bitmap(bytes: &mut &[u8], map: &ClaimMap) -> Result<(), ProtocolError> {
    let len = to_usize(map.len().div_ceil(WORD_BITS)) * 8;
    let (bitmap, rest) = bytes.split_at_checked(len).ok_or(bad("a bitmap is cut off"))?;
    *bytes = rest;
    for (index, byte) in (0u64..).zip(bitmap) {
        for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
            let page = index * 8 + bit;
            if page >= map.len() {
                return Err(bad("a page is beyond its region"));
            }
            map.set(page);
        }
    }
    Ok(())
}
