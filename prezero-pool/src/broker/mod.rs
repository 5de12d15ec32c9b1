// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! States of the slots, and their assignment to clients.
//!
//! Owns all slots and every decision about them; one thread has it, so there is no lock. Must never
//! touch memory or a socket: it says what is to be done.

mod parts;
mod pinned;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prezero_pool_client::{Refusal, Reply, Take};

use crate::config::{Class, Config, Reuse, SlotZone};
use crate::prepinned::{PinOrder, Prepinned};
use crate::slot::{PoolSlotError, SlotMemory};
use crate::stats::{Counters, SlotCount};
use crate::sys::Users;
use crate::worker::{Closing, Job, JobOutcome, JobResult, Work};
use parts::Parts;
use pinned::HOLD_OFF;

pub use pinned::{PinnedAnswer, Waited};

/// How soon memory whose user has gone is looked at again while a process still has it: soon at
/// first, for a process that ends takes a moment, then seldom.
const RECHECK_MIN: Duration = Duration::from_millis(10);
const RECHECK_MAX: Duration = Duration::from_secs(2);
/// How soon memory that could not be made is tried again.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_mins(2);
/// How long a user waits for a device while memory is mapped for it. Then mapping is given up and the device released,
/// before the user gives up itself and finds the device in use.
const PIN_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long a user waits for that to begin: a thread that has nothing else to do begins at once, and one that maps
/// terabytes for another device may do so for minutes.
const PIN_BEGIN_MAX: Duration = Duration::from_secs(1);

/// Names a connection.
pub type Lessee = u64;

#[derive(Debug)]
enum State {
    /// There is no memory, or not for all zones; what lacks is made from `at` on. What is there is for `owner` alone.
    Absent { at: Instant, owner: Option<u32>, parts: Parts },
    /// Workers make or clear it.
    InWork { owner: Option<u32>, parts: Parts },
    /// Its memory is ready; the device that it is to be mapped for is asked for at `at`.
    Waiting { memory: Vec<SlotMemory>, owner: Option<u32>, at: Instant, wait: Duration },
    /// A worker maps it for its device, or is to. `asked`: the connections that wait for it, and since when.
    Pinning {
        owner: Option<u32>,
        wait: Duration,
        order: Arc<PinOrder>,
        asked: BTreeMap<Lessee, Instant>,
    },
    /// What is mapped for its device is being released, the device first.
    Leaving { memory: Vec<SlotMemory>, owner: Option<u32>, has_device: bool, then: AfterLeaving },
    /// It can be leased: to `owner` alone, if it has had one.
    Ready { memory: Vec<SlotMemory>, owner: Option<u32>, prepinned: Option<Prepinned> },
    /// A process has it, but for the zones in `rest`, which only that process can still take.
    Leased { memory: Vec<SlotMemory>, uid: u32, lessee: Lessee, rest: Vec<usize> },
    /// Its user has gone; whether other processes have it is looked at.
    Lingering { memory: Vec<SlotMemory>, uid: u32, at: Instant, wait: Duration },
}

/// The state after [`State::Leaving`].
#[derive(Debug, Clone, Copy)]
enum AfterLeaving {
    /// It waits for its device again.
    Wait { at: Instant, wait: Duration },
    /// It is made anew.
    Renew,
}

impl State {
    /// What stands for another state while that changes, and for that of a slot that was never made.
    fn absent() -> Self {
        Self::Absent { at: Instant::now(), owner: None, parts: Parts::default() }
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
            Self::Waiting { .. } | Self::Leaving { .. } => "waiting",
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
    /// The connections of users that may have the device open: it is left alone while there is one. Whether the memory
    /// is what the user asked for.
    left_for: BTreeMap<Lessee, bool>,
    /// What kept it from its device, as it was said last.
    problem: Option<String>,
}

impl PoolSlot {
    /// Has workers release its memory, which may take long, and make new memory.
    fn renew(&mut self, slot: usize, class: &Class, jobs: &mut VecDeque<Job>) {
        match std::mem::replace(&mut self.state, State::absent()) {
            // What is mapped for a device goes first.
            State::Ready { memory, owner, prepinned: Some(prepinned) } => {
                jobs.push_back(Closing::Prepinned { slot, prepinned }.into());
                let (has_device, then) = (true, AfterLeaving::Renew);
                self.state = State::Leaving { memory, owner, has_device, then };
            }
            State::Ready { memory, .. } | State::Waiting { memory, .. } => {
                let again = |part, zone, memory| Work::Renew { slot, part, zone, memory };
                self.rework(class, memory, None, jobs, again);
            }
            other => self.state = other,
        }
    }

    /// The order for a worker to map its memory for its device.
    #[must_use]
    fn pin(
        &mut self,
        slot: usize,
        class: &Class,
        memory: Vec<SlotMemory>,
        owner: Option<u32>,
        wait: Duration,
    ) -> Job {
        let order = Arc::new(PinOrder::new(memory));
        self.state =
            State::Pinning { owner, wait, order: Arc::clone(&order), asked: BTreeMap::new() };
        Work::Pin { slot, class: class.clone(), order }.into()
    }

    /// Leaves its device alone for a while, and gives up mapping its memory for it. Memory whose turn had not come waits
    /// again.
    fn stop_pinning(&mut self, now: Instant) {
        self.state = match std::mem::replace(&mut self.state, State::absent()) {
            State::Pinning { owner, wait, order, asked } => match order.stop() {
                Some(memory) => State::Waiting { memory, owner, at: now + wait, wait },
                None => State::Pinning { owner, wait, order, asked },
            },
            other => other,
        };
        // Also if the client does not wait for the answer.
        self.hold_off = Some(now + HOLD_OFF);
    }

    /// Whether the device may be open in this process, and no user can have it.
    fn has_device(&self) -> bool {
        match &self.state {
            State::Pinning { order, .. } => order.is_begun(),
            State::Leaving { has_device, .. } => *has_device,
            _ => false,
        }
    }

    /// Has workers do something with the memory of each zone.
    fn rework(
        &mut self,
        class: &Class,
        memory: Vec<SlotMemory>,
        owner: Option<u32>,
        jobs: &mut VecDeque<Job>,
        job: impl Fn(usize, SlotZone, SlotMemory) -> Work,
    ) {
        let zones = class.zones.iter().cloned().zip(memory).enumerate();
        jobs.extend(zones.map(|(part, (zone, memory))| job(part, zone, memory).into()));
        self.state = State::InWork { owner, parts: Parts::all_in_work(class.zones.len()) };
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
                left_for: BTreeMap::new(),
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
        let leased = self.lease_without_device(lessee, uid, request).map_or_else(
            || self.find(uid, request).and_then(|slot| self.lease(slot, lessee, uid)),
            Ok,
        );
        match leased {
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
            let [zone] = class.zones.as_slice() else { return false };
            class.device.is_none()
                && zone.pages.suits(request.pages)
                && request.node.is_none_or(|node| zone.node == Some(node))
                && zone.size_bytes >= request.size_bytes
                && u128::from(zone.size_bytes) <= most
        };
        let fitting: Vec<usize> =
            (0..self.slots.len()).filter(|slot| self.class_of(*slot).is_some_and(fits)).collect();
        let smallest =
            fitting.iter().filter_map(|slot| self.class_of(*slot)).map(Class::size_bytes).min();
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
            let zone = self.class_of(*slot)?.zones.first()?;
            let &State::Ready { owner, .. } = &self.slots.get(*slot)?.state else { return None };
            let usable = owner.is_none_or(|owner| owner == uid) && zone.size_bytes <= room;
            // The smallest, of the pages that are liked best, and what only this user can have.
            usable.then_some((
                zone.size_bytes,
                !zone.pages.is_preferred(request.pages),
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
                entry.renew(*slot, &class, &mut self.jobs);
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
        let zone = self.class_of(slot).and_then(|class| class.zones.first()).ok_or_else(gone)?;
        let reply = Reply::Granted { size_bytes: zone.size_bytes, pages: zone.pages };
        let entry = self.slots.get_mut(slot).ok_or_else(gone)?;
        let State::Ready { memory, .. } = &entry.state else { return Err(gone()) };
        let file = memory
            .first()
            .ok_or_else(gone)?
            .lease()
            .map_err(|error| (Refusal::Failed, error.to_string()))?;
        let before = std::mem::replace(&mut entry.state, State::absent());
        if let State::Ready { memory, .. } = before {
            entry.state = State::Leased { memory, uid, lessee, rest: Vec::new() };
        }
        Ok((reply, file))
    }

    fn held_by(&self, uid: u32) -> u64 {
        let held = |(index, slot): (usize, &PoolSlot)| {
            let is_theirs = slot.state.holder() == Some(uid) || slot.charged == Some(uid);
            is_theirs.then(|| self.class_of(index)).flatten()
        };
        self.slots.iter().enumerate().filter_map(held).map(Class::size_bytes).sum()
    }

    /// Whether a connection has memory, or a device is left alone for it.
    pub fn has_any(&self, lessee: Lessee) -> bool {
        self.slots.iter().any(|slot| {
            slot.left_for.contains_key(&lessee)
                || matches!(&slot.state, State::Leased { lessee: other, .. } if *other == lessee)
        })
    }

    /// A connection is closed: what was leased over it comes back, and what was left to its user can be had.
    pub fn closed(&mut self, lessee: Lessee, now: Instant) {
        for slot in &mut self.slots {
            slot.left_for.remove(&lessee);
            match std::mem::replace(&mut slot.state, State::absent()) {
                State::Leased { memory, uid, lessee: other, .. } if other == lessee => {
                    self.counters.returns += 1;
                    slot.state = State::Lingering { memory, uid, at: now, wait: RECHECK_MIN };
                }
                State::Pinning { owner, wait, order, mut asked } => {
                    asked.remove(&lessee);
                    slot.state = State::Pinning { owner, wait, order, asked };
                }
                other => slot.state = other,
            }
        }
    }

    /// A worker has done something.
    pub fn done(&mut self, JobResult { slot, outcome }: JobResult, now: Instant) {
        match outcome {
            JobOutcome::Memory { part, scrubbed, result } => {
                self.made(slot, part, scrubbed, result, now);
            }
            JobOutcome::Pinned { memory, result } => self.pinned(slot, memory, result, now),
            JobOutcome::Released => self.released(slot),
            JobOutcome::Unpinned => self.unpinned(slot),
        }
    }

    /// A worker has made or cleared the memory of a zone, or could not.
    fn made(
        &mut self,
        slot: usize,
        part: usize,
        scrubbed: bool,
        result: Result<SlotMemory, PoolSlotError>,
        now: Instant,
    ) {
        let Some(class) = self.class_of(slot) else { return };
        let size_bytes = class.zones.get(part).map_or(0, |zone| zone.size_bytes);
        let has_device = class.device.is_some();
        let Some(entry) = self.slots.get_mut(slot) else { return };
        let State::InWork { owner, parts } = &mut entry.state else { return };
        match result {
            Ok(memory) => {
                let bytes = if scrubbed {
                    &mut self.counters.scrubbed_bytes
                } else {
                    &mut self.counters.built_bytes
                };
                *bytes = bytes.saturating_add(size_bytes);
                parts.put(part, Some(memory));
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
                parts.put(part, None);
            }
        }
        if parts.is_in_work() {
            return;
        }
        let (owner, parts) = (*owner, std::mem::take(parts));
        match parts.whole() {
            Ok(memory) => {
                entry.state = if has_device {
                    State::Waiting { memory, owner, at: now, wait: RETRY_MIN }
                } else {
                    State::Ready { memory, owner, prepinned: None }
                };
                entry.charged = None;
                self.counters.succeed(entry.class);
            }
            Err(parts) => self.back_off(slot, owner, parts, now),
        }
    }

    /// Kinds that fail over and over are tried less and less often. What there is of a slot stays.
    fn back_off(&mut self, slot: usize, owner: Option<u32>, parts: Parts, now: Instant) {
        let class = self.slots.get(slot).map(|slot| slot.class);
        let wait = self.counters.back_off(class.unwrap_or(0), RETRY_MIN, RETRY_MAX);
        if let Some(slot) = self.slots.get_mut(slot) {
            let owner = owner.filter(|_| parts.has_any());
            slot.state = State::Absent { at: now + wait, owner, parts };
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
                State::Absent { at, owner, mut parts } if at <= now => {
                    for part in parts.begin_missing(class.zones.len()) {
                        let Some(zone) = class.zones.get(part).cloned() else { continue };
                        self.jobs.push_back(Work::Build { slot: index, part, zone }.into());
                    }
                    State::InWork { owner, parts }
                }
                State::Absent { at, owner, parts } => {
                    soon(at);
                    State::Absent { at, owner, parts }
                }
                State::Lingering { memory, uid, at, wait } if at <= now => {
                    let users = parts::users_of(&memory);
                    if users == Users::Others {
                        let wait = (wait * 2).min(RECHECK_MAX);
                        soon(now + wait);
                        slot.state = State::Lingering { memory, uid, at: now + wait, wait };
                        continue;
                    }
                    slot.charged = Some(uid);
                    let is_same = self.config.reuse == Reuse::SameUser && users == Users::OnlyUs;
                    if users == Users::Unknown {
                        // Not to be proved: it goes back to the kernel, whenever its last user goes.
                        self.counters.unproved += 1;
                    }
                    let (owner, slot_number) = (is_same.then_some(uid), index);
                    slot.rework(&class, memory, owner, &mut self.jobs, |part, zone, memory| {
                        let slot = slot_number;
                        if is_same {
                            Work::Scrub { slot, part, zone, memory }
                        } else {
                            Work::Renew { slot, part, zone, memory }
                        }
                    });
                    continue;
                }
                State::Lingering { memory, uid, at, wait } => {
                    soon(at);
                    State::Lingering { memory, uid, at, wait }
                }
                State::Waiting { memory, owner, at, wait } => {
                    let due = slot.hold_off.map_or(at, |until| until.max(at));
                    if slot.left_for.is_empty() && due <= now {
                        self.jobs.push_back(slot.pin(index, &class, memory, owner, wait));
                        continue;
                    }
                    // The end of a connection is noticed without a time.
                    if slot.left_for.is_empty() {
                        soon(due);
                    }
                    State::Waiting { memory, owner, at, wait }
                }
                State::Pinning { owner, wait, order, asked } => {
                    let first = asked.values().min().filter(|_| !order.is_stopped());
                    let patience = if order.is_begun() { PIN_WAIT_MAX } else { PIN_BEGIN_MAX };
                    let until = first.map(|asked| *asked + patience);
                    slot.state = State::Pinning { owner, wait, order, asked };
                    match until {
                        Some(until) if until <= now => slot.stop_pinning(now),
                        Some(until) => soon(until),
                        None => {}
                    }
                    continue;
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
