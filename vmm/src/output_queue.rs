// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A queue of text for a reader that may be slow, or not read at all: used for the log and for the events.
//!
//! Owns a queue, and the thread that writes its items. Adding an item never waits: an item that
//! finds no room is lost and counted, and so is one that cannot be written. It must never know what the text
//! is about, and never stop trying: one reader may end and another begin, a file system may be full for a while.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use crate::signals::with_signals_blocked;

/// Maximum length of one write: what a ready pipe or terminal takes without blocking.
const WRITE_BYTES: usize = libc::PIPE_BUF;

/// Poll interval for progress of the reader, at the end of the process.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Number of polls without progress after which the reader counts as stuck.
const IDLE_POLLS_MAX: u32 = 10;

const STACK_BYTES: usize = 128 << 10;

/// An item of an output queue.
pub trait OutputItem: Send + 'static {
    /// Text of the item; called on the queue's thread.
    fn into_text(self) -> Vec<u8>;
}

impl OutputItem for String {
    fn into_text(self) -> Vec<u8> {
        self.into_bytes()
    }
}

enum Message<T> {
    /// An item, and the number of items lost before it.
    Item(T, u64),
    Flush(SyncSender<()>),
}

/// A queue of items with a thread that writes them.
#[derive(Debug)]
pub struct OutputQueue<T> {
    queue: SyncSender<Message<T>>,
    lost: Arc<AtomicU64>,
    /// Set while the thread waits for the reader.
    waits: Arc<AtomicBool>,
}

impl<T: OutputItem> OutputQueue<T> {
    /// Starts a thread of this name that writes to `file`, with a queue of `room` items. `failed` is called
    /// once when writing starts to fail; items are lost until it succeeds again.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        name: &str,
        file: File,
        room: usize,
        failed: impl Fn(&io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, items) = sync_channel(room);
        let (waits, lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let target = Target { file, rest: Vec::new(), waits: Arc::clone(&waits) };
        let missed = Arc::clone(&lost);
        let builder = stoppable_thread::Builder::new(name).stack_bytes(STACK_BYTES);
        let body = move || write_all(&items, target, &missed, failed);
        with_signals_blocked(|| builder.spawn(body))?;
        Ok(Self { queue, lost, waits })
    }

    /// Queues an item; the closure gets the number of items lost before it.
    pub fn put(&self, item: impl FnOnce(u64) -> T) {
        let lost = self.lost.swap(0, Relaxed);
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Message::Item(item(lost), lost)) {
            self.lost.fetch_add(lost.saturating_add(1), Relaxed);
        }
    }

    /// Number of lost items that no written item has reported yet.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Waits until everything is written, up to `limit`, and not for a reader that is stuck; true if it is.
    pub fn flush(&self, limit: Duration) -> bool {
        let (done, wait) = sync_channel(1);
        let deadline = Instant::now() + limit;
        let (mut message, mut idle_polls) = (Message::Flush(done), 0);
        let mut goes_on = || {
            idle_polls = if self.waits.load(Relaxed) { idle_polls + 1 } else { 0 };
            idle_polls < IDLE_POLLS_MAX && Instant::now() < deadline
        };
        loop {
            match self.queue.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if goes_on() => {
                    message = back;
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(_) => return false,
            }
        }
        loop {
            match wait.recv_timeout(POLL_INTERVAL) {
                Ok(()) => return true,
                Err(RecvTimeoutError::Timeout) if goes_on() => {}
                Err(_) => return false,
            }
        }
    }
}

fn write_all<T: OutputItem>(
    items: &Receiver<Message<T>>,
    mut target: Target,
    lost: &AtomicU64,
    failed: impl Fn(&io::Error),
) {
    let mut fails = false;
    while let Ok(message) = items.recv() {
        match message {
            Message::Item(item, lost_before) => match target.write(item.into_text()) {
                Ok(()) => fails = false,
                Err(error) => {
                    // The losses that this item would have reported are reported by a later one.
                    lost.fetch_add(lost_before.saturating_add(1), Relaxed);
                    if !std::mem::replace(&mut fails, true) {
                        failed(&error);
                    }
                }
            },
            Message::Flush(done) => {
                if target.write_rest().is_ok() {
                    // The other end may have stopped waiting.
                    let _ = done.send(());
                }
            }
        }
    }
}

/// The output file.
struct Target {
    file: File,
    /// Rest of an item that was partly written, which is written first, so that no other item follows half
    /// of one.
    rest: Vec<u8>,
    waits: Arc<AtomicBool>,
}

impl Target {
    /// Writes an item, after the rest of the one before. A partly written item counts as written: its rest
    /// follows.
    fn write(&mut self, text: Vec<u8>) -> io::Result<()> {
        self.write_rest()?;
        let len_bytes = text.len();
        self.rest = text;
        match self.write_rest() {
            Err(error) if self.rest.is_empty() || self.rest.len() == len_bytes => {
                self.rest.clear();
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn write_rest(&mut self) -> io::Result<()> {
        let mut written = 0;
        let result = loop {
            let left = self.rest.get(written..).unwrap_or_default();
            if left.is_empty() {
                break Ok(());
            }
            if let Err(error) = self.wait_for_room() {
                break Err(error);
            }
            match self.file.write(left.get(..left.len().min(WRITE_BYTES)).unwrap_or_default()) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(len_bytes) => written += len_bytes,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => break Err(error),
            }
        };
        self.rest.drain(..written);
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            // The reader is gone, and the next one cannot use half an item.
            self.rest.clear();
        }
        result
    }

    /// Waits until the reader has made room or is gone. A file is always ready.
    fn wait_for_room(&self) -> io::Result<()> {
        self.waits.store(true, Relaxed);
        let mut entry =
            libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: `entry` is one valid pollfd that lives during the call, and the descriptor is open.
        let polled = unsafe { libc::poll(&raw mut entry, 1, -1) };
        self.waits.store(false, Relaxed);
        if polled < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::Read as _;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::OpenOptionsExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn queue(file: File) -> OutputQueue<String> {
        OutputQueue::start("output-queue", file, 8, |_| ()).unwrap()
    }

    /// Fills the pipe and the queue beyond their capacity.
    fn overflow(queue: &OutputQueue<String>) {
        let mut taken = 0;
        while taken < 16 || queue.lost() == 0 {
            queue.put(|_| "x".repeat(5000));
            taken += u32::from(queue.lost() == 0);
        }
    }

    #[test]
    fn a_reader_that_does_not_read_is_not_waited_for_at_the_end() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let queue = queue(File::from(OwnedFd::from(pipe)));
        overflow(&queue);
        let began = Instant::now();
        assert!(!queue.flush(LONG));
        assert!(began.elapsed() < LONG / 4, "{:?}", began.elapsed());
        // Once it reads, it gets whole items, and the number of missing ones.
        let text = std::thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            text
        });
        while !queue.flush(LONG) {}
        queue.put(|lost| format!("{} lost", lost.min(1)));
        assert!(queue.flush(LONG));
        drop(queue);
        let text = text.join().unwrap();
        let rest = text.trim_start_matches('x');
        assert_eq!((rest, (text.len() - rest.len()) % 5000), ("1 lost", 0));
    }

    #[test]
    fn a_pipe_that_has_been_full_is_written_to_when_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        // Non-blocking and without a reader.
        let file = devices::endpoint::open_output(&path).unwrap();
        let queue = queue(file);
        overflow(&queue);
        let mut options = File::options();
        let mut reader = options.read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        let (mut text, mut chunk) = (Vec::new(), [0; 4096]);
        let began = Instant::now();
        while !text.ends_with(b"the end") {
            queue.put(|_| "the end".to_owned());
            if let Ok(len_bytes) = reader.read(&mut chunk) {
                text.extend_from_slice(&chunk[..len_bytes]);
            }
            assert!(began.elapsed() < LONG, "{} bytes", text.len());
        }
    }

    /// A pipe without a reader, waiting until it is closed also in programs that other tests start at the
    /// same time, which inherit all descriptors for a moment.
    fn unread_pipe() -> File {
        let (reader, pipe) = io::pipe().unwrap();
        drop(reader);
        let mut entry = libc::pollfd { fd: pipe.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: `entry` is one valid pollfd that lives during the call, and the descriptor is open.
        assert_eq!(unsafe { libc::poll(&raw mut entry, 1, -1) }, 1);
        assert_eq!(entry.revents, libc::POLLERR);
        File::from(OwnedFd::from(pipe))
    }

    #[test]
    fn half_of_a_piece_goes_with_its_reader() {
        let file = unread_pipe();
        let waits = Arc::new(AtomicBool::new(false));
        let mut target = Target { file, rest: b" half".to_vec(), waits };
        let error = target.write(b", one more".to_vec()).unwrap_err();
        assert_eq!((error.kind(), &*target.rest), (io::ErrorKind::BrokenPipe, &b""[..]));
    }

    #[test]
    fn what_a_lost_piece_would_have_told_is_told_by_a_later_one() {
        let queue = queue(unread_pipe());
        for lost in 0..5 {
            queue.put(|lost_before| {
                assert_eq!(lost_before, lost);
                "one".to_owned()
            });
            assert!(queue.flush(LONG));
        }
        assert_eq!(queue.lost(), 5);
    }

    #[test]
    fn half_of_a_piece_is_followed_by_its_other_half() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let file = File::from(OwnedFd::from(pipe));
        // As if the file system had become full in the middle of an item.
        let waits = Arc::new(AtomicBool::new(false));
        let mut target = Target { file, rest: b" half".to_vec(), waits };
        target.write(b", one more".to_vec()).unwrap();
        drop(target);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, " half, one more");
    }

    #[test]
    fn a_reader_that_is_gone_is_told_once() {
        let (told, tells) = std::sync::mpsc::channel();
        let failed = move |error: &io::Error| told.send(error.kind()).unwrap();
        let queue = OutputQueue::start("output-queue", unread_pipe(), 8, failed).unwrap();
        queue.put(|_| "one".to_owned());
        queue.put(|_| "two".to_owned());
        assert!(queue.flush(LONG));
        assert_eq!(queue.lost(), 2);
        // The sender in the callback is dropped with the thread.
        drop(queue);
        assert_eq!(tells.iter().collect::<Vec<_>>(), [io::ErrorKind::BrokenPipe]);
    }
}
