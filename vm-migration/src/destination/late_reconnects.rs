// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers sources that reconnect after a postcopy migration has ended here.
//!
//! Owns the listener of an ended migration, and the thread that tells a reconnecting source that every page
//! is here. It answers each time until a deadline, because any answer may be lost: a source (or page server)
//! that never receives it keeps all memory of a guest that no longer needs it. A new migration to the same
//! address takes over the listener and answers these sources alongside its own; when it ends, the rest of the
//! time is served here again. Connections that were to use TLS still do: an address at which such a source is
//! still answered is not listened on without TLS. No connection delays the answer to another.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;

use super::arrivals::{Arrivals, Expect, Hello};
use super::refusals;
use super::rejoin::{HELLO_TIMEOUT, Rejoin};
use crate::cancel::Cancel;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::{Answer, Message};
use crate::steering::LOOK_EVERY;
use crate::transport::{Address, Listener, ServerTls, TransportError, WaitEnd, wait_readable};

/// A migration that has ended here successfully.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedMigration {
    id: [u8; TOKEN_BYTES],
    until: Instant,
}

impl EndedMigration {
    fn lasts(&self) -> bool {
        Instant::now() < self.until
    }
}

/// An address at which reconnecting sources of ended migrations are answered.
#[derive(Debug)]
struct Entry {
    ended: Vec<EndedMigration>,
    listener: Arc<Listener>,
    stop: Cancel,
    thread: JoinHandle<()>,
}

impl Entry {
    /// True when a source that must show a certificate may still reconnect.
    fn needs_tls(&self) -> bool {
        self.listener.tls().is_some() && self.ended.iter().any(EndedMigration::lasts)
    }
}

/// All ended migrations of this process whose sources are still answered; clones share them.
#[derive(Clone, Debug, Default)]
pub struct LateReconnects(Arc<Mutex<Vec<Entry>>>);

impl PartialEq for LateReconnects {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for LateReconnects {}

impl LateReconnects {
    /// Listens on an address, in place of the listeners that answer there for ended migrations. From now on
    /// all connections there use `tls`.
    ///
    /// # Errors
    /// As [`Listener::bind_unless`], and [`TransportError::NeedsTls`].
    pub(super) fn bind(
        &self,
        address: &Address,
        tls: Option<ServerTls>,
        cancel: &Cancel,
    ) -> Result<(Arc<Listener>, Vec<EndedMigration>), TransportError> {
        let (mut listener, mut ended, mut elsewhere) = (None, Vec::new(), Vec::new());
        for Entry { ended: more, listener: there, stop, thread } in
            self.take(address, tls.is_some())?
        {
            stop.cancel();
            // The thread waits for nothing that the cancel does not end.
            let _ = thread.join();
            if there.address() == address {
                listener = Some(Arc::new(there.with_tls(tls.clone())));
            } else {
                let (address, tls) = (there.address().clone(), there.tls().cloned());
                elsewhere.push((address, tls, more.clone()));
            }
            ended.extend(more.into_iter().filter(EndedMigration::lasts));
        }
        let bind = || -> Result<_, TransportError> {
            let listener = Listener::bind_unless(address, cancel)?;
            Ok(Arc::new(listener.with_tls(tls)))
        };
        let bound = listener.map_or_else(bind, Ok);
        if bound.is_err() {
            for (address, tls, ended) in elsewhere {
                match Listener::bind(&address) {
                    Ok(listener) => self.answer_for(&Arc::new(listener.with_tls(tls)), ended),
                    Err(error) => warn_of_silence(&error),
                }
            }
        }
        Ok((bound?, ended))
    }

    /// Removes the entries that conflict with a listener on `address`, which uses TLS or does not.
    fn take(&self, address: &Address, has_tls: bool) -> Result<Vec<Entry>, TransportError> {
        let mut entries = self.0.lock();
        let in_the_way = |entry: &Entry| collide(entry.listener.address(), address);
        let mut there = entries.iter().filter(|entry| in_the_way(entry));
        if !has_tls && there.any(Entry::needs_tls) {
            return Err(TransportError::NeedsTls(address.clone()));
        }
        Ok(entries.extract_if(.., |entry| in_the_way(entry)).collect())
    }

    /// Answers for these migrations until their time is over, where no other thread does so any more.
    pub(super) fn answer_for(&self, listener: &Arc<Listener>, mut ended: Vec<EndedMigration>) {
        ended.retain(EndedMigration::lasts);
        if ended.is_empty() {
            return;
        }
        if let Err(error) = self.start(Arc::clone(listener), ended) {
            warn_of_silence(&error);
        }
    }

    fn start(&self, listener: Arc<Listener>, ended: Vec<EndedMigration>) -> std::io::Result<()> {
        let stop = Cancel::new()?;
        // Locked until the entry exists, which its thread may remove.
        let mut entries = self.0.lock();
        let thread = {
            let (all, listener) = (self.clone(), Arc::clone(&listener));
            let (ended, stop) = (ended.clone(), stop.clone());
            stoppable_thread::spawn("mig-linger", move || {
                if answer_all(&listener, &ended, &stop) {
                    let mut entries = all.0.lock();
                    entries.retain(|entry| !Arc::ptr_eq(&entry.listener, &listener));
                }
            })?
        };
        entries.push(Entry { ended, listener, stop, thread });
        Ok(())
    }
}

fn warn_of_silence(error: &dyn std::error::Error) {
    log::warn!(
        "the source will not be told that all pages have arrived: {}",
        error_text::chain(error)
    );
}

/// Answers every connection, until the time is over (true) or another listener takes over (false).
fn answer_all(listener: &Listener, ended: &[EndedMigration], stop: &Cancel) -> bool {
    let mut arrivals = Arrivals::new(Expect::Message, HELLO_TIMEOUT);
    while ended.iter().any(EndedMigration::lasts) {
        let mut fds = Vec::new();
        arrivals.add_fds(listener, &mut fds);
        match wait_readable(&fds, stop, Some(LOOK_EVERY)) {
            Ok(WaitEnd::Cancelled) => return false,
            Ok(WaitEnd::Ready(_) | WaitEnd::TimedOut) => {}
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
        for hello in arrivals.take(listener, stop) {
            let (answer, channel) = match hello {
                Hello::Message(message, channel) => (reply(&message, ended), channel),
                Hello::Extra(_, _, channel) | Hello::Other(channel) => {
                    (Err(refusals::NOTHING_AWAITED), channel)
                }
            };
            let answer = answer.map_or_else(
                |reason| {
                    log::debug!("after the last page: {reason}");
                    Answer::Error { reason: reason.to_string() }
                },
                |()| Answer::ok(),
            );
            arrivals.dismiss(channel, &answer);
        }
    }
    true
}

/// True when both addresses cannot be listened on at once.
fn collide(one: &Address, other: &Address) -> bool {
    match (one, other) {
        (Address::Tcp { port: one, .. }, Address::Tcp { port: other, .. }) => one == other,
        _ => one == other,
    }
}

/// True for the ID of a migration that ended here and is still answered for.
pub(super) fn is_past(ended: &[EndedMigration], id: &[u8; TOKEN_BYTES]) -> bool {
    ended.iter().any(|migration| migration.id == *id && migration.lasts())
}

/// The answer to a source whose migration may have ended; it has no token, because there is nothing to
/// recover.
///
/// # Errors
/// When it is not one of these migrations.
pub(super) fn reply(message: &Message, ended: &[EndedMigration]) -> Result<(), &'static str> {
    match message {
        Message::Recover(recover) if is_past(ended, &recover.id) => Ok(()),
        Message::Recover(_) => {
            Err("no VM waits for pages from another host here; recover where the VM runs")
        }
        Message::Verdict { .. } => Err("no VM here is in doubt about that migration"),
        _ => Err(refusals::NOTHING_AWAITED),
    }
}

impl Rejoin {
    /// Answers the sources of this migration and of earlier ones whenever they reconnect. Every page is here;
    /// a source that may not know it can ask for as long as it tries by itself.
    pub(crate) fn answer_late_reconnects(&self, knows: bool) {
        let mut ended = self.ended.clone();
        if !knows {
            ended.push(EndedMigration {
                id: self.id,
                until: Instant::now() + self.reconnect_window,
            });
        }
        self.late_reconnects.answer_for(&self.listener, ended);
    }

    /// No page of this migration comes any more; the sources of earlier ones may still ask.
    pub(crate) fn answer_for_others(&self) {
        self.late_reconnects.answer_for(&self.listener, self.ended.clone());
    }
}

/// Answers at an address for an ended migration; returns the address and the migration.
#[cfg(test)]
pub(crate) fn late_reconnects_for_tests(
    at: &Address,
    tls: Option<crate::transport::ServerTls>,
    late_reconnects: &LateReconnects,
) -> (Address, [u8; TOKEN_BYTES]) {
    let mut rejoin = rejoin_for_tests(at, late_reconnects);
    rejoin.listener = Arc::new(rejoin.listener.with_tls(tls));
    rejoin.answer_late_reconnects(false);
    (rejoin.listener.address().clone(), rejoin.id)
}

/// A rejoin whose source may reconnect to an address.
#[cfg(test)]
pub(super) fn rejoin_for_tests(at: &Address, late_reconnects: &LateReconnects) -> Rejoin {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::time::Duration;
    Rejoin {
        listener: Arc::new(Listener::bind(at).unwrap()),
        id: [7; TOKEN_BYTES],
        attempt: 0,
        stall: Duration::from_secs(5),
        steering: crate::Steering::new(),
        reconnect_window: Duration::from_mins(1),
        late_reconnects: late_reconnects.clone(),
        ended: Vec::new(),
    }
}
