// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The CMOS memory and its real-time clock (MC146818).
//!
//! Owns 128 bytes behind an index and a data port. Time registers follow the host's clock, in UTC, with the
//! offset that results when the guest sets its clock; the offset lasts as long as the machine
//! exists. There is no alarm and no interrupt, as the ACPI tables say: the machine never sleeps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::calendar::Calendar;
use crate::Snapshot;
use crate::bus::BusDevice;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

/// First port of the [`Cmos`].
pub const CMOS_PORT: u16 = 0x70;
/// Number of ports of the [`Cmos`].
pub const CMOS_LEN_BYTES: u64 = 2;

const REGISTERS: usize = 128;
const INDEX_MASK: u8 = 0x7f;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const WEEKDAY: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_C: u8 = 0x0c;
const STATUS_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;
/// Memory between 16 MiB and 4 GiB, in units of 64 KiB.
const EXTENDED_MEMORY: usize = 0x34;
/// Memory above 4 GiB, in units of 64 KiB, three bytes.
const HIGH_MEMORY: usize = 0x5b;

/// 32,768 Hz time base, 1,024 Hz rate: as firmware sets it.
const STATUS_A_DEFAULT: u8 = 0x26;
const UPDATE_IN_PROGRESS: u8 = 0x80;
const STATUS_B_24_HOURS: u8 = 0x02;
const STATUS_B_BINARY: u8 = 0x04;
/// The clock is stopped, to be set.
const STATUS_B_SET: u8 = 0x80;
/// The hour is PM, in 12-hour format.
const AFTERNOON: u8 = 0x80;
/// Power and memory are valid.
const STATUS_D_VALID: u8 = 0x80;
/// Time in nanoseconds for which an update is announced before it happens.
const UPDATE_WARNING_NS: u32 = 244_000;
const NANOS_PER_SECOND: u32 = 1_000_000_000;

const MIB: u64 = 1 << 20;
const UNIT_BYTES: u64 = 64 << 10;

/// Source of the time of the real-time clock.
pub trait Clock: Send {
    /// Time since the start of 1970, UTC.
    fn since_epoch(&self) -> Duration;
}

/// The host's clock.
pub struct HostClock;

impl Clock for HostClock {
    fn since_epoch(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// CMOS memory with the real-time clock.
pub struct Cmos {
    /// Held for one access.
    inner: Mutex<Inner>,
}

struct Inner {
    index: u8,
    bytes: [u8; REGISTERS],
    clock: Box<dyn Clock>,
    /// Offset of the guest's clock to the host's in seconds, as the guest has set it.
    ahead_s: i64,
    /// The time, while the clock is stopped.
    held: Option<Calendar>,
}

impl Cmos {
    /// CMOS memory that reports `low_bytes` of RAM below and `high_bytes` above 4 GiB to firmware.
    pub fn new(low_bytes: u64, high_bytes: u64, clock: Box<dyn Clock>) -> Self {
        let mut bytes = [0; REGISTERS];
        let extended = low_bytes.saturating_sub(16 * MIB) / UNIT_BYTES;
        let extended = u16::try_from(extended).unwrap_or(u16::MAX).to_le_bytes();
        bytes[EXTENDED_MEMORY..EXTENDED_MEMORY + 2].copy_from_slice(&extended);
        let high = (high_bytes / UNIT_BYTES).min(0xff_ffff).to_le_bytes();
        bytes[HIGH_MEMORY..HIGH_MEMORY + 3].copy_from_slice(&high[..3]);
        bytes[usize::from(STATUS_B)] = STATUS_B_24_HOURS;
        let inner = Inner { index: 0, bytes, clock, ahead_s: 0, held: None };
        Self { inner: Mutex::new(inner) }
    }
}

impl Inner {
    /// The host's clock in seconds.
    fn host_seconds(&self) -> i64 {
        i64::try_from(self.clock.since_epoch().as_secs()).unwrap_or(i64::MAX)
    }

    fn time(&self) -> Calendar {
        let running =
            || Calendar::from_epoch_seconds(self.host_seconds().saturating_add(self.ahead_s));
        self.held.unwrap_or_else(running)
    }

    fn read(&self) -> u8 {
        let time = self.time();
        match self.index {
            SECONDS => self.number(time.second),
            MINUTES => self.number(time.minute),
            HOURS => self.hour(time.hour),
            WEEKDAY => self.number(time.weekday),
            DAY => self.number(time.day),
            MONTH => self.number(time.month),
            YEAR => self.number(time.year_of_century),
            CENTURY => self.number(time.century),
            STATUS_A => {
                let now_ns = self.clock.since_epoch().subsec_nanos();
                let is_close = now_ns >= NANOS_PER_SECOND - UPDATE_WARNING_NS;
                let is_busy = is_close && self.held.is_none();
                let busy = if is_busy { UPDATE_IN_PROGRESS } else { 0 };
                STATUS_A_DEFAULT | busy
            }
            STATUS_C => 0,
            STATUS_D => STATUS_D_VALID,
            other => self.bytes.get(usize::from(other)).copied().unwrap_or(0),
        }
    }

    fn write(&mut self, value: u8) {
        match self.index {
            SECONDS | MINUTES | HOURS | DAY | MONTH | YEAR | CENTURY => self.set_time(value),
            // The day of the week is derived from the date.
            WEEKDAY | STATUS_A | STATUS_C | STATUS_D => {}
            STATUS_B => {
                // Interrupts are not supported: only the number format and stopping the clock.
                let kept = value & (STATUS_B_24_HOURS | STATUS_B_BINARY | STATUS_B_SET);
                self.hold(kept & STATUS_B_SET != 0);
                self.bytes[usize::from(STATUS_B)] = kept;
            }
            other => {
                if let Some(byte) = self.bytes.get_mut(usize::from(other)) {
                    *byte = value;
                }
            }
        }
    }

    /// Stops the clock, or starts it from the time set.
    fn hold(&mut self, on: bool) {
        match (on, self.held.take()) {
            (true, held) => self.held = Some(held.unwrap_or_else(|| self.time())),
            (false, Some(held)) => self.go_on_from(held),
            (false, None) => {}
        }
    }

    fn go_on_from(&mut self, time: Calendar) {
        self.ahead_s = time.epoch_seconds().saturating_sub(self.host_seconds());
    }

    /// Sets a register of the time; an invalid value is ignored.
    fn set_time(&mut self, value: u8) {
        let mut time = self.time();
        let number = self.number_of(value);
        let in_range = |first, last| number.filter(|number| (first..=last).contains(number));
        let (place, number) = match self.index {
            SECONDS => (&mut time.second, in_range(0, 59)),
            MINUTES => (&mut time.minute, in_range(0, 59)),
            HOURS => (&mut time.hour, self.hour_of(value)),
            DAY => (&mut time.day, in_range(1, 31)),
            MONTH => (&mut time.month, in_range(1, 12)),
            YEAR => (&mut time.year_of_century, in_range(0, 99)),
            _ => (&mut time.century, in_range(0, 99)),
        };
        let Some(number) = number else { return };
        *place = number;
        match &mut self.held {
            Some(held) => *held = time,
            None => self.go_on_from(time),
        }
    }

    fn status_b(&self) -> u8 {
        self.bytes[usize::from(STATUS_B)]
    }

    fn number(&self, value: u8) -> u8 {
        if self.status_b() & STATUS_B_BINARY != 0 {
            value
        } else {
            ((value / 10) << 4) | (value % 10)
        }
    }

    /// Inverse of [`Self::number`].
    fn number_of(&self, value: u8) -> Option<u8> {
        if self.status_b() & STATUS_B_BINARY != 0 {
            return Some(value);
        }
        let (tens, ones) = (value >> 4, value & 0xf);
        (tens < 10 && ones < 10).then_some(tens * 10 + ones)
    }

    fn hour(&self, hour: u8) -> u8 {
        if self.status_b() & STATUS_B_24_HOURS != 0 {
            return self.number(hour);
        }
        let afternoon = if hour >= 12 { AFTERNOON } else { 0 };
        self.number(if hour.is_multiple_of(12) { 12 } else { hour % 12 }) | afternoon
    }

    /// Inverse of [`Self::hour`].
    fn hour_of(&self, value: u8) -> Option<u8> {
        if self.status_b() & STATUS_B_24_HOURS != 0 {
            return self.number_of(value).filter(|hour| *hour < 24);
        }
        let hour = self.number_of(value & !AFTERNOON).filter(|hour| (1..=12).contains(hour))?;
        Some(hour % 12 + if value & AFTERNOON != 0 { 12 } else { 0 })
    }
}

impl BusDevice for Cmos {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let inner = self.inner.lock();
        if let [byte] = data {
            *byte = if offset == 1 { inner.read() } else { inner.index };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut inner = self.inner.lock();
        match (offset, data) {
            // Bit 7 masks NMIs on real machines.
            (0, [index]) => inner.index = index & INDEX_MASK,
            (1, [value]) => inner.write(*value),
            _ => {}
        }
    }
}

/// Version 1 has no clock of the guest's own, and is written unless there is one.
const CMOS_STATE: StateFormat = StateFormat { kind: "cmos", newest: 2 };
/// First version with a clock of the guest's own.
pub const CMOS_CLOCK_VERSION: u32 = 2;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CmosState {
    index: u8,
    bytes: Vec<u8>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    clock: Option<ClockState>,
}

/// A clock that the guest has set or is setting.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClockState {
    ahead_s: i64,
    /// The time at which it is stopped. As registers, as it may be an invalid date while being set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held: Option<Calendar>,
}

impl Cmos {
    /// Removes the guest's own clock from a state, for a reader that does not support it and shows the
    /// host's clock. Returns whether there was one.
    pub fn forget_clock(state: &mut DeviceSnapshot) -> bool {
        let Some(data) = state.data.as_object_mut() else { return false };
        let had_one = data.remove("clock").is_some();
        if had_one {
            state.version = 1;
        }
        had_one
    }
}

impl Snapshot for Cmos {
    fn save(&self) -> DeviceSnapshot {
        let inner = self.inner.lock();
        let is_set = inner.ahead_s != 0 || inner.held.is_some();
        let clock = is_set.then_some(ClockState { ahead_s: inner.ahead_s, held: inner.held });
        let state = CmosState { index: inner.index, bytes: inner.bytes.to_vec(), clock };
        let version = if is_set { CMOS_CLOCK_VERSION } else { 1 };
        DeviceSnapshot { version, ..CMOS_STATE.encode(&state) }
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let version = state.version;
        let state: CmosState = CMOS_STATE.decode(state)?;
        let mut bytes: [u8; REGISTERS] = state.bytes.try_into().map_err(|bytes: Vec<u8>| {
            CMOS_STATE.invalid(format!("{} registers instead of {REGISTERS}", bytes.len()))
        })?;
        if state.index > INDEX_MASK {
            return Err(CMOS_STATE.invalid(format!("index {:#x} is too large", state.index)));
        }
        if state.clock.is_some() && version < CMOS_CLOCK_VERSION {
            return Err(CMOS_STATE.invalid(format!("version {version} has no clock of its own")));
        }
        let held = state.clock.and_then(|clock| clock.held);
        if held.is_some_and(|held| !held.can_be_shown()) {
            return Err(CMOS_STATE.invalid(format!("no clock shows {held:?}")));
        }
        // The register bit follows from the state, whatever its saved value.
        let held_bit = if held.is_some() { STATUS_B_SET } else { 0 };
        let status = &mut bytes[usize::from(STATUS_B)];
        *status = *status & !STATUS_B_SET | held_bit;
        let mut inner = self.inner.lock();
        inner.index = state.index;
        inner.bytes = bytes;
        inner.ahead_s = state.clock.map_or(0, |clock| clock.ahead_s);
        inner.held = held;
        Ok(())
    }
}
