// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors as text: what failed, and its causes, outermost first.
//!
//! Owns the form of that text for all crates, in logs, in answers and to a peer. Must never know a
//! particular error.

use std::error::Error;

/// A sentence per layer of an error, outermost first. A layer that only passes on what is behind it
/// is left out.
pub fn sentences(error: &dyn Error) -> Vec<String> {
    let mut sentences = vec![error.to_string()];
    let mut source = error.source();
    while let Some(inner) = source {
        let sentence = inner.to_string();
        if sentences.last() != Some(&sentence) {
            sentences.push(sentence);
        }
        source = inner.source();
    }
    sentences
}

/// The same in one line.
pub fn chain(error: &dyn Error) -> String {
    sentences(error).join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Sample {
        #[error("outer")]
        Outer(#[source] Box<Sample>),
        #[error(transparent)]
        Passed(Box<Sample>),
        #[error("inner")]
        Inner,
    }

    #[test]
    fn layers_are_named_once_from_the_outside() {
        let passed = Sample::Passed(Box::new(Sample::Inner));
        let error = Sample::Outer(Box::new(Sample::Outer(Box::new(passed))));
        assert_eq!(sentences(&error), ["outer", "inner"]);
        assert_eq!(chain(&error), "outer: inner");
        assert_eq!(chain(&Sample::Inner), "inner");
    }
}
