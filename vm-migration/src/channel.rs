// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A connection that carries messages: requests, answers, and the reason when one is refused.
//!
//! Owns the pairing of messages with answers. It does not know which message is due.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::cancel::Cancel;
use crate::error::Cause;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::codec::{HEADER_BYTES, Header, REASON_BYTES_MAX};
use crate::protocol::message::{Answer, Command, Message, Role};
use crate::session::ALIVE_EVERY;
use crate::transport::{Connection, Reader, TransportError};

/// After a failed send, how long to look for the refusal that explains it, in all: the guest may
/// stand still meanwhile.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(1);

/// How long last words may be stuck behind what a stalled peer does not read.
const LAST_SEND_TIMEOUT: Duration = Duration::from_millis(500);

/// How long last words may take to reach a peer that still sends.
const LAST_WORDS_DRAIN: Duration = Duration::from_secs(1);

/// A connection and its reading end.
#[derive(Debug)]
pub(crate) struct Channel {
    pub connection: Arc<Connection>,
    pub reader: Reader,
}

/// A positive answer.
#[derive(Debug)]
pub(crate) struct PositiveAnswer {
    pub offer_taken: bool,
    pub payload: Vec<u8>,
}

impl Channel {
    pub(crate) fn new(connection: Connection) -> Self {
        let connection = Arc::new(connection);
        let reader = Reader::new(Arc::clone(&connection));
        Self { connection, reader }
    }

    /// Opens an extra connection.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn open_extra(
        to: &crate::transport::Address,
        role: Role,
        token: Option<&[u8; TOKEN_BYTES]>,
        cancel: &Cancel,
        limits: &crate::options::Limits,
    ) -> Result<Self, Cause> {
        let connection = Connection::connect(to, cancel, limits.connect, limits.answer)?;
        Self::introduce(connection, role, token, limits.answer)
    }

    /// Says what an extra connection is for. With a token (negotiated) the destination confirms it.
    pub(crate) fn introduce(
        connection: Connection,
        role: Role,
        token: Option<&[u8; TOKEN_BYTES]>,
        answer_limit: Duration,
    ) -> Result<Self, Cause> {
        let mut channel = Self::new(connection);
        let mut hello = role.code().to_le_bytes().to_vec();
        hello.extend_from_slice(token.map_or(&[], |token| token.as_slice()));
        channel.connection.send(&hello)?;
        if token.is_some() {
            channel.answer(answer_limit)?;
        }
        Ok(channel)
    }

    /// True when there is something to read now, or the connection has ended.
    pub(crate) fn has_data(&self) -> std::io::Result<bool> {
        Ok(self.reader.has_buffered() || self.connection.has_data_now()?)
    }

    /// The connection alone, if nothing else uses it.
    pub(crate) fn into_connection(self) -> Option<Connection> {
        let Self { connection, reader } = self;
        drop(reader);
        Arc::into_inner(connection)
    }

    /// Reads what is one message, or the contents that follow one: in a total time, however it trickles.
    pub(crate) fn timed<T>(&mut self, read: impl FnOnce(&mut Reader) -> T) -> T {
        self.connection.time_message(true);
        let done = read(&mut self.reader);
        self.connection.time_message(false);
        done
    }

    /// Does `work` and meanwhile tells a peer that waits for the outcome, once a second, that this
    /// side is there; `told` says that the peer expects it. Nothing else may send on this channel.
    pub(crate) fn busy<T>(&self, told: bool, work: impl FnOnce() -> T) -> T {
        if !told {
            return work();
        }
        let (working, ended) = mpsc::channel::<()>();
        let connection = &self.connection;
        let tell = move || {
            while ended.recv_timeout(ALIVE_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                if connection.send(&Message::Alive.encode()).is_err() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            if let Err(error) = stoppable_thread::spawn_scoped(scope, "mig-alive", tell) {
                log::warn!("the peer does not hear from this side while it works: {error}");
            }
            let done = work();
            drop(working);
            done
        })
    }

    /// As [`answer`](Self::answer), of a peer that says that it is there while it works on it: as long
    /// as it does, the time begins anew.
    pub(crate) fn answer_of_busy(&mut self, timeout: Duration) -> Result<PositiveAnswer, Cause> {
        loop {
            if !self.reader.has_buffered() {
                self.connection.wait_for_data(Some(timeout))?;
            }
            let header = self.timed(Header::read)?;
            if header.code == Command::Alive.code() && header.len_bytes == 0 {
                continue;
            }
            return match self.timed(|reader| Answer::read_behind(&header, reader))? {
                Answer::Ok { offer_taken, payload } => Ok(PositiveAnswer { offer_taken, payload }),
                Answer::Error { reason } => Err(refused(reason)),
            };
        }
    }

    /// Sends a message and waits for its answer.
    pub(crate) fn ask(
        &mut self,
        message: &Message,
        timeout: Duration,
    ) -> Result<PositiveAnswer, Cause> {
        self.tell(message)?;
        self.answer(timeout)
    }

    /// Sends a message, the answer to which is read later.
    pub(crate) fn tell(&mut self, message: &Message) -> Result<(), Cause> {
        let sent = self.connection.send(&message.encode());
        sent.map_err(|error| self.explain(error))
    }

    /// Sends a message with a descriptor, the answer to which is read later. The header goes first
    /// and by itself: version 0 peers read it before they look for a descriptor.
    pub(crate) fn give(
        &mut self,
        message: &Message,
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), Cause> {
        let bytes = message.encode();
        let (header, payload) = bytes.split_at(HEADER_BYTES);
        let sent = self
            .connection
            .send(header)
            .and_then(|()| self.connection.send_with_descriptor(payload, descriptor))
            .inspect_err(|_| self.connection.cut_short());
        sent.map_err(|error| self.explain(error))
    }

    /// Waits for the answer to the oldest message that has none.
    pub(crate) fn answer(&mut self, timeout: Duration) -> Result<PositiveAnswer, Cause> {
        if !self.reader.has_buffered() {
            self.connection.wait_for_data(Some(timeout))?;
        }
        match self.timed(Answer::read)? {
            Answer::Ok { offer_taken, payload } => Ok(PositiveAnswer { offer_taken, payload }),
            Answer::Error { reason } => Err(refused(reason)),
        }
    }

    /// Why the peer stopped listening, when it said so before it did. The connection is of no further
    /// use.
    pub(crate) fn explain(&mut self, error: TransportError) -> Cause {
        if matches!(error, TransportError::Cancelled) {
            return error.into();
        }
        let deadline = Instant::now() + LAST_WORDS_TIMEOUT;
        loop {
            // An answer to an earlier message comes first.
            match self.last_word(deadline) {
                Some(Answer::Ok { .. }) => {}
                Some(Answer::Error { reason }) => return refused(reason),
                None => return error.into(),
            }
        }
    }

    /// The next answer, if it comes in time and is no longer than a reason.
    fn last_word(&mut self, deadline: Instant) -> Option<Answer> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        self.connection.set_stall_timeout(left);
        let header = self.timed(Header::read).ok()?;
        if header.len_bytes > REASON_BYTES_MAX {
            return None;
        }
        self.timed(|reader| Answer::read_behind(&header, reader)).ok()
    }

    /// Answers yes.
    pub(crate) fn yes(&self) -> Result<(), TransportError> {
        self.connection.send(&Answer::ok().encode())
    }

    /// Answers no, as best one can, and ends the connection.
    pub(crate) fn refuse(&self, reason: &str) {
        // A cancelled connection could not be written to; these last words are not cancelled.
        if let Ok(never) = Cancel::new() {
            self.connection.set_cancel(&never);
            self.connection.set_stall_timeout(LAST_SEND_TIMEOUT);
            let answer = Answer::Error { reason: reason.to_string() };
            if self.connection.send(&answer.encode()).is_ok() {
                self.connection.finish_sending(LAST_WORDS_DRAIN);
            }
        }
    }

    /// Tells the peer that this side gives up, as best one can, and ends the connection.
    pub(crate) fn abandon(&self, reason: &str) {
        if !self.connection.is_between_messages() {
            // It would be taken for contents of memory. The peer finds the connection lost.
            self.connection.shut_down();
            return;
        }
        if let Ok(never) = Cancel::new() {
            self.connection.set_cancel(&never);
            self.connection.set_stall_timeout(LAST_SEND_TIMEOUT);
            if self.connection.send(&Message::Abandon(reason.to_string()).encode()).is_ok() {
                self.connection.finish_sending(LAST_WORDS_DRAIN);
            } else {
                self.connection.shut_down();
            }
        }
    }
}

fn refused(reason: String) -> Cause {
    if reason.is_empty() {
        return Cause::Refused("it gave no reason, see its log".to_string());
    }
    Cause::Refused(reason)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Far longer than last words may take, and how long a peer keeps sending at most.
    const LONG: Duration = Duration::from_secs(20);

    /// Explains a failed send to a peer that says `first` and then `more` again and again. Gives the
    /// cause and how long that took.
    fn explain(first: &[u8], more: &[u8], pause: Duration) -> (Cause, Duration) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let never = Cancel::new().unwrap();
        let mut channel = Channel::new(Connection::over(ours, &never, LONG).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let began = Instant::now();
                let mut sent = theirs.write_all(first);
                while sent.is_ok() && began.elapsed() < LONG {
                    sent = theirs.write_all(more);
                    std::thread::sleep(pause);
                }
            });
            let began = Instant::now();
            let cause = channel.explain(TransportError::Closed);
            let took = began.elapsed();
            channel.connection.shut_down();
            (cause, took)
        })
    }

    #[test]
    fn last_words_are_not_written_into_a_message() {
        use std::io::Read as _;
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let cancelled = Cancel::new().unwrap();
        let channel = Channel::new(Connection::over(ours, &cancelled, LONG).unwrap());
        channel.connection.send(&Message::Alive.encode()).unwrap();
        assert!(channel.connection.is_between_messages());
        cancelled.cancel();
        // More than fits on the way, so part of it goes.
        let sent = channel.connection.send(&vec![7; 64 << 20]);
        assert!(matches!(sent, Err(TransportError::Cancelled)), "{sent:?}");
        let reader = std::thread::spawn(move || {
            let mut heard = Vec::new();
            theirs.read_to_end(&mut heard).unwrap();
            heard
        });
        channel.abandon("a cancel has come");
        drop(channel);
        let heard = reader.join().unwrap();
        let contents = &heard[Message::Alive.encode().len()..];
        assert!(!contents.is_empty() && contents.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_connection_on_which_no_last_words_fit_ends() {
        use std::io::Read as _;
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let never = Cancel::new().unwrap();
        let stall = Duration::from_millis(50);
        let channel = Channel::new(Connection::over(ours, &never, stall).unwrap());
        let alive = Message::Alive.encode();
        while channel.connection.send(&alive).is_ok() {}
        assert!(channel.connection.is_between_messages());
        channel.abandon("a cancel has come");
        // The channel is there still, and its peer waits for nothing more.
        theirs.set_read_timeout(Some(LONG)).unwrap();
        theirs.read_to_end(&mut Vec::new()).unwrap();
        assert!(channel.connection.send(&alive).is_err());
    }

    #[test]
    fn last_words_have_a_total_time_however_they_come() {
        let said_yes = Answer::ok().encode();
        let drip = Duration::from_millis(5);
        let endless = Header::new(2, REASON_BYTES_MAX).encode();
        for (first, more) in [(&[][..], &said_yes[..]), (&endless, b"x")] {
            let (cause, took) = explain(first, more, drip);
            assert!(took < LONG / 2, "{took:?} for {first:?} and {more:?}");
            assert!(matches!(cause, Cause::Transport(TransportError::Closed)), "{cause:?}");
        }
    }

    #[test]
    fn last_words_behind_earlier_answers_are_heard() {
        let reason = "it is full".to_string();
        let refusal = Answer::Error { reason: reason.clone() }.encode();
        let first = [Answer::ok().encode(), Answer::ok().encode(), refusal].concat();
        let (cause, _) = explain(&first, &[0], Duration::from_millis(5));
        assert!(matches!(&cause, Cause::Refused(why) if *why == reason), "{cause:?}");
    }
}
