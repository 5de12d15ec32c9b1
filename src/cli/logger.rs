// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where log messages go: stderr or a file, a line each, with the time since the start.
//!
//! Owns where lines go. Lines of different threads never mix: each is one write. What is in a line
//! says [`super::log_format`].

use std::fs::File;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;

use log::{LevelFilter, Log, Metadata, Record};
use thiserror::Error;

use super::log_format::LogFormat;

/// Why there is no log.
#[derive(Debug, Error)]
pub enum LogError {
    /// The file cannot be made.
    #[error("the log file '{path}' cannot be made")]
    Create {
        /// Its path.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is one already.
    #[error("there is a logger already")]
    Twice,
}

enum Output {
    Stderr,
    File(Arc<File>),
}

struct Logger {
    format: LogFormat,
    output: Output,
    line_end: &'static str,
}

impl Log for Logger {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = self.format.line(record) + self.line_end;
        // Nobody can be told that telling failed.
        let _ = match &self.output {
            Output::Stderr => io::stderr().write_all(line.as_bytes()),
            Output::File(file) => (&**file).write_all(line.as_bytes()),
        };
    }

    fn flush(&self) {}
}

/// Starts logging. Gives the file, for processes that log to it as well.
///
/// # Errors
/// The file cannot be made, or logging was started before.
pub fn start(
    format: LogFormat,
    verbosity: u8,
    file: Option<&Path>,
) -> Result<Option<Arc<File>>, LogError> {
    let create = |path: &Path| {
        let failed = |source| LogError::Create { path: path.display().to_string(), source };
        File::create(path).map(Arc::new).map_err(failed)
    };
    let file = file.map(create).transpose()?;
    let output = file.clone().map_or(Output::Stderr, Output::File);
    // A terminal may be in raw mode while the guest uses it.
    let raw = matches!(output, Output::Stderr) && io::stderr().is_terminal();
    let logger = Logger { format, output, line_end: if raw { "\r\n" } else { "\n" } };
    log::set_boxed_logger(Box::new(logger)).map_err(|_| LogError::Twice)?;
    log::set_max_level(match verbosity {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    });
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_time_thread_level_and_place() {
        let record = Record::builder()
            .args(format_args!("hello"))
            .level(log::Level::Warn)
            .file(Some("a.rs"))
            .line(Some(7))
            .build();
        let line = LogFormat::default_of("cloud-hypervisor").line(&record);
        assert!(line.starts_with("cloud-hypervisor:   "), "{line}");
        assert!(line.ends_with("> WARN:a.rs:7 -- hello"), "{line}");
    }
}
