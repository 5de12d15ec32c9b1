// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory hotplug registers, in which a guest finds the memory devices that it has.
//!
//! Owns which devices are present, where, and which of them the guest has not noticed. Knows no memory: its owner adds
//! a device when what is behind it can be used. The registers and their meaning are described beside the AML that
//! uses them, in the crate `arch`.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::log_limit::LogLimit;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};
use crate::{Snapshot, log_limited};

/// Default port of [`MemoryHotplug`].
pub const MEMORY_HOTPLUG_PORT: u16 = 0x680;
/// Number of ports of [`MemoryHotplug`].
pub const MEMORY_HOTPLUG_LEN_BYTES: u64 = 16 + 16 * DEVICES_MAX as u64;
/// Memory devices that there can be.
pub const MEMORY_DEVICES_MAX: usize = DEVICES_MAX as usize;

const DEVICES_MAX: u8 = 8;
const NEXT_EVENT_OFFSET: u64 = 0;
const STATUS_OFFSET: u64 = 4;
const PRESENT_OFFSET: u64 = 8;
const RANGES_OFFSET: u64 = 16;
const NO_EVENT: u32 = u32::MAX;

/// A memory device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryDevice {
    /// Guest physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

impl MemoryDevice {
    /// First address after it; `None` if there is none.
    pub fn end_gpa(&self) -> Option<u64> {
        self.gpa.checked_add(self.len_bytes)
    }
}

/// The devices by their number, lowest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registers {
    devices: Vec<MemoryDevice>,
    /// Added, and not read by the guest yet.
    coming: BTreeSet<u8>,
    /// The device that the registers are about, where they are of one at a time ([`super::memory_selector`]).
    #[serde(default, skip_serializing_if = "is_zero")]
    selected: u8,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls gets a reference")]
fn is_zero(number: &u8) -> bool {
    *number == 0
}

impl Registers {
    fn at_rest(device: Option<MemoryDevice>) -> Self {
        Self { devices: device.into_iter().collect(), ..Self::default() }
    }

    /// The word at an offset from the start of the addresses and lengths.
    fn range_word(&self, offset: u64) -> u32 {
        let index = usize::try_from(offset / 16).unwrap_or(usize::MAX);
        let Some(device) = self.devices.get(index) else { return 0 };
        let value = if offset % 16 < 8 { device.gpa } else { device.len_bytes };
        let half = if offset % 8 < 4 { value } else { value >> 32 };
        u32::try_from(half & u64::from(u32::MAX)).unwrap_or(0)
    }

    fn present(&self) -> u32 {
        (1 << self.devices.len()) - 1
    }
}

/// The memory hotplug registers.
#[derive(Default)]
pub struct MemoryHotplug {
    registers: Mutex<Registers>,
    log: LogLimit,
}

impl MemoryHotplug {
    /// Registers of a machine which has at most one device, that the guest finds when it boots.
    pub fn new(device: Option<MemoryDevice>) -> Self {
        Self { registers: Mutex::new(Registers::at_rest(device)), log: LogLimit::default() }
    }

    /// Adds a device; the guest is notified by the event device. False if there are as many as there can be.
    pub fn add(&self, device: MemoryDevice) -> bool {
        let mut registers = self.registers.lock();
        let number = registers.devices.len();
        let Some(event) = u8::try_from(number).ok().filter(|number| *number < DEVICES_MAX) else {
            return false;
        };
        registers.devices.push(device);
        registers.coming.insert(event);
        true
    }

    /// The devices that are present.
    pub fn devices(&self) -> Vec<MemoryDevice> {
        self.registers.lock().devices.clone()
    }

    /// Whether exactly this device is present and the guest has nothing to do: it needs no state then.
    pub fn is_at_rest(&self, device: Option<MemoryDevice>) -> bool {
        *self.registers.lock() == Registers::at_rest(device)
    }

    /// Puts the registers into that state.
    pub fn rest(&self, device: Option<MemoryDevice>) {
        *self.registers.lock() = Registers::at_rest(device);
    }

    /// Selects the device that the other registers are about.
    pub(super) fn select(&self, number: u8) {
        self.registers.lock().selected = number;
    }

    /// A word of address and length of the selected device.
    pub(super) fn selected_word(&self, offset: u64) -> u32 {
        let registers = self.registers.lock();
        registers.range_word(u64::from(registers.selected) * 16 + offset)
    }

    /// Whether the selected device is present, and has come without the guest having noticed.
    pub(super) fn selected_state(&self) -> [bool; 2] {
        let registers = self.registers.lock();
        let is_present = usize::from(registers.selected) < registers.devices.len();
        [is_present, registers.coming.contains(&registers.selected)]
    }

    /// The guest has noticed that the selected device has come.
    pub(super) fn notice_selected(&self) {
        let mut registers = self.registers.lock();
        let selected = registers.selected;
        registers.coming.remove(&selected);
    }

    fn next_event(&self) -> u32 {
        self.registers.lock().coming.pop_first().map_or(NO_EVENT, u32::from)
    }
}

impl BusDevice for MemoryHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        // A partial read would take an event of which the guest does not see all.
        let Ok(word) = <&mut [u8; 4]>::try_from(data) else { return };
        let value = match offset {
            NEXT_EVENT_OFFSET => self.next_event(),
            PRESENT_OFFSET => self.registers.lock().present(),
            RANGES_OFFSET..MEMORY_HOTPLUG_LEN_BYTES if offset.is_multiple_of(4) => {
                self.registers.lock().range_word(offset - RANGES_OFFSET)
            }
            _ => NO_EVENT,
        };
        *word = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (STATUS_OFFSET, Ok(word)) = (offset, <[u8; 4]>::try_from(data)) else { return };
        let value = u32::from_le_bytes(word);
        let (device, status) = (value & 0xff, value >> 8);
        if status != 0 && device < u32::from(DEVICES_MAX) {
            log_limited!(
                self.log,
                Warn,
                "the guest has not taken up memory device {device}: it reports status {status:#x}"
            );
        }
    }
}

const KIND: &str = "memory-hotplug";
/// The form for registers that select nothing, which every version reads.
const PLAIN: StateFormat = StateFormat { kind: KIND, newest: 1 };
const FORMAT: StateFormat = StateFormat { kind: KIND, newest: 2 };

impl Snapshot for MemoryHotplug {
    fn save(&self) -> DeviceSnapshot {
        let registers = self.registers.lock();
        if registers.selected == 0 { PLAIN } else { FORMAT }.encode(&*registers)
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: Registers = FORMAT.decode(state)?;
        let Registers { devices, coming, selected: _ } = &state;
        if devices.len() > MEMORY_DEVICES_MAX {
            return Err(FORMAT.invalid("there are more memory devices than registers"));
        }
        if devices.iter().any(|device| device.len_bytes == 0 || device.end_gpa().is_none()) {
            return Err(FORMAT.invalid("a memory device is empty or wraps around"));
        }
        let pairs = devices.iter().zip(devices.iter().skip(1));
        if pairs.into_iter().any(|(one, next)| one.end_gpa() != Some(next.gpa)) {
            return Err(FORMAT.invalid("a memory device does not follow the one before it"));
        }
        if coming.iter().any(|number| usize::from(*number) >= devices.len()) {
            return Err(FORMAT.invalid("a memory device comes that is not there"));
        }
        *self.registers.lock() = state;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK: u64 = 128 << 20;

    fn device(gpa: u64, blocks: u64) -> MemoryDevice {
        MemoryDevice { gpa, len_bytes: blocks * BLOCK }
    }

    fn read(registers: &MemoryHotplug, offset: u64) -> u32 {
        let mut word = [0; 4];
        registers.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    #[test]
    fn a_guest_reads_what_came_once_and_where_it_is_always() {
        let first = device(0x1_8000_0000, 40);
        let registers = MemoryHotplug::new(Some(first));
        assert!(registers.is_at_rest(Some(first)) && !registers.is_at_rest(None));
        assert_eq!((read(&registers, 0), read(&registers, 8)), (NO_EVENT, 1));
        let second = device(first.end_gpa().expect("small"), 3);
        assert!(registers.add(second));
        assert!(!registers.is_at_rest(Some(first)));
        assert_eq!(
            (read(&registers, 8), read(&registers, 0), read(&registers, 0)),
            (3, 1, NO_EVENT)
        );
        let words: Vec<_> = (0..12).map(|word| read(&registers, 16 + 4 * word)).collect();
        assert_eq!(
            words,
            [0x8000_0000, 1, 0x4000_0000, 1, 0xc000_0000, 2, 0x1800_0000, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn there_are_no_more_than_the_registers_show() {
        let registers = MemoryHotplug::new(None);
        for number in 0..8 {
            assert!(registers.add(device(number * BLOCK, 1)), "{number}");
        }
        assert!(!registers.add(device(8 * BLOCK, 1)));
        let events: Vec<_> = (0..9).map(|_| read(&registers, 0)).collect();
        assert_eq!(events, [0, 1, 2, 3, 4, 5, 6, 7, NO_EVENT]);
        assert_eq!(read(&registers, 8), 0xff);
    }

    #[test]
    fn malformed_states_are_refused() {
        let registers = MemoryHotplug::new(None);
        let mut state = registers.save();
        let one = |gpa: u64, len: u64| format!(r#"{{"gpa":{gpa},"len_bytes":{len}}}"#);
        let many = (0..9).map(|number| one(number, 1)).collect::<Vec<_>>().join(",");
        for (devices, coming, why) in [
            (many, "", "more memory devices"),
            (one(4096, 0), "", "empty"),
            (one(u64::MAX, 2), "", "wraps"),
            (format!("{},{}", one(0, 4096), one(8192, 4096)), "", "does not follow"),
            (one(0, 4096), "1", "not there"),
            (String::new(), "0", "not there"),
        ] {
            let text = format!(r#"{{"devices":[{devices}],"coming":[{coming}]}}"#);
            state.data = serde_json::from_str(&text).expect("JSON");
            let error = registers.restore(&state).expect_err(&text).to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(registers.is_at_rest(None), "it has changed nothing");
        }
    }

    proptest! {
        /// Whatever a guest reads and writes, it takes events and changes nothing else.
        #[test]
        fn hostile_accesses_change_nothing_but_events(
            blocks in proptest::collection::vec(1..5_u64, 0..8),
            accesses in proptest::collection::vec((0..200_u64, 0..9_usize, any::<bool>(), any::<u8>()), 0..80),
        ) {
            let registers = MemoryHotplug::new(None);
            let mut gpa = 4 << 30;
            for blocks in blocks {
                prop_assert!(registers.add(device(gpa, blocks)));
                gpa += blocks * BLOCK;
            }
            let before = registers.devices();
            let mut coming = registers.registers.lock().coming.clone();
            for (offset, len, is_write, byte) in accesses {
                let mut data = vec![byte; len];
                if is_write {
                    registers.write(offset, &data);
                } else {
                    registers.read(offset, &mut data);
                    if (offset, len) == (0, 4) {
                        let event = coming.pop_first().map_or(NO_EVENT, u32::from);
                        prop_assert_eq!(data, event.to_le_bytes());
                    }
                }
            }
            prop_assert_eq!(registers.devices(), before);
            prop_assert_eq!(&registers.registers.lock().coming, &coming);
            let other = MemoryHotplug::new(None);
            other.restore(&registers.save()).expect("its own state");
            prop_assert_eq!(&*other.registers.lock(), &*registers.registers.lock());
        }
    }
}
