// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The trait of types that can be configuration fields: JSON schema, value as a number (for ranges), and
//! unsupported values that it contains.
//!
//! Owns the small value types that several families share. It must never read files or devices.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{
    ArrayBuilder, KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type,
};

/// Schemas by name, collected from the types that a document uses.
pub type SchemaSet = BTreeMap<String, RefOr<Schema>>;

/// A type of a configuration field.
pub trait FieldValue: Sized + Serialize {
    /// The JSON schema; a reference for a named type.
    fn schema() -> RefOr<Schema>;

    /// Short name of the JSON type for the reference page.
    fn type_name() -> String;

    /// The value as a number, if it is one.
    fn number(&self) -> Option<u64> {
        None
    }

    /// Whether this is an absent optional value, which JSON omits.
    fn is_absent(&self) -> bool {
        false
    }

    /// Whether this is absent or an empty list.
    fn is_trivial(&self) -> bool {
        self.is_absent()
    }

    /// The value as JSON without fields that have their default. This form is saved and sent, so that a
    /// program that lacks a field only meets it if it is used.
    ///
    /// # Errors
    /// A value has no JSON form.
    fn sparse(&self) -> Result<serde_json::Value, serde_json::Error> {
        serde_json::to_value(self)
    }

    /// Adds the JSON path of each unsupported option that is set.
    fn refuse(&self, _path: &str, _out: &mut Vec<String>) {}

    /// Adds the schemas that [`FieldValue::schema`] refers to.
    fn collect_schemas(_out: &mut SchemaSet) {}
}

macro_rules! integer_values {
    ($($ty:ty => $format:ident),+) => {$(
        impl FieldValue for $ty {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(Type::Integer)
                    .format(Some(SchemaFormat::KnownFormat(KnownFormat::$format)))
                    .into()
            }

            fn type_name() -> String {
                "integer".to_owned()
            }

            fn number(&self) -> Option<u64> {
                u64::try_from(*self).ok()
            }
        }
    )+};
}

integer_values!(u8 => Int32, u16 => Int32, u32 => Int64, u64 => Int64, i64 => Int64);

impl FieldValue for bool {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Boolean).into()
    }

    fn type_name() -> String {
        "boolean".to_owned()
    }
}

macro_rules! string_values {
    ($($ty:ty),+) => {$(
        impl FieldValue for $ty {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new().schema_type(Type::String).into()
            }

            fn type_name() -> String {
                "string".to_owned()
            }
        }
    )+};
}

string_values!(String, PathBuf, IpAddr, MacAddr);

impl<T: FieldValue> FieldValue for Option<T> {
    fn schema() -> RefOr<Schema> {
        T::schema()
    }

    fn type_name() -> String {
        T::type_name()
    }

    fn number(&self) -> Option<u64> {
        self.as_ref().and_then(T::number)
    }

    fn is_absent(&self) -> bool {
        self.is_none()
    }

    fn is_trivial(&self) -> bool {
        self.as_ref().is_none_or(T::is_trivial)
    }

    fn sparse(&self) -> Result<serde_json::Value, serde_json::Error> {
        self.as_ref().map_or(Ok(serde_json::Value::Null), T::sparse)
    }

    fn refuse(&self, path: &str, out: &mut Vec<String>) {
        if let Some(value) = self {
            value.refuse(path, out);
        }
    }

    fn collect_schemas(out: &mut SchemaSet) {
        T::collect_schemas(out);
    }
}

impl<T: FieldValue> FieldValue for Vec<T> {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().items(T::schema()).into()
    }

    fn type_name() -> String {
        format!("list of {}", T::type_name())
    }

    fn is_trivial(&self) -> bool {
        self.is_empty()
    }

    fn sparse(&self) -> Result<serde_json::Value, serde_json::Error> {
        self.iter().map(T::sparse).collect()
    }

    fn refuse(&self, path: &str, out: &mut Vec<String>) {
        for (index, value) in self.iter().enumerate() {
            value.refuse(&format!("{path}[{index}]"), out);
        }
    }

    fn collect_schemas(out: &mut SchemaSet) {
        T::collect_schemas(out);
    }
}

/// A MAC address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MacAddr([u8; 6]);

impl MacAddr {
    /// A MAC address of these six bytes.
    pub const fn new(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }

    /// The six bytes in network order.
    pub const fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Turns six random bytes into a locally administered unicast address.
    pub const fn locally_administered(mut bytes: [u8; 6]) -> Self {
        bytes[0] = (bytes[0] & 0xfc) | 0x02;
        Self(bytes)
    }

    /// Whether the address is all zero, which no interface has.
    pub const fn is_zero(self) -> bool {
        matches!(self.0, [0, 0, 0, 0, 0, 0])
    }

    /// Whether the address is a multicast one, which no interface may have.
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 == 1
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ":" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for MacAddr {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "a MAC address is six two-digit hexadecimal numbers, like \
                                12:34:56:78:90:ab";
        let mut bytes = [0_u8; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(EXPECTED)?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(EXPECTED);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| EXPECTED)?;
        }
        if parts.next().is_some() { Err(EXPECTED) } else { Ok(Self(bytes)) }
    }
}

impl Serialize for MacAddr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn mac_addresses() {
        let mac: MacAddr = "12:34:56:78:90:Ab".parse().unwrap();
        assert_eq!(mac.to_string(), "12:34:56:78:90:ab");
        for bad in
            ["", "12:34:56:78:90", "12:34:56:78:90:ab:cd", "12:34:56:78:90:+a", "1:2:3:4:5:6"]
        {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad}");
        }
        let local = MacAddr::locally_administered([0xff; 6]);
        assert!(!local.is_multicast() && local.bytes()[0] & 2 == 2);
    }
}
