// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors as text: what failed, and its causes, outermost first.
//!
//! Owns the form of that text for all crates, in logs, in answers and to a peer. Must never know a
//! particular error of these crates.

use std::error::Error;
use std::io;
use std::sync::OnceLock;

/// Set once, when this process begins to be kept from paths.
static DENIED_REASON: OnceLock<&'static str> = OnceLock::new();

/// From now on `reason` follows an error for which the system has answered EACCES: it says what keeps this process from
/// paths that its user can open.
pub fn set_denied_reason(reason: &'static str) {
    // The first one stays.
    let _ = DENIED_REASON.set(reason);
}

/// Whether the system has answered that access is denied.
fn is_denied(error: &(dyn Error + 'static)) -> bool {
    const EACCES: i32 = 13;
    let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    code == Some(EACCES)
}

/// A sentence per layer of an error, outermost first. A layer that only passes on what is behind it
/// is left out.
pub fn sentences(error: &dyn Error) -> Vec<String> {
    let mut sentences = vec![error.to_string()];
    let mut source = error.source();
    let mut denied = false;
    while let Some(inner) = source {
        denied |= is_denied(inner);
        let sentence = inner.to_string();
        if sentences.last() != Some(&sentence) {
            sentences.push(sentence);
        }
        source = inner.source();
    }
    if denied && let Some(reason) = DENIED_REASON.get() {
        sentences.push((*reason).to_owned());
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
        #[error("cannot open it")]
        Open(#[source] io::Error),
    }

    #[test]
    fn what_keeps_a_process_from_paths_follows_where_access_is_denied() {
        let open = |code| Sample::Open(io::Error::from_raw_os_error(code));
        let denied = Sample::Outer(Box::new(open(13)));
        assert!(!chain(&denied).contains("the sandbox"));
        set_denied_reason("the sandbox does");
        assert!(chain(&denied).ends_with("Permission denied (os error 13): the sandbox does"));
        // EPERM comes from elsewhere.
        for other in [open(1), open(2), Sample::Inner] {
            assert!(!chain(&other).contains("the sandbox"), "{other}");
        }
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
