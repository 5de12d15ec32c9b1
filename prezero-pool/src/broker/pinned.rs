// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Slots that are mapped for a device: their assignment, and when the pool holds the device.
//!
//! Owns the rule that a user that may have a device and does not get its slot finds the device free, for a
//! VM without the pool opens it itself, and again when it reboots: so for as long as its connection is open. Must never
//! give a device to a user that is not named.

use std::fs::File;
use std::time::{Duration, Instant};

use prezero_pool_client::{PinnedRegion, Refusal, Reply, Take, TakePinned};

use super::{AfterLeaving, Broker, Lessee, PoolSlot, RETRY_MIN, State};
use crate::config::Class;
use crate::prepinned::{PinError, PinnedFiles, Prepinned};
use crate::slot::SlotMemory;
use crate::worker::Closing;

/// How long a device is left alone at least when a user was refused its slot: a VMM of an earlier version closes its
/// connection before it opens the device.
pub(super) const HOLD_OFF: Duration = Duration::from_secs(10);
/// How seldom a device in use is looked for. To look costs next to nothing.
const DEVICE_RETRY_MAX: Duration = Duration::from_secs(30);

/// What comes of a request.
#[derive(Debug)]
pub enum PinnedAnswer {
    /// The reply, and what goes with it.
    Now(Reply, Option<PinnedFiles>),
    /// A worker has a device in its hands: ask again, with this, when it has done something.
    Later(Waited),
}

/// What is known of a request that was put off.
#[derive(Debug, Default)]
pub struct Waited {
    /// The user gets nothing, whatever the workers do; this is why.
    refused: Option<Refused>,
}

type Refused = (Refusal, String);

/// Who asks, and when.
#[derive(Clone, Copy)]
struct Asker {
    lessee: Lessee,
    uid: u32,
    now: Instant,
}

impl Broker {
    /// Leases a slot with its device. `waited`: what came of the same request before.
    ///
    /// Whatever the answer, the devices of the request that the user may have and does not get are free by then, and stay
    /// so while the connection is open.
    pub fn take_pinned(
        &mut self,
        lessee: Lessee,
        uid: u32,
        request: &TakePinned,
        waited: Option<Waited>,
        now: Instant,
    ) -> PinnedAnswer {
        let asker = Asker { lessee, uid, now };
        let found = match waited {
            Some(Waited { refused: Some(refused) }) => Err(refused),
            waited => self.find_pinned(asker, request, waited.is_some()),
        };
        let slots = self.slots_for(uid, request).unwrap_or_default();
        if !matches!(found, Ok(None)) {
            self.leave_alone(&slots, asker, request);
        }
        let is_busy =
            slots.iter().any(|slot| self.slots.get(*slot).is_some_and(PoolSlot::has_device));
        let leased = match found {
            Ok(None) => return PinnedAnswer::Later(Waited::default()),
            Ok(Some(_)) if is_busy => return PinnedAnswer::Later(Waited::default()),
            Err(refused) if is_busy => {
                return PinnedAnswer::Later(Waited { refused: Some(refused) });
            }
            Ok(Some(slot)) => match self.lease_pinned(slot, lessee, uid) {
                Err(refused) => {
                    // The device goes before the answer.
                    self.leave_device(slot, now);
                    return PinnedAnswer::Later(Waited { refused: Some(refused) });
                }
                leased @ Ok(_) => leased,
            },
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

    /// Leaves devices alone from now on, however long it takes to release them: the user opens them.
    fn leave_alone(&mut self, slots: &[usize], asker: Asker, request: &TakePinned) {
        for slot in slots {
            let is_wanted =
                self.class_of(*slot).is_some_and(|class| memory_differs(class, request).is_none());
            if let Some(entry) = self.slots.get_mut(*slot) {
                entry.hold_off = Some(asker.now + HOLD_OFF);
                entry.left_for.insert(asker.lessee, is_wanted);
            }
        }
    }

    /// Has a worker close what was sent.
    pub fn close(&mut self, files: PinnedFiles) {
        self.jobs.push_back(Closing::Sent(files).into());
    }

    /// The slots of the devices that are asked for, in that order, as far as the user may have them.
    fn slots_for(&self, uid: u32, request: &TakePinned) -> Result<Vec<usize>, Refused> {
        let (mut slots, mut forbidden) = (Vec::new(), None);
        for address in &request.devices {
            let all = self.config.classes.iter().filter_map(|class| class.device.as_ref());
            let Some(device) = all.into_iter().find(|device| device.address == *address) else {
                continue;
            };
            if !device.users.contains(&uid) && uid != 0 && uid != self.own_uid {
                forbidden = forbidden.or(Some(address));
                continue;
            }
            let is_its = |class: &Class| class.device.as_ref() == Some(device);
            slots.extend(
                (0..self.slots.len()).find(|slot| self.class_of(*slot).is_some_and(is_its)),
            );
        }
        match (slots.is_empty(), forbidden, request.devices.first()) {
            (false, ..) => Ok(slots),
            (true, Some(address), _) => {
                let text = format!(
                    "the slot of device {address} is not for user {uid}: name the user in the pool's \
                     configuration"
                );
                Err((Refusal::NotAllowed, text))
            }
            (true, None, first) => {
                let first = first.map(ToString::to_string).unwrap_or_default();
                let others =
                    if request.devices.len() > 1 { ", nor for the VM's others" } else { "" };
                let text = format!("no slot is configured for device {first}{others}");
                Err((Refusal::NoSuchSlot, text))
            }
        }
    }

    /// The slot to lease; `None` if that is not known yet.
    fn find_pinned(
        &mut self,
        asker: Asker,
        request: &TakePinned,
        has_waited: bool,
    ) -> Result<Option<usize>, Refused> {
        let Asker { uid, now, .. } = asker;
        let slots = self.slots_for(uid, request)?;
        let (mut chosen, mut why) = (None, None);
        for slot in &slots {
            match self.class_of(*slot).map(|class| self.suits(uid, class, request)) {
                Some(Ok(())) if chosen.is_none() => chosen = Some(*slot),
                Some(Err(refused)) => why = why.or(Some(refused)),
                _ => {}
            }
        }
        for slot in slots.iter().filter(|slot| chosen != Some(**slot)) {
            self.leave_device(*slot, now);
        }
        match (chosen, why) {
            (Some(slot), _) => self.claim(slot, asker, request, has_waited),
            (None, Some(refused)) => Err(refused),
            (None, None) => Err((Refusal::Failed, "the slot is not there any more".to_owned())),
        }
    }

    /// The slot, if it can be leased; `None` if that is not known yet. If not, its device is released.
    fn claim(
        &mut self,
        slot: usize,
        asker: Asker,
        request: &TakePinned,
        has_waited: bool,
    ) -> Result<Option<usize>, Refused> {
        let Asker { lessee, uid, now } = asker;
        let gone = || (Refusal::Failed, "the slot is not there any more".to_owned());
        let class = self.class_of(slot).cloned().ok_or_else(gone)?;
        let address =
            class.device.as_ref().map(|device| device.address.to_string()).unwrap_or_default();
        let not_ready = |why: &str| {
            (Refusal::Empty, format!("the slot of device {address} is not ready: {why}"))
        };
        let entry = self.slots.get_mut(slot).ok_or_else(gone)?;
        let is_for_others = entry.left_for.keys().any(|other| *other != lessee);
        match std::mem::replace(&mut entry.state, State::absent()) {
            State::Pinning { owner, wait, order, mut asked } => {
                asked.entry(lessee).or_insert(now);
                let is_given_up = order.is_stopped();
                let mapped = order.regions();
                let differs = mapped.and_then(|own| layout_differs(&address, own, request));
                entry.state = State::Pinning { owner, wait, order, asked };
                if let Some(text) = differs {
                    self.leave_device(slot, now);
                    return Err((Refusal::NoSuchSlot, text));
                }
                if is_given_up {
                    return Err(not_ready("its memory is still to be mapped"));
                }
                Ok(None)
            }
            state @ (State::Ready { owner: Some(owner), .. }
            | State::Waiting { owner: Some(owner), .. })
                if owner != uid =>
            {
                // The device is free at once; the memory is made anew.
                entry.state = state;
                entry.renew(slot, &class, &mut self.jobs);
                Err(not_ready("its memory was another user's and is made anew"))
            }
            State::Ready { memory, owner, prepinned: Some(prepinned) } => {
                let differs = layout_differs(&address, &prepinned.grant.regions, request);
                entry.state = State::Ready { memory, owner, prepinned: Some(prepinned) };
                if let Some(text) = differs {
                    self.leave_device(slot, now);
                    return Err((Refusal::NoSuchSlot, text));
                }
                Ok(Some(slot))
            }
            // The client that asks for it does not have the device: the pool may get it at last, unless another VM is about
            // to open it.
            State::Waiting { memory, owner, .. } if !has_waited && !is_for_others => {
                self.jobs.push_back(entry.pin(slot, &class, memory, owner, RETRY_MIN));
                if let State::Pinning { asked, .. } = &mut entry.state {
                    asked.insert(lessee, now);
                }
                Ok(None)
            }
            other => {
                let why = match &other {
                    State::Leased { .. } => "a VM has it",
                    State::Lingering { .. } => "a process still has its memory",
                    State::Waiting { .. } | State::Leaving { .. } => {
                        "the pool does not have the device at the moment"
                    }
                    _ => "its memory is being made",
                };
                entry.state = other;
                self.leave_device(slot, now);
                Err(not_ready(why))
            }
        }
    }

    fn suits(&self, uid: u32, class: &Class, request: &TakePinned) -> Result<(), Refused> {
        if let Some(text) = memory_differs(class, request) {
            return Err((Refusal::NoSuchSlot, text));
        }
        let (limit, has) = (self.config.limits.of(uid, self.own_uid), self.held_by(uid));
        if has.saturating_add(class.size_bytes()) > limit {
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
        entry.stop_pinning(now);
        entry.state = match std::mem::replace(&mut entry.state, State::absent()) {
            State::Ready { memory, owner, prepinned: Some(prepinned) } => {
                self.jobs.push_back(Closing::Prepinned { slot, prepinned }.into());
                let then = AfterLeaving::Wait { at: now + HOLD_OFF, wait: RETRY_MIN };
                State::Leaving { memory, owner, has_device: true, then }
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
            State::Ready { memory, owner, prepinned: Some(prepinned) } => {
                match memory.iter().map(SlotMemory::lease).collect::<Result<Vec<_>, _>>() {
                    Ok(files) => {
                        entry.state = State::Leased { memory, uid, lessee, rest: Vec::new() };
                        let Prepinned { iommufd, device, grant } = prepinned;
                        let files = PinnedFiles { memory: files, iommufd, device };
                        Ok((Reply::GrantedPinned(grant), files))
                    }
                    Err(error) => {
                        entry.state = State::Ready { memory, owner, prepinned: Some(prepinned) };
                        Err((Refusal::Failed, error.to_string()))
                    }
                }
            }
            other => {
                entry.state = other;
                Err(gone())
            }
        }
    }

    /// Leases memory of a slot that its user was refused with the device: a VM of terabytes may find no other. The slot
    /// is that user's as a whole, zone by zone. `None` if there is none that fits.
    pub(super) fn lease_without_device(
        &mut self,
        lessee: Lessee,
        uid: u32,
        request: &Take,
    ) -> Option<(Reply, File)> {
        let room = self.config.limits.of(uid, self.own_uid).saturating_sub(self.held_by(uid));
        self.slots.iter_mut().find_map(|entry| {
            let class = self.config.classes.get(entry.class)?;
            entry.left_for.get(&lessee).filter(|is_wanted| **is_wanted)?;
            let (memory, mut rest) = match &entry.state {
                // What is still mapped is closed without the device, and keeps the memory from being used again.
                State::Waiting { memory, owner, .. }
                | State::Leaving {
                    memory,
                    owner,
                    has_device: false,
                    then: AfterLeaving::Wait { .. },
                } if owner.is_none_or(|owner| owner == uid) && class.size_bytes() <= room => {
                    (memory, (0..class.zones.len()).collect::<Vec<_>>())
                }
                State::Leased { memory, lessee: other, rest, .. } if *other == lessee => {
                    (memory, rest.clone())
                }
                _ => return None,
            };
            let (part, zone) = rest.iter().find_map(|part| {
                let zone = class.zones.get(*part)?;
                let fits = zone.size_bytes == request.size_bytes
                    && zone.pages.suits(request.pages)
                    && request.node.is_none_or(|node| zone.node == Some(node));
                fits.then_some((*part, zone))
            })?;
            let file = memory.get(part)?.lease().ok()?;
            let reply = Reply::Granted { size_bytes: zone.size_bytes, pages: zone.pages };
            rest.retain(|other| *other != part);
            entry.state = match std::mem::replace(&mut entry.state, State::absent()) {
                State::Waiting { memory, .. }
                | State::Leaving { memory, .. }
                | State::Leased { memory, .. } => State::Leased { memory, uid, lessee, rest },
                other => other,
            };
            Some((reply, file))
        })
    }

    /// A worker has mapped memory for its device, or could not: then the device is closed, and the iommufd about to be.
    pub(super) fn pinned(
        &mut self,
        slot: usize,
        memory: Vec<SlotMemory>,
        result: Result<Prepinned, PinError>,
        now: Instant,
    ) {
        let Some(entry) = self.slots.get_mut(slot) else { return };
        let (owner, wait, is_stopped) = match &entry.state {
            State::Pinning { owner, wait, order, .. } => (*owner, *wait, order.is_stopped()),
            _ => (None, RETRY_MIN, false),
        };
        if is_stopped {
            // Its user may have it from now on, also one that did not wait for the answer.
            entry.hold_off = Some(now + HOLD_OFF);
        }
        entry.state = match result {
            Ok(prepinned) => {
                entry.problem = None;
                State::Ready { memory, owner, prepinned: Some(prepinned) }
            }
            Err(error) => {
                let (has_device, next) = (false, (wait * 2).min(DEVICE_RETRY_MAX));
                let then = AfterLeaving::Wait { at: now + wait, wait: next };
                let problem = error_text::chain(&error);
                if matches!(error, PinError::Stopped(_)) {
                    log::info!("a slot is mapped later: {problem}");
                } else {
                    self.counters.pin_failures += 1;
                    // It is the same every time while a VM has the device.
                    if entry.problem.as_ref() != Some(&problem) {
                        log::warn!("a slot waits for its device: {problem}");
                    }
                    entry.problem = Some(problem);
                }
                State::Leaving { memory, owner, has_device, then }
            }
        };
        // It was done before it was told; a user waits for the device all the same.
        if is_stopped && matches!(entry.state, State::Ready { .. }) {
            self.leave_device(slot, now);
        }
    }

    /// A worker has closed the device of a slot.
    pub(super) fn released(&mut self, slot: usize) {
        let state = self.slots.get_mut(slot).map(|slot| &mut slot.state);
        if let Some(State::Leaving { has_device, .. }) = state {
            *has_device = false;
        }
    }

    /// Nothing of a slot is mapped any more.
    pub(super) fn unpinned(&mut self, slot: usize) {
        let Some(class) = self.class_of(slot).cloned() else { return };
        let Some(entry) = self.slots.get_mut(slot) else { return };
        entry.state = match std::mem::replace(&mut entry.state, State::absent()) {
            State::Leaving { memory, owner, then: AfterLeaving::Wait { at, wait }, .. } => {
                State::Waiting { memory, owner, at, wait }
            }
            State::Leaving { memory, owner, then: AfterLeaving::Renew, .. } => {
                let at = Instant::now();
                entry.state = State::Waiting { memory, owner, at, wait: RETRY_MIN };
                return entry.renew(slot, &class, &mut self.jobs);
            }
            other => other,
        };
    }
}

/// What of the memory of a slot is not as a VM has it.
fn memory_differs(class: &Class, request: &TakePinned) -> Option<String> {
    let address = class.device.as_ref().map(|device| device.address.to_string());
    let address = address.unwrap_or_default();
    let rule = "it has to be all memory of the VM, of its pages, on its nodes";
    let (own, wanted) = (class.zones.len(), request.zones.len());
    if wanted == 0 {
        return Some(format!(
            "device {address} alone was asked for, by a VM that has its memory or a VMM that knows no slots as this pool \
             has them"
        ));
    }
    if own != wanted {
        return Some(format!(
            "the slot of device {address} has memory for {own} zones, and the VM has {wanted}: {rule}"
        ));
    }
    let mut both = class.zones.iter().zip(&request.zones).enumerate();
    both.find_map(|(index, (zone, wanted))| {
        let fits = zone.size_bytes == wanted.size_bytes
            && zone.pages.suits(wanted.pages)
            && wanted.node.is_none_or(|node| zone.node == Some(node));
        let shown = |node: Option<u32>| {
            node.map_or_else(|| "any node".to_owned(), |node| format!("node {node}"))
        };
        (!fits).then(|| {
            format!(
                "the slot of device {address} has {} bytes of pages '{}' of {} for zone {index}, and the VM has {} \
                 bytes of {:?} pages of {}: {rule}",
                zone.size_bytes,
                zone.pages.name(),
                shown(zone.node),
                wanted.size_bytes,
                wanted.pages,
                shown(wanted.node),
            )
        })
    })
}

/// Where memory is mapped that a VM has elsewhere.
fn layout_differs(device: &str, own: &[PinnedRegion], request: &TakePinned) -> Option<String> {
    let wanted = &request.regions;
    let at = (0..own.len().max(wanted.len())).find(|at| own.get(*at) != wanted.get(*at))?;
    let shown = |regions: &[PinnedRegion]| {
        let region = regions.get(at);
        region.map_or_else(
            || "nothing more".to_owned(),
            |region| format!("{} bytes at {:#x}", region.len_bytes, region.gpa),
        )
    };
    Some(format!(
        "the slot of device {device} is mapped at other guest addresses than the VM has its memory at: {} where the VM has \
         {} (compare high_hole of the slot and of the VM's --memory)",
        shown(own),
        shown(wanted),
    ))
}

#[cfg(test)]
#[path = "pinned_tests.rs"]
mod tests;
