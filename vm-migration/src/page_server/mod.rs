// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page server: a second process that sends the last pages of a postcopy, so that the source can exit.
//!
//! | file | owns |
//! | --- | --- |
//! | `takeover` | the documents that the page server gets: the memory, and how to continue |
//! | `link` | the two ends of the socket between the processes |
//!
//! What it does with its connections is in `source::serve`. The process exists, and has mapped the memory,
//! before the guest stops; the takeover request comes after the handover. It then connects as a source does
//! after lost connections. To the destination the change is a lost connection: pages in flight are requested
//! again, and the page server needs no state of the source's threads.
//!
//! ```text
//! source                                   page server
//!   Memory (JSON)                      ->    Ok
//!   File (with a descriptor) ...       ->    Ok for each; mapped with the last, or Error + reason
//!     ... the guest is handed over, its pages are served from here ...
//!   TakeoverRequest (JSON)             ->    connects; Ok when it serves, or Error + reason
//! ```
//!
//! Until that last Ok the source serves. If the Ok does not come, the source ends the page server and
//! continues, because only one of the two may connect. After the Ok the source is not needed.

mod link;
mod takeover;

#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::time::Duration;

pub use crate::document::{PageServerSnapshot, PageServerState};
pub use crate::page_server_status::Identity;
#[cfg(any(test, feature = "testing"))]
pub use link::fuzz_orders;
pub use link::{PageServerEnd, SourceEnd};
pub(crate) use takeover::Terms;
pub use takeover::{ServedMemory, ServedRegion, TakeoverRequest};

use crate::error::VmError;
use crate::options::Limits;

/// Outcome of a takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeoverOutcome {
    /// The page server serves the remaining pages.
    Serving,
    /// No page is left to send.
    Complete,
}

/// A page server that is ready. Dropping it ends the process, unless it was told to take over.
pub trait PageServerHandle: Send + fmt::Debug {
    /// Its identity.
    fn identity(&self) -> Identity;

    /// Tells the page server to take over and waits until it has done so.
    ///
    /// # Errors
    /// Why it has not taken over. It has ended by then, so that it cannot disturb the process that continues
    /// in its place.
    fn take_over(self: Box<Self>, takeover: &TakeoverRequest) -> Result<TakeoverOutcome, VmError>;
}

/// How long a takeover may take: connecting, a request, and the list of missing pages.
pub(crate) fn take_over_limit(limits: &Limits) -> Duration {
    limits.connect + 2 * limits.stall
}
