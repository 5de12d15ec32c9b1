// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that take over values owned by the VMM thread.
//!
//! Owns the value on its way to such a thread, which is returned if the thread cannot be started, and the time for
//! which the VMM thread waits until one is released. Must never know what the value is.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Starts a thread that owns `load`; on failure `load` is returned with the error.
pub fn spawn_with<T: Send + 'static>(
    name: &str,
    load: T,
    work: impl FnOnce(T) + Send + 'static,
) -> Result<JoinHandle<()>, (T, io::Error)> {
    let slot = Arc::new(Mutex::new(Some(load)));
    let take = |slot: &Mutex<Option<T>>| slot.lock().take();
    let inner = Arc::clone(&slot);
    let spawned = stoppable_thread::spawn(name, move || {
        if let Some(load) = take(&inner) {
            work(load);
        }
    });
    spawned.map_err(|error| match take(&slot) {
        Some(load) => (load, error),
        // Only the thread takes it, and none was started.
        None => unreachable!("no thread was made"),
    })
}

/// Drops a load on its own thread and waits up to `within`: the VMM thread must not block on what the drop
/// waits for. Returns whether it has finished; otherwise the thread continues alone, and ends with the
/// process.
pub fn release_within<T: Send + 'static>(
    thread: &str,
    what: &str,
    load: T,
    within: Duration,
) -> bool {
    let (tell, told) = channel::<()>();
    log::debug!("releasing {what}");
    let began = Instant::now();
    // A dropped sender signals as well, also after a panic.
    let spawned = spawn_with(thread, (load, tell), |(load, _tell)| drop(load));
    if let Err(((load, _), error)) = spawned {
        log::warn!("{what} is released by the VMM thread: there is no other: {error}");
        drop(load);
        return true;
    }
    let is_released = told.recv_timeout(within) != Err(RecvTimeoutError::Timeout);
    if is_released {
        log::debug!("{what} was released in {} ms", began.elapsed().as_millis());
    } else {
        log::warn!("{what} is not released after {} s, and is not waited for", within.as_secs());
    }
    is_released
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    /// Longer than any of these tests takes.
    const LONG: Duration = Duration::from_secs(20);

    /// Whose release waits for a message, or for the end of its sender.
    struct Stuck(Receiver<()>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(LONG);
        }
    }

    #[test]
    fn what_cannot_be_released_is_not_waited_for() {
        let (go_on, wait) = channel();
        let began = Instant::now();
        let short = Duration::from_millis(20);
        assert!(!release_within("test", "a load", Stuck(wait), short));
        assert!(began.elapsed() < LONG / 2);
        drop(go_on);
        let (_, wait) = channel();
        assert!(release_within("test", "a load", Stuck(wait), LONG));
        assert!(began.elapsed() < LONG);
    }
}
