// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Slots that are mapped for a device: their assignment, and when the pool holds the device.
//!
//! Owns the rule that a user that may have a device and does not get its slot finds the device free, for a
//! VM without the pool opens it itself. Must never give a device to a user that is not named.

use std::fs::File;
use std::time::{Duration, Instant};

use memory::RamLayout;
use prezero_pool_client::{Refusal, Reply, TakePinned};

use super::{Broker, Lessee, RETRY_MIN, State};
use crate::config::Class;
use crate::prepinned::{PinError, Prepinned};
use crate::slot::SlotMemory;
use crate::worker::Job;

/// How long a device is left alone when a user that was refused its slot is about to open it: far more
/// than a VMM takes.
const HOLD_OFF: Duration = Duration::from_secs(10);
/// How seldom a device in use is looked for. To look costs next to nothing.
const DEVICE_RETRY_MAX: Duration = Duration::from_secs(30);

/// What goes to a user.
#[derive(Debug)]
pub struct PinnedFiles {
    pub memory: File,
    pub iommufd: File,
    pub device: File,
}

/// What comes of a request.
#[derive(Debug)]
pub enum PinnedAnswer {
    /// The reply, and what goes with it.
    Now(Reply, Option<PinnedFiles>),
    /// A worker has the device in its hands: ask again when it has done something.
    Later,
}

type Refused = (Refusal, String);

impl Broker {
    /// Leases a slot with its device.
    pub fn take_pinned(
        &mut self,
        lessee: Lessee,
        uid: u32,
        request: &TakePinned,
        has_waited: bool,
        now: Instant,
    ) -> PinnedAnswer {
        let leased = match self.find_pinned(uid, request, has_waited, now) {
            Ok(None) => return PinnedAnswer::Later,
            Ok(Some(slot)) => self.lease_pinned(slot, lessee, uid),
            Err(refused) => Err(refused),
        };
        match leased {
            Ok((reply, files)) => {
                self.counters.grants += 1;
                PinnedAnswer::Now(reply, Some(files))
            }
            Err((reason, text)) => {
                self.counters.refuse(reason);
                PinnedAnswer::Now(Reply::Refused { reason, text }, None)
            }
        }
    }

    /// The slot to lease; `None` if that is not known yet.
    fn find_pinned(
        &mut self,
        uid: u32,
        request: &TakePinned,
        has_waited: bool,
        now: Instant,
    ) -> Result<Option<usize>, Refused> {
        let address = request.device;
        let has_device =
            |class: &Class| class.device.as_ref().is_some_and(|device| device.address == address);
        let slot = (0..self.slots.len()).find(|slot| self.class_of(*slot).is_some_and(has_device));
        let class = slot.and_then(|slot| Some((slot, self.class_of(slot)?.clone())));
        let Some((slot, class)) = class else {
            let text = format!("no slot is configured for device {address}");
            return Err((Refusal::NoSuchSlot, text));
        };
        let is_named = class.device.as_ref().is_some_and(|device| device.users.contains(&uid));
        if !is_named && uid != 0 && uid != self.own_uid {
            let text = format!(
                "the slot of device {address} is not for user {uid}: name the user in the pool's \
                 configuration"
            );
            return Err((Refusal::NotAllowed, text));
        }
        let state = self.slots.get(slot).map(|slot| &slot.state);
        // Whatever the answer, the device is not free before the worker is done.
        if matches!(state, Some(State::Pinning { .. })) {
            return Ok(None);
        }
        if let Err(refused) = self.suits(uid, &class, request) {
            self.leave_device(slot, now);
            return Err(refused);
        }
        let not_ready = || {
            let text = format!("the slot of device {address} is not ready");
            Err((Refusal::Empty, text))
        };
        let Some(entry) = self.slots.get_mut(slot) else { return not_ready() };
        let (State::Ready { owner, .. } | State::Waiting { owner, .. }) = &entry.state else {
            self.leave_device(slot, now);
            return not_ready();
        };
        if owner.is_some_and(|owner| owner != uid) {
            // The device is free at once; the memory is made anew.
            entry.hold_off = Some(now + HOLD_OFF);
            entry.renew(slot, class, &mut self.jobs);
            return not_ready();
        }
        match std::mem::replace(&mut entry.state, State::absent()) {
            State::Ready { memory, owner, prepinned: Some(prepinned) } => {
                entry.state = State::Ready { memory, owner, prepinned: Some(prepinned) };
                Ok(Some(slot))
            }
            // The client that asks for it does not have the device: the pool may get it at last.
            State::Waiting { memory, owner, .. } if !has_waited => {
                entry.state = State::Pinning { owner, wait: RETRY_MIN };
                self.jobs.push_back(Job::Pin { slot, class, memory });
                Ok(None)
            }
            other => {
                entry.state = other;
                self.leave_device(slot, now);
                not_ready()
            }
        }
    }

    fn suits(&self, uid: u32, class: &Class, request: &TakePinned) -> Result<(), Refused> {
        let layout = RamLayout::default();
        let fits = class.size_bytes == request.size_bytes
            && class.pages.suits(request.pages)
            && request.node.is_none_or(|node| class.node == Some(node))
            && (layout.hole_start, layout.hole_end) == (request.hole_start, request.hole_end);
        if !fits {
            let node =
                class.node.map_or_else(|| "any node".to_owned(), |node| format!("node {node}"));
            let text = format!(
                "the slot of device {} has {} bytes of pages '{}' of {node}, and the VM has {} bytes: \
                 it has to be all memory of the VM, of its pages, on its node",
                request.device,
                class.size_bytes,
                class.pages.name(),
                request.size_bytes
            );
            return Err((Refusal::NoSuchSlot, text));
        }
        let (limit, has) = (self.config.limits.of(uid, self.own_uid), self.held_by(uid));
        if has.saturating_add(class.size_bytes) > limit {
            let text = format!(
                "user {uid} has {has} bytes of the pool and may have {limit}: raise the limit in \
                 the pool's configuration"
            );
            return Err((Refusal::OverLimit, text));
        }
        Ok(())
    }

    /// Releases a device for a while. What is mapped for it goes.
    fn leave_device(&mut self, slot: usize, now: Instant) {
        let Some(entry) = self.slots.get_mut(slot) else { return };
        let until = now + HOLD_OFF;
        entry.hold_off = Some(until);
        entry.state = match std::mem::replace(&mut entry.state, State::absent()) {
            State::Ready { memory, owner, prepinned: Some(_) } => {
                State::Waiting { memory, owner, at: until, wait: RETRY_MIN }
            }
            other => other,
        };
    }

    fn lease_pinned(
        &mut self,
        slot: usize,
        lessee: Lessee,
        uid: u32,
    ) -> Result<(Reply, PinnedFiles), Refused> {
        let gone = || (Refusal::Failed, "the slot is not there any more".to_owned());
        let entry = self.slots.get_mut(slot).ok_or_else(gone)?;
        match std::mem::replace(&mut entry.state, State::absent()) {
            State::Ready { memory, owner, prepinned: Some(prepinned) } => match memory.lease() {
                Ok(file) => {
                    entry.state = State::Leased { memory, uid, lessee };
                    let Prepinned { iommufd, device, grant } = prepinned;
                    let files = PinnedFiles { memory: file, iommufd, device };
                    Ok((Reply::GrantedPinned(grant), files))
                }
                Err(error) => {
                    entry.state = State::Ready { memory, owner, prepinned: Some(prepinned) };
                    Err((Refusal::Failed, error.to_string()))
                }
            },
            other => {
                entry.state = other;
                Err(gone())
            }
        }
    }

    /// A worker has mapped memory for its device, or could not.
    pub(super) fn pinned(
        &mut self,
        slot: usize,
        memory: SlotMemory,
        result: Result<Prepinned, PinError>,
        now: Instant,
    ) {
        let Some(entry) = self.slots.get_mut(slot) else { return };
        let (owner, wait) = match entry.state {
            State::Pinning { owner, wait } => (owner, wait),
            _ => (None, RETRY_MIN),
        };
        entry.state = match result {
            Ok(prepinned) => {
                entry.problem = None;
                State::Ready { memory, owner, prepinned: Some(prepinned) }
            }
            Err(error) => {
                self.counters.pin_failures += 1;
                let problem = error_text::chain(&error);
                // It is the same every time while a VM has the device.
                if entry.problem.as_ref() != Some(&problem) {
                    log::warn!("a slot waits for its device: {problem}");
                }
                entry.problem = Some(problem);
                let next = (wait * 2).min(DEVICE_RETRY_MAX);
                State::Waiting { memory, owner, at: now + wait, wait: next }
            }
        };
    }
}

#[cfg(test)]
#[path = "pinned_tests.rs"]
mod tests;
