// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command line of `ch-remote`: one subcommand, one request, its answer on stdout.
//!
//! Owns how a request is made and how it ends. What the VMM refuses is not judged here: unsupported
//! requests are sent and come back with the VMM's own words.

mod call;
mod check;
mod commands;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use clap::ArgMatches;
use serde_json::Value;
use thiserror::Error;
use vmm::api::client::{Client, ClientError};
use vmm::api::endpoints::Method;
use vmm::config::{ConfigError, ConfigFd, OptionError};

use super::top::{self, TopArgs, TopError};
use super::upgrade::{self, UpgradeArgs, UpgradeError};
use super::watch::{self, FollowError, Watcher};
use super::{chart, exit, interrupt, write_out};

pub use call::{Call, call};
pub use commands::{command, keys};

/// The only command that makes many requests.
pub(super) const TOP: &str = "top";
/// The only command that starts a process.
pub(super) const UPGRADE: &str = "upgrade";
/// The only command whose answer is no JSON, and the last line of that.
const METRICS: &str = "metrics";
const METRICS_END: &str = "# EOF";

/// Why a command failed.
#[derive(Debug, Error)]
pub enum RemoteError {
    /// The VMM refuses the request, or does not answer.
    #[error("{command} failed")]
    Request {
        /// The subcommand.
        command: String,
        /// The cause.
        #[source]
        source: ClientError,
    },
    /// An option string cannot be parsed.
    #[error("the argument of {command} cannot be read")]
    Option {
        /// The subcommand.
        command: String,
        /// The cause.
        #[source]
        source: OptionError,
    },
    /// An argument is invalid.
    #[error("the argument of {command} is not valid")]
    Config {
        /// The subcommand.
        command: String,
        /// The cause.
        #[source]
        source: ConfigError,
    },
    /// A number cannot be parsed.
    #[error("'{text}' is not a valid {what}: {reason}")]
    Number {
        /// What the number is.
        what: &'static str,
        /// The text as given.
        text: String,
        /// What is expected.
        reason: String,
    },
    /// A descriptor is not open.
    #[error("the descriptor {number} cannot be sent: is it open in this process?")]
    Descriptor {
        /// Number of the descriptor.
        number: i32,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The configuration cannot be read.
    #[error("the configuration '{path}' cannot be read")]
    Read {
        /// Path of the file, `-` for stdin.
        path: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The migration report is malformed.
    #[error("the VMM's report of the migration cannot be read")]
    Report(#[source] serde_json::Error),
    /// The answer is malformed.
    #[error("the VMM's answer to {command} cannot be read")]
    Answer {
        /// The subcommand.
        command: String,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The text of metrics breaks off.
    #[error("the VMM's answer to {command} is cut: it does not end with '{METRICS_END}'")]
    Cut {
        /// The subcommand.
        command: String,
    },
    /// The answer cannot be written to stdout.
    #[error("{command} succeeded, but its answer cannot be written to standard output")]
    Output {
        /// The subcommand.
        command: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("'{path}' cannot be written")]
    Write {
        /// Path of the file.
        path: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// What the VM does cannot be shown.
    #[error(transparent)]
    Top(#[from] TopError),
    /// The VM is in no new process.
    #[error(transparent)]
    Upgrade(#[from] UpgradeError),
    /// A migration would not succeed.
    #[error("the migration would not succeed; problems: {problems}")]
    NotPossible {
        /// How many were found.
        problems: usize,
    },
    /// The migration that was followed failed, or its end was not seen.
    #[error(transparent)]
    Followed(#[from] FollowError),
}

impl RemoteError {
    /// Whether the command line is invalid and nothing was sent.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Option { .. } | Self::Config { .. } | Self::Number { .. })
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Followed(error) => error.exit_code(),
            Self::Upgrade(error) => error.exit_code(),
            Self::Request { source, .. } if source.is_timeout() => exit::TIMEOUT,
            Self::NotPossible { .. } => exit::NOT_POSSIBLE,
            error if error.is_usage() => exit::USAGE,
            _ => exit::FAILED,
        }
    }
}

/// Carries out the command line; returns the text for stdout.
///
/// # Errors
/// The command failed.
pub fn run(matches: &ArgMatches) -> Result<Option<String>, RemoteError> {
    let socket = matches.get_one::<String>("api-socket").map(PathBuf::from).unwrap_or_default();
    let Some((name, sub)) = matches.subcommand() else { return Ok(None) };
    let vm = socket.display().to_string();
    let limit = matches.get_one::<u32>("timeout").map(|s| Duration::from_secs(u64::from(*s)));
    let client = Client::new(&socket).with_limit(limit);
    if name == TOP {
        let seconds = sub.get_one::<u32>("interval").copied().unwrap_or(1);
        let interval = Duration::from_secs(seconds.into());
        top::run(&client, &vm, TopArgs { interval, count: sub.get_one("count").copied() })?;
        return Ok(None);
    }
    if name == UPGRADE {
        let binary = sub.get_one::<PathBuf>("binary").cloned().unwrap_or_default();
        let ms = sub.get_one::<u32>("timeout-ms").copied().unwrap_or(1);
        let timeout = Duration::from_millis(ms.into());
        let text = upgrade::run(&client, &socket, &UpgradeArgs { binary, timeout })?;
        return printed(name, text, matches.get_flag("pretty")).map(Some);
    }
    let call = call(name, sub)?;
    if call.follow.is_some() {
        interrupt::explain(format!(
            "The migration continues. To cancel it: ch-remote --api-socket {vm} migration-cancel\n\
             To follow it again: ch-remote --api-socket {vm} migration-progress --watch"
        ));
    }
    let request = |source| RemoteError::Request { command: name.to_owned(), source };
    match call.follow {
        Some(view) if call.method == Method::Get => {
            watch::follow(Watcher::new(&client)?, view)?;
            Ok(None)
        }
        Some(view) => {
            // A VMM that was asked for progress before stays until the end has been read.
            let mut watcher = Watcher::new(&client)?;
            watcher.announce();
            client.ask(call.method, call.path, call.body).map_err(request)?;
            watch::follow(watcher, view)?;
            Ok(None)
        }
        None => {
            let fds = open(&call.fds)?;
            let answer =
                client.ask_with(call.method, call.path, call.body, fds).map_err(request)?;
            if let Some(path) = sub.try_get_one::<String>("svg").ok().flatten() {
                return draw(path, &answer.unwrap_or_default(), &vm);
            }
            let is_pretty = matches.get_flag("pretty");
            if name == check::MIGRATE_CHECK {
                check::show(answer.unwrap_or_default(), sub.get_flag("json"), is_pretty)?;
                return Ok(None);
            }
            answer.map(|text| printed(name, text, is_pretty)).transpose()
        }
    }
}

/// Duplicates of the descriptors that the command line names by number.
fn open(fds: &[ConfigFd]) -> Result<Vec<OwnedFd>, RemoteError> {
    let duplicate = |fd: &ConfigFd| {
        let number = fd.number();
        fd.duplicate().map_err(|source| RemoteError::Descriptor { number, source })
    };
    fds.iter().map(duplicate).collect()
}

/// An answer as it is printed: JSON as it came, as cloud-hypervisor's does, or indented; metrics as they came.
fn printed(command: &str, mut text: String, is_pretty: bool) -> Result<String, RemoteError> {
    if command == METRICS {
        text.truncate(text.trim_end().len());
        let is_whole = text.ends_with(METRICS_END);
        return if is_whole {
            Ok(text)
        } else {
            Err(RemoteError::Cut { command: command.to_owned() })
        };
    }
    let read = serde_json::from_str::<Value>(&text);
    let printed = read
        .and_then(|value| if is_pretty { serde_json::to_string_pretty(&value) } else { Ok(text) });
    printed.map_err(|source| RemoteError::Answer { command: command.to_owned(), source })
}

/// Writes an answer to stdout. It is no error if the reader has left; the exit code still reports the
/// result.
///
/// # Errors
/// An error other than a closed pipe.
pub fn print(matches: &ArgMatches, answer: &str) -> Result<(), RemoteError> {
    write_out(&format!("{answer}\n")).map(drop).map_err(|source| {
        let command = matches.subcommand_name().unwrap_or_default().to_owned();
        RemoteError::Output { command, source }
    })
}

/// Draws the chart of a report to a file, or returns it if it is to go to stdout.
fn draw(path: &str, report: &str, vm: &str) -> Result<Option<String>, RemoteError> {
    let report = serde_json::from_str(report).map_err(RemoteError::Report)?;
    let picture = chart::svg(&report, vm);
    if path == "-" {
        return Ok(Some(picture));
    }
    std::fs::write(path, picture)
        .map_err(|source| RemoteError::Write { path: path.to_owned(), source })?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_nothing_but_json() {
        let text = |is_pretty| printed("info", r#"{"a":1}"#.to_owned(), is_pretty).ok();
        assert_eq!(text(true).as_deref(), Some("{\n  \"a\": 1\n}"));
        assert_eq!(text(false).as_deref(), Some(r#"{"a":1}"#));
        for is_pretty in [false, true] {
            let error = printed("info", "plain".to_owned(), is_pretty).expect_err("no JSON");
            assert_eq!(error.to_string(), "the VMM's answer to info cannot be read");
            assert_eq!(error.exit_code(), exit::FAILED);
        }
    }

    #[test]
    fn metrics_are_printed_as_they_come_if_they_are_whole() {
        let whole = "godwit_vcpus 1\n# EOF\n";
        for is_pretty in [false, true] {
            let text = printed(METRICS, whole.to_owned(), is_pretty).ok();
            assert_eq!(text.as_deref(), Some(whole.trim_end()));
        }
        let error = printed(METRICS, "godwit_vcpus 1\n".to_owned(), false).expect_err("it is cut");
        assert!(error.to_string().contains("'# EOF'") && error.exit_code() == exit::FAILED);
    }
}
