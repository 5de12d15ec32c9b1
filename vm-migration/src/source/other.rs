// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination that is another program and speaks plain version 0: the handover, and the way back.
//!
//! Owns two rules. Its answer to the last message is all that says whether it runs the guest, so that without one nothing
//! is done ([`Stage::InDoubt`]). And until then it holds what only one side may hold, from the state on: it has to drop
//! its machine before the guest can continue here.

use std::time::{Duration, Instant};

use super::handover::Stage;
use super::{Context, check_cancel};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::protocol::message::Message;
use crate::transport::TransportError;

/// How long it may take to drop its machine.
const WITHDRAW_TIME: Duration = Duration::from_secs(10);

/// Sends the state, and has the guest run. Exclusive resources have been released.
pub(super) fn hand_over(
    control: &mut Channel,
    state: Vec<u8>,
    complete: &Message,
    stage: &mut Stage,
    context: Context<'_>,
) -> Result<(), Failure> {
    const STEP: &str = "handing the guest over";
    let limit = context.options.limits.answer;
    control.ask(&Message::State(state), limit).step("sending the guest's state")?;
    check_cancel(context.cancel, STEP)?;
    // A connection that has ended by now carries no answer, and the message has not been sent.
    match control.connection.wait_for_data(Some(Duration::ZERO)) {
        Err(TransportError::Timeout { .. }) => {}
        Ok(()) => {
            let answer = control.answer(limit).step(STEP)?;
            let length = answer.payload.len();
            let what = format!("an answer of {length} bytes to no message");
            let remedy = "see the destination's log";
            return Err(Cause::Unsupported { what, remedy }).step(STEP);
        }
        Err(lost) => return Err(Cause::Transport(lost)).step(STEP),
    }
    // A cancel from here on comes too late.
    let never = Cancel::new().map_err(Cause::Resource).step(STEP)?;
    control.connection.set_cancel(&never);
    *stage = Stage::InDoubt;
    control.ask(complete, limit).step(STEP)?;
    Ok(())
}

/// Has the destination drop its machine, and waits for that: a refusal says that it does, otherwise it is told to. Then its
/// end of the connection closes.
pub(super) fn withdraw(mut peer: Channel, failure: &Failure, context: Context<'_>) {
    let until = Instant::now() + WITHDRAW_TIME;
    let Ok(never) = Cancel::new() else { return };
    peer.connection.set_cancel(&never);
    let limit = WITHDRAW_TIME.min(context.options.limits.answer);
    if failure.peer_listens() && peer.connection.is_between_messages() {
        // Without a reason, for which it has no room.
        match peer.ask(&Message::Abandon(String::new()), limit) {
            Ok(_) => log::info!("the destination has dropped the VM"),
            Err(error) => log::warn!(
                "it is not known whether the destination has dropped the VM: {}",
                error_text::chain(&error)
            ),
        }
    }
    peer.connection.finish_sending(until.saturating_duration_since(Instant::now()));
}
