// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opens all further connections of a set at once.
//!
//! Owns the concurrency: each connection is made, and sends its hello, on a separate thread with a separate
//! time limit, so that a large set takes a few round trips, and more of them where the process may start few threads. If a TCP name resolves to several
//! hosts, it uses the address that the first connection has reached.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::Cause;
use crate::options::{CONNECTIONS_MAX, Limits};
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::Role;
use crate::transport::{Address, Connection, wait_readable};

/// Most connections that are opened at the same time: a destination drops some of those whose hello it has not read when
/// there are more of them than this and those of some other clients.
const AT_ONCE_MAX: usize = 2 * CONNECTIONS_MAX as usize;

/// Stack of a thread that opens a connection: small, because there may be [`AT_ONCE_MAX`] of them for a moment.
const STACK_BYTES: usize = 256 << 10;

/// The name of such a thread.
const CONNECT: &str = "mig-connect";

/// Destination, token and limits of a set of connections that is being opened.
#[derive(Clone, Copy)]
pub(crate) struct Opening<'a> {
    pub to: &'a Address,
    /// The first connection of the set.
    pub beside: &'a Connection,
    /// The token, which the destination confirms; `None` with plain version 0.
    pub token: Option<&'a [u8; TOKEN_BYTES]>,
    pub cancel: &'a Cancel,
    pub limits: &'a Limits,
}

impl Opening<'_> {
    /// Opens a connection for each role, in order.
    ///
    /// # Errors
    /// The first failure; the other connections are closed.
    pub(crate) fn all(&self, roles: &[Role]) -> Result<Vec<Channel>, Cause> {
        #[cfg(test)]
        crate::descriptors::test_open(roles.len()).map_err(Cause::Resource)?;
        let mut channels = Vec::with_capacity(roles.len());
        let mut left = roles;
        while !left.is_empty() {
            let mut opened = self.at_once(left.get(..AT_ONCE_MAX).unwrap_or(left))?;
            left = left.get(opened.len()..).unwrap_or_default();
            channels.append(&mut opened);
        }
        Ok(channels)
    }

    /// Opens a connection for each of the first roles, as many as there are threads for: one at least.
    fn at_once(&self, roles: &[Role]) -> Result<Vec<Channel>, Cause> {
        let stop = Cancel::new().map_err(Cause::Resource)?;
        let over = Cancel::new().map_err(Cause::Resource)?;
        let left = AtomicUsize::new(roles.len());
        let first_failure = Mutex::new(None);
        let failed = |cause| {
            let mut first = first_failure.lock();
            first.get_or_insert(cause);
        };
        let open = |role| match self.one(role, &stop) {
            Ok(channel) => {
                if left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    over.cancel();
                }
                Some(channel)
            }
            Err(cause) => {
                failed(cause);
                over.cancel();
                None
            }
        };
        #[cfg(test)]
        let limit = crate::threads::ThreadLimit::of_caller();
        let mut started = 0;
        let channels: Vec<Channel> = std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(roles.len());
            for role in roles {
                #[cfg(test)]
                if limit.as_ref().is_some_and(|limit| limit.begin(CONNECT).is_err()) {
                    break;
                }
                let builder = stoppable_thread::Builder::new(CONNECT).stack_bytes(STACK_BYTES);
                match builder.spawn_scoped(scope, || open(*role)) {
                    Ok(thread) => threads.push(thread),
                    // A later round has the others.
                    Err(_) => break,
                }
            }
            started = threads.len();
            let without = roles.len() - started;
            if without > 0 && left.fetch_sub(without, Ordering::AcqRel) == without {
                over.cancel();
            }
            if let Err(error) = wait_readable(&[over.fd()], self.cancel, None) {
                failed(Cause::Resource(error));
            }
            if left.load(Ordering::Acquire) > 0 {
                stop.cancel();
            }
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            joined.flatten().collect()
        });
        #[cfg(test)]
        if let Some(limit) = limit {
            limit.end(started);
        }
        if let ([role, ..], 0) = (roles, started) {
            return Ok(vec![self.one(*role, self.cancel)?]);
        }
        if channels.len() == started {
            for channel in &channels {
                channel.connection.set_cancel(self.cancel);
            }
            return Ok(channels);
        }
        let first = first_failure.into_inner();
        Err(match first {
            Some(cause) if !self.cancel.is_cancelled() => cause,
            _ => Cause::Cancelled,
        })
    }

    fn one(&self, role: Role, stop: &Cancel) -> Result<Channel, Cause> {
        let Limits { connect, answer, .. } = *self.limits;
        let connection = self.beside.connect_extra(self.to, stop, connect, answer)?;
        Channel::introduce(connection, role, self.token, answer)
    }
}
