// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Definition of enums that fields of option families have. Each is defined once, with [`option_enum!`], or named
//! once, with [`option_names!`], where it is another crate's.
//!
//! Owns how the values are called in JSON and in option strings, and their schema. It must never know a family.

use utoipa::openapi::schema::{Object, ObjectBuilder};

use super::codec::OptionEnum;

/// The schema of an enum.
pub fn enum_schema(about: &str, names: &[&str], default: &str) -> Object {
    ObjectBuilder::new()
        .schema_type(utoipa::openapi::schema::Type::String)
        .description(Some(about.trim()))
        .enum_values(Some(names.iter().copied()))
        .default(Some(default.into()))
        .build()
}

/// The names of an enum's values in option strings, for tests and help.
pub fn enum_names<T: OptionEnum>() -> Vec<&'static str> {
    T::NAMES.iter().map(|(_, name)| *name).collect()
}

/// Defines an enum with its JSON names (the variants) and its option string names.
macro_rules! option_enum {
    (
        $(#[doc = $about:literal])+
        $name:ident = $syntax:literal, default $default:ident {
            $( $(#[doc = $help:literal])+ $variant:ident = $text:literal, )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $( $(#[doc = $help])+ $variant, )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        }

        impl $crate::config::codec::OptionEnum for $name {
            const SYNTAX: &'static str = $syntax;
            const NAMES: &'static [(Self, &'static str)] = &[ $( (Self::$variant, $text) ),+ ];
        }

        impl $crate::config::value::FieldValue for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::Ref::from_schema_name(stringify!($name)).into()
            }

            fn type_name() -> String {
                [ $( stringify!($variant) ),+ ].join(", ")
            }

            fn collect_schemas(out: &mut $crate::config::value::SchemaSet) {
                out.entry(stringify!($name).to_owned()).or_insert_with(|| {
                    $crate::config::enums::enum_schema(
                        concat!($($about),+),
                        &[ $( stringify!($variant) ),+ ],
                        stringify!($default),
                    )
                    .into()
                });
            }
        }
    };
}

/// Names the values of an enum of another crate, in JSON (the variants) and in option strings. The
/// configuration wraps the enum in a type with the name of its schema. A variant without a name is a
/// compile error.
macro_rules! option_names {
    (
        $(#[doc = $about:literal])+
        $name:ident($target:ident) = $syntax:literal {
            $( $variant:ident = $text:literal, )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub $target);

        impl $name {
            /// Names in JSON.
            const JSON_NAMES: &'static [&'static str] = &[ $( stringify!($variant) ),+ ];

            /// Name in JSON.
            const fn json_name(self) -> &'static str {
                match self.0 {
                    $( $target::$variant => stringify!($variant), )+
                }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.json_name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                match String::deserialize(d)?.as_str() {
                    $( stringify!($variant) => Ok(Self($target::$variant)), )+
                    other => Err(serde::de::Error::unknown_variant(other, Self::JSON_NAMES)),
                }
            }
        }

        impl $crate::config::codec::OptionEnum for $name {
            const SYNTAX: &'static str = $syntax;
            const NAMES: &'static [(Self, &'static str)] =
                &[ $( (Self($target::$variant), $text) ),+ ];
        }

        impl $crate::config::value::FieldValue for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::Ref::from_schema_name(stringify!($name)).into()
            }

            fn type_name() -> String {
                Self::JSON_NAMES.join(", ")
            }

            fn collect_schemas(out: &mut $crate::config::value::SchemaSet) {
                out.entry(stringify!($name).to_owned()).or_insert_with(|| {
                    $crate::config::enums::enum_schema(
                        concat!($($about),+),
                        Self::JSON_NAMES,
                        Self::default().json_name(),
                    )
                    .into()
                });
            }
        }
    };
}

pub(crate) use {option_enum, option_names};
