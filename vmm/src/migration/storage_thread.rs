// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread that writes guest memory to files: storage that hangs blocks that thread and not the
//! machine.
//!
//! Owns how long a cancelled one is waited for. Must never know what is written.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use thiserror::Error;
use vm_migration::Cancel;

/// Poll interval for cancellation while storage is waited for.
pub const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time that the storage has to finish its writes after a cancel: longer than healthy storage
/// takes for those in flight, which is one block of memory per thread.
const STORAGE_TIME: Duration = Duration::from_secs(1);

/// Why there is no result.
#[derive(Debug, Error)]
pub enum StorageError {
    /// No thread can be started.
    #[error("a thread for it cannot be started")]
    Thread(#[source] io::Error),
    /// It was cancelled, and a write is still in progress.
    #[error(
        "it was cancelled while its storage does not answer; what was written is removed when it does, and \
         until then nothing else can be written there"
    )]
    LeftBehind,
}

/// Runs `work` on its own thread and returns its result. After a cancel, which `work` notices between two
/// writes, it is left alone when it does not end soon.
///
/// # Errors
/// No thread, or a cancelled one that does not end.
pub fn write_on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    cancel: &Cancel,
) -> Result<T, StorageError> {
    let (end, has_ended) = channel();
    stoppable_thread::Builder::new("snapshot-write")
        // Without a receiver it was cancelled, and the result is not wanted.
        .spawn(move || drop(end.send(work())))
        .map_err(StorageError::Thread)?;
    let mut cancelled_at = None;
    loop {
        match has_ended.recv_timeout(CANCEL_POLL_INTERVAL) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => unreachable!("it says what has come of it"),
            Err(RecvTimeoutError::Timeout) if cancel.is_cancelled() => {
                if cancelled_at.get_or_insert_with(Instant::now).elapsed() >= STORAGE_TIME {
                    return Err(StorageError::LeftBehind);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
