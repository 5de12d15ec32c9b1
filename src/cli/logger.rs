// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The logger: writes log lines to stderr or a file.
//!
//! Owns where lines go. Lines of different threads never mix: each is one write. A reader that does not
//! read (a terminal that was stopped, a pipe) keeps no thread waiting that has something to log: lines that
//! find no room are left out, and the next one says how many. What is in a line says
//! [`super::log_format`].

use std::fs::{self, File};
use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use log::{LevelFilter, Log, Metadata, Record};
use thiserror::Error;
use vmm::output_queue::OutputQueue;

use super::log_format::{self, LogFormat};

/// Why logging cannot be started.
#[derive(Debug, Error)]
pub enum LogError {
    /// The log file cannot be created.
    #[error("the log file '{path}' cannot be made")]
    Create {
        /// Path of the file.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A descriptor or thread cannot be created.
    #[error("logging cannot be started")]
    Start(#[source] io::Error),
    /// Logging was started before.
    #[error("there is a logger already")]
    Twice,
}

/// Maximum number of queued lines.
const QUEUE_LINES: usize = 1024;

/// Longest wait for a slow reader at the end of the process.
const FLUSH_TIME: Duration = Duration::from_secs(1);

enum Output {
    /// A file, writing to which does not wait for a reader.
    File(Arc<File>),
    /// A terminal, pipe or socket.
    Reader(OutputQueue<String>),
}

impl Output {
    fn to(file: Arc<File>) -> io::Result<Self> {
        if file.metadata()?.is_file() {
            return Ok(Self::File(file));
        }
        let nothing_to_tell = |_: &io::Error| ();
        OutputQueue::start("log", file.try_clone()?, QUEUE_LINES, nothing_to_tell).map(Self::Reader)
    }
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
        match &self.output {
            // There is nowhere to report an error to.
            Output::File(file) => drop((&**file).write_all(line.as_bytes())),
            Output::Reader(queue) => queue.put(|lost| match lost {
                0 => line,
                lost => format!("({lost} lines are missing here){}{line}", self.line_end),
            }),
        }
    }

    fn flush(&self) {
        if let Output::Reader(queue) = &self.output {
            queue.flush(FLUSH_TIME);
        }
    }
}

/// What a log file keeps of what it has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Nothing.
    Truncated,
    /// All: it is the log of a process whose place this one takes, and which still writes to it.
    Kept,
}

/// Creates or truncates a file. A named pipe or other file with a reader is neither truncated nor waited
/// for. Lines of two processes that write to one file do not overwrite each other.
fn create(path: &Path, before: Before) -> io::Result<File> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let open = |with_read: bool| {
            let mut options = File::options();
            options.append(true).read(with_read);
            options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
        };
        return match open(false) {
            // A pipe that has no reader yet.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => open(true),
            opened => opened,
        };
    }
    let file = File::options().append(true).create(true).open(path)?;
    if before == Before::Truncated {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Starts logging. Returns the log file, for child processes that log to it as well.
///
/// # Errors
/// The file cannot be created, or logging was started before.
pub fn start(
    format: LogFormat,
    verbosity: u8,
    file: Option<&Path>,
    before: Before,
) -> Result<Option<Arc<File>>, LogError> {
    let file = file
        .map(|path| {
            let failed = |source| LogError::Create { path: path.display().to_string(), source };
            create(path, before).map(Arc::new).map_err(failed)
        })
        .transpose()?;
    // Later threads cannot open its file.
    log_format::read_time_zone();
    // A terminal is in raw mode while the guest uses it.
    let raw = file.is_none() && io::stderr().is_terminal();
    let output = match &file {
        Some(file) => Ok(Arc::clone(file)),
        None => io::stderr().as_fd().try_clone_to_owned().map(|fd| Arc::new(File::from(fd))),
    };
    let output = output.and_then(Output::to).map_err(LogError::Start)?;
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
    fn two_processes_may_have_one_log_file() {
        let path = std::env::temp_dir().join(format!("godwit-log-{}", std::process::id()));
        let text = || fs::read_to_string(&path).expect("a file");
        let mut first = create(&path, Before::Truncated).expect("a file");
        first.write_all(b"first\n").expect("room");
        let mut second = create(&path, Before::Kept).expect("a file");
        second.write_all(b"second\n").expect("room");
        first.write_all(b"third\n").expect("room");
        assert_eq!(text(), "first\nsecond\nthird\n");
        create(&path, Before::Truncated).expect("a file");
        assert_eq!(text(), "");
        fs::remove_file(&path).expect("it is there");
    }

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
