// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The CMOS memory and its real-time clock (MC146818).
//!
//! Owns 128 bytes behind an index and a data port. Time registers follow the host's clock, in UTC;
//! what the guest writes to them is dropped, as its clock is kept by other means. There is no
//! alarm and no interrupt.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::Snapshot;
use crate::bus::BusDevice;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

/// First port of the [`Cmos`].
pub const CMOS_PORT: u16 = 0x70;
/// Ports that the [`Cmos`] takes.
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

/// 32,768 Hz time base, 1,024 Hz rate: what firmware leaves behind.
const STATUS_A_DEFAULT: u8 = 0x26;
const UPDATE_IN_PROGRESS: u8 = 0x80;
const STATUS_B_24_HOURS: u8 = 0x02;
const STATUS_B_BINARY: u8 = 0x04;
/// Power and memory are good.
const STATUS_D_VALID: u8 = 0x80;
/// The chip shows an update 244 us before it comes.
const UPDATE_WARNING_NS: u32 = 244_000;
const NANOS_PER_SECOND: u32 = 1_000_000_000;

const MIB: u64 = 1 << 20;
const UNIT_BYTES: u64 = 64 << 10;

/// Where the real-time clock takes the time from.
pub trait Clock: Send {
    /// Time since the beginning of 1970, UTC.
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
    /// Held for the time of one access.
    inner: Mutex<Inner>,
}

struct Inner {
    index: u8,
    bytes: [u8; REGISTERS],
    clock: Box<dyn Clock>,
}

impl Cmos {
    /// CMOS memory that tells firmware of `low_bytes` of RAM below and `high_bytes` above 4 GiB.
    pub fn new(low_bytes: u64, high_bytes: u64, clock: Box<dyn Clock>) -> Self {
        let mut bytes = [0; REGISTERS];
        let extended = low_bytes.saturating_sub(16 * MIB) / UNIT_BYTES;
        let extended = u16::try_from(extended).unwrap_or(u16::MAX).to_le_bytes();
        bytes[EXTENDED_MEMORY..EXTENDED_MEMORY + 2].copy_from_slice(&extended);
        let high = (high_bytes / UNIT_BYTES).min(0xff_ffff).to_le_bytes();
        bytes[HIGH_MEMORY..HIGH_MEMORY + 3].copy_from_slice(&high[..3]);
        bytes[usize::from(STATUS_B)] = STATUS_B_24_HOURS;
        Self { inner: Mutex::new(Inner { index: 0, bytes, clock }) }
    }
}

impl Inner {
    fn read(&self) -> u8 {
        let now = self.clock.since_epoch();
        let time = Calendar::from_epoch_seconds(now.as_secs());
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
                let is_close = now.subsec_nanos() >= NANOS_PER_SECOND - UPDATE_WARNING_NS;
                let busy = if is_close { UPDATE_IN_PROGRESS } else { 0 };
                STATUS_A_DEFAULT | busy
            }
            STATUS_C => 0,
            STATUS_D => STATUS_D_VALID,
            other => self.bytes.get(usize::from(other)).copied().unwrap_or(0),
        }
    }

    fn write(&mut self, value: u8) {
        match self.index {
            SECONDS | MINUTES | HOURS | WEEKDAY | DAY | MONTH | YEAR | CENTURY | STATUS_A
            | STATUS_C | STATUS_D => {}
            STATUS_B => {
                // No interrupts: only the format of the numbers can be chosen.
                let format = value & (STATUS_B_24_HOURS | STATUS_B_BINARY);
                self.bytes[usize::from(STATUS_B)] = format;
            }
            other => {
                if let Some(byte) = self.bytes.get_mut(usize::from(other)) {
                    *byte = value;
                }
            }
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

    fn hour(&self, hour: u8) -> u8 {
        if self.status_b() & STATUS_B_24_HOURS != 0 {
            return self.number(hour);
        }
        let afternoon = if hour >= 12 { 0x80 } else { 0 };
        self.number(if hour.is_multiple_of(12) { 12 } else { hour % 12 }) | afternoon
    }
}

impl BusDevice for Cmos {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let [byte] = data {
            *byte = if offset == 1 { inner.read() } else { inner.index };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        match (offset, data) {
            // Bit 7 masks NMIs on real machines.
            (0, [index]) => inner.index = index & INDEX_MASK,
            (1, [value]) => inner.write(*value),
            _ => {}
        }
    }
}

const CMOS_STATE: StateFormat = StateFormat { kind: "cmos", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CmosState {
    index: u8,
    bytes: Vec<u8>,
}

impl Snapshot for Cmos {
    fn save(&self) -> DeviceSnapshot {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        CMOS_STATE.encode(&CmosState { index: inner.index, bytes: inner.bytes.to_vec() })
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: CmosState = CMOS_STATE.decode(state)?;
        let bytes: [u8; REGISTERS] = state.bytes.try_into().map_err(|bytes: Vec<u8>| {
            CMOS_STATE.invalid(format!("{} registers instead of {REGISTERS}", bytes.len()))
        })?;
        if state.index > INDEX_MASK {
            return Err(CMOS_STATE.invalid(format!("index {:#x} is too large", state.index)));
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.index = state.index;
        inner.bytes = bytes;
        Ok(())
    }
}

/// A date and a time of day as the chip has them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Calendar {
    pub(super) second: u8,
    pub(super) minute: u8,
    pub(super) hour: u8,
    /// Sunday is 1.
    pub(super) weekday: u8,
    pub(super) day: u8,
    pub(super) month: u8,
    pub(super) year_of_century: u8,
    pub(super) century: u8,
}

impl Calendar {
    /// The proleptic Gregorian date of a number of seconds since 1970.
    ///
    /// Days are counted from 1 March of the year 0, so that a leap day is the last of its year.
    pub(super) fn from_epoch_seconds(seconds: u64) -> Self {
        const DAYS_BEFORE_1970: u64 = 719_468;
        const DAYS_OF_400_YEARS: u64 = 146_097;
        let days = seconds / 86_400;
        let second_of_day = seconds % 86_400;
        let shifted = days + DAYS_BEFORE_1970;
        let era = shifted / DAYS_OF_400_YEARS;
        let day_of_era = shifted % DAYS_OF_400_YEARS;
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // March is 0. A month takes 30.6 days on the average of five.
        let month_index = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_index + 2) / 5 + 1;
        let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        Self {
            second: small(second_of_day % 60),
            minute: small(second_of_day / 60 % 60),
            hour: small(second_of_day / 3_600),
            // 1 January 1970 was a Thursday.
            weekday: small((days + 4) % 7 + 1),
            day: small(day),
            month: small(month),
            year_of_century: small(year % 100),
            century: small(year / 100 % 100),
        }
    }
}

fn small(value: u64) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}
