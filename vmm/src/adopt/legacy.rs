// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices at fixed addresses. Of most there is no state: they begin as they are at reset, but for an event that follows
//! from another part.
//!
//! What is written are version 1 of these devices' own states, which every version reads.

use std::collections::BTreeMap;

use cloud_hypervisor_state::{Document, Serial};
use devices::Snapshot as _;
use devices::legacy::{Cmos, GED_MEMORY_DEVICES_CHANGED, HostClock, PM_TIMER_FREQUENCY_HZ};
use devices::virtio::DeviceSnapshot;
use hypervisor::ClockState;
use serde_json::{Value, json};

use super::memory::{self, MemoryLayout};

/// Bytes that the serial port can hold for the guest.
const SERIAL_INPUT_MAX: usize = 64;

/// A state of version 1.
pub(super) fn state(kind: &str, data: Value) -> DeviceSnapshot {
    DeviceSnapshot { kind: kind.to_owned(), version: 1, data }
}

/// The states by name.
pub fn convert(
    document: &Document,
    layout: &MemoryLayout,
    clock: &ClockState,
    losses: &mut Vec<String>,
) -> BTreeMap<String, DeviceSnapshot> {
    let (low, high) = layout.low_and_high_bytes();
    let cmos = Cmos::new(low, high, Box::new(HostClock)).save();
    let ticks = u128::from(clock.clock_ns) * u128::from(PM_TIMER_FREQUENCY_HZ) / 1_000_000_000;
    let ticks = u32::try_from(ticks & u128::from(u32::MAX)).unwrap_or(0);
    // The guest is notified once more if it has not taken a memory device yet: a scan that finds nothing does no harm.
    let has_memory = memory::is_coming(&document.memory);
    let pending = if has_memory { GED_MEMORY_DEVICES_CHANGED } else { 0 };
    let mut states = vec![
        ("cmos", cmos),
        ("i8042", state("i8042", json!({}))),
        ("acpi-power", state("acpi-power-control", json!({}))),
        ("pm-timer", state("acpi-pm-timer", json!({"ticks": ticks}))),
        ("ged", state("acpi-ged", json!({"pending": pending}))),
    ];
    if document.devices.debug_console {
        states.push(("debug-console", state("debug-console", json!({}))));
    }
    if let Some(port) = &document.devices.serial {
        states.push(("serial", serial(port, losses)));
    }
    states.into_iter().map(|(name, state)| (name.to_owned(), state)).collect()
}

fn serial(port: &Serial, losses: &mut Vec<String>) -> DeviceSnapshot {
    let input: Vec<u8> = port.in_buffer.iter().copied().take(SERIAL_INPUT_MAX).collect();
    let lost = port.in_buffer.len().saturating_sub(input.len());
    if lost > 0 {
        losses.push(format!("the serial port loses {lost} bytes that the guest has not read"));
    }
    let [low, high] = port.baud_divisor.to_le_bytes();
    let data = json!({
        "baud_divisor_low": low,
        "baud_divisor_high": high,
        "interrupt_enable": port.interrupt_enable,
        "interrupt_identification": port.interrupt_identification,
        "line_control": port.line_control,
        "line_status": port.line_status,
        "modem_control": port.modem_control,
        "modem_status": port.modem_status,
        "scratch": port.scratch,
        "in_buffer": input,
    });
    state("serial-16550", data)
}
