// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices that were left to a call into the kernel that has not returned, at the end of their machine.
//!
//! The thread of the call has the device, and with it its IOMMU group and a share of the address space: the host opens
//! neither the device nor another of its group for the next boot, and what is mapped does not end with the machine.
//!
//! Owns which devices these are, also of those that the guest has ejected. Must never wait for one.

use std::sync::{Arc, Weak};

use vfio::VfioPciDevice;

use super::Passthrough;
use super::openers::OpenerPlace;
use super::outcome::devices_of;
use crate::config::VmConfig;

impl Passthrough {
    /// The devices that hang, and may still reach memory.
    pub(super) fn hung(&self) -> Vec<Arc<VfioPciDevice>> {
        let mut hung = devices_of(&self.device_list);
        hung.retain(|device| device.is_hung());
        hung
    }

    /// Ids of the devices of `config` that cannot be opened for a reboot: they hang, or are in the IOMMU group of one that does.
    /// The guest runs on without them; with them the reboot would fail, and the guest be lost.
    pub fn not_for_reboot(&self, config: &VmConfig) -> Vec<String> {
        let is_hung = |(_, device): &&(OpenerPlace, Weak<VfioPciDevice>)| {
            device.upgrade().is_some_and(|device| device.is_hung())
        };
        let hung: Vec<_> = self.places.iter().filter(is_hung).map(|(place, _)| place).collect();
        let is_with_one = |place: &OpenerPlace| hung.iter().any(|other| place.excludes(other));
        let devices = config.devices.iter().flatten();
        let left = devices.filter(|device| is_with_one(&OpenerPlace::of(device)));
        left.filter_map(|device| device.id.clone()).collect()
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use std::fs::create_dir;
    use std::os::unix::fs::symlink;
    use std::thread::{self, JoinHandle};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;
    use pci::PciDevice as _;
    use serde_json::json;
    use vfio::DeviceEvent;
    use vfio::fakes::{FakeFunction, FakeTarget};
    use vfio::migration::fakes::FakeHang;

    use super::super::announcing::tests::new_segment;
    use super::super::device_events::listen;
    use super::super::migration::tests::two_devices;
    use super::super::outcome::read;
    use super::*;
    use crate::config::DeviceConfig;
    use crate::machine::segments::Segments;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Has the device with this id hang while it is read, as long as the lock is held, and leaves it.
    pub(in super::super) fn leave_hanging(
        passthrough: &Passthrough,
        id: &str,
        host: &FakeFunction,
        gate: &Arc<Mutex<()>>,
    ) -> JoinHandle<()> {
        let mut reader = passthrough.read_states(&[id.to_owned()]).unwrap().remove(0);
        host.migration.hardware_mut().hang = Some((FakeHang::Read, Arc::clone(gate)));
        let thread =
            thread::spawn(move || while reader.read(&mut [0; 64]).is_ok_and(|len| len > 0) {});
        let (_, device) = passthrough.devices.iter().find(|(_, device)| device.id() == id).unwrap();
        while device.call().is_none_or(|call| !call.to_string().contains("reading")) {
            thread::yield_now();
        }
        passthrough.leave_hung(id);
        thread
    }

    /// The devices 'one' and 'two' with an address space that has something mapped.
    fn at_work() -> (Passthrough, [Arc<FakeFunction>; 2], Arc<FakeTarget>) {
        let (mut passthrough, hosts) = two_devices();
        let target = Arc::new(FakeTarget::default());
        target.mapped.lock().push(0..4096);
        passthrough.space = Some(target.clone());
        read(&passthrough.device_list).devices =
            passthrough.devices.iter().map(|(_, device)| Arc::downgrade(device)).collect();
        (passthrough, hosts, target)
    }

    #[test]
    fn one_that_hangs_at_the_end_of_its_machine_reaches_no_memory_any_more() {
        for is_removed in [false, true] {
            let (mut passthrough, [one, two], target) = at_work();
            let gate = Arc::new(Mutex::new(()));
            let closed = gate.lock();
            let thread = leave_hanging(&passthrough, "one", &one, &gate);
            if is_removed {
                let place = passthrough.devices[0].0;
                passthrough.remove(place, &Segments::of_test(new_segment())).unwrap();
                assert!(!target.mapped.lock().is_empty(), "the other one needs it");
            }
            drop(passthrough);
            assert!(target.mapped.lock().is_empty(), "the next guest may have that memory");
            assert_eq!((*one.resets.lock(), *two.resets.lock()), (0, 1));
            drop(closed);
            thread.join().unwrap();
            assert_eq!(*one.resets.lock(), 1);
        }
    }

    /// A device in a folder like that of sysfs.
    fn config(folder: &std::path::Path, id: &str) -> DeviceConfig {
        serde_json::from_value(json!({"id": id, "path": folder.join(id)})).unwrap()
    }

    #[test]
    fn one_that_hangs_and_all_of_its_group_are_not_for_the_next_boot() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for (id, group) in [("one", "5"), ("two", "5"), ("three", "6")] {
            if !folder.join(group).exists() {
                create_dir(folder.join(group)).unwrap();
            }
            create_dir(folder.join(id)).unwrap();
            symlink(folder.join(group), folder.join(id).join("iommu_group")).unwrap();
        }
        let (mut passthrough, [one, _two], _target) = at_work();
        passthrough.places = ["one", "three"]
            .map(|id| OpenerPlace::of(&config(folder, id)))
            .into_iter()
            .zip(passthrough.devices.iter().map(|(_, device)| Arc::downgrade(device)))
            .collect();
        let devices = ["one", "two", "three"].map(|id| json!(config(folder, id)));
        let vm: VmConfig =
            serde_json::from_value(json!({"payload": {"kernel": "/k"}, "devices": devices}))
                .unwrap();
        assert!(passthrough.not_for_reboot(&vm).is_empty());
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        let thread = leave_hanging(&passthrough, "one", &one, &gate);
        assert_eq!(passthrough.not_for_reboot(&vm), ["one", "two"]);
        let place = passthrough.devices[0].0;
        passthrough.remove(place, &Segments::of_test(new_segment())).unwrap();
        assert_eq!(passthrough.not_for_reboot(&vm), ["one", "two"], "its group is still in use");
        drop(closed);
        thread.join().unwrap();
        assert!(passthrough.not_for_reboot(&vm).is_empty());
    }

    #[test]
    fn what_the_host_says_of_a_device_is_not_for_one_that_had_its_id_and_hangs() {
        let (mut passthrough, [one, _two], _target) = at_work();
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        let thread = leave_hanging(&passthrough, "one", &one, &gate);
        let place = passthrough.devices[0].0;
        passthrough.remove(place, &Segments::of_test(new_segment())).unwrap();
        let (other, [next_host, _]) = two_devices();
        let (_, next) = &other.devices[0];
        read(&passthrough.device_list).devices.push(Arc::downgrade(next));
        let notices =
            listen(Arc::clone(&passthrough.device_list), Arc::clone(&passthrough.sink)).unwrap();
        next.report_to(&notices).unwrap();
        assert!(next_host.tell(DeviceEvent::Failed));
        let end = Instant::now() + PATIENCE;
        while !next.is_disarmed() && Instant::now() < end {
            thread::yield_now();
        }
        assert!(next.is_disarmed());
        drop(closed);
        thread.join().unwrap();
    }
}
