// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The time limit of operations on a vhost-user back end.
//!
//! Owns a thread that shuts the connection down when an operation, which is a number of requests, has not ended in
//! time: the `vhost` crate waits for an answer without a limit of its own, also for the rest of one that has begun to
//! arrive. It must never read or write the connection.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;

/// When the requests of an operation have to be answered, and how long it may take.
#[derive(Clone, Copy)]
struct Limit {
    until: Instant,
    duration: Duration,
}

#[derive(Default)]
struct State {
    /// Of the operation.
    limit: Option<Limit>,
    /// Of all operations: the driver or the VMM wants the device to end.
    hurry: Option<Limit>,
    /// A request is waited for.
    is_waiting: bool,
    expired: Option<Duration>,
    is_ending: bool,
}

impl State {
    /// What ends the request that is waited for.
    fn applying(&self) -> Option<Limit> {
        let limits = [self.limit, self.hurry].into_iter().flatten();
        limits.min_by_key(|limit| limit.until).filter(|_| self.is_waiting)
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The time limit of one connection; the thread ends when this is dropped.
pub(super) struct Deadline {
    shared: Arc<Shared>,
    limit: Duration,
    _thread: StoppableThread,
}

impl Deadline {
    /// Starts the thread for `connection`; each operation may take `limit`.
    pub(super) fn start(connection: UnixStream, limit: Duration) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let (watching, ending) = (Arc::clone(&shared), Arc::clone(&shared));
        let stop = move || {
            ending.state.lock().is_ending = true;
            ending.changed.notify_all();
        };
        let body = move || watch(&watching, &connection);
        let builder = stoppable_thread::Builder::new("vhost-limit");
        let thread = StoppableThread::build(builder, stop, body)?;
        Ok(Self { shared, limit, _thread: thread })
    }

    /// An operation begins, which has begun `before` now.
    pub(super) fn begin(&self, before: Duration) {
        let left = self.limit.saturating_sub(before);
        let until = Instant::now().checked_add(left);
        let limit = until.map(|until| Limit { until, duration: self.limit });
        self.shared.state.lock().limit = limit;
    }

    /// This time, or that of each operation if it is shorter.
    pub(super) fn at_most(&self, limit: Duration) -> Duration {
        limit.min(self.limit)
    }

    /// An operation begins that may take `limit`, and no more than others.
    pub(super) fn begin_within(&self, limit: Duration) {
        let limit = self.at_most(limit);
        let until = Instant::now().checked_add(limit);
        self.shared.state.lock().limit = until.map(|until| Limit { until, duration: limit });
    }

    /// Limits all that is under way and that follows to `limit`, until [`take_time`](Self::take_time).
    pub(super) fn hurry(&self, limit: Duration) {
        let until = Instant::now().checked_add(limit);
        self.shared.state.lock().hurry = until.map(|until| Limit { until, duration: limit });
        self.shared.changed.notify_all();
    }

    /// Ends the hurry.
    pub(super) fn take_time(&self) {
        self.shared.state.lock().hurry = None;
    }

    /// Runs a request, which ends with an error of the connection when the limit passes. Returns also
    /// the limit that has passed: the connection is shut down then, even if there was an answer.
    pub(super) fn limited<T>(&self, request: impl FnOnce() -> T) -> (T, Option<Duration>) {
        self.shared.state.lock().is_waiting = true;
        self.shared.changed.notify_all();
        let result = request();
        let mut state = self.shared.state.lock();
        state.is_waiting = false;
        (result, state.expired)
    }
}

fn watch(shared: &Shared, connection: &UnixStream) {
    let mut state = shared.state.lock();
    while !state.is_ending {
        let Some(limit) = state.applying().filter(|_| state.expired.is_none()) else {
            shared.changed.wait(&mut state);
            continue;
        };
        if Instant::now() < limit.until {
            shared.changed.wait_until(&mut state, limit.until);
            continue;
        }
        state.expired = Some(limit.duration);
        // Fails if the peer has closed it, and then nothing waits for it.
        let _ = connection.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::io::Read as _;

    use super::*;

    #[test]
    fn an_answer_after_the_limit_is_none() {
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(20);
        let deadline = Deadline::start(ours.try_clone().unwrap(), limit).unwrap();
        deadline.begin(Duration::ZERO);
        // It returns without an error, as a request does whose answer comes at the last moment.
        let (read, expired) = deadline.limited(|| ours.read(&mut [0]));
        assert_eq!((read.unwrap(), expired), (0, Some(limit)));
    }
}
