// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A client on the host that has not named the guest's port yet.
//!
//! Owns the line `CONNECT <port>` as far as it has arrived. What follows the line stays in the socket: it is
//! data for the guest.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;

use crate::syscalls;

/// Maximum length of a line, including its end; the longest valid one has 19 bytes.
const LINE_BYTES_MAX: usize = 32;

/// Result of reading a client's line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeted {
    /// The line is incomplete.
    NotYet,
    /// The requested port.
    Port(u32),
    /// The line is invalid, or the client has gone.
    Nonsense,
}

/// A client that has not sent its line yet.
pub(super) struct Greeting {
    stream: UnixStream,
    line: [u8; LINE_BYTES_MAX],
    len_bytes: usize,
}

impl Greeting {
    /// `stream` must be non-blocking.
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, line: [0; LINE_BYTES_MAX], len_bytes: 0 }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Reads the line as far as it has arrived, and nothing after it.
    pub(super) fn read(&mut self) -> Greeted {
        let room = self.line.get_mut(self.len_bytes..).unwrap_or_default();
        if room.is_empty() {
            return Greeted::Nonsense;
        }
        let seen = match syscalls::peek(&self.stream, room) {
            Ok(0) => return Greeted::Nonsense,
            Ok(seen) => seen,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Greeted::NotYet,
            Err(_) => return Greeted::Nonsense,
        };
        let seen = room.get_mut(..seen).unwrap_or_default();
        let end = seen.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(seen.len(), |end| end + 1);
        // The data was there before, and only this thread reads it.
        if self.stream.read_exact(seen.get_mut(..taken).unwrap_or_default()).is_err() {
            return Greeted::Nonsense;
        }
        self.len_bytes += taken;
        if end.is_none() {
            return Greeted::NotYet;
        }
        let line = self.line.get(..self.len_bytes).unwrap_or_default();
        parse(line).map_or(Greeted::Nonsense, Greeted::Port)
    }
}

/// The port in a line. The keyword is case-insensitive, as in cloud-hypervisor.
fn parse(line: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(line).ok()?;
    let rest = text.strip_prefix("CONNECT ").or_else(|| text.strip_prefix("connect "))?;
    rest.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::io::Write as _;

    use super::*;

    fn pair() -> (Greeting, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Greeting::new(ours), theirs)
    }

    #[test]
    fn a_line_may_come_in_pieces_and_what_follows_stays_in_the_socket() {
        let (mut greeting, mut client) = pair();
        assert_eq!(greeting.read(), Greeted::NotYet);
        for piece in ["CONN", "ECT 52"] {
            client.write_all(piece.as_bytes()).unwrap();
            assert_eq!(greeting.read(), Greeted::NotYet);
        }
        client.write_all(b"00\ndata\n").unwrap();
        assert_eq!(greeting.read(), Greeted::Port(5200));
        let mut rest = [0; 5];
        greeting.into_stream().read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"data\n");
    }

    #[test]
    fn other_lines_are_nonsense() {
        for line in
            ["CONNECT\n", "CONNECT x\n", "CONNECT 4294967296\n", "HELLO 1\n", "\n", "\u{fc} 1\n"]
        {
            let (mut greeting, mut client) = pair();
            client.write_all(line.as_bytes()).unwrap();
            assert_eq!(greeting.read(), Greeted::Nonsense, "{line:?}");
        }
        assert_eq!(parse(b"connect 7\r\n"), Some(7));
        assert_eq!(parse(b"CONNECT 4294967295\n"), Some(u32::MAX));
    }

    #[test]
    fn a_line_without_an_end_is_nonsense_at_last() {
        let (mut greeting, mut client) = pair();
        client.write_all(&[b'1'; 100]).unwrap();
        assert_eq!(greeting.read(), Greeted::NotYet);
        assert_eq!(greeting.read(), Greeted::Nonsense);
        let (mut greeting, client) = pair();
        drop(client);
        assert_eq!(greeting.read(), Greeted::Nonsense);
    }
}
