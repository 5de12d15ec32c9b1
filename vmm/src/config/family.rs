// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Definition of option families. Each is defined once, with [`option_family!`], from which the struct, its
//! defaults, the option string, the JSON form, the schema, help and the reference page are derived.
//!
//! Owns the description of a field ([`FieldSpec`]) and the macro. It must never contain a rule about a particular
//! family. Fields with a few named values are enums, see `enums`.
//!
//! ```text
//! option_family! {
//!     /// What the family is, for help and OpenAPI.
//!     RngConfig "rng" {
//!         /// What the field is.
//!         src: PathBuf = PathBuf::from("/dev/urandom"), "src" as One<File>, required_json();
//!         ^field type    ^default                       ^key     ^text form ^attributes
//!     }
//! }
//! ```
//!
//! Attributes are the `const fn` builders of [`FieldSpec`].

use utoipa::openapi::schema::{ObjectBuilder, Schema};
use utoipa::openapi::{Deprecated, RefOr};

use super::option_string::{KeySyntax, OptionError};

/// First version of this program, and default of [`FieldSpec::since`].
pub const FIRST_VERSION: &str = "0.1";

/// Properties of a field in addition to its type and default.
#[derive(Debug, Clone, Copy)]
pub struct FieldSpec {
    /// Name in JSON.
    pub field: &'static str,
    /// Key in the option string; empty if there is none.
    pub key: &'static str,
    /// One or two sentences of documentation.
    pub help: &'static str,
    /// Whether JSON must have the field.
    pub required_json: bool,
    /// Whether the option string must have the field.
    pub required_key: bool,
    /// Recognised, and refused if set to anything but its default.
    pub unsupported: bool,
    /// For tests and tuning: not in help, schema or reference, and in JSON only if set.
    pub hidden: bool,
    /// Kept for old clients.
    pub deprecated: bool,
    /// Only in answers, for which the schema shows no default.
    pub answer: bool,
    /// Minimum and maximum of a number.
    pub range: Option<(u64, u64)>,
    /// First version that has the field.
    pub since: &'static str,
    /// Alternative name in JSON.
    pub alias: Option<&'static str>,
}

impl FieldSpec {
    /// A supported, optional field.
    pub const fn new(field: &'static str, key: &'static str, help: &'static str) -> Self {
        Self {
            field,
            key,
            help,
            required_json: false,
            required_key: false,
            unsupported: false,
            hidden: false,
            deprecated: false,
            answer: false,
            range: None,
            since: FIRST_VERSION,
            alias: None,
        }
    }

    /// Required in JSON and in the option string.
    #[must_use]
    pub const fn required(mut self) -> Self {
        self.required_json = true;
        self.required_key = true;
        self
    }

    /// Required in JSON; the option string has a default.
    #[must_use]
    pub const fn required_json(mut self) -> Self {
        self.required_json = true;
        self
    }

    /// Recognised, and refused if set.
    #[must_use]
    pub const fn unsupported(mut self) -> Self {
        self.unsupported = true;
        self
    }

    /// Not documented.
    #[must_use]
    pub const fn hidden(mut self) -> Self {
        self.hidden = true;
        self
    }

    /// Kept for old clients.
    #[must_use]
    pub const fn deprecated(mut self) -> Self {
        self.deprecated = true;
        self
    }

    /// Only in answers.
    #[must_use]
    pub const fn answer(mut self) -> Self {
        self.answer = true;
        self
    }

    /// Sets minimum and maximum of a number.
    #[must_use]
    pub const fn range(mut self, min: u64, max: u64) -> Self {
        self.range = Some((min, max));
        self
    }

    /// First version that has the field.
    #[must_use]
    pub const fn since(mut self, version: &'static str) -> Self {
        self.since = version;
        self
    }

    /// Sets an alternative name in JSON.
    #[must_use]
    pub const fn alias(mut self, name: &'static str) -> Self {
        self.alias = Some(name);
        self
    }

    /// Checks a number against the range.
    pub fn check_range(&self, number: Option<u64>) -> Result<(), String> {
        match (self.range, number) {
            (Some((min, max)), Some(number)) if number < min || number > max => {
                Err(format!("must be from {min} to {max}, not {number}"))
            }
            _ => Ok(()),
        }
    }

    /// Adds the properties of the field to the schema of its type.
    pub fn property(
        &self,
        schema: RefOr<Schema>,
        default: Option<serde_json::Value>,
    ) -> RefOr<Schema> {
        let mut description = self.help.trim().to_owned();
        if self.unsupported {
            description.push_str(" Not supported by this version: only the default is accepted.");
        }
        match schema {
            RefOr::T(Schema::Object(object)) => {
                let scalar = default.filter(|value| !value.is_object() && !value.is_array());
                ObjectBuilder::from(object)
                    .description(Some(description))
                    .default(scalar)
                    .minimum(self.range.map(|(min, _)| min))
                    .maximum(self.range.map(|(_, max)| max))
                    .deprecated(self.deprecated.then_some(Deprecated::True))
                    .into()
            }
            RefOr::T(Schema::Array(mut array)) => {
                array.description = Some(description);
                RefOr::T(Schema::Array(array))
            }
            other => other,
        }
    }
}

/// Description of a family for help and the reference page.
#[derive(Debug, Clone)]
pub struct FamilyInfo {
    /// Name as in the command line option, without dashes.
    pub name: &'static str,
    /// Name of the JSON object.
    pub type_name: &'static str,
    /// Description of the family.
    pub about: &'static str,
    /// The fields in order.
    pub fields: Vec<FieldInfo>,
}

/// Description of a field for help and the reference page.
#[derive(Debug, Clone)]
pub struct FieldInfo {
    /// The properties of the field.
    pub spec: FieldSpec,
    /// The keys in the option string.
    pub keys: Vec<KeySyntax>,
    /// JSON type.
    pub type_name: String,
    /// Default as JSON, if there is one.
    pub default: Option<String>,
}

impl FamilyInfo {
    /// The one-line syntax that `--help` shows.
    pub fn syntax(&self) -> String {
        let mut parts = Vec::new();
        for field in self.fields.iter().filter(|f| !f.spec.hidden && !f.spec.unsupported) {
            let mut flags = Vec::new();
            for key in &field.keys {
                match key.value {
                    Some(value) => parts.push(format!("{}={value}", key.key)),
                    None => flags.push(key.key),
                }
            }
            if !flags.is_empty() {
                parts.push(flags.join("|"));
            }
        }
        parts.join(",")
    }
}

/// A group of fields with an option string, a JSON object and a schema.
pub trait Family: Sized + Default + PartialEq {
    /// Name as in the command line option, without dashes.
    const NAME: &'static str;

    /// The definition, for help and the reference page.
    fn info() -> FamilyInfo;

    /// Parses an option string.
    ///
    /// # Errors
    /// Unknown, missing, malformed or invalid keys, and numbers out of range.
    fn parse(text: &str) -> Result<Self, OptionError>;

    /// Prints the option string, which [`Family::parse`] turns back into this value.
    fn print(&self) -> String;
}

/// Whether a JSON key is a name of this field.
pub fn json_name_matches(spec: &FieldSpec, key: &str) -> bool {
    spec.field == key || spec.alias == Some(key)
}

/// `outer.field`, or the field alone at the top level.
pub fn join_path(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") }
}

/// The error for a missing key, or choice of keys.
pub fn missing(family: &'static str, keys: &[KeySyntax]) -> OptionError {
    let names: Vec<_> =
        keys.iter()
            .map(|key| {
                if key.value.is_some() {
                    format!("'{}='", key.key)
                } else {
                    format!("'{}'", key.key)
                }
            })
            .collect();
    let what = match names.as_slice() {
        [one] => one.clone(),
        many => format!("one of {}", many.join(", ")),
    };
    OptionError::Missing { family, what }
}

/// Defines an option family; see the head of this module.
macro_rules! option_family {
    (
        $(#[doc = $about:literal])+
        $name:ident $family:literal {
            $(
                $(#[doc = $help:literal])+
                $field:ident : $ty:ty = $default:expr, $key:literal as $codec:ty
                    $(, $attr:ident ( $($arg:expr),* ) )* ;
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            $( $(#[doc = $help])+ pub $field: $ty, )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )+ }
            }
        }

        const _: () = {
            use serde::de::Error as _;
            use serde::ser::SerializeMap as _;

            use $crate::config::codec::Codec;
            use $crate::config::family::{
                Family, FamilyInfo, FieldInfo, FieldSpec, join_path, json_name_matches, missing,
            };
            use $crate::config::option_string::{OptionError, Options, Printer};
            use $crate::config::value::{FieldValue, SchemaSet};

            /// One description per field, under the name of the field.
            struct Spec;

            #[expect(non_upper_case_globals, reason = "the constants are named after the fields")]
            impl Spec {
                $(
                    const $field: FieldSpec =
                        FieldSpec::new(stringify!($field), $key, concat!($($help),+))
                            $( .$attr( $($arg),* ) )*;
                )+
            }

            impl Family for $name {
                const NAME: &'static str = $family;

                fn info() -> FamilyInfo {
                    FamilyInfo {
                        name: $family,
                        type_name: stringify!($name),
                        about: concat!($($about),+),
                        fields: vec![ $( {
                            let value: $ty = $default;
                            FieldInfo {
                                spec: Spec::$field,
                                keys: <$codec as Codec<$ty>>::keys($key),
                                type_name: <$ty as FieldValue>::type_name(),
                                default: (!value.is_trivial())
                                    .then(|| serde_json::to_string(&value).ok())
                                    .flatten(),
                            }
                        } ),+ ],
                    }
                }

                fn parse(text: &str) -> Result<Self, OptionError> {
                    let mut known = Vec::new();
                    $( known.extend(<$codec as Codec<$ty>>::keys($key)); )+
                    let options = Options::split($family, text, &known)?;
                    Ok(Self { $(
                        $field: match <$codec as Codec<$ty>>::take($key, &options)? {
                            Some(value) => {
                                Spec::$field
                                    .check_range(value.number())
                                    .map_err(|reason| options.bad_value($key, reason))?;
                                value
                            }
                            None if Spec::$field.required_key => {
                                return Err(missing($family, &<$codec as Codec<$ty>>::keys($key)));
                            }
                            None => $default,
                        },
                    )+ })
                }

                fn print(&self) -> String {
                    let mut out = Printer::default();
                    $(
                        let default: $ty = $default;
                        if Spec::$field.required_key || self.$field != default {
                            <$codec as Codec<$ty>>::put($key, &self.$field, &mut out);
                        }
                    )+
                    out.finish()
                }
            }

            impl serde::Serialize for $name {
                fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    let mut map = serializer.serialize_map(None)?;
                    $( {
                        let default: $ty = $default;
                        let hide = Spec::$field.hidden && self.$field == default;
                        if !hide && !self.$field.is_absent() {
                            map.serialize_entry(stringify!($field), &self.$field)?;
                        }
                    } )+
                    map.end()
                }
            }

            impl<'de> serde::Deserialize<'de> for $name {
                fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                    struct Visitor;

                    impl<'de> serde::de::Visitor<'de> for Visitor {
                        type Value = $name;

                        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                            f.write_str(concat!("an object (", stringify!($name), ")"))
                        }

                        fn visit_map<A: serde::de::MapAccess<'de>>(
                            self,
                            mut map: A,
                        ) -> Result<$name, A::Error> {
                            $( let mut $field: Option<Option<$ty>> = None; )+
                            while let Some(key) = map.next_key::<String>()? {
                                $(
                                    if json_name_matches(&Spec::$field, &key) {
                                        if $field.is_some() {
                                            return Err(A::Error::duplicate_field(stringify!($field)));
                                        }
                                        let value: Option<$ty> = map.next_value().map_err(|e| {
                                            A::Error::custom(format_args!("{key}: {e}"))
                                        })?;
                                        if let Some(value) = &value {
                                            Spec::$field.check_range(value.number()).map_err(|e| {
                                                A::Error::custom(format_args!("{key}: {e}"))
                                            })?;
                                        }
                                        $field = Some(value);
                                        continue;
                                    }
                                )+
                                // Clients may know fields that do not exist here, and send them with their
                                // default; other values must be refused rather than ignored.
                                let value = map.next_value::<serde_json::Value>()?;
                                if !$crate::config::foreign::says_nothing(
                                    stringify!($name),
                                    &key,
                                    &value,
                                ) {
                                    return Err(A::Error::custom(format_args!(
                                        "unknown field `{key}` of {}",
                                        stringify!($name)
                                    )));
                                }
                            }
                            Ok($name { $(
                                $field: match $field.flatten() {
                                    Some(value) => value,
                                    None if Spec::$field.required_json => {
                                        return Err(A::Error::missing_field(stringify!($field)));
                                    }
                                    None => $default,
                                },
                            )+ })
                        }
                    }

                    d.deserialize_map(Visitor)
                }
            }

            impl FieldValue for $name {
                fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                    utoipa::openapi::Ref::from_schema_name(stringify!($name)).into()
                }

                fn type_name() -> String {
                    stringify!($name).to_owned()
                }

                fn sparse(&self) -> Result<serde_json::Value, serde_json::Error> {
                    let mut map = serde_json::Map::new();
                    $( {
                        let default: $ty = $default;
                        if Spec::$field.required_json || self.$field != default {
                            map.insert(stringify!($field).to_owned(), self.$field.sparse()?);
                        }
                    } )+
                    Ok(map.into())
                }

                fn refuse(&self, path: &str, out: &mut Vec<String>) {
                    $( {
                        let default: $ty = $default;
                        let path = join_path(path, stringify!($field));
                        if !Spec::$field.unsupported {
                            self.$field.refuse(&path, out);
                        } else if self.$field != default && !self.$field.is_trivial() {
                            out.push(path);
                        }
                    } )+
                }

                fn collect_schemas(out: &mut SchemaSet) {
                    if out.contains_key(stringify!($name)) {
                        return;
                    }
                    let mut object = utoipa::openapi::schema::ObjectBuilder::new()
                        .description(Some(concat!($($about),+).trim()));
                    $(
                        if !Spec::$field.hidden {
                            let default: $ty = $default;
                            let default = (!default.is_absent())
                                .then(|| serde_json::to_value(&default).ok())
                                .flatten()
                                .filter(|_| !Spec::$field.required_json && !Spec::$field.answer);
                            object = object.property(
                                stringify!($field),
                                Spec::$field.property(<$ty as FieldValue>::schema(), default),
                            );
                            if Spec::$field.required_json {
                                object = object.required(stringify!($field));
                            }
                        }
                    )+
                    out.insert(stringify!($name).to_owned(), object.into());
                    $( <$ty as FieldValue>::collect_schemas(out); )+
                }
            }
        };
    };
}

pub(crate) use option_family;
