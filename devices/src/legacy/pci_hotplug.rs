// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PCI hotplug registers, by which a guest is notified of devices and ejects them.
//!
//! Owns a bit for each device number in each of the registers of each segment, and the requested ejections.
//! Knows no device: their owner is notified of ejections, and collects them when it can. A machine with one
//! segment has neither the register that selects one, nor a trace of it in its state.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::Snapshot;
use crate::bus::BusDevice;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError, read_config_bytes};

/// Default port of [`PciHotplug`].
pub const PCI_HOTPLUG_PORT: u16 = 0x610;
/// Number of ports of [`PciHotplug`].
pub const PCI_HOTPLUG_LEN_BYTES: u64 = 16;

const UP_OFFSET: u64 = 0;
const DOWN_OFFSET: u64 = 4;
const EJECT_OFFSET: u64 = 8;
const SELECT_OFFSET: u64 = 12;
/// Bit 0 would be the host bridge.
const SLOTS: u32 = !1;

/// What is done on a vCPU thread when the guest ejects devices.
pub struct OnEject {
    /// Hides them from the guest: a segment, and a bit for each device number. They are not known as ejected before that
    /// is done, so that their owner does not give the numbers to other devices, which would be hidden in their place.
    pub hide: Box<dyn Fn(u16, u32) + Send + Sync>,
    /// Notifies their owner.
    pub notify: Box<dyn Fn() + Send + Sync>,
}

/// The hot-plug registers.
pub struct PciHotplug {
    /// By number; never empty.
    segments: Vec<Segment>,
    /// The segment whose registers the guest accesses, always one that exists.
    selected: AtomicU16,
    on_eject: OnEject,
}

/// The registers of a segment.
#[derive(Default)]
struct Segment {
    /// Added, and not read by the guest yet.
    up: AtomicU32,
    /// To be removed, and not read by the guest yet.
    down: AtomicU32,
    /// To be removed, and not ejected by the guest yet.
    leaving: AtomicU32,
    /// Ejected by the guest, and not removed yet.
    ejected: AtomicU32,
    /// Locked while a device becomes one of the last two, or none of them, so that a number is not free while it is still
    /// being hidden. `hide` is called with it.
    changing: Mutex<()>,
}

impl PciHotplug {
    /// Registers without pending events, of the segments from 0 to `last_segment`.
    pub fn new(last_segment: u16, on_eject: OnEject) -> Self {
        let segments = (0..=last_segment).map(|_| Segment::default()).collect();
        Self { segments, selected: AtomicU16::new(0), on_eject }
    }

    fn segment(&self, segment: u16) -> Option<&Segment> {
        self.segments.get(usize::from(segment))
    }

    /// Marks a device as added; the guest is notified by the event device.
    pub fn add(&self, segment: u16, number: u8) {
        if let Some(segment) = self.segment(segment) {
            segment.up.fetch_or(bit(number), Ordering::AcqRel);
        }
    }

    /// Marks a device as to be removed; the guest is notified by the event device.
    pub fn request_unplug(&self, segment: u16, number: u8) {
        if let Some(segment) = self.segment(segment) {
            let _changing = segment.changing.lock();
            // What the guest has ejected is asked for no more: its number may soon be another device's.
            let wanted = bit(number) & !segment.ejected.load(Ordering::Acquire);
            segment.leaving.fetch_or(wanted, Ordering::AcqRel);
            segment.down.fetch_or(wanted, Ordering::AcqRel);
        }
    }

    /// Devices of a segment that the guest was asked to eject and has not, a bit for each number.
    pub fn leaving(&self, segment: u16) -> u32 {
        self.segment(segment).map_or(0, |segment| segment.leaving.load(Ordering::Acquire))
    }

    /// Devices of a segment that the guest has ejected and that still exist.
    pub fn ejected(&self, segment: u16) -> u32 {
        self.segment(segment).map_or(0, |segment| segment.ejected.load(Ordering::Acquire))
    }

    /// Devices of a segment that are to be removed, ejected or not, a bit for each number.
    pub fn going(&self, segment: u16) -> u32 {
        self.segment(segment).map_or(0, |segment| {
            let _changing = segment.changing.lock();
            segment.leaving.load(Ordering::Acquire) | segment.ejected.load(Ordering::Acquire)
        })
    }

    /// Marks a device as removed, so that its number is free.
    pub fn gone(&self, segment: u16, number: u8) {
        let Some(segment) = self.segment(segment) else { return };
        let _changing = segment.changing.lock();
        for register in [&segment.up, &segment.down, &segment.leaving, &segment.ejected] {
            register.fetch_and(!bit(number), Ordering::AcqRel);
        }
    }

    fn selected(&self) -> u16 {
        self.selected.load(Ordering::Acquire)
    }

    fn select(&self, wanted: u32) {
        if let Ok(wanted) = u16::try_from(wanted)
            && self.segment(wanted).is_some()
        {
            self.selected.store(wanted, Ordering::Release);
        }
    }

    fn eject(&self, wanted: u32) {
        let number = self.selected();
        let Some(segment) = self.segment(number) else { return };
        let changing = segment.changing.lock();
        let before = segment.leaving.fetch_and(!wanted, Ordering::AcqRel);
        let going = before & wanted & SLOTS;
        if going != 0 {
            (self.on_eject.hide)(number, going);
            segment.ejected.fetch_or(going, Ordering::AcqRel);
            drop(changing);
            (self.on_eject.notify)();
        }
    }
}

fn bit(number: u8) -> u32 {
    1_u32.checked_shl(number.into()).unwrap_or(0) & SLOTS
}

impl BusDevice for PciHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // A partial read would clear bits that the guest does not see.
        if data.len() != 4 {
            return;
        }
        let Some(segment) = self.segment(self.selected()) else { return };
        let value = match offset {
            UP_OFFSET => segment.up.swap(0, Ordering::AcqRel),
            DOWN_OFFSET => segment.down.swap(0, Ordering::AcqRel),
            SELECT_OFFSET => self.selected().into(),
            _ => return,
        };
        read_config_bytes(&value.to_le_bytes(), 0, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(word) = <[u8; 4]>::try_from(data) else { return };
        let value = u32::from_le_bytes(word);
        match offset {
            EJECT_OFFSET => self.eject(value),
            SELECT_OFFSET => self.select(value),
            _ => {}
        }
    }
}

/// First version of the state with several segments.
pub const PCI_HOTPLUG_SEGMENTS_VERSION: u32 = 2;

const KIND: &str = "pci-hotplug";
/// The form for a machine with one segment, which every version reads.
const ONE: StateFormat = StateFormat { kind: KIND, newest: 1 };
const SEVERAL: StateFormat = StateFormat { kind: KIND, newest: PCI_HOTPLUG_SEGMENTS_VERSION };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    up: u32,
    down: u32,
    leaving: u32,
    ejected: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SegmentsState {
    segments: Vec<State>,
    selected: u16,
}

impl Segment {
    fn save(&self) -> State {
        State {
            up: self.up.load(Ordering::Acquire),
            down: self.down.load(Ordering::Acquire),
            leaving: self.leaving.load(Ordering::Acquire),
            ejected: self.ejected.load(Ordering::Acquire),
        }
    }

    fn restore(&self, state: &State) {
        // Earlier versions wrote what was asked for again after the guest had ejected it; it has gone.
        for (register, value) in [
            (&self.up, state.up),
            (&self.down, state.down),
            (&self.leaving, state.leaving & !state.ejected),
            (&self.ejected, state.ejected),
        ] {
            register.store(value & SLOTS, Ordering::Release);
        }
    }
}

impl Snapshot for PciHotplug {
    fn save(&self) -> DeviceSnapshot {
        match self.segments.as_slice() {
            [only] => ONE.encode(&only.save()),
            several => SEVERAL.encode(&SegmentsState {
                segments: several.iter().map(Segment::save).collect(),
                selected: self.selected(),
            }),
        }
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let (states, selected) = if self.segments.len() == 1 {
            (vec![ONE.decode::<State>(state)?], 0)
        } else {
            if state.version < PCI_HOTPLUG_SEGMENTS_VERSION {
                return Err(SEVERAL.invalid("it is of a machine with one PCI segment"));
            }
            let state: SegmentsState = SEVERAL.decode(state)?;
            (state.segments, state.selected)
        };
        if states.len() != self.segments.len() || self.segment(selected).is_none() {
            return Err(SEVERAL.invalid("it is of a machine with another number of PCI segments"));
        }
        for (segment, state) in self.segments.iter().zip(&states) {
            segment.restore(state);
        }
        self.selected.store(selected, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::sync::{Arc, Weak};

    use proptest::prelude::*;

    use super::*;

    type Told = Arc<Mutex<Vec<(u16, u32)>>>;

    fn rig_of(last_segment: u16) -> (PciHotplug, Told) {
        let told = Told::default();
        let inner = Arc::clone(&told);
        let hide = Box::new(move |segment, bits| inner.lock().push((segment, bits)));
        let on_eject = OnEject { hide, notify: Box::new(|| ()) };
        (PciHotplug::new(last_segment, on_eject), told)
    }

    fn rig() -> (PciHotplug, Told) {
        rig_of(0)
    }

    fn select(device: &PciHotplug, segment: u32) {
        device.write(SELECT_OFFSET, &segment.to_le_bytes());
    }

    fn read(device: &PciHotplug, offset: u64) -> u32 {
        let mut data = [0xee; 4];
        device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn what_came_is_told_once() {
        let (device, _) = rig();
        device.add(0, 3);
        device.add(0, 31);
        device.add(0, 0);
        device.add(0, 77);
        assert_eq!(read(&device, UP_OFFSET), 1 << 3 | 1 << 31);
        assert_eq!(read(&device, UP_OFFSET), 0);
        assert_eq!(read(&device, DOWN_OFFSET), 0);
    }

    #[test]
    fn only_what_is_to_go_can_be_ejected() {
        let (device, told) = rig();
        device.write(EJECT_OFFSET, &[0xff; 4]);
        device.request_unplug(0, 4);
        assert_eq!(read(&device, DOWN_OFFSET), 1 << 4);
        device.request_unplug(0, 4);
        assert_eq!(read(&device, DOWN_OFFSET), 1 << 4, "asked again");
        device.write(EJECT_OFFSET, &(1_u32 << 5).to_le_bytes());
        assert_eq!((device.leaving(0), device.ejected(0)), (1 << 4, 0));
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!((device.leaving(0), device.ejected(0)), (0, 1 << 4));
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!(*told.lock(), [(0, 1 << 4)], "once");
        device.gone(0, 4);
        assert_eq!(device.ejected(0), 0);
    }

    #[test]
    fn a_device_is_hidden_before_its_owner_sees_that_it_was_ejected() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let device = Arc::new_cyclic(|device: &Weak<PciHotplug>| {
            let look = |what: &'static str| {
                let (seen, device) = (Arc::clone(&seen), device.clone());
                move || seen.lock().push((what, device.upgrade().unwrap().ejected(0)))
            };
            let (hide, notify) = (look("hidden"), look("notified"));
            PciHotplug::new(
                0,
                OnEject { hide: Box::new(move |_, _| hide()), notify: Box::new(notify) },
            )
        });
        device.request_unplug(0, 4);
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!(*seen.lock(), [("hidden", 0), ("notified", 1 << 4)]);
    }

    #[test]
    fn a_device_that_was_ejected_and_is_asked_for_again_can_be_saved() {
        let device = rig().0;
        device.request_unplug(0, 4);
        device.write(EJECT_OFFSET, &[0xff; 4]);
        device.request_unplug(0, 4);
        assert_eq!(device.leaving(0), 0, "the guest is not asked again");
        let other = rig().0;
        other.restore(&device.save()).unwrap();
        assert_eq!((other.leaving(0), other.ejected(0)), (0, 1 << 4));
    }

    /// The second ejection comes from another vCPU, while the first one is being carried out.
    #[test]
    fn a_device_that_comes_to_the_number_of_an_ejected_one_is_neither_hidden_nor_ejected() {
        let (hiding, is_hiding) = std::sync::mpsc::channel();
        let (go, may_go) = std::sync::mpsc::channel();
        let may_go = Mutex::new(may_go);
        let hide = Box::new(move |_, _| {
            hiding.send(()).unwrap();
            may_go.lock().recv().unwrap();
        });
        let device = PciHotplug::new(0, OnEject { hide, notify: Box::new(|| ()) });
        device.request_unplug(0, 4);
        std::thread::scope(|scope| {
            scope.spawn(|| device.write(EJECT_OFFSET, &[0xff; 4]));
            is_hiding.recv().unwrap();
            let owner = scope.spawn(|| {
                assert_eq!(device.going(0), 1 << 4, "in one of the two, or both");
                device.request_unplug(0, 4);
                device.gone(0, 4);
            });
            assert!(!owner.is_finished());
            go.send(()).unwrap();
            owner.join().unwrap();
        });
        device.add(0, 4);
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!((device.going(0), is_hiding.try_recv().is_ok()), (0, false));
    }

    #[test]
    fn state_survives_and_what_has_gone_is_asked_for_no_more() {
        let (device, _) = rig();
        device.add(0, 1);
        device.request_unplug(0, 2);
        device.request_unplug(0, 3);
        device.write(EJECT_OFFSET, &8_u32.to_le_bytes());
        let saved = device.save();
        let (other, told) = rig();
        other.restore(&saved).unwrap();
        assert_eq!(other.save(), saved);
        assert_eq!((other.leaving(0), other.ejected(0)), (4, 8));
        assert!(told.lock().is_empty());
        let mut asked_again = saved.clone();
        asked_again.data["leaving"] = 12.into();
        other.restore(&asked_again).unwrap();
        assert_eq!(other.save(), saved);
    }

    #[test]
    fn registers_are_those_of_the_selected_segment() {
        let (device, told) = rig_of(2);
        device.add(1, 3);
        device.add(3, 3);
        device.request_unplug(1, 4);
        device.request_unplug(2, 4);
        assert_eq!((read(&device, SELECT_OFFSET), read(&device, UP_OFFSET)), (0, 0));
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert!(told.lock().is_empty(), "nothing of this segment is to go");
        select(&device, 1);
        for missing in [3, u32::MAX, 1 << 16] {
            select(&device, missing);
            device.write(SELECT_OFFSET, &[0]);
            assert_eq!(read(&device, SELECT_OFFSET), 1, "there is no {missing}");
        }
        assert_eq!((read(&device, UP_OFFSET), read(&device, DOWN_OFFSET)), (1 << 3, 1 << 4));
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!(*told.lock(), [(1, 1 << 4)]);
        assert_eq!((device.ejected(1), device.leaving(2), device.ejected(2)), (1 << 4, 1 << 4, 0));
        device.gone(1, 4);
        assert_eq!((device.ejected(1), device.leaving(2)), (0, 1 << 4));
    }

    #[test]
    fn one_segment_cannot_be_selected_and_is_saved_as_ever() {
        let (device, _) = rig();
        select(&device, 1);
        assert_eq!(read(&device, SELECT_OFFSET), 0);
        device.add(0, 1);
        let saved = device.save();
        let json = r#"{"kind":"pci-hotplug","version":1,"data":{"down":0,"ejected":0,"leaving":0,"up":2}}"#;
        let expected: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_value(&saved).unwrap(), expected);
    }

    #[test]
    fn segments_are_in_the_state_with_the_selected_one() {
        let (device, _) = rig_of(2);
        device.add(1, 3);
        device.request_unplug(2, 5);
        select(&device, 2);
        let saved = device.save();
        assert_eq!(saved.version, PCI_HOTPLUG_SEGMENTS_VERSION);
        let (other, _) = rig_of(2);
        other.restore(&saved).unwrap();
        assert_eq!(other.save(), saved);
        assert_eq!((read(&other, SELECT_OFFSET), read(&other, DOWN_OFFSET)), (2, 1 << 5));
        let (one, several) = (rig().0, rig_of(3).0);
        assert!(matches!(one.restore(&saved), Err(StateError::Version { .. })));
        assert!(matches!(several.restore(&saved), Err(StateError::Invalid { .. })));
        assert!(matches!(other.restore(&one.save()), Err(StateError::Invalid { .. })));
        let before = other.save();
        let with = |path: &str, value: u32| {
            let mut changed = saved.clone();
            *changed.data.pointer_mut(path).unwrap() = value.into();
            changed
        };
        let refused = other.restore(&with("/selected", 3));
        assert!(matches!(refused, Err(StateError::Invalid { .. })));
        assert_eq!(other.save(), before);
        other.restore(&with("/segments/2/ejected", 1 << 5)).unwrap();
        assert_eq!((other.leaving(2), other.ejected(2)), (0, 1 << 5), "it has gone");
    }

    proptest! {
        #[test]
        fn accesses_never_eject_what_was_not_asked_for(
            asked in proptest::collection::vec((0_u16..5, 0_u8..40), 0..9),
            accesses in proptest::collection::vec(
                (0_u64..20, proptest::collection::vec(0_u8..=255, 0..9), any::<bool>()), 0..40,
            ),
            selections in proptest::collection::vec(0_u32..6, 40),
        ) {
            let (device, told) = rig_of(3);
            let mut may_go = [0; 4];
            for (segment, number) in asked {
                device.request_unplug(segment, number);
                if let Some(bits) = may_go.get_mut(usize::from(segment)) {
                    *bits |= bit(number);
                }
            }
            for ((offset, mut data, is_write), selection) in accesses.into_iter().zip(selections) {
                select(&device, selection);
                if is_write { device.write(offset, &data) } else { device.read(offset, &mut data) }
            }
            let told = told.lock().iter().fold([0; 4], |mut all, (segment, bits)| {
                let of = &mut all[usize::from(*segment)];
                assert_eq!(*of & bits, 0, "told twice");
                *of |= bits;
                all
            });
            for (segment, (told, may_go)) in (0_u16..).zip(told.into_iter().zip(may_go)) {
                prop_assert_eq!(told & !may_go, 0);
                prop_assert_eq!(told | device.leaving(segment), may_go);
                prop_assert_eq!(told, device.ejected(segment));
            }
        }
    }
}
