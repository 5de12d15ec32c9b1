// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A bound on the number of values in an untrusted JSON text, checked before it is parsed.
//!
//! A parsed value takes many times the two bytes of its text, so a limit on the bytes alone does not limit the
//! memory that parsing takes.

/// Maximum number of values in a machine state: 254 vCPUs have 330,000, a device a few hundred.
pub const STATE_VALUES_MAX: usize = 2 << 20;

/// Maximum number of values in a configuration: the largest have some thousand.
pub const CONFIG_VALUES_MAX: usize = 256 << 10;

/// The limit is exceeded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it holds more than {0} values")]
pub struct TooManyValues(pub usize);

/// Counts the values of a text, which need not be JSON, up to a limit: each is preceded by a comma, or by a
/// bracket if it is the first of a list or object.
///
/// # Errors
/// There are more values than the limit.
pub fn check(json: &[u8], values_max: usize) -> Result<(), TooManyValues> {
    let (mut count, mut in_text, mut escaped) = (1_usize, false, false);
    for byte in json {
        if in_text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_text = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_text = true,
            b',' | b'[' | b'{' => count += 1,
            _ => {}
        }
        if count > values_max {
            return Err(TooManyValues(values_max));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_and_texts_are_not() {
        for (json, count) in [
            ("7", 1),
            ("[0,0,0]", 4),
            (r#"{"a":[1,2],"b":{}}"#, 6),
            (r#""[,,,,,{{{""#, 1),
            (r#"["\",,,","\\",0]"#, 4),
        ] {
            assert_eq!(check(json.as_bytes(), count), Ok(()), "{json}");
            assert_eq!(check(json.as_bytes(), count - 1), Err(TooManyValues(count - 1)), "{json}");
        }
        assert!(check(b"\"\\", 1).is_ok());
    }
}
