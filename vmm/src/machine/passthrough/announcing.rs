// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Passed-through devices that the guest does not see before they are open and all memory is mapped for them.
//!
//! A guest's driver that switches DMA on waits at the gate until memory is mapped. Linux writes that
//! register under the lock for the configuration space of all devices, with interrupts off, so a wait stalls
//! every vCPU that touches any configuration space. A device that is withheld has its place on the bus, but does not
//! respond there. When it is open and memory is mapped, it is shown and announced as hot-plugged.
//!
//! Owns which devices are withheld, and whether each is announced or removed. Runs where the machine is at
//! hand: it must never announce or remove one while the machine is being paused, moved or saved.

use std::sync::Arc;
use std::time::Instant;

use pci::Bdf;
use vfio::{PinState, Pinning};

use super::Passthrough;
use crate::machine::events::GuestEvent;
use crate::machine::segments::Segments;

/// What a withheld device waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Withholding {
    /// To be opened.
    Opening,
    /// For memory to be mapped.
    Memory,
    /// To be removed, as a client has asked.
    Removal,
}

/// What is to be done with a withheld device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It waits on.
    Wait,
    /// The guest is told of it.
    Announce,
    /// It is removed; the guest has never seen it.
    Remove,
}

impl Withholding {
    /// `memory`: state of mapping memory, if it has begun. `is_lost`: the device has failed.
    fn fate(self, memory: Option<&PinState>, is_lost: bool) -> Fate {
        match (self, memory) {
            (Self::Removal, _) | (Self::Memory, Some(PinState::Failed(_))) => Fate::Remove,
            (Self::Memory, _) if is_lost => Fate::Remove,
            (Self::Memory, Some(PinState::Pinned { .. })) => Fate::Announce,
            (Self::Opening, _) | (Self::Memory, Some(PinState::Pinning) | None) => Fate::Wait,
        }
    }
}

/// What a device waits for that the guest does not see yet, as told to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// The host opens it.
    Opening,
    /// Memory is being mapped for it.
    Memory,
}

/// A device that the guest does not see yet, as told to clients.
#[derive(Clone, Debug)]
pub struct WithheldStatus {
    /// Its id.
    pub id: String,
    /// Since when the guest would see it otherwise.
    pub since: Instant,
    /// What it waits for.
    pub waits_for: WaitsFor,
}

/// A device that the guest does not see yet.
struct WithheldDevice {
    bdf: Bdf,
    why: Withholding,
    since: Instant,
}

/// The withheld devices of a machine.
#[derive(Default)]
pub(super) struct Withheld(Vec<WithheldDevice>);

impl Withheld {
    /// Adds a device that is open.
    pub(super) fn add(&mut self, bdf: Bdf) {
        self.0.push(WithheldDevice { bdf, why: Withholding::Memory, since: Instant::now() });
    }

    /// Adds a device that is still being opened.
    pub(super) fn add_unopened(&mut self, bdf: Bdf) {
        self.0.push(WithheldDevice { bdf, why: Withholding::Opening, since: Instant::now() });
    }

    /// Notes that a device is open now.
    pub(super) fn has_opened(&mut self, bdf: Bdf) {
        let opened =
            |device: &&mut WithheldDevice| device.bdf == bdf && device.why == Withholding::Opening;
        if let Some(device) = self.0.iter_mut().find(opened) {
            device.why = Withholding::Memory;
        }
    }

    /// Forgets a device, which was announced or removed.
    pub(super) fn forget(&mut self, bdf: Bdf) {
        self.0.retain(|device| device.bdf != bdf);
    }

    fn get(&self, bdf: Bdf) -> Option<&WithheldDevice> {
        self.0.iter().find(|device| device.bdf == bdf)
    }
}

impl Passthrough {
    /// Whether any device is withheld from the guest.
    pub fn withholds_any(&self) -> bool {
        !self.withheld.0.is_empty()
    }

    /// Whether the device at `bdf` is withheld from the guest.
    pub fn withholds(&self, bdf: Bdf) -> bool {
        self.withheld.get(bdf).is_some()
    }

    /// The withheld devices.
    pub fn withheld_devices(&self) -> Vec<WithheldStatus> {
        let status = |bdf, id: &str, waits_for| {
            let since = self.withheld.get(bdf)?.since;
            Some(WithheldStatus { id: id.to_owned(), since, waits_for })
        };
        let open = self.devices.iter().filter_map(|(bdf, device)| {
            status(*bdf, pci::PciDevice::id(&**device), WaitsFor::Memory)
        });
        let late = self.late_devices();
        open.chain(late.filter_map(|(bdf, id)| status(bdf, id, WaitsFor::Opening))).collect()
    }

    /// Has a withheld device removed without the guest, shortly; false if it is not withheld. If memory is being
    /// mapped for such devices alone, it is unmapped first, by the thread that maps it.
    pub fn withdraw(&mut self, bdf: Bdf) -> bool {
        let Some(device) = self.withheld.0.iter_mut().find(|device| device.bdf == bdf) else {
            return false;
        };
        device.why = Withholding::Removal;
        if !self.abandon_memory() {
            (self.sink)(GuestEvent::WithheldDevice);
        }
        true
    }

    /// Has memory unmapped in the background if all devices are to be removed before it was mapped. They have never
    /// reached it, as their guest has not seen them. Returns whether it was begun.
    fn abandon_memory(&self) -> bool {
        let is_needed = self.devices.iter().any(|(bdf, _)| !self.is_withdrawn(*bdf));
        let Some(pinning) = self.pinning.as_ref().filter(|_| !is_needed) else { return false };
        let sink = Arc::clone(&self.sink);
        pinning.abandon(Box::new(move || sink(GuestEvent::WithheldDevice)))
    }

    /// Whether memory is being unmapped for the removal of all devices.
    pub(super) fn is_abandoning_memory(&self) -> bool {
        self.pinning.as_ref().is_some_and(Pinning::is_being_abandoned)
    }

    /// Whether the withheld device at `bdf` is to be removed.
    pub fn is_withdrawn(&self, bdf: Bdf) -> bool {
        self.withheld.get(bdf).is_some_and(|device| device.why == Withholding::Removal)
    }

    fn with_fate(&self, wanted: Fate) -> Vec<Bdf> {
        if self.is_abandoning_memory() && wanted != Fate::Wait {
            return Vec::new();
        }
        let memory = self.progress().map(|progress| progress.state);
        let fate = |withheld: &WithheldDevice| {
            let device = self.devices.iter().find(|(at, _)| *at == withheld.bdf);
            withheld.why.fate(memory.as_ref(), device.is_none_or(|(_, device)| device.is_lost()))
        };
        let devices = self.withheld.0.iter().filter(|device| fate(device) == wanted);
        devices.map(|device| device.bdf).collect()
    }

    /// Shows those withheld devices on the bus for which memory is mapped; the guest is still to be told of
    /// them.
    pub fn show_ready(&mut self, segments: &Segments) -> Vec<(Bdf, String)> {
        let mut shown = Vec::new();
        for bdf in self.with_fate(Fate::Announce) {
            self.withheld.forget(bdf);
            segments.show(bdf);
            let id = self.devices.iter().find(|(at, _)| *at == bdf);
            shown.extend(id.map(|(at, device)| (*at, pci::PciDevice::id(&**device).to_owned())));
        }
        shown
    }

    /// The withheld devices that have to be removed: memory cannot be mapped, the device has failed, or a
    /// client wants it removed.
    pub fn refused(&self) -> Vec<Bdf> {
        self.with_fate(Fate::Remove)
    }

    /// Why a machine with withheld devices can be neither migrated nor saved: its guest is about to see them.
    pub(super) fn why_withheld(&self) -> Vec<String> {
        let why = |WithheldStatus { id, waits_for, .. }| match waits_for {
            WaitsFor::Opening => format!("'{id}': it is still being opened"),
            WaitsFor::Memory => {
                format!("'{id}': it is withheld from the guest until memory is mapped for it")
            }
        };
        self.withheld_devices().into_iter().map(why).collect()
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
    use parking_lot::Mutex;
    use pci::fakes::FakeMapper;
    use pci::{
        ConfigAddress, DeviceNumber, MmioRange, MmioWindows, PciDevice, PciSegment,
        PciSegmentOptions,
    };
    use vfio::DmaGate;
    use vfio::fakes::FakeTarget;

    use super::super::migration::tests::two_devices;
    use super::super::{DiscardingDevices, PassthroughError};
    use super::*;
    use crate::config::VmConfig;
    use crate::machine::pausing::CancelToken;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);
    /// Three pieces.
    const RAM_BYTES: u64 = 192 << 20;

    pub(in super::super) fn new_segment() -> Arc<PciSegment> {
        let below_4g = MmioRange { start_gpa: 0xc000_0000, len_bytes: 0x1000_0000 };
        let above_4g = MmioRange { start_gpa: 0x40_0000_0000, len_bytes: 0x1_0000_0000 };
        let windows = MmioWindows { below_4g, above_4g };
        let mapper = Arc::new(FakeMapper::new(vec![below_4g, above_4g]));
        PciSegment::new(PciSegmentOptions { segment: 0, windows }, mapper).unwrap()
    }

    pub(in super::super) fn vendor(segments: &Segments, bdf: Bdf) -> u16 {
        let mut data = [0; 2];
        let device = bdf.device();
        let segment = segments.of(bdf).unwrap();
        segment.read_config(ConfigAddress { bus: 0, device, function: 0, offset: 0 }, &mut data);
        u16::from_le_bytes(data)
    }

    /// Opens when dropped: a test that fails would wait for its mapping otherwise.
    pub(in super::super) struct OpenAtEnd(pub Arc<DmaGate>);

    impl Drop for OpenAtEnd {
        fn drop(&mut self) {
            self.0.open();
        }
    }

    /// A target whose mapping waits in the kernel until that is opened, and when it does.
    pub(in super::super) fn held_target() -> (FakeTarget, Receiver<()>, OpenAtEnd) {
        let kernel = Arc::new(DmaGate::default());
        let (arrived, at_map) = channel();
        let (hold, arrived) = (Arc::clone(&kernel), Mutex::new(arrived));
        let before = Box::new(move |_| {
            let _ = arrived.lock().send(());
            hold.wait().map_err(io::Error::other)
        });
        let target = FakeTarget { before: Some(before), ..FakeTarget::default() };
        (target, at_map, OpenAtEnd(kernel))
    }

    /// Two withheld devices, whose memory is being mapped in `target`; and when something is to be decided.
    fn withheld(target: FakeTarget) -> (Passthrough, Arc<FakeTarget>, Segments, Receiver<()>) {
        let (mut passthrough, _hosts) = two_devices();
        let (tell, told) = channel();
        let tell = Mutex::new(tell);
        passthrough.sink = Arc::new(move |event| {
            assert!(matches!(event, GuestEvent::WithheldDevice), "{event:?}");
            let _ = tell.lock().send(());
        });
        let segment = new_segment();
        for (bdf, device) in passthrough.devices.clone() {
            let number = DeviceNumber::new(bdf.device()).unwrap();
            segment.hide(number);
            let device: Arc<dyn PciDevice> = device;
            segment.add_device(&device, Some(number)).unwrap();
            passthrough.withheld.add(bdf);
        }
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", RAM_BYTES) }];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let target = Arc::new(target);
        passthrough.space = Some(target.clone());
        let discarding = DiscardingDevices::default();
        passthrough.map_memory(&ram, discarding, &CancelToken::default()).unwrap();
        (passthrough, target, Segments::of_test(segment), told)
    }

    #[test]
    fn the_guest_sees_the_devices_when_the_last_piece_is_mapped_and_not_before() {
        let (kernel, begun) = (Arc::new(DmaGate::default()), Instant::now());
        let hold = Arc::clone(&kernel);
        let before = Box::new(move |_| hold.wait().map_err(io::Error::other));
        let (mut passthrough, _target, segments, told) =
            withheld(FakeTarget { before: Some(before), ..FakeTarget::default() });
        let bdfs: Vec<_> = passthrough.devices.iter().map(|(bdf, _)| *bdf).collect();
        assert!(passthrough.show_ready(&segments).is_empty() && passthrough.refused().is_empty());
        let listed = passthrough.withheld_devices();
        assert_eq!(listed.iter().map(|it| it.id.as_str()).collect::<Vec<_>>(), ["one", "two"]);
        assert!(listed.iter().all(|it| it.waits_for == WaitsFor::Memory));
        assert!(listed.iter().all(|it| (begun..=Instant::now()).contains(&it.since)));
        assert!(bdfs.iter().all(|bdf| vendor(&segments, *bdf) == 0xffff));
        assert!(told.try_recv().is_err());
        kernel.open();
        told.recv_timeout(PATIENCE).unwrap();
        let shown = passthrough.show_ready(&segments);
        assert_eq!(shown, [(bdfs[0], "one".to_owned()), (bdfs[1], "two".to_owned())]);
        assert!(bdfs.iter().all(|bdf| vendor(&segments, *bdf) != 0xffff));
        assert!(!passthrough.withholds_any() && passthrough.show_ready(&segments).is_empty());
        assert!(passthrough.withheld_devices().is_empty());
    }

    #[test]
    fn memory_that_is_refused_in_the_middle_leaves_no_device_and_nothing_mapped() {
        let count = Mutex::new(0);
        let before = Box::new(move |_| {
            let mut count = count.lock();
            *count += 1;
            if *count == 2 { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
        });
        let (mut passthrough, target, segments, told) =
            withheld(FakeTarget { before: Some(before), ..FakeTarget::default() });
        told.recv_timeout(PATIENCE).unwrap();
        assert!(passthrough.show_ready(&segments).is_empty(), "it would be of no use");
        let refused = passthrough.refused();
        assert_eq!(refused.len(), 2);
        for bdf in refused {
            assert!(passthrough.remove(bdf, &segments).is_some());
            assert_eq!(vendor(&segments, bdf), 0xffff);
        }
        assert!(target.mapped.lock().is_empty());
        assert!(!passthrough.withholds_any() && passthrough.progress().is_none());
        passthrough.check_memory().unwrap();
    }

    #[test]
    fn a_device_that_is_withdrawn_ends_the_mapping_for_it() {
        let (target, at_map, kernel) = held_target();
        let (mut passthrough, target, segments, told) = withheld(target);
        at_map.recv_timeout(PATIENCE).unwrap();
        let bdfs: Vec<_> = passthrough.devices.iter().map(|(bdf, _)| *bdf).collect();
        assert!(passthrough.withdraw(bdfs[0]));
        told.recv_timeout(PATIENCE).unwrap();
        assert_eq!(passthrough.refused(), [bdfs[0]], "the other one waits for memory all the same");
        // Nothing waits for the kernel, which ends only what it has begun.
        assert!(passthrough.withdraw(bdfs[1]) && passthrough.withdraw(bdfs[1]));
        told.recv_timeout(PATIENCE).unwrap();
        assert!(passthrough.refused().is_empty() && told.try_recv().is_err());
        let refused = passthrough.check_memory();
        assert!(matches!(refused, Err(PassthroughError::Leaving)), "{refused:?}");
        kernel.0.open();
        told.recv_timeout(PATIENCE).unwrap();
        assert!(target.mapped.lock().is_empty(), "the removal has nothing left to unmap");
        assert_eq!(passthrough.refused(), bdfs);
        for bdf in bdfs {
            assert!(passthrough.remove(bdf, &segments).is_some());
        }
        assert!(passthrough.progress().is_none());
        passthrough.check_memory().unwrap();
    }

    #[test]
    fn only_what_works_and_is_wanted_is_announced_and_not_before_memory_is_mapped() {
        let pinned = PinState::Pinned { took: Duration::ZERO, at: Instant::now() };
        let failed = PinState::Failed("no memory".into());
        let memory = |state, is_lost| Withholding::Memory.fate(state, is_lost);
        assert_eq!(memory(None, false), Fate::Wait);
        assert_eq!(memory(Some(&PinState::Pinning), false), Fate::Wait);
        assert_eq!(memory(Some(&pinned), false), Fate::Announce);
        assert_eq!(memory(Some(&failed), false), Fate::Remove);
        for state in [None, Some(&PinState::Pinning), Some(&pinned), Some(&failed)] {
            assert_eq!(memory(state, true), Fate::Remove, "{state:?}");
            assert_eq!(Withholding::Removal.fate(state, false), Fate::Remove, "{state:?}");
            // Whether it can be used is seen when it is open.
            assert_eq!(Withholding::Opening.fate(state, true), Fate::Wait, "{state:?}");
        }
    }

    #[test]
    fn a_withheld_device_keeps_the_vm_here_and_can_be_withdrawn() {
        let (mut passthrough, _hosts) = two_devices();
        let told = Arc::new(parking_lot::Mutex::new(0));
        let count = Arc::clone(&told);
        passthrough.sink = Arc::new(move |_| *count.lock() += 1);
        let config = VmConfig::default();
        passthrough.check_movable(&config).unwrap();
        let (one, two) = (passthrough.devices[0].0, passthrough.devices[1].0);
        passthrough.withheld.add(two);
        let refused = passthrough.check_movable(&config).unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, PassthroughError::NotMovable(_)), "{text}");
        assert!(text.contains("'two': it is withheld") && !text.contains("'one'"));
        assert!(passthrough.refused().is_empty() && !passthrough.is_withdrawn(two));
        assert!(!passthrough.withdraw(one), "the guest has it");
        assert!(passthrough.withdraw(two));
        assert_eq!(*told.lock(), 1);
        assert!(passthrough.is_withdrawn(two));
        assert_eq!(passthrough.refused(), [two]);
        passthrough.withheld.forget(two);
        assert!(!passthrough.withholds_any());
    }

    #[test]
    fn a_withheld_device_that_fails_is_removed() {
        let (mut passthrough, _hosts) = two_devices();
        let bdf = passthrough.devices[0].0;
        passthrough.withheld.add(bdf);
        assert!(passthrough.refused().is_empty());
        passthrough.devices[0].1.disarm();
        assert_eq!(passthrough.refused(), [bdf]);
    }
}
