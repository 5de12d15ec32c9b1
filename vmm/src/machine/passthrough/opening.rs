// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opening passed-through devices in the background while the guest runs.
//!
//! Opening a device resets it, which takes a tenth of a second and more for each; a guest has a lot to
//! do before it looks for its devices. So they are opened by threads of their own, all at once, and a
//! vCPU that comes to one's configuration space too soon waits there for it, for some seconds.
//!
//! ```text
//!   expect ──> pending ──> arrived ──> on the bus              starting
//!                 │ late
//!                 └──────> withheld, still opened ──> on the bus, withheld until memory is mapped      late, announcing
//! ```
//!
//! Owns the threads, and the device numbers that are reserved when they begin. A thread hands the device over and tells
//! the owner of the machine; it shares nothing else with it. What can be said at once about a device that cannot be
//! passed through is said before the guest has run.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use memory::GuestRam;
use parking_lot::Mutex;
use pci::{Bdf, DeviceNumber, PciDevice as _};
use prezero_pool_client::PoolConnection;
use vfio::{
    DmaMap, DmaSpace, DmaTarget, GuestRamPopulator, HostFunction, HostPlace, Pinning, VfioError,
    VfioFunction,
};

use super::backend::place_of;
use super::openers::{Abandoned, EndMark, OpenerEnd, OpenerPlace, wait_for};
use super::{DiscardingDevices, KeptDma, Passthrough, PassthroughError, no_device, reach};
use crate::config::{DeviceConfig, PinMode, VmConfig};
use crate::events;
use crate::machine::events::GuestEvent;
use crate::machine::opening::run_unless_cancelled;
use crate::machine::pausing::CancelToken;
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

/// A device that is being opened. The thread that does so is left to itself when this is dropped.
pub(super) struct PendingDevice {
    pub(super) config: DeviceConfig,
    pub(super) id: String,
    pub(super) number: DeviceNumber,
    /// Its place among the devices that are opened with it.
    pub(super) order: usize,
    place: OpenerPlace,
    opened: Receiver<Result<Opened, VfioError>>,
    end: OpenerEnd,
    /// Ends the thread's wait for an earlier opener of the device.
    cancel: CancelToken,
}

/// An open function.
pub(super) struct Opened {
    /// The function, after a reset.
    pub(super) function: Arc<dyn HostFunction>,
    /// When it was open.
    pub(super) at: Instant,
    /// How long that took.
    took: Duration,
}

/// Opens a device, on any thread. The token ends it as long as the kernel has not been asked for the device.
pub(super) type Opener = Box<dyn FnOnce(&CancelToken) -> Result<Opened, VfioError> + Send>;

/// Called when it has been opened, or cannot be; on the thread.
pub(super) type OnOpened = Box<dyn Fn() + Send>;

/// Calls it when dropped.
struct AtEnd(OnOpened);

impl Drop for AtEnd {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl PendingDevice {
    /// Starts to open a device on a thread.
    pub(super) fn begin(
        config: DeviceConfig,
        id: String,
        number: DeviceNumber,
        order: usize,
        (open, on_opened): (Opener, OnOpened),
    ) -> io::Result<Self> {
        let (hand_over, opened) = channel();
        let (end, cancel) = (OpenerEnd::default(), CancelToken::default());
        let (mark, token) = (end.mark(), cancel.clone());
        let work = move || {
            // Dropped in the opposite order, also by a panic: nothing of the device is left when the end is told.
            let _told = AtEnd(on_opened);
            let _mark = mark;
            let hand_over = hand_over;
            // Without a receiver it is closed here.
            drop(hand_over.send(open(&token)));
        };
        stoppable_thread::spawn("vfio-open", work)?;
        let place = OpenerPlace::of(&config);
        Ok(Self { config, id, number, order, place, opened, end, cancel })
    }

    /// Where it is on the bus, or will be.
    pub(super) fn bdf(&self) -> Bdf {
        Bdf::on_root_bus(self.config.pci_segment, self.number)
    }

    /// Waits until it is open or cannot be opened, up to `timeout`.
    pub(super) fn wait(&self, timeout: Duration) {
        self.end.is_over_within(timeout);
    }

    /// The device, once, when it is open, or why it cannot be opened.
    pub(super) fn take(&self) -> Option<Result<Opened, VfioError>> {
        match self.opened.try_recv() {
            Ok(opened) => Some(opened),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let source = io::Error::other("the thread that does has ended");
                Some(Err(VfioError::Io { what: "open it", source }))
            }
        }
    }

    /// Leaves the thread to itself: it closes the device when it is open.
    pub(super) fn abandon(self) -> Abandoned {
        self.cancel.cancel();
        Abandoned { place: self.place, end: self.end }
    }
}

/// Resets a function, so that the guest finds it in its power-on state. `begun`: when opening it started.
///
/// # Errors
/// It cannot be reset, so that the guest must not have it.
fn reset(function: Arc<dyn HostFunction>, begun: Instant) -> Result<Opened, VfioError> {
    function.reset()?;
    Ok(Opened { function, at: Instant::now(), took: begun.elapsed() })
}

/// Tells that a device is open, which its machine has received.
pub(super) fn report_opened(id: &str, opened: &Opened) {
    let took_ms = opened.took.as_millis().to_string();
    log::info!("passed-through device '{id}' is open after {took_ms} ms");
    events::emit("vm", "passthrough-device-opened", &[("id", id), ("took_ms", &took_ms)]);
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
            return Ok(Box::new(move |_| reset(Arc::new(function), begun)));
        }
        let place = find(config, id)?;
        let space = self.space(context)?;
        let before = self.left.before(&OpenerPlace::of(config));
        Ok(Box::new(move |cancel| {
            let mut begun = begun;
            if !before.is_empty() {
                log::info!("'{name}' is opened once the host has done so for a VM that has ended");
                if !wait_for(&before, cancel) {
                    let source = io::ErrorKind::Interrupted.into();
                    return Err(VfioError::Io { what: "open it", source });
                }
                begun = Instant::now();
            }
            let function = VfioFunction::attach(&name, place, space.as_ref())?;
            reset(Arc::new(function), begun)
        }))
    }

    /// Opens a device on a thread, and waits for it until cancelled. The mark lives until it is open, or closed again.
    pub(super) fn open_unless_cancelled(
        &mut self,
        open: impl FnOnce() -> (Result<Opened, VfioError>, EndMark) + Send + 'static,
        cancel: &CancelToken,
    ) -> io::Result<Option<Result<Opened, VfioError>>> {
        // Kept for a second attempt.
        let open = Arc::new(Mutex::new(Some(open)));
        let run = || {
            let open = Arc::clone(&open);
            let open_once = move || {
                let open = open.lock().take();
                open.map(|open| open())
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

    /// Starts to open a device, and reserves its place on the bus. `pool` is to leave the device alone until it is open, or
    /// closed again.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn expect(
        &mut self,
        config: &DeviceConfig,
        context: &PciContext<'_>,
        pool: Option<Arc<PoolConnection>>,
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
        let (sink, order) = (Arc::clone(&self.sink), self.pending.len());
        let on_opened = Box::new(move || {
            // The thread has this to its end, also after that of the machine.
            let _ = &pool;
            sink(GuestEvent::WithheldDevice);
        });
        let how: (Opener, OnOpened) = (open, on_opened);
        let pending = PendingDevice::begin(config.clone(), id.clone(), number, order, how);
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
        open.map(|(bdf, _)| *bdf).or_else(|| pending().map(PendingDevice::bdf))
    }

    /// Whether devices are still being opened, so that [`Passthrough::receive_opened`] has to be called.
    pub fn is_opening(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// The device on the host, which is not opened.
fn find(config: &DeviceConfig, id: &str) -> Result<HostPlace, PassthroughError> {
    let place = place_of(config).and_then(|place| place.check().map(|()| place));
    place.map_err(|source| no_device(config, id, source))
}

/// Whether a device is one that can be opened for a machine with memory like `ram`, as far as that is known before.
///
/// # Errors
/// Names the device and what the host lacks.
pub fn check_ahead(config: &DeviceConfig, ram: &GuestRam) -> Result<(), PassthroughError> {
    let id = config.id.as_deref().unwrap_or_default();
    reach::check(config, ram).map_err(|source| no_device(config, id, source))?;
    find(config, id).map(drop)
}

#[cfg(test)]
pub(super) mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::sync::Weak;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc::Sender;

    use vfio::fakes::FakeFunction;

    use super::super::migration::tests::two_devices;
    use super::*;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// What opening a device is to give; an error if this is dropped.
    pub(in super::super) type Gives = Sender<Arc<dyn HostFunction>>;

    /// A device whose opening takes until the test says what it gives.
    pub(in super::super) fn slow(
        id: &str,
        number: u8,
        pin: PinMode,
        on_opened: OnOpened,
    ) -> (PendingDevice, Gives) {
        let (gives, given) = channel();
        let open = Box::new(move |_: &CancelToken| {
            let given = given.recv().map_err(io::Error::other);
            let given = given.map_err(|source| VfioError::Io { what: "open it", source });
            reset(given?, Instant::now())
        });
        let order = usize::from(number);
        let number = DeviceNumber::new(number).unwrap();
        let path = Some(format!("/{id}").into());
        let config = DeviceConfig { path, id: Some(id.to_owned()), pin, ..DeviceConfig::default() };
        let pending = PendingDevice::begin(config, id.to_owned(), number, order, (open, on_opened));
        (pending.unwrap(), gives)
    }

    pub(in super::super) fn new_host(passthrough: &Passthrough) -> Arc<FakeFunction> {
        let host = FakeFunction::new(FakeFunction::config(), Arc::clone(&passthrough.gate));
        let host = host.unwrap();
        host.migration.allow(true, b"state");
        host
    }

    fn quietly() -> OnOpened {
        Box::new(|| {})
    }

    #[test]
    fn a_device_that_cannot_be_reset_is_not_open() {
        let (_, [one, _]) = two_devices();
        assert!(reset(one.clone(), Instant::now()).is_ok());
        one.refuses_resets.store(true, Ordering::Relaxed);
        let refused = reset(one.clone(), Instant::now()).err();
        assert!(matches!(refused, Some(VfioError::Reset(_))), "{refused:?}");
        assert_eq!(*one.resets.lock(), 2);
    }

    #[test]
    fn a_device_has_its_address_before_it_is_open() {
        let (mut passthrough, _hosts) = two_devices();
        let (mut pending, _never) = slow("slow", 7, PinMode::Auto, quietly());
        pending.config.pci_segment = 3;
        passthrough.pending = vec![pending];
        let number = |id: &str| passthrough.address_of(id).map(|bdf| (bdf.segment(), bdf.device()));
        assert_eq!(["one", "two", "slow"].map(number), [Some((0, 1)), Some((0, 2)), Some((3, 7))]);
        assert_eq!(number("none"), None);
    }

    #[test]
    fn an_opener_tells_when_its_device_can_be_taken() {
        let (tell, told) = channel();
        let (pending, gives) =
            slow("slow", 7, PinMode::Auto, Box::new(move || tell.send(()).unwrap()));
        assert!(pending.take().is_none() && told.try_recv().is_err());
        gives.send(new_host(&two_devices().0)).unwrap();
        told.recv_timeout(PATIENCE).unwrap();
        assert!(pending.take().is_some_and(|opened| opened.is_ok()));
        assert!(pending.take().is_some_and(|opened| opened.is_err()), "there is but one");
    }

    #[test]
    fn what_is_opened_for_nothing_is_closed_before_that_is_over() {
        for is_open_before in [false, true] {
            let (pending, gives) = slow("slow", 7, PinMode::Auto, quietly());
            let host = new_host(&two_devices().0);
            let is_closed: Weak<FakeFunction> = Arc::downgrade(&host);
            if is_open_before {
                gives.send(host.clone()).unwrap();
                assert!(pending.end.is_over_within(PATIENCE) && is_closed.upgrade().is_some());
            }
            let abandoned = pending.abandon();
            assert_ne!(abandoned.is_in_use(), is_open_before);
            if !is_open_before {
                gives.send(host.clone()).unwrap();
            }
            drop(host);
            assert!(abandoned.end.is_over_within(PATIENCE) && is_closed.upgrade().is_none());
        }
    }
}
