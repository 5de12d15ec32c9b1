// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Assignment of the balloon's queues.
//!
//! The standard gives each queue a fixed number. Linux's driver numbers the queues that it uses
//! consecutively, so that without hints the queue for reports has the number of the one for hints;
//! devices have followed it. If the driver has enabled exactly as many queues as its features need,
//! both numberings give the same order, and the order decides.

use super::{F_FREE_PAGE_HINT, F_PAGE_REPORTING, F_STATS_VQ};
use crate::virtio::device::{ActivateError, ActiveQueue};

/// The queues by purpose.
pub(crate) struct Queues<Q> {
    pub(crate) inflate: Q,
    pub(crate) deflate: Q,
    pub(crate) statistics: Option<Q>,
    pub(crate) hinting: Option<Q>,
    pub(crate) reporting: Option<Q>,
}

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
/// Optional queues with their features, in standard order.
const OPTIONAL: [(u16, u64); 3] = [(2, F_STATS_VQ), (3, F_FREE_PAGE_HINT), (4, F_PAGE_REPORTING)];

impl Queues<ActiveQueue> {
    pub(crate) fn sort(queues: Vec<ActiveQueue>, features: u64) -> Result<Self, ActivateError> {
        let mut queues: Vec<Option<ActiveQueue>> = queues.into_iter().map(Some).collect();
        let mut take = |index: u16| {
            let found = |queue: &&mut Option<ActiveQueue>| {
                queue.as_ref().is_some_and(|queue| queue.index == index)
            };
            queues.iter_mut().find(found).and_then(Option::take)
        };
        let missing = |index| ActivateError::MissingQueue { index };
        let inflate = take(INFLATE).ok_or_else(|| missing(INFLATE))?;
        let deflate = take(DEFLATE).ok_or_else(|| missing(DEFLATE))?;
        let mut rest: Vec<ActiveQueue> = queues.into_iter().flatten().collect();
        rest.sort_by_key(|queue| queue.index);
        let wanted = OPTIONAL.map(|(number, feature)| (features & feature != 0).then_some(number));
        let by_order = wanted.iter().flatten().count() == rest.len();
        let mut pick = |number: Option<u16>| {
            let number = number?;
            if by_order {
                return (!rest.is_empty()).then(|| rest.remove(0));
            }
            let at = rest.iter().position(|queue| queue.index == number)?;
            Some(rest.remove(at))
        };
        let [statistics, hinting, reporting] = wanted.map(&mut pick);
        Ok(Self { inflate, deflate, statistics, hinting, reporting })
    }
}

impl<Q> Queues<Q> {
    /// The queues with each value converted.
    pub(crate) fn map<R>(self, mut to: impl FnMut(Q) -> R) -> Queues<R> {
        Queues {
            inflate: to(self.inflate),
            deflate: to(self.deflate),
            statistics: self.statistics.map(&mut to),
            hinting: self.hinting.map(&mut to),
            reporting: self.reporting.map(&mut to),
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Q> {
        let optional = [&self.statistics, &self.hinting, &self.reporting];
        [&self.inflate, &self.deflate].into_iter().chain(optional.into_iter().flatten())
    }
}
