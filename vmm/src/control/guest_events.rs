// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue of guest events, from the moment at which the machine reports one to the moment at which it is
//! acted on.
//!
//! Owns the queue and the rule that says when each event is acted on. An event belongs
//! to one machine, by number: it must never reach another, and is never lost while its machine
//! exists, whatever owns that machine meanwhile.
//!
//! ```text
//!  machine is    lent to a thread,   paused            pages arriving     runs
//!                not started yet
//!  Reset         waits               waits             waits              reboots it
//!  TripleFault   waits               waits             waits              reboots it
//!  Watchdog      waits               waits             waits              reboots it
//!  Shutdown      waits               waits             waits              ends it
//!  VcpuStopped   waits               waits             ends the process   ends the process
//!  Ejected       waits               taken apart       waits              taken apart
//!  Withheld      waits               announced         waits              announced
//!  LongMapping   waits               withheld          waits              withheld
//!  DeviceWanted  waits               guest is asked    guest is asked     guest is asked
//!  DiskFull      waits               told              waits              told, pauses it
//! ```
//!
//! From the last page until the source has been told of it, everything waits.
//! A paused VM changes only when it is asked to. A reset that was on its way when the pause was
//! answered is therefore carried out after `vm.resume`, not before. A guest that resets again and again waits for
//! each ([`super::reset_pace`]). A VM that was paused for a full disk, and
//! continues by itself, is none of these: its guest ends and reboots as if it ran. The clock of a watchdog stands
//! while pages arrive or are lost, and in an on-demand restore, so that it runs out at no such time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{GuestPages, Next, RunError, VmLifecycle, Vmm};
use crate::events;
use crate::machine::GuestEvent;

/// State of the machine as to which guest events can be acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MachineStatus {
    /// Running, with all memory resident.
    Running,
    /// Paused by request.
    Paused,
    /// May run; some pages are still missing.
    AwaitingPages,
    /// The last page has come; the VMM thread is told once the source has been.
    PagesComplete,
    /// Some pages are lost: it can never be torn down.
    LackingPages,
    /// Owned by another thread, or not started yet.
    Elsewhere,
    /// Not in this process, or it can never run here again.
    Gone,
}

/// Guest events not acted on yet, in order of arrival, each with the number of its machine and the time of
/// its arrival.
#[derive(Debug, Default)]
pub struct GuestEvents {
    waiting: VecDeque<(u64, GuestEvent, Instant)>,
}

/// Whether the event ends or replaces the guest.
fn ends_the_guest(event: &GuestEvent) -> bool {
    match event {
        GuestEvent::Reset
        | GuestEvent::TripleFault { .. }
        | GuestEvent::WatchdogExpired
        | GuestEvent::Shutdown
        | GuestEvent::VcpuStopped { .. } => true,
        GuestEvent::Ejected
        | GuestEvent::WithheldDevice
        | GuestEvent::LongMapping { .. }
        | GuestEvent::DeviceWanted { .. }
        | GuestEvent::DiskFull { .. }
        | GuestEvent::Panicked { .. } => false,
    }
}

/// Whether the event replaces the guest's machine.
fn resets(event: &GuestEvent) -> bool {
    ends_the_guest(event) && !matches!(event, GuestEvent::Shutdown | GuestEvent::VcpuStopped { .. })
}

impl MachineStatus {
    fn may_act_on(self, event: &GuestEvent) -> bool {
        match self {
            Self::Running => true,
            Self::Paused => !ends_the_guest(event),
            Self::AwaitingPages | Self::LackingPages => {
                matches!(event, GuestEvent::VcpuStopped { .. } | GuestEvent::DeviceWanted { .. })
            }
            Self::PagesComplete | Self::Elsewhere | Self::Gone => false,
        }
    }
}

impl GuestEvents {
    fn note(&mut self, number: u64, event: GuestEvent, at: Instant) {
        if let GuestEvent::DiskFull { id } = &event {
            // The same event may arrive many times while it waits, as during a migration.
            let is_same = |(of, waiting, _): &(u64, GuestEvent, Instant)| {
                *of == number
                    && matches!(waiting, GuestEvent::DiskFull { id: other } if other == id)
            };
            if self.waiting.iter().any(is_same) {
                return;
            }
        }
        self.waiting.push_back((number, event, at));
    }

    /// The next event of machine `number` that can be acted on in this state; drops those of other
    /// machines. An event that ends the guest is never overtaken by a later one that does so too.
    fn next(
        &mut self,
        number: u64,
        machine: MachineStatus,
        may_reset: bool,
    ) -> Option<(GuestEvent, Instant)> {
        self.waiting.retain(|(of, ..)| *of == number && machine != MachineStatus::Gone);
        let mut end_waits = false;
        let is_next = |(_, event, _): &(u64, GuestEvent, Instant)| {
            let ends = ends_the_guest(event);
            let may_act = machine.may_act_on(event) && (may_reset || !resets(event));
            if may_act && !(ends && end_waits) {
                return true;
            }
            end_waits |= ends;
            false
        };
        let at = self.waiting.iter().position(is_next)?;
        self.waiting.remove(at).map(|(_, event, told)| (event, told))
    }
}

impl Vmm {
    fn machine_status(&self) -> MachineStatus {
        match (&self.vm, &self.pages) {
            // What comes next is that all pages are here.
            (VmLifecycle::Live(_), _) if self.has_unprocessed_pages() => {
                MachineStatus::PagesComplete
            }
            (VmLifecycle::Live(_), GuestPages::Arriving { .. }) => MachineStatus::AwaitingPages,
            (VmLifecycle::Live(_), GuestPages::Lost(_)) => MachineStatus::LackingPages,
            (VmLifecycle::Live(machine), GuestPages::Resident)
                if machine.is_paused() && !self.waits_for_room() =>
            {
                MachineStatus::Paused
            }
            (VmLifecycle::Live(_), GuestPages::Resident) => MachineStatus::Running,
            (
                VmLifecycle::Migrating { .. }
                | VmLifecycle::Busy(_)
                | VmLifecycle::Starting(_)
                | VmLifecycle::Transitioning(_)
                | VmLifecycle::Receiving(_)
                | VmLifecycle::NotStarted { .. }
                | VmLifecycle::Unanswered(_),
                _,
            ) => MachineStatus::Elsewhere,
            (
                VmLifecycle::None
                | VmLifecycle::Created(_)
                | VmLifecycle::TearingDown(_)
                | VmLifecycle::Serving(_)
                | VmLifecycle::HandedOver { .. },
                _,
            ) => MachineStatus::Gone,
        }
    }

    /// Queues an event of the guest of machine `number` for [`Self::act_on_guest`].
    pub(super) fn note_guest_event(&mut self, number: u64, event: GuestEvent, at: Instant) {
        if number != self.machine_number {
            return;
        }
        if let VmLifecycle::Migrating { sending, .. } = &self.vm
            && ends_the_guest(&event)
        {
            log::info!(
                "the guest ends or reboots while it is migrated: the migration is cancelled"
            );
            sending.cancel.cancel();
        }
        if let GuestEvent::DiskFull { id } = &event {
            self.report_full_disk(id);
        }
        if let GuestEvent::Panicked { event } = event {
            log::warn!("the guest reported an event to its panic device: {event}");
            // It does not change the VM, so it needs no order with other requests.
            return events::emit("guest", "panic", &[("event", event)]);
        }
        let machine = self.machine_status();
        if !machine.may_act_on(&event) {
            match machine {
                MachineStatus::AwaitingPages | MachineStatus::PagesComplete => {
                    log::info!("the guest's {event:?} waits until its last page is here");
                }
                MachineStatus::LackingPages => {
                    log::warn!(
                        "the guest's {event:?} has no effect, as pages of the guest are lost"
                    );
                }
                MachineStatus::Paused => {
                    log::info!("the guest's {event:?} waits until the VM is resumed");
                }
                MachineStatus::Running | MachineStatus::Elsewhere | MachineStatus::Gone => {}
            }
        }
        self.guest_events.note(number, event, at);
    }

    /// Acts on all queued guest events that the machine's state allows.
    pub(super) fn act_on_guest(&mut self) -> Next {
        loop {
            // Read again in each iteration: the last action may have replaced the machine.
            let (number, machine) = (self.machine_number, self.machine_status());
            let may_reset = self.reset_pace.waits_until(Instant::now()).is_none();
            let Some((event, told)) = self.guest_events.next(number, machine, may_reset) else {
                return Next::Continue;
            };
            if resets(&event) {
                self.reset_pace.count(Instant::now());
            }
            match self.act_on(event, told) {
                Next::Continue => {}
                other => return other,
            }
        }
    }

    /// When [`Self::act_on_guest`] has to be called next, for a reset that came too soon.
    pub(super) fn resets_at(&self) -> Option<Instant> {
        let (number, machine) = (self.machine_number, self.machine_status());
        let is_due = |(of, event, _): &(u64, GuestEvent, Instant)| {
            *of == number && resets(event) && machine.may_act_on(event)
        };
        if !self.guest_events.waiting.iter().any(is_due) {
            return None;
        }
        let now = Instant::now();
        // It may have become due since the last turn of the event loop.
        Some(self.reset_pace.waits_until(now).unwrap_or(now))
    }

    fn report_triple_fault(&mut self, vcpu: u32, at: Instant) {
        let ran = match &self.vm {
            // How long a guest has run that was started elsewhere is unknown.
            VmLifecycle::Live(machine) if self.started_number == self.machine_number => {
                let first_run = machine.first_run();
                Some(first_run.map_or(Duration::ZERO, |first| at.saturating_duration_since(first)))
            }
            _ => None,
        };
        let noted = self.triple_faults.note(self.machine_number, vcpu, ran, Instant::now());
        if let Some(text) = noted.text {
            log::warn!("{text}");
        }
        let (vcpu, in_a_row) = (vcpu.to_string(), noted.in_a_row.to_string());
        let ran_ms = ran.map(|ran| ran.as_millis().to_string());
        let mut properties = vec![("vcpu", vcpu.as_str()), ("in_a_row", &in_a_row)];
        properties.extend(ran_ms.as_deref().map(|ran_ms| ("ran_ms", ran_ms)));
        events::emit("guest", "triple-fault", &properties);
    }

    fn act_on(&mut self, event: GuestEvent, told: Instant) -> Next {
        match event {
            GuestEvent::Reset => self.reboot_for(None),
            GuestEvent::TripleFault { index } => {
                self.report_triple_fault(index, told);
                self.reboot_for(None)
            }
            GuestEvent::WatchdogExpired => {
                log::warn!("the guest did not reset its watchdog in time, and is reset");
                events::emit("guest", "watchdog-expired", &[]);
                self.reboot_for(None)
            }
            GuestEvent::Shutdown => {
                log::info!("the guest has shut down");
                self.shutdown_for(None)
            }
            GuestEvent::Ejected => {
                self.devices_ejected();
                Next::Continue
            }
            GuestEvent::WithheldDevice => {
                if let VmLifecycle::Live(machine) = &self.vm
                    && machine.withholds_devices()
                {
                    self.devices_ejected();
                }
                Next::Continue
            }
            GuestEvent::LongMapping { left } => {
                if let VmLifecycle::Live(machine) = &mut self.vm {
                    machine.withhold_unseen(left);
                }
                Next::Continue
            }
            GuestEvent::DeviceWanted { id } => {
                if let Err(error) = self.remove_device(&id) {
                    log::warn!("the guest cannot be asked to eject '{id}': {error}");
                }
                Next::Continue
            }
            GuestEvent::Panicked { .. } => Next::Continue,
            GuestEvent::DiskFull { .. } => {
                self.disk_is_full();
                Next::Continue
            }
            GuestEvent::VcpuStopped { index, reason } => {
                events::emit("guest", "panic", &[("vcpu", &index.to_string())]);
                let pmem = match &self.vm {
                    VmLifecycle::Live(machine) => machine.pmem_behind(&reason),
                    _ => None,
                };
                let reason = match pmem {
                    Some(pmem) => format!("{reason:?}; {pmem}"),
                    None => format!("{reason:?}"),
                };
                self.end_with_machine(Some(RunError::VcpuStopped { index, reason }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hypervisor::StopReason;

    use super::*;

    fn stopped() -> GuestEvent {
        GuestEvent::VcpuStopped { index: 0, reason: StopReason::Halted }
    }

    fn wanted() -> GuestEvent {
        GuestEvent::DeviceWanted { id: "nic".to_owned() }
    }

    /// All events that can be acted on in this state of machine 7, in order.
    fn all(events: &mut GuestEvents, machine: MachineStatus) -> Vec<String> {
        let next = || events.next(7, machine, true);
        std::iter::from_fn(next).map(|(event, _)| format!("{event:?}")).collect()
    }

    fn of_seven(events: impl IntoIterator<Item = GuestEvent>) -> GuestEvents {
        let now = Instant::now();
        GuestEvents { waiting: events.into_iter().map(|event| (7, event, now)).collect() }
    }

    #[test]
    fn what_comes_before_the_machine_is_here_waits_in_order() {
        let mut events = of_seven([GuestEvent::Ejected, wanted(), GuestEvent::Shutdown]);
        assert_eq!(all(&mut events, MachineStatus::Elsewhere), [""; 0]);
        let expected = ["Ejected", "DeviceWanted { id: \"nic\" }", "Shutdown"];
        assert_eq!(all(&mut events, MachineStatus::Running), expected);
        assert_eq!(all(&mut events, MachineStatus::Running), [""; 0], "an event is acted on once");
    }

    #[test]
    fn events_of_a_machine_that_is_gone_reach_no_other() {
        // A reboot has replaced machine 6 by machine 7: later events of 6 are void.
        for late in [GuestEvent::Reset, stopped(), GuestEvent::Shutdown, wanted()] {
            let mut events = GuestEvents::default();
            events.note(6, GuestEvent::Reset, Instant::now());
            events.note(6, late, Instant::now());
            assert!(matches!(
                events.next(6, MachineStatus::Running, true),
                Some((GuestEvent::Reset, _))
            ));
            assert_eq!(all(&mut events, MachineStatus::Running), [""; 0]);
            assert!(events.waiting.is_empty());
        }
        let mut events = of_seven([GuestEvent::Reset]);
        assert_eq!(all(&mut events, MachineStatus::Gone), [""; 0]);
        assert_eq!(all(&mut events, MachineStatus::Running), [""; 0]);
    }

    #[test]
    fn a_paused_vm_neither_ends_nor_reboots_until_it_is_resumed() {
        let triple_fault = GuestEvent::TripleFault { index: 1 };
        let watchdog = GuestEvent::WatchdogExpired;
        for ending in [GuestEvent::Reset, triple_fault, watchdog, GuestEvent::Shutdown, stopped()] {
            let name = format!("{ending:?}");
            let mut events = of_seven([ending, GuestEvent::Ejected]);
            assert_eq!(all(&mut events, MachineStatus::Paused), ["Ejected"], "{name}");
            assert_eq!(all(&mut events, MachineStatus::Running), [name]);
        }
    }

    #[test]
    fn a_reset_that_comes_too_soon_waits_and_nothing_that_ends_the_guest_overtakes_it() {
        let mut events = of_seven([GuestEvent::Reset, GuestEvent::Shutdown, GuestEvent::Ejected]);
        let next = |events: &mut GuestEvents, may_reset| {
            let next = events.next(7, MachineStatus::Running, may_reset);
            next.map(|(event, _)| format!("{event:?}"))
        };
        assert_eq!(next(&mut events, false).as_deref(), Some("Ejected"));
        assert_eq!(next(&mut events, false), None);
        assert_eq!(next(&mut events, true).as_deref(), Some("Reset"));
        assert_eq!(next(&mut events, false).as_deref(), Some("Shutdown"));
    }

    #[test]
    fn a_full_disk_waits_for_the_machine_and_is_told_once() {
        let full = |id: &str| GuestEvent::DiskFull { id: id.to_owned() };
        let mut events = GuestEvents::default();
        for id in ["a", "b", "a", "a"] {
            events.note(7, full(id), Instant::now());
        }
        for machine in
            [MachineStatus::Elsewhere, MachineStatus::AwaitingPages, MachineStatus::LackingPages]
        {
            assert_eq!(all(&mut events, machine), [""; 0]);
        }
        let told = all(&mut events, MachineStatus::Paused);
        assert_eq!(told, ["DiskFull { id: \"a\" }", "DiskFull { id: \"b\" }"]);
        events.note(7, full("a"), Instant::now());
        assert_eq!(all(&mut events, MachineStatus::Running).len(), 1, "it is full again");
    }

    #[test]
    fn while_pages_arrive_the_first_end_is_the_one_that_counts() {
        let mut events = of_seven([GuestEvent::Reset, stopped(), wanted(), GuestEvent::Ejected]);
        let now = all(&mut events, MachineStatus::AwaitingPages);
        assert_eq!(now, ["DeviceWanted { id: \"nic\" }"]);
        assert!(matches!(
            events.next(7, MachineStatus::Running, true),
            Some((GuestEvent::Reset, _))
        ));
        let mut events = of_seven([GuestEvent::Ejected, stopped()]);
        let now = all(&mut events, MachineStatus::AwaitingPages);
        assert_eq!(now.len(), 1, "a vCPU that cannot continue waits for no page: {now:?}");
    }
}
