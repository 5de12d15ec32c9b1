// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread that hears of a device server while nothing is asked of it.
//!
//! Owns the thread. It refuses what the server asks, and calls the code that started it when the session has ended,
//! on whichever thread that was noticed: threads that wait for the server may hold locks which that code takes.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

use stoppable_thread::StoppableThread;
use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::session::{CONNECTION, Session};

/// Called once with the reason when the server is lost.
pub type OnUserLost = Box<dyn FnOnce(&str) + Send>;

/// Time between two refusals of what a server asks: 32 a second.
const BETWEEN_COMMANDS: Duration = Duration::from_millis(31);
/// Token of the event that ends the thread.
const STOP: u64 = 0;

/// Watches a server until dropped.
pub struct Watch {
    _thread: StoppableThread,
}

impl Watch {
    pub(super) fn start(session: Arc<Session>, on_lost: OnUserLost) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let event = EpollEvent::new(EventSet::IN, STOP);
        session.epoll().ctl(ControlOperation::Add, stop.as_raw_fd(), event)?;
        // A saturated counter wakes the thread as well.
        let stop = move || drop(stop.write(1));
        let body = move || watch(&session, on_lost);
        Ok(Self { _thread: StoppableThread::spawn("vfio-user", stop, body)? })
    }
}

fn watch(session: &Session, on_lost: OnUserLost) {
    let mut ready = [EpollEvent::default(); 2];
    loop {
        let count = match session.epoll().wait(-1, &mut ready) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                session.end(&format!("it cannot be heard: {error}"));
                0
            }
        };
        let mut tokens = ready.iter().take(count).map(EpollEvent::data);
        if tokens.clone().any(|token| token == STOP) {
            return;
        }
        if tokens.any(|token| token == CONNECTION) && session.attend() {
            // A server that goes on asking waits, and not the host's processor for it.
            std::thread::sleep(BETWEEN_COMMANDS);
        }
        if let Some(why) = session.lost() {
            return on_lost(why);
        }
    }
}
