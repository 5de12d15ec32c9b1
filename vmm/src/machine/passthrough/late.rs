// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Passed-through devices that are still being opened when the guest no longer waits for them.
//!
//! The guest runs without them, and everything can be done with its VM but what needs their state. Each has its place on
//! the bus and is withheld there. When it is open it is put on the bus, still withheld, and announced with memory mapped;
//! one that cannot be opened is left out of the VM.
//!
//! Owns the devices until they are open, are removed, or the machine ends. Runs where the machine is at hand: a thread that
//! has opened one only tells so. Must never wait for such a thread.

use std::sync::Arc;

use pci::{Bdf, PciDevice};
use vfio::VfioError;

use super::openers::Abandoned;
use super::opening::{Opened, PendingDevice};
use super::starting::Place;
use super::{DiscardingDevices, Passthrough, PassthroughError, ban};
use crate::events;
use crate::machine::pausing::CancelToken;
use crate::machine::segments::Segments;
use crate::machine::virtio::PciContext;

impl Passthrough {
    /// Puts the devices on the bus that were opened late, withheld, and starts to map memory for them. What cannot be used
    /// is left out ([`Passthrough::take_unopened`]). Returns whether there are more devices than before.
    pub fn receive_late(
        &mut self,
        context: &PciContext<'_>,
        discarding: &dyn Fn() -> DiscardingDevices,
    ) -> bool {
        self.receive_late_at(&Place::of(context), discarding)
    }

    pub(super) fn receive_late_at(
        &mut self,
        place: &Place<'_>,
        discarding: &dyn Fn() -> DiscardingDevices,
    ) -> bool {
        let (mut at, mut is_any) = (0, false);
        // They come when the devices are gone that memory was mapped for, or could not be: an event follows either.
        while !self.is_abandoning_memory() && self.refused().is_empty() {
            let Some(pending) = self.late.get(at) else { break };
            let is_wanted = !self.is_withdrawn(pending.bdf());
            let Some(opened) = is_wanted.then(|| pending.take()).flatten() else {
                at += 1;
                continue;
            };
            let pending = self.late.remove(at);
            match self.plug_late(&pending, opened, place, discarding) {
                Ok(()) => is_any = true,
                Err(error) => self.note_unopened(place.segments, pending, &error),
            }
        }
        self.release_hold();
        is_any
    }

    fn plug_late(
        &mut self,
        pending: &PendingDevice,
        opened: Result<Opened, VfioError>,
        place: &Place<'_>,
        discarding: &dyn Fn() -> DiscardingDevices,
    ) -> Result<(), PassthroughError> {
        if opened.is_ok() {
            self.check_memory()?;
        }
        let bdf = pending.bdf();
        let device = self.receive(pending, opened, place)?;
        let on_bus: Arc<dyn PciDevice> = device;
        // The last of the other devices may have been removed.
        self.ban.get_or_insert_with(|| Arc::new(ban(place.ram)));
        let mapped = self.map_memory(place.ram, discarding(), &CancelToken::default());
        let plugged = mapped.and_then(|()| {
            let id = pending.id.clone();
            let delivered = place.segments.deliver(&on_bus, bdf);
            delivered.map_err(|source| PassthroughError::Bus { id, source })
        });
        plugged.inspect_err(|_| self.unplug(bdf, place.segments))?;
        self.withheld.has_opened(bdf);
        log::info!("the guest finds '{}' once memory is mapped", pending.id);
        Ok(())
    }

    /// Gives the number of a device back without which the guest goes on.
    fn note_unopened(
        &mut self,
        segments: &Segments,
        pending: PendingDevice,
        error: &PassthroughError,
    ) {
        let bdf = pending.bdf();
        segments.release(bdf);
        self.withheld.forget(bdf);
        let (id, why) = (pending.id, error_text::chain(error));
        log::error!("the VM goes on without '{id}': {why}");
        events::emit("vm", "passthrough-device-lost", &[("id", &id), ("error", &why)]);
        self.unopened.push((bdf, id));
        // What was begun for it has ended with it: the next one has a gate of its own.
        self.forget_memory_without_devices();
    }

    /// The devices that were left out, and are to be taken out of the configuration.
    pub fn take_unopened(&mut self) -> Vec<(Bdf, String)> {
        std::mem::take(&mut self.unopened)
    }

    /// Places and ids of the devices that are still being opened.
    pub fn late_devices(&self) -> impl Iterator<Item = (Bdf, &str)> {
        self.late.iter().map(|pending| (pending.bdf(), pending.id.as_str()))
    }

    /// Removes the late device at `bdf`, if there is one, and returns its id. The thread that opens it closes it then.
    pub(super) fn abandon_late(&mut self, bdf: Bdf, segments: &Segments) -> Option<String> {
        let at = self.late.iter().position(|pending| pending.bdf() == bdf)?;
        let pending = self.late.remove(at);
        segments.release(bdf);
        self.withheld.forget(bdf);
        let id = pending.id.clone();
        self.withdrawn.retain(Abandoned::is_in_use);
        self.withdrawn.push(pending.abandon());
        Some(id)
    }

    /// Whether anything may still be attached to the address space that is not one of the devices.
    pub(super) fn may_be_joined(&self) -> bool {
        let is_opening = !self.pending.is_empty() || !self.late.is_empty();
        is_opening || self.withdrawn.iter().any(Abandoned::is_in_use)
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        let pending = self.pending.drain(..).chain(self.late.drain(..));
        self.withdrawn.extend(pending.map(PendingDevice::abandon));
        self.withdrawn.retain(Abandoned::is_in_use);
        let hung = self.hung();
        if self.withdrawn.is_empty() && hung.is_empty() {
            // What is mapped ends with the address space.
            return;
        }
        if !self.withdrawn.is_empty() {
            log::warn!(
                "the host may still open a passed-through device for a VM that has ended: the device and the VM's \
                 memory stay in use until it has"
            );
        }
        for device in hung {
            log::warn!(
                "passed-through device '{}' hangs in a call for a VM that has ended: the device and the VM's memory stay in \
                 use until it has returned, and it reaches none of that memory",
                device.id()
            );
        }
        // The thread has a share of the address space, for as long as that takes.
        self.notices = None;
        super::outcome::read(&self.device_list).memory = None;
        self.pinning = None;
        for (_, device) in self.devices.drain(..) {
            device.disarm();
        }
        if let Some(space) = &self.space {
            space.unmap_all();
        }
        self.left.add(self.withdrawn.drain(..));
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use parking_lot::Mutex;
    use pci::{DeviceNumber, PciSegment};
    use vfio::PinState;
    use vfio::fakes::{FakeFunction, FakeTarget};
    use vfio::migration::DeviceState;

    use super::super::announcing::WaitsFor;
    use super::super::announcing::tests::held_target;
    use super::super::kept::tests::kept_in;
    use super::super::openers::OpenerPlace;
    use super::super::opening::tests::Gives;
    use super::super::starting::tests::{FakeMaker, Made};
    use super::*;
    use crate::config::{DeviceConfig, PinMode};

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_mins(1);

    fn at(number: u8) -> Bdf {
        Bdf::on_root_bus(0, DeviceNumber::new(number).unwrap())
    }

    /// A machine, and when something is to be decided.
    fn machine(target: FakeTarget) -> (Made, Receiver<()>) {
        let mut made = Made::new(target);
        let (tell, told) = channel();
        let tell = Mutex::new(tell);
        made.passthrough.sink = Arc::new(move |_| {
            let _ = tell.lock().send(());
        });
        (made, told)
    }

    /// With devices 7 and 8, which are late.
    fn both_late(target: FakeTarget) -> (Made, [Gives; 2], Receiver<()>) {
        let (mut made, told) = machine(target);
        let gives = [7, 8].map(|number| made.expect(&number.to_string(), number, PinMode::Auto));
        made.start_without_late();
        assert!(told.try_recv().is_ok(), "something may be open already");
        (made, gives, told)
    }

    /// With device 8 at work, which has all memory mapped, and device 7, which is late.
    fn one_late() -> (Made, Gives, Receiver<()>) {
        let (mut made, told) = machine(FakeTarget::default());
        let late = made.expect("7", 7, PinMode::Auto);
        made.expect("8", 8, PinMode::Auto).send(made.host()).unwrap();
        made.passthrough.pending[1].wait(PATIENCE);
        made.start_without_late();
        made.passthrough.await_memory(&|| false).unwrap();
        (made, late, told)
    }

    impl Made {
        /// As the owner of the machine does when it is told.
        fn receive_late(&mut self) -> bool {
            let Self { passthrough, ram, segments, .. } = self;
            let place = Place { make: &FakeMaker, segments, ram };
            passthrough.receive_late_at(&place, &DiscardingDevices::default)
        }

        /// Has a late device opened, and received.
        fn open(&mut self, id: &str, gives: &Gives) -> Arc<FakeFunction> {
            let host = self.host();
            gives.send(host.clone()).unwrap();
            self.wait(id);
            assert!(self.receive_late());
            host
        }

        fn wait(&self, id: &str) {
            let late = &self.passthrough.late;
            late.iter().find(|late| late.id == id).unwrap().wait(PATIENCE);
        }

        fn waits_for(&self) -> Vec<(String, WaitsFor)> {
            let withheld = self.passthrough.withheld_devices().into_iter();
            withheld.map(|it| (it.id, it.waits_for)).collect()
        }

        fn shown(&mut self) -> Vec<String> {
            let shown = self.passthrough.show_ready(&self.segments);
            shown.into_iter().map(|(_, id)| id).collect()
        }
    }

    fn is_free(segment: &PciSegment, number: u8) -> bool {
        segment.choose(DeviceNumber::new(number).ok(), "another").is_ok()
    }

    #[test]
    fn when_all_are_late_the_first_has_memory_mapped_and_each_is_announced_when_it_is_open() {
        let (mut made, [seven, eight], told) = both_late(FakeTarget::default());
        assert!(!made.receive_late() && made.passthrough.progress().is_none());
        let opening = |id: &str| (id.to_owned(), WaitsFor::Opening);
        assert_eq!(made.waits_for(), [opening("7"), opening("8")]);
        made.open("8", &eight);
        told.recv_timeout(PATIENCE).unwrap();
        assert_eq!(made.waits_for(), [("8".to_owned(), WaitsFor::Memory), opening("7")]);
        made.passthrough.await_memory(&|| false).unwrap();
        assert_eq!(made.shown(), ["8"]);
        assert!(made.sees(8) && !made.sees(7));
        made.open("7", &seven);
        assert_eq!(made.shown(), ["7"], "memory is mapped already");
        assert!(made.sees(7) && made.waits_for().is_empty());
        assert!(!made.passthrough.may_be_joined());
    }

    #[test]
    fn its_opener_tells_that_it_is_open_or_cannot_be() {
        for fails in [false, true] {
            let (made, [seven, _], told) = both_late(FakeTarget::default());
            while told.try_recv().is_ok() {}
            if fails {
                drop(seven);
            } else {
                seven.send(made.host()).unwrap();
            }
            told.recv_timeout(PATIENCE).unwrap();
        }
    }

    #[test]
    fn one_that_cannot_be_opened_is_left_out_and_the_others_stay() {
        let (mut made, [seven, eight], _told) = both_late(FakeTarget::default());
        made.passthrough.ban = Some(Arc::new(ban(&made.ram)));
        drop(seven);
        made.wait("7");
        assert!(!made.receive_late());
        assert_eq!(made.passthrough.take_unopened(), [(at(7), "7".to_owned())]);
        assert!(made.passthrough.take_unopened().is_empty() && is_free(&made.segment, 7));
        assert_eq!(made.waits_for(), [("8".to_owned(), WaitsFor::Opening)]);
        drop(eight);
        made.wait("8");
        made.receive_late();
        assert_eq!(made.passthrough.take_unopened().len(), 1);
        assert!(!made.passthrough.withholds_any() && made.ram.discards_banned().is_none());
    }

    #[test]
    fn one_without_room_on_the_bus_is_left_out() {
        let (mut made, seven, _told) = one_late();
        let host = made.host();
        let len_bytes = 1 << 40;
        host.set_bar(0, vfio::HostBar { len_bytes, mappable: Vec::new() });
        seven.send(host).unwrap();
        made.wait("7");
        assert!(!made.receive_late());
        assert_eq!(made.passthrough.take_unopened(), [(at(7), "7".to_owned())]);
        assert!(is_free(&made.segment, 7) && made.passthrough.devices.len() == 1);
        assert!(matches!(made.passthrough.progress().unwrap().state, PinState::Pinned { .. }));
    }

    #[test]
    fn one_for_which_memory_cannot_be_mapped_is_removed() {
        let refuse = Box::new(|_| Err(io::Error::from_raw_os_error(libc::ENOMEM)));
        let target = FakeTarget { before: Some(refuse), ..FakeTarget::default() };
        let (mut made, [seven, eight], _told) = both_late(target);
        made.open("7", &seven);
        made.passthrough.await_memory(&|| false).unwrap_err();
        assert_eq!(made.passthrough.refused(), [at(7)]);
        // Not before the first is gone.
        eight.send(made.host()).unwrap();
        made.wait("8");
        assert!(made.passthrough.remove(at(7), &made.segments).is_some());
        assert!(made.receive_late());
        assert_eq!(made.waits_for(), [("8".to_owned(), WaitsFor::Memory)]);
    }

    #[test]
    fn when_all_others_have_failed_one_that_comes_is_left_out() {
        let (mut made, seven, _told) = one_late();
        made.passthrough.devices[0].1.disarm();
        super::super::outcome::unmap_if_unused(&made.passthrough.device_list);
        seven.send(made.host()).unwrap();
        made.wait("7");
        assert!(!made.receive_late(), "memory is mapped for none");
        assert_eq!(made.passthrough.take_unopened(), [(at(7), "7".to_owned())]);
    }

    #[test]
    fn it_is_removed_without_the_guest_and_refused_until_the_host_has_opened_it() {
        let (mut made, seven, told) = one_late();
        while told.try_recv().is_ok() {}
        assert!(made.passthrough.withdraw(at(7)) && told.try_recv().is_ok());
        assert_eq!(made.passthrough.refused(), [at(7)]);
        let host = made.host();
        seven.send(host.clone()).unwrap();
        made.wait("7");
        assert!(!made.receive_late(), "it is to go");
        let removed = made.passthrough.remove(at(7), &made.segments);
        assert_eq!(removed.as_deref(), Some("7"));
        assert_eq!(Arc::strong_count(&host), 1, "it is closed");
        assert!(is_free(&made.segment, 7) && !made.passthrough.withholds_any());
        assert!(made.target.is_mapped(0..4 << 20).is_some(), "the other one needs it");
    }

    #[test]
    fn a_removed_one_is_refused_until_the_host_has_opened_it() {
        let (mut made, seven, _told) = one_late();
        assert!(made.passthrough.withdraw(at(7)));
        assert_eq!(made.passthrough.remove(at(7), &made.segments).as_deref(), Some("7"));
        let config = DeviceConfig { path: Some("/7".into()), ..DeviceConfig::default() };
        let refused = made.passthrough.refuse_withdrawn(&config, "7");
        assert!(matches!(refused, Err(PassthroughError::Withdrawn { .. })), "{refused:?}");
        assert!(made.passthrough.may_be_joined());
        drop(seven);
        assert!(made.passthrough.withdrawn[0].end.is_over_within(PATIENCE));
        made.passthrough.refuse_withdrawn(&config, "7").unwrap();
        assert!(!made.passthrough.may_be_joined());
    }

    #[test]
    fn it_comes_after_the_removal_of_the_last_other_device() {
        let (mut made, seven, _told) = one_late();
        assert!(made.passthrough.remove(at(8), &made.segments).is_some());
        assert!(made.target.mapped.lock().is_empty() && made.ram.discards_banned().is_none());
        made.open("7", &seven);
        assert!(made.ram.discards_banned().is_some(), "it may write to all memory");
        made.passthrough.await_memory(&|| false).unwrap();
        assert!(made.target.is_mapped(0..4 << 20).is_some());
        assert_eq!(made.shown(), ["7"]);
    }

    #[test]
    fn it_waits_until_memory_is_unmapped_for_those_that_go() {
        let (target, at_map, kernel) = held_target();
        let (mut made, [seven, eight], told) = both_late(target);
        made.open("8", &eight);
        at_map.recv_timeout(PATIENCE).unwrap();
        assert!(made.passthrough.withdraw(at(8)));
        seven.send(made.host()).unwrap();
        made.wait("7");
        assert!(!made.receive_late() && made.passthrough.take_unopened().is_empty());
        kernel.0.open();
        while made.passthrough.refused().is_empty() {
            told.recv_timeout(PATIENCE).unwrap();
        }
        assert_eq!(made.passthrough.refused(), [at(8)]);
        assert!(!made.receive_late(), "the other one is still there");
        assert!(made.passthrough.take_unopened().is_empty(), "it is not lost for that");
        assert!(made.passthrough.remove(at(8), &made.segments).is_some());
        assert!(made.receive_late());
        made.passthrough.await_memory(&|| false).unwrap();
        assert_eq!(made.shown(), ["7"]);
    }

    #[test]
    fn memory_that_stayed_mapped_is_for_the_next_that_comes_or_is_mapped_anew() {
        for is_first_placed in [true, false] {
            let calls = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&calls);
            let before = Box::new(move |_| {
                counted.fetch_add(1, Ordering::Relaxed);
                Ok(())
            });
            let outlives =
                FakeTarget { before: Some(before), outlives_vm: true, ..FakeTarget::default() };
            let target = Arc::new(outlives);
            let (kept, ram) = kept_in(&target);
            let calls_before = calls.load(Ordering::Relaxed);
            let (mut made, _told) = machine(FakeTarget::default());
            made.passthrough.space = Some(target.clone());
            (made.target, made.ram) = (target, ram);
            made.passthrough.kept = Some(kept);
            let [fails, first, second] =
                [7, 8, 9].map(|number| made.expect(&number.to_string(), number, PinMode::Auto));
            made.start_without_late();
            drop(fails);
            made.wait("7");
            made.receive_late();
            assert_eq!(made.passthrough.take_unopened().len(), 1);
            let host = made.host();
            if !is_first_placed {
                host.set_bar(0, vfio::HostBar { len_bytes: 1 << 40, mappable: Vec::new() });
            }
            first.send(host).unwrap();
            made.wait("8");
            if is_first_placed {
                assert!(made.receive_late());
            }
            // Else both come at once.
            made.open("9", &second);
            made.passthrough.await_memory(&|| false).unwrap();
            assert!(made.target.is_mapped(0..made.ram.total_bytes()).is_some());
            assert_eq!(calls.load(Ordering::Relaxed) == calls_before, is_first_placed);
        }
    }

    #[test]
    fn it_stops_with_the_others_when_it_comes_to_a_vm_that_is_paused() {
        let (mut made, seven, _told) = one_late();
        made.passthrough.stop().unwrap();
        let host = made.open("7", &seven);
        made.passthrough.stop().unwrap();
        let last = host.migration.hardware_mut().history.last().copied();
        assert_eq!(last, Some(DeviceState::Stop));
        made.passthrough.run();
        let last = host.migration.hardware_mut().history.last().copied();
        assert_eq!(last, Some(DeviceState::Running));
    }

    #[test]
    fn the_end_of_the_machine_waits_for_no_opener_and_the_next_one_does() {
        let (made, seven, _told) = one_late();
        let space = made.passthrough.space.clone();
        let (left, host) = (made.passthrough.left.clone(), made.host());
        let Made { passthrough, target, .. } = made;
        drop(passthrough);
        assert!(target.mapped.lock().is_empty(), "its opener has the address space");
        let config = DeviceConfig { path: Some("/7".into()), ..DeviceConfig::default() };
        let before = left.before(&OpenerPlace::of(&config));
        assert!(before.len() == 1 && !before[0].is_over());
        seven.send(host.clone()).unwrap();
        assert!(before[0].is_over_within(PATIENCE));
        assert_eq!(Arc::strong_count(&host), 1, "it is closed");
        assert!(left.before(&OpenerPlace::of(&config)).is_empty());
        drop(space);
    }
}
