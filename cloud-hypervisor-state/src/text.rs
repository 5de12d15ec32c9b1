// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! JSON texts of a document, parsed within its budget of values.
//!
//! Owns the one way from a text to a value: counted first, then parsed, and errors with the path of what they are about.

use json_bound::Budget;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::DocumentError;
use crate::place::{path_at, printable};

/// Maximum number of characters of a parser's message: it may quote the text.
const PROBLEM_CHARS_MAX: usize = 320;

/// Parses the text of the node at `path`.
pub(crate) fn parse<T: DeserializeOwned>(
    path: &str,
    text: &str,
    budget: &mut Budget,
) -> Result<T, DocumentError> {
    budget.spend(text.as_bytes())?;
    serde_json::from_str(text).map_err(|error| malformed(path, text, &error))
}

/// Writes the text of the node at `path`.
pub(crate) fn print<T: Serialize>(path: &str, value: &T) -> Result<String, DocumentError> {
    serde_json::to_string(value).map_err(|error| DocumentError::Malformed {
        path: path.to_owned(),
        problem: error.to_string(),
    })
}

fn malformed(path: &str, text: &str, error: &serde_json::Error) -> DocumentError {
    let (line, column) = (error.line(), error.column());
    let message = error.to_string();
    let message =
        message.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&message);
    let mut field = path_at(text, line, column);
    if !field.is_empty() {
        field.push_str(": ");
    }
    let problem = format!("{field}{}", printable(message, PROBLEM_CHARS_MAX));
    DocumentError::Malformed { path: path.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        #[expect(dead_code, reason = "only read")]
        list: Vec<Inner>,
        #[expect(dead_code, reason = "only read")]
        last: u8,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[expect(dead_code, reason = "only read")]
        a: u16,
        #[expect(dead_code, reason = "only read")]
        b: u16,
    }

    #[test]
    fn an_error_names_the_node_and_the_field() {
        for (text, expected) in [
            (r#"{"list":[{"a":1,"b":2},{"a":1}],"last":1}"#, "n: list[1]: missing field `b`"),
            (r#"{"list":[{"a":1,"b":70000}],"last":1}"#, "n: list[0].b: invalid value"),
            (r#"{"list":[{"a":1,"b":1,"x":1}],"last":1}"#, "n: list[0]: unknown field `x`"),
            (r#"{"list":[{"a":1,"a":1}],"last":1}"#, "n: list[0]: duplicate field `a`"),
            (r#"{"list":[]}"#, "n: missing field `last`"),
            (r#"{"list":[],"last":"x"}"#, "n: last: invalid type: string \"x\""),
            (r#"{"list":[],"last":1}}"#, "n: trailing characters"),
            ("", "n: EOF while parsing"),
        ] {
            let error = parse::<Outer>("n", text, &mut Budget::new(99)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
            assert!(!error.contains("column"), "{error}");
        }
    }
}
