// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entry point of a fuzz target: accesses of a guest to the registers of the platform, what their owners do meanwhile,
//! and saved states.
//!
//! Must return for any bytes; panics only if a property is violated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    Clock, Cmos, CpuHotplug, CpuSelector, DebugConsole, DebugPort, FirmwareOutput, GedDevice,
    GenerationId, I8042, MemoryDevice, MemoryHotplug, MemorySelector, OnEject, PciHotplug, PmTimer,
    PowerControl, PowerEvents, Serial,
};
use crate::Snapshot;
use crate::bus::BusDevice;
use crate::endpoint::ConsoleEndpoint;
use crate::virtio::DeviceSnapshot;

/// First byte of an input that is a saved state, as JSON.
const STATE: u8 = 0xff;
const STEP_BYTES: usize = 11;
const SEGMENTS_MAX: usize = 4;
const BOOT_VCPUS: u32 = 4;
/// What the host does, and not the guest.
const OWNER: u8 = 14;
/// The machine is saved, and goes on in another one.
const MOVE: u8 = 15;
/// Lengths of accesses; a vCPU makes those of 1, 2, 4 and 8 bytes alone.
const LENGTHS: [usize; 8] = [4, 1, 4, 2, 4, 8, 0, 3];

/// PCI devices that the guest may eject, a bit for each number in each segment.
type MayGo = Arc<Mutex<[u32; SEGMENTS_MAX]>>;

struct NoPower;

impl PowerEvents for NoPower {
    fn reset(&self) {}
    fn shutdown(&self) {}
}

/// A clock that the input sets.
#[derive(Clone, Default)]
struct SetClock(Arc<AtomicU64>);

impl Clock for SetClock {
    fn since_epoch(&self) -> Duration {
        let seconds = self.0.load(Ordering::Relaxed);
        // The low bits as a fraction, so that the last moments of a second occur.
        Duration::new(seconds, u32::try_from(seconds % 1_000_000_000).unwrap_or(0))
    }
}

struct Machine {
    pci: PciHotplug,
    cpus: Arc<CpuHotplug>,
    cpu_selector: CpuSelector,
    memory: Arc<MemoryHotplug>,
    memory_selector: MemorySelector,
    ged: GedDevice,
    timer: PmTimer,
    power: PowerControl,
    cmos: Cmos,
    keyboard: I8042,
    serial: Serial,
    console: DebugConsole,
    port: DebugPort,
    firmware: FirmwareOutput,
    generation: GenerationId,
}

impl Machine {
    fn new(last_segment: u16, may_go: &MayGo, clock: &SetClock) -> Option<Self> {
        let asked = Arc::clone(may_go);
        let hide = move |segment: u16, bits: u32| {
            let mut asked = asked.lock();
            let Some(asked) = asked.get_mut(usize::from(segment)) else {
                panic!("a device of segment {segment} is ejected");
            };
            assert_eq!(bits & !*asked, 0, "a device goes that was not asked for");
            *asked &= !bits;
        };
        let on_eject = OnEject { hide: Box::new(hide), notify: Box::new(|| ()) };
        let events = Arc::new(NoPower);
        let cpus = Arc::new(CpuHotplug::new(BOOT_VCPUS, Box::new(|| ())));
        let memory = Arc::new(MemoryHotplug::new(None));
        let line = || EventFd::new(EFD_NONBLOCK).ok();
        let endpoint = Arc::new(ConsoleEndpoint::null().ok()?);
        Some(Self {
            pci: PciHotplug::new(last_segment, on_eject),
            cpu_selector: CpuSelector::over(Arc::clone(&cpus)),
            cpus,
            memory_selector: MemorySelector::over(Arc::clone(&memory)),
            memory,
            ged: GedDevice::new(line()?),
            timer: PmTimer::new(),
            power: PowerControl::new(events.clone()),
            cmos: Cmos::new(1 << 31, 1 << 40, Box::new(clock.clone())),
            keyboard: if last_segment.is_multiple_of(2) {
                I8042::new(events)
            } else {
                I8042::without_data_port(events)
            },
            serial: Serial::new(Arc::clone(&endpoint), line()?).ok()?,
            console: DebugConsole::new(endpoint),
            port: DebugPort::default(),
            firmware: FirmwareOutput::default(),
            generation: GenerationId::new(0xe_f000),
        })
    }

    fn device(&self, number: u8) -> Option<&dyn BusDevice> {
        let devices: [&dyn BusDevice; 14] = [
            &self.pci,
            &*self.cpus,
            &self.cpu_selector,
            &*self.memory,
            &self.memory_selector,
            &self.ged,
            &self.timer,
            &self.power,
            &self.cmos,
            &self.keyboard,
            &self.serial,
            &self.console,
            &self.port,
            &self.firmware,
        ];
        devices.get(usize::from(number)).copied()
    }

    fn saved(&self) -> [&dyn Snapshot; 10] {
        [
            &self.pci,
            &*self.cpus,
            &*self.memory,
            &self.ged,
            &self.cmos,
            &self.keyboard,
            &self.power,
            &self.serial,
            &self.console,
            &self.generation,
        ]
    }

    /// What the owners of the registers do.
    fn own(&self, what: u8, place: u8, value: [u8; 8], may_go: &MayGo, clock: &SetClock) {
        let segment = u16::from(place >> 5);
        let number = value[0];
        match what {
            0 => self.pci.add(segment, number),
            1 => {
                self.pci.request_unplug(segment, number);
                if let Some(asked) = may_go.lock().get_mut(usize::from(segment)) {
                    *asked |= self.pci.leaving(segment);
                }
            }
            2 => {
                self.pci.gone(segment, number);
                if let Some(asked) = may_go.lock().get_mut(usize::from(segment)) {
                    *asked &= self.pci.leaving(segment);
                }
            }
            3 => self.cpus.add(u32::from(number) + u32::from(place)),
            4 => self.cpus.request_unplug(u32::from(number) + u32::from(place)),
            5 => {
                let last =
                    self.memory.devices().last().map_or(Some(4 << 30), MemoryDevice::end_gpa);
                let len_bytes = (u64::from(number) + 1) << (place % 40);
                let next = last.map(|gpa| MemoryDevice { gpa, len_bytes });
                if let Some(next) = next.filter(|next| next.end_gpa().is_some()) {
                    let has_room = self.memory.devices().len() < super::MEMORY_DEVICES_MAX;
                    assert_eq!(self.memory.add(next), has_room);
                }
            }
            6 => self.ged.notify(number),
            7 => self.ged.resume(),
            8 => clock.0.store(u64::from_le_bytes(value), Ordering::Relaxed),
            9 => self.serial.pause(),
            10 => self.serial.resume(),
            11 => self.cpus.rest(u32::from(number).max(1)),
            _ => self.timer.advance(
                Duration::from_nanos(u64::from_le_bytes(value)),
                std::time::Instant::now(),
            ),
        }
    }

    /// Saves everything and restores it into `other`, which has the same state then.
    fn go_on_in(&self, other: Self) -> Self {
        for (from, to) in self.saved().into_iter().zip(other.saved()) {
            let state = from.save();
            if let Err(error) = to.restore(&state) {
                panic!("a state that was reached is refused: {error}: {:?}", state.data);
            }
            assert_eq!(to.save(), state);
        }
        if let Err(error) = other.timer.restore(&self.timer.save()) {
            panic!("the timer is refused: {error}");
        }
        other
    }
}

/// The first byte chooses the number of segments, or says that the rest is a saved state. Each eleven that follow are a
/// step: what, two of an offset, and eight of a value. Returns how many steps were made, or how often the state was taken.
pub fn fuzz(data: &[u8]) -> usize {
    let Some((mode, rest)) = data.split_first() else { return 0 };
    if *mode == STATE { restore(rest) } else { run(u16::from(mode % 4), rest) }
}

fn run(last_segment: u16, steps: &[u8]) -> usize {
    let (may_go, clock) = (MayGo::default(), SetClock::default());
    let new = || Machine::new(last_segment, &may_go, &clock);
    let mut made = 0;
    let Some(mut machine) = new() else { return made };
    for step in steps.chunks_exact(STEP_BYTES) {
        let [what, place, high, value @ ..] = step else { return made };
        let Ok(value) = <[u8; 8]>::try_from(value) else { return made };
        match what & 0xf {
            OWNER => machine.own(what >> 4, *place, value, &may_go, &clock),
            MOVE => match new() {
                Some(other) => machine = machine.go_on_in(other),
                None => return made,
            },
            number => {
                let Some(device) = machine.device(number) else { return made };
                // Beyond the registers only now and then.
                let offset = if *high < 0xf0 { 0 } else { u64::from(*high) << (high % 56) };
                let offset = offset | u64::from(*place);
                let len = LENGTHS.get(usize::from(what >> 5)).copied().unwrap_or(0);
                let mut bytes = value;
                let bytes = bytes.get_mut(..len).unwrap_or_default();
                let memory = machine.memory.devices();
                if what & 0x10 == 0 {
                    device.read(offset, bytes);
                } else {
                    device.write(offset, bytes);
                }
                assert_eq!(machine.memory.devices(), memory, "a guest has changed its memory");
                assert!(machine.cpus.is_present(0), "the first vCPU has gone");
            }
        }
        made += 1;
    }
    made
}

fn restore(json: &[u8]) -> usize {
    let mut times = 0;
    let Ok(state) = serde_json::from_slice::<DeviceSnapshot>(json) else { return times };
    let (may_go, clock) = (MayGo::default(), SetClock::default());
    for last_segment in [0, 1] {
        let Some(machine) = Machine::new(last_segment, &may_go, &clock) else { return times };
        let before: Vec<DeviceSnapshot> = machine.saved().map(Snapshot::save).into();
        for (device, before) in machine.saved().into_iter().zip(&before) {
            if device.restore(&state).is_err() {
                assert_eq!(device.save(), *before, "a refused state has changed something");
                continue;
            }
            let taken = device.save();
            if let Err(error) = device.restore(&taken) {
                panic!("a state that was taken is refused: {error}: {:?}", taken.data);
            }
            assert_eq!(device.save(), taken);
            times += 1;
        }
        let _ = machine.timer.restore(&state);
    }
    times
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn any_steps_keep_what_the_registers_promise(
            mode in any::<u8>(),
            steps in proptest::collection::vec(
                (any::<u8>(), 0..48_u8, any::<u8>(), proptest::array::uniform8(0..48_u8)), 0..120,
            ),
        ) {
            let count = steps.len();
            let mut bytes = vec![mode % 4];
            for (what, place, high, value) in steps {
                bytes.extend([what, place, high]);
                bytes.extend(value);
            }
            prop_assert_eq!(fuzz(&bytes), count, "each step is made");
        }

        #[test]
        fn any_numbers_in_a_state_are_taken_or_refused(numbers in proptest::array::uniform8(any::<u8>())) {
            let [a, b, c, d, e, f, g, h] = numbers;
            let version = a % 4;
            for (kind, version, data) in [
                ("cpu-hotplug", version, json!({
                    "present": [0, b], "coming": [c], "going": [d], "leaving": [d], "selected": e,
                })),
                ("memory-hotplug", version, json!({
                    "devices": [{"gpa": b, "len_bytes": c}], "coming": [d], "selected": e,
                })),
                ("pci-hotplug", version, json!({"up": b, "down": c, "leaving": d, "ejected": e})),
                ("acpi-ged", 1, json!({"pending": b})),
                ("serial-16550", 1, json!({
                    "baud_divisor_low": a, "baud_divisor_high": b, "interrupt_enable": c,
                    "interrupt_identification": d, "line_control": e, "line_status": f,
                    "modem_control": g, "modem_status": h, "scratch": a, "in_buffer": [b, c],
                })),
            ] {
                let state = json!({"kind": kind, "version": version, "data": data}).to_string();
                let bytes: Vec<u8> = std::iter::once(STATE).chain(state.bytes()).collect();
                let times = fuzz(&bytes);
                // By the device of that kind in each of two machines.
                prop_assert!([0, 1, 2].contains(&times), "{} takes what is of {}", times, kind);
                prop_assert!(times == 2 || kind != "acpi-ged" && kind != "serial-16550");
            }
        }
    }
}
