// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Exit codes, and the one place where an error is printed.
//!
//! | code | meaning |
//! | --- | --- |
//! | 0 | success: the guest shut down or was migrated, or the VMM was asked to end; for `ch-remote`, the request was carried out |
//! | 1 | failure: the VM could not be started or ended with an error; for `ch-remote`, no answer or a refusal |
//! | 2 | invalid command line: nothing was started, nothing was sent |
//! | 3 | `ch-remote --wait`, `--watch`: the migration was cancelled, the guest runs at the source |
//! | 4 | `ch-remote --wait`, `--watch`, `upgrade`: an operator must check where the guest is and whether its memory is complete |
//! | 5 | `ch-remote --timeout`: there was no answer in time; the request may still be carried out |
//! | 6 | `cloud-hypervisor --check`: the VM would not start on this host |
//! | 7 | `ch-remote migrate-check`: the migration would not succeed |
//!
//! A process that a signal kills has no code of ours (the shell shows 128 plus the signal).

use std::error::Error;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Longest wait for a reader of stderr.
const PRINT_TIME: Duration = Duration::from_secs(1);

/// Success.
pub const OK: u8 = 0;
/// Failure.
pub const FAILED: u8 = 1;
/// Invalid command line.
pub const USAGE: u8 = 2;

/// A migration was cancelled; the guest runs at the source.
pub const CANCELLED: u8 = 3;
/// A migration ended in a way that requires an operator to check where the guest is.
pub const LOOK: u8 = 4;
/// No answer within the time limit.
pub const TIMEOUT: u8 = 5;
/// The host lacks what a VM needs to start.
pub const LACKING: u8 = 6;
/// A migration that was checked would not succeed.
pub const NOT_POSSIBLE: u8 = 7;

/// An error that ends a program.
#[derive(Debug)]
pub struct Failure {
    /// [`FAILED`], [`USAGE`], [`CANCELLED`], [`LOOK`] or [`TIMEOUT`].
    pub code: u8,
    /// What is printed: the sentences of the whole chain.
    pub message: String,
    /// A hint for the operator.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure with exit code 1.
    pub fn failed(error: &dyn Error) -> Self {
        Self { code: FAILED, message: error_text::chain(error), hint: None }
    }

    /// A failure with the exit code for an invalid command line.
    pub fn usage(error: &dyn Error) -> Self {
        Self { code: USAGE, message: error_text::chain(error), hint: None }
    }

    /// The same failure with another exit code.
    #[must_use]
    pub fn with_code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prints the failure on stderr, and returns the exit code. Does not wait for a reader of stderr.
    pub fn report(&self) -> ExitCode {
        log::logger().flush();
        let text = self.text();
        let (printed, is_printed) = channel();
        let print = move || {
            // There is nowhere to report an error to.
            let _ = writeln!(std::io::stderr(), "{text}");
            let _ = printed.send(());
        };
        if stoppable_thread::spawn("print-error", print).is_ok() {
            let _ = is_printed.recv_timeout(PRINT_TIME);
        }
        ExitCode::from(self.code)
    }

    fn text(&self) -> String {
        match &self.hint {
            Some(hint) => format!("Error: {}\nHint: {hint}", self.message),
            None => format!("Error: {}", self.message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Sample {
        #[error("outer")]
        Outer(#[source] Box<Sample>),
        #[error("inner")]
        Inner,
    }

    #[test]
    fn an_error_is_one_line_and_a_hint() {
        let error = Sample::Outer(Box::new(Sample::Outer(Box::new(Sample::Inner))));
        let failure = Failure::failed(&error).hint("try again");
        assert_eq!(failure.text(), "Error: outer: inner\nHint: try again");
        assert_eq!(Failure::usage(&Sample::Inner).code, USAGE);
    }
}
