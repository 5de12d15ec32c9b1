// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Leaving a connection within a message, or with bytes under way that may not arrive any more.
//!
//! Owns what can be done for a peer that reads a message up to its announced length and does not notice the end of the
//! connection. Must not be used while another thread sends.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::socket::{Connection, is_tcp, send_now};

/// More than any message of memory has.
const MISSING_BYTES_MAX: u64 = 16 << 20;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Connection {
    /// Completes a message that was sent in part with zeros, as long as the peer takes them by `until`. Returns whether it
    /// takes what is sent next as a new message.
    pub(crate) fn complete_message(&self, until: Instant) -> bool {
        if self.is_between_messages() {
            return true;
        }
        let mut missing = self.missing_bytes.load(Ordering::Relaxed);
        if missing == 0 || missing > MISSING_BYTES_MAX {
            return false;
        }
        while missing > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let len = usize::try_from(missing).unwrap_or(usize::MAX).min(ZEROS.len());
            match send_now(&self.socket, &ZEROS[..len]) {
                Ok(sent) => {
                    missing = missing.saturating_sub(sent as u64);
                    self.missing_bytes.store(missing, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.wait(libc::POLLOUT, Some(left), "completing a message").is_err() {
                        return false;
                    }
                }
                Err(_) => return false,
            }
        }
        self.is_complete();
        true
    }

    /// Has the end of a TCP connection reset it: nothing is sent again from then on, and the peer finds it lost rather than at
    /// its end. What the peer's host has received, its peer still reads. A Unix socket has nothing of the kind: all that was
    /// sent is with the peer, which reads it whenever it goes on, and then finds the end.
    pub(crate) fn reset_when_closed(&self) {
        if is_tcp(&self.socket).unwrap_or(false)
            && let Err(error) = self.socket.set_linger(Some(Duration::ZERO))
        {
            log::debug!("a connection is closed instead of reset: {error}");
        }
    }
}
