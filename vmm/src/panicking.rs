// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a process in which a thread panics.
//!
//! Owns what is put back then, as no destructor runs any more: terminals, and the paths of sockets. It
//! must never go on with the VM: whatever panicked has left its state half changed.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use devices::endpoint::ConsoleEndpoint;

use crate::events;

/// Exit code of a process in which a thread has panicked; it is that of Rust's own programs.
pub const PANICKED: u8 = 101;

/// Longest time that putting things back may take: what panicked may hold what it needs.
const PUT_BACK_TIME: Duration = Duration::from_millis(500);

/// What this process has changed outside of itself.
struct Outside {
    consoles: Vec<Weak<ConsoleEndpoint>>,
    /// A socket file that was made here: path, device, inode.
    socket: Option<(PathBuf, u64, u64)>,
}

/// Locked for an instant, by whoever opens something and at the end.
static OUTSIDE: Mutex<Outside> = Mutex::new(Outside { consoles: Vec::new(), socket: None });

fn outside() -> MutexGuard<'static, Outside> {
    OUTSIDE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has a console put back in the end.
pub fn note_console(endpoint: &Arc<ConsoleEndpoint>) {
    let mut outside = outside();
    outside.consoles.retain(|console| console.strong_count() > 0);
    outside.consoles.push(Arc::downgrade(endpoint));
}

/// Has the API's socket file removed in the end.
pub fn note_socket(path: &Path) {
    if let Ok(there) = std::fs::symlink_metadata(path) {
        outside().socket = Some((path.to_owned(), there.dev(), there.ino()));
    }
}

fn put_back() {
    let consoles: Vec<_> = outside().consoles.iter().filter_map(Weak::upgrade).collect();
    for console in consoles {
        console.close();
    }
    if let Some((path, device, inode)) = outside().socket.take()
        && std::fs::symlink_metadata(&path)
            .is_ok_and(|there| (there.dev(), there.ino()) == (device, inode))
    {
        // There is nobody left to be told.
        let _ = std::fs::remove_file(path);
    }
}

/// From now on a panic of any thread tells so, puts back what can be and ends the process with
/// [`PANICKED`].
pub fn end_with_process() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let what = panic.payload_as_str().unwrap_or("no reason");
        log::error!("a thread has panicked at {place}, and the process ends: {what}");
        events::emit("vmm", "panic", &[("place", &place), ("error", what)]);
        let (done, is_done) = channel();
        let spawned = std::thread::Builder::new().name("put-back".to_owned()).spawn(move || {
            put_back();
            events::flush();
            let _ = done.send(());
        });
        if spawned.is_ok() {
            let _ = is_done.recv_timeout(PUT_BACK_TIME);
        }
        // SAFETY: ends the process without running anything else of it.
        unsafe { libc::_exit(PANICKED.into()) };
    }));
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    const FOLDER: &str = "GODWIT_TEST_PANIC_FOLDER";

    /// What the process that is to panic does.
    fn panic_in(folder: &Path) {
        let _api = UnixListener::bind(folder.join("api")).unwrap();
        note_socket(&folder.join("api"));
        let console = Arc::new(ConsoleEndpoint::socket(&folder.join("console")).unwrap());
        note_console(&console);
        let target = format!("path={}", folder.join("events").display());
        events::start(events::EventTarget::parse(&target).unwrap()).unwrap();
        end_with_process();
        let _ = std::thread::spawn(|| panic!("as a test wants it")).join();
        unreachable!("the process has ended");
    }

    #[test]
    fn a_panic_ends_the_process_and_leaves_nothing_behind() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return panic_in(Path::new(&folder));
        }
        let folder = tempfile::tempdir().unwrap();
        let ended = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "panicking::tests::a_panic_ends_the_process_and_leaves_nothing_behind",
            ])
            .env(FOLDER, folder.path())
            .output()
            .unwrap();
        assert_eq!(ended.status.code(), Some(PANICKED.into()), "{ended:?}");
        assert!(!folder.path().join("api").exists() && !folder.path().join("console").exists());
        let events = std::fs::read_to_string(folder.path().join("events")).unwrap();
        assert!(events.contains("\"panic\"") && events.contains("as a test wants it"), "{events}");
    }
}
