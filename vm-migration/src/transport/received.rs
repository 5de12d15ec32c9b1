// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether the peer has what it was sent, for a protocol in which it does not say so.
//!
//! May contain `unsafe`: an ioctl that reads one number. For TCP the bytes are with the peer's host once that has
//! acknowledged them, and for Unix sockets once the peer has taken them. Whatever the peer does later, it reads them
//! first. Something that relays the bytes acknowledges them itself: nothing here can know of it.

use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use super::{Connection, TransportError};

const WHAT: &str = "waiting for the peer to receive what was sent";

/// The first wait between two looks, and the longest one. The kernel has no event for the moment at which all is
/// acknowledged, which is a round trip away.
const LOOK_FIRST: Duration = Duration::from_micros(20);
const LOOK_LAST: Duration = Duration::from_millis(1);

impl Connection {
    /// Waits until the peer has received everything that was sent, while the connection is alive.
    ///
    /// # Errors
    /// The connection has failed before that was known, or it takes longer than `limit`. The peer may have received
    /// all of it or nothing.
    pub(crate) fn await_received(&self, limit: Duration) -> Result<(), TransportError> {
        let began = Instant::now();
        let mut pause = LOOK_FIRST;
        loop {
            let unreceived_bytes = self.unreceived_bytes()?;
            // Afterwards: a connection that fails discards what its peer has not received, and shows that it failed
            // before it does.
            if let Some(error) = self.socket.take_error().map_err(TransportError::io(WHAT))? {
                return Err(TransportError::io(WHAT)(error));
            }
            if unreceived_bytes == 0 {
                return Ok(());
            }
            if began.elapsed() >= limit {
                return Err(TransportError::Timeout { what: WHAT, after: limit });
            }
            thread::sleep(pause);
            pause = pause.saturating_mul(2).min(LOOK_LAST);
        }
    }

    /// Bytes that the kernel keeps because the peer's host (the peer itself, of a Unix socket) has not got them.
    fn unreceived_bytes(&self) -> Result<u32, TransportError> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the request writes one int, which lives across the call.
        let done = unsafe {
            libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, std::ptr::from_mut(&mut bytes))
        };
        if done < 0 {
            return Err(TransportError::io(WHAT)(std::io::Error::last_os_error()));
        }
        Ok(u32::try_from(bytes).unwrap_or(u32::MAX))
    }
}
