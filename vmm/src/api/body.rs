// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bodies of requests and responses; those that are JSON as their schemas describe them.
//!
//! Owns how an endpoint names the schema of a body, so that the API description has it by that alone. Must never
//! know an endpoint.

use utoipa::ToSchema;

use super::types::VmCounters;
use crate::config::value::{FieldValue as _, SchemaSet};

/// The body of a request or response.
#[derive(Clone, Copy, Debug)]
pub enum Body {
    /// No body.
    Empty,
    /// A body of this schema.
    Schema(BodySchema),
    /// A body of this schema, or none.
    Optional(BodySchema),
    /// Text of this media type, which is no JSON.
    Text(&'static str),
}

impl Body {
    /// The schema of the body, if it can have one.
    pub const fn schema(&self) -> Option<&BodySchema> {
        match self {
            Self::Empty | Self::Text(_) => None,
            Self::Schema(schema) | Self::Optional(schema) => Some(schema),
        }
    }
}

/// The schema of a body.
#[derive(Clone, Copy, Debug)]
pub struct BodySchema {
    /// Name of the schema in the API description.
    pub name: &'static str,
    /// Adds the schema, and every schema that it refers to, to the set.
    pub collect: fn(&mut SchemaSet),
}

/// The body schema of a configuration type, under the name of the type.
macro_rules! schema {
    ($type:ident) => {
        $crate::api::body::BodySchema {
            name: stringify!($type),
            collect: <$type as $crate::config::value::FieldValue>::collect_schemas,
        }
    };
}

/// The schema of a type that derives it, and of the types in it.
pub fn derived<T: ToSchema>(out: &mut SchemaSet) {
    let mut all = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut all);
    out.extend(all);
}

/// The schema of the counters of devices, whose type has no name of its own.
pub fn counters(out: &mut SchemaSet) {
    out.insert("VmCounters".to_owned(), VmCounters::schema());
}

pub(super) use schema;
