// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! States of the slots, and their assignment to clients.
//!
//! Owns all slots and every decision about them; one thread has it, so there is no lock. Must never
//! touch memory or a socket: it says what is to be done.

mod pinned;

use std::collections::VecDeque;
use std::fs::File;
use std::time::{Duration, Instant};

use prezero_pool_client::{Refusal, Reply, Take};

use crate::config::{Class, Config, Reuse};
use crate::prepinned::Prepinned;
use crate::slot::{PoolSlotError, SlotMemory};
use crate::stats::{Counters, SlotCount};
use crate::sys::Users;
use crate::worker::{Job, JobOutcome, JobResult};

pub use pinned::PinnedAnswer;

/// How soon memory whose user has gone is looked at again while a process still has it: soon at
/// first, for a process that ends takes a moment, then seldom.
const RECHECK_MIN: Duration = Duration::from_millis(10);
const RECHECK_MAX: Duration = Duration::from_secs(2);
/// How soon memory that could not be made is tried again.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_mins(2);

/// Names a connection.
pub type Lessee = u64;

#[derive(Debug)]
enum State {
    /// There is no memory; it is made from `at` on.
    Absent { at: Instant, wait: Duration },
    /// A worker makes or clears it.
    InWork { owner: Option<u32> },
    /// Its memory is ready; the device that it is to be mapped for is asked for at `at`.
    Waiting { memory: SlotMemory, owner: Option<u32>, at: Instant, wait: Duration },
    /// A worker maps it for its device.
    Pinning { owner: Option<u32>, wait: Duration },
    /// It can be leased: to `owner` alone, if it has had one.
    Ready { memory: SlotMemory, owner: Option<u32>, prepinned: Option<Prepinned> },
    /// A process has it.
    Leased { memory: SlotMemory, uid: u32, lessee: Lessee },
    /// Its user has gone; whether other processes have it is looked at.
    Lingering { memory: SlotMemory, uid: u32, at: Instant, wait: Duration },
}

impl State {
    fn absent() -> Self {
        Self::Absent { at: Instant::now(), wait: RETRY_MIN }
    }

    /// The user that still has the memory.
    fn holder(&self) -> Option<u32> {
        match self {
            Self::Leased { uid, .. } | Self::Lingering { uid, .. } => Some(*uid),
            _ => None,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Absent { .. } => "absent",
            Self::InWork { .. } => "in_work",
            Self::Waiting { .. } => "waiting",
            Self::Pinning { .. } => "pinning",
            Self::Ready { .. } => "ready",
            Self::Leased { .. } => "lent",
            Self::Lingering { .. } => "lingering",
        }
    }
}

#[derive(Debug)]
struct PoolSlot {
    class: usize,
    state: State,
    /// The user that had its memory last, until there is new memory: what that user has kept of it, in a pipe for
    /// instance, counts as its own, and taking and returning slots empties no pool for others.
    charged: Option<u32>,
    /// Its device is left alone until then, for a user that was refused the slot.
    hold_off: Option<Instant>,
    /// What kept it from its device, as it was said last.
    problem: Option<String>,
}

impl PoolSlot {
    /// Has a worker release its memory, which may take long, and make new memory.
    fn renew(&mut self, slot: usize, class: Class, jobs: &mut VecDeque<Job>) {
        match std::mem::replace(&mut self.state, State::InWork { owner: None }) {
            // What is mapped for a device goes first, and at once.
            State::Ready { memory, .. } | State::Waiting { memory, .. } => {
                jobs.push_back(Job::Renew { slot, class, memory });
            }
            other => self.state = other,
        }
    }
}

/// All slots.
#[derive(Debug)]
pub struct Broker {
    config: Config,
    own_uid: u32,
    slots: Vec<PoolSlot>,
    jobs: VecDeque<Job>,
    pub counters: Counters,
}

impl Broker {
    pub fn new(config: Config, own_uid: u32) -> Self {
        let mut slots = Vec::new();
        for (class, spec) in config.classes.iter().enumerate() {
            let slot = |_| PoolSlot {
                class,
                state: State::absent(),
                charged: None,
                hold_off: None,
                problem: None,
            };
            slots.extend((0..spec.count).map(slot));
        }
        Self { config, own_uid, slots, jobs: VecDeque::new(), counters: Counters::default() }
    }

    fn class_of(&self, slot: usize) -> Option<&Class> {
        self.config.classes.get(self.slots.get(slot)?.class)
    }

    /// The next thing for a worker.
    pub fn next_job(&mut self) -> Option<Job> {
        self.jobs.pop_front()
    }

    /// Leases memory: the reply, and the file that goes with it.
    pub fn take(&mut self, lessee: Lessee, uid: u32, request: &Take) -> (Reply, Option<File>) {
        match self.find(uid, request).and_then(|slot| self.lease(slot, lessee, uid)) {
            Ok((reply, file)) => {
                self.counters.grants += 1;
                (reply, Some(file))
            }
            Err((reason, text)) => {
                self.counters.refuse(reason);
                (Reply::Refused { reason, text }, None)
            }
        }
    }

    fn find(&mut self, uid: u32, request: &Take) -> Result<usize, (Refusal, String)> {
        let fits = |class: &Class| {
            let waste = u128::from(request.size_bytes) * u128::from(self.config.max_waste_percent);
            let most = u128::from(request.size_bytes) + waste / 100;
            class.device.is_none()
                && class.pages.suits(request.pages)
                && request.node.is_none_or(|node| class.node == Some(node))
                && class.size_bytes >= request.size_bytes
                && u128::from(class.size_bytes) <= most
        };
        let fitting: Vec<usize> =
            (0..self.slots.len()).filter(|slot| self.class_of(*slot).is_some_and(fits)).collect();
        let smallest = fitting
            .iter()
            .filter_map(|slot| self.class_of(*slot))
            .map(|class| class.size_bytes)
            .min();
        let Some(smallest) = smallest else {
            let text = format!(
                "no slots of at least {} bytes (and at most {} % more) with these pages and on \
                 this node are configured",
                request.size_bytes, self.config.max_waste_percent
            );
            return Err((Refusal::NoSuchSlot, text));
        };
        let limit = self.config.limits.of(uid, self.own_uid);
        let has = self.held_by(uid);
        if has.saturating_add(smallest) > limit {
            let text = format!(
                "user {uid} has {has} bytes of the pool and may have {limit}: raise the limit in \
                 the pool's configuration"
            );
            return Err((Refusal::OverLimit, text));
        }
        let room = limit - has;
        let rank = |slot: &usize| -> Option<(u64, bool, bool)> {
            let class = self.class_of(*slot)?;
            let &State::Ready { owner, .. } = &self.slots.get(*slot)?.state else { return None };
            let usable = owner.is_none_or(|owner| owner == uid) && class.size_bytes <= room;
            // The smallest, of the pages that are liked best, and what only this user can have.
            usable.then_some((
                class.size_bytes,
                !class.pages.is_preferred(request.pages),
                owner.is_none(),
            ))
        };
        let best = fitting.iter().filter_map(|slot| Some((rank(slot)?, *slot))).min();
        if let Some((_, slot)) = best {
            return Ok(slot);
        }
        self.renew_of_others(uid, &fitting);
        Err((Refusal::Empty, format!("none of its {} slots of this kind is ready", fitting.len())))
    }

    /// Memory that only other users may have is made anew for all, once a client asks for it.
    fn renew_of_others(&mut self, uid: u32, slots: &[usize]) {
        for slot in slots {
            let Some(class) = self.class_of(*slot).cloned() else { continue };
            let Some(entry) = self.slots.get_mut(*slot) else { continue };
            if matches!(entry.state, State::Ready { owner: Some(owner), .. } if owner != uid) {
                entry.renew(*slot, class, &mut self.jobs);
            }
        }
    }

    fn lease(
        &mut self,
        slot: usize,
        lessee: Lessee,
        uid: u32,
    ) -> Result<(Reply, File), (Refusal, String)> {
        let gone = || (Refusal::Failed, "the slot is not there any more".to_owned());
        let class = self.class_of(slot).ok_or_else(gone)?;
        let reply = Reply::Granted { size_bytes: class.size_bytes, pages: class.pages };
        let entry = self.slots.get_mut(slot).ok_or_else(gone)?;
        let State::Ready { memory, .. } = &entry.state else { return Err(gone()) };
        let file = memory.lease().map_err(|error| (Refusal::Failed, error.to_string()))?;
        let before = std::mem::replace(&mut entry.state, State::absent());
        if let State::Ready { memory, .. } = before {
            entry.state = State::Leased { memory, uid, lessee };
        }
        Ok((reply, file))
    }

    fn held_by(&self, uid: u32) -> u64 {
        let held = |(index, slot): (usize, &PoolSlot)| {
            let is_theirs = slot.state.holder() == Some(uid) || slot.charged == Some(uid);
            is_theirs.then(|| self.class_of(index)).flatten()
        };
        self.slots.iter().enumerate().filter_map(held).map(|class| class.size_bytes).sum()
    }

    /// Whether a connection has memory.
    pub fn has_any(&self, lessee: Lessee) -> bool {
        self.slots.iter().any(
            |slot| matches!(&slot.state, State::Leased { lessee: other, .. } if *other == lessee),
        )
    }

    /// A connection is closed: what was leased over it comes back.
    pub fn closed(&mut self, lessee: Lessee, now: Instant) {
        for slot in &mut self.slots {
            match std::mem::replace(&mut slot.state, State::absent()) {
                State::Leased { memory, uid, lessee: other } if other == lessee => {
                    self.counters.returns += 1;
                    slot.state = State::Lingering { memory, uid, at: now, wait: RECHECK_MIN };
                }
                other => slot.state = other,
            }
        }
    }

    /// A worker has done something.
    pub fn done(&mut self, done: JobResult, now: Instant) {
        let Some(class) = self.class_of(done.slot) else { return };
        let (size_bytes, has_device) = (class.size_bytes, class.device.is_some());
        let (scrubbed, result) = match done.outcome {
            JobOutcome::Memory { scrubbed, result } => (scrubbed, result),
            JobOutcome::Pinned { memory, result } => {
                return self.pinned(done.slot, memory, result, now);
            }
        };
        let Some(slot) = self.slots.get_mut(done.slot) else { return };
        let owner = match slot.state {
            State::InWork { owner } => owner,
            _ => None,
        };
        match result {
            Ok(memory) => {
                let bytes = if scrubbed {
                    &mut self.counters.scrubbed_bytes
                } else {
                    &mut self.counters.built_bytes
                };
                *bytes = bytes.saturating_add(size_bytes);
                slot.state = if has_device {
                    State::Waiting { memory, owner, at: now, wait: RETRY_MIN }
                } else {
                    State::Ready { memory, owner, prepinned: None }
                };
                slot.charged = None;
                self.counters.succeed(slot.class);
            }
            Err(error) => {
                log::warn!(
                    "a slot of {size_bytes} bytes is not ready: {}",
                    error_text::chain(&error)
                );
                self.counters.failures += 1;
                if matches!(error, PoolSlotError::NotZero { .. }) {
                    self.counters.not_zero += 1;
                }
                self.back_off(done.slot, now);
            }
        }
    }

    /// Kinds that fail over and over are tried less and less often.
    fn back_off(&mut self, slot: usize, now: Instant) {
        let class = self.slots.get(slot).map(|slot| slot.class);
        let wait = self.counters.back_off(class.unwrap_or(0), RETRY_MIN, RETRY_MAX);
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.state = State::Absent { at: now + wait, wait };
        }
    }

    /// Whether a user may have anything: memory, or a device, which it gets from the pool's hands also without memory.
    pub fn may_ask(&self, uid: u32) -> bool {
        let mut devices = self.config.classes.iter().filter_map(|class| class.device.as_ref());
        self.config.limits.of(uid, self.own_uid) > 0
            || devices.any(|device| device.users.contains(&uid))
    }

    /// Does what is due, and says when it wants to be asked again.
    pub fn tick(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut soon = |at: Instant| next = Some(next.map_or(at, |other: Instant| other.min(at)));
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(class) = self.config.classes.get(slot.class) else { continue };
            let class = class.clone();
            slot.state = match std::mem::replace(&mut slot.state, State::absent()) {
                State::Absent { at, .. } if at <= now => {
                    self.jobs.push_back(Job::Build { slot: index, class });
                    State::InWork { owner: None }
                }
                State::Absent { at, wait } => {
                    soon(at);
                    State::Absent { at, wait }
                }
                State::Lingering { memory, uid, at, wait } if at <= now => match memory.users() {
                    Users::OnlyUs => {
                        let (job, owner) = match self.config.reuse {
                            Reuse::Never => (Job::Renew { slot: index, class, memory }, None),
                            Reuse::SameUser => {
                                (Job::Scrub { slot: index, class, memory }, Some(uid))
                            }
                        };
                        self.jobs.push_back(job);
                        slot.charged = Some(uid);
                        State::InWork { owner }
                    }
                    Users::Others => {
                        let wait = (wait * 2).min(RECHECK_MAX);
                        soon(now + wait);
                        State::Lingering { memory, uid, at: now + wait, wait }
                    }
                    // Not to be proved: it goes back to the kernel, whenever its last user goes.
                    Users::Unknown => {
                        self.counters.unproved += 1;
                        self.jobs.push_back(Job::Renew { slot: index, class, memory });
                        slot.charged = Some(uid);
                        State::InWork { owner: None }
                    }
                },
                State::Lingering { memory, uid, at, wait } => {
                    soon(at);
                    State::Lingering { memory, uid, at, wait }
                }
                State::Waiting { memory, owner, at, wait } => {
                    let due = slot.hold_off.map_or(at, |until| until.max(at));
                    if due <= now {
                        self.jobs.push_back(Job::Pin { slot: index, class, memory });
                        State::Pinning { owner, wait }
                    } else {
                        soon(due);
                        State::Waiting { memory, owner, at, wait }
                    }
                }
                other => other,
            };
        }
        next
    }

    /// How many slots of each kind are in which state.
    pub fn slot_counts(&self) -> Vec<SlotCount<'_>> {
        let mut counts = Vec::new();
        for (index, class) in self.config.classes.iter().enumerate() {
            let with_device = ["waiting", "pinning"].into_iter().filter(|_| class.device.is_some());
            let all = ["absent", "in_work", "ready", "lent", "lingering"];
            for state in all.into_iter().chain(with_device) {
                let of_it = |slot: &&PoolSlot| slot.class == index && slot.state.name() == state;
                let count = self.slots.iter().filter(of_it).count();
                counts.push(SlotCount { class, state, count });
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests;
