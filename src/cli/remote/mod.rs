// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command line of `ch-remote`: one subcommand, one request, its answer on stdout.
//!
//! Owns how a request is made and how it ends. What the VMM refuses is not judged here: unsupported
//! requests are sent and come back with the VMM's own words.

mod call;
mod commands;

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use clap::ArgMatches;
use serde_json::Value;
use thiserror::Error;
use vmm::api::client::{Client, ClientError};
use vmm::api::endpoints::Method;
use vmm::config::{ConfigError, ConfigFd, OptionError};

use super::watch::{self, FollowError};
use super::{chart, exit, interrupt};

pub use call::{Call, call};
pub use commands::command;

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
            Self::Request { source, .. } if source.is_timeout() => exit::TIMEOUT,
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
    let call = call(name, sub)?;
    let vm = socket.display().to_string();
    let limit = matches.get_one::<u32>("timeout").map(|s| Duration::from_secs(u64::from(*s)));
    let client = Client::new(socket).with_limit(limit);
    if call.follow.is_some() {
        interrupt::explain(format!(
            "The migration continues. To cancel it: ch-remote --api-socket {vm} migration-cancel\n\
             To follow it again: ch-remote --api-socket {vm} migration-progress --watch"
        ));
    }
    let request = |source| RemoteError::Request { command: name.to_owned(), source };
    match call.follow {
        Some(view) if call.method == Method::Get => {
            watch::follow(&client, view)?;
            Ok(None)
        }
        Some(view) => {
            // A VMM that was asked for progress before stays until the end has been read.
            watch::announce(&client);
            client.ask(call.method, call.path, call.body).map_err(request)?;
            watch::follow(&client, view)?;
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

/// An answer as it is printed: JSON as it came, as cloud-hypervisor's does, or indented.
fn printed(command: &str, text: String, is_pretty: bool) -> Result<String, RemoteError> {
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
    let mut out = std::io::stdout();
    match writeln!(out, "{answer}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            let command = matches.subcommand_name().unwrap_or_default().to_owned();
            Err(RemoteError::Output { command, source })
        }
        _ => Ok(()),
    }
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
}
