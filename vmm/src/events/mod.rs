// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The event monitor: what happens to the VMM and the VM, one JSON object after the other, for
//! programs that watch.
//!
//! Owns the clocks of the time stamps (one that never jumps, since the process was started, and that of
//! the host), and the names of the events ([`NAMES`]). Telling an event never blocks: it is put into an
//! [`OutputQueue`], and if the reader of the file does not read for long, or is gone, the event is lost and counted,
//! and the next one that is told says how many were lost. A reader may end and another one come, a file system
//! may get room again.

mod names;
mod text;

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use thiserror::Error;

pub use names::{NAMES, page};
use text::Event;

use crate::output_queue::{OutputItem, OutputQueue};

/// Maximum number of queued events.
const QUEUE_EVENTS: usize = 1024;

/// Longest wait for a slow reader at the end of the process.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Where events are written.
#[derive(Debug)]
pub enum EventTarget {
    /// A file, which is created or truncated; a named pipe works too.
    Path(PathBuf),
    /// An inherited descriptor.
    Fd(OwnedFd),
}

/// Why the event monitor cannot be started.
#[derive(Debug, Error)]
pub enum EventError {
    /// `--event-monitor` cannot be read.
    #[error("--event-monitor '{text}' is neither path=<path> nor fd=<number>")]
    Syntax {
        /// The value of the option.
        text: String,
    },
    /// The descriptor is not open for writing.
    #[error("descriptor {fd} of --event-monitor is not open for writing")]
    BadFd {
        /// The descriptor.
        fd: i32,
    },
    /// The file cannot be opened.
    #[error("the event file '{path}' cannot be opened")]
    Open {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The thread cannot be started.
    #[error("the event monitor cannot be started")]
    Thread(#[source] io::Error),
    /// It was started before.
    #[error("there is an event monitor already")]
    Twice,
}

impl EventTarget {
    /// Parses `path=<path>` or `fd=<number>`.
    ///
    /// # Errors
    /// The text is neither, or the descriptor is not open for writing.
    pub fn parse(text: &str) -> Result<Self, EventError> {
        let bad = || EventError::Syntax { text: text.to_owned() };
        if let Some(number) = text.strip_prefix("fd=") {
            let fd: i32 = number.parse().map_err(|_| bad())?;
            // SAFETY: F_GETFL takes no pointer; a bad descriptor makes it fail.
            let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
            if fd < 0 || flags < 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
                return Err(EventError::BadFd { fd });
            }
            // SAFETY: the descriptor is open (fcntl has just succeeded on it); the command
            // line that names its number gives it to this process.
            return Ok(Self::Fd(unsafe { OwnedFd::from_raw_fd(fd) }));
        }
        match text.strip_prefix("path=") {
            Some(path) if !path.is_empty() => Ok(Self::Path(PathBuf::from(path))),
            _ => Err(bad()),
        }
    }

    fn open(self) -> Result<File, EventError> {
        match self {
            Self::Fd(fd) => Ok(File::from(fd)),
            Self::Path(path) => devices::endpoint::open_output(&path)
                .map_err(|source| EventError::Open { path, source }),
        }
    }
}

/// A time in UTC in the format of RFC 3339; `{wallclock}` gives logs the same.
pub fn utc(at: SystemTime) -> String {
    /// Days of 400 years, after which the calendar repeats.
    const ERA_DAYS: u64 = 146_097;
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Years start in March here, so that a leap day is the last of its year.
    let days = days + 719_468;
    let (era, day) = (days / ERA_DAYS, days % ERA_DAYS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

impl OutputItem for Event {
    fn into_text(self) -> Vec<u8> {
        Event::into_text(self)
    }
}

/// A queue of events with a thread that writes them.
#[derive(Debug)]
pub struct EventMonitor {
    queue: OutputQueue<Event>,
    /// A duplicate of the file, for a process that continues to write to it.
    lent: File,
}

impl EventMonitor {
    /// Opens the target and starts the thread `event-monitor`.
    ///
    /// # Errors
    /// The file cannot be opened, or the thread cannot be started.
    pub fn start(target: EventTarget) -> Result<Self, EventError> {
        let file = target.open()?;
        let lent = file.try_clone().map_err(EventError::Thread)?;
        let failed = |error: &io::Error| {
            log::error!("events are lost, because they cannot be written: {error}");
        };
        let queue = OutputQueue::start("event-monitor", file, QUEUE_EVENTS, failed)
            .map_err(EventError::Thread)?;
        Ok(Self { queue, lent })
    }

    /// Queues an event; never blocks.
    pub fn tell(
        &self,
        source: &'static str,
        event: &'static str,
        properties: &[(&'static str, &str)],
    ) {
        self.queue.put(|lost| {
            let mut properties: Vec<_> =
                properties.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
            if lost > 0 {
                properties.push(("lost_events_before", lost.to_string()));
            }
            let (time, wallclock) = (uptime(), SystemTime::now());
            Event { time, wallclock, source, name: event, properties }
        });
    }

    /// Waits until everything queued so far is written, up to `limit`; true if it is.
    pub fn flush(&self, limit: Duration) -> bool {
        self.queue.flush(limit)
    }
}

static START: OnceLock<Instant> = OnceLock::new();
static MONITOR: OnceLock<EventMonitor> = OnceLock::new();

/// Starts the clock of the timestamps; called first in `main`.
pub fn start_clock() {
    let _ = START.set(Instant::now());
}

/// Clock of the parent at the start of this process, in microseconds.
static BEFORE_US: AtomicU64 = AtomicU64::new(0);

/// Continues the clock of the parent process.
pub fn continue_clock(before: Duration) {
    BEFORE_US.store(u64::try_from(before.as_micros()).unwrap_or(u64::MAX), Relaxed);
}

/// Time since the process started, plus the clock continued from its parent.
pub fn uptime() -> Duration {
    let elapsed = START.get_or_init(Instant::now).elapsed();
    elapsed.saturating_add(Duration::from_micros(BEFORE_US.load(Relaxed)))
}

/// A duplicate of the monitor's file, for a process that continues to write to it.
///
/// # Errors
/// The descriptor cannot be duplicated.
pub fn lend() -> io::Result<Option<File>> {
    MONITOR.get().map(|monitor| monitor.lent.try_clone()).transpose()
}

/// Starts the event monitor of the process.
///
/// # Errors
/// As [`EventMonitor::start`], or it was started before.
pub fn start(target: EventTarget) -> Result<(), EventError> {
    MONITOR.set(EventMonitor::start(target)?).map_err(|_| EventError::Twice)
}

/// Emits an event to the monitor of the process, if there is one; never blocks.
pub fn emit(source: &'static str, event: &'static str, properties: &[(&'static str, &str)]) {
    if let Some(monitor) = MONITOR.get() {
        monitor.tell(source, event, properties);
    }
}

/// Waits briefly until all events are written, at the end of the process.
pub fn flush() {
    if let Some(monitor) = MONITOR.get()
        && !monitor.flush(FLUSH_TIME)
    {
        log::warn!("the last events were not written, their reader does not read");
    }
}

#[cfg(test)]
mod tests;
