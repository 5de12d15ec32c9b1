// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opaque kernel state as a compact string.
//!
//! Owns the text form (lower-case hexadecimal) of structures that only the kernel reads, without
//! their trailing zeros: an XSAVE area is mostly empty, and hundreds of vCPUs send theirs within
//! the downtime. Must never interpret what it carries.

use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// Maximum length of a blob that is parsed. The largest XSAVE area today is about 11 KiB (AMX).
pub const BLOB_LEN_BYTES_MAX: usize = 64 * 1024;

/// Opaque kernel state; trailing zeros are dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blob(Vec<u8>);

/// A blob is too long for the structure that it should fill.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{len_bytes} bytes of state do not fit in the {room_bytes} bytes that this host has for it"
)]
pub struct BlobError {
    /// Length of the blob.
    pub len_bytes: usize,
    /// Length of the structure.
    pub room_bytes: usize,
}

impl Blob {
    /// Copies a structure, without its trailing zeros.
    pub fn new(bytes: &[u8]) -> Self {
        let len = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Self(bytes.get(..len).unwrap_or_default().to_vec())
    }

    /// The bytes up to the last one that is not zero.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Copies the bytes to `target` and fills the rest with zeros.
    pub fn fill(&self, target: &mut [u8]) -> Result<(), BlobError> {
        let room_bytes = target.len();
        let too_long = BlobError { len_bytes: self.0.len(), room_bytes };
        let (head, tail) = target.split_at_mut_checked(self.0.len()).ok_or(too_long)?;
        head.copy_from_slice(&self.0);
        tail.fill(0);
        Ok(())
    }
}

const DIGITS: &[u8; 16] = b"0123456789abcdef";

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 0xf)]);
        let text: String =
            self.0.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Hexadecimal;

        impl Visitor<'_> for Hexadecimal {
            type Value = Blob;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(formatter, "at most {BLOB_LEN_BYTES_MAX} bytes in hexadecimal")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Blob, E> {
                parse(text).ok_or_else(|| {
                    E::invalid_value(serde::de::Unexpected::Other("another string"), &self)
                })
            }
        }

        deserializer.deserialize_str(Hexadecimal).map_err(D::Error::custom)
    }
}

/// Parses pairs of hexadecimal digits; `None` if malformed or too long.
fn parse(text: &str) -> Option<Blob> {
    if !text.len().is_multiple_of(2) || text.len() / 2 > BLOB_LEN_BYTES_MAX {
        return None;
    }
    let nibble = |digit: u8| char::from(digit).to_digit(16).and_then(|n| u8::try_from(n).ok());
    let bytes: Option<Vec<u8>> = text
        .as_bytes()
        .as_chunks::<2>()
        .0
        .iter()
        .map(|&[high, low]| Some((nibble(high)? << 4) | nibble(low)?))
        .collect();
    bytes.map(|bytes| Blob::new(&bytes))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn trailing_zeros_are_not_kept_and_come_back() {
        let blob = Blob::new(&[1, 0, 0xab, 0, 0]);
        assert_eq!(serde_json::to_string(&blob).unwrap(), "\"0100ab\"");
        let mut target = [9; 6];
        blob.fill(&mut target).unwrap();
        assert_eq!(target, [1, 0, 0xab, 0, 0, 0]);
    }

    #[test]
    fn a_blob_that_is_longer_than_its_structure_is_refused() {
        let error = Blob::new(&[1, 2, 3]).fill(&mut [0; 2]).unwrap_err();
        assert_eq!(error, BlobError { len_bytes: 3, room_bytes: 2 });
    }

    #[test]
    fn odd_foreign_and_oversized_text_is_refused() {
        for text in ["0", "0g", "+1", "é", &"00".repeat(BLOB_LEN_BYTES_MAX + 1)] {
            assert_eq!(parse(text), None, "{text:.10}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_survive_the_text_form(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let text = serde_json::to_string(&Blob::new(&bytes)).unwrap();
            let mut back = vec![0xff; bytes.len()];
            serde_json::from_str::<Blob>(&text).unwrap().fill(&mut back).unwrap();
            prop_assert_eq!(back, bytes);
        }

        #[test]
        fn only_pairs_of_digits_are_read_and_come_back_without_zeros(
            text in prop_oneof!["([0-9a-fA-F]{2}){0,20}(00){0,3}", "[0-9a-fA-F]{0,9}", ".*"],
        ) {
            let is_hexadecimal =
                text.len().is_multiple_of(2) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let blob = parse(&text);
            prop_assert_eq!(blob.is_some(), is_hexadecimal, "{}", text);
            if let Some(blob) = blob {
                let back: String = serde_json::from_value(serde_json::json!(blob)).unwrap();
                let (head, zeros) = text.split_at(back.len());
                prop_assert_eq!(back, head.to_ascii_lowercase());
                prop_assert!(!head.ends_with("00"), "{}", head);
                prop_assert!(zeros.bytes().all(|digit| digit == b'0'), "{}", zeros);
            }
        }
    }
}
