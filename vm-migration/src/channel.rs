// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A connection that carries messages: requests, answers, and the reason when one is refused.
//!
//! Owns the pairing of messages with answers. It does not know which message is due.

use std::os::fd::BorrowedFd;
use std::panic::resume_unwind;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::cancel::Cancel;
use crate::error::Cause;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::read_written;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::codec::{HEADER_BYTES, Header, REASON_BYTES_MAX};
use crate::protocol::message::{Answer, Command, Message, Role};
use crate::session::ALIVE_EVERY;
use crate::transport::{Connection, Reader, TransportError};

/// What is shown of a refusal without a reason, as peers of version 0 send it.
pub(crate) const NO_REASON: &str = "it gave no reason, see its log";

/// How long, in total, a refusal that explains a failed send is looked for: the guest may be stopped
/// meanwhile.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the last message to a stalled peer may block behind data that it does not read.
pub(crate) const LAST_SEND_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a peer that is still sending has to receive the last message.
const LAST_WORDS_DRAIN: Duration = Duration::from_secs(1);

/// A connection and its buffered reader.
#[derive(Debug)]
pub(crate) struct Channel {
    pub connection: Arc<Connection>,
    pub reader: Reader,
    /// The peer speaks plain version 0.
    is_plain: bool,
}

/// The payload of a positive answer.
#[derive(Debug)]
pub(crate) struct PositiveAnswer {
    pub offer_taken: bool,
    pub payload: Vec<u8>,
}

impl Channel {
    pub(crate) fn new(connection: Connection) -> Self {
        let connection = Arc::new(connection);
        let reader = Reader::new(Arc::clone(&connection));
        Self { connection, reader, is_plain: false }
    }

    /// Speaks plain version 0 from here on: the peer reads no payload of an answer, so refusals are without a reason.
    pub(crate) fn speak_plain(&mut self) {
        self.is_plain = true;
    }

    /// Reads a message of the first connection.
    ///
    /// # Errors
    /// The connection has failed, or the message is malformed.
    pub(crate) fn read_message(&mut self) -> Result<Message, ProtocolError> {
        if self.is_plain { self.timed(Message::read_plain) } else { self.timed(Message::read) }
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

    /// Sends the role of an extra connection. With a token (negotiated protocol) the destination
    /// confirms it.
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

    /// True when there is data to read now, or the connection has ended.
    pub(crate) fn has_data(&self) -> std::io::Result<bool> {
        Ok(self.reader.has_buffered() || self.connection.has_data_now()?)
    }

    /// The connection alone, if nothing else refers to it.
    pub(crate) fn into_connection(self) -> Option<Connection> {
        let Self { connection, reader, .. } = self;
        drop(reader);
        Arc::into_inner(connection)
    }

    /// Reads one message, or the contents that follow one, within a total time, however slowly the bytes
    /// come.
    pub(crate) fn timed<T>(&mut self, read: impl FnOnce(&mut Reader) -> T) -> T {
        self.connection.time_message(true);
        let done = read(&mut self.reader);
        self.connection.time_message(false);
        done
    }

    /// Does `work` and meanwhile sends a keep-alive once a second; `told` says that the peer expects
    /// those. Nothing else may send on this channel.
    pub(crate) fn busy<T>(&self, told: bool, work: impl FnOnce() -> T) -> T {
        if told { self.telling(work).0 } else { work() }
    }

    /// The same for a peer that answers each of them, within `timeout` once the work is done.
    pub(crate) fn busy_asking<T>(
        &mut self,
        timeout: Duration,
        work: impl FnOnce() -> T,
    ) -> Result<T, Cause> {
        let (done, told) = self.telling(work);
        for _ in 0..told {
            self.answer(timeout)?;
        }
        Ok(done)
    }

    /// Does `work` and sends keep-alives; also returns how many.
    fn telling<T>(&self, work: impl FnOnce() -> T) -> (T, u32) {
        let (working, ended) = mpsc::channel::<()>();
        let connection = &self.connection;
        let tell = move || {
            let mut told = 0;
            while ended.recv_timeout(ALIVE_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                if connection.send(&Message::Alive.encode()).is_err() {
                    break;
                }
                told += 1;
            }
            told
        };
        std::thread::scope(|scope| {
            let teller = stoppable_thread::spawn_scoped(scope, "mig-alive", tell);
            let teller = teller.inspect_err(|error| {
                log::warn!("no keep-alive messages are sent to the peer: {error}");
            });
            let done = work();
            drop(working);
            let told =
                teller.map_or(0, |teller| teller.join().unwrap_or_else(|p| resume_unwind(p)));
            (done, told)
        })
    }

    /// Like [`answer`](Self::answer), for a peer that sends keep-alives while it works: each of them
    /// restarts the timeout.
    pub(crate) fn answer_of_busy(&mut self, timeout: Duration) -> Result<PositiveAnswer, Cause> {
        self.answer_of_busy_while(timeout, || Ok(()))
    }

    /// The same, as long as `may_wait` says so, which is asked whenever a keep-alive has come.
    pub(crate) fn answer_of_busy_while(
        &mut self,
        timeout: Duration,
        mut may_wait: impl FnMut() -> Result<(), Cause>,
    ) -> Result<PositiveAnswer, Cause> {
        loop {
            if !self.reader.has_buffered() {
                self.connection.wait_for_data(Some(timeout))?;
            }
            let header = self.timed(Header::read)?;
            if header.code == Command::Alive.code() && header.len_bytes == 0 {
                may_wait()?;
                continue;
            }
            return match self.timed(|reader| Answer::read_behind(&header, reader))? {
                Answer::Ok { offer_taken, payload } => Ok(PositiveAnswer { offer_taken, payload }),
                Answer::Error { reason } => Err(refused(reason)),
            };
        }
    }

    /// Reads what a destination says while it takes parts of the state: how much of each is written, or `None`, which is the
    /// answer to the oldest unanswered message.
    pub(crate) fn hear_of_blobs(&mut self) -> Result<Option<Vec<u64>>, Cause> {
        let header = self.timed(Header::read)?;
        if header.code == Command::BlobsWritten.code() {
            return Ok(Some(self.timed(|reader| read_written(reader, header))?));
        }
        match self.timed(|reader| Answer::read_behind(&header, reader))? {
            Answer::Ok { .. } => Ok(None),
            Answer::Error { reason } => Err(refused(reason)),
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

    /// Sends a message whose answer is read later.
    pub(crate) fn tell(&mut self, message: &Message) -> Result<(), Cause> {
        let sent = self.connection.send(&message.encode());
        sent.map_err(|error| self.explain(error))
    }

    /// Sends a message with a file descriptor; its answer is read later. The header is sent by itself
    /// first, because version 0 peers read it before they look for a descriptor.
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

    /// Waits for the answer to the oldest unanswered message.
    pub(crate) fn answer(&mut self, timeout: Duration) -> Result<PositiveAnswer, Cause> {
        if !self.reader.has_buffered() {
            self.connection.wait_for_data(Some(timeout))?;
        }
        match self.timed(Answer::read)? {
            Answer::Ok { offer_taken, payload } => Ok(PositiveAnswer { offer_taken, payload }),
            Answer::Error { reason } => Err(refused(reason)),
        }
    }

    /// The cause of a failed send: the refusal that the peer sent before it closed, or else the
    /// transport error. The connection cannot be used afterwards.
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

    /// The next answer, if it comes before the deadline and is no longer than a reason.
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
        if header.code == Command::BlobsWritten.code() {
            // Of before the failure, as an earlier answer.
            return self.timed(|reader| read_written(reader, header)).ok().map(|_| Answer::ok());
        }
        self.timed(|reader| Answer::read_behind(&header, reader)).ok()
    }

    /// Sends a positive answer.
    pub(crate) fn yes(&self) -> Result<(), TransportError> {
        self.connection.send(&Answer::ok().encode())
    }

    /// Sends a refusal if the connection still takes it, and ends the connection.
    pub(crate) fn refuse(&self, reason: &str) {
        // Writing to a cancelled connection fails, so this refusal gets a cancel handle that is never
        // used.
        if let Ok(never) = Cancel::new() {
            self.connection.set_cancel(&never);
            self.connection.set_stall_timeout(LAST_SEND_TIMEOUT);
            let reason = if self.is_plain { "" } else { reason };
            let answer = Answer::Error { reason: reason.to_string() };
            if self.connection.send(&answer.encode()).is_ok() {
                self.connection.finish_sending(LAST_WORDS_DRAIN);
            }
        }
    }

    /// Tells the peer that this side ends the migration, if the connection still takes it, and ends the
    /// connection.
    pub(crate) fn abandon(&self, reason: &str) {
        if !self.connection.is_between_messages() {
            // The peer would take the message for memory contents; it finds the connection lost instead.
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
        return Cause::Refused(NO_REASON.to_string());
    }
    Cause::Refused(reason)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Far longer than a last message may take, and the longest that a peer keeps sending.
    const LONG: Duration = Duration::from_secs(20);

    /// Explains a failed send to a peer that sends `first` and then `more` again and again. Returns the
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
        // More than the socket buffers hold, so only a part is sent.
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
        // The channel still exists, and its peer waits for nothing more.
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
