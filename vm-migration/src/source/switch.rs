// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Switch-over request: ends precopy early in favour of postcopy.
//!
//! Owns the check whether to switch over, which is polled between slices. Must never decide what
//! happens then.

use std::time::Instant;

use super::Context;
use crate::steering::Steering;

/// What switches precopy to postcopy: a request, or a time limit.
pub(crate) struct Switch<'a> {
    /// `None` where postcopy is not allowed.
    after: Option<(Option<Instant>, &'a Steering)>,
}

impl<'a> Switch<'a> {
    pub(super) fn new(context: Context<'a>) -> Self {
        let options = context.options;
        let after = || {
            let at = options.postcopy_after.and_then(|after| Instant::now().checked_add(after));
            (at, &options.steering)
        };
        Self { after: options.mode().may_postcopy().then(after) }
    }

    /// A switch that is never due.
    pub(crate) fn never() -> Self {
        Self { after: None }
    }

    pub(crate) fn is_due(&self) -> bool {
        self.after.is_some_and(|(at, steering)| {
            steering.wants_postcopy() || at.is_some_and(|at| Instant::now() >= at)
        })
    }
}
