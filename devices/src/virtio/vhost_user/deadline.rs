// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The time limit of requests to a vhost-user back end.
//!
//! Owns a thread that shuts the connection down when a request has not been answered in time: the
//! `vhost` crate waits for an answer without a limit of its own, also for the rest of one that has begun to arrive. It
//! must never read or write the connection.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;

#[derive(Default)]
struct State {
    /// When the request that is waited for has to be answered.
    until: Option<Instant>,
    has_expired: bool,
    is_ending: bool,
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
    /// Starts the thread for `connection`; each request may take `limit`.
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

    /// Runs `request`, which ends with an error of the connection when the limit passes.
    pub(super) fn limited<T>(&self, request: impl FnOnce() -> T) -> T {
        self.shared.state.lock().until = Instant::now().checked_add(self.limit);
        self.shared.changed.notify_all();
        let result = request();
        self.shared.state.lock().until = None;
        result
    }

    /// Whether a request was not answered in time; the connection is shut down then.
    pub(super) fn has_expired(&self) -> bool {
        self.shared.state.lock().has_expired
    }

    /// The limit.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }
}

fn watch(shared: &Shared, connection: &UnixStream) {
    let mut state = shared.state.lock();
    while !state.is_ending {
        let Some(until) = state.until else {
            shared.changed.wait(&mut state);
            continue;
        };
        if Instant::now() < until {
            shared.changed.wait_until(&mut state, until);
            continue;
        }
        state.until = None;
        state.has_expired = true;
        // Fails if the peer has closed it, and then nothing waits for it.
        let _ = connection.shutdown(Shutdown::Both);
    }
}
