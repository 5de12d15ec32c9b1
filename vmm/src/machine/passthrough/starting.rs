// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The start of a guest whose passed-through devices are opened meanwhile.
//!
//! Owns what the start waits for: each device for as long as a vCPU may wait, and those of `pin=overlap`, without which the
//! guest cannot be, to the end. The first device that is open has memory mapped. Those that came in time are put on the bus
//! in the order of the configuration, so that each boot has their BARs at the same addresses, and those that are waited for
//! to the end after them; all others are left to `late`. Runs on the thread that makes the machine, while the guest runs. Must never leave a vCPU waiting for a device
//! that will not come.

use std::sync::Arc;
use std::time::Instant;

use memory::GuestRam;
use pci::{Bdf, PciDevice};
use vfio::{HostFunction, VfioError, VfioPciDevice};

use super::opening::{Opened, PendingDevice, report_opened};
use super::{DiscardingDevices, Passthrough, PassthroughError, no_device};
use crate::config::PinMode;
use crate::machine::events::GuestEvent;
use crate::machine::pausing::{CancelToken, POLL_INTERVAL};
use crate::machine::segments::Segments;
use crate::machine::virtio::PciContext;

/// Makes devices of open functions.
pub(super) trait MakeDevice {
    /// Makes the device that `pending` was, of its function.
    fn make(
        &self,
        passthrough: &mut Passthrough,
        pending: &PendingDevice,
        function: Arc<dyn HostFunction>,
    ) -> Result<Arc<VfioPciDevice>, PassthroughError>;
}

impl MakeDevice for PciContext<'_> {
    fn make(
        &self,
        passthrough: &mut Passthrough,
        pending: &PendingDevice,
        function: Arc<dyn HostFunction>,
    ) -> Result<Arc<VfioPciDevice>, PassthroughError> {
        let PendingDevice { config, id, number, .. } = pending;
        passthrough.make_device(function, config, id, *number, self)
    }
}

/// What a device that is open becomes part of.
pub(super) struct Place<'a> {
    pub(super) make: &'a dyn MakeDevice,
    pub(super) segments: &'a Segments,
    pub(super) ram: &'a Arc<GuestRam>,
}

impl<'a> Place<'a> {
    pub(super) fn of(context: &'a PciContext<'a>) -> Self {
        Self { make: context, segments: context.segments, ram: context.ram }
    }
}

/// What the start of a guest knows of its devices.
pub struct DeviceStart<'a> {
    /// Until memory is being mapped.
    discarding: Option<DiscardingDevices>,
    cancel: &'a CancelToken,
}

impl<'a> DeviceStart<'a> {
    /// Of a guest that has begun. `cancel` ends every wait.
    pub fn new(discarding: DiscardingDevices, cancel: &'a CancelToken) -> Self {
        Self { discarding: Some(discarding), cancel }
    }
}

/// A device that is open, and not on the bus yet.
pub(super) struct ArrivedDevice {
    order: usize,
    bdf: Bdf,
    pin: PinMode,
    device: Arc<VfioPciDevice>,
}

impl Passthrough {
    /// Waits until all devices are open, for no longer than `until`, and starts to map memory when the first is.
    ///
    /// # Errors
    /// Names a device that cannot be opened, or says that the start was cancelled. The machine is unusable then.
    pub fn receive_opened(
        &mut self,
        context: &PciContext<'_>,
        start: &mut DeviceStart<'_>,
        until: Option<Instant>,
    ) -> Result<(), PassthroughError> {
        self.receive_opened_at(&Place::of(context), start, until)
    }

    fn receive_opened_at(
        &mut self,
        place: &Place<'_>,
        start: &mut DeviceStart<'_>,
        until: Option<Instant>,
    ) -> Result<(), PassthroughError> {
        loop {
            let now = Instant::now();
            self.receive_those_open(place, start)?;
            let Some(next) = self.pending.first() else { return Ok(()) };
            // The event of that waits until the machine is made, and the guest looks for its devices before.
            if let Some(left) = self.watched.take_long() {
                self.withhold_unseen(place.segments, left);
                continue;
            }
            if start.cancel.is_cancelled() {
                return Err(PassthroughError::Cancelled);
            }
            let left = until.map(|until| until.saturating_duration_since(now));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(());
            }
            next.wait(left.map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL)));
        }
    }

    fn receive_those_open(
        &mut self,
        place: &Place<'_>,
        start: &mut DeviceStart<'_>,
    ) -> Result<(), PassthroughError> {
        let mut at = 0;
        while let Some(pending) = self.pending.get(at) {
            let Some(opened) = pending.take() else {
                at += 1;
                continue;
            };
            let pending = self.pending.remove(at);
            let received = self.receive(&pending, opened, place);
            // A vCPU may wait for it, and nothing else ends that any more.
            let device = received.inspect_err(|_| place.segments.release(pending.bdf()))?;
            let (order, bdf, pin) = (pending.order, pending.bdf(), pending.config.pin);
            self.arrived.push(ArrivedDevice { order, bdf, pin, device });
            self.begin_to_map(place.ram, start)?;
        }
        self.release_hold();
        Ok(())
    }

    /// Makes the device that was being opened one of the machine.
    pub(super) fn receive(
        &mut self,
        pending: &PendingDevice,
        opened: Result<Opened, VfioError>,
        place: &Place<'_>,
    ) -> Result<Arc<VfioPciDevice>, PassthroughError> {
        let PendingDevice { config, id, .. } = pending;
        let opened = opened.map_err(|source| no_device(config, id, source))?;
        report_opened(id, &opened);
        let Opened { function, at, .. } = opened;
        let device = place.make.make(self, pending, function)?;
        self.keep(config, pending.bdf(), Arc::clone(&device), at);
        Ok(device)
    }

    /// Starts to map memory, if that is not done yet. Before vCPUs can reach a device: the thread that opens the gate has
    /// to be there.
    fn begin_to_map(
        &mut self,
        ram: &Arc<GuestRam>,
        start: &mut DeviceStart<'_>,
    ) -> Result<(), PassthroughError> {
        let Some(discarding) = start.discarding.take() else { return Ok(()) };
        self.stop_early_populating();
        self.map_memory(ram, discarding, start.cancel)
    }

    /// Has neither a vCPU nor the start of the guest wait any longer for devices that are still being opened, but for those
    /// of `pin=overlap`: the guest finds them once they are open and memory is mapped for them
    /// ([`Passthrough::receive_late`]).
    pub fn withhold_late(&mut self, segments: &Segments) {
        let is_needed = |pending: &PendingDevice| pending.config.pin == PinMode::Overlap;
        let (needed, late) = std::mem::take(&mut self.pending).into_iter().partition(is_needed);
        self.pending = needed;
        let late: Vec<_> = late;
        for pending in late {
            if let Some(segment) = segments.of(pending.bdf()) {
                segment.hide(pending.number);
            }
            let id = &pending.id;
            log::warn!(
                "opening passed-through device '{id}' takes long: the guest finds it later, as if plugged in then"
            );
            self.withheld.add_unopened(pending.bdf());
            self.late.push(pending);
        }
    }

    /// Puts the devices on the bus that are open, seen by the guest or withheld, whichever lets it wait for no more than it
    /// can. Does nothing if there are none.
    ///
    /// # Errors
    /// Names the device that has no place there. The machine is unusable then.
    pub fn put_on_bus(
        &mut self,
        segments: &Segments,
        start: &DeviceStart<'_>,
    ) -> Result<(), PassthroughError> {
        let bars = self.time_for_bars();
        let Self { arrived, devices, withheld, pinning, .. } = self;
        arrived.sort_by_key(|arrived| arrived.order);
        // They were received in the order in which they were open.
        devices.sort_by_key(|(bdf, _)| arrived.iter().position(|arrived| arrived.bdf == *bdf));
        let (mut is_too_long, mut watched) = (None, Vec::new());
        for ArrivedDevice { bdf, pin, device, .. } in &*arrived {
            let on_bus: Arc<dyn PciDevice> = device.clone();
            let is_withheld = match pin {
                PinMode::Announce => true,
                PinMode::Overlap | PinMode::Strict => false,
                PinMode::Auto => *is_too_long.get_or_insert_with(|| {
                    pinning.as_ref().is_some_and(|pinning| {
                        let is_cancelled = || start.cancel.is_cancelled();
                        pinning.is_too_long(bars, is_cancelled)
                    })
                }),
            };
            if is_withheld {
                log::info!("the guest finds '{}' once memory is mapped", on_bus.id());
                segments.hide(*bdf);
                withheld.add(*bdf);
            } else if *pin == PinMode::Auto {
                watched.push(*bdf);
            }
            segments
                .deliver(&on_bus, *bdf)
                .map_err(|source| PassthroughError::Bus { id: on_bus.id().to_owned(), source })?;
        }
        arrived.clear();
        self.watch_forecast(watched, bars);
        if self.withholds_any() {
            // Memory may be mapped already.
            (self.sink)(GuestEvent::WithheldDevice);
        }
        Ok(())
    }

    /// Releases vCPUs that wait for a device that will not be plugged.
    pub fn release_numbers(&self, segments: &Segments) {
        self.pending.iter().for_each(|pending| segments.release(pending.bdf()));
        self.arrived.iter().for_each(|arrived| segments.release(arrived.bdf));
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use memory::{RamConfig, RamLayout, ZoneSpec};
    use pci::fakes::FakeMsiSource;
    use pci::{ConfigAddress, DeviceNumber, PciSegment};
    use vfio::VfioWiring;
    use vfio::fakes::{FakeFunction, FakeSlots, FakeTarget};

    use super::super::announcing::WaitsFor;
    use super::super::announcing::tests::{new_segment, vendor};
    use super::super::migration::tests::two_devices;
    use super::super::opening::tests::{Gives, new_host, slow};
    use super::*;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_mins(1);
    /// For what must not happen.
    const MOMENT: Duration = Duration::from_millis(50);

    /// Makes devices without KVM.
    pub(in super::super) struct FakeMaker;

    impl MakeDevice for FakeMaker {
        fn make(
            &self,
            passthrough: &mut Passthrough,
            pending: &PendingDevice,
            function: Arc<dyn HostFunction>,
        ) -> Result<Arc<VfioPciDevice>, PassthroughError> {
            let wiring = VfioWiring {
                msi_source: &FakeMsiSource::new(64),
                slots: Arc::new(FakeSlots::default()),
                gate: Arc::clone(&passthrough.gate),
                intx: None,
                trapped_bars: Vec::new(),
                has_ports: true,
                gpudirect_clique: None,
                peers: None,
            };
            let made = VfioPciDevice::new(pending.id.clone(), function, wiring);
            made.map(Arc::new).map_err(|source| no_device(&pending.config, &pending.id, source))
        }
    }

    /// A machine without devices, and what they are mapped in.
    pub(in super::super) struct Made {
        pub(in super::super) passthrough: Passthrough,
        pub(in super::super) target: Arc<FakeTarget>,
        pub(in super::super) ram: Arc<GuestRam>,
        pub(in super::super) segment: Arc<PciSegment>,
        pub(in super::super) segments: Segments,
    }

    impl Made {
        pub(in super::super) fn new(target: FakeTarget) -> Self {
            let (mut passthrough, _hosts) = two_devices();
            passthrough.devices.clear();
            let target = Arc::new(target);
            passthrough.space = Some(target.clone());
            let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
            let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
            let segment = new_segment();
            let segments = Segments::of_test(Arc::clone(&segment));
            Self { passthrough, target, ram, segment, segments }
        }

        /// Has a device opened for as long as the test wants.
        pub(in super::super) fn expect(&mut self, id: &str, number: u8, pin: PinMode) -> Gives {
            let sink = Arc::clone(&self.passthrough.sink);
            let on_opened = Box::new(move || sink(GuestEvent::WithheldDevice));
            let wish = DeviceNumber::new(number).unwrap();
            self.segment.expect(Some(wish), id).unwrap();
            let (pending, gives) = slow(id, number, pin, on_opened);
            self.passthrough.pending.push(pending);
            gives
        }

        pub(in super::super) fn host(&self) -> Arc<FakeFunction> {
            new_host(&self.passthrough)
        }

        pub(in super::super) fn receive(
            &mut self,
            start: &mut DeviceStart<'_>,
            until: Option<Instant>,
        ) -> Result<(), PassthroughError> {
            let Self { passthrough, ram, segments, .. } = self;
            let place = Place { make: &FakeMaker, segments, ram };
            passthrough.receive_opened_at(&place, start, until)
        }

        /// Waits until a device is open that the start waits for.
        pub(in super::super) fn await_pending(&self, id: &str) {
            let pending = self.passthrough.pending.iter().find(|pending| pending.id == id);
            pending.unwrap().wait(PATIENCE);
        }

        /// Receives the devices that are open.
        pub(in super::super) fn receive_now(&mut self) {
            let cancel = CancelToken::default();
            let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
            self.receive(&mut start, Some(Instant::now())).unwrap();
        }

        /// The start of the guest goes on without what is not open yet.
        pub(in super::super) fn start_without_late(&mut self) {
            let cancel = CancelToken::default();
            let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
            self.receive(&mut start, Some(Instant::now())).unwrap();
            self.passthrough.withhold_late(&self.segments);
            self.passthrough.put_on_bus(&self.segments, &start).unwrap();
            self.receive(&mut start, None).unwrap();
            self.passthrough.put_on_bus(&self.segments, &start).unwrap();
        }

        pub(in super::super) fn sees(&self, number: u8) -> bool {
            let number = DeviceNumber::new(number).unwrap();
            vendor(&self.segments, Bdf::on_root_bus(0, number)) != 0xffff
        }

        fn ids(&self) -> Vec<&str> {
            self.passthrough.devices.iter().map(|(_, device)| device.id()).collect()
        }
    }

    #[test]
    fn the_first_device_that_is_open_has_memory_mapped() {
        let mut made = Made::new(FakeTarget::default());
        let (_never, gives) =
            (made.expect("one", 7, PinMode::Auto), made.expect("two", 8, PinMode::Auto));
        let cancel = CancelToken::default();
        let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
        made.receive(&mut start, Some(Instant::now())).unwrap();
        assert!(made.passthrough.progress().is_none(), "there is nothing to map for");
        gives.send(made.host()).unwrap();
        made.passthrough.pending[1].wait(PATIENCE);
        made.receive(&mut start, Some(Instant::now())).unwrap();
        assert_eq!(made.ids(), ["two"]);
        made.passthrough.await_memory(&|| false).unwrap();
        assert!(made.target.is_mapped(0..4 << 20).is_some());
        assert!(!made.passthrough.pending.is_empty(), "the other one is waited for all the same");
    }

    #[test]
    fn devices_are_put_on_the_bus_in_their_order_whichever_is_open_first() {
        let mut bars = Vec::new();
        for is_in_order in [true, false] {
            let mut made = Made::new(FakeTarget::default());
            let gives =
                [7, 8].map(|number| made.expect(&number.to_string(), number, PinMode::Auto));
            let cancel = CancelToken::default();
            let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
            for at in if is_in_order { [0, 1] } else { [1, 0] } {
                gives[at].send(made.host()).unwrap();
                let id = (7 + at).to_string();
                let pending = made.passthrough.pending.iter().find(|pending| pending.id == id);
                pending.unwrap().wait(PATIENCE);
                made.receive(&mut start, Some(Instant::now())).unwrap();
            }
            assert_eq!(made.ids(), if is_in_order { ["7", "8"] } else { ["8", "7"] });
            made.passthrough.put_on_bus(&made.segments, &start).unwrap();
            assert!(made.sees(7) && made.sees(8) && !made.passthrough.withholds_any());
            assert_eq!(made.ids(), ["7", "8"]);
            bars.push(made.segment.devices().into_iter().map(|(_, it)| it.bar_decode().gpas));
        }
        let [first, second] = &mut bars[..] else { panic!("two boots") };
        assert!(first.by_ref().eq(second));
    }

    #[test]
    fn a_device_that_cannot_be_opened_in_time_ends_the_start_whichever_it_is() {
        let mut made = Made::new(FakeTarget::default());
        let (_never, fails) =
            (made.expect("one", 7, PinMode::Auto), made.expect("two", 8, PinMode::Announce));
        drop(fails);
        let cancel = CancelToken::default();
        let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
        let failed = made.receive(&mut start, None).unwrap_err();
        assert!(matches!(&failed, PassthroughError::Device { id, .. } if id == "two"), "{failed}");
        assert!(!made.sees(8), "no vCPU waits for it");
    }

    #[test]
    fn a_start_that_is_cancelled_or_late_waits_for_no_device() {
        let mut made = Made::new(FakeTarget::default());
        let _never = made.expect("one", 7, PinMode::Auto);
        let cancel = CancelToken::default();
        let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
        let soon = Instant::now() + Duration::from_millis(30);
        made.receive(&mut start, Some(soon)).unwrap();
        assert!(Instant::now() >= soon && !made.passthrough.pending.is_empty());
        cancel.cancel();
        let cancelled = made.receive(&mut start, None).unwrap_err();
        assert!(matches!(cancelled, PassthroughError::Cancelled), "{cancelled}");
    }

    #[test]
    fn only_the_late_device_is_withheld_and_the_others_work() {
        let mut made = Made::new(FakeTarget::default());
        let (_never, gives) =
            (made.expect("late", 7, PinMode::Auto), made.expect("here", 8, PinMode::Auto));
        gives.send(made.host()).unwrap();
        made.passthrough.pending[1].wait(PATIENCE);
        made.start_without_late();
        assert!(!made.sees(7) && made.sees(8));
        let listed = made.passthrough.withheld_devices();
        let listed: Vec<_> = listed.iter().map(|it| (it.id.as_str(), it.waits_for)).collect();
        assert_eq!(listed, [("late", WaitsFor::Opening)]);
        made.passthrough.await_memory(&|| false).unwrap();
        made.passthrough.devices[0].1.write_config(4, &[6, 0]);
        let refused = made.passthrough.check_movable(&crate::config::VmConfig::default());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("'late': it is still being opened"), "{refused}");
    }

    #[test]
    fn nothing_waits_for_a_late_device_but_where_that_is_asked_for() {
        let mut made = Made::new(FakeTarget::default());
        let (_late, needed) =
            (made.expect("late", 7, PinMode::Auto), made.expect("needed", 8, PinMode::Overlap));
        let (seen, sees) = channel();
        for device in [7, 8] {
            let (segment, seen) = (Arc::clone(&made.segment), seen.clone());
            std::thread::spawn(move || {
                let mut vendor = [0; 2];
                let address = ConfigAddress { bus: 0, device, function: 0, offset: 0 };
                segment.read_config(address, &mut vendor);
                let _ = seen.send((device, vendor));
            });
        }
        assert!(sees.recv_timeout(MOMENT).is_err(), "both wait");
        made.passthrough.withhold_late(&made.segments);
        assert_eq!(sees.recv_timeout(PATIENCE), Ok((7, [0xff; 2])));
        assert!(sees.recv_timeout(MOMENT).is_err(), "the other goes on waiting");
        assert_eq!(made.passthrough.pending[0].id, "needed");
        needed.send(made.host()).unwrap();
        made.start_without_late();
        assert!(matches!(sees.recv_timeout(PATIENCE), Ok((8, vendor)) if vendor != [0xff; 2]));
    }

    #[test]
    fn those_that_are_open_are_on_the_bus_while_one_is_awaited() {
        let mut made = Made::new(FakeTarget::default());
        let gives = made.expect("here", 7, PinMode::Auto);
        let needed = made.expect("needed", 8, PinMode::Overlap);
        gives.send(made.host()).unwrap();
        made.passthrough.pending[0].wait(PATIENCE);
        let cancel = CancelToken::default();
        let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
        made.receive(&mut start, Some(Instant::now())).unwrap();
        made.passthrough.withhold_late(&made.segments);
        made.passthrough.put_on_bus(&made.segments, &start).unwrap();
        assert!(made.sees(7) && made.passthrough.is_opening());
        needed.send(made.host()).unwrap();
        made.receive(&mut start, None).unwrap();
        made.passthrough.put_on_bus(&made.segments, &start).unwrap();
        assert!(made.sees(7) && made.sees(8) && !made.passthrough.is_opening());
    }

    #[test]
    fn a_vcpu_that_waits_for_a_device_goes_on_when_the_machine_ends() {
        let mut made = Made::new(FakeTarget::default());
        let (_never, gives) =
            (made.expect("one", 7, PinMode::Overlap), made.expect("two", 8, PinMode::Overlap));
        gives.send(made.host()).unwrap();
        made.passthrough.pending[1].wait(PATIENCE);
        let cancel = CancelToken::default();
        let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
        made.receive(&mut start, Some(Instant::now())).unwrap();
        assert_eq!(made.passthrough.arrived.len(), 1);
        made.passthrough.release_numbers(&made.segments);
        assert!(!made.sees(7) && !made.sees(8));
    }
}
