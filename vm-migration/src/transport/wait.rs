// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Waiting on descriptors with a time limit and a cancel.
//!
//! May contain `unsafe`: calls of poll. Every blocking wait of the crate goes through here.

use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use crate::cancel::Cancel;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// The descriptor with this index is ready (or has failed, which reading shows).
    Ready(usize),
    /// A cancel was requested.
    Cancelled,
    /// The timeout has expired.
    TimedOut,
}

/// Waits until one of the descriptors can be read.
pub(crate) fn wait_readable(
    fds: &[RawFd],
    cancel: &Cancel,
    timeout: Option<Duration>,
) -> io::Result<WaitEnd> {
    wait(fds, libc::POLLIN, cancel, timeout)
}

/// Waits until a descriptor is readable (0), or the peer of a socket has closed its connection or its
/// sending direction (1). Data that the peer has sent, or keeps sending, does not end the wait.
pub(crate) fn wait_readable_or_left(
    fd: RawFd,
    socket: RawFd,
    cancel: &Cancel,
    timeout: Option<Duration>,
) -> io::Result<WaitEnd> {
    // All other ends of a connection are always reported by poll.
    wait_for(&[(fd, libc::POLLIN), (socket, libc::POLLRDHUP)], cancel, timeout)
}

/// True when a descriptor is ready for `events` now, or has failed, which using it shows.
pub(crate) fn is_ready_now(fd: RawFd, events: i16) -> io::Result<bool> {
    let mut polled = libc::pollfd { fd, events, revents: 0 };
    loop {
        // SAFETY: `polled` is one live, exclusively borrowed entry.
        let ready = unsafe { libc::poll(&raw mut polled, 1, 0) };
        if ready >= 0 {
            return Ok(ready > 0);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Waits until one of the entries has an event, which it then shows; false when the timeout has expired. Takes no
/// memory: threads wait here that a guest waits for.
pub(crate) fn poll_readable(
    polled: &mut [libc::pollfd],
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // SAFETY: `polled` is a live, exclusively borrowed array of `polled.len()` entries.
        let ready = unsafe {
            libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds(left))
        };
        if ready >= 0 {
            return Ok(ready > 0);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A time as poll takes it, rounded up, so that the last millisecond is not spent in a busy loop.
fn milliseconds(left: Option<Duration>) -> i32 {
    left.map_or(-1, |left| i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX))
}

/// Waits until one of the descriptors is ready for `events`. A cancel takes precedence over
/// readiness.
pub(crate) fn wait(
    fds: &[RawFd],
    events: i16,
    cancel: &Cancel,
    timeout: Option<Duration>,
) -> io::Result<WaitEnd> {
    let fds: Vec<_> = fds.iter().map(|fd| (*fd, events)).collect();
    wait_for(&fds, cancel, timeout)
}

/// Like [`wait`], each descriptor with its own events.
fn wait_for(
    fds: &[(RawFd, i16)],
    cancel: &Cancel,
    timeout: Option<Duration>,
) -> io::Result<WaitEnd> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut polled: Vec<libc::pollfd> = Vec::with_capacity(fds.len() + 1);
    polled.push(libc::pollfd { fd: cancel.fd(), events: libc::POLLIN, revents: 0 });
    polled.extend(fds.iter().map(|(fd, events)| libc::pollfd {
        fd: *fd,
        events: *events,
        revents: 0,
    }));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left_ms = milliseconds(left);
        // SAFETY: `polled` is a live, exclusively borrowed array of `polled.len()` entries.
        let ready =
            unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, left_ms) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        if polled[0].revents != 0 {
            return Ok(WaitEnd::Cancelled);
        }
        if let Some(index) = polled[1..].iter().position(|entry| entry.revents != 0) {
            return Ok(WaitEnd::Ready(index));
        }
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(WaitEnd::TimedOut);
        }
    }
}
