// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a test of the usual harness says that this machine cannot run it, or a part of it.
//!
//! The harness keeps back what a test that passes prints with `eprintln!`, so that such a test would be
//! green without notice. `skip!` writes a line that `scripts/test` counts and shows. Must never decide
//! what is skipped: a test knows what it needs.

use std::error::Error;
use std::fmt::Arguments;
use std::fs::File;
use std::io::{self, ErrorKind, Write as _};

/// Says that the test, or a part of it, is skipped; takes what `format!` takes. Only says so: the test
/// returns by itself, with `return skip!(..)` where that suits.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => { $crate::skip(format_args!($($reason)*)) };
}

/// What `skip!` calls.
pub fn skip(reason: Arguments<'_>) {
    let thread = std::thread::current();
    // The harness names a test's thread after it, but runs it on its own when it has only one. It may have begun a
    // line, which is ended first.
    let line = match thread.name() {
        Some(test) if test != "main" => format!("\nSKIPPED {test}: {reason}\n"),
        _ => format!("\nSKIPPED the test that runs now: {reason}\n"),
    };
    // Not eprintln!, which the harness captures. One write, so that tests at the same time do not mix.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Whether this process may use KVM; says that the test is skipped if not. `/dev/kvm` that opens and
/// fails later is for the test to report.
pub fn kvm() -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            match error.kind() {
                ErrorKind::NotFound => skip!("no /dev/kvm"),
                _ => skip!("/dev/kvm cannot be opened: {error}"),
            }
            false
        }
    }
}

/// What a call gave that not every user may make; says that the test is skipped where this one may not.
///
/// # Panics
///
/// For any other error.
#[track_caller]
pub fn permitted<T>(result: Result<T, impl Into<Box<dyn Error>>>) -> Option<T> {
    let error = match result {
        Ok(value) => return Some(value),
        Err(error) => error.into(),
    };
    match error.downcast_ref::<io::Error>() {
        Some(error) if error.kind() == ErrorKind::PermissionDenied => skip!("{error}"),
        _ => panic!("{error}"),
    }
    None
}
