// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tells the destination which side has the guest, after the connection was lost around the handover.
//!
//! Owns the attempts, which begin soon and continue at growing intervals until the destination has acknowledged
//! the decision, no longer exists, or the time limit has expired. The decision was made before and never changes.
//! (A postcopy that has committed tells it by reconnecting: [`super::serve`].)

use std::io;
use std::time::{Duration, Instant};

use super::Context;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::commit::Verdict;
use crate::commit::source::{Unconfirmed, Withheld};
use crate::error::{Cause, Failure, Step};
use crate::options::Limits;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::Message;
use crate::steering::{self, LOOK_EVERY, Steering};
use crate::transport::{Address, ClientTls, Connection, TransportError};

/// Pause before the first attempt: the destination may not have noticed the loss yet.
const PAUSE_FIRST: Duration = Duration::from_millis(50);

/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Number of consecutive refused connections after which the destination is not in doubt: one in doubt listens. The
/// pauses between them begin anew, so that they take a second and a half, whatever the pauses before.
const REFUSED_MAX: u32 = 5;

const STEP: &str = "telling the destination which side has the guest";

/// Reports a verdict to the destination, and for how long it tries.
#[derive(Clone, Debug)]
pub(crate) struct VerdictSender {
    to: Address,
    tls: Option<ClientTls>,
    id: [u8; TOKEN_BYTES],
    limits: Limits,
    timeout: Duration,
    steering: Steering,
}

/// A guest that continues at the source, while the destination may be in doubt.
#[derive(Debug)]
pub(crate) struct Retraction {
    pub withheld: Withheld,
    pub teller: VerdictSender,
}

impl Retraction {
    /// Reports the verdict from a thread of its own: the guest runs already and does not wait for it.
    pub(crate) fn send_in_background(self) {
        let Self { withheld, teller } = self;
        let body = move || {
            let never = match Cancel::new() {
                Ok(never) => never,
                Err(error) => {
                    return log::warn!(
                        "the destination is not told which side has the guest: {error}"
                    );
                }
            };
            match teller.tell(withheld.says(), HandoverAnswer(None), &never) {
                Ok(()) => log::info!("the destination knows that the guest is here"),
                Err(failure) => log::info!(
                    "the destination is not told which side has the guest: {}",
                    failure.for_peer()
                ),
            }
        };
        if let Err(error) = stoppable_thread::spawn("mig-verdict", body) {
            log::warn!("the destination is not told that the guest is here: {error}");
        }
    }
}

/// The connection of the handover, on which the answer to the last message may arrive late: the destination
/// sends it as soon as its guest runs, and then stops listening.
struct HandoverAnswer(Option<Channel>);

impl HandoverAnswer {
    /// The answer, if it has arrived.
    fn answer(&mut self) -> Option<Result<(), Cause>> {
        let control = self.0.as_mut()?;
        if !control.reader.has_buffered() {
            match control.connection.wait_for_data(Some(Duration::ZERO)) {
                Ok(()) => {}
                Err(TransportError::Timeout { .. }) => return None,
                Err(_) => {
                    self.0 = None;
                    return None;
                }
            }
        }
        match control.answer(LOOK_EVERY) {
            Ok(answer) => {
                note_standing(&answer.payload);
                Some(Ok(()))
            }
            Err(refused @ Cause::Refused(_)) => Some(Err(refused)),
            Err(_) => {
                self.0 = None;
                None
            }
        }
    }
}

/// Logs the note of a destination that has not started its guest.
pub(super) fn note_standing(said: &[u8]) {
    if !said.is_empty() {
        let why = String::from_utf8_lossy(said);
        log::warn!("the guest is at the destination and was not started there: {why}");
    }
}

/// Outcome of an attempt.
enum Attempt {
    /// The destination has received the verdict.
    Heard,
    /// The destination answered that it is not in doubt about this migration, or with a failure.
    Answered(Cause),
    /// Nothing listens at the address.
    NotThere(Cause),
    /// The address could not be reached.
    Unreachable(Cause),
}

impl VerdictSender {
    /// A sender for the migration with the token `id`.
    pub(crate) fn new(context: Context<'_>, id: [u8; TOKEN_BYTES]) -> Self {
        let options = context.options;
        Self {
            to: options.to.clone(),
            tls: options.tls.clone(),
            id,
            limits: options.limits,
            timeout: options.recover_timeout,
            steering: options.steering.clone(),
        }
    }

    /// Confirms to a destination that may not know it that it owns the guest, and waits until it runs the
    /// guest.
    ///
    /// # Errors
    /// When the destination could not be reached or refused; it owns the guest in either case.
    pub(crate) fn confirm(
        self,
        unconfirmed: Unconfirmed,
        control: Channel,
        context: Context<'_>,
    ) -> Result<(), Failure> {
        let never = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        let told = self.tell(unconfirmed.says(), HandoverAnswer(Some(control)), &never);
        if let Err(failure) = &told {
            context.progress.cannot_recover(failure.for_peer());
        }
        told
    }

    fn tell(
        self,
        verdict: Verdict,
        mut late: HandoverAnswer,
        never: &Cancel,
    ) -> Result<(), Failure> {
        let told = self.send_again(verdict, &mut late, never);
        match told {
            // The answer may have arrived meanwhile, which explains why nothing listens any more.
            Err(failure) => late.answer().unwrap_or(Err(failure.cause)).step(STEP),
            Ok(()) => Ok(()),
        }
    }

    fn send_again(
        mut self,
        verdict: Verdict,
        late: &mut HandoverAnswer,
        never: &Cancel,
    ) -> Result<(), Failure> {
        let since = Instant::now();
        let (mut pause, mut refused) = (PAUSE_FIRST, 0);
        let mut last = Cause::Transport(TransportError::Closed);
        while self.wait(since, pause)? {
            pause = (pause * 2).min(PAUSE_MAX);
            if let Some(answer) = late.answer() {
                return answer.step(STEP);
            }
            last = match self.attempt(verdict, never) {
                Attempt::Heard => return Ok(()),
                Attempt::Answered(cause) => return Err(cause).step(STEP),
                Attempt::NotThere(cause) => {
                    if refused == 0 {
                        pause = 2 * PAUSE_FIRST;
                    }
                    refused += 1;
                    if refused == REFUSED_MAX {
                        return Err(cause).step(STEP);
                    }
                    cause
                }
                Attempt::Unreachable(cause) => {
                    refused = 0;
                    cause
                }
            };
            log::debug!("the destination could not be told yet: {}", error_text::chain(&last));
        }
        Err(last).step(STEP)
    }

    /// Waits until the next attempt is due; false when the time is over.
    fn wait(&mut self, since: Instant, pause: Duration) -> Result<bool, Failure> {
        let next = Instant::now() + pause;
        loop {
            if self.steering.is_abandoned() {
                return Err(Cause::Cancelled).step(STEP);
            }
            match self.steering.take_recover() {
                Some(steering::Recover::At(address)) => {
                    self.to = address;
                    return Ok(true);
                }
                Some(steering::Recover::There) => return Ok(true),
                None => {}
            }
            if since.elapsed() >= self.timeout {
                return Ok(false);
            }
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(true);
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
    }

    fn attempt(&self, verdict: Verdict, never: &Cancel) -> Attempt {
        let limits = &self.limits;
        let connected = Connection::connect_secured(
            &self.to,
            self.tls.as_ref(),
            never,
            limits.connect,
            limits.answer,
        );
        let connection = match connected {
            Ok(connection) => connection,
            Err(error) if nothing_listens(&error) => return Attempt::NotThere(error.into()),
            Err(error) => return Attempt::Unreachable(error.into()),
        };
        let mut channel = Channel::new(connection);
        // The answer comes when the guest runs at the destination, so it may take a while.
        match channel.ask(&Message::Verdict { id: self.id, verdict }, limits.answer) {
            Ok(_) => Attempt::Heard,
            Err(cause @ Cause::Refused(_)) => Attempt::Answered(cause),
            Err(cause) => Attempt::Unreachable(cause),
        }
    }
}

fn nothing_listens(error: &TransportError) -> bool {
    let TransportError::Connect { source, .. } = error else { return false };
    matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_destination_that_is_gone_is_given_up_soon_however_long_it_was_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        let sender = VerdictSender {
            to,
            tls: None,
            id: [5; TOKEN_BYTES],
            limits: Limits::default(),
            timeout: Duration::from_mins(5),
            steering: Steering::default(),
        };
        // By then it pauses for more than a second.
        let host = std::thread::spawn(move || {
            for _ in 0..5 {
                drop(listener.accept().unwrap());
            }
            drop(listener);
            Instant::now()
        });
        let never = Cancel::new().unwrap();
        let told = sender.send_again(Verdict::Withheld, &mut HandoverAnswer(None), &never);
        let took = host.join().unwrap().elapsed();
        let cause = told.unwrap_err().cause;
        assert!(matches!(&cause, Cause::Transport(error) if nothing_listens(error)), "{cause}");
        // The pause that had begun, of 1.6 s, and those of the attempts.
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}
