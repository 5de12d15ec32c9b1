// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pausing the VM while the storage of a disk is full, and resuming it when there is space.
//!
//! Owns what has been told of full disks, and when it is looked for room: no storage tells of it. What looks is
//! a thread of its own ([`TransitionKind::Retry`]), as storage may not answer. Must never let a VM go
//! on that a client has paused, nor write to its disks.
//!
//! ```text
//!            DiskFull              there is room, or vm.resume and there is
//!   runs ---------------> paused ------------------------------------------> runs
//!                           |  ^ there is none: looks again later, at most MAX after
//!                           +--+
//!                           |  vm.pause
//!                           v
//!                         paused by a client: continues at vm.resume, if there is room
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::pausing::{Transition, TransitionKind};
use super::{GuestPages, VmLifecycle, Vmm, emit};
use crate::events;
use crate::machine::FullDiskStatus;

/// Time until the first check for free space.
const FIRST: Duration = Duration::from_millis(500);
/// Longest time between two checks; each interval is twice the one before.
const MAX: Duration = Duration::from_secs(5);
/// A VM that has run for so long was not paused again by the same lack of space.
const CALM: Duration = Duration::from_secs(30);
/// Time until the next attempt to pause a VM of which another device did not finish its requests; the other
/// devices keep serving the guest meanwhile.
const UNSTOPPED: Duration = Duration::from_mins(1);

/// State of the full disks of the live machine.
#[derive(Debug)]
pub struct FullDisks {
    /// Number of the machine; entries of another machine are void.
    machine: u64,
    /// Disks reported as full, by id.
    told: BTreeMap<String, PathBuf>,
    /// The VM was paused because of them, and resumes automatically.
    is_ours: bool,
    /// When the next check is due.
    next: Instant,
    /// Time between the last check and the next.
    interval: Duration,
    /// When a check last found free space.
    room_at: Option<Instant>,
    /// No attempt to pause the VM before this time: another device did not finish in time.
    not_before: Option<Instant>,
}

impl Default for FullDisks {
    fn default() -> Self {
        Self {
            machine: 0,
            told: BTreeMap::new(),
            is_ours: false,
            next: Instant::now(),
            interval: FIRST,
            room_at: None,
            not_before: None,
        }
    }
}

impl FullDisks {
    /// Records the full disks of a machine; returns those that are new.
    fn note(
        &mut self,
        machine: u64,
        full: Vec<FullDiskStatus>,
        now: Instant,
    ) -> Vec<FullDiskStatus> {
        if self.machine != machine {
            *self = Self { machine, ..Self::default() };
        }
        if self.told.is_empty() && !full.is_empty() {
            let soon_again = |at| now.saturating_duration_since(at) < CALM;
            // Keeps a guest that gains a little space at a time from being paused and resumed twice a
            // second.
            let is_again = self.room_at.take().is_some_and(soon_again);
            self.interval = if is_again { (self.interval * 2).min(MAX) } else { FIRST };
            self.next = now + self.interval;
        }
        let told = &mut self.told;
        let is_new =
            |disk: &FullDiskStatus| told.insert(disk.id.clone(), disk.path.clone()).is_none();
        full.into_iter().filter(is_new).collect()
    }

    /// Whether the machine may be paused for a full disk now.
    fn may_stop(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }

    /// Records that the machine could not be paused; the next check is later.
    fn cannot_stop(&mut self, now: Instant) {
        self.next = now + UNSTOPPED;
        self.not_before = Some(self.next);
    }

    /// Whether this paused machine resumes automatically.
    fn is_waiting(&self, machine: u64) -> bool {
        self.is_ours && self.machine == machine
    }

    /// Doubles the interval after a check that found no space.
    fn look_later(&mut self, now: Instant) {
        self.interval = (self.interval * 2).min(MAX);
        self.next = now + self.interval;
    }

    /// Records that there is space; returns the disks that were full.
    fn clear(&mut self, machine: u64, now: Instant) -> BTreeMap<String, PathBuf> {
        if self.machine != machine {
            return BTreeMap::new();
        }
        self.is_ours = false;
        self.room_at = Some(now);
        std::mem::take(&mut self.told)
    }
}

fn tell(event: &'static str, id: &str, path: &std::path::Path) {
    events::emit("vm", event, &[("id", id), ("path", &path.display().to_string())]);
}

impl Vmm {
    /// Emits the event of a full disk at once, also when the machine cannot be paused now, as during a
    /// migration.
    pub(super) fn report_full_disk(&mut self, id: &str) {
        let config = match &self.vm {
            VmLifecycle::Live(machine) => machine.config(),
            VmLifecycle::Migrating { info, .. }
            | VmLifecycle::Transitioning(Transition { info, .. }) => &info.config,
            _ => return,
        };
        let mut disks = config.disks.iter().flatten();
        let disk = disks.find(|disk| disk.id.as_deref() == Some(id));
        let path = disk.and_then(|disk| disk.path.clone()).unwrap_or_default();
        let full = FullDiskStatus { id: id.to_owned(), path, requests: 1 };
        self.report_full(vec![full]);
    }

    fn report_full(&mut self, full: Vec<FullDiskStatus>) {
        for disk in self.full.note(self.machine_number, full, Instant::now()) {
            tell("disk-full", &disk.id, &disk.path);
            let (id, path) = (&disk.id, disk.path.display());
            log::warn!("disk '{id}' ({path}) is full: requests of the guest wait for free space");
        }
    }

    /// Handles requests that wait for free space: pauses the machine if it runs.
    pub(super) fn disk_is_full(&mut self) {
        let VmLifecycle::Live(machine) = &self.vm else { return };
        let (full, is_paused) = (machine.full_disks(), machine.is_paused());
        if full.is_empty() {
            // The driver has reset the device in the meantime, or a retry succeeded.
            return;
        }
        self.report_full(full);
        if !is_paused && self.full.may_stop(Instant::now()) {
            emit("pausing");
            self.begin_transition(TransitionKind::Full, None);
        }
    }

    /// Records that the machine was paused for a full disk.
    pub(super) fn stopped_for_room(&mut self) {
        self.full.is_ours = true;
        emit("paused");
    }

    /// Records that the machine could not be paused for a full disk, as another device did not finish; it
    /// keeps running.
    pub(super) fn cannot_stop_for_room(&mut self) {
        self.full.cannot_stop(Instant::now());
    }

    /// Records that the waiting requests have space and the machine runs.
    pub(super) fn found_room(&mut self) {
        for (id, path) in self.full.clear(self.machine_number, Instant::now()) {
            tell("disk-has-room", &id, &path);
            log::info!("disk '{id}' ({}) has free space again", path.display());
        }
    }

    /// Records that there is still no space.
    pub(super) fn found_no_room(&mut self) {
        self.full.look_later(Instant::now());
    }

    /// Ends the automatic resume: the VM stays paused until a client resumes it.
    pub(super) fn look_for_no_room(&mut self) {
        self.full.is_ours = false;
    }

    /// Whether the machine is paused for a full disk and resumes automatically.
    pub(super) fn waits_for_room(&self) -> bool {
        matches!(&self.vm, VmLifecycle::Live(machine) if machine.is_paused())
            && self.full.is_waiting(self.machine_number)
    }

    /// When the next check for free space is due.
    pub(super) fn looks_for_room_at(&self) -> Option<Instant> {
        let VmLifecycle::Live(machine) = &self.vm else { return None };
        let is_told = self.full.machine == self.machine_number && !self.full.told.is_empty();
        // A running machine could not be paused, as another device did not finish.
        let looks = self.full.is_ours || !machine.is_paused();
        (is_told && looks && matches!(self.pages, GuestPages::Resident)).then_some(self.full.next)
    }

    /// Checks for free space, if the check is due.
    pub(super) fn look_for_room(&mut self) {
        if self.looks_for_room_at().is_none_or(|at| at > Instant::now()) {
            return;
        }
        let VmLifecycle::Live(machine) = &self.vm else { return };
        if machine.is_paused() {
            self.begin_transition(TransitionKind::Retry, None);
        } else if machine.full_disks().is_empty() {
            self.found_room();
        } else {
            self.found_no_room();
            self.disk_is_full();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(ids: &[&str]) -> Vec<FullDiskStatus> {
        let status = |id: &&str| FullDiskStatus {
            id: (*id).to_owned(),
            path: format!("/images/{id}").into(),
            requests: 1,
        };
        ids.iter().map(status).collect()
    }

    #[test]
    fn each_full_disk_is_told_once_until_there_was_room() {
        let (mut disks, now) = (FullDisks::default(), Instant::now());
        assert_eq!(disks.note(7, full(&["a"]), now), full(&["a"]));
        assert_eq!(disks.note(7, full(&["a", "b"]), now), full(&["b"]));
        assert_eq!(disks.note(7, full(&["b"]), now), []);
        let had_none: Vec<_> = disks.clear(7, now).into_keys().collect();
        assert_eq!(had_none, ["a", "b"]);
        assert_eq!(disks.note(7, full(&["a"]), now), full(&["a"]));
        // Another machine has disks of its own.
        assert_eq!(disks.note(8, full(&["a"]), now), full(&["a"]));
        assert!(disks.clear(7, now).is_empty());
        assert_eq!(disks.clear(8, now).len(), 1);
    }

    #[test]
    fn a_machine_that_does_not_stop_runs_on_for_a_while() {
        let (mut disks, now) = (FullDisks::default(), Instant::now());
        disks.note(1, full(&["a"]), now);
        assert!(disks.may_stop(now));
        disks.cannot_stop(now);
        // Also when it is full once more, or another disk is.
        disks.note(1, full(&["a", "b"]), now + FIRST);
        assert!(!disks.may_stop(now + FIRST));
        assert!(disks.next >= now + UNSTOPPED && disks.may_stop(disks.next));
        // Another machine has other devices.
        disks.note(2, full(&["a"]), now + FIRST);
        assert!(disks.may_stop(now + FIRST));
    }

    #[test]
    fn looks_are_further_and_further_apart_and_never_more_than_seconds() {
        let (mut disks, mut now) = (FullDisks::default(), Instant::now());
        disks.note(1, full(&["a"]), now);
        let mut waits = Vec::new();
        for _ in 0..6 {
            waits.push((disks.next - now).as_millis());
            now = disks.next;
            disks.look_later(now);
        }
        assert_eq!(waits, [500, 1000, 2000, 4000, 5000, 5000]);
        // Full again at once: no sooner than before. After a while: as the first time.
        disks.clear(1, now);
        disks.note(1, full(&["a"]), now);
        assert_eq!(disks.next - now, MAX);
        disks.clear(1, now);
        now += CALM;
        disks.note(1, full(&["a"]), now);
        assert_eq!(disks.next - now, FIRST);
    }

    #[test]
    fn a_machine_resumes_by_itself_only_if_it_was_paused_for_it() {
        let (mut disks, now) = (FullDisks::default(), Instant::now());
        disks.note(3, full(&["a"]), now);
        assert!(!disks.is_waiting(3), "a client has paused it");
        disks.is_ours = true;
        assert!(disks.is_waiting(3));
        assert!(!disks.is_waiting(4));
        disks.note(4, full(&["a"]), now);
        assert!(!disks.is_waiting(4), "the machine before it was");
    }
}
