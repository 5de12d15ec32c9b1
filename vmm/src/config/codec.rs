// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Text forms of option values. A [`ValueCodec`] parses and prints one value; a
//! [`Codec`] ties it to its key or keys.
//!
//! Owns the text forms (`on|off`, `1G`, `[0-3]`, `[1@20]`). Every parser is bounded: a short text
//! can never make a long list. It must never know a family.

use std::net::IpAddr;
use std::path::PathBuf;

use super::option_string::{KeySyntax, OptionError, Options, Printer, list_items, quote, unquote};
use super::value::MacAddr;

/// Maximum number of entries of a list in an option string; more CPUs than any host has.
pub const MAX_LIST_ENTRIES: usize = 8192;

/// Parses and prints one value of an option string.
pub trait ValueCodec<T> {
    /// Placeholder for the value in help texts.
    const SYNTAX: &'static str;

    /// Parses the raw value; the error says what is expected.
    fn parse(raw: &str) -> Result<T, String>;

    /// Prints the value in a form that `parse` accepts.
    fn print(value: &T) -> String;
}

/// Maps a field to its key or keys in the option string.
pub trait Codec<T> {
    /// The keys of the field.
    fn keys(key: &'static str) -> Vec<KeySyntax>;

    /// Parses the field's value; `None` if the key was not given.
    fn take(key: &'static str, options: &Options<'_>) -> Result<Option<T>, OptionError>;

    /// Prints the field as keys and values.
    fn put(key: &'static str, value: &T, out: &mut Printer);
}

/// A field with one key that always has a value.
#[derive(Debug)]
pub struct One<C>(std::marker::PhantomData<C>);

/// A field with one key and an optional value.
#[derive(Debug)]
pub struct Opt<C>(std::marker::PhantomData<C>);

/// A field that exists in JSON only.
#[derive(Debug)]
pub struct JsonOnly;

fn take_one<T, C: ValueCodec<T>>(
    key: &'static str,
    options: &Options<'_>,
) -> Result<Option<T>, OptionError> {
    let Some(raw) = options.raw(key) else { return Ok(None) };
    C::parse(raw).map(Some).map_err(|reason| options.bad_value(key, reason))
}

impl<T, C: ValueCodec<T>> Codec<T> for One<C> {
    fn keys(key: &'static str) -> Vec<KeySyntax> {
        vec![KeySyntax { key, value: Some(C::SYNTAX) }]
    }

    fn take(key: &'static str, options: &Options<'_>) -> Result<Option<T>, OptionError> {
        take_one::<T, C>(key, options)
    }

    fn put(key: &'static str, value: &T, out: &mut Printer) {
        out.pair(key, &C::print(value));
    }
}

impl<T, C: ValueCodec<T>> Codec<Option<T>> for Opt<C> {
    fn keys(key: &'static str) -> Vec<KeySyntax> {
        vec![KeySyntax { key, value: Some(C::SYNTAX) }]
    }

    fn take(key: &'static str, options: &Options<'_>) -> Result<Option<Option<T>>, OptionError> {
        Ok(take_one::<T, C>(key, options)?.map(Some))
    }

    fn put(key: &'static str, value: &Option<T>, out: &mut Printer) {
        if let Some(value) = value {
            out.pair(key, &C::print(value));
        }
    }
}

impl<T> Codec<T> for JsonOnly {
    fn keys(_key: &'static str) -> Vec<KeySyntax> {
        Vec::new()
    }

    fn take(_key: &'static str, _options: &Options<'_>) -> Result<Option<T>, OptionError> {
        Ok(None)
    }

    fn put(_key: &'static str, _value: &T, _out: &mut Printer) {}
}

/// `on|off`, also `true|false`.
#[derive(Debug)]
pub struct Toggle;

impl ValueCodec<bool> for Toggle {
    const SYNTAX: &'static str = "on|off";

    fn parse(raw: &str) -> Result<bool, String> {
        match raw.to_ascii_lowercase().as_str() {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            _ => Err("expected on or off".to_owned()),
        }
    }

    fn print(value: &bool) -> String {
        if *value { "on" } else { "off" }.to_owned()
    }
}

/// A decimal number.
#[derive(Debug)]
pub struct Int;

/// A decimal number, or a hexadecimal one with `0x`.
#[derive(Debug)]
pub struct Port;

macro_rules! integer_codecs {
    ($($ty:ty),+) => {$(
        impl ValueCodec<$ty> for Int {
            const SYNTAX: &'static str = "<number>";

            fn parse(raw: &str) -> Result<$ty, String> {
                raw.parse().map_err(|_| format!("expected a whole number up to {}", <$ty>::MAX))
            }

            fn print(value: &$ty) -> String {
                value.to_string()
            }
        }
    )+};
}

integer_codecs!(u8, u16, u32, u64);

impl ValueCodec<u16> for Port {
    const SYNTAX: &'static str = "<port>";

    fn parse(raw: &str) -> Result<u16, String> {
        let number = match raw.strip_prefix("0x") {
            Some(hex) => u16::from_str_radix(hex, 16),
            None => raw.parse(),
        };
        number.map_err(|_| "expected an I/O port, such as 0xe9".to_owned())
    }

    fn print(value: &u16) -> String {
        format!("{value:#x}")
    }
}

/// A number of bytes, with `K`, `M`, `G` or `T` for powers of 1024.
#[derive(Debug)]
pub struct Bytes;

impl ValueCodec<u64> for Bytes {
    const SYNTAX: &'static str = "<bytes>";

    fn parse(raw: &str) -> Result<u64, String> {
        const EXPECTED: &str = "expected a number of bytes, with K, M, G or T for powers of 1024";
        let (digits, shift) = match raw.as_bytes().last() {
            Some(b'K') => (&raw[..raw.len() - 1], 10),
            Some(b'M') => (&raw[..raw.len() - 1], 20),
            Some(b'G') => (&raw[..raw.len() - 1], 30),
            Some(b'T') => (&raw[..raw.len() - 1], 40),
            _ => (raw, 0),
        };
        let number: u64 = digits.parse().map_err(|_| EXPECTED.to_owned())?;
        number.checked_mul(1 << shift).ok_or_else(|| "the size is too large".to_owned())
    }

    fn print(value: &u64) -> String {
        for (suffix, shift) in [("T", 40), ("G", 30), ("M", 20), ("K", 10)] {
            if *value != 0 && value.trailing_zeros() >= shift {
                return format!("{}{suffix}", value >> shift);
            }
        }
        value.to_string()
    }
}

/// Any text.
#[derive(Debug)]
pub struct Text;

impl ValueCodec<String> for Text {
    const SYNTAX: &'static str = "<text>";

    fn parse(raw: &str) -> Result<String, String> {
        Ok(unquote(raw))
    }

    fn print(value: &String) -> String {
        quote(value)
    }
}

/// An identifier.
#[derive(Debug)]
pub struct Id;

impl ValueCodec<String> for Id {
    const SYNTAX: &'static str = "<id>";

    fn parse(raw: &str) -> Result<String, String> {
        Ok(unquote(raw))
    }

    fn print(value: &String) -> String {
        quote(value)
    }
}

/// A path.
#[derive(Debug)]
pub struct File;

impl ValueCodec<PathBuf> for File {
    const SYNTAX: &'static str = "<path>";

    fn parse(raw: &str) -> Result<PathBuf, String> {
        Ok(PathBuf::from(unquote(raw)))
    }

    fn print(value: &PathBuf) -> String {
        quote(&value.to_string_lossy())
    }
}

/// Text in the format of the type's `FromStr` and `Display`.
#[derive(Debug)]
pub struct Address;

impl ValueCodec<IpAddr> for Address {
    const SYNTAX: &'static str = "<ip_address>";

    fn parse(raw: &str) -> Result<IpAddr, String> {
        unquote(raw).parse().map_err(|_| "expected an IPv4 or IPv6 address".to_owned())
    }

    fn print(value: &IpAddr) -> String {
        value.to_string()
    }
}

impl ValueCodec<MacAddr> for Address {
    const SYNTAX: &'static str = "<mac_address>";

    fn parse(raw: &str) -> Result<MacAddr, String> {
        raw.parse().map_err(str::to_owned)
    }

    fn print(value: &MacAddr) -> String {
        value.to_string()
    }
}

/// An enum whose values have their own names in option strings.
pub trait OptionEnum: Copy + PartialEq + 'static {
    /// The choices in help texts, such as `acpi|virtio-mem`.
    const SYNTAX: &'static str;
    /// The values with their names.
    const NAMES: &'static [(Self, &'static str)];
}

/// One of a fixed set of names.
#[derive(Debug)]
pub struct Choice;

impl<T: OptionEnum> ValueCodec<T> for Choice {
    const SYNTAX: &'static str = T::SYNTAX;

    fn parse(raw: &str) -> Result<T, String> {
        let lower = raw.to_ascii_lowercase();
        T::NAMES
            .iter()
            .find(|(_, name)| *name == lower)
            .map(|(value, _)| *value)
            .ok_or_else(|| format!("expected {}", T::SYNTAX))
    }

    fn print(value: &T) -> String {
        T::NAMES
            .iter()
            .find(|(candidate, _)| candidate == value)
            .map(|(_, name)| (*name).to_owned())
            .unwrap_or_default()
    }
}

/// A list of numbers and ranges, `[0-3,8]`.
#[derive(Debug)]
pub struct IntList;

fn parse_int_list(raw: &str) -> Result<Vec<u64>, String> {
    const EXPECTED: &str = "expected a list of numbers and ranges, like [0-3,8]";
    let mut out = Vec::new();
    for item in list_items(raw).ok_or(EXPECTED)? {
        let (first, last) = match item.split_once('-') {
            Some((first, last)) => (first.trim(), last.trim()),
            None => (item, item),
        };
        let first: u64 = first.parse().map_err(|_| EXPECTED)?;
        let last: u64 = last.parse().map_err(|_| EXPECTED)?;
        let count = last.checked_sub(first).ok_or("a range must not run backwards")?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count >= MAX_LIST_ENTRIES.saturating_sub(out.len()) {
            return Err(format!("a list has at most {MAX_LIST_ENTRIES} entries"));
        }
        out.extend(first..=last);
    }
    Ok(out)
}

macro_rules! int_list_codecs {
    ($($ty:ty),+) => {$(
        impl ValueCodec<Vec<$ty>> for IntList {
            const SYNTAX: &'static str = "<list_of_numbers>";

            fn parse(raw: &str) -> Result<Vec<$ty>, String> {
                parse_int_list(raw)?
                    .into_iter()
                    .map(|n| <$ty>::try_from(n).map_err(|_| format!("{n} is too large")))
                    .collect()
            }

            fn print(value: &Vec<$ty>) -> String {
                let items: Vec<_> = value.iter().map(ToString::to_string).collect();
                format!("[{}]", items.join(","))
            }
        }
    )+};
}

int_list_codecs!(u16, u32, u64);

/// A list of texts, `[a,"b,c"]`.
#[derive(Debug)]
pub struct TextList;

impl ValueCodec<Vec<String>> for TextList {
    const SYNTAX: &'static str = "<list_of_texts>";

    fn parse(raw: &str) -> Result<Vec<String>, String> {
        let items = list_items(raw).ok_or("expected a list of texts, like [a,b]")?;
        Ok(items.into_iter().map(unquote).collect())
    }

    fn print(value: &Vec<String>) -> String {
        let items: Vec<_> = value.iter().map(|item| quote(item)).collect();
        format!("[{}]", items.join(","))
    }
}

/// Splits `[left@right,...]`.
pub fn pair_items(raw: &str) -> Option<Vec<(&str, &str)>> {
    list_items(raw)?
        .into_iter()
        .map(|item| item.split_once('@').map(|(left, right)| (left.trim(), right.trim())))
        .collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn a_list_of_numbers_has_an_end_before_it_is_made() {
        let parsed = |text: &str| parse_int_list(text).map(|list| list.len());
        assert_eq!(parsed("[0-8191]"), Ok(8192));
        for text in ["[0-8192]", "[0-8191,0]", "[0-18446744073709551615]", "[1-4096,1-4096,7]"] {
            assert_eq!(parsed(text), Err("a list has at most 8192 entries".to_owned()), "{text}");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("0", 0), ("1", 1), ("4K", 4096), ("512M", 512 << 20), ("1G", 1 << 30)]
        {
            assert_eq!(Bytes::parse(text).unwrap(), bytes);
            assert_eq!(Bytes::print(&bytes), text);
        }
        for bad in ["", "K", "1KK", "-1", "1 G", "16777216T", "1.5G", "0x10"] {
            assert!(Bytes::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn integer_lists_are_bounded() {
        let parse = <IntList as ValueCodec<Vec<u32>>>::parse;
        assert_eq!(parse("[0-3,8]").unwrap(), [0, 1, 2, 3, 8]);
        assert_eq!(parse("7").unwrap(), [7]);
        assert_eq!(parse("[]").unwrap(), Vec::<u32>::new());
        for bad in ["[3-1]", "[0-18446744073709551615]", "[0-8192]", "[a]", "[1-]", "[4294967296]"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn toggles_and_ports() {
        assert!(Toggle::parse("ON").unwrap() && !Toggle::parse("false").unwrap());
        assert!(Toggle::parse("1").is_err());
        assert_eq!(Port::parse("0xe9").unwrap(), 0xe9);
        assert_eq!(Port::parse("233").unwrap(), 0xe9);
        assert!(Port::parse("0x1ffff").is_err());
    }

    #[test]
    fn text_lists_keep_commas_and_quotes() {
        let list = vec!["a".to_owned(), "b,c".to_owned(), String::new(), "say \"x\"".to_owned()];
        assert_eq!(TextList::parse(&TextList::print(&list)).unwrap(), list);
    }
}
