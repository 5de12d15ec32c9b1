// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `ch-remote top`: what a VM does, again and again, from its metrics.
//!
//! Owns when the VMM is asked, and where the answer is shown: redrawn on a terminal, one block after another elsewhere. It must
//! never change anything in the VMM.
//!
//! | module | owns |
//! | --- | --- |
//! | `samples` | reading the text of metrics, and what changed between two of them |
//! | `screen` | the text that is shown |

mod samples;
mod screen;

use std::io::IsTerminal as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use thiserror::Error;
use vmm::api::client::{Client, ClientError};
use vmm::api::endpoints::Method;

use super::terminal::{self, TerminalSize};
use super::write_out;
use samples::{MalformedMetrics, Samples};
use screen::Screen;

/// Moves the cursor to the top left corner.
const HOME: &str = "\x1b[H";
/// Clears to the end of the line, and of the screen.
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_BELOW: &str = "\x1b[J";

/// How often, and how many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopArgs {
    /// Time between two looks.
    pub interval: Duration,
    /// Number of looks that are shown; without end if `None`.
    pub count: Option<u32>,
}

/// Why it ended.
#[derive(Debug, Error)]
pub enum TopError {
    /// The VMM does not answer.
    #[error("the metrics of the VMM cannot be had")]
    Ask(#[from] ClientError),
    /// What it answers are no metrics.
    #[error("the metrics of the VMM cannot be read")]
    Metrics(#[from] MalformedMetrics),
    /// Nothing can be written.
    #[error("standard output cannot be written")]
    Output(#[source] std::io::Error),
}

/// Shows it until the reader has left, or all looks are shown.
///
/// # Errors
/// The VMM does not answer, or has ended.
pub fn run(client: &Client, vm: &str, args: TopArgs) -> Result<(), TopError> {
    let is_terminal = std::io::stdout().is_terminal();
    let mut before = look(client)?;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        sleep(args.interval);
        let now = look(client)?;
        let text = Screen { vm, before: &before, now: &now }.text();
        let text = if is_terminal { drawn(&text, terminal::size()) } else { format!("{text}\n") };
        if !write_out(&text).map_err(TopError::Output)? {
            // The reader has left.
            return Ok(());
        }
        before = now;
        shown += 1;
    }
    Ok(())
}

/// What redraws a terminal of this size with the text. The cursor keeps a line of its own, without which the terminal would
/// scroll; a longer line would take the place of those below it.
fn drawn(text: &str, size: Option<TerminalSize>) -> String {
    let (rows, columns) =
        size.map_or((usize::MAX, usize::MAX), |size| (size.rows.saturating_sub(1), size.columns));
    let count = text.lines().count();
    // The last line says how many are missing.
    let shown = if count > rows { rows.saturating_sub(1) } else { count };
    let left_out = match count.saturating_sub(shown) {
        0 => None,
        left_out => Some(format!("{left_out} more lines")).filter(|_| rows > 0),
    };
    let lines = text.lines().take(shown).chain(left_out.as_deref());
    let mut out = HOME.to_owned();
    for line in lines {
        out.extend(line.chars().take(columns));
        out.push_str(CLEAR_LINE);
    }
    out.push_str(CLEAR_BELOW);
    out
}

fn look(client: &Client) -> Result<Samples, TopError> {
    let text = client.ask(Method::Get, "vm.metrics", None)?.unwrap_or_default();
    Ok(Samples::read(&text, Instant::now())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, rows: usize, columns: usize) -> Vec<String> {
        let text = drawn(text, Some(TerminalSize { rows, columns }));
        let inner = text.strip_prefix(HOME).and_then(|text| text.strip_suffix(CLEAR_BELOW));
        inner.expect("a drawing").split_terminator(CLEAR_LINE).map(str::to_owned).collect()
    }

    #[test]
    fn what_does_not_fit_the_terminal_is_cut() {
        let text = "one\n\nthree\nfour\n";
        assert_eq!(lines(text, 5, 80), ["one", "", "three", "four"], "the cursor is below");
        assert_eq!(lines(text, 4, 80), ["one", "", "2 more lines"]);
        assert_eq!(lines(text, 2, 80), ["4 more lines"]);
        assert_eq!(lines(text, 1, 80), [""; 0]);
        assert_eq!(lines(text, 9, 3), ["one", "", "thr", "fou"]);
        assert_eq!(lines("\u{e4}\u{f6}\u{fc}\n", 9, 2), ["\u{e4}\u{f6}"], "characters, not bytes");
    }

    #[test]
    fn without_a_size_all_is_shown() {
        let wanted = format!("{HOME}one{CLEAR_LINE}two{CLEAR_LINE}{CLEAR_BELOW}");
        assert_eq!(drawn("one\ntwo\n", None), wanted);
    }
}
