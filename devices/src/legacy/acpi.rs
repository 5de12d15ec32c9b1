// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The ACPI hardware of the machine: power control, PM timer and the event device's register.
//!
//! Owns the registers that the FADT and the DSDT point at. Never writes the tables themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::PowerEvents;
use crate::bus::BusDevice;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError, read_config_bytes};
use crate::{LogLimit, Snapshot, log_limited};

/// Default port of [`PowerControl`].
pub const POWER_CONTROL_PORT: u16 = 0x600;
/// Number of ports of [`PowerControl`].
pub const POWER_CONTROL_LEN_BYTES: u64 = 8;
/// Value of the sleep control register that powers the machine off: sleep type 5 in bits 2 to 4, sleep
/// enable in bit 5 (ACPI 6.5, 4.8.3.7).
pub const SLEEP_S5_VALUE: u8 = (5 << 2) | (1 << 5);
/// Value of the reset register that resets the machine.
pub const RESET_VALUE: u8 = 1;

/// Sleep control, sleep status and reset register in one byte (ACPI 6.5, 4.8.3.6 and 4.8.3.7).
///
/// The FADT may give the same address for all three, as their values do not collide. The register reads as
/// zero: the wake status is never set, as there is no sleep state to wake from.
pub struct PowerControl {
    events: Arc<dyn PowerEvents>,
    log: LogLimit,
}

impl PowerControl {
    /// A register that reports to `events`.
    pub fn new(events: Arc<dyn PowerEvents>) -> Self {
        Self { events, log: LogLimit::default() }
    }
}

impl BusDevice for PowerControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// The register is the first byte, whatever the access width; the others are unused.
    fn write(&self, offset: u64, data: &[u8]) {
        match (offset, data.first()) {
            (0, Some(&RESET_VALUE)) => {
                log_limited!(self.log, Info, "guest asked for a reset by ACPI");
                self.events.reset();
            }
            (0, Some(&SLEEP_S5_VALUE)) => {
                log_limited!(self.log, Info, "guest switched itself off by ACPI");
                self.events.shutdown();
            }
            _ => {}
        }
    }
}

const POWER_CONTROL_STATE: StateFormat = StateFormat { kind: "acpi-power-control", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PowerControlState {}

impl Snapshot for PowerControl {
    fn save(&self) -> DeviceSnapshot {
        POWER_CONTROL_STATE.encode(&PowerControlState {})
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        POWER_CONTROL_STATE.decode::<PowerControlState>(state).map(|_| ())
    }
}

/// Default port of the [`PmTimer`].
pub const PM_TIMER_PORT: u16 = 0x608;
/// Number of ports of the [`PmTimer`].
pub const PM_TIMER_LEN_BYTES: u64 = 4;
/// Rate of the [`PmTimer`] (ACPI 6.5, 4.8.2.1).
pub const PM_TIMER_FREQUENCY_HZ: u64 = 3_579_545;

/// The ACPI PM timer, a 32-bit up-counter.
pub struct PmTimer {
    epoch: Mutex<Epoch>,
}

/// The timer's value at an instant.
#[derive(Clone, Copy)]
struct Epoch {
    at: Instant,
    ticks: u32,
    /// See [`PmTimer::read_at`].
    read_at: Option<Instant>,
}

impl PmTimer {
    /// A timer that starts at zero.
    pub fn new() -> Self {
        Self { epoch: Mutex::new(Epoch { at: Instant::now(), ticks: 0, read_at: None }) }
    }

    fn lock(&self) -> MutexGuard<'_, Epoch> {
        self.epoch.lock()
    }

    /// Sets the time as of which the timer is saved, that of reading the guest's other clocks: a guest that
    /// compares them considers a clock broken that differs by a millisecond.
    pub fn read_at(&self, at: Instant) {
        self.lock().read_at = Some(at);
    }

    /// Advances guest time by what has passed between the saved state and `at`, as for the other clocks.
    pub fn advance(&self, passed: Duration, at: Instant) {
        let mut epoch = self.lock();
        epoch.at = at;
        epoch.ticks = epoch.ticks.wrapping_add(ticks_in(passed));
    }

    /// The timer's value at `now`.
    fn ticks(&self, now: Instant) -> u32 {
        let epoch = *self.lock();
        epoch.ticks.wrapping_add(ticks_in(now.saturating_duration_since(epoch.at)))
    }
}

impl Default for PmTimer {
    fn default() -> Self {
        Self::new()
    }
}

/// Ticks in a duration, modulo 2^32.
fn ticks_in(elapsed: Duration) -> u32 {
    let ticks =
        elapsed.as_nanos().saturating_mul(u128::from(PM_TIMER_FREQUENCY_HZ)) / 1_000_000_000;
    #[expect(clippy::cast_possible_truncation, reason = "the counter has 32 bits and wraps")]
    let ticks = ticks as u32;
    ticks
}

impl BusDevice for PmTimer {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let value = self.ticks(Instant::now()).to_le_bytes();
        read_config_bytes(&value, offset, data);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

const PM_TIMER_STATE: StateFormat = StateFormat { kind: "acpi-pm-timer", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PmTimerState {
    ticks: u32,
}

impl Snapshot for PmTimer {
    fn save(&self) -> DeviceSnapshot {
        let now = Instant::now();
        let read_at = self.lock().read_at.take();
        PM_TIMER_STATE.encode(&PmTimerState { ticks: self.ticks(read_at.unwrap_or(now)) })
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: PmTimerState = PM_TIMER_STATE.decode(state)?;
        let epoch = Epoch { at: Instant::now(), ticks: state.ticks, read_at: None };
        *self.lock() = epoch;
        Ok(())
    }
}

/// Length of the register of the [`GedDevice`].
pub const GED_REGISTER_LEN_BYTES: u64 = 1;
/// Bit of the [`GedDevice`]'s register: CPUs were added or removed.
pub const GED_CPU_DEVICES_CHANGED: u8 = 1 << 0;
/// Bit of the [`GedDevice`]'s register: memory was added or removed.
pub const GED_MEMORY_DEVICES_CHANGED: u8 = 1 << 1;
/// Bit of the [`GedDevice`]'s register: PCI devices were added or are to be removed.
pub const GED_PCI_DEVICES_CHANGED: u8 = 1 << 2;
/// Bit of the [`GedDevice`]'s register: the power button was pressed.
pub const GED_POWER_BUTTON_CHANGED: u8 = 1 << 3;
/// Bit of the [`GedDevice`]'s register: the generation ID has changed.
pub const GED_GENERATION_CHANGED: u8 = 1 << 4;

/// The register of the ACPI generic event device (ACPI 6.5, 5.6.9).
///
/// On its interrupt the guest runs the event method, which reads the byte; reading clears it.
pub struct GedDevice {
    pending: AtomicU8,
    /// Number of events so far.
    count: AtomicU64,
    interrupt: EventFd,
    log: LogLimit,
}

impl GedDevice {
    /// A register without pending events, whose interrupt line is `interrupt`.
    pub fn new(interrupt: EventFd) -> Self {
        Self {
            pending: AtomicU8::new(0),
            count: AtomicU64::new(0),
            interrupt,
            log: LogLimit::default(),
        }
    }

    /// Signals that the power button was pressed.
    pub fn set_power_button(&self) {
        self.notify(GED_POWER_BUTTON_CHANGED);
    }

    /// Sets event bits and raises the interrupt.
    pub fn notify(&self, events: u8) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.pending.fetch_or(events, Ordering::AcqRel);
        self.interrupt();
    }

    fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire) != 0
    }

    /// Number of the newest event, if the guest has not read all of them.
    pub fn unread(&self) -> Option<u64> {
        self.is_pending().then(|| self.count.load(Ordering::Relaxed))
    }

    /// Raises the interrupt again if events are pending, when the guest resumes or has not read them for long: an
    /// interrupt raised before the state was saved, or before the guest enabled it, may not have been delivered.
    pub fn resume(&self) {
        if self.is_pending() {
            self.interrupt();
        }
    }

    fn interrupt(&self) {
        if let Err(error) = self.interrupt.write(1) {
            log_limited!(
                self.log,
                Warn,
                "cannot raise the interrupt of the ACPI event device: {error}"
            );
        }
    }
}

impl BusDevice for GedDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, Some(first)) = (offset, data.first_mut()) {
            *first = self.pending.swap(0, Ordering::AcqRel);
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

const GED_STATE: StateFormat = StateFormat { kind: "acpi-ged", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GedState {
    pending: u8,
}

impl Snapshot for GedDevice {
    fn save(&self) -> DeviceSnapshot {
        GED_STATE.encode(&GedState { pending: self.pending.load(Ordering::Acquire) })
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: GedState = GED_STATE.decode(state)?;
        self.pending.store(state.pending, Ordering::Release);
        Ok(())
    }
}
