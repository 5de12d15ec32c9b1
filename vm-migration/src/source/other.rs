// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination that is another program and speaks plain version 0: the handover, and the way back.
//!
//! Owns two rules. Its answer to the last message is all that says whether it runs the guest, so that without one nothing
//! is done ([`Stage::InDoubt`]). And from the state on it holds what only one side may hold: it has to have dropped its machine
//! before the guest can continue here, and if that is not known nothing is done either. It answers before it drops the
//! machine and closes the connection after that, so that an answer *and* the end of the connection are needed. An end by
//! itself tells nothing: it keeps the machine when a connection is lost.

use std::time::{Duration, Instant};

use super::handover::Stage;
use super::{Context, check_cancel};
use crate::cancel::Cancel;
use crate::channel::{Channel, LAST_SEND_TIMEOUT};
use crate::error::{Cause, Failure, Step};
use crate::protocol::message::Message;

/// How long it may take to drop its machine.
const WITHDRAW_TIME: Duration = Duration::from_secs(10);

/// How long messages of memory may take to be completed, on all connections together. The guest runs.
const COMPLETE_TIME: Duration = Duration::from_secs(1);

/// The destination has the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    /// It has answered it.
    pub(super) is_answered: bool,
    /// Until when it may take to answer it.
    pub(super) answers_until: Instant,
}

/// Sends the state, and has the guest run. Exclusive resources have been released.
pub(super) fn hand_over(
    control: &mut Channel,
    state: Vec<u8>,
    complete: &Message,
    stage: &mut Stage,
    context: Context<'_>,
) -> Result<(), Failure> {
    const STEP: &str = "handing the guest over";
    const SENDING: &str = "sending the guest's state";
    let limit = context.options.limits.answer;
    // It uses a state only when it has all of it.
    control.tell(&Message::State(state)).step(SENDING)?;
    let answers_until = Instant::now() + limit;
    *stage = Stage::Given(Given { is_answered: false, answers_until });
    control.answer(limit).step(SENDING)?;
    *stage = Stage::Given(Given { is_answered: true, answers_until });
    let never = Cancel::new().map_err(Cause::Resource).step(STEP)?;
    check_cancel(context.cancel, STEP)?;
    // A cancel from here on comes too late, and must not hide what has come.
    control.connection.set_cancel(&never);
    // A connection that has ended by now carries no answer, and the message has not been sent.
    if control.has_data().map_err(Cause::Resource).step(STEP)? {
        let answer = control.answer(limit).step(STEP)?;
        let what = format!("an answer of {} bytes to no message", answer.payload.len());
        return Err(Cause::Unsupported { what, remedy: "see the destination's log" }).step(STEP);
    }
    *stage = Stage::InDoubt;
    control.ask(complete, limit).step(STEP)?;
    Ok(())
}

/// Has a destination that has the state drop its machine, and waits for that. Returns whether it does, or has: it has refused,
/// or has been told to and has then closed the connection.
pub(super) fn withdraw(
    mut peer: Channel,
    given: Given,
    failure: &Failure,
    context: Context<'_>,
) -> bool {
    // It is told to drop its machine, and does so, when it has taken the state.
    let begins = if given.is_answered { Instant::now() } else { given.answers_until };
    let until = begins.max(Instant::now()) + WITHDRAW_TIME.min(context.options.limits.answer);
    let left = || until.saturating_duration_since(Instant::now());
    let is_refused = matches!(failure.cause, Cause::Refused(_));
    let Ok(never) = Cancel::new() else { return is_refused };
    peer.connection.set_cancel(&never);
    if is_refused {
        // It drops its machine then, and its locks are free once it has closed the connection.
        peer.connection.finish_sending(left());
        return true;
    }
    match told(&mut peer, given, &left) {
        Ok(()) if peer.connection.finish_sending(left()) => {
            log::info!("the destination has dropped the VM");
            true
        }
        Err(Cause::Refused(_)) => {
            peer.connection.finish_sending(left());
            true
        }
        ended => {
            let why = match ended {
                Ok(()) => "it has not closed the connection".to_owned(),
                Err(cause) => error_text::chain(&cause),
            };
            log::error!("it is not known whether the destination has dropped the VM: {why}");
            false
        }
    }
}

/// Tells the destination to drop its machine; it has read that when its answer has come.
fn told(peer: &mut Channel, given: Given, left: &dyn Fn() -> Duration) -> Result<(), Cause> {
    peer.connection.set_stall_timeout(LAST_SEND_TIMEOUT);
    // Without a reason, for which it has no room.
    peer.tell(&Message::Abandon(String::new()))?;
    peer.connection.shut_down_sending();
    if !given.is_answered {
        peer.answer(left())?;
    }
    peer.answer(left())?;
    Ok(())
}

/// Leaves a destination that does not have the state, and so holds nothing that only one side may hold. Within a message of
/// memory it does not notice the end of the connection, and would wait for the rest: the message is completed with
/// zeros, as its machine is dropped anyway. Where that is not possible, a TCP connection is reset, which it notices.
pub(super) fn leave(control: &Channel, further: Vec<Channel>, failure: &Failure) {
    let until = Instant::now() + COMPLETE_TIME;
    let never = Cancel::new();
    for channel in further.iter().chain(std::iter::once(control)) {
        let is_complete = never.as_ref().is_ok_and(|never| {
            channel.connection.set_cancel(never);
            channel.connection.complete_message(until)
        });
        if !is_complete {
            channel.connection.reset_when_closed();
        }
    }
    drop(further);
    if failure.peer_listens() && control.connection.is_between_messages() {
        control.abandon("");
    }
}
