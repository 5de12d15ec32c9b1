// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opening passed-through devices in the background while the guest runs.
//!
//! Opening a device resets it, which takes a tenth of a second and more for each; a guest has a lot to
//! do before it looks for its devices. So they are opened by threads of their own, all at once, and a
//! vCPU that comes to one's configuration space too soon waits there for it, for some seconds.
//!
//! Owns the threads and the device numbers that are kept meanwhile. What can be said at once about a
//! device that cannot be passed through is said before the guest has run.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use memory::GuestRam;
use parking_lot::Mutex;
use pci::{Bdf, DeviceNumber, PciDevice};
use vfio::{
    DmaMap, DmaSpace, DmaTarget, GuestRamPopulator, HostFunction, Pinning, VfioError, VfioFunction,
    pin_time,
};

use super::backend::place_of;
use super::{DiscardingDevices, KeptDma, Passthrough, PassthroughError, no_device, reach};
use crate::config::{DeviceConfig, PinMode, VmConfig};
use crate::events;
use crate::machine::events::GuestEvent;
use crate::machine::opening::run_unless_cancelled;
use crate::machine::pausing::{CancelToken, POLL_INTERVAL};
use crate::machine::segments::Segments;
use crate::machine::virtio::PciContext;

/// When the configured devices are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Before the guest starts.
    Before,
    /// While the guest starts, unless it has to wait for memory to be mapped anyway.
    Meanwhile,
}

impl Opening {
    /// Whether the guest starts before the devices of `config` are open.
    pub fn overlaps(self, config: &VmConfig) -> bool {
        let waits = |device: &DeviceConfig| device.pin == PinMode::Strict;
        self == Self::Meanwhile && !config.devices.iter().flatten().any(waits)
    }
}

/// How waiting for a device has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// The device is open, or opening it has failed.
    There,
    /// The time is over.
    Late,
    /// The start was cancelled.
    Cancelled,
}

/// A device that is being opened. Dropping it waits for the thread that opens it, as the next VM may use
/// the device.
pub struct PendingDevice {
    config: DeviceConfig,
    id: String,
    number: DeviceNumber,
    /// No vCPU waits for it any more: the guest finds it once it is open and memory is mapped.
    is_late: bool,
    thread: Option<JoinHandle<Result<Opened, VfioError>>>,
    /// Disconnected when the thread has finished.
    ended: Receiver<()>,
}

/// An open function.
pub struct Opened {
    /// The function, after a reset.
    pub function: VfioFunction,
    /// When it was open.
    pub at: Instant,
}

impl PendingDevice {
    /// Starts to open a device on a thread.
    fn begin(
        config: DeviceConfig,
        id: String,
        number: DeviceNumber,
        open: Opener,
    ) -> io::Result<Self> {
        let (end, ended) = channel();
        let work = move || {
            let opened = open();
            drop::<std::sync::mpsc::Sender<()>>(end);
            opened
        };
        let thread = stoppable_thread::spawn("vfio-open", work)?;
        Ok(Self { config, id, number, is_late: false, thread: Some(thread), ended })
    }

    /// Waits until the device is open or opening it has failed, for no longer than `until`.
    fn arrival(&self, until: Option<Instant>, cancel: &CancelToken) -> Arrival {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let time = left.map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL));
            if self.ended.recv_timeout(time) != Err(RecvTimeoutError::Timeout) {
                return Arrival::There;
            }
            if cancel.is_cancelled() {
                return Arrival::Cancelled;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Arrival::Late;
            }
        }
    }

    fn wait(&mut self) -> Result<Opened, VfioError> {
        let failed = |why| VfioError::Io { what: "open it", source: io::Error::other(why) };
        let thread = self.thread.take().ok_or_else(|| failed("it has been opened already"))?;
        thread.join().unwrap_or_else(|_| Err(failed("the thread that does has panicked")))
    }
}

/// Opens a device, on any thread.
pub type Opener = Box<dyn FnOnce() -> Result<Opened, VfioError> + Send>;

/// Resets a function, so that the guest finds it in its power-on state. `begun`: when opening it started.
///
/// # Errors
/// It cannot be reset, so that the guest must not have it.
fn reset(id: &str, function: &dyn HostFunction, begun: Instant) -> Result<Instant, VfioError> {
    function.reset()?;
    let took_ms = begun.elapsed().as_millis().to_string();
    log::info!("passed-through device '{id}' is open after {took_ms} ms");
    events::emit("vm", "passthrough-device-opened", &[("id", id), ("took_ms", &took_ms)]);
    Ok(Instant::now())
}

impl Drop for PendingDevice {
    fn drop(&mut self) {
        drop(self.wait());
    }
}

impl Passthrough {
    /// The closure that opens a device. Checks that need no opening are made here.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn opener(
        &mut self,
        config: &DeviceConfig,
        id: &str,
        context: &PciContext<'_>,
    ) -> Result<Opener, PassthroughError> {
        let begun = Instant::now();
        let name = id.to_owned();
        reach::check(config, context.ram).map_err(|source| no_device(config, id, source))?;
        if let Some(function) = self.prepinned.as_mut().and_then(|slot| slot.take_attached(config))
        {
            return Ok(Box::new(move || {
                let at = reset(&name, &function, begun)?;
                Ok(Opened { function, at })
            }));
        }
        let place = place_of(config).and_then(|place| place.check().map(|()| place));
        let place = place.map_err(|source| no_device(config, id, source))?;
        let space = self.space(context)?;
        Ok(Box::new(move || {
            let function = VfioFunction::attach(&name, place, space.as_ref())?;
            let at = reset(&name, &function, begun)?;
            Ok(Opened { function, at })
        }))
    }

    /// Opens a device on a thread, and waits for it until cancelled. `token` lives until it is open, or closed again.
    pub(super) fn open_unless_cancelled(
        &mut self,
        open: (Opener, Arc<()>),
        cancel: &CancelToken,
    ) -> io::Result<Option<Result<Opened, VfioError>>> {
        // Kept for a second attempt.
        let open = Arc::new(Mutex::new(Some(open)));
        let run = || {
            let open = Arc::clone(&open);
            let open_once = move || {
                let (open, token) = open.lock().take()?;
                Some((open(), token))
            };
            let opened = run_unless_cancelled(open_once, cancel)?;
            Ok(opened.flatten().map(|(opened, _)| opened))
        };
        run().or_else(|error| self.with_room(error, run))
    }

    /// Attaches the device of the pool's slot, which is open already, before the others: that shows whether the slot can
    /// be used, and if so they join its address space. One that cannot be used is released.
    pub(super) fn attach_that_of_slot(
        &mut self,
        devices: &[DeviceConfig],
        context: &PciContext<'_>,
    ) {
        let Some(slot) = &mut self.prepinned else { return };
        let Some(config) = devices.iter().find(|device| slot.is_for(device)) else { return };
        let Some(place) = slot.take_device() else { return };
        let id = config.id.clone().unwrap_or_default();
        let attached = self.space(context).and_then(|space| {
            VfioFunction::attach(&id, place, space.as_ref())
                .map_err(|source| no_device(config, &id, source))
        });
        match (attached, &mut self.prepinned) {
            (Ok(function), Some(slot)) => slot.keep_attached(function),
            (Ok(_), None) => {}
            (Err(error), _) => self.do_without_slot(&error),
        }
    }

    fn do_without_slot(&mut self, error: &PassthroughError) {
        self.space = None;
        if let Some(slot) = self.prepinned.take() {
            slot.refuse(error);
        }
    }

    /// Starts to open a device, and reserves its place on the bus.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn expect(
        &mut self,
        config: &DeviceConfig,
        context: &PciContext<'_>,
    ) -> Result<(), PassthroughError> {
        let id = config.id.clone().unwrap_or_default();
        let open = self.opener(config, &id, context)?;
        let requested = config.pci_device_id.and_then(|number| DeviceNumber::new(number).ok());
        let bus = |source| PassthroughError::Bus { id: id.clone(), source };
        let segment = context.segments.get(config.pci_segment).map_err(bus)?;
        let number = segment.expect(requested, &id).map_err(|source| bus(source.into()))?;
        if config.pin == PinMode::Announce {
            // No vCPU waits until it is open either.
            segment.hide(number);
        }
        let pending = PendingDevice::begin(config.clone(), id.clone(), number, open);
        let pending = pending.map_err(|source| {
            segment.release(number);
            let what = "start the thread that opens it";
            no_device(config, &id, VfioError::Io { what, source })
        })?;
        self.pending.push(pending);
        Ok(())
    }

    /// Whether limits allow memory to be mapped for the devices being opened; checked before the guest
    /// starts.
    ///
    /// # Errors
    /// The limit that is too low.
    pub fn check_limits(
        &self,
        ram: &Arc<GuestRam>,
        discarding: &DiscardingDevices,
    ) -> Result<(), PassthroughError> {
        // Memory that a pool has mapped is within the pool's limits.
        let is_kept = self.kept.as_ref().is_some_and(|kept| kept.is_all(ram.total_bytes()));
        let is_to_map = !self.pending.is_empty() && self.prepinned.is_none() && !is_kept;
        let Some(space) = self.space.as_ref().filter(|_| is_to_map) else {
            return Ok(());
        };
        let populator = GuestRamPopulator::new(Arc::clone(ram), None);
        let discards = discarding.balloon.is_some();
        let target: Arc<dyn DmaTarget> = Arc::<dyn DmaSpace>::clone(space);
        let dma_map = DmaMap::plan(target, &populator, discards, Box::new(|_| {}));
        // Those bytes are locked, and count for the process.
        let kept_bytes = self.kept.as_ref().map_or(0, KeptDma::mapped_bytes);
        Ok(Pinning::check(&dma_map, &populator, kept_bytes)?)
    }

    /// Where the device with this id is on the bus, or will be once it is open.
    pub fn address_of(&self, id: &str) -> Option<Bdf> {
        let open = self.devices.iter().find(|(_, device)| device.id() == id);
        let pending = || self.pending.iter().find(|pending| pending.id == id);
        let place =
            |pending: &PendingDevice| Bdf::on_root_bus(pending.config.pci_segment, pending.number);
        open.map(|(bdf, _)| *bdf).or_else(|| pending().map(place))
    }

    /// Whether devices are still being opened, so that [`Passthrough::finish_opening`] has to be called.
    pub fn is_opening(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Waits until all devices are open, for no longer than `until`; returns whether they are.
    ///
    /// # Errors
    /// Names the device that cannot be opened, or says that the start was cancelled. The machine is unusable then.
    pub fn receive_opened(
        &mut self,
        context: &PciContext<'_>,
        until: Option<Instant>,
        cancel: &CancelToken,
    ) -> Result<bool, PassthroughError> {
        // In order: the failure of one device is reported without waiting for the ones after it.
        while let Some(pending) = self.pending.get(self.devices.len()) {
            match pending.arrival(until, cancel) {
                Arrival::There => {
                    let received = self.receive(context);
                    received.or_else(|error| self.leave_out(context.segments, error))?;
                }
                Arrival::Late => return Ok(false),
                Arrival::Cancelled => return Err(PassthroughError::Cancelled),
            }
        }
        Ok(true)
    }

    /// Has no vCPU wait any longer for devices that are still to be plugged, but for those of `pin=overlap`: the guest
    /// finds them once all are open and memory is mapped for them. From here on the guest works without them, so that one
    /// that cannot be opened is left out ([`Passthrough::take_unopened`]).
    pub fn withhold_late(&mut self, segments: &Segments) {
        for pending in &mut self.pending {
            let place = Bdf::on_root_bus(pending.config.pci_segment, pending.number);
            if pending.config.pin != PinMode::Overlap
                && let Some(segment) = segments.of(place)
            {
                let id = &pending.id;
                log::warn!(
                    "opening passed-through devices takes long: the guest finds '{id}' later, as if plugged in then"
                );
                segment.hide(pending.number);
                pending.is_late = true;
            }
        }
    }

    /// Waits until all devices are open, plugs them, and starts to map memory. Does nothing if there are
    /// none. `background_bytes`: how much a background prefault has populated.
    ///
    /// # Errors
    /// Names the device, or says that the start was cancelled. The machine is unusable then.
    pub fn finish_opening(
        &mut self,
        context: &PciContext<'_>,
        discarding: DiscardingDevices,
        background_bytes: &dyn Fn() -> u64,
        cancel: &CancelToken,
    ) -> Result<(), PassthroughError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.receive_opened(context, None, cancel)?;
        self.stop_early_populating();
        let before = self.populated_early(background_bytes());
        if self.pending.is_empty() {
            return Ok(());
        }
        // Before vCPUs can reach the devices: the thread that opens the gate has been started.
        self.map_memory(context.ram, discarding, cancel)?;
        let (mut is_too_long, mut unplaced) = (None, Vec::new());
        for (pending, (bdf, device)) in self.pending.iter().zip(&self.devices) {
            let on_bus: Arc<dyn PciDevice> = device.clone();
            let bus = |source| PassthroughError::Bus { id: pending.id.clone(), source };
            let segment = context.segments.get(pending.config.pci_segment).map_err(bus)?;
            let is_withheld = match pending.config.pin {
                _ if pending.is_late => true,
                PinMode::Announce => true,
                PinMode::Overlap | PinMode::Strict => false,
                PinMode::Auto => *is_too_long.get_or_insert_with(|| {
                    let pinning = self.pinning.as_ref();
                    pinning.is_some_and(|pinning| {
                        pin_time::is_too_long(pinning, before, || cancel.is_cancelled())
                    })
                }),
            };
            if is_withheld {
                log::info!("the guest finds '{}' once memory is mapped", pending.id);
                segment.hide(pending.number);
                self.withheld.add(*bdf);
            }
            if let Err(source) = segment.deliver(&on_bus, pending.number) {
                let explained =
                    context.segments.explain(segment.segment(), on_bus.as_ref(), source);
                let error = bus(explained);
                if !pending.is_late {
                    return Err(error);
                }
                unplaced.push((*bdf, pending.id.clone(), error));
            }
        }
        self.pending.clear();
        for (place, id, error) in unplaced {
            self.unplug(place, context.segments);
            self.note_unopened(context.segments, place, id, &error);
        }
        if self.withholds_any() {
            // Memory may be mapped already.
            (self.sink)(GuestEvent::WithheldDevice);
        }
        Ok(())
    }

    /// Receives the first device that is still to be received; it is open, or has failed.
    fn receive(&mut self, context: &PciContext<'_>) -> Result<(), PassthroughError> {
        let Some(pending) = self.pending.get_mut(self.devices.len()) else { return Ok(()) };
        let opened = pending.wait();
        let (config, id, number) = (pending.config.clone(), pending.id.clone(), pending.number);
        let opened = opened.map_err(|source| no_device(&config, &id, source));
        let Opened { function, at } = opened?;
        let device = self.make_device(function, &config, &id, number, context)?;
        self.keep(&config, Bdf::on_root_bus(config.pci_segment, number), device, at);
        Ok(())
    }

    /// Leaves out the device that could not be received, if the guest has begun to work without it.
    fn leave_out(
        &mut self,
        segments: &Segments,
        error: PassthroughError,
    ) -> Result<(), PassthroughError> {
        let at = self.devices.len();
        if self.pending.get(at).is_none_or(|pending| !pending.is_late) {
            return Err(error);
        }
        let pending = self.pending.remove(at);
        let place = Bdf::on_root_bus(pending.config.pci_segment, pending.number);
        self.note_unopened(segments, place, pending.id.clone(), &error);
        Ok(())
    }

    /// Gives the number of a device back without which the guest goes on.
    fn note_unopened(
        &mut self,
        segments: &Segments,
        place: Bdf,
        id: String,
        error: &PassthroughError,
    ) {
        segments.release(place);
        let why = error_text::chain(error);
        log::error!("the VM goes on without '{id}': {why}");
        events::emit("vm", "passthrough-device-lost", &[("id", &id), ("error", &why)]);
        self.unopened.push((place, id));
    }

    /// The devices that were left out, and are to be taken out of the configuration.
    pub fn take_unopened(&mut self) -> Vec<(Bdf, String)> {
        let unopened = std::mem::take(&mut self.unopened);
        if !unopened.is_empty() {
            self.forget_memory_without_devices();
        }
        unopened
    }

    /// Releases vCPUs that wait for a device that will not be plugged.
    pub fn release_numbers(&self, segments: &Segments) {
        for PendingDevice { config, number, .. } in &self.pending {
            segments.release(Bdf::on_root_bus(config.pci_segment, *number));
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use pci::ConfigAddress;

    use super::super::announcing::tests::new_segment;
    use super::super::migration::tests::two_devices;
    use super::*;

    /// A device whose opening takes until the test makes it fail.
    fn slow(number: u8) -> (PendingDevice, std::sync::mpsc::Sender<()>) {
        let (go_on, told) = channel::<()>();
        let open = Box::new(move || {
            let _ = told.recv();
            Err(VfioError::Io { what: "open it", source: io::Error::other("a test") })
        });
        let number = DeviceNumber::new(number).unwrap();
        let config = DeviceConfig::default();
        (PendingDevice::begin(config, "slow".to_owned(), number, open).unwrap(), go_on)
    }

    #[test]
    fn a_device_that_cannot_be_reset_is_not_open() {
        let (_, [one, _]) = two_devices();
        reset("one", one.as_ref(), Instant::now()).unwrap();
        one.refuses_resets.store(true, Ordering::Relaxed);
        let refused = reset("one", one.as_ref(), Instant::now());
        assert!(matches!(refused, Err(VfioError::Reset(_))), "{refused:?}");
        assert_eq!(*one.resets.lock(), 2);
    }

    #[test]
    fn a_device_has_its_address_before_it_is_open() {
        let (mut passthrough, _hosts) = two_devices();
        let (pending, go_on) = slow(7);
        passthrough.pending = vec![pending];
        passthrough.pending[0].config.pci_segment = 3;
        let number = |id: &str| passthrough.address_of(id).map(|bdf| (bdf.segment(), bdf.device()));
        assert_eq!(["one", "two", "slow"].map(number), [Some((0, 1)), Some((0, 2)), Some((3, 7))]);
        assert_eq!(number("none"), None);
        drop(go_on);
    }

    #[test]
    fn a_start_that_is_cancelled_or_late_waits_for_no_device() {
        let (first, go_on) = slow(7);
        let (second, never) = slow(8);
        let cancel = CancelToken::default();
        drop(go_on);
        assert_eq!(
            first.arrival(None, &cancel),
            Arrival::There,
            "its failure is reported when it is received"
        );
        let begun = Instant::now();
        let soon = begun + Duration::from_millis(30);
        assert_eq!(second.arrival(Some(soon), &cancel), Arrival::Late);
        assert!(Instant::now() >= soon);
        assert_eq!(second.arrival(Some(begun), &cancel), Arrival::Late, "that has been");
        cancel.cancel();
        assert_eq!(second.arrival(None, &cancel), Arrival::Cancelled);
        drop(never);
        assert_eq!(second.arrival(None, &CancelToken::default()), Arrival::There);
    }

    #[test]
    fn only_a_late_device_that_cannot_be_opened_is_left_out() {
        let (mut passthrough, _hosts) = two_devices();
        passthrough.devices.clear();
        let segment = new_segment();
        let number = segment.expect(DeviceNumber::new(7).ok(), "slow").unwrap();
        let segments = Segments::of_test(Arc::clone(&segment));
        let (pending, go_on) = slow(7);
        drop(go_on);
        passthrough.pending = vec![pending];
        let error = || PassthroughError::Cancelled;
        passthrough.leave_out(&segments, error()).unwrap_err();
        assert_eq!(passthrough.pending.len(), 1, "the VM cannot start without it");
        passthrough.withhold_late(&segments);
        passthrough.leave_out(&segments, error()).unwrap();
        assert!(passthrough.pending.is_empty() && !passthrough.is_opening());
        let place = Bdf::on_root_bus(0, number);
        assert_eq!(passthrough.take_unopened(), [(place, "slow".to_owned())]);
        assert!(passthrough.take_unopened().is_empty());
        assert_eq!(segment.choose(Some(number), "another").unwrap(), number, "its place is free");
    }

    #[test]
    fn nothing_waits_for_a_late_device_but_where_that_is_asked_for() {
        let (mut passthrough, _hosts) = two_devices();
        let segment = new_segment();
        let wish = |number| Some(DeviceNumber::new(number).unwrap());
        for number in [7, 8] {
            segment.expect(wish(number), "slow").unwrap();
        }
        let (late, never) = slow(7);
        let (mut overlapping, neither) = slow(8);
        overlapping.config.pin = PinMode::Overlap;
        passthrough.pending = vec![late, overlapping];
        let (seen, sees) = channel();
        for device in [7, 8] {
            let (segment, seen) = (Arc::clone(&segment), seen.clone());
            std::thread::spawn(move || {
                let mut vendor = [0; 2];
                let address = ConfigAddress { bus: 0, device, function: 0, offset: 0 };
                segment.read_config(address, &mut vendor);
                let _ = seen.send((device, vendor));
            });
        }
        assert!(sees.recv_timeout(Duration::from_millis(50)).is_err(), "both wait");
        let segments = Segments::of_test(Arc::clone(&segment));
        passthrough.withhold_late(&segments);
        assert_eq!(sees.recv_timeout(Duration::from_mins(1)), Ok((7, [0xff; 2])));
        assert!(sees.recv_timeout(Duration::from_millis(50)).is_err(), "the other goes on waiting");
        assert_eq!([0, 1].map(|at: usize| passthrough.pending[at].is_late), [true, false]);
        passthrough.release_numbers(&segments);
        assert_eq!(sees.recv_timeout(Duration::from_mins(1)), Ok((8, [0xff; 2])));
        drop((never, neither));
    }
}
