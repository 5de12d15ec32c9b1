// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A bound on the number of values in untrusted JSON texts, checked before they are parsed.
//!
//! A parsed value takes many times the two bytes of its text, so a limit on the bytes alone does not limit the
//! memory that parsing takes. Owns the counting; the limits are those of the readers. Must never parse: a text need
//! not be JSON.

/// More values than the reader accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it holds more than {0} values")]
pub struct TooManyValues(pub usize);

/// A number of values that several texts may have together, such as a document with documents in its strings.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    values_max: usize,
    left: usize,
}

impl Budget {
    /// A budget of `values_max` values.
    pub fn new(values_max: usize) -> Self {
        Self { values_max, left: values_max }
    }

    /// Takes the values of a text from the budget: each is preceded by a comma, or by a bracket if it is the first of a
    /// list or object.
    ///
    /// # Errors
    /// The text has more values than are left.
    pub fn spend(&mut self, json: &[u8]) -> Result<(), TooManyValues> {
        self.take_one()?;
        let (mut in_text, mut escaped) = (false, false);
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
                b',' | b'[' | b'{' => self.take_one()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn take_one(&mut self) -> Result<(), TooManyValues> {
        self.left = self.left.checked_sub(1).ok_or(TooManyValues(self.values_max))?;
        Ok(())
    }
}

/// Counts the values of one text up to a limit.
///
/// # Errors
/// There are more values than the limit.
pub fn check(json: &[u8], values_max: usize) -> Result<(), TooManyValues> {
    Budget::new(values_max).spend(json)
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

    #[test]
    fn texts_share_a_budget() {
        let mut budget = Budget::new(6);
        assert_eq!(budget.spend(b"[0,0]"), Ok(()));
        assert_eq!(budget.spend(b"[0]"), Ok(()));
        assert_eq!(budget.spend(b"[0]"), Err(TooManyValues(6)));
    }
}
