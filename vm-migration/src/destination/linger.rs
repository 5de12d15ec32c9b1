// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The last message of a postcopy, for a source that may not have heard it.
//!
//! Owns the listener of a migration that is over here, and the thread that answers a source which
//! comes back: every page is here. It answers every time until the time is over, because any answer
//! may be lost on its way: a source (or page server) that never hears it holds all memory of a guest
//! that needs nothing any more. A new migration to the same address takes the listener over and goes
//! on answering while it waits for its own source.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::hello;
use super::rejoin::{HELLO_TIMEOUT, Rejoin};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::Cause;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::Message;
use crate::steering::LOOK_EVERY;
use crate::transport::{Address, Listener, TransportError, WaitEnd, wait_readable};

/// A migration that is over here, well.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Past {
    id: [u8; TOKEN_BYTES],
    until: Instant,
}

/// One that is being answered for.
#[derive(Debug)]
struct Entry {
    past: Past,
    address: Address,
    listener: Arc<Listener>,
    stop: Cancel,
    thread: JoinHandle<()>,
}

/// The migrations of a process that are over and answered for; clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Lingering(Arc<Mutex<Vec<Entry>>>);

impl PartialEq for Lingering {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Lingering {}

impl Lingering {
    /// Listens on an address, in place of those that answer there now for migrations that are over.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub(super) fn bind(
        &self,
        address: &Address,
    ) -> Result<(Arc<Listener>, Vec<Past>), TransportError> {
        let (mut listener, mut pasts) = (None, Vec::new());
        for entry in self.take(address) {
            let Entry { past, address: at, listener: there, stop, thread } = entry;
            stop.cancel();
            // It waits for nothing that the cancel does not end.
            let _ = thread.join();
            if Instant::now() < past.until {
                pasts.push(past);
            }
            if at == *address {
                listener = Some(there);
            }
        }
        let listener = match listener {
            Some(listener) => listener,
            None => Arc::new(Listener::bind(address)?),
        };
        Ok((listener, pasts))
    }

    fn take(&self, address: &Address) -> Vec<Entry> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.extract_if(.., |entry| collide(&entry.address, address)).collect()
    }

    fn start(&self, rejoin: &Rejoin, timeout: Duration) -> std::io::Result<()> {
        let stop = Cancel::new()?;
        let past = Past { id: rejoin.id, until: Instant::now() + timeout };
        let listener = Arc::clone(&rejoin.listener);
        // Locked until the entry is there for its thread to take out.
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let thread = {
            let (all, listener, stop) = (self.clone(), Arc::clone(&listener), stop.clone());
            let steering = rejoin.steering.clone();
            std::thread::Builder::new().name("mig-linger".into()).spawn(move || {
                while Instant::now() < past.until && !steering.gives_up() {
                    let fds = [listener.as_raw_fd()];
                    match wait_readable(&fds, &stop, Some(LOOK_EVERY)) {
                        Ok(WaitEnd::Cancelled) => return,
                        Ok(WaitEnd::Ready(_)) => {
                            if let Err(cause) = greet(&listener, &[past], &stop) {
                                let why = error_text::chain(&cause);
                                log::debug!("after the last page: {why}");
                                // Not in a busy loop where there is no descriptor for it.
                                std::thread::sleep(LOOK_EVERY);
                            }
                        }
                        Ok(WaitEnd::TimedOut) => {}
                        Err(_) => std::thread::sleep(LOOK_EVERY),
                    }
                }
                let mut entries = all.0.lock().unwrap_or_else(PoisonError::into_inner);
                entries.retain(|entry| entry.past.id != past.id);
            })?
        };
        let address = listener.address().clone();
        let entry = Entry { past, address, listener, stop, thread };
        entries.push(entry);
        Ok(())
    }
}

/// Whether both cannot be listened on at once.
fn collide(one: &Address, other: &Address) -> bool {
    match (one, other) {
        (Address::Tcp { port: one, .. }, Address::Tcp { port: other, .. }) => one == other,
        _ => one == other,
    }
}

/// Takes one connection, which can only be of a source that does not know that it is done.
fn greet(listener: &Listener, pasts: &[Past], cancel: &Cancel) -> Result<(), Cause> {
    let connection = listener.accept(cancel, Some(Duration::ZERO), HELLO_TIMEOUT)?;
    let (control, message) = hello::hear(connection, HELLO_TIMEOUT)?;
    answer(&control, &message, pasts)
}

/// Answers a message of a source that may be one of a migration that is over.
///
/// # Errors
/// It is not, and was told so.
fn answer(control: &Channel, message: &Message, pasts: &[Past]) -> Result<(), Cause> {
    match reply(message, pasts) {
        Ok(()) => {
            control.yes()?;
            control.connection.finish_sending(HELLO_TIMEOUT);
            Ok(())
        }
        Err(refused) => {
            control.refuse(refused);
            Err(Cause::Refused(refused.to_string()))
        }
    }
}

/// What a source is told that may be one of a migration that is over: that it is, or that it is not.
pub(super) fn reply(message: &Message, pasts: &[Past]) -> Result<(), &'static str> {
    let known = |id: &[u8; TOKEN_BYTES]| {
        pasts.iter().any(|past| past.id == *id && Instant::now() < past.until)
    };
    match message {
        // No token in the answer: there is nothing to recover.
        Message::Recover(recover) if known(&recover.id) => Ok(()),
        Message::Recover(_) => {
            Err("no VM of another host waits here for its pages; recover where the VM runs")
        }
        Message::Verdict { .. } => Err("no VM here is in doubt about that migration"),
        _ => Err("a migration to here is over, and nothing is awaited"),
    }
}

impl Rejoin {
    /// Every page is here and the source may not know it: tells it whenever it comes back, for as
    /// long as the source tries by itself.
    pub(crate) fn linger(&self) {
        if let Err(error) = self.lingering.start(self, self.linger) {
            log::warn!("the source will not learn that all pages are here: {error}");
        }
    }
}

/// Answers at an address for a migration that is over; where, and for which.
#[cfg(test)]
pub(crate) fn linger_for_tests(
    at: &Address,
    lingering: &Lingering,
) -> (Address, [u8; TOKEN_BYTES]) {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    let listener = Arc::new(Listener::bind(at).unwrap());
    let address = listener.address().clone();
    let id = [7; TOKEN_BYTES];
    let rejoin = Rejoin {
        listener,
        id,
        attempt: 0,
        stall: Duration::from_secs(5),
        steering: crate::Steering::new(),
        linger: Duration::from_mins(1),
        lingering: lingering.clone(),
    };
    rejoin.linger();
    (address, id)
}
