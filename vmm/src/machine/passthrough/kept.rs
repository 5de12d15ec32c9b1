// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory that stays mapped for DMA while the guest reboots.
//!
//! A reboot keeps the memory, but replaces the VM in KVM and closes the devices, which resets them. Mapping terabytes
//! again takes longer than all else, so the address space stays, with what is mapped there, and the devices are
//! opened in it again.
//!
//! Owns it from the end of a machine to the start of the next. Must never keep anything that a device may still
//! write: each device has to say that its DMA is off before the memory gets its next guest. What speaks against
//! keeping is logged, and everything is mapped anew then.

use std::sync::Arc;

use memory::GuestRam;
use parking_lot::Mutex;
use pci::PciDevice as _;
use vfio::{DmaSpace, KeptMappings, SpaceHold, VfioError};

use super::Passthrough;
use super::outcome::read;
use crate::config::VmConfig;
use crate::events;
use crate::machine::virtio::PciContext;

/// An address space, and what is mapped there.
pub struct KeptDma {
    space: Arc<dyn DmaSpace>,
    mappings: KeptMappings,
    /// What keeps them without devices: of type1, the groups.
    hold: SpaceHold,
    ram: Arc<GuestRam>,
}

impl KeptDma {
    /// Whether it is of use to a machine with this configuration and memory. If not, it has to be dropped
    /// before other memory is made, as it keeps this.
    pub fn is_for(&self, config: &VmConfig, ram: Option<&Arc<GuestRam>>) -> bool {
        let is_needed = config.devices.iter().flatten().next().is_some();
        // By type1 or iommufd is of the VM, which does not change in that.
        is_needed && ram.is_some_and(|ram| Arc::ptr_eq(ram, &self.ram))
    }

    /// Bytes that are mapped.
    pub(super) fn mapped_bytes(&self) -> u64 {
        self.mappings.mapped_bytes()
    }

    /// Whether all memory of a VM that has this many bytes is mapped.
    pub(super) fn is_all(&self, total_bytes: u64) -> bool {
        self.mapped_bytes() == total_bytes
    }

    /// The address space, for the VM of the new machine.
    pub(super) fn space(&self, context: &PciContext<'_>) -> Result<Arc<dyn DmaSpace>, VfioError> {
        self.space.join_vm(context.vm)?;
        Ok(Arc::clone(&self.space))
    }
}

/// Where a machine that ends leaves its mappings.
#[derive(Clone, Default)]
pub struct KeptDmaSlot(Arc<Mutex<Option<KeptDma>>>);

impl KeptDmaSlot {
    /// What was left there, once.
    pub fn take(&self) -> Option<KeptDma> {
        self.0.lock().take()
    }
}

impl Passthrough {
    /// What has stayed mapped. Called when the first device is open, which keeps it from then on; the groups of the others
    /// are held until these are open, too.
    pub(super) fn take_kept(&mut self) -> Option<KeptMappings> {
        let KeptDma { space, mappings, hold, ram: _ } = self.kept.take()?;
        self.hold = Some(hold);
        match space.check_kept() {
            Ok(()) => Some(mappings),
            Err(why) => {
                log::warn!(
                    "guest memory, which was to stay mapped for DMA over the reboot, is mapped anew: {why}"
                );
                None
            }
        }
    }

    /// Holds no group any longer for devices that are to be opened, when there are none.
    pub(super) fn release_hold(&mut self) {
        if self.pending.is_empty() && self.late.is_empty() {
            self.hold = None;
        }
    }

    /// Has [`leave`](Self::leave) leave in the returned slot what stays mapped.
    pub fn keep_mappings(&mut self) -> KeptDmaSlot {
        self.leaves_to.get_or_insert_default().clone()
    }

    /// Takes all devices from the guest as it ends, and leaves what is mapped to its next boot if it reboots, in the
    /// slot. Called when no vCPU runs, before the memory is used again; the devices are closed later.
    pub fn leave(&mut self, ram: &Arc<GuestRam>) {
        let Some(slot) = self.leaves_to.take() else { return };
        self.end_early_populating();
        if self.pinning.is_none() {
            return;
        }
        match self.leave_mapped(ram) {
            Ok(kept) => {
                let bytes = kept.mapped_bytes();
                log::info!("{} MiB of guest memory stay mapped for DMA", bytes >> 20);
                events::emit("vm", "passthrough-kept", &[("bytes", &bytes.to_string())]);
                *slot.0.lock() = Some(kept);
            }
            Err(why) => log::info!("guest memory will be mapped for DMA anew: {why}"),
        }
    }

    fn leave_mapped(&mut self, ram: &Arc<GuestRam>) -> Result<KeptDma, Arc<str>> {
        // A failure of a device that is told of from here on would unmap all.
        self.notices = None;
        read(&self.device_list).memory = None;
        // One that is still being opened, also if it was removed meanwhile, would be attached later.
        if self.may_be_joined() {
            return Err("a device is still being opened".into());
        }
        // Also one that was removed.
        if let Some(device) = self.hung().first() {
            return Err(format!("device '{}' hangs in a call", device.id()).into());
        }
        for (_, device) in &self.devices {
            let was_lost = device.is_lost();
            let is_silent = device.silence();
            if was_lost || !is_silent {
                let why = if was_lost { "had failed" } else { "does not say that its DMA is off" };
                return Err(format!("device '{}' {why}", device.id()).into());
            }
        }
        let space = self.space.clone().ok_or("there is no address space")?;
        let hold = space.outlive_vm()?;
        let pinning = self.pinning.take().ok_or("it was not mapped")?;
        let mappings = pinning.leave(ram.regions())?;
        Ok(KeptDma { space, mappings, hold, ram: Arc::clone(ram) })
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use memory::{RamConfig, RamLayout, ZoneSpec};
    use pci::{Bdf, DeviceNumber};
    use serde_json::json;
    use vfio::PinState;
    use vfio::fakes::{FakeFunction, FakeTarget};

    use super::super::DiscardingDevices;
    use super::super::announcing::tests::new_segment;
    use super::super::hung::tests::leave_hanging;
    use super::super::migration::tests::two_devices;
    use super::super::openers::{Abandoned, OpenerEnd, OpenerPlace};
    use super::super::opening::tests::slow;
    use super::super::starting::Place;
    use super::super::starting::tests::{FakeMaker, Made};
    use super::*;
    use crate::config::PinMode;
    use crate::machine::pausing::CancelToken;
    use crate::machine::segments::Segments;

    const RAM_BYTES: u64 = 192 << 20;
    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_mins(1);

    fn new_ram() -> Arc<GuestRam> {
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", RAM_BYTES) }];
        Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap())
    }

    fn target(outlives_vm: bool) -> Arc<FakeTarget> {
        Arc::new(FakeTarget { outlives_vm, ..FakeTarget::default() })
    }

    /// Two devices that work, with all memory mapped in `target`, and the slot for what they leave.
    fn at_work(
        target: &Arc<FakeTarget>,
        ram: &Arc<GuestRam>,
    ) -> (Passthrough, [Arc<FakeFunction>; 2], KeptDmaSlot) {
        let (mut passthrough, hosts) = two_devices();
        passthrough.space = Some(target.clone());
        passthrough.strict = true;
        let never = CancelToken::default();
        passthrough.map_memory(ram, DiscardingDevices::default(), &never).unwrap();
        for (_, device) in &passthrough.devices {
            device.write_config(4, &[6, 0]);
        }
        assert!(hosts.iter().all(|host| host.is_bus_master()));
        let slot = passthrough.keep_mappings();
        (passthrough, hosts, slot)
    }

    /// What a machine has left in `target` that has rebooted.
    pub(in super::super) fn kept_in(target: &Arc<FakeTarget>) -> (KeptDma, Arc<GuestRam>) {
        let ram = new_ram();
        let (mut passthrough, _hosts, slot) = at_work(target, &ram);
        passthrough.cancel();
        passthrough.leave(&ram);
        (slot.take().unwrap(), ram)
    }

    fn mapped(target: &FakeTarget) -> Vec<std::ops::Range<u64>> {
        target.mapped.lock().clone()
    }

    #[test]
    fn memory_stays_mapped_and_the_next_devices_find_it_so() {
        let (target, ram) = (target(true), new_ram());
        let (mut passthrough, hosts, slot) = at_work(&target, &ram);
        let before = mapped(&target);
        // As `Machine::end` does.
        passthrough.cancel();
        passthrough.leave(&ram);
        assert!(hosts.iter().all(|host| !host.is_bus_master()), "the next guest has the memory");
        drop(passthrough);
        let kept = slot.take().unwrap();
        assert!(slot.take().is_none() && kept.is_all(RAM_BYTES));
        assert_eq!(mapped(&target), before);
        assert_eq!(Arc::strong_count(&target.hold), 2, "it is held without devices");

        let (mut next, _hosts) = two_devices();
        next.space = Some(Arc::clone(&kept.space));
        next.kept = Some(kept);
        next.map_memory(&ram, DiscardingDevices::default(), &CancelToken::default()).unwrap();
        let progress = next.progress().unwrap();
        assert!(matches!(progress.state, PinState::Pinned { .. }), "nothing is left to do");
        assert_eq!(progress.pinned_bytes, RAM_BYTES);
        assert!(next.gate.is_open());
        assert_eq!((mapped(&target), target.unmaps()), (before, 0));
        assert_eq!(Arc::strong_count(&target.hold), 1, "by the devices from here on");
    }

    /// A machine of the next boot with memory that has stayed mapped in `target`, and nothing open yet.
    fn next_boot(target: FakeTarget) -> (Made, Arc<FakeTarget>) {
        let target = Arc::new(FakeTarget { outlives_vm: true, ..target });
        let (kept, ram) = kept_in(&target);
        let mut made = Made::new(FakeTarget::default());
        made.passthrough.space = Some(target.clone());
        (made.passthrough.kept, made.ram) = (Some(kept), ram);
        (made, target)
    }

    #[test]
    fn groups_are_held_until_the_last_device_is_open() {
        let (mut made, target) = next_boot(FakeTarget::default());
        let holds = || Arc::strong_count(&target.hold) - 1;
        let gives = [("one", 7), ("two", 8), ("late", 9)]
            .map(|(id, number)| made.expect(id, number, PinMode::Auto));
        for (at, gives) in gives.iter().take(2).enumerate() {
            assert_eq!(holds(), 1, "{at} are open");
            gives.send(made.host()).unwrap();
            made.await_pending(["one", "two"][at]);
            made.receive_now();
        }
        assert!(made.passthrough.progress().is_some() && made.passthrough.kept.is_none());
        made.start_without_late();
        assert_eq!(holds(), 1, "a late device needs its group as well");
        gives[2].send(made.host()).unwrap();
        made.passthrough.late[0].wait(PATIENCE);
        let Made { passthrough, ram, segments, .. } = &mut made;
        let place = Place { make: &FakeMaker, segments, ram };
        assert!(passthrough.receive_late_at(&place, &DiscardingDevices::default));
        assert_eq!(holds(), 0, "by the devices from here on");
        assert_eq!(target.unmaps(), 0);
    }

    #[test]
    fn groups_are_held_for_no_device_that_does_not_come() {
        let (mut made, target) = next_boot(FakeTarget::default());
        let holds = || Arc::strong_count(&target.hold) - 1;
        let [one, _never] =
            [("one", 7), ("late", 9)].map(|(id, number)| made.expect(id, number, PinMode::Auto));
        one.send(made.host()).unwrap();
        made.await_pending("one");
        made.start_without_late();
        assert_eq!(holds(), 1);
        let late = Bdf::on_root_bus(0, DeviceNumber::new(9).unwrap());
        assert!(made.passthrough.remove(late, &made.segments).is_some());
        assert_eq!(holds(), 0);
    }

    #[test]
    fn the_group_of_a_removed_device_is_not_held_for_one_that_is_late() {
        let (mut made, target) = next_boot(FakeTarget::default());
        let [one, _never] =
            [("one", 7), ("late", 9)].map(|(id, number)| made.expect(id, number, PinMode::Auto));
        one.send(made.host()).unwrap();
        made.await_pending("one");
        made.start_without_late();
        assert_eq!(Arc::strong_count(&target.hold) - 1, 1);
        let open = Bdf::on_root_bus(0, DeviceNumber::new(7).unwrap());
        assert!(made.passthrough.remove(open, &made.segments).is_some());
        assert_eq!(Arc::strong_count(&target.hold) - 1, 0);
    }

    #[test]
    fn what_did_not_stay_mapped_after_all_is_mapped_anew() {
        let (mut made, target) = next_boot(FakeTarget::default());
        target.has_lost_kept.store(true, Ordering::Relaxed);
        made.expect("one", 7, PinMode::Auto).send(made.host()).unwrap();
        made.await_pending("one");
        // As the kernel does when the last group has left.
        target.mapped.lock().clear();
        made.receive_now();
        made.passthrough.await_memory(&|| false).unwrap();
        assert!(target.is_mapped(0..RAM_BYTES).is_some(), "a device would reach nothing else");
    }

    #[test]
    fn what_stayed_mapped_for_devices_that_did_not_come_is_unmapped() {
        let (target, ram) = (target(true), new_ram());
        let (hold, holds) = (Arc::downgrade(&target.hold), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&holds);
        let look = Box::new(move || seen.lock().push(hold.strong_count()));
        assert!(target.before_unmap_all.set(look).is_ok());
        let (mut passthrough, _hosts, slot) = at_work(&target, &ram);
        passthrough.cancel();
        passthrough.leave(&ram);
        drop(passthrough);
        let kept = slot.take().unwrap();
        let (mut next, _hosts) = two_devices();
        next.space = Some(Arc::clone(&kept.space));
        next.kept = Some(kept);
        let place = next.devices[0].0;
        next.unopened.push((place, "one".to_owned()));
        assert_eq!(next.take_unopened().len(), 1);
        assert!(next.kept.is_some() && !mapped(&target).is_empty(), "others have come");
        next.devices.clear();
        let (late, _never) = slow("late", 7, PinMode::Auto, Box::new(|| {}));
        next.late.push(late);
        next.unopened.push((place, "two".to_owned()));
        assert_eq!(next.take_unopened().len(), 1);
        assert!(next.kept.is_some() && !mapped(&target).is_empty(), "another may come");
        let place = Bdf::on_root_bus(0, DeviceNumber::new(7).unwrap());
        assert!(next.remove(place, &Segments::of_test(new_segment())).is_some());
        assert!(next.kept.is_none() && mapped(&target).is_empty(), "memory may be discarded now");
        assert_eq!(*holds.lock(), [2], "it is held until it is unmapped");
        assert_eq!(Arc::strong_count(&target.hold), 1);
    }

    #[test]
    fn nothing_is_left_to_a_guest_that_does_not_reboot() {
        let (target, ram) = (target(true), new_ram());
        let (mut passthrough, hosts, slot) = at_work(&target, &ram);
        passthrough.leaves_to = None;
        passthrough.leave(&ram);
        assert!(slot.take().is_none());
        assert!(hosts.iter().all(|host| host.is_bus_master()), "it is closed as ever");
    }

    #[test]
    fn what_a_device_may_still_write_does_not_stay() {
        let (target, ram) = (target(true), new_ram());
        let (mut passthrough, [_, two], slot) = at_work(&target, &ram);
        two.ignores_commands.store(true, Ordering::Relaxed);
        passthrough.leave(&ram);
        assert!(slot.take().is_none(), "the second still has its DMA on");

        let (target, ram) = (self::target(true), new_ram());
        let (mut passthrough, _hosts, slot) = at_work(&target, &ram);
        passthrough.devices[0].1.disarm();
        passthrough.leave(&ram);
        assert!(slot.take().is_none(), "the first had failed");

        let (target, ram) = (self::target(true), new_ram());
        let (mut passthrough, _hosts, slot) = at_work(&target, &ram);
        let end = OpenerEnd::default();
        let _mark = end.mark();
        passthrough.withdrawn.push(Abandoned { place: OpenerPlace::default(), end });
        passthrough.leave(&ram);
        assert!(slot.take().is_none(), "one is about to be attached");

        let (target, ram) = (self::target(true), new_ram());
        let (mut passthrough, _hosts, slot) = at_work(&target, &ram);
        let (late, _never) = slow("late", 7, PinMode::Auto, Box::new(|| {}));
        passthrough.late.push(late);
        passthrough.leave(&ram);
        assert!(slot.take().is_none(), "one is about to be attached");
    }

    #[test]
    fn nothing_stays_mapped_for_a_device_that_hangs_even_if_it_was_removed() {
        let (target, ram) = (target(true), new_ram());
        let (mut passthrough, [one, _two], slot) = at_work(&target, &ram);
        read(&passthrough.device_list).devices =
            passthrough.devices.iter().map(|(_, device)| Arc::downgrade(device)).collect();
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        let thread = leave_hanging(&passthrough, "one", &one, &gate);
        let place = passthrough.devices[0].0;
        passthrough.remove(place, &Segments::of_test(new_segment())).unwrap();
        passthrough.leave(&ram);
        assert!(slot.take().is_none());
        drop(passthrough);
        assert!(mapped(&target).is_empty());
        drop(closed);
        thread.join().unwrap();
    }

    #[test]
    fn an_address_space_that_ends_with_its_devices_is_not_left() {
        let (target, ram) = (target(false), new_ram());
        let (mut passthrough, hosts, slot) = at_work(&target, &ram);
        passthrough.leave(&ram);
        assert!(slot.take().is_none());
        assert!(hosts.iter().all(|host| !host.is_bus_master()));
    }

    #[test]
    fn it_is_for_the_same_memory_and_for_devices_only() {
        let (target, ram) = (target(true), new_ram());
        let (mut passthrough, _hosts, slot) = at_work(&target, &ram);
        passthrough.leave(&ram);
        let kept = slot.take().unwrap();
        let config = |devices| -> VmConfig {
            let json = json!({"payload": {"kernel": "/k"}, "devices": devices});
            serde_json::from_value(json).unwrap()
        };
        let same = config(json!([{"path": "/d"}]));
        assert!(kept.is_for(&same, Some(&ram)));
        assert!(!kept.is_for(&same, None), "memory is made anew");
        assert!(!kept.is_for(&same, Some(&new_ram())), "other memory");
        assert!(!kept.is_for(&config(json!([])), Some(&ram)), "no device is left");
    }
}
