// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Follows a migration to its end: a progress bar on a terminal, plain lines elsewhere, nothing for
//! `--wait`.
//!
//! Owns the polling, the words and the verdict. Must never change anything in the VMM.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use thiserror::Error;
use vmm::api::ProgressDocument;
use vmm::api::client::{Client, ClientError, KeptConnection};
use vmm::api::types::document::{FailureReport, GuestLocation, LatencySnapshot, Phase};

use super::{exit, print_line};

/// Poll interval.
const POLL: Duration = Duration::from_millis(100);

/// Interval of plain lines while only amounts change.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Maximum redraws of the bar per second: several for each poll, or the last of them would be left out.
const DRAWS_PER_S: u8 = 100;

/// Weight of the newest measurement in the displayed rate.
const RATE_WEIGHT: f64 = 0.3;

/// How a migration is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Not shown.
    None,
    /// As lines of text.
    Lines,
    /// As a progress bar.
    Bar,
}

impl View {
    /// The view that fits stdout.
    pub fn for_stdout() -> Self {
        if std::io::stdout().is_terminal() { Self::Bar } else { Self::Lines }
    }
}

/// Why a followed migration did not end well.
#[derive(Debug, Error)]
pub enum FollowError {
    /// There is no migration.
    #[error("there is no migration to follow")]
    Nothing(#[source] ClientError),
    /// The progress document is malformed.
    #[error("the progress document of the VMM cannot be read")]
    Document(#[source] serde_json::Error),
    /// The migration failed or was cancelled.
    #[error("{}", reasons(failure))]
    Failed {
        /// The failure as reported by the VMM.
        failure: Box<FailureReport>,
    },
    /// The migration failed without a reported reason.
    #[error("the migration failed; see the log of the VMM")]
    NoReason,
    /// The VMM is gone.
    #[error("the VMM ended in phase {phase} of the migration; check the other side")]
    Vanished {
        /// The last phase seen.
        phase: Phase,
        /// The error of the last request.
        #[source]
        source: ClientError,
    },
}

impl FollowError {
    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Nothing(source) | Self::Vanished { source, .. } if source.is_timeout() => {
                exit::TIMEOUT
            }
            Self::Nothing(_) => exit::FAILED,
            Self::Vanished { .. } | Self::Document(_) | Self::NoReason => exit::LOOK,
            Self::Failed { failure } => match failure.guest {
                GuestLocation::OnSource | GuestLocation::NotHere if failure.cancelled => {
                    exit::CANCELLED
                }
                GuestLocation::OnSource | GuestLocation::NotHere => exit::FAILED,
                _ => exit::LOOK,
            },
        }
    }
}

/// The reasons of a failure as text.
fn reasons(failure: &FailureReport) -> String {
    if failure.chain.is_empty() {
        return "the migration failed; see the log of the VMM".to_owned();
    }
    failure.chain.join(": ")
}

/// The displayed contents of a progress document.
trait Shown {
    /// Whether the migration has ended.
    fn is_over(&self) -> bool;
    /// Whether postcopy has lost its connections.
    fn is_reconnecting(&self) -> bool;
    /// Bytes that this side has sent or received.
    fn moved(&self) -> u64;
    /// The page server that continues when the VMM has exited.
    fn page_server_socket(&self) -> Option<&Path>;
    /// Phase, and round if any.
    fn heading(&self) -> String;
    /// Everything except the phase. `rate` is the measured rate in bytes per second.
    fn details(&self, rate: u64) -> String;
    /// Whether memory is being transferred.
    fn is_moving(&self) -> bool;
    /// The final line.
    fn summary(&self) -> String;
}

impl Shown for ProgressDocument {
    /// A postcopy that has lost its connections can still recover, and has only ended once it has failed.
    fn is_over(&self) -> bool {
        match self.phase {
            Phase::Done | Phase::Failed => true,
            Phase::PostcopyPaused => self.error.is_some(),
            _ => false,
        }
    }

    fn is_reconnecting(&self) -> bool {
        matches!(self.phase, Phase::PostcopyPaused | Phase::PostcopyRecover)
    }

    fn moved(&self) -> u64 {
        self.moved_bytes().unwrap_or(0)
    }

    fn page_server_socket(&self) -> Option<&Path> {
        let server = self.page_server.as_ref().filter(|_| self.phase == Phase::HandedOn);
        server.map(|server| Path::new(&server.socket))
    }

    /// Phase, and round if any.
    fn heading(&self) -> String {
        match (self.phase, self.round) {
            (phase @ (Phase::Precopy | Phase::Receive), Some(round @ 1..)) => {
                format!("{phase} round {round}")
            }
            (phase, _) => phase.to_string(),
        }
    }

    /// Everything except the phase. `rate` is the measured rate in bytes per second.
    fn details(&self, rate: u64) -> String {
        let mut text = String::new();
        let mut add = |part: std::fmt::Arguments<'_>| {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{comma}{part}");
        };
        if self.is_reconnecting() {
            let reason = self.recovery.reason.as_deref().unwrap_or("the connections were lost");
            match self.recovery.left_ms {
                None => add(format_args!("reconnecting ({reason})")),
                Some(0) => add(format_args!("waiting for migration-recover ({reason})")),
                Some(ms) => {
                    let (minutes, seconds) = (ms / 60_000, ms / 1000 % 60);
                    add(format_args!("reconnecting, {minutes}:{seconds:02} left ({reason})"));
                }
            }
        }
        if let Some(all) = self.total_bytes.filter(|_| self.is_moving() || self.is_reconnecting()) {
            let all = BinaryBytes(all);
            match self.remaining_bytes {
                Some(left) => add(format_args!("{} of {all} left", BinaryBytes(left))),
                None => add(format_args!("{} of {all} here", BinaryBytes(self.moved()))),
            }
        }
        // A long line is cut off at its end, so the most important part comes first.
        if let Some(us) = self.downtime_us {
            add(format_args!("downtime {}", time_us(us)));
        } else if let Some(us) = self.expected_downtime_us {
            add(format_args!("downtime expected {}", time_us(us)));
        }
        if rate > 0 {
            add(format_args!("{}/s", BinaryBytes(rate)));
        }
        if let Some(rate @ 1..) = self.dirty_bytes_per_s.filter(|_| self.phase == Phase::Precopy) {
            add(format_args!("guest writes {}/s", BinaryBytes(rate)));
        }
        if let Some(seen @ 1..) = self.faults.seen {
            add(format_args!("{seen} faults"));
            if let Some(source) = self.faults.source {
                add(format_args!("by {source}"));
            }
        }
        if let Some(LatencySnapshot { count: 1.., p50, p99, max, .. }) = self.faults.latency_us {
            add(format_args!(
                "fault latency {} median, {} p99, {} longest",
                time_us(p50),
                time_us(p99),
                time_us(max)
            ));
        }
        text
    }

    fn is_moving(&self) -> bool {
        matches!(
            self.phase,
            Phase::Precopy | Phase::Receive | Phase::Stop | Phase::Serve | Phase::Fault
        )
    }

    /// The final line.
    fn summary(&self) -> String {
        let time = time_us(self.elapsed_ms.saturating_mul(1000));
        let moved = BinaryBytes(self.moved());
        let rounds = match self.round {
            None | Some(0) => String::new(),
            Some(1) => " in 1 round".to_owned(),
            Some(rounds) => format!(" in {rounds} rounds"),
        };
        let details = self.details(0);
        let details = if details.is_empty() { details } else { format!(", {details}") };
        format!("{} in {time}: {moved} of memory{rounds}{details}", self.phase)
    }
}

/// A time as text.
fn time_us(us: u64) -> String {
    match us {
        0..1000 => format!("{us} us"),
        1000..10_000 => format!("{}.{} ms", us / 1000, us % 1000 / 100),
        10_000..1_000_000 => format!("{} ms", us / 1000),
        1_000_000..60_000_000 => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
        _ => format!("{} s", us / 1_000_000),
    }
}

/// The measured rate of the transfer.
#[derive(Default)]
struct Rate {
    last: Option<(Instant, u64)>,
    bytes_per_s: Option<f64>,
}

impl Rate {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate that is shown with three digits, from counters that only grow"
    )]
    fn at(&mut self, now: Instant, bytes: u64) -> u64 {
        if let Some((then, before)) = self.last.replace((now, bytes)) {
            let seconds = now.duration_since(then).as_secs_f64();
            if seconds > 0.0 {
                let measured = bytes.saturating_sub(before) as f64 / seconds;
                let smooth =
                    self.bytes_per_s.map_or(measured, |old| old + RATE_WEIGHT * (measured - old));
                self.bytes_per_s = Some(smooth);
            }
        }
        self.bytes_per_s.unwrap_or(0.0) as u64
    }
}

/// The output of a view.
enum Screen {
    None,
    Lines { heading: String, printed: Option<Instant> },
    Bar(ProgressBar),
}

impl Screen {
    fn new(view: View) -> Self {
        match view {
            View::None => Self::None,
            View::Lines => Self::Lines { heading: String::new(), printed: None },
            View::Bar => {
                let bar = ProgressBar::with_draw_target(
                    Some(1),
                    ProgressDrawTarget::stdout_with_hz(DRAWS_PER_S),
                );
                let style = ProgressStyle::with_template(
                    "{prefix} [{wide_bar}] {percent:>3} %\n{wide_msg}",
                );
                if let Ok(style) = style {
                    bar.set_style(style.progress_chars("=> "));
                }
                Self::Bar(bar)
            }
        }
    }

    fn show(&mut self, document: &ProgressDocument, rate: u64, now: Instant) {
        match self {
            Self::None => {}
            Self::Lines { heading, printed } => {
                let new = document.heading();
                let is_due = printed.is_none_or(|at| now.duration_since(at) >= LINE_EVERY);
                if *heading != new || is_due {
                    let details = document.details(rate);
                    let colon = if details.is_empty() { "" } else { ": " };
                    print_line(&format!("{new}{colon}{details}"));
                    (*heading, *printed) = (new, Some(now));
                }
            }
            Self::Bar(bar) => {
                let all = document.total_bytes.unwrap_or(0);
                bar.set_length(all.max(1));
                let here = match document.remaining_bytes {
                    None => document.moved(),
                    Some(left) if document.is_moving() || document.is_over() => {
                        all.saturating_sub(left)
                    }
                    Some(_) => 0,
                };
                bar.set_prefix(document.heading());
                bar.set_message(document.details(rate));
                bar.set_position(here.min(all));
                bar.tick();
            }
        }
    }

    /// Prints the final line; errors go to stderr elsewhere.
    fn end(self, last: Option<&ProgressDocument>) {
        if let Self::Bar(bar) = &self {
            bar.finish_and_clear();
        }
        match (self, last) {
            (Self::None, _) | (_, None) => {}
            (_, Some(document)) => print_line(&document.summary()),
        }
    }
}

/// A client that follows a migration. While it is there, the VMM stays until it has read the end.
pub struct Watcher<'a> {
    client: &'a Client,
    connection: KeptConnection,
}

impl<'a> Watcher<'a> {
    /// A client of this VMM, which does not know of it yet.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn new(client: &'a Client) -> Result<Self, FollowError> {
        Ok(Self { client, connection: client.keep().map_err(FollowError::Nothing)? })
    }

    /// Tells the VMM that it is there, before there is a migration.
    pub fn announce(&mut self) {
        // An unreachable VMM is noticed soon enough.
        let _ = self.ask();
    }

    fn ask(&mut self) -> Result<String, ClientError> {
        self.connection.get("vm.migration-progress").map(Option::unwrap_or_default)
    }

    /// Goes on at another socket.
    fn go_to(&mut self, socket: &Path) -> Result<(), ClientError> {
        self.connection = self.client.clone().at(socket).keep()?;
        Ok(())
    }
}

/// Follows the current or last migration to its end, including at its page server.
///
/// # Errors
/// It did not end well, or its end was not seen.
pub fn follow(mut watcher: Watcher<'_>, view: View) -> Result<(), FollowError> {
    let mut screen = Screen::new(view);
    let mut rate = Rate::default();
    let mut last: Option<ProgressDocument> = None;
    loop {
        let text = match watcher.ask() {
            Ok(text) => text,
            Err(source) => {
                screen.end(last.as_ref());
                return Err(match last {
                    None => FollowError::Nothing(source),
                    Some(document) => FollowError::Vanished { phase: document.phase, source },
                });
            }
        };
        let document: ProgressDocument = match serde_json::from_str(&text) {
            Ok(document) => document,
            Err(error) => {
                screen.end(last.as_ref());
                return Err(FollowError::Document(error));
            }
        };
        let now = Instant::now();
        if let Some(socket) = document.page_server_socket() {
            screen.show(&document, 0, now);
            let went = watcher.go_to(socket);
            let phase = document.phase;
            went.map_err(|source| FollowError::Vanished { phase, source })?;
            rate = Rate::default();
            last = Some(document);
            continue;
        }
        if document.is_over() {
            screen.end(Some(&document));
            return verdict(document);
        }
        // Between the request and the first phase there is nothing to show.
        if document.phase != Phase::Idle {
            screen.show(&document, rate.at(now, document.moved()), now);
        }
        last = Some(document);
        std::thread::sleep(POLL);
    }
}

fn verdict(document: ProgressDocument) -> Result<(), FollowError> {
    match document.error {
        _ if document.phase == Phase::Done => Ok(()),
        Some(failure) => Err(FollowError::Failed { failure: Box::new(failure) }),
        None => Err(FollowError::NoReason),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;

    /// The document of a migration that has not started, with these values.
    fn document(values: serde_json::Value) -> ProgressDocument {
        crate::cli::tests::progress(values)
    }

    fn failure(guest: &str, cancelled: bool, chain: &[&str]) -> serde_json::Value {
        json!({
            "side": "source", "phase": "precopy", "step": "sending memory", "guest": guest,
            "cancelled": cancelled, "chain": chain,
        })
    }

    #[test]
    fn precopy_is_told_with_round_rates_and_downtime() {
        let document = document(json!({
            "side": "source", "phase": "precopy", "round": 3, "total_bytes": 1_u64 << 30,
            "remaining_bytes": 64 << 20, "dirty_bytes_per_s": 32 << 20,
            "expected_downtime_us": 61_500, "unknown_field": [1, 2],
        }));
        assert_eq!(document.heading(), "precopy round 3");
        assert_eq!(
            document.details(512 << 20),
            "64.00 MiB of 1.00 GiB left, downtime expected 61 ms, 512.00 MiB/s, guest writes \
             32.00 MiB/s"
        );
        let long = document.details(u64::MAX);
        assert!(long.find("expected 61 ms").unwrap() < 64, "not on 80 columns: {long}");
    }

    #[test]
    fn what_is_not_known_is_left_out() {
        let unknown = json!({
            "side": "destination", "phase": "receive", "round": null, "total_bytes": 1 << 20,
            "remaining_bytes": null, "memory_bytes_received": 4096, "downtime_us": null,
            "faults": {"seen": null, "latency_us": null},
        });
        let unknown = document(unknown);
        assert_eq!(unknown.heading(), "receive");
        assert_eq!(unknown.details(0), "4.00 KiB of 1.00 MiB here");
    }

    #[test]
    fn postcopy_is_told_with_faults_and_latencies() {
        let latency = json!({
            "count": 5, "min": 1, "p50": 90, "p90": 100, "p99": 4200, "p999": 5000, "max": 20_000,
        });
        let document = document(json!({
            "side": "destination", "phase": "fault", "total_bytes": 1 << 20,
            "remaining_bytes": 4096,
            "faults": {"source": "uffd", "seen": 7, "latency_us": latency},
        }));
        assert_eq!(
            document.details(0),
            "4.00 KiB of 1.00 MiB left, 7 faults, by uffd, fault latency 90 us median, 4.2 ms p99, \
             20 ms longest"
        );
    }

    #[test]
    fn a_page_server_is_asked_when_the_vmm_has_handed_on() {
        let server = json!({"state": "serving", "socket": "/run/a.sock.pages", "pid": 7});
        let on = document(json!({"phase": "handed-on", "page_server": server}));
        assert_eq!(on.page_server_socket(), Some(Path::new("/run/a.sock.pages")));
        assert!(!on.is_over(), "pages are still on their way");
        let before = document(json!({"phase": "serve", "page_server": server}));
        assert_eq!(before.page_server_socket(), None);
        assert_eq!(document(json!({"phase": "handed-on"})).page_server_socket(), None);
    }

    #[test]
    fn the_exit_code_says_how_it_ended() {
        let code = |value| verdict(document(value)).map_or_else(|error| error.exit_code(), |()| 0);
        assert_eq!(code(json!({"phase": "done"})), exit::OK);
        let failed = |guest: &str, cancelled: bool| json!({"phase": "failed", "error": failure(guest, cancelled, &[])});
        assert_eq!(code(failed("on-source", false)), exit::FAILED);
        assert_eq!(code(failed("not-here", false)), exit::FAILED);
        assert_eq!(code(failed("on-source", true)), exit::CANCELLED);
        for guest in ["on-destination", "in-doubt", "postcopy-paused", "paused-on-source"] {
            assert_eq!(code(failed(guest, false)), exit::LOOK, "{guest}");
        }
        let lost = |error| json!({"phase": "postcopy-paused", "error": error});
        assert_eq!(code(lost(failure("postcopy-paused", false, &[]))), exit::LOOK);
        assert_eq!(code(json!({"phase": "failed"})), exit::LOOK, "no reason given");
    }

    #[test]
    fn lost_connections_are_not_the_end() {
        let lost = document(json!({
            "side": "source", "phase": "postcopy-paused", "total_bytes": 1 << 20,
            "remaining_bytes": 4096, "recovery": {"reason": "the peer closed the connection"},
        }));
        assert!(!lost.is_over(), "it heals");
        assert_eq!(
            lost.details(0),
            "reconnecting (the peer closed the connection), 4.00 KiB of 1.00 MiB left"
        );
        let with_time = |left_ms: u64| {
            let recovery = json!({"reason": "no route", "left_ms": left_ms});
            document(json!({"phase": "postcopy-paused", "recovery": recovery})).details(0)
        };
        assert_eq!(with_time(598_200), "reconnecting, 9:58 left (no route)");
        assert_eq!(with_time(0), "waiting for migration-recover (no route)");
        assert!(!document(json!({"phase": "postcopy-recover"})).is_over());
        let failed = failure("postcopy-paused", false, &[]);
        let failed = json!({"phase": "postcopy-paused", "error": failed});
        assert!(document(failed).is_over(), "the pages were handed over");
    }

    #[test]
    fn what_failed_is_told_once_with_all_sentences() {
        let chain = ["migration failed on the source", "no route"];
        let value = json!({"phase": "failed", "error": failure("on-source", false, &chain)});
        let error = verdict(document(value)).unwrap_err();
        assert_eq!(error_text::chain(&error), "migration failed on the source: no route");
    }

    #[test]
    fn the_rate_follows_what_moves() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert_eq!(rate.at(start, 0), 0);
        assert_eq!(rate.at(start + Duration::from_secs(1), 1000), 1000);
        let slower = rate.at(start + Duration::from_secs(2), 1000);
        assert!(slower > 0 && slower < 1000, "{slower}");
    }
}
