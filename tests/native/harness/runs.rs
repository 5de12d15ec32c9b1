// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The form in which recordings that are mostly zeros are kept: their runs of bytes with contents.
//!
//! Owns the form, which is described in `tests/data/cloud-hypervisor-53/README.md`. Must never know what is in it.

const WORD: usize = 8;

fn word(bytes: &[u8], at: usize) -> usize {
    let bytes = bytes.get(at..at + WORD).expect("a whole word");
    usize::try_from(u64::from_le_bytes(bytes.try_into().expect("eight bytes"))).expect("64 bits")
}

/// What was packed.
///
/// # Panics
/// It is not whole, or a run lies before the end of the one before it.
pub fn unpack(packed: &[u8]) -> Vec<u8> {
    let end = packed.len().checked_sub(WORD).expect("the length");
    let mut whole = vec![0; word(packed, end)];
    let (mut at, mut filled) = (0, 0);
    while at < end {
        let (offset, len) = (word(packed, at), word(packed, at + WORD));
        let begin = at + 2 * WORD;
        assert!(offset >= filled, "a run at {offset} within the one before it");
        let run = packed[..end].get(begin..begin + len).expect("a whole run");
        whole.get_mut(offset..offset + len).expect("inside").copy_from_slice(run);
        (at, filled) = (begin + len, offset + len);
    }
    whole
}
