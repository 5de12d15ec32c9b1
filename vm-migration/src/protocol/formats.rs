// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Versions of the two documents that describe a machine: its configuration and its state.
//!
//! Owns how the versions are compared, before either document is sent. This crate does not read the documents.
//! A peer that sends no versions has the first version of each.

use serde::{Deserialize, Serialize};

/// The version of documents that predate version numbers.
pub const FIRST: u32 = 1;

fn first() -> u32 {
    FIRST
}

/// Versions of the two documents: of a source, what its documents need at least; of a destination, the newest
/// that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formats {
    /// Version of the configuration.
    #[serde(default = "first")]
    pub config: u32,
    /// Version of the machine state.
    #[serde(default = "first")]
    pub state: u32,
}

impl Default for Formats {
    fn default() -> Self {
        Self { config: FIRST, state: FIRST }
    }
}

impl Formats {
    /// Describes which of these versions are newer than `known`; `None` if none is.
    pub fn beyond(&self, known: Self) -> Option<String> {
        let pairs = [
            ("configuration", self.config, known.config),
            ("machine state", self.state, known.state),
        ];
        let words: Vec<String> = pairs
            .into_iter()
            .filter(|(_, needed, known)| needed > known)
            .map(|(what, needed, known)| {
                format!("a {what} of version {needed}, and the newest known there is {known}")
            })
            .collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn what_is_not_said_is_the_first_version() {
        let read = |text: &str| serde_json::from_str::<Formats>(text).unwrap();
        assert_eq!(read("{}"), Formats { config: 1, state: 1 });
        assert_eq!(read(r#"{"state":7,"later":{}}"#), Formats { config: 1, state: 7 });
    }

    #[test]
    fn what_goes_beyond_is_named_with_both_versions() {
        let (old, new) = (Formats::default(), Formats { config: 1, state: 3 });
        assert_eq!(old.beyond(new), None);
        assert_eq!(new.beyond(new), None);
        let words = new.beyond(old).unwrap();
        assert_eq!(words, "a machine state of version 3, and the newest known there is 1");
        let both = Formats { config: 2, state: 2 }.beyond(old).unwrap();
        assert!(
            both.contains("configuration of version 2") && both.contains("machine state"),
            "{both}"
        );
    }
}
