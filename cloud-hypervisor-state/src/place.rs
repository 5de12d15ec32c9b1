// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where in a JSON text a parser stopped, as the path of a value.
//!
//! Owns only that: the text need not be valid, and nothing of it is interpreted.

/// Maximum number of characters of a key in a path, and of levels.
const KEY_CHARS_MAX: usize = 48;
const LEVELS_MAX: usize = 16;

enum Level {
    /// In an object; the key of the present value, once it is known.
    Object(Option<String>),
    /// In a list; the index of the present value.
    List(usize),
}

/// The path of the value at `line` and `column`, as the parser counts them, such as `queues[3].size`; empty for the
/// text as a whole.
pub(crate) fn path_at(text: &str, line: usize, column: usize) -> String {
    let before = line.saturating_sub(1);
    let line_start: usize = text.split_inclusive('\n').take(before).map(str::len).sum();
    let end = line_start.saturating_add(column).min(text.len());
    let levels = levels_at(text.as_bytes().get(..end).unwrap_or_default());
    let mut path = String::new();
    for level in levels.into_iter().take(LEVELS_MAX) {
        match level {
            Level::Object(Some(key)) if path.is_empty() => path = key,
            Level::Object(Some(key)) => path = format!("{path}.{key}"),
            Level::Object(None) => {}
            Level::List(index) => path = format!("{path}[{index}]"),
        }
    }
    path
}

fn levels_at(text: &[u8]) -> Vec<Level> {
    let mut levels = Vec::new();
    let mut string: Option<Vec<u8>> = None;
    let (mut in_string, mut is_escaped) = (false, false);
    for &byte in text {
        if in_string {
            match byte {
                b'"' if !is_escaped => in_string = false,
                _ => string.get_or_insert_default().push(byte),
            }
            is_escaped = byte == b'\\' && !is_escaped;
            continue;
        }
        match byte {
            b'"' => {
                in_string = true;
                string = Some(Vec::new());
            }
            b'{' => levels.push(Level::Object(None)),
            b'[' => levels.push(Level::List(0)),
            b'}' | b']' => drop(levels.pop()),
            b':' => {
                if let (Some(Level::Object(key)), Some(name)) = (levels.last_mut(), string.take()) {
                    *key = Some(printable(&String::from_utf8_lossy(&name), KEY_CHARS_MAX));
                }
            }
            b',' => match levels.last_mut() {
                Some(Level::Object(key)) => *key = None,
                Some(Level::List(index)) => *index = index.saturating_add(1),
                None => {}
            },
            _ => {}
        }
    }
    levels
}

/// The first characters of a text, those that cannot be printed as escapes.
pub(crate) fn printable(text: &str, chars_max: usize) -> String {
    let escaped = |c: char| {
        let escape = c.is_control().then(|| c.escape_default());
        let plain = (!c.is_control()).then_some(c);
        escape.into_iter().flatten().chain(plain)
    };
    text.chars().take(chars_max).flat_map(escaped).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn the_path_leads_to_the_value() {
        let text = "{\"a\":[1,\n{\"b\\\"{\":[2,3],\"c\":{\"d\":7}}],\"e\":0}";
        let at = |mark: &str| {
            let end = text.find(mark).unwrap() + mark.len();
            let lines = text[..end].matches('\n').count();
            let column = end - text[..end].rfind('\n').map_or(0, |at| at + 1);
            path_at(text, lines + 1, column)
        };
        assert_eq!(at("[1"), "a[0]");
        assert_eq!(at("3"), "a[1].b\\\"{[1]");
        assert_eq!(at("7"), "a[1].c.d");
        assert_eq!(at("e\":0"), "e");
        assert_eq!(path_at("", 9, 9), "");
        assert_eq!(path_at("}}]{", 1, 4), "");
    }

    #[test]
    fn what_cannot_be_printed_is_escaped() {
        assert_eq!(printable("a\nb\u{7f}é", 9), "a\\nb\\u{7f}é");
        assert_eq!(printable("abcd", 2), "ab");
    }
}
