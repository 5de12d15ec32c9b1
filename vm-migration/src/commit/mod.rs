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

/// Which side has the guest, as the source reports it after the connection was lost on which it had
/// offered the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The source cannot run the guest any more: the destination has it.
    Committed,
    /// The source continues to run the guest: the destination must not run it.
    Withheld,
}

/// The greatest age of an acknowledgement with which the source may commit, if the destination keeps
/// the machine for `promise`. The other half is margin for a thread that is scheduled late between
/// reading the clock and the commit, and for clocks of different speed.
pub(crate) fn usable(promise: Duration) -> Duration {
    promise / 2
}
