// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `prefault=on|off|background`: when guest memory is populated.
//!
//! Owns its two forms. JSON has a boolean, as existing clients use it, or the word `"background"`. It must never know what memory is.

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::codec::ValueCodec;
use super::value::FieldValue;

const BACKGROUND: &str = "background";

/// When guest memory is populated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefault {
    /// On first access.
    #[default]
    Off,
    /// Entirely, before the guest's first instruction.
    Boot,
    /// Entirely, in the background while the guest runs.
    Background,
}

/// The value in option strings.
#[derive(Debug)]
pub struct PrefaultWord;

impl ValueCodec<Prefault> for PrefaultWord {
    const SYNTAX: &'static str = "on|off|background";

    fn parse(raw: &str) -> Result<Prefault, String> {
        match raw.to_ascii_lowercase().as_str() {
            "on" | "true" => Ok(Prefault::Boot),
            "off" | "false" => Ok(Prefault::Off),
            BACKGROUND => Ok(Prefault::Background),
            _ => Err(format!("expected {}", Self::SYNTAX)),
        }
    }

    fn print(value: &Prefault) -> String {
        match value {
            Prefault::Off => "off",
            Prefault::Boot => "on",
            Prefault::Background => BACKGROUND,
        }
        .to_owned()
    }
}

impl Serialize for Prefault {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::Boot => serializer.serialize_bool(true),
            Self::Background => serializer.serialize_str(BACKGROUND),
        }
    }
}

struct Word;

impl Visitor<'_> for Word {
    type Value = Prefault;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("true, false or \"background\"")
    }

    fn visit_bool<E: de::Error>(self, on: bool) -> Result<Prefault, E> {
        Ok(if on { Prefault::Boot } else { Prefault::Off })
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<Prefault, E> {
        match word {
            BACKGROUND => Ok(Prefault::Background),
            other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
        }
    }
}

impl<'de> Deserialize<'de> for Prefault {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Word)
    }
}

impl FieldValue for Prefault {
    fn schema() -> RefOr<Schema> {
        // Generated clients send and expect a boolean.
        bool::schema()
    }

    fn type_name() -> String {
        "boolean, \"background\"".to_owned()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn each_value_survives_both_forms() {
        for (value, word, json) in [
            (Prefault::Off, "off", "false"),
            (Prefault::Boot, "on", "true"),
            (Prefault::Background, "background", "\"background\""),
        ] {
            assert_eq!(PrefaultWord::parse(word), Ok(value));
            assert_eq!(PrefaultWord::print(&value), word);
            assert_eq!(serde_json::to_string(&value).unwrap(), json);
            assert_eq!(serde_json::from_str::<Prefault>(json).unwrap(), value);
        }
        assert!(PrefaultWord::parse("later").is_err());
        for json in ["\"on\"", "1", "null", "[]"] {
            assert!(serde_json::from_str::<Prefault>(json).is_err(), "{json}");
        }
    }
}
