// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The event monitor: what happens to the VMM and the VM, one JSON object after the other, for
//! programs that watch.
//!
//! Owns the clocks of the time stamps (one that never jumps, since the process was started, and that of
//! the host), the names of the events, and the thread that writes. Telling
//! an event never blocks: it is put into a queue, and if the reader of the file does not read, the
//! event is lost and counted, and the next one that gets through says how many were lost.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::ser::{Serialize, SerializeMap as _, SerializeStruct as _, Serializer};
use thiserror::Error;

/// Events that wait to be written.
const QUEUE_EVENTS: usize = 1024;

/// Longest wait at the end for a reader that has stopped reading.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// The names of all events: source, event, and what it means.
pub const NAMES: &[(&str, &str, &str)] = &[
    ("vmm", "starting", "the VMM begins to start"),
    ("vmm", "started", "the VMM takes requests"),
    ("vmm", "shutdown", "the VMM ends"),
    ("vm", "created", "the VM has a configuration"),
    ("vm", "booting", "the VM begins to boot"),
    ("vm", "booted", "the vCPUs run"),
    ("vm", "boot-failed", "the VM could not boot, or was to end before it ran (error: why)"),
    ("vm", "prefault-started", "memory begins to be populated (mode: boot or background)"),
    ("vm", "prefault-progress", "another tenth of it is populated (percent, done_bytes)"),
    ("vm", "prefault-completed", "all of it is populated"),
    ("vm", "prefault-cancelled", "the VM ends or leaves before all of it is populated"),
    ("vm", "prefault-failed", "it cannot be populated any further (error: why)"),
    ("vm", "prezeroed-taken", "a zone has memory of the pool (zone, bytes, pages)"),
    ("vm", "prezeroed-unavailable", "a zone does without the pool (zone, error: why)"),
    ("vm", "pausing", "the vCPUs are being stopped"),
    ("vm", "paused", "the vCPUs stand still"),
    ("vm", "balloon-resized", "the balloon is to have another size"),
    ("vm", "memory-resized", "a memory zone is to have another size"),
    ("vm", "resuming", "the vCPUs are about to go on"),
    ("vm", "resumed", "the vCPUs run again"),
    ("vm", "resume-failed", "the VM stays paused (error: why)"),
    ("vm", "snapshotting", "the VM is being saved"),
    (
        "vm",
        "pause-failed",
        "the VM could not be paused, as a device does not finish, or not wanted any more: it runs on \
         (error: why)",
    ),
    ("vm", "snapshotted", "the snapshot is whole and on the disk"),
    ("vm", "snapshot-failed", "the VM could not be saved and stays paused (error: why)"),
    ("vm", "restoring", "a VM is being restored"),
    ("vm", "restored", "the VM is there, paused; memory may still be on its way"),
    ("vm", "restore-memory-completed", "all memory is here after an on-demand restore"),
    (
        "vm",
        "stage2-prefault-completed",
        "the tables of the vCPUs are filled for memory that came from elsewhere",
    ),
    ("vm", "restore-failed", "the VM could not be restored, or its memory is lost (error: why)"),
    ("vm", "rebooting", "the VM begins to reboot"),
    ("vm", "rebooted", "the VM runs again after a reboot"),
    ("vm", "reboot-failed", "the VM did not come back, and is shut down (error: why)"),
    ("vm", "shutdown", "the VM was shut down"),
    ("vm", "deleted", "the VM was deleted"),
    ("vm", "device-added", "a device was added while the VM runs (id, bdf)"),
    ("vm", "device-removing", "the guest is asked to let go of a device (id)"),
    ("vm", "device-removed", "the guest has let go of a device, and it is gone (id)"),
    ("vm", "passthrough-device-opened", "a passed-through device is open and reset (id, took_ms)"),
    (
        "vm",
        "prepinned-taken",
        "a pool gave memory that is mapped for a passed-through device (zone, bytes, device)",
    ),
    (
        "vm",
        "prepinned-unavailable",
        "a pool gave none, and memory is mapped as without it (device, error: why)",
    ),
    ("vm", "passthrough-pinned", "all memory is ready for passed-through devices (bytes, took_ms)"),
    ("vm", "passthrough-failed", "memory cannot be made ready for them (error: why)"),
    (
        "vm",
        "passthrough-device-lost",
        "a passed-through device is gone for the guest (id: its name, error: why)",
    ),
    ("vm", "passthrough-device-wanted", "the host wants a passed-through device back (id)"),
    ("vm", "migration-starting", "the VM is about to be sent"),
    ("vm", "migration-started", "the destination takes the VM"),
    ("vm", "migration-memory-iteration", "a round of precopy is done (id: its number)"),
    ("vm", "migration-stalled", "a round of precopy did not help (id: its number, and downtimes)"),
    ("vm", "migration-throttled", "the vCPUs are slowed down (percent: time out of the guest)"),
    ("vm", "migration-downtime-allowed", "a longer downtime is allowed from now on"),
    ("vm", "migration-phase", "the migration is in a new phase (phase: its name)"),
    ("vm", "migration-round", "a round of precopy begins (side, round, remaining_bytes)"),
    (
        "vm",
        "migration-finished",
        "the VM runs at the destination, with all its memory (final figures)",
    ),
    ("vm", "migration-failed", "the VM could not be sent (error: why)"),
    ("vm", "migration-cancelling", "somebody asked to stop the migration (side: which)"),
    ("vm", "migration-cancelled", "the migration was stopped (side, guest: where it is now)"),
    (
        "vm",
        "migration-in-doubt",
        "the connection was lost at the commit (side: destination: whether the VM is its own is not \
         known; source: whether the destination knows that it is)",
    ),
    (
        "vm",
        "postcopy-migration-recovering",
        "postcopy connects again; the phase says what came of it",
    ),
    ("vm", "migration-handed-over", "the guest belongs to the destination, pages still go there"),
    (
        "vm",
        "migration-handed-on",
        "a page server sends the pages that are left (socket, pid, took_us, figures)",
    ),
    ("vm", "page-server-failed", "it has not taken over, and the VMM goes on by itself"),
    ("vm", "page-server-serving", "the page server says so itself, in the VMM's place from now on"),
    ("vm", "disk-write-back-failed", "a disk could not be written back (id: which, error: why)"),
    ("vm", "migration-receive-ready", "the destination listens"),
    ("vm", "migration-receive-starting", "a source has connected"),
    ("vm", "migration-receive-started", "the source was accepted"),
    ("vm", "migration-receive-finished", "the VM runs here (figures, in precopy the final ones)"),
    ("vm", "migration-receive-failed", "the VM could not be received (error: why)"),
    ("vm", "postcopy-migration-completed", "all memory is here (final figures)"),
    (
        "vm",
        "postcopy-migration-paused",
        "pages do not come, as a connection or the source is lost (side; vm.migration-progress says why)",
    ),
    ("vm", "postcopy-completed", "the same, under a shorter name"),
    ("vm", "postcopy-paused", "the connection is lost, both sides hold still (reason: why)"),
    ("virtio-device", "activated", "a driver uses the device (id: its name)"),
    ("virtio-device", "reset", "a driver has let go of the device (id: its name)"),
    ("guest", "panic", "the guest reported a panic (event: which)"),
];

/// Where the events go.
#[derive(Debug)]
pub enum EventTarget {
    /// A file that is made or emptied; a named pipe works too.
    Path(PathBuf),
    /// A descriptor that was inherited.
    Fd(OwnedFd),
}

/// Why there is no event monitor.
#[derive(Debug, Error)]
pub enum EventError {
    /// `--event-monitor` cannot be read.
    #[error("--event-monitor '{text}' is neither path=<path> nor fd=<number>")]
    Syntax {
        /// What was given.
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
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The host gives no thread.
    #[error("the event monitor cannot be started")]
    Thread(#[source] io::Error),
    /// There is one already.
    #[error("there is an event monitor already")]
    Twice,
}

impl EventTarget {
    /// Reads `path=<path>` or `fd=<number>`.
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
            // SAFETY: the descriptor is open (fcntl has just succeeded on it); the person who
            // gave its number on the command line gives it to this process.
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

/// One thing that happened.
struct Event {
    time: Duration,
    wallclock: SystemTime,
    source: &'static str,
    name: &'static str,
    properties: Vec<(&'static str, String)>,
}

struct Time(Duration);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut time = serializer.serialize_struct("timestamp", 2)?;
        time.serialize_field("secs", &self.0.as_secs())?;
        time.serialize_field("nanos", &self.0.subsec_nanos())?;
        time.end()
    }
}

/// A moment as RFC 3339 has it, in UTC: logs have the same with `{wallclock}`.
pub fn utc(at: SystemTime) -> String {
    /// Of 400 years, after which the calendar begins anew.
    const ERA_DAYS: u64 = 146_097;
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Years begin with March here, so that a leap day is the last of its year.
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

struct Properties<'a>(&'a [(&'static str, String)]);

impl Serialize for Properties<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_empty() {
            return serializer.serialize_none();
        }
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut event = serializer.serialize_struct("event", 5)?;
        event.serialize_field("timestamp", &Time(self.time))?;
        event.serialize_field("wallclock", &utc(self.wallclock))?;
        event.serialize_field("source", self.source)?;
        event.serialize_field("event", self.name)?;
        event.serialize_field("properties", &Properties(&self.properties))?;
        event.end()
    }
}

enum Message {
    Event(Event),
    Flush(SyncSender<()>),
}

/// A queue with a thread that writes what is in it.
#[derive(Debug)]
pub struct EventMonitor {
    queue: SyncSender<Message>,
    lost: AtomicU64,
    /// The file once more, for a process that goes on writing to it.
    lent: File,
}

impl EventMonitor {
    /// Opens the target and starts the thread `event-monitor`.
    ///
    /// # Errors
    /// The file cannot be opened, or the host gives no thread.
    pub fn start(target: EventTarget) -> Result<Self, EventError> {
        let file = target.open()?;
        let lent = file.try_clone().map_err(EventError::Thread)?;
        let (queue, events) = sync_channel(QUEUE_EVENTS);
        std::thread::Builder::new()
            .name("event-monitor".to_owned())
            .stack_size(128 << 10)
            .spawn(move || {
                block_signals();
                write_all(&events, file);
            })
            .map_err(EventError::Thread)?;
        Ok(Self { queue, lost: AtomicU64::new(0), lent })
    }

    /// Tells an event; never blocks.
    pub fn tell(
        &self,
        source: &'static str,
        event: &'static str,
        properties: &[(&'static str, &str)],
    ) {
        let mut properties: Vec<_> =
            properties.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        let lost = self.lost.swap(0, Relaxed);
        if lost > 0 {
            properties.push(("lost_events_before", lost.to_string()));
        }
        let (time, wallclock) = (uptime(), SystemTime::now());
        let event = Event { time, wallclock, source, name: event, properties };
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Message::Event(event)) {
            self.lost.fetch_add(lost + 1, Relaxed);
        }
    }

    /// Waits until everything told so far is written, or `limit` has passed. True if it is.
    pub fn flush(&self, limit: Duration) -> bool {
        let (done, wait) = sync_channel(1);
        let deadline = Instant::now() + limit;
        let mut message = Message::Flush(done);
        loop {
            match self.queue.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if Instant::now() < deadline => {
                    message = back;
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(_) => return false,
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        !matches!(wait.recv_timeout(left), Err(RecvTimeoutError::Timeout))
    }
}

fn write_all(events: &Receiver<Message>, mut file: File) {
    let mut broken = false;
    let mut text = Vec::new();
    while let Ok(message) = events.recv() {
        match message {
            Message::Event(event) if !broken => {
                text.clear();
                // Writing JSON into a Vec cannot fail.
                let _ = serde_json::to_writer_pretty(&mut text, &event);
                text.extend_from_slice(b"\n\n");
                if let Err(error) = file.write_all(&text) {
                    log::error!("events are not written any more: {error}");
                    broken = true;
                }
            }
            Message::Event(_) => {}
            Message::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
    log::debug!("event monitor on descriptor {} ends", file.as_raw_fd());
}

static START: OnceLock<Instant> = OnceLock::new();
static MONITOR: OnceLock<EventMonitor> = OnceLock::new();

/// Starts the clock of the time stamps; call it first of all in `main`.
pub fn start_clock() {
    let _ = START.set(Instant::now());
}

/// What the clock showed when this process was started, in microseconds.
static BEFORE_US: AtomicU64 = AtomicU64::new(0);

/// Lets the clock go on from that of the process that has started this one.
pub fn continue_clock(before: Duration) {
    BEFORE_US.store(u64::try_from(before.as_micros()).unwrap_or(u64::MAX), Relaxed);
}

/// Time since the process was started.
pub fn uptime() -> Duration {
    let elapsed = START.get_or_init(Instant::now).elapsed();
    elapsed.saturating_add(Duration::from_micros(BEFORE_US.load(Relaxed)))
}

/// The file of the monitor, for a process that goes on writing to it.
///
/// # Errors
/// The host gives no descriptor.
pub fn lend() -> io::Result<Option<File>> {
    MONITOR.get().map(|monitor| monitor.lent.try_clone()).transpose()
}

/// Starts the event monitor of the process.
///
/// # Errors
/// As [`EventMonitor::start`], or there is one already.
pub fn start(target: EventTarget) -> Result<(), EventError> {
    MONITOR.set(EventMonitor::start(target)?).map_err(|_| EventError::Twice)
}

/// Tells an event to the monitor of the process, if there is one; never blocks.
pub fn emit(source: &'static str, event: &'static str, properties: &[(&'static str, &str)]) {
    if let Some(monitor) = MONITOR.get() {
        monitor.tell(source, event, properties);
    }
}

/// Waits a moment until all events are written; for the end of the process.
pub fn flush() {
    if let Some(monitor) = MONITOR.get()
        && !monitor.flush(FLUSH_TIME)
    {
        log::warn!("the last events were not written, their reader does not read");
    }
}

/// Blocks all signals in the calling thread, so that they reach the one that waits for them.
pub fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set it is given; pthread_sigmask only reads it and
    // changes nothing but the mask of the calling thread.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn events_are_pretty_and_separated_by_blank_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        std::fs::write(&path, "old").unwrap();
        let monitor =
            EventMonitor::start(EventTarget::parse(&format!("path={}", path.display())).unwrap())
                .unwrap();
        monitor.tell("vm", "booting", &[]);
        monitor.tell("virtio-device", "activated", &[("id", "__rng")]);
        assert!(monitor.flush(Duration::from_secs(10)));
        let text = std::fs::read_to_string(&path).unwrap();
        // What was there is kept.
        let text = text.strip_prefix("old").unwrap();
        let blocks: Vec<_> = text.split("\n\n").collect();
        assert_eq!((blocks.len(), blocks[2]), (3, ""));
        assert!(blocks[0].starts_with("{\n  \"timestamp\": {\n    \"secs\": "), "{text}");
        let first: serde_json::Value = serde_json::from_str(blocks[0]).unwrap();
        let wallclock = first["wallclock"].as_str().unwrap();
        assert!(wallclock.starts_with("20") && wallclock.ends_with('Z'), "{wallclock}");
        assert!(blocks[0].ends_with(
            "Z\",\n  \"source\": \"vm\",\n  \"event\": \"booting\",\n  \"properties\": null\n}"
        ));
        let second: serde_json::Value = serde_json::from_str(blocks[1]).unwrap();
        assert_eq!(second["properties"]["id"], "__rng");
    }

    #[test]
    fn a_reader_that_does_not_read_never_blocks_and_losses_are_counted() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let monitor = EventMonitor::start(EventTarget::Fd(ours.into())).unwrap();
        let long = "x".repeat(4096);
        for _ in 0..QUEUE_EVENTS * 2 {
            monitor.tell("vm", "migration-failed", &[("error", &long)]);
        }
        assert!(monitor.lost.load(Relaxed) > 0);
        assert!(!monitor.flush(Duration::from_millis(1)));
        // Once it reads, what is left arrives and says how much is missing.
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            let mut chunk = vec![0_u8; 1 << 16];
            while !text.contains("lost_events_before") {
                let n = theirs.read(&mut chunk).unwrap();
                text.push_str(std::str::from_utf8(&chunk[..n]).unwrap());
            }
        });
        while !reader.is_finished() {
            monitor.tell("vm", "booted", &[]);
            std::thread::yield_now();
        }
        reader.join().unwrap();
    }

    #[test]
    fn a_reader_that_is_gone_does_no_harm() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let monitor = EventMonitor::start(EventTarget::Fd(ours.into())).unwrap();
        monitor.tell("vm", "booted", &[]);
        monitor.tell("vm", "deleted", &[]);
        assert!(monitor.flush(Duration::from_secs(10)));
    }

    /// Every `emit("source", "event"` in a file.
    fn emitted(text: &str) -> Vec<(String, String)> {
        let literal = |text: &str| {
            let (name, rest) = text.trim_start().strip_prefix('"')?.split_once('"')?;
            Some((name.to_owned(), rest.trim_start().strip_prefix(',')?.to_owned()))
        };
        text.split("emit(")
            .skip(1)
            .filter_map(|after| {
                let (source, rest) = literal(after)?;
                Some((source, literal(&rest)?.0))
            })
            .collect()
    }

    #[test]
    fn every_event_that_is_told_is_among_the_names() {
        let mut folders = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|ext| ext == "rs") {
                    for (source, event) in emitted(&std::fs::read_to_string(&path).unwrap()) {
                        let known = NAMES.iter().any(|(s, e, _)| (*s, *e) == (&*source, &*event));
                        assert!(known, "{source}.{event} of {path:?} is not among the names");
                    }
                }
            }
        }
        let text = "emit(\n \"vm\",\n \"booted\", &[])";
        assert_eq!(emitted(text), [("vm".to_owned(), "booted".to_owned())]);
    }

    #[test]
    fn the_wall_clock_is_told_in_utc() {
        let at = |secs, micros| {
            utc(UNIX_EPOCH + Duration::from_secs(secs) + Duration::from_micros(micros))
        };
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_782_399, 7), "2000-02-28T23:59:59.000007Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000000Z");
        assert_eq!(at(1_716_278_535, 542_701), "2024-05-21T08:02:15.542701Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000000Z");
    }

    #[test]
    fn targets() {
        assert!(matches!(EventTarget::parse("path=/x"), Ok(EventTarget::Path(_))));
        for bad in ["", "/x", "path=", "fd=", "fd=x", "fd=-1", "fd=1000000"] {
            assert!(EventTarget::parse(bad).is_err(), "{bad}");
        }
        let missing = EventTarget::Path("/nonexistent/dir/file".into());
        assert!(matches!(EventMonitor::start(missing), Err(EventError::Open { .. })));
    }
}
