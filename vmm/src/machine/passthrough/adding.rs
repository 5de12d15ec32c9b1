// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hot-plug and hot-unplug of passed-through devices.
//!
//! Owns the order of both: a device is open before memory is mapped for the first one, and with the last one
//! memory is unmapped before the device goes back to the host. It must never leave half of a device behind: what
//! fails or is cancelled is undone.

use std::sync::Arc;

use pci::{Bdf, PciDevice as _};
use vfio::{PinState, VfioPciDevice};

use super::openers::{Abandoned, OpenerPlace};
use super::outcome::{read, unmap_if_unused};
use super::{DiscardingDevices, Passthrough, PassthroughError, Showing, ban, new_gate};
use crate::config::{DeviceConfig, PinMode};
use crate::machine::pausing::CancelToken;
use crate::machine::segments::Segments;
use crate::machine::virtio::PciContext;

impl Passthrough {
    /// Adds a device to the machine, withheld from the guest unless its configuration says otherwise. The first one
    /// starts to map memory; the guest may run meanwhile.
    ///
    /// # Errors
    /// Names the device, or says that the addition was cancelled while the device was being opened or
    /// memory mapped; nothing has changed then. A thread that is still opening the device closes it again:
    /// until then the device is in use on the host, and this VM's memory is kept.
    pub fn add(
        &mut self,
        config: &DeviceConfig,
        context: &PciContext<'_>,
        discarding: DiscardingDevices,
        cancel: &CancelToken,
    ) -> Result<Bdf, PassthroughError> {
        self.check_memory()?;
        self.refuse_left(config, config.id.as_deref().unwrap_or_default())?;
        // Nothing is discarded from here on. Pages discarded before are populated again, and those in the
        // balloon are discarded again once everything is mapped.
        self.ban.get_or_insert_with(|| Arc::new(ban(context.ram)));
        // Its guest runs, wherever it came from.
        self.arrives = false;
        let showing = if config.pin == PinMode::Overlap { Showing::AtOnce } else { Showing::Later };
        let added = self.plug(config, context, showing, cancel).and_then(|bdf| {
            // The last of the other devices may have failed in the meantime.
            let mapped = self.check_memory();
            let mapped = mapped.and_then(|()| self.map_memory(context.ram, discarding, cancel));
            mapped.inspect_err(|_| self.unplug(bdf, context.segments)).map(|()| bdf)
        });
        self.strict = false;
        self.forget_memory_without_devices();
        added
    }

    pub(super) fn check_memory(&self) -> Result<(), PassthroughError> {
        if self.is_abandoning_memory() {
            return Err(PassthroughError::Leaving);
        }
        match self.progress().map(|progress| progress.state) {
            Some(PinState::Failed(reason)) => Err(PassthroughError::MemoryFailed(reason)),
            _ => Ok(()),
        }
    }

    /// Refuses a device that was removed while it was being opened, and still is: that thread resets the device once it
    /// is open, even if it was opened again since.
    pub(super) fn refuse_withdrawn(
        &self,
        config: &DeviceConfig,
        id: &str,
    ) -> Result<(), PassthroughError> {
        let place = OpenerPlace::of(config);
        let is_same = |other: &Abandoned| other.is_in_use() && other.place.is_of_device(&place);
        if self.withdrawn.iter().any(is_same) {
            let (id, place) = (id.to_owned(), place.into_text());
            return Err(PassthroughError::Withdrawn { id, place });
        }
        Ok(())
    }

    /// Refuses a device that is still being opened for a machine that has ended.
    pub(super) fn refuse_left(
        &self,
        config: &DeviceConfig,
        id: &str,
    ) -> Result<(), PassthroughError> {
        let place = OpenerPlace::of(config);
        if self.left.before(&place).is_empty() {
            return Ok(());
        }
        let (id, place) = (id.to_owned(), place.into_text());
        Err(PassthroughError::LeftOpening { id, place })
    }

    /// Unplugs the device at `bdf` and returns it to the host; unmaps memory with the last one. Returns its
    /// id.
    pub fn remove(&mut self, bdf: Bdf, segments: &Segments) -> Option<String> {
        let open = self.devices.iter().find(|(at, _)| *at == bdf);
        let id = match open.map(|(_, device)| device.id().to_owned()) {
            Some(id) => {
                self.unplug(bdf, segments);
                id
            }
            None => self.abandon_late(bdf, segments)?,
        };
        // A device that may never be open must not keep the group of one that is given back.
        self.hold = None;
        self.forget_memory_without_devices();
        Some(id)
    }

    pub(super) fn unplug(&mut self, bdf: Bdf, segments: &Segments) {
        let Some(at) = self.devices.iter().position(|(at, _)| *at == bdf) else { return };
        let (_, device) = self.devices.remove(at);
        self.withheld.forget(bdf);
        self.watched.forget(bdf);
        self.opened.remove(device.id());
        segments.remove_device(bdf);
        if let Some(notices) = &self.notices {
            notices.forget(device.id());
        }
        device.disarm();
        if self.devices.is_empty() {
            read(&self.device_list).memory = None;
            // Releases vCPUs that wait for memory to be mapped, and ends the mapping.
            self.pinning = None;
            if let Some(space) = &self.space {
                space.unmap_all();
            }
        }
        // Closing the device releases its group, which must not be needed by a mapping any more.
        drop(device);
        read(&self.device_list).devices.retain(|device| device.strong_count() > 0);
        let has_failed = |(_, device): &(Bdf, Arc<VfioPciDevice>)| device.is_disarmed();
        if !self.devices.is_empty() && self.devices.iter().all(has_failed) {
            unmap_if_unused(&self.device_list);
        }
    }

    /// Resets all DMA state once the last device has been removed.
    pub(super) fn forget_memory_without_devices(&mut self) {
        if self.devices.is_empty() {
            self.gate = new_gate(&self.standstill);
            self.peers = None;
            // It was of those that are gone.
            self.strict = false;
            let is_prepared =
                self.early.is_some() || self.kept.is_some() || self.prepinned.is_some();
            if is_prepared && !self.late.is_empty() {
                // For those that are still being opened.
                return;
            }
            // Memory may be discarded from here on.
            self.early = None;
            // What was mapped before the guest ran, and no device came to use: it must not be taken for mapped by one
            // that is added later.
            let prepared = (self.kept.take(), self.prepinned.take());
            if (prepared.0.is_some() || prepared.1.is_some())
                && let Some(space) = &self.space
            {
                space.unmap_all();
            }
            // With type1 there is nothing to unmap from when the groups are gone.
            drop(prepared);
            self.hold = None;
            self.ban = None;
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
    use parking_lot::Mutex;
    use vfio::DmaGate;
    use vfio::fakes::{FakeFunction, FakeTarget};

    use super::super::announcing::tests::new_segment;
    use super::super::migration::tests::two_devices;
    use super::super::openers::OpenerEnd;
    use super::*;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn memory_that_a_device_waits_for_is_waited_for_until_that_is_cancelled() {
        let (mut passthrough, _hosts) = two_devices();
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let (kernel, (arrived, at_map)) = (Arc::new(DmaGate::default()), channel());
        let (hold, arrived) = (Arc::clone(&kernel), Mutex::new(arrived));
        let before = Box::new(move |_| {
            let _ = arrived.lock().send(());
            hold.wait().map_err(io::Error::other)
        });
        passthrough.space =
            Some(Arc::new(FakeTarget { before: Some(before), ..FakeTarget::default() }));
        passthrough.strict = true;
        let cancel = CancelToken::default();
        let (over, is_over) = channel();
        let asked = cancel.clone();
        std::thread::spawn(move || {
            let result = passthrough.map_memory(&ram, DiscardingDevices::default(), &asked);
            let _ = over.send(result);
            drop(passthrough);
        });
        at_map.recv_timeout(PATIENCE).unwrap();
        assert!(is_over.try_recv().is_err(), "the device waits for its memory");
        cancel.cancel();
        let result = is_over.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(result, Err(PassthroughError::Cancelled)), "{result:?}");
        kernel.open();
    }

    fn given(path: &str) -> DeviceConfig {
        DeviceConfig { path: Some(path.into()), ..DeviceConfig::default() }
    }

    /// Two devices, for which all memory is mapped.
    fn mapped() -> (Passthrough, [Arc<FakeFunction>; 2], Arc<FakeTarget>) {
        let (mut passthrough, hosts) = two_devices();
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let target = Arc::new(FakeTarget::default());
        passthrough.space = Some(target.clone());
        let (discarding, cancel) = (DiscardingDevices::default(), CancelToken::default());
        passthrough.map_memory(&ram, discarding, &cancel).unwrap();
        let list = &passthrough.device_list;
        read(list).devices =
            passthrough.devices.iter().map(|(_, device)| Arc::downgrade(device)).collect();
        passthrough.await_memory(&|| false).unwrap();
        assert!(!target.mapped.lock().is_empty());
        (passthrough, hosts, target)
    }

    #[test]
    fn memory_does_not_stay_mapped_for_a_device_that_is_opened_for_nothing() {
        for is_being_opened in [true, false] {
            let (mut passthrough, hosts, target) = mapped();
            // What the thread that opens it has.
            let (end, space) = (OpenerEnd::default(), passthrough.space.clone());
            let _mark = is_being_opened.then(|| end.mark());
            if !is_being_opened {
                drop(end.mark());
            }
            let place = OpenerPlace::of(&given("/one"));
            passthrough.withdrawn.push(Abandoned { place: place.clone(), end });
            let left = passthrough.left.clone();
            drop(passthrough);
            assert_eq!(left.before(&place).len(), usize::from(is_being_opened));
            // Otherwise it ends with the space, which nothing else has then.
            assert_eq!(target.mapped.lock().is_empty(), is_being_opened);
            assert_eq!(hosts.map(|host| *host.resets.lock() > 0), [is_being_opened; 2]);
            drop(space);
        }
    }

    #[test]
    fn memory_does_not_stay_mapped_for_devices_that_have_failed() {
        let (mut passthrough, _hosts, target) = mapped();
        let segments = Segments::of_test(new_segment());
        let bdfs: Vec<_> = passthrough.devices.iter().map(|(bdf, _)| *bdf).collect();
        passthrough.devices[0].1.disarm();
        unmap_if_unused(&passthrough.device_list);
        assert!(!target.mapped.lock().is_empty(), "the other one works");
        assert!(passthrough.remove(bdfs[1], &segments).is_some());
        assert!(target.mapped.lock().is_empty());
        assert!(
            passthrough.check_memory().is_err() && passthrough.remove(bdfs[0], &segments).is_some()
        );
        passthrough.check_memory().unwrap();
    }

    #[test]
    fn a_device_that_is_still_being_opened_for_nothing_is_refused() {
        let (mut passthrough, _hosts) = two_devices();
        let end = OpenerEnd::default();
        let mark = end.mark();
        passthrough.withdrawn.push(Abandoned { place: OpenerPlace::of(&given("/one")), end });
        let refused = passthrough.refuse_withdrawn(&given("/one"), "again");
        assert!(matches!(refused, Err(PassthroughError::Withdrawn { .. })), "{refused:?}");
        passthrough.refuse_withdrawn(&given("/two"), "other").unwrap();
        passthrough.refuse_left(&given("/one"), "again").unwrap();
        passthrough.left.add(passthrough.withdrawn.drain(..));
        let refused = passthrough.refuse_left(&given("/one"), "again");
        assert!(matches!(refused, Err(PassthroughError::LeftOpening { .. })), "{refused:?}");
        passthrough.refuse_withdrawn(&given("/one"), "again").unwrap();
        drop(mark);
        passthrough.refuse_left(&given("/one"), "again").unwrap();
    }
}
