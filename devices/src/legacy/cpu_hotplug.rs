// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The vCPU hotplug registers, by which a guest is notified of vCPUs and ejects them.
//!
//! Owns which vCPUs are present for the guest, which events it has not read, and which ejections are requested. Knows
//! no vCPU: their owner is notified of ejections, and collects them when it can. The registers and their meaning are
//! described beside the AML that uses them, in the crate `arch`.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::Snapshot;
use crate::bus::BusDevice;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

/// Default port of [`CpuHotplug`].
pub const CPU_HOTPLUG_PORT: u16 = 0x640;
/// Number of ports of [`CpuHotplug`].
pub const CPU_HOTPLUG_LEN_BYTES: u64 = 64;

const NEXT_EVENT_OFFSET: u64 = 0;
const EJECT_OFFSET: u64 = 4;
const PRESENT_OFFSET: u64 = 32;
const NO_EVENT: u32 = u32::MAX;
const NOTIFY_CHECK: u32 = 1 << 16;
const NOTIFY_EJECT: u32 = 3 << 16;
/// vCPUs with a bit in the registers.
const CPUS_MAX: u32 = 256;

/// Called on a vCPU thread when the guest has ejected a vCPU.
pub type OnCpuEject = Box<dyn Fn() + Send + Sync>;

/// The vCPU hotplug registers.
pub struct CpuHotplug {
    registers: Mutex<Registers>,
    on_eject: OnCpuEject,
}

/// vCPUs by their index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registers {
    /// There, as the guest sees it.
    present: BTreeSet<u32>,
    /// Added, and not read by the guest yet.
    coming: BTreeSet<u32>,
    /// To be removed, and not read by the guest yet.
    going: BTreeSet<u32>,
    /// To be removed, and not ejected by the guest yet.
    leaving: BTreeSet<u32>,
    /// The vCPU that the registers are about, where they are of one at a time ([`super::cpu_selector`]).
    #[serde(default, skip_serializing_if = "is_zero")]
    selected: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls gets a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Registers {
    fn at_rest(count: u32) -> Self {
        Self { present: (0..count.min(CPUS_MAX)).collect(), ..Self::default() }
    }

    fn next_event(&mut self) -> u32 {
        if let Some(index) = self.coming.pop_first() {
            index | NOTIFY_CHECK
        } else if let Some(index) = self.going.pop_first() {
            index | NOTIFY_EJECT
        } else {
            NO_EVENT
        }
    }

    /// The word of presence bits at an offset from their start.
    fn present_word(&self, offset: u64) -> u32 {
        let first = u32::try_from(offset).unwrap_or(u32::MAX).saturating_mul(8);
        let bits = self.present.range(first..first.saturating_add(32));
        bits.fold(0, |word, index| word | 1 << (index - first))
    }
}

impl CpuHotplug {
    /// Registers of a machine whose first `count` vCPUs are present, without pending events.
    pub fn new(count: u32, on_eject: OnCpuEject) -> Self {
        Self { registers: Mutex::new(Registers::at_rest(count)), on_eject }
    }

    /// Makes a vCPU present, or keeps it if it was to be removed; the guest is notified by the event device.
    pub fn add(&self, index: u32) {
        let mut registers = self.registers.lock();
        if index < CPUS_MAX {
            registers.going.remove(&index);
            registers.leaving.remove(&index);
            registers.present.insert(index);
            registers.coming.insert(index);
        }
    }

    /// Marks a vCPU as to be removed, unless it has been ejected already; the guest is notified by the event
    /// device.
    pub fn request_unplug(&self, index: u32) {
        let mut registers = self.registers.lock();
        if index > 0 && registers.present.contains(&index) {
            registers.coming.remove(&index);
            registers.leaving.insert(index);
            registers.going.insert(index);
        }
    }

    /// Whether the guest was asked to eject a vCPU and has not.
    pub fn is_leaving(&self, index: u32) -> bool {
        self.registers.lock().leaving.contains(&index)
    }

    /// Whether the guest sees a vCPU.
    pub fn is_present(&self, index: u32) -> bool {
        self.registers.lock().present.contains(&index)
    }

    /// The highest index of a vCPU that the guest sees.
    pub fn last_present(&self) -> u32 {
        self.registers.lock().present.last().copied().unwrap_or(0)
    }

    /// Whether exactly the first `count` vCPUs are present and nothing is pending: a guest needs no state then.
    pub fn is_at_rest(&self, count: u32) -> bool {
        *self.registers.lock() == Registers::at_rest(count)
    }

    /// Puts the registers into that state.
    pub fn rest(&self, count: u32) {
        *self.registers.lock() = Registers::at_rest(count);
    }

    /// Selects the vCPU that [`Self::selected_state`] is about.
    pub(super) fn select(&self, index: u32) {
        self.registers.lock().selected = index;
    }

    /// The selected vCPU.
    pub(super) fn selected(&self) -> u32 {
        self.registers.lock().selected
    }

    /// Whether the selected vCPU is present, has come without the guest having noticed, and is to go likewise.
    pub(super) fn selected_state(&self) -> [bool; 3] {
        let registers = self.registers.lock();
        [&registers.present, &registers.coming, &registers.going]
            .map(|set| set.contains(&registers.selected))
    }

    /// The guest has noticed that the selected vCPU has come, or that it is to go.
    pub(super) fn notice_selected(&self, has_come: bool, is_to_go: bool) {
        let mut registers = self.registers.lock();
        let selected = registers.selected;
        if has_come {
            registers.coming.remove(&selected);
        }
        if is_to_go {
            registers.going.remove(&selected);
        }
    }

    pub(super) fn eject(&self, index: u32) {
        let mut registers = self.registers.lock();
        let was_asked = registers.leaving.remove(&index);
        if was_asked {
            registers.going.remove(&index);
            registers.present.remove(&index);
        }
        drop(registers);
        if was_asked {
            (self.on_eject)();
        }
    }
}

impl BusDevice for CpuHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        // A partial read would take an event of which the guest does not see all.
        let Ok(word) = <&mut [u8; 4]>::try_from(data) else { return };
        let mut registers = self.registers.lock();
        let value = match offset {
            NEXT_EVENT_OFFSET => registers.next_event(),
            PRESENT_OFFSET.. if offset.is_multiple_of(4) => {
                registers.present_word(offset - PRESENT_OFFSET)
            }
            _ => NO_EVENT,
        };
        *word = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (EJECT_OFFSET, Ok(word)) = (offset, <[u8; 4]>::try_from(data)) {
            self.eject(u32::from_le_bytes(word));
        }
    }
}

const KIND: &str = "cpu-hotplug";
/// The form for registers that select nothing, which every version reads.
const PLAIN: StateFormat = StateFormat { kind: KIND, newest: 1 };
const FORMAT: StateFormat = StateFormat { kind: KIND, newest: 2 };

impl Snapshot for CpuHotplug {
    fn save(&self) -> DeviceSnapshot {
        let registers = self.registers.lock();
        if registers.selected == 0 { PLAIN } else { FORMAT }.encode(&*registers)
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: Registers = FORMAT.decode(state)?;
        let Registers { present, coming, going, leaving, selected: _ } = &state;
        if !present.contains(&0) || present.last().is_some_and(|last| *last >= CPUS_MAX) {
            return Err(FORMAT.invalid("the first vCPU is missing, or one is beyond the last"));
        }
        if !coming.is_subset(present) || !leaving.is_subset(present) || leaving.contains(&0) {
            return Err(FORMAT.invalid("a vCPU that is not present comes or is to go"));
        }
        if !going.is_subset(leaving) || !coming.is_disjoint(leaving) {
            return Err(FORMAT.invalid("a vCPU that is to stay is announced as leaving"));
        }
        *self.registers.lock() = state;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;

    fn registers(count: u32) -> (CpuHotplug, Arc<AtomicUsize>) {
        let ejections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&ejections);
        let on_eject = Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        (CpuHotplug::new(count, on_eject), ejections)
    }

    fn read(device: &CpuHotplug, offset: u64) -> u32 {
        let mut word = [0; 4];
        device.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    #[test]
    fn a_guest_reads_what_came_and_what_is_to_go_once() {
        let (device, ejections) = registers(2);
        assert!(device.is_at_rest(2));
        assert_eq!((read(&device, 0), read(&device, 32)), (NO_EVENT, 3));
        device.add(2);
        device.add(40);
        device.request_unplug(1);
        device.request_unplug(0);
        device.request_unplug(7);
        let events: Vec<_> = (0..4).map(|_| read(&device, 0)).collect();
        assert_eq!(events, [0x1_0002, 0x1_0028, 0x3_0001, NO_EVENT]);
        assert_eq!((read(&device, 32), read(&device, 36), read(&device, 60)), (7, 1 << 8, 0));
        // One that was not asked for stays.
        for (index, present) in [(2_u32, 7), (1, 5), (1, 5), (300, 5)] {
            device.write(4, &index.to_le_bytes());
            assert_eq!(read(&device, 32), present, "{index}");
        }
        assert_eq!(ejections.load(Ordering::Relaxed), 1);
        assert!(!device.is_leaving(1) && !device.is_present(1) && !device.is_at_rest(2));
    }

    #[test]
    fn a_vcpu_that_is_wanted_again_stays() {
        let (device, ejections) = registers(2);
        device.request_unplug(1);
        device.add(1);
        device.write(4, &1_u32.to_le_bytes());
        assert_eq!((read(&device, 32), ejections.load(Ordering::Relaxed)), (3, 0));
        assert_eq!((read(&device, 0), read(&device, 0)), (0x1_0001, NO_EVENT));
        assert!(device.is_at_rest(2));
    }

    #[test]
    fn a_partial_access_changes_nothing() {
        let (device, _) = registers(2);
        device.add(1);
        device.request_unplug(1);
        let mut byte = [0];
        device.read(0, &mut byte);
        device.write(4, &[1]);
        assert_eq!((byte, read(&device, 0), read(&device, 32)), ([0xff], 0x3_0001, 3));
    }

    #[test]
    fn malformed_states_are_refused() {
        let (device, _) = registers(1);
        for (bad, why) in [
            (r#"{"present":[1],"coming":[],"going":[],"leaving":[]}"#, "first vCPU"),
            (r#"{"present":[0,256],"coming":[],"going":[],"leaving":[]}"#, "beyond the last"),
            (r#"{"present":[0],"coming":[1],"going":[],"leaving":[]}"#, "not present"),
            (r#"{"present":[0],"coming":[],"going":[],"leaving":[0]}"#, "not present"),
            (r#"{"present":[0,1],"coming":[],"going":[1],"leaving":[]}"#, "to stay"),
            (r#"{"present":[0,1],"coming":[1],"going":[],"leaving":[1]}"#, "to stay"),
        ] {
            let mut state = device.save();
            state.data = serde_json::from_str(bad).expect("JSON");
            let error = device.restore(&state).expect_err(bad).to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_state_that_is_reached_is_saved_and_restored(
            steps in proptest::collection::vec((0..4_u8, 0..260_u32), 0..60),
        ) {
            let (device, _) = registers(4);
            for (step, index) in steps {
                match step {
                    0 => device.add(index),
                    1 => device.request_unplug(index),
                    2 => device.write(4, &index.to_le_bytes()),
                    _ => { read(&device, 0); }
                }
            }
            let (other, _) = registers(1);
            other.restore(&device.save()).expect("its own state");
            prop_assert_eq!(&*other.registers.lock(), &*device.registers.lock());
        }
    }
}
