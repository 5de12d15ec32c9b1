// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command line of `prezero-pool`.
//!
//! Owns options and messages. The pool itself is the crate `prezero-pool`.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, value_parser};
use prezero_pool::{Config, ConfigError, ServeError};
use thiserror::Error;
use vmm::options::SeccompMode;

/// Default path of the configuration.
const CONFIG: &str = "/etc/prezero-pool.toml";

/// Errors of the program.
#[derive(Debug, Error)]
pub enum PoolCommandError {
    /// The configuration is invalid.
    #[error("the configuration of the pool is not valid")]
    Config(#[from] ConfigError),
    /// The daemon failed.
    #[error("the pool cannot be served")]
    Serve(#[from] ServeError),
    /// The configuration names no socket for statistics.
    #[error("the configuration names no stats_socket, so there are no statistics to read")]
    NoStats,
    /// The statistics cannot be read.
    #[error("cannot read the statistics at {}", path.display())]
    Stats {
        /// Path of the socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// The command line of prezero-pool.
pub fn command() -> Command {
    let config = Arg::new("config")
        .long("config")
        .global(true)
        .value_parser(value_parser!(PathBuf))
        .default_value(CONFIG)
        .help("Configuration file (TOML)");
    let verbosity = Arg::new("v")
        .short('v')
        .action(clap::ArgAction::Count)
        .help("Increase the log level; may be given several times");
    let seccomp = Arg::new("seccomp")
        .long("seccomp")
        .value_name("MODE")
        .value_parser(["true", "false", "log", "errno"])
        .default_value("true")
        .help("What happens at a forbidden system call: the end, nothing, a line in the kernel's log, EPERM");
    Command::new("prezero-pool")
        .about("Keep populated, zeroed memory ready for virtual machines")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .arg(config)
        .subcommand(
            Command::new("run")
                .about("Run the daemon in the foreground")
                .args([verbosity, seccomp]),
        )
        .subcommand(Command::new("check").about("Check the configuration"))
        .subcommand(Command::new("stats").about("Print statistics in the Prometheus format"))
}

/// The requested action.
pub struct Call {
    /// `run`, `check` or `stats`.
    name: String,
    config: PathBuf,
    /// Log verbosity.
    pub verbosity: u8,
    /// Mode of the daemon's system call filter.
    pub seccomp: SeccompMode,
}

impl Call {
    /// Reads the arguments that clap has validated.
    pub fn new(matches: &ArgMatches) -> Self {
        let (name, arguments) =
            matches.subcommand().map_or(("", matches), |(name, arguments)| (name, arguments));
        let config = arguments.get_one::<PathBuf>("config").cloned().unwrap_or_default();
        let verbosity = if name == "run" { arguments.get_count("v") } else { 0 };
        let seccomp = match arguments.try_get_one::<String>("seccomp") {
            Ok(Some(text)) => SeccompMode::parse(text),
            // Commands that only print need none.
            _ => SeccompMode::Off,
        };
        Self { name: name.to_owned(), config, verbosity, seccomp }
    }

    /// Carries out the action; returns the text to print.
    ///
    /// # Errors
    /// Names what is missing and what to do.
    pub fn carry_out(&self) -> Result<String, PoolCommandError> {
        let config = Config::read(&self.config)?;
        match self.name.as_str() {
            "run" => match prezero_pool::serve(config)? {},
            "stats" => {
                let path = config.stats_socket.ok_or(PoolCommandError::NoStats)?;
                prezero_pool::read_stats(&path)
                    .map_err(|source| PoolCommandError::Stats { path, source })
            }
            _ => {
                let count: u64 = config.classes.iter().map(|class| u64::from(class.count)).sum();
                Ok(format!("{}: {count} slots\n", self.config.display()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn the_words_are_consistent_and_understood() {
        command().debug_assert();
        let call = |words: &[&str]| Call::new(&command().try_get_matches_from(words).unwrap());
        let run = call(&["prezero-pool", "run", "--config", "/c", "-vv"]);
        assert_eq!((run.name.as_str(), run.verbosity), ("run", 2));
        assert_eq!(run.seccomp, SeccompMode::Enforce);
        let without = call(&["prezero-pool", "run", "--seccomp", "false"]);
        assert_eq!(without.seccomp, SeccompMode::Off);
        assert_eq!(run.config, PathBuf::from("/c"));
        assert_eq!(call(&["prezero-pool", "stats"]).config, PathBuf::from(CONFIG));
        assert!(command().try_get_matches_from(["prezero-pool"]).is_err());
        let error = call(&["prezero-pool", "check", "--config", "/nonexistent"]).carry_out();
        assert!(matches!(error, Err(PoolCommandError::Config(_))));
    }
}
