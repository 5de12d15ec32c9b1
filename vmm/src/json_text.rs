// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes JSON in a form that minimal parsers accept.
//!
//! Owns two ways of writing it. To a JSON parser both mean the same as any other: characters that such a reader
//! mishandles are escaped in strings. It must never know what is written.
//!
//! - Answers are ASCII: cloud-hypervisor's own client decodes an answer in pieces of 256 bytes, and aborts at a
//!   character that lies across the border of two.
//! - Events have no braces in strings, and are ASCII: libvirt finds the end of an event by
//!   counting braces.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

/// A formatter that writes strings in ASCII, optionally with braces escaped, and delegates the rest to
/// `inner`.
struct Escaping<F> {
    inner: F,
    braces: bool,
}

/// Delegates the methods for everything around values.
macro_rules! pass_on {
    ($($name:ident($($arg:ident: $ty:ty)?)),+ $(,)?) => {$(
        fn $name<W: ?Sized + Write>(&mut self, writer: &mut W $(, $arg: $ty)?) -> io::Result<()> {
            self.inner.$name(writer $(, $arg)?)
        }
    )+};
}

impl<F: Formatter> Formatter for Escaping<F> {
    pass_on! {
        begin_array(), end_array(), begin_array_value(first: bool), end_array_value(),
        begin_object(), end_object(), begin_object_key(first: bool), end_object_key(),
        begin_object_value(), end_object_value(),
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let braces = self.braces;
        let is_plain = |it: char| it.is_ascii() && (!braces || !matches!(it, '{' | '}'));
        let mut rest = fragment;
        while let Some(at) = rest.find(|it| !is_plain(it)) {
            let (plain, special) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let mut chars = special.chars();
            if let Some(escaped) = chars.next() {
                for unit in escaped.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
            rest = chars.as_str();
        }
        writer.write_all(rest.as_bytes())
    }
}

fn written<T: Serialize, F: Formatter>(
    value: &T,
    inner: F,
    braces: bool,
) -> serde_json::Result<Vec<u8>> {
    let mut text = Vec::new();
    let formatter = Escaping { inner, braces };
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))?;
    Ok(text)
}

/// Serialises an answer of the API.
///
/// # Errors
/// The value cannot be written as JSON.
pub fn answer<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    written(value, CompactFormatter, false)
}

/// Serialises an event, on several indented lines.
///
/// # Errors
/// The value cannot be written as JSON.
pub fn event<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    written(value, PrettyFormatter::new(), true)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn both_ways_mean_the_same_as_any_other() {
        let value = json!({
            "ü{}": ["", "a\"\\\n\u{1f}", "§ {x} ✓ 𝄞", [], {}],
            "numbers": [0, -1, 1.5, u64::MAX], "nothing": null, "yes": true,
        });
        for text in [answer(&value).unwrap(), event(&value).unwrap()] {
            assert!(text.is_ascii());
            assert_eq!(serde_json::from_slice::<Value>(&text).unwrap(), value);
        }
        assert_eq!(answer(&json!(["ä{𝄞"])).unwrap(), br#"["\u00e4{\ud834\udd1e"]"#);
        assert_eq!(event(&json!({"a": "}{"})).unwrap(), b"{\n  \"a\": \"\\u007d\\u007b\"\n}");
    }
}
