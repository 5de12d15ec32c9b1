// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entry point for fuzzing: what a peer sends before and after a TLS handshake.
//!
//! | file | owns |
//! | --- | --- |
//! | `provider` | cryptography without randomness, and records without protection |
//! | `end` | one end of a connection, and what holds for its reader |
//!
//! Owns the way between two ends, a source and a destination, where the input decides what arrives, in which pieces and
//! order. Both are the code of a migration over sockets of this process; nothing waits, and no thread is started.
//!
//! The first byte of an input is its mode. With [`RAW`], two bytes follow with the size of pieces, and then what a peer
//! sends to one end: it has no certificate, and must not get through the handshake. Otherwise steps follow, as [`Way::step`]
//! reads them. Where records are protected, no reader may get anything but what the other end was told to send, in
//! order; and where nothing was tampered with, it has to get all of that.

mod end;
mod provider;
#[cfg(test)]
mod tests;

use rustls::ContentType;

use super::record::EMPTY_RECORDS_MAX;
use end::End;

/// Mode: the bytes of a peer, not steps.
const RAW: u8 = 2;

/// Mode: which end gets the bytes.
const TO_SERVER: u8 = 1;

/// Mode: the cipher suite, from this bit on.
const SUITE_SHIFT: u32 = 2;

/// Most steps of a run.
const STEPS_MAX: usize = 512;

/// Most bytes of data that the ends send in a run.
const SAID_BYTES_MAX: usize = 1 << 20;

/// Most pieces in which bytes arrive.
const PIECES_MAX: usize = 256;

/// Most requests for other keys that are no more than a reader takes in a row, with an answer to one of the peer.
const ASKED_MAX: u32 = EMPTY_RECORDS_MAX - 1;

/// What came of an input; index 0 is the source, and 1 the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TlsRecordsOutcome {
    /// The handshake is complete.
    pub is_secured: [bool; 2],
    /// The handshake has failed.
    pub has_failed: [bool; 2],
    /// Bytes of the peer's data that were read.
    pub heard_bytes: [usize; 2],
    /// Checksum of the records that were sent, and their length.
    pub sent: [(u32, usize); 2],
}

/// What is left of an input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(len.min(self.0.len()));
        self.0 = tail;
        head
    }

    fn byte(&mut self) -> Option<u8> {
        self.bytes(1).first().copied()
    }

    fn length(&mut self) -> Option<usize> {
        let bytes: [u8; 2] = self.bytes(2).try_into().ok()?;
        Some(usize::from(u16::from_be_bytes(bytes)))
    }
}

/// Changes a byte of what is on its way; returns whether there is one, and another now.
fn change<'a>(pieces: impl IntoIterator<Item = &'a mut Vec<u8>>, mut at: usize, with: u8) -> bool {
    for piece in pieces {
        if let Some(byte) = piece.get_mut(at) {
            *byte ^= with;
            return with != 0;
        }
        at = at.saturating_sub(piece.len());
    }
    false
}

/// Both ends, and what is between them.
struct Way {
    ends: [End; 2],
    is_protected: bool,
    /// Nothing was changed, added or left out.
    is_honest: bool,
    /// Requests for other keys by each end.
    asked: [u32; 2],
}

impl Way {
    fn pair(&mut self, to: usize) -> (&mut End, &mut End) {
        let [client, server] = &mut self.ends;
        if to == 0 { (client, server) } else { (server, client) }
    }

    /// Lets up to `len_max` bytes arrive; returns how many did.
    fn deliver(&mut self, to: usize, len_max: usize) -> usize {
        let (to, from) = self.pair(to);
        let mut len = 0;
        while let Some(piece) = from.outgoing.front_mut() {
            let wanted = piece.len().min(len_max - len);
            let given = to.give(&piece[..wanted]);
            len += given;
            piece.drain(..given);
            if piece.is_empty() {
                from.outgoing.pop_front();
            } else {
                break;
            }
        }
        to.go_on();
        len
    }

    fn deliver_in_pieces(&mut self, to: usize, size: usize) {
        let (_, from) = self.pair(to);
        let all: usize = from.outgoing.iter().map(Vec::len).sum();
        let size = size.max(all / PIECES_MAX).max(1);
        while self.deliver(to, size) > 0 {}
    }

    fn read(&mut self, to: usize, how: u8, len: usize) -> usize {
        let is_protected = self.is_protected;
        let (to, from) = self.pair(to);
        to.read(how, len, is_protected.then_some(&from.said))
    }

    /// Takes one step; `None` at the end of the input.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let step = input.byte()?;
        // The end that receives.
        let to = usize::from(step >> 7);
        let from = 1 - to;
        let outgoing = &mut self.ends[from].outgoing;
        let is_same = match step & 0xf {
            0 => {
                self.deliver(to, usize::MAX);
                true
            }
            1 => {
                self.deliver(to, input.length()?);
                true
            }
            2 => {
                self.deliver_in_pieces(to, input.byte()?.into());
                true
            }
            3 => {
                let len = input.byte()?;
                let bytes = input.bytes(len.into());
                outgoing.push_front(bytes.to_vec());
                bytes.is_empty()
            }
            4 => {
                let (at, with) = (input.length()?, input.byte()?);
                !change(outgoing, at, with)
            }
            5 => {
                let record = usize::from(input.byte()?);
                let again = self.ends[from].kept.get(record).cloned();
                let is_same = again.is_none();
                self.ends[from].outgoing.extend(again);
                is_same
            }
            6 if outgoing.len() > 1 => {
                outgoing.swap(0, 1);
                false
            }
            7 => outgoing.pop_front().is_none(),
            8 => {
                let len = input.length()?.min(SAID_BYTES_MAX - self.said_bytes());
                self.ends[from].send(len);
                true
            }
            9 => {
                // A type of 0 would be padding.
                let typ = ContentType::from(input.byte()?.max(1));
                let (len, how) = (input.byte()?, input.byte()?);
                let payload = input.bytes(len.into());
                // Up to more than a record may have.
                let times = if how & 2 == 0 { 1 } else { usize::from(how) };
                if self.said_bytes() + times * payload.len() <= SAID_BYTES_MAX {
                    self.ends[from].seal(typ, &payload.repeat(times), how & 1 != 0);
                }
                false
            }
            10 => {
                self.read(to, input.byte()?, input.length()?);
                true
            }
            11 => {
                self.ends[from].change_keys_after(input.byte()?.into());
                true
            }
            12 => {
                self.ends[from].ask_for_keys();
                self.asked[from] += 1;
                self.asked[from] <= ASKED_MAX
            }
            13 => {
                self.ends[from].close();
                true
            }
            14 => {
                self.ends[to].give_end();
                false
            }
            _ => {
                self.ends[to].go_on();
                true
            }
        };
        self.is_honest &= is_same;
        Some(())
    }

    fn said_bytes(&self) -> usize {
        self.ends.iter().map(|end| end.said.len()).sum()
    }

    /// Lets the rest arrive, reads it, and checks that it was all if nothing was tampered with.
    fn finish(&mut self) {
        loop {
            let mut moved = 0;
            for to in [0, 1] {
                loop {
                    let read = self.read(to, 0, usize::MAX);
                    moved += read;
                    if read == 0 {
                        break;
                    }
                }
                // After that there is room in the socket, also where no record was complete.
                moved += self.deliver(to, usize::MAX);
            }
            if moved == 0 {
                break;
            }
        }
        if self.is_honest {
            for to in [0, 1] {
                let (to, from) = self.pair(to);
                assert!(to.is_secured(), "the handshake does not succeed");
                assert_eq!(to.heard_bytes, from.said.len(), "data is lost");
            }
        }
    }
}

/// Feeds bytes to one end, as from a peer without a certificate.
fn feed(end: &mut End, input: &mut Input<'_>) {
    let Some(size) = input.length() else { return };
    let size = size.max(input.0.len() / PIECES_MAX).max(1);
    while !input.0.is_empty() && !end.is_secured() && !end.has_failed() {
        let mut piece = input.bytes(size);
        while !piece.is_empty() && !end.is_secured() && !end.has_failed() {
            let given = end.give(piece);
            piece = &piece[given..];
            end.go_on();
        }
    }
    assert!(!end.is_secured(), "a peer without a certificate is accepted");
}

/// Runs an input, for fuzzing.
///
/// # Panics
/// When something does not hold that has to whatever a peer sends.
pub fn fuzz_tls_records(data: &[u8]) {
    tls_records_outcome(data);
}

/// Runs an input, and says what came of it.
///
/// # Panics
/// As [`fuzz_tls_records`].
pub fn tls_records_outcome(data: &[u8]) -> TlsRecordsOutcome {
    let mut input = Input(data);
    let Some(mode) = input.byte() else { return TlsRecordsOutcome::default() };
    let suite = usize::from(mode >> SUITE_SHIFT) % provider::SUITES;
    let (client, server) = provider::certificates(suite);
    let ends = [End::client(client), End::server(server)];
    let mut way = Way { ends, is_protected: suite != 0, is_honest: true, asked: [0; 2] };
    if mode & RAW == 0 {
        for _ in 0..STEPS_MAX {
            if way.step(&mut input).is_none() {
                break;
            }
        }
        way.finish();
    } else {
        let end = &mut way.ends[usize::from(mode & TO_SERVER)];
        feed(end, &mut input);
    }
    let ends = way.ends.each_ref();
    let outcome = TlsRecordsOutcome {
        is_secured: ends.map(End::is_secured),
        has_failed: ends.map(End::has_failed),
        heard_bytes: ends.map(|end| end.heard_bytes),
        sent: ends.map(|end| end.digest),
    };
    for to in [0, 1] {
        way.ends[to].give_end();
        while way.read(to, 0, usize::MAX) > 0 {}
        assert!(way.ends[to].is_over(), "an end does not notice that its peer is gone");
    }
    outcome
}
