// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rate of the link in a check: bytes that the destination acknowledges and discards.
//!
//! Owns how many there are, and for how long. Must never send what the guest has.

use std::time::{Duration, Instant};

use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::figures::rate;
use crate::protocol::check::CHECK_TRANSFER_BYTES_MAX;
use crate::protocol::message::Message;

/// How long bytes are sent.
const TIME_MAX: Duration = Duration::from_millis(500);

/// Bytes of one message: at the lowest rate that is allowed for messages it takes a second.
const MESSAGE_BYTES: usize = 64 << 10;

/// Most bytes that are not acknowledged: what a link of 2.5 Gbit/s with a round trip of 50 ms holds.
const WINDOW_BYTES: u64 = 16 << 20;

/// Sends bytes for a while, and returns how many a second are acknowledged.
pub(super) fn measure(control: &mut Channel, limit: Duration) -> Result<u64, Failure> {
    const STEP: &str = "measuring the link";
    let message = Message::CheckBytes(filling(MESSAGE_BYTES));
    let message_bytes = MESSAGE_BYTES as u64;
    let (mut sent, mut taken) = (0, 0);
    let began = Instant::now();
    let mut took = Duration::ZERO;
    loop {
        let is_time_left = began.elapsed() < TIME_MAX;
        if is_time_left && sent < CHECK_TRANSFER_BYTES_MAX && sent - taken < WINDOW_BYTES {
            control.tell(&message).step(STEP)?;
            sent += message_bytes;
            if !control.has_data().map_err(Cause::Resource).step(STEP)? {
                continue;
            }
        }
        // What is on the way when the time is over does not count, but for the first message.
        if taken == sent || taken > 0 && !is_time_left {
            return Ok(rate(taken, took));
        }
        control.answer(limit).step(STEP)?;
        taken += message_bytes;
        took = began.elapsed();
    }
}

/// Bytes that no compression on the way makes fewer.
fn filling(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[7]
    };
    std::iter::repeat_with(next).take(len).collect()
}
