// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory of a slot while not all of it is there: each zone is made or cleared by a worker of its own.
//!
//! Owns what there is of it. Must never drop memory, which takes long if it is large: when that of one zone cannot be made,
//! the others keep theirs.

use crate::slot::SlotMemory;
use crate::sys::Users;

/// Memory by zone.
#[derive(Debug, Default)]
pub(super) struct Parts {
    made: Vec<Option<SlotMemory>>,
    in_work_count: usize,
}

impl Parts {
    /// Of so many zones, which are all being worked on.
    pub(super) fn all_in_work(count: usize) -> Self {
        Self { made: std::iter::repeat_with(|| None).take(count).collect(), in_work_count: count }
    }

    /// Begins to work on those of so many zones that are missing, which are returned.
    pub(super) fn begin_missing(&mut self, count: usize) -> Vec<usize> {
        self.made.resize_with(count, || None);
        let missing = self.made.iter().enumerate().filter(|(_, memory)| memory.is_none());
        let missing: Vec<_> = missing.map(|(part, _)| part).collect();
        self.in_work_count = missing.len();
        missing
    }

    /// A worker is done with a zone.
    pub(super) fn put(&mut self, part: usize, memory: Option<SlotMemory>) {
        self.in_work_count = self.in_work_count.saturating_sub(1);
        if let Some(place) = self.made.get_mut(part) {
            *place = memory;
        }
    }

    pub(super) fn is_in_work(&self) -> bool {
        self.in_work_count > 0
    }

    pub(super) fn has_any(&self) -> bool {
        self.made.iter().any(Option::is_some)
    }

    /// The memory of all zones, in their order.
    ///
    /// # Errors
    /// What there is, as something is missing.
    pub(super) fn whole(self) -> Result<Vec<SlotMemory>, Self> {
        if self.made.iter().any(Option::is_none) {
            return Err(self);
        }
        Ok(self.made.into_iter().flatten().collect())
    }
}

/// Processes that can reach any of the memory of a slot.
pub(super) fn users_of(memory: &[SlotMemory]) -> Users {
    let mut all = Users::OnlyUs;
    for memory in memory {
        match memory.users() {
            Users::Others => return Users::Others,
            Users::Unknown => all = Users::Unknown,
            Users::OnlyUs => {}
        }
    }
    all
}
