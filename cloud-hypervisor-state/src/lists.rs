// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Lists of bounded and of fixed length, maps with unique names, and structures of the kernel as bytes.
//!
//! Owns the bounds: a list that is too long is refused at the first element beyond its limit.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// Maximum length of a name in bytes: ids of devices and zones.
pub(crate) const NAME_BYTES_MAX: usize = 256;

/// A list has more elements than a document can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{found} elements, and {max} are possible")]
pub struct TooLong {
    /// Number of elements.
    pub found: usize,
    /// The limit.
    pub max: usize,
}

/// A list of at most `MAX` elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T, const MAX: usize>(Vec<T>);

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MAX: usize> TryFrom<Vec<T>> for List<T, MAX> {
    type Error = TooLong;

    fn try_from(elements: Vec<T>) -> Result<Self, TooLong> {
        let found = elements.len();
        if found > MAX { Err(TooLong { found, max: MAX }) } else { Ok(Self(elements)) }
    }
}

impl<T, const MAX: usize> List<T, MAX> {
    /// Whether it has no elements.
    pub(crate) fn has_none(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T, const MAX: usize> Deref for List<T, MAX> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Serialize, const MAX: usize> Serialize for List<T, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.0)
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        elements::<T, D>(deserializer, MAX, "at most").map(Self)
    }
}

/// A list of exactly `COUNT` elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fixed<T, const COUNT: usize>(Box<[T; COUNT]>);

impl<T, const COUNT: usize> From<[T; COUNT]> for Fixed<T, COUNT> {
    fn from(elements: [T; COUNT]) -> Self {
        Self(Box::new(elements))
    }
}

impl<T, const COUNT: usize> Deref for Fixed<T, COUNT> {
    type Target = [T; COUNT];

    fn deref(&self) -> &[T; COUNT] {
        &self.0
    }
}

impl<T, const COUNT: usize> DerefMut for Fixed<T, COUNT> {
    fn deref_mut(&mut self) -> &mut [T; COUNT] {
        &mut self.0
    }
}

impl<T: Serialize, const COUNT: usize> Serialize for Fixed<T, COUNT> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.as_slice())
    }
}

impl<'de, T: Deserialize<'de>, const COUNT: usize> Deserialize<'de> for Fixed<T, COUNT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = elements::<T, D>(deserializer, COUNT, "exactly")?;
        let count = found.len();
        let expected = format!("exactly {COUNT} elements");
        let elements: Box<[T; COUNT]> = found
            .into_boxed_slice()
            .try_into()
            .map_err(|_| D::Error::invalid_length(count, &expected.as_str()))?;
        Ok(Self(elements))
    }
}

/// A structure of the kernel as its bytes. Fewer bytes are accepted; the rest is zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Structure<const BYTES: usize>(Box<[u8; BYTES]>);

impl<const BYTES: usize> From<[u8; BYTES]> for Structure<BYTES> {
    fn from(bytes: [u8; BYTES]) -> Self {
        Self(Box::new(bytes))
    }
}

impl<const BYTES: usize> Deref for Structure<BYTES> {
    type Target = [u8; BYTES];

    fn deref(&self) -> &[u8; BYTES] {
        &self.0
    }
}

impl<const BYTES: usize> DerefMut for Structure<BYTES> {
    fn deref_mut(&mut self) -> &mut [u8; BYTES] {
        &mut self.0
    }
}

impl<const BYTES: usize> Serialize for Structure<BYTES> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.as_slice())
    }
}

impl<'de, const BYTES: usize> Deserialize<'de> for Structure<BYTES> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = elements::<u8, D>(deserializer, BYTES, "at most")?;
        let mut bytes = Box::new([0; BYTES]);
        bytes.iter_mut().zip(found).for_each(|(to, from)| *to = from);
        Ok(Self(bytes))
    }
}

/// At most `max` elements; `how` is the relation of the number to the limit in an error.
fn elements<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
    max: usize,
    how: &'static str,
) -> Result<Vec<T>, D::Error> {
    struct Bounded<T> {
        max: usize,
        how: &'static str,
        of: PhantomData<T>,
    }

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(formatter, "{} {} elements", self.how, self.max)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<T>, A::Error> {
            let mut found = Vec::new();
            while let Some(element) = sequence.next_element()? {
                found.push(element);
                if found.len() > self.max {
                    return Err(A::Error::invalid_length(found.len(), &self));
                }
            }
            Ok(found)
        }
    }

    deserializer.deserialize_seq(Bounded { max, how, of: PhantomData })
}

/// At most `MAX` values, each with a name of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named<T, const MAX: usize>(pub BTreeMap<String, T>);

impl<T, const MAX: usize> Default for Named<T, MAX> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Serialize, const MAX: usize> Serialize for Named<T, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(&self.0)
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Named<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Unique<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Unique<T, MAX> {
            type Value = BTreeMap<String, T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "at most {MAX} values with unique names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut found = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !is_name(&name) {
                        return Err(A::Error::custom("a name is empty, too long or not printable"));
                    }
                    if found.len() >= MAX {
                        return Err(A::Error::invalid_length(MAX.saturating_add(1), &self));
                    }
                    if found.contains_key(&name) {
                        return Err(A::Error::custom(format_args!(
                            "two values are named '{name}'"
                        )));
                    }
                    let value = map.next_value()?;
                    found.insert(name, value);
                }
                Ok(found)
            }
        }

        deserializer.deserialize_map(Unique::<T, MAX>(PhantomData)).map(Self)
    }
}

/// Whether a text can be the id of a node, a device or a zone.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// A field that is always there, although it may be `null`.
pub(crate) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Option::deserialize(deserializer)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn lists_have_the_length_that_they_can_have() {
        let refused =
            |json: &str| serde_json::from_str::<List<u8, 2>>(json).unwrap_err().to_string();
        assert_eq!(*serde_json::from_str::<List<u8, 2>>("[1,2]").unwrap(), [1, 2]);
        assert!(refused("[1,2,3]").contains("expected at most 2 elements"));
        assert!(refused("[1,300]").contains("expected u8"));
        assert!(List::<u8, 2>::try_from(vec![0; 3]).is_err());
        assert_eq!(*serde_json::from_str::<Fixed<u8, 2>>("[1,2]").unwrap(), [1, 2]);
        for json in ["[1]", "[1,2,3]"] {
            let error = serde_json::from_str::<Fixed<u8, 2>>(json).unwrap_err().to_string();
            assert!(error.contains("expected exactly 2 elements"), "{error}");
        }
    }

    #[test]
    fn structures_are_filled_with_zeros_and_written_whole() {
        let read: Structure<4> = serde_json::from_str("[1,2]").unwrap();
        assert_eq!(*read, [1, 2, 0, 0]);
        assert_eq!(serde_json::to_string(&read).unwrap(), "[1,2,0,0]");
        assert!(serde_json::from_str::<Structure<1>>("[1,2]").is_err());
    }

    #[test]
    fn a_name_is_used_once_and_can_be_printed() {
        let read = |json: &str| serde_json::from_str::<Named<u8, 2>>(json);
        assert_eq!(read(r#"{"a":1,"b":2}"#).unwrap().0.len(), 2);
        for (json, why) in [
            (r#"{"a":1,"a":1}"#, "two values are named 'a'"),
            (r#"{"":1}"#, "a name is empty"),
            (r#"{"\n":1}"#, "not printable"),
            (r#"{"a":1,"b":1,"c":1}"#, "at most 2 values"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
