// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The generated part of `docs/check.md`: checks, lacks, and the schema of the report.
//!
//! Owns its words. Only a test writes the page; it must never say what the definitions do not.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

use super::definitions::ALL;
use super::finding::PreflightReport;

/// The schema of a type, and of those in it.
fn schemas<T: ToSchema>() -> BTreeMap<String, RefOr<Schema>> {
    let mut all = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut all);
    all.into_iter().collect()
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// The text.
pub fn reference() -> String {
    let mut text = String::from("\n## Checks\n\n| check | what is looked at |\n| --- | --- |\n");
    for (check, _) in ALL {
        let _ = writeln!(text, "| `{}` | {} |", check.name, cell(check.what));
    }
    text.push_str(
        "\n## What can be lacking\n\nWords in capitals stand for what the report names; `$USER` is the shell's.\n\n\
         | check | reason | severity | what it costs | what mends it |\n| --- | --- | --- | --- | --- |\n",
    );
    for (check, lacks) in ALL {
        for lack in *lacks {
            let commands = lack.mend.iter().map(|command| format!("`{}`", cell(command)));
            let commands = commands.collect::<Vec<_>>().join("<br>");
            let _ = writeln!(
                text,
                "| `{}` | `{}` | {} | {} | {commands} |",
                check.name,
                lack.reason,
                lack.severity.word(),
                cell(lack.cost)
            );
        }
    }
    text.push_str("\n## Schema of the JSON\n\n```json\n");
    let schemas = schemas::<PreflightReport>();
    text.push_str(&serde_json::to_string_pretty(&schemas).unwrap_or_default());
    text.push_str("\n```\n");
    text
}
