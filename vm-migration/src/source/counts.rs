// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How many further connections there are: what the options say, as far as this process has descriptors and threads for
//! them, and as the destination takes them.
//!
//! Owns the threads until the numbers are known. Must never open a connection.

use super::Context;
use super::negotiate::Taken;
use super::serve::{BULK, URGENT, vcpus_beside};
use crate::channel::Channel;
use crate::descriptors;
use crate::error::Failure;
use crate::options::{CONNECTIONS_MAX, MemoryMode, SendOptions, URGENT_CONNECTIONS_SHARED};
use crate::protocol::capabilities::{FEATURE_FEWER_CONNECTIONS, FEATURE_MANY_URGENT};
use crate::session::Session;
use crate::threads::Needs;

/// Numbers of extra connections: precopy also uses the first connection for memory.
pub(super) fn extra_connections(options: &SendOptions) -> (u16, u16) {
    match options.mode() {
        _ if options.local => (0, 0),
        MemoryMode::Precopy => (options.connections - 1, 0),
        MemoryMode::Postcopy | MemoryMode::Auto => {
            (options.connections, options.urgent_connections())
        }
    }
}

/// Connections for requested pages that a destination of any version takes: those of more vCPUs are shared.
pub(super) fn for_any(urgent_connections: u16) -> u16 {
    match urgent_connections {
        0..=CONNECTIONS_MAX => urgent_connections,
        _ => URGENT_CONNECTIONS_SHARED,
    }
}

/// The same, as far as this process has descriptors for them.
pub(super) fn connections_with_room(context: Context<'_>) -> (u16, u16) {
    let wanted = extra_connections(context.options);
    let room = descriptors::room(wanted.0.saturating_add(wanted.1));
    descriptors::fewer_telling(wanted, room, context.options.mode(), descriptors::FEW_HERE)
}

/// As many of these as this process may start threads for, which wait from now on: while the guest is stopped none has to
/// be started, or could be refused.
pub(super) fn threads_with_room(
    wanted: (u16, u16),
    control: &Channel,
    context: Context<'_>,
) -> Result<((u16, u16), Option<Session>), Failure> {
    let mode = context.options.mode();
    if !mode.may_postcopy() {
        return Ok((wanted, None));
    }
    let vcpus = context.options.vcpus.unwrap_or(0);
    // In rounds a thread sends on each connection for memory and on the first one, beside those that wait.
    let senders = usize::from(mode == MemoryMode::Auto);
    let needs = Needs {
        wanted,
        mode,
        bulk: BULK,
        urgent: URGENT,
        vcpus: vcpus_beside(&control.connection, vcpus),
        besides: senders,
        beside_bulk: senders,
    };
    let (session, room) = needs.park(None)?;
    room.say_fewer();
    Ok((room.counts, Some(session)))
}

/// As many of these as the destination takes; threads for others end.
pub(super) fn accepted_connections(
    wanted: (u16, u16),
    token: Option<&Taken>,
    serving: Option<&mut Session>,
    context: Context<'_>,
) -> (u16, u16) {
    let counts = accepted(wanted, token, context);
    if let Some(serving) = serving {
        serving.dismiss(BULK, counts.0.into());
        serving.dismiss(URGENT, counts.1.into());
    }
    counts
}

fn accepted((bulk, urgent): (u16, u16), token: Option<&Taken>, context: Context<'_>) -> (u16, u16) {
    let takes_many = |(features, _): &Taken| features.contains(FEATURE_MANY_URGENT);
    let urgent = if token.is_some_and(takes_many) { urgent } else { for_any(urgent) };
    let offered = (bulk, urgent);
    let most = token.and_then(|(features, accepted)| {
        accepted.connections_max.filter(|_| features.contains(FEATURE_FEWER_CONNECTIONS))
    });
    let Some(most) = most else { return offered };
    let why = "the destination has no room for more";
    descriptors::fewer_telling(offered, most, context.options.mode(), why)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::cancel::Cancel;
    use crate::phase::Side;
    use crate::progress::Progress;
    use crate::testing::Calls;
    use crate::threads::ThreadLimit;
    use crate::transport::Connection;

    #[test]
    fn the_senders_of_the_rounds_have_room_beside_the_threads_that_wait() {
        // Left for all else.
        const OTHERS: usize = 128;
        let counts = |mode, threads| {
            let cancel = Cancel::new().unwrap();
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let connection = Connection::over(ours, &cancel, Duration::from_mins(1)).unwrap();
            let mut options = SendOptions::new("unix:nowhere".parse().unwrap());
            options.memory_mode = mode;
            let progress = Arc::new(Progress::new(Side::Source));
            let context = Context { options: &options, progress: &progress, cancel: &cancel };
            let limit = ThreadLimit::set(threads, &Calls::default());
            let parked = threads_with_room((6, 5), &Channel::new(connection), context);
            ThreadLimit::lift();
            let (counts, serving) = parked.unwrap();
            let waiting = limit.there();
            drop(serving);
            (counts, waiting)
        };
        assert_eq!(counts(MemoryMode::Postcopy, OTHERS + 11), ((6, 5), 11));
        assert_eq!(counts(MemoryMode::Postcopy, OTHERS + 10), ((5, 5), 10));
        // One sends on the first connection.
        assert_eq!(counts(MemoryMode::Auto, OTHERS + 11 + 7), ((6, 5), 11));
        assert_eq!(counts(MemoryMode::Auto, OTHERS + 11 + 6), ((5, 5), 10));
        assert_eq!(counts(MemoryMode::Precopy, 0), ((6, 5), 0));
    }
}
