// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The commit of a migration: which side has the guest. Each phase of each side is a type.
//!
//! | file | owns |
//! | --- | --- |
//! | `source` | from the last message before the acknowledgement to the message that ends all doubt |
//! | `destination` | from the acknowledgement to a guest that runs, is stopped, or is not here |
//! | `clock` | a clock that continues while a host or a process sleeps |
//! | `model` | every interleaving of both sides, a link that fails, and operators (tests) |
//!
//! Owns the decisions, and does no input or output: a phase takes an event and returns the next
//! phase. The threads of both sides hold these values together with the machine and act on them; the
//! explorer of `model` steps through the same values. Nothing else may decide where a guest is.
//!
//! The rules, in one place:
//!
//! - The source hands the guest over by [`source::Acknowledged::commit`], and by nothing else. It
//!   does so only with an acknowledgement that is younger than half of the destination's promise.
//! - From its acknowledgement on, the destination keeps the machine. Only the source's decision ends
//!   that, or an operator's, who needs force for it before the promise has expired.
//! - Having committed or withheld the guest, the source repeats its decision until the destination has
//!   received it or the time limit has expired. A decision can be sent twice and is never revoked.

pub(crate) mod clock;
pub mod destination;
pub(crate) mod source;

#[cfg(all(test, not(loom)))]
mod model;

use std::time::Duration;

pub use clock::now;

/// What the source says of a guest after the connection was lost on which it had offered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It can run the guest no more: the destination has it.
    Committed,
    /// It continues to run the guest: the destination must not run it.
    Withheld,
}

/// How old an acknowledgement may be when the source commits, for a destination that promises to
/// keep the machine for `promise`. The other half is margin: for a thread that is scheduled late
/// between the look at the clock and the commit, and for clocks of different speed.
pub(crate) fn usable(promise: Duration) -> Duration {
    promise / 2
}
