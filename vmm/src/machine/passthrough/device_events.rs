// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Error and request interrupts of VFIO: the host says that a device has failed, or wants it back.
//!
//! A device that has failed is gone for the guest at once, as nothing that it reads can be trusted, and
//! reaches no memory from then on: the guest takes back the pages that it had given to it. One that is
//! wanted back is the guest's until it is ejected; the host asks again until it has it.

use std::io;

use parking_lot::Mutex;
use pci::PciDevice as _;
use vfio::{DeviceEvent, DeviceEvents, VfioPciDevice};

use super::outcome::{DeviceList, SharedDeviceList, devices_of, unmap_if_unused};
use crate::events;
use crate::machine::events::{EventSink, GuestEvent};

/// Starts to handle the events of the devices in `list`; devices are registered with the returned value.
///
/// # Errors
/// A descriptor or the thread cannot be created.
pub fn listen(list: SharedDeviceList, sink: EventSink) -> io::Result<DeviceEvents> {
    DeviceEvents::start(Box::new(move |id, notice| {
        let devices = devices_of(&list);
        // The last one: one that was left to a call may be removed, and its id be that of another.
        let Some(device) = devices.iter().rfind(|device| device.id() == id) else { return };
        match notice {
            // The guest has lost it, and its thread resets it.
            DeviceEvent::Failed if device.is_left() => {}
            DeviceEvent::Failed => {
                fail(device, &list);
                sink(GuestEvent::WithheldDevice);
            }
            DeviceEvent::WantedBack => {
                log::warn!(
                    "the host requests the release of device '{id}': the guest is asked to eject it"
                );
                events::emit("vm", "passthrough-device-wanted", &[("id", id)]);
                sink(GuestEvent::DeviceWanted { id: id.to_owned() });
            }
        }
    }))
}

fn fail(device: &VfioPciDevice, list: &Mutex<DeviceList>) {
    if device.is_disarmed() {
        return;
    }
    let id = device.id();
    log::error!("the host reports an error of device '{id}': it is gone for the guest");
    device.disarm();
    let reason = "the host reports an error of the device";
    events::emit("vm", "passthrough-device-lost", &[("id", id), ("error", reason)]);
    unmap_if_unused(list);
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
    use vfio::fakes::{FakeFunction, FakeTarget};
    use vfio::{DmaMap, GuestRamPopulator, PinState, Pinning};

    use super::super::migration::tests::two_devices;
    use super::super::{Passthrough, PassthroughError, read};
    use super::*;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// The devices 'one' and 'two', working, registered for events, with memory mapped for both.
    fn at_work() -> (Passthrough, [Arc<FakeFunction>; 2], Arc<FakeTarget>) {
        let (mut passthrough, hosts) = two_devices();
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let target = Arc::new(FakeTarget::default());
        let populator = Arc::new(GuestRamPopulator::new(ram, None));
        let on_lost = Box::new(|reason: &Arc<str>| panic!("{reason}"));
        let dma_map = DmaMap::plan(target.clone(), populator.as_ref(), false, on_lost);
        let (gate, on_end) = (Arc::clone(&passthrough.gate), Box::new(|_: &PinState| {}));
        let mut pinning = Pinning::start(dma_map, populator, gate, true, on_end).unwrap();
        pinning.wait().unwrap();
        let memory = pinning.abandonment();
        passthrough.pinning = Some(pinning);
        let notices =
            listen(Arc::clone(&passthrough.device_list), Arc::clone(&passthrough.sink)).unwrap();
        for (_, device) in &passthrough.devices {
            read(&passthrough.device_list).devices.push(Arc::downgrade(device));
            device.report_to(&notices).unwrap();
            device.write_config(4, &[6, 0]);
        }
        read(&passthrough.device_list).memory = Some(memory);
        passthrough.notices = Some(notices);
        assert!(hosts.iter().all(|host| host.is_bus_master()));
        (passthrough, hosts, target)
    }

    fn until(what: &str, is_so: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            std::thread::yield_now();
        }
    }

    fn resets(host: &FakeFunction) -> u32 {
        *host.resets.lock()
    }

    #[test]
    fn a_device_that_fails_reaches_no_memory_and_the_others_continue() {
        let (passthrough, [one, two], target) = at_work();
        assert!(one.tell(DeviceEvent::Failed));
        until("it is disarmed", || passthrough.devices[0].1.is_disarmed());
        assert!(!one.is_bus_master() && resets(&one) == 1);
        passthrough.devices[0].1.write_config(4, &[6, 0]);
        assert!(!one.is_bus_master());
        assert!(two.is_bus_master() && resets(&two) == 0 && !passthrough.devices[1].1.is_lost());
        assert!(target.is_mapped(0..4 << 20).is_some(), "the other one needs it");
        assert!(matches!(passthrough.progress().unwrap().state, PinState::Pinned { .. }));
    }

    #[test]
    fn when_the_last_has_failed_memory_is_unmapped_after_all_are_harmless() {
        let (passthrough, [one, two], target) = at_work();
        let (first, second) = (Arc::clone(&one), Arc::clone(&two));
        let is_harmless = |host: &FakeFunction| !host.is_bus_master() && resets(host) == 1;
        let before = Box::new(move || assert!(is_harmless(&first) && is_harmless(&second)));
        assert!(target.before_unmap_all.set(before).is_ok());
        assert!(one.tell(DeviceEvent::Failed) && two.tell(DeviceEvent::Failed));
        until("memory is unmapped", || target.mapped.lock().is_empty());
        // The next device would find nothing mapped.
        until("it says so", || {
            matches!(passthrough.progress().unwrap().state, PinState::Failed(_))
        });
        let refused = passthrough.check_memory();
        assert!(matches!(refused, Err(PassthroughError::MemoryFailed(_))));
    }
}
