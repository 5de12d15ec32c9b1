// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The forms in which a snapshot can be written.
//!
//! Owns their names, which are the same in JSON and in option strings.

use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::Schema;
use utoipa::openapi::{Ref, RefOr};

use super::codec::OptionEnum;
use super::enums::enum_schema;
use super::value::{FieldValue, SchemaSet};

/// Which program restores a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotFormat {
    /// This one.
    #[default]
    #[serde(rename = "godwit")]
    Godwit,
    /// cloud-hypervisor v53, and this one.
    #[serde(rename = "cloud-hypervisor-53")]
    CloudHypervisor53,
}

impl SnapshotFormat {
    /// How they are written.
    const TEXTS: &'static [&'static str] = &["godwit", "cloud-hypervisor-53"];
}

impl OptionEnum for SnapshotFormat {
    const SYNTAX: &'static str = "godwit|cloud-hypervisor-53";
    const NAMES: &'static [(Self, &'static str)] =
        &[(Self::Godwit, "godwit"), (Self::CloudHypervisor53, "cloud-hypervisor-53")];
}

impl FieldValue for SnapshotFormat {
    fn schema() -> RefOr<Schema> {
        Ref::from_schema_name("SnapshotFormat").into()
    }

    fn type_name() -> String {
        Self::TEXTS.join(", ")
    }

    fn collect_schemas(out: &mut SchemaSet) {
        let schema =
            || enum_schema("Which program restores a snapshot.", Self::TEXTS, "godwit").into();
        out.entry("SnapshotFormat".to_owned()).or_insert_with(schema);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_written_as_it_is_read() {
        for ((format, text), listed) in SnapshotFormat::NAMES.iter().zip(SnapshotFormat::TEXTS) {
            assert_eq!(text, listed);
            assert_eq!(serde_json::to_value(format).expect("JSON"), serde_json::json!(text));
        }
    }
}
