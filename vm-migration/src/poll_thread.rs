// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Polls a condition on a second thread while the calling thread is busy.
//!
//! Owns the polling thread. It decides nothing: the caller acts on what a poll finds.

use std::io;
use std::sync::mpsc;

use crate::steering::LOOK_EVERY;

/// Does `work`, and meanwhile calls `look` periodically on a thread of its own, which ends with it.
///
/// # Errors
/// When the thread cannot be started; `work` has not been done.
pub(crate) fn poll_while<T>(
    mut look: impl FnMut() + Send,
    work: impl FnOnce() -> T,
) -> io::Result<T> {
    let (working, ended) = mpsc::channel::<()>();
    let looks = move || {
        while ended.recv_timeout(LOOK_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            look();
        }
    };
    std::thread::scope(|scope| {
        stoppable_thread::spawn_scoped(scope, "mig-look", looks)?;
        let done = work();
        drop(working);
        Ok(done)
    })
}
