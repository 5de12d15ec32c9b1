// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that take over values owned by the VMM thread.
//!
//! Owns the value on its way to such a thread, which is returned if the thread cannot be started, and the times for
//! which the VMM thread waits until one is released, and until a thread that has said its result is gone. Must never
//! know what the value is.

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

/// A thread that says its result as the last thing that it does.
///
/// What drives this process may list its threads as soon as it has the answer to a request, and give each a cgroup and
/// CPUs: libvirt does so when a VM has started, and takes one that is not there any more for a failure.
#[derive(Clone, Copy, Debug)]
pub struct LastWord(libc::pid_t);

impl LastWord {
    /// How long a thread that ends may take for it.
    const WITHIN: Duration = Duration::from_millis(100);
    /// Between two looks at it.
    const PERIOD: Duration = Duration::from_micros(50);

    /// Of the calling thread.
    pub fn of_this_thread() -> Self {
        // SAFETY: gettid has no preconditions.
        Self(unsafe { libc::gettid() })
    }

    /// Whether the process has the thread no more. The end of a join is before that.
    fn is_gone(self) -> bool {
        // SAFETY: without a signal, this only looks whether there is such a thread.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, 0) };
        result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
    }

    /// Waits until the thread is gone, for a tenth of a second at most.
    pub fn wait(self) {
        if !self.is_gone_within(Self::WITHIN) {
            log::debug!("thread {} has said its result and does not end", self.0);
        }
    }

    fn is_gone_within(self, within: Duration) -> bool {
        let began = Instant::now();
        while !self.is_gone() {
            if began.elapsed() > within {
                return false;
            }
            std::thread::sleep(Self::PERIOD);
        }
        true
    }
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
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::sync::mpsc::Receiver;

    use super::*;

    /// Longer than any of these tests takes.
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_thread_that_has_said_its_result_is_gone() {
        let folder = |thread: libc::pid_t| format!("/proc/self/task/{thread}");
        for _ in 0..200 {
            let (say, said) = channel();
            let (release, released) = channel::<()>();
            let work = move |()| {
                say.send(LastWord::of_this_thread()).unwrap();
                let _ = released.recv();
            };
            spawn_with("test", (), work).map_err(|((), error)| error).unwrap();
            let word = said.recv().unwrap();
            assert!(std::fs::exists(folder(word.0)).unwrap() && !word.is_gone());
            drop(release);
            assert!(word.is_gone_within(LONG));
            assert!(!std::fs::exists(folder(word.0)).unwrap());
        }
    }

    #[test]
    fn one_that_goes_on_is_not_waited_for() {
        let began = Instant::now();
        LastWord::of_this_thread().wait();
        assert!((LastWord::WITHIN..LONG).contains(&began.elapsed()));
    }

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
