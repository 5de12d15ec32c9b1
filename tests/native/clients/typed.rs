// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reading JSON into types, as clients in Go and Rust do: a value of another type is an error there, and
//! the client fails although it needs nothing of it.

use serde_json::Value;

/// A type of a client.
pub enum Type {
    Bool,
    /// A signed integer of so many bits.
    Int(u32),
    /// An unsigned one.
    Uint(u32),
    Text,
    /// One of these texts.
    OneOf(&'static [&'static str]),
    Ipv4,
    List(&'static Type),
    /// An object with any members of one type.
    Map(&'static Type),
    Struct(&'static [Member]),
    /// Any object.
    Object,
}

/// What a member may be.
#[derive(PartialEq)]
pub enum May {
    /// Nothing but a value.
    Be,
    /// It may be missing.
    Miss,
    /// It may be missing or `null`.
    BeNull,
}

/// Name, what it may be, and the type.
pub type Member = (&'static str, May, Type);

/// Reads `value`; where and why it is none of the type, if it is not.
pub fn read(value: &Value, wanted: &Type) -> Result<(), String> {
    at("", value, wanted)
}

fn at(path: &str, value: &Value, wanted: &Type) -> Result<(), String> {
    let fits = match wanted {
        Type::Bool => value.is_boolean(),
        Type::Int(bits) => value.as_i64().is_some_and(|number| {
            let over = 64 - bits;
            number << over >> over == number
        }),
        Type::Uint(bits) => value.as_u64().is_some_and(|number| {
            let over = 64 - bits;
            number << over >> over == number
        }),
        Type::Text => value.is_string(),
        Type::OneOf(texts) => value.as_str().is_some_and(|text| texts.contains(&text)),
        Type::Ipv4 => value.as_str().is_some_and(|text| text.parse::<std::net::Ipv4Addr>().is_ok()),
        Type::Object => value.is_object(),
        Type::List(item) => {
            let items = value.as_array().ok_or_else(|| format!("{path}: {value}"))?;
            return items.iter().try_for_each(|it| at(&format!("{path}[]"), it, item));
        }
        Type::Map(item) => {
            let members = value.as_object().ok_or_else(|| format!("{path}: {value}"))?;
            return members
                .iter()
                .try_for_each(|(name, it)| at(&format!("{path}.{name}"), it, item));
        }
        Type::Struct(members) => {
            let object = value.as_object().ok_or_else(|| format!("{path}: {value}"))?;
            for (name, may, wanted) in *members {
                let path = format!("{path}.{name}");
                match object.get(*name) {
                    None if *may == May::Be => return Err(format!("{path} is missing")),
                    None => {}
                    Some(Value::Null) if *may == May::BeNull => {}
                    Some(value) => at(&path, value, wanted)?,
                }
            }
            return Ok(());
        }
    };
    if fits { Ok(()) } else { Err(format!("{path}: {value} is of another type")) }
}
