// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The keys of an option as `--help` shows them: each with its meaning, default, range and unit, on
//! lines that fit the terminal.
//!
//! Owns what is said of a key, here and in the man pages, and the layout of `--help`. Every word comes from the
//! definitions of the options; it must never contain text about a particular one.

use std::fmt::Write as _;

use clap::{Arg, ArgAction};
use vmm::config::Family;
use vmm::config::family::{FamilyInfo, FieldInfo};
use vmm::config::reference::help;

use super::terminal;

/// Line width if the terminal reports none, and the range within which its width is used.
const WIDTH_DEFAULT: usize = 80;
const WIDTH_MIN: usize = 40;
const WIDTH_MAX: usize = 100;

/// Indentation of the description of a key.
const INDENT: usize = 6;

/// Indentation of clap's long help of an option.
const CLAP_INDENT: usize = 10;

/// Line width for help texts: that of the terminal, if stdout is one.
pub fn width() -> usize {
    terminal::size().map_or(WIDTH_DEFAULT, |size| size.columns.clamp(WIDTH_MIN, WIDTH_MAX))
}

/// Text wrapped to lines of at most `width`, indented by `indent` spaces; a longer word has its own line.
pub fn wrapped(text: &str, indent: usize, width: usize) -> String {
    let (mut out, mut line) = (String::new(), String::new());
    let margin = " ".repeat(indent);
    let mut end = |line: &mut String| {
        if !line.is_empty() {
            let _ = writeln!(out, "{margin}{line}");
            line.clear();
        }
    };
    for word in text.split_whitespace() {
        if !line.is_empty() && indent + line.chars().count() + 1 + word.chars().count() > width {
            end(&mut line);
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    end(&mut line);
    out
}

/// The default as in an option string; `None` if there is none.
fn default_of(field: &FieldInfo) -> Option<String> {
    if field.spec.required_key {
        return Some("required".to_owned());
    }
    let json = field.default.as_deref()?.trim_matches('`');
    let text = match json {
        "null" | "\"\"" | "[]" => return None,
        "true" => "on",
        "false" => "off",
        other => other.trim_matches('"'),
    };
    Some(format!("default {}", text.to_ascii_lowercase()))
}

/// The unit, if the name of a key or its value syntax shows one.
fn unit_of(key: &str, value: Option<&str>) -> Option<&'static str> {
    match value {
        Some("<bytes>" | "<size>") => Some("bytes; K, M, G and T may follow the number"),
        _ if key.ends_with("_ms") => Some("milliseconds"),
        _ if key.ends_with("_us") => Some("microseconds"),
        _ if key.ends_with("_s") => Some("seconds"),
        _ => None,
    }
}

/// A key of an option string as the help and the man pages describe it.
pub struct KeyText {
    /// `key=value`, or a word alone; of several, any does.
    pub syntax: Vec<String>,
    /// Its meaning, with default, range and unit in brackets.
    pub meaning: String,
}

/// All keys of a family.
pub struct KeyTexts {
    /// Those that can be given.
    pub known: Vec<KeyText>,
    /// Those that this version refuses by name.
    pub refused: Vec<&'static str>,
}

/// Text on one line.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What is said of the keys of a family.
pub fn described(info: &FamilyInfo) -> KeyTexts {
    let mut texts = KeyTexts { known: Vec::new(), refused: Vec::new() };
    for field in info.fields.iter().filter(|field| !field.spec.hidden) {
        if field.spec.unsupported {
            texts.refused.extend(field.keys.iter().map(|key| key.key));
            continue;
        }
        let syntax: Vec<String> = field
            .keys
            .iter()
            .map(|key| key.value.map_or(key.key.to_owned(), |value| format!("{}={value}", key.key)))
            .collect();
        let Some(first) = field.keys.first() else { continue };
        let range = field.spec.range.map(|(min, max)| format!("{min} to {max}"));
        let unit = unit_of(first.key, first.value).map(str::to_owned);
        let facts: Vec<String> = [default_of(field), range, unit].into_iter().flatten().collect();
        let mut meaning = one_line(field.spec.help);
        if !facts.is_empty() {
            let _ = write!(meaning, " [{}]", facts.join("; "));
        }
        texts.known.push(KeyText { syntax, meaning });
    }
    texts
}

/// Descriptions of all keys of a family.
pub fn keys(info: &FamilyInfo, width: usize) -> String {
    let mut out = String::from("Keys (key=value,key=value):\n");
    let texts = described(info);
    for key in texts.known {
        let _ = writeln!(out, "  {}", key.syntax.join(" | "));
        out.push_str(&wrapped(&key.meaning, INDENT, width));
    }
    if !texts.refused.is_empty() {
        let text = format!("Not supported by this version: {}", texts.refused.join(", "));
        out.push_str(&wrapped(&text, 2, width));
    }
    out.truncate(out.trim_end().len());
    out
}

/// Description of a family in one line.
pub fn about(info: &FamilyInfo) -> String {
    one_line(info.about).trim_end_matches('.').to_owned()
}

/// The option of `cloud-hypervisor` for a family: its syntax with `-h`, its keys with `--help`. Building
/// the texts takes time, and is skipped when a VM is started.
pub fn option<T: Family>(name: &'static str, with_help: bool) -> Arg {
    let arg = Arg::new(name).long(name).num_args(1).value_name("OPTIONS");
    if !with_help {
        return arg.help("");
    }
    let info = T::info();
    let long = format!("{}\n{}", about(&info), keys(&info, width().saturating_sub(CLAP_INDENT)));
    arg.help(help::<T>()).long_help(long)
}

/// The same for an option that may be given several times.
pub fn list<T: Family>(name: &'static str, with_help: bool) -> Arg {
    option::<T>(name, with_help).num_args(1..).action(ArgAction::Append)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use vmm::config::SendMigrationData;
    use vmm::config::reference::families;

    use super::*;

    #[test]
    fn every_key_of_every_family_is_told_on_lines_that_fit() {
        for width in [WIDTH_MIN, 80] {
            for info in families() {
                let text = keys(&info, width);
                for field in info.fields.iter().filter(|field| !field.spec.hidden) {
                    for key in &field.keys {
                        assert!(text.contains(key.key), "{}: {}", info.name, key.key);
                    }
                }
                // The syntax of a value is one word, however long.
                let long = |line: &&str| line.chars().count() > width && !line.starts_with("  ");
                assert_eq!(text.lines().find(long), None, "{}", info.name);
                let told = text.lines().filter(|line| line.starts_with("      "));
                let wide = |line: &&str| line.chars().count() > width && line.trim().contains(' ');
                assert_eq!(told.clone().find(wide), None, "{}", info.name);
            }
        }
    }

    #[test]
    fn a_key_has_meaning_default_range_and_unit() {
        let text = keys(&SendMigrationData::info(), 80);
        let at = text.find("\n  downtime_ms=").unwrap();
        let entry: String = text[at..].lines().skip(2).take(3).collect::<Vec<_>>().join(" ");
        let entry = entry.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            entry.starts_with(
                "Downtime in milliseconds that precopy aims at. [default 300; 1 to 86400000; \
                 milliseconds]"
            ),
            "{entry}"
        );
        assert!(text.contains("[default precopy]") && text.contains("[required]"), "{text}");
    }

    #[test]
    fn words_are_kept_whole() {
        assert_eq!(wrapped("one two three", 2, 9), "  one two\n  three\n");
        assert_eq!(wrapped("a-word-that-is-too-long b", 0, 5), "a-word-that-is-too-long\nb\n");
        assert_eq!(wrapped("", 2, 9), "");
    }
}
