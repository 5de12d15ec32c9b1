// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The outer form of an option string: `key=value,flag,key=[a,b],key="x,y"`.
//!
//! Owns splitting, quoting, the error for an unknown key, and the printer that is the exact
//! inverse. It must never know what a key means, and never panic on any input.
//!
//! Rules: commas inside `[...]` or `"..."` do not separate; inside quotes `""` is a literal quote;
//! an unquoted empty value (`key=`) means "not given"; of a key given twice the last one counts.

use std::fmt::Write as _;

use thiserror::Error;

/// Why an option string is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OptionError {
    /// Brackets or quotes do not match up.
    #[error("'{text}' has unbalanced brackets or quotes")]
    Unbalanced {
        /// The whole option string.
        text: String,
    },
    /// The family has no such key.
    #[error("'{key}' is not an option of {family}{hint}")]
    UnknownKey {
        /// Family name, as in `--disk`.
        family: &'static str,
        /// The key as written.
        key: String,
        /// Empty, or a suggestion that starts with a comma.
        hint: String,
    },
    /// A key lacks its value, or a flag has one.
    #[error("'{key}' of {family} {problem}")]
    Shape {
        /// Family name.
        family: &'static str,
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The value of a key is invalid.
    #[error("'{value}' is not a valid {family} {key}: {reason}")]
    BadValue {
        /// Family name.
        family: &'static str,
        /// The key.
        key: String,
        /// The value as written.
        value: String,
        /// What is expected.
        reason: String,
    },
    /// A required key is missing.
    #[error("{family} needs {what}")]
    Missing {
        /// Family name.
        family: &'static str,
        /// The key or the choice of keys.
        what: String,
    },
}

/// A key of a family with the placeholder for its value in help texts (`None`: a bare flag).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeySyntax {
    /// The key.
    pub key: &'static str,
    /// Placeholder or choice, such as `<bytes>` or `on|off`.
    pub value: Option<&'static str>,
}

/// An option string split into keys and raw values, with the keys checked against a family.
#[derive(Debug)]
pub struct Options<'a> {
    family: &'static str,
    items: Vec<(&'a str, Option<&'a str>)>,
}

impl<'a> Options<'a> {
    /// Splits `text` and refuses keys that are not in `known`.
    pub fn split(
        family: &'static str,
        text: &'a str,
        known: &[KeySyntax],
    ) -> Result<Self, OptionError> {
        let mut items = Vec::new();
        if text.trim().is_empty() {
            return Ok(Self { family, items });
        }
        let parts = split_commas(text.trim())
            .ok_or_else(|| OptionError::Unbalanced { text: text.to_owned() })?;
        for part in parts {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim())),
                None => (part.trim(), None),
            };
            let Some(syntax) = known.iter().find(|syntax| syntax.key == key) else {
                return Err(unknown_key(family, key, known));
            };
            let problem = match (syntax.value, value) {
                (Some(_), None) => Some("needs a value (key=value)"),
                (None, Some(_)) => Some("takes no value"),
                _ => None,
            };
            if let Some(problem) = problem {
                return Err(OptionError::Shape { family, key: key.to_owned(), problem });
            }
            if items.iter().any(|(seen, _)| *seen == key) {
                log::warn!("{family}: '{key}' is given more than once; the last one is used");
            }
            items.push((key, value));
        }
        Ok(Self { family, items })
    }

    /// The family that these options belong to.
    pub fn family(&self) -> &'static str {
        self.family
    }

    /// Whether `key` was given, as a flag or with a non-empty value.
    pub fn is_set(&self, key: &str) -> bool {
        let last = self.items.iter().rev().find(|(item, _)| *item == key);
        last.is_some_and(|(_, value)| *value != Some(""))
    }

    /// The raw (still quoted) value of `key`; an empty value counts as not given.
    pub fn raw(&self, key: &str) -> Option<&'a str> {
        let (_, value) = self.items.iter().rev().find(|(item, _)| *item == key)?;
        value.filter(|value| !value.is_empty())
    }

    /// The error for an invalid value of `key`.
    pub fn bad_value(&self, key: &str, reason: impl Into<String>) -> OptionError {
        OptionError::BadValue {
            family: self.family,
            key: key.to_owned(),
            value: self.raw(key).unwrap_or_default().to_owned(),
            reason: reason.into(),
        }
    }
}

fn unknown_key(family: &'static str, key: &str, known: &[KeySyntax]) -> OptionError {
    let nearest = known
        .iter()
        .filter(|syntax| !syntax.key.starts_with('_'))
        .map(|syntax| (edit_distance(key, syntax.key), syntax.key))
        .min();
    let hint = match nearest {
        Some((distance, name)) if distance <= 3 && distance < name.len() => {
            format!(", did you mean '{name}'?")
        }
        _ => {
            let names: Vec<_> =
                known.iter().map(|s| s.key).filter(|key| !key.starts_with('_')).collect();
            format!(" (known: {})", names.join(", "))
        }
    };
    OptionError::UnknownKey { family, key: key.to_owned(), hint }
}

/// Maximum length of an unknown key that is compared with the known ones for a suggestion.
const MAX_COMPARED_KEY_BYTES: usize = 64;

/// Edit distance between two keys in bytes.
fn edit_distance(left: &str, right: &str) -> usize {
    if left.len() > MAX_COMPARED_KEY_BYTES {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, l) in left.bytes().enumerate() {
        let mut diagonal = i;
        let mut previous = i + 1;
        for (cell, r) in row.iter_mut().skip(1).zip(right.bytes()) {
            let above = *cell;
            previous = (previous + 1).min(above + 1).min(diagonal + usize::from(l != r));
            diagonal = above;
            *cell = previous;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}

/// Splits at commas outside brackets and quotes; `None` if those do not match up.
pub fn split_commas(text: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    let (mut start, mut depth, mut quoted) = (0_usize, 0_usize, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'[' => depth += 1,
            b']' => depth = depth.checked_sub(1)?,
            b',' if depth == 0 => {
                parts.push(text.get(start..at)?);
                start = at + 1;
            }
            _ => {}
        }
    }
    if quoted || depth != 0 {
        return None;
    }
    parts.push(text.get(start..)?);
    Some(parts)
}

/// Removes the quotes of a raw value.
pub fn unquote(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len());
    let mut quoted = false;
    let mut chars = raw.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                out.push('"');
            }
            '"' => quoted = !quoted,
            _ => out.push(c),
        }
    }
    out
}

/// Writes `text` so that [`unquote`] after [`split_commas`] returns it.
pub fn quote(text: &str) -> String {
    let plain = !text.is_empty() && text.trim() == text && !text.contains([',', '[', ']', '"']);
    if plain { text.to_owned() } else { format!("\"{}\"", text.replace('"', "\"\"")) }
}

/// The items of a bracketed list `[a,b]`; a single item needs no brackets.
pub fn list_items(raw: &str) -> Option<Vec<&str>> {
    let raw = raw.trim();
    let inner = match (raw.strip_prefix('['), raw.ends_with(']')) {
        (Some(rest), true) => rest.strip_suffix(']')?,
        (None, _) => raw,
        (Some(_), false) => return None,
    };
    if inner.trim().is_empty() {
        return Some(Vec::new());
    }
    Some(split_commas(inner)?.into_iter().map(str::trim).collect())
}

/// Collects `key=value` pairs into an option string.
#[derive(Debug, Default)]
pub struct Printer {
    text: String,
}

impl Printer {
    /// Adds a bare flag.
    pub fn flag(&mut self, key: &str) {
        self.separate();
        self.text.push_str(key);
    }

    /// Adds `key=value`; the value must already be quoted where that is needed.
    pub fn pair(&mut self, key: &str, value: &str) {
        self.separate();
        // Writing to a String cannot fail.
        let _ = write!(self.text, "{key}={value}");
    }

    /// The option string.
    pub fn finish(self) -> String {
        self.text
    }

    fn separate(&mut self) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use proptest::prelude::*;

    use super::*;

    const KEYS: &[KeySyntax] = &[
        KeySyntax { key: "path", value: Some("<path>") },
        KeySyntax { key: "readonly", value: Some("on|off") },
        KeySyntax { key: "tty", value: None },
    ];

    #[test]
    fn unknown_key_names_family_key_and_nearest() {
        let error = Options::split("disk", "path=/a,readonyl=on", KEYS).unwrap_err();
        assert_eq!(
            error.to_string(),
            "'readonyl' is not an option of disk, did you mean 'readonly'?"
        );
        let error = Options::split("disk", "quite-something-else=1", KEYS).unwrap_err();
        assert!(error.to_string().ends_with("(known: path, readonly, tty)"), "{error}");
    }

    #[test]
    fn shape_errors_and_balance() {
        assert!(matches!(Options::split("d", "path", KEYS), Err(OptionError::Shape { .. })));
        assert!(matches!(Options::split("d", "tty=1", KEYS), Err(OptionError::Shape { .. })));
        for text in ["path=[1,2", "path=1]", "path=\"a"] {
            assert!(
                matches!(Options::split("d", text, KEYS), Err(OptionError::Unbalanced { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn last_of_a_repeated_key_counts_and_values_may_hold_equals() {
        let options = Options::split("d", "path=/a,path=/b=c,tty", KEYS).unwrap();
        assert_eq!(options.raw("path"), Some("/b=c"));
        assert!(options.is_set("tty") && !options.is_set("readonly"));
        assert_eq!(Options::split("d", "path=", KEYS).unwrap().raw("path"), None);
    }

    #[test]
    fn an_empty_value_takes_back_an_earlier_one() {
        let options = Options::split("d", "path=/a,path=", KEYS).unwrap();
        assert_eq!((options.raw("path"), options.is_set("path")), (None, false));
        let options = Options::split("d", "path=,path=/a", KEYS).unwrap();
        assert_eq!((options.raw("path"), options.is_set("path")), (Some("/a"), true));
    }

    #[test]
    fn lists_with_and_without_brackets() {
        assert_eq!(list_items("[a,[1,2],\"x,y\"]").unwrap(), ["a", "[1,2]", "\"x,y\""]);
        assert_eq!(list_items("a").unwrap(), ["a"]);
        assert!(list_items("[]").unwrap().is_empty());
    }

    #[test]
    fn edit_distance_counts_edits() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("abc", "abc"), 0);
    }

    /// Whether brackets and quotes match up; those in quotes are text.
    fn is_balanced(text: &str) -> bool {
        let pieces: Vec<&str> = text.split('"').collect();
        let outside: String = pieces.iter().step_by(2).copied().collect();
        let mut rest = outside.replace(|c| c != '[' && c != ']', "");
        while rest.contains("[]") {
            rest = rest.replace("[]", "");
        }
        rest.is_empty() && pieces.len() % 2 == 1
    }

    proptest! {
        #[test]
        fn quoting_is_undone_by_unquoting(text in ".{0,40}") {
            let quoted = quote(&text);
            let parts = split_commas(&quoted).unwrap();
            prop_assert_eq!(parts.len(), 1);
            prop_assert_eq!(unquote(parts[0].trim()), text);
        }

        #[test]
        fn what_is_split_is_all_of_the_text(text in "[a-c=,\\[\\]\" ]{0,30}") {
            let parts = split_commas(&text);
            prop_assert_eq!(parts.is_some(), is_balanced(&text));
            let Some(parts) = parts else { return Ok(()) };
            prop_assert_eq!(parts.join(","), &text[..]);
            for part in parts {
                prop_assert!(is_balanced(part), "{:?}", part);
                prop_assert_eq!(split_commas(part), Some(vec![part]), "no comma of its own");
            }
        }

        #[test]
        fn a_list_is_split_into_all_that_is_in_it(
            text in "[a-c,\\[\\]\" ]{0,30}", is_bracketed: bool,
        ) {
            let list = if is_bracketed { format!(" [{text}]") } else { text.clone() };
            let inner = if is_bracketed { &text[..] } else { text.trim() };
            match list_items(&list) {
                Some(items) if inner.trim().is_empty() => prop_assert!(items.is_empty()),
                Some(items) if is_bracketed || !inner.starts_with('[') => {
                    let parts = split_commas(inner).unwrap_or_default();
                    let trimmed: Vec<_> = parts.into_iter().map(str::trim).collect();
                    prop_assert_eq!(items, trimmed);
                }
                Some(items) => {
                    prop_assert!(inner.ends_with(']'));
                    prop_assert!(items.iter().all(|item| inner.contains(item)));
                }
                None if is_bracketed => prop_assert!(!is_balanced(inner)),
                None => prop_assert!(!is_balanced(inner) || inner.starts_with('[')),
            }
        }

        #[test]
        fn options_are_what_is_between_the_commas(
            keys in prop::collection::vec("path=[a-c/]{0,3}|readonly=(on|off)|tty|path|tty=1|[a-z]{1,6}", 1..5),
            end in "|\\[|\"",
        ) {
            let text = format!("{}{end}", keys.join(","));
            let known = |part: &String| {
                part == "tty" || part.starts_with("path=") || part.starts_with("readonly=")
            };
            match Options::split("x", &text, KEYS) {
                Ok(options) => {
                    let written = |(key, value): &(&str, Option<&str>)| {
                        value.map_or((*key).to_owned(), |value| format!("{key}={value}"))
                    };
                    let items: Vec<_> = options.items.iter().map(written).collect();
                    prop_assert_eq!(&items, &keys);
                    prop_assert!(keys.iter().all(known));
                }
                Err(OptionError::Unbalanced { text: named }) => {
                    prop_assert!(!end.is_empty() && named == text);
                }
                Err(OptionError::Shape { key, .. }) => {
                    let with_value = format!("{key}=1");
                    prop_assert!(keys.contains(&key) || keys.contains(&with_value));
                }
                Err(OptionError::UnknownKey { key, .. }) => {
                    prop_assert!(keys.contains(&key) && !KEYS.iter().any(|it| it.key == key));
                }
                Err(other) => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
