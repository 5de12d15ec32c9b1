// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A check of a migration that moves nothing: what the destination has found, and the bytes that measure the link.
//!
//! Owns the request, the answer to the configuration, and the bounds of everything in it. It must never give out text of a
//! peer as it came: it is cut, and shown without control characters.

use serde::{Deserialize, Serialize};

use super::ProtocolError;
use super::capabilities::Offer;
use super::codec::ANSWER_BYTES_MAX;

/// Most bytes of one message that measures the link.
pub const CHECK_BYTES_MAX: u64 = 1 << 20;

/// Most bytes that a check transfers to measure the link.
pub const CHECK_TRANSFER_BYTES_MAX: u64 = 64 << 20;

/// Most problems, and most warnings, of an answer; what is beyond is counted.
pub const FINDINGS_MAX: usize = 128;

/// Longest text of one, in characters.
const TEXT_CHARS_MAX: usize = 1000;

// A character has at most four bytes, or two where JSON escapes it; control characters are replaced.
const _: () =
    assert!((2 * FINDINGS_MAX * (TEXT_CHARS_MAX * 4 + 8) + 1024) as u64 <= ANSWER_BYTES_MAX);

/// What the source of a check says of the migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckRequest {
    /// What a migration would begin with.
    pub offer: Offer,
    /// Bytes of memory that it would move.
    pub move_bytes: u64,
}

impl CheckRequest {
    /// Encodes the document as JSON.
    pub fn to_json(&self) -> Vec<u8> {
        // Maps have string keys and no number is a float: serialising cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Parses a document of the peer; its contents are not trusted.
    ///
    /// # Errors
    /// When the bytes are not such a document.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let what = "request for a check";
        serde_json::from_slice(bytes).map_err(|source| ProtocolError::Json { what, source })
    }
}

/// What the destination has found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckFindings {
    /// What would fail.
    pub problems: Vec<String>,
    /// What would work, and cost something.
    #[serde(default)]
    pub warnings: Vec<String>,
}

impl CheckFindings {
    /// Encodes the document as JSON, within the bounds.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings without control characters: serialising cannot fail.
        serde_json::to_vec(&self.clone().bounded()).unwrap_or_default()
    }

    /// Parses what a peer has sent, and cuts it to the bounds.
    ///
    /// # Errors
    /// When the bytes are not such a document.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let what = "list of findings";
        let read: Self =
            serde_json::from_slice(bytes).map_err(|source| ProtocolError::Json { what, source })?;
        Ok(read.bounded())
    }

    fn bounded(self) -> Self {
        Self { problems: bounded(&self.problems), warnings: bounded(&self.warnings) }
    }
}

/// The first texts of a list, each as it may be shown. The last one says how many were left out.
fn bounded(texts: &[String]) -> Vec<String> {
    let kept = if texts.len() > FINDINGS_MAX { FINDINGS_MAX - 1 } else { texts.len() };
    let mut all: Vec<_> = texts.iter().take(kept).map(|text| shown(text)).collect();
    if kept < texts.len() {
        all.push(format!("and {} more", texts.len() - kept));
    }
    all
}

/// Text of a peer without what could control a terminal, cut to its longest length.
pub(crate) fn shown(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(TEXT_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let findings = CheckFindings {
            problems: vec!["no tap 'lan'".to_owned(), "\"quoted\" \\".to_owned()],
            warnings: vec!["slow".to_owned()],
        };
        assert_eq!(CheckFindings::parse(&findings.to_json()).unwrap(), findings);
        let old = CheckFindings::parse(br#"{"problems":[],"later":1}"#).unwrap();
        assert_eq!(old, CheckFindings::default());
        for bad in [&b""[..], b"[]", b"{}", br#"{"problems":[1]}"#, b"\xff"] {
            assert!(CheckFindings::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_list_of_a_peer_is_cut_and_says_so() {
        let many = |count: usize| CheckFindings {
            problems: (0..count).map(|number| number.to_string()).collect(),
            warnings: Vec::new(),
        };
        let read = |findings: &CheckFindings| {
            // As a peer without the bounds would write it.
            CheckFindings::parse(&serde_json::to_vec(findings).unwrap()).unwrap().problems
        };
        assert_eq!(read(&many(FINDINGS_MAX)).last().unwrap(), "127");
        let cut = read(&many(FINDINGS_MAX + 1));
        assert_eq!((cut.len(), cut.last().unwrap().as_str()), (FINDINGS_MAX, "and 2 more"));
        assert_eq!(read(&many(1000)).last().unwrap(), "and 873 more");
        let long = "\u{1b}[2J".to_owned() + &"x".repeat(TEXT_CHARS_MAX);
        let read = read(&CheckFindings { problems: vec![long], warnings: Vec::new() });
        assert!(read[0].starts_with(" [2Jxx") && read[0].len() == TEXT_CHARS_MAX);
    }

    #[test]
    fn the_longest_answer_fits() {
        let worst = vec!["\u{10ffff}".repeat(2 * TEXT_CHARS_MAX); 2 * FINDINGS_MAX];
        let quoted = vec!["\"".repeat(2 * TEXT_CHARS_MAX); 2 * FINDINGS_MAX];
        let findings = CheckFindings { problems: worst, warnings: quoted };
        assert!(findings.to_json().len() as u64 <= ANSWER_BYTES_MAX);
    }
}
