// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PCI hotplug registers, by which a guest is notified of devices and ejects them.
//!
//! Owns a bit for each device number in each of the registers, and the requested ejections.
//! Knows no device: their owner is notified of ejections, and collects them when it can.

use std::sync::atomic::{AtomicU32, Ordering};

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
/// Bit 0 would be the host bridge.
const SLOTS: u32 = !1;

/// Called on a vCPU thread with the devices that the guest has ejected, a bit for each device number.
pub type OnEject = Box<dyn Fn(u32) + Send + Sync>;

/// The hot-plug registers.
pub struct PciHotplug {
    /// Added, and not read by the guest yet.
    up: AtomicU32,
    /// To be removed, and not read by the guest yet.
    down: AtomicU32,
    /// To be removed, and not ejected by the guest yet.
    leaving: AtomicU32,
    /// Ejected by the guest, and not removed yet.
    ejected: AtomicU32,
    on_eject: OnEject,
}

impl PciHotplug {
    /// Registers without pending events.
    pub fn new(on_eject: OnEject) -> Self {
        let none = || AtomicU32::new(0);
        Self { up: none(), down: none(), leaving: none(), ejected: none(), on_eject }
    }

    /// Marks a device as added; the guest is notified by the event device.
    pub fn add(&self, number: u8) {
        self.up.fetch_or(bit(number), Ordering::AcqRel);
    }

    /// Marks a device as to be removed; the guest is notified by the event device.
    pub fn request_unplug(&self, number: u8) {
        self.leaving.fetch_or(bit(number), Ordering::AcqRel);
        self.down.fetch_or(bit(number), Ordering::AcqRel);
    }

    /// Devices that the guest was asked to eject and has not, a bit for each number.
    pub fn leaving(&self) -> u32 {
        self.leaving.load(Ordering::Acquire)
    }

    /// Devices that the guest has ejected and that still exist.
    pub fn ejected(&self) -> u32 {
        self.ejected.load(Ordering::Acquire)
    }

    /// Marks a device as removed, so that its number is free.
    pub fn gone(&self, number: u8) {
        for register in [&self.up, &self.down, &self.leaving, &self.ejected] {
            register.fetch_and(!bit(number), Ordering::AcqRel);
        }
    }

    fn eject(&self, wanted: u32) {
        let before = self.leaving.fetch_and(!wanted, Ordering::AcqRel);
        let going = before & wanted & SLOTS;
        if going != 0 {
            self.ejected.fetch_or(going, Ordering::AcqRel);
            (self.on_eject)(going);
        }
    }
}

fn bit(number: u8) -> u32 {
    1_u32.checked_shl(number.into()).unwrap_or(0) & SLOTS
}

impl BusDevice for PciHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let register = match offset {
            UP_OFFSET => &self.up,
            DOWN_OFFSET => &self.down,
            _ => return,
        };
        // A partial read would clear bits that the guest does not see.
        if data.len() == 4 {
            let value = register.swap(0, Ordering::AcqRel).to_le_bytes();
            read_config_bytes(&value, 0, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (EJECT_OFFSET, Ok(word)) = (offset, <[u8; 4]>::try_from(data)) {
            self.eject(u32::from_le_bytes(word));
        }
    }
}

const FORMAT: StateFormat = StateFormat { kind: "pci-hotplug", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    up: u32,
    down: u32,
    leaving: u32,
    ejected: u32,
}

impl Snapshot for PciHotplug {
    fn save(&self) -> DeviceSnapshot {
        FORMAT.encode(&State {
            up: self.up.load(Ordering::Acquire),
            down: self.down.load(Ordering::Acquire),
            leaving: self.leaving(),
            ejected: self.ejected(),
        })
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: State = FORMAT.decode(state)?;
        let both = state.leaving & state.ejected;
        if both != 0 {
            return Err(FORMAT.invalid("a device is to go and has gone"));
        }
        for (register, value) in [
            (&self.up, state.up),
            (&self.down, state.down),
            (&self.leaving, state.leaving),
            (&self.ejected, state.ejected),
        ] {
            register.store(value & SLOTS, Ordering::Release);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::sync::Arc;

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;

    fn rig() -> (PciHotplug, Arc<Mutex<Vec<u32>>>) {
        let told: Arc<Mutex<Vec<u32>>> = Arc::default();
        let inner = Arc::clone(&told);
        (PciHotplug::new(Box::new(move |bits| inner.lock().push(bits))), told)
    }

    fn read(device: &PciHotplug, offset: u64) -> u32 {
        let mut data = [0xee; 4];
        device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn what_came_is_told_once() {
        let (device, _) = rig();
        device.add(3);
        device.add(31);
        device.add(0);
        device.add(77);
        assert_eq!(read(&device, UP_OFFSET), 1 << 3 | 1 << 31);
        assert_eq!(read(&device, UP_OFFSET), 0);
        assert_eq!(read(&device, DOWN_OFFSET), 0);
    }

    #[test]
    fn only_what_is_to_go_can_be_ejected() {
        let (device, told) = rig();
        device.write(EJECT_OFFSET, &[0xff; 4]);
        device.request_unplug(4);
        assert_eq!(read(&device, DOWN_OFFSET), 1 << 4);
        device.request_unplug(4);
        assert_eq!(read(&device, DOWN_OFFSET), 1 << 4, "asked again");
        device.write(EJECT_OFFSET, &(1_u32 << 5).to_le_bytes());
        assert_eq!((device.leaving(), device.ejected()), (1 << 4, 0));
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!((device.leaving(), device.ejected()), (0, 1 << 4));
        device.write(EJECT_OFFSET, &[0xff; 4]);
        assert_eq!(*told.lock(), [1 << 4], "once");
        device.gone(4);
        assert_eq!(device.ejected(), 0);
    }

    #[test]
    fn state_survives_and_contradictions_are_refused() {
        let (device, _) = rig();
        device.add(1);
        device.request_unplug(2);
        device.request_unplug(3);
        device.write(EJECT_OFFSET, &8_u32.to_le_bytes());
        let saved = device.save();
        let (other, told) = rig();
        other.restore(&saved).unwrap();
        assert_eq!(other.save(), saved);
        assert_eq!((other.leaving(), other.ejected()), (4, 8));
        assert!(told.lock().is_empty());
        let mut bad = saved;
        bad.data["leaving"] = 8.into();
        assert!(matches!(other.restore(&bad), Err(StateError::Invalid { .. })));
    }

    proptest! {
        #[test]
        fn accesses_never_eject_what_was_not_asked_for(
            asked in proptest::collection::vec(0_u8..40, 0..6),
            accesses in proptest::collection::vec(
                (0_u64..20, proptest::collection::vec(any::<u8>(), 0..9), any::<bool>()), 0..40,
            ),
        ) {
            let (device, told) = rig();
            let mut may_go = 0;
            for number in asked {
                device.request_unplug(number);
                may_go |= bit(number);
            }
            for (offset, mut data, is_write) in accesses {
                if is_write { device.write(offset, &data) } else { device.read(offset, &mut data) }
            }
            let told = told.lock().iter().fold(0, |all, bits| {
                assert_eq!(all & bits, 0, "told twice");
                all | bits
            });
            prop_assert_eq!(told & !may_go, 0);
            prop_assert_eq!(told | device.leaving(), may_go);
            prop_assert_eq!(told, device.ejected());
        }
    }
}
