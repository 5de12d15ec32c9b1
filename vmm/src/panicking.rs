// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a process in which a thread panics, or that ends alongside threads that own something.
//!
//! Owns what is restored then, as no destructor runs any more: terminals, and the paths of sockets. After
//! a panic it must never continue to run the VM, whatever else waits: the thread that panicked has left its state
//! half changed.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use devices::endpoint::ConsoleEndpoint;
use devices::virtio::vsock::VsockSocket;
use parking_lot::{Mutex, MutexGuard};
use vm_migration::transport::Listener;

use crate::{events, signals};

/// Exit code after a panic of any thread; that of Rust's own programs.
pub const PANICKED: u8 = 101;

/// Time limit of the cleanup, which may need a lock that the panicked thread holds.
const PUT_BACK_TIME: Duration = Duration::from_millis(500);

/// Longest wait for a console that another thread writes to.
const LOCK_TIME: Duration = Duration::from_millis(50);

/// Time limit from a panic to the end of the process, for the cleanup and the message.
const END_TIME: Duration = Duration::from_secs(2);

/// State outside the process that is to be restored at its end.
struct PanicCleanup {
    consoles: Vec<Weak<ConsoleEndpoint>>,
    vsocks: Vec<Weak<VsockSocket>>,
    /// Socket files created here: path, device, inode.
    sockets: Vec<(PathBuf, u64, u64)>,
}

/// Only locked briefly, by each open and at the end.
static OUTSIDE: Mutex<PanicCleanup> =
    Mutex::new(PanicCleanup { consoles: Vec::new(), vsocks: Vec::new(), sockets: Vec::new() });

fn outside() -> MutexGuard<'static, PanicCleanup> {
    OUTSIDE.lock()
}

/// Registers a console to be restored at the end.
pub fn note_console(endpoint: &Arc<ConsoleEndpoint>) {
    let mut outside = outside();
    outside.consoles.retain(|console| console.strong_count() > 0);
    outside.consoles.push(Arc::downgrade(endpoint));
}

/// Registers the socket of a vsock device to be removed at the end.
pub fn note_vsock(socket: &Arc<VsockSocket>) {
    let mut outside = outside();
    outside.vsocks.retain(|socket| socket.strong_count() > 0);
    outside.vsocks.push(Arc::downgrade(socket));
}

/// Registers the socket file of the API or of metrics to be removed at the end.
pub fn note_socket(path: &Path) {
    if let Ok(there) = std::fs::symlink_metadata(path) {
        outside().sockets.push((path.to_owned(), there.dev(), there.ino()));
    }
}

/// Unregisters such a socket file once it has been removed. A later file at its path belongs to another
/// process, also if it has the same inode number.
pub fn forget_socket(path: &Path) {
    outside().sockets.retain(|(known, ..)| known != path);
}

fn put_back() {
    // Sockets of HTTP before a console, which the panicked thread may hold.
    let sockets = std::mem::take(&mut outside().sockets);
    for (path, device, inode) in sockets {
        let is_ours = std::fs::symlink_metadata(&path)
            .is_ok_and(|there| (there.dev(), there.ino()) == (device, inode));
        if is_ours {
            // There is no client to report an error to.
            let _ = std::fs::remove_file(path);
        }
    }
    let consoles: Vec<_> = outside().consoles.iter().filter_map(Weak::upgrade).collect();
    for console in consoles {
        // Other threads hold a console only for a non-blocking write. One held by the panicked thread would
        // be waited for in vain, and the consoles after it are not restored.
        let _ = console.try_close(LOCK_TIME);
    }
    // Directories may be of a file system that does not answer any more: what is of this host came before.
    // A machine whose guest lacks pages is never dropped, nor what listens for their source.
    Listener::remove_all_files();
    let vsocks: Vec<_> = outside().vsocks.iter().filter_map(Weak::upgrade).collect();
    for socket in vsocks {
        socket.remove_path();
    }
}

/// The thread that does the cleanup. It is started before any other: the thread that panics may not be allowed what
/// the cleanup needs, and what it starts is not either.
static CLEANUP: OnceLock<Sender<Sender<()>>> = OnceLock::new();

/// Starts the thread that waits for the cleanup to be due, once in a process.
///
/// # Errors
/// The host gives no thread.
fn keep_cleanup_ready() -> io::Result<()> {
    if CLEANUP.get().is_some() {
        return Ok(());
    }
    let (due, is_due) = channel::<Sender<()>>();
    let body = move || {
        while let Ok(done) = is_due.recv() {
            put_back();
            drop(done);
        }
    };
    // The main thread reads them from a descriptor.
    signals::with_signals_blocked(|| stoppable_thread::spawn("put-back", body))?;
    // Of two that are started at the same time one ends.
    let _ = CLEANUP.set(due);
    Ok(())
}

/// Starts the cleanup; the channel disconnects when it has finished, or if there is no thread for it.
fn begin_to_put_back() -> Receiver<()> {
    let (done, is_done) = channel();
    // Without a thread `done` is dropped here.
    if keep_cleanup_ready().is_ok()
        && let Some(due) = CLEANUP.get()
    {
        let _ = due.send(done);
    }
    is_done
}

/// Runs the cleanup for a process that exits while threads still run, whose terminals and sockets no
/// destructor restores. Waits half a second at most.
pub fn put_back_at_end() {
    // A disconnect is the expected end.
    let _ = begin_to_put_back().recv_timeout(PUT_BACK_TIME);
}

fn end_now() -> ! {
    // SAFETY: ends the process without running anything else of it.
    unsafe { libc::_exit(PANICKED.into()) }
}

/// Ends the process after a time limit, whatever the calling thread waits for until then.
///
/// # Errors
/// The thread cannot be started.
fn end_soon() -> io::Result<()> {
    let end = || {
        std::thread::sleep(END_TIME);
        end_now();
    };
    stoppable_thread::spawn("end", end).map(drop)
}

/// Writes to stderr without blocking, for a process that is about to end: a pager that shows a full page
/// does not read on.
pub fn say_at_once(text: &str) {
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd is written, which lives during the call.
    let is_ready = unsafe { libc::poll(&raw mut poll, 1, 0) } == 1;
    // A ready pipe takes this much without blocking.
    let begin = text.as_bytes().get(..libc::PIPE_BUF).unwrap_or(text.as_bytes());
    // Not through the standard library's handle, whose lock may be held by a thread that waits for a
    // reader.
    if is_ready
        && poll.revents & libc::POLLOUT != 0
        && let Ok(stderr) = io::stderr().as_fd().try_clone_to_owned()
    {
        // The end of the process closes the descriptor; an error has no reader.
        let _ = File::from(stderr).write_all(begin);
    }
}

/// Installs a hook by which a panic of any thread is reported, runs the cleanup and ends the process with
/// [`PANICKED`]. Also starts the thread of the cleanup.
pub fn end_with_process() {
    if let Err(error) = keep_cleanup_ready() {
        log::warn!("no thread for the cleanup after a panic: {error}");
    }
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let ends = end_soon();
        let is_back = begin_to_put_back();
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let what = panic.payload_as_str().unwrap_or("no reason");
        let line = format!("a thread has panicked at {place}, and the process ends: {what}");
        events::emit("vmm", "panic", &[("place", &place), ("error", what)]);
        if ends.is_err() {
            // Nothing would end the process if what follows blocked: only steps with a time limit.
            say_at_once(&format!("{line}\n"));
            events::flush();
            end_now();
        }
        // From here on steps may block: on a reader of stderr, or on a thread that waits for one.
        usual(panic);
        log::error!("{line}");
        log::logger().flush();
        let _ = is_back.recv_timeout(PUT_BACK_TIME);
        events::flush();
        end_now();
    }));
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixListener;
    use std::process::{Output, Stdio};

    use super::*;
    use crate::testing::{again, no_more_threads};

    const FOLDER: &str = "GODWIT_TEST_PANIC_FOLDER";
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Body of the process under test: panics on a thread, after `before`.
    fn panic_in(folder: &Path, before: impl FnOnce()) {
        let _api = UnixListener::bind(folder.join("api")).unwrap();
        note_socket(&folder.join("api"));
        let console = Arc::new(ConsoleEndpoint::socket(&folder.join("console")).unwrap());
        note_console(&console);
        let target = format!("path={}", folder.join("events").display());
        events::start(events::EventTarget::parse(&target).unwrap()).unwrap();
        end_with_process();
        let (go, gone) = channel::<()>();
        let panics = std::thread::spawn(move || {
            let _ = gone.recv();
            panic!("as a test wants it");
        });
        before();
        drop(go);
        let _ = panics.join();
        unreachable!("the process has ended");
    }

    /// Runs the test of this name in a process of its own, which calls [`panic_in`].
    fn run(test: &str, folder: &Path, stderr: Stdio) -> Output {
        let mut child = again(&format!("panicking::tests::{test}"))
            .env(FOLDER, folder)
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        // Its output ends with the process.
        let mut stdout = child.stdout.take().unwrap();
        let (ended, has_ended) = channel();
        let reading = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = ended.send(stdout.read_to_end(&mut text));
            text
        });
        let in_time = has_ended.recv_timeout(PATIENCE);
        if in_time.is_err() {
            child.kill().unwrap();
        }
        let stdout = reading.join().unwrap();
        in_time.expect("the process ends").unwrap();
        Output { stdout, ..child.wait_with_output().unwrap() }
    }

    #[track_caller]
    fn assert_ended(ended: &Output, folder: &Path) {
        assert_eq!(ended.status.code(), Some(PANICKED.into()), "{ended:?}");
        assert!(!folder.join("api").exists() && !folder.join("console").exists());
        let events = std::fs::read_to_string(folder.join("events")).unwrap();
        assert!(events.contains("\"panic\"") && events.contains("as a test wants it"), "{events}");
    }

    #[test]
    fn a_panic_ends_the_process_and_leaves_nothing_behind() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return panic_in(Path::new(&folder), || {});
        }
        let folder = tempfile::tempdir().unwrap();
        let test = "a_panic_ends_the_process_and_leaves_nothing_behind";
        let ended = run(test, folder.path(), Stdio::piped());
        assert_ended(&ended, folder.path());
        assert!(String::from_utf8_lossy(&ended.stderr).contains("as a test wants it"), "{ended:?}");
    }

    #[test]
    fn a_panic_ends_the_process_although_stderr_is_a_full_pipe() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return panic_in(Path::new(&folder), || {});
        }
        let folder = tempfile::tempdir().unwrap();
        let (_unread, mut pipe) = std::io::pipe().unwrap();
        // SAFETY: only numbers are passed, and the descriptor is open.
        let room_bytes = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_GETPIPE_SZ) };
        pipe.write_all(&vec![b'.'; usize::try_from(room_bytes).unwrap()]).unwrap();
        let test = "a_panic_ends_the_process_although_stderr_is_a_full_pipe";
        assert_ended(&run(test, folder.path(), pipe.into()), folder.path());
    }

    #[test]
    fn a_panic_is_told_although_the_host_gives_no_thread() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return panic_in(Path::new(&folder), no_more_threads);
        }
        let folder = tempfile::tempdir().unwrap();
        let test = "a_panic_is_told_although_the_host_gives_no_thread";
        let ended = run(test, folder.path(), Stdio::piped());
        assert_eq!(ended.status.code(), Some(PANICKED.into()), "{ended:?}");
        let events = std::fs::read_to_string(folder.path().join("events")).unwrap();
        assert!(events.contains("\"panic\"") && events.contains("as a test wants it"), "{events}");
        assert!(String::from_utf8_lossy(&ended.stderr).contains("as a test wants it"), "{ended:?}");
    }
}
