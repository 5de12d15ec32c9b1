// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices at fixed addresses: of most there is no state there, so that they begin anew.
//!
//! Owns what is refused because it would be lost: what the guest has been told of and has not fetched.

use std::collections::BTreeMap;

use cloud_hypervisor_state::{List, Serial};
use devices::virtio::DeviceSnapshot;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::{ExportError, ensure, fits};
use crate::machine::MachineState;

/// Bits of the identification register that are added when it is read.
const FIFO_BITS: u8 = 0xc0;
/// Version of a CMOS without a clock that the guest has set.
const CMOS_VERSION: u32 = 1;

/// The devices that v53 has as well. Their states are read in version 1 but for the CMOS, of which nothing is written.
const KNOWN: [&str; 7] =
    ["acpi-power", "cmos", "debug-console", "ged", "i8042", "pm-timer", "serial"];

/// The state of a device, if it is of a version that is understood here.
pub(super) fn read<T: DeserializeOwned>(
    what: &str,
    state: &DeviceSnapshot,
    kind: &str,
    newest: u32,
) -> Result<T, ExportError> {
    ensure(
        state.kind == kind && state.version <= newest,
        || what.to_owned(),
        || format!("its state is version {} of {}", state.version, state.kind),
    )?;
    T::deserialize(&state.data)
        .map_err(|error| ExportError::refused(what, format!("its state: {error}")))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Events {
    pending: u8,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Slots {
    up: u32,
    down: u32,
    leaving: u32,
    ejected: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Segments {
    segments: Vec<Slots>,
    #[expect(dead_code, reason = "it begins anew")]
    selected: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cpus {
    present: Vec<u32>,
    coming: Vec<u32>,
    going: Vec<u32>,
    leaving: Vec<u32>,
    #[serde(default)]
    #[expect(dead_code, reason = "it begins anew")]
    selected: u32,
}

/// What is written of these devices.
pub struct Legacy {
    /// The serial port.
    pub serial: Option<Serial>,
    /// Whether there is a debug console.
    pub debug_console: bool,
}

/// The devices at fixed addresses.
///
/// # Errors
/// v53 does not have one, or the guest has yet to fetch an event.
pub fn convert(state: &MachineState, losses: &mut Vec<String>) -> Result<Legacy, ExportError> {
    let devices = &state.legacy;
    if let Some(name) = devices.keys().find(|name| !KNOWN.contains(&name.as_str())) {
        return Err(ExportError::refused(name, "cloud-hypervisor 53 has no such device"));
    }
    if devices.get("cmos").is_some_and(|cmos| cmos.version > CMOS_VERSION) {
        losses.push("the CMOS clock that the guest has set shows the host's time there".to_owned());
    }
    if let Some(ged) = devices.get("ged") {
        let events: Events = read("the event device", ged, "acpi-ged", 1)?;
        let problem = || format!("the guest has yet to fetch its events ({:#x})", events.pending);
        ensure(events.pending == 0, || "the event device".to_owned(), problem)?;
    }
    check_slots(state)?;
    check_cpus(state)?;
    Ok(Legacy { serial: serial(devices)?, debug_console: devices.contains_key("debug-console") })
}

fn serial(devices: &BTreeMap<String, DeviceSnapshot>) -> Result<Option<Serial>, ExportError> {
    let Some(state) = devices.get("serial") else { return Ok(None) };
    let what = "the serial port";
    let port: Port = read(what, state, "serial-16550", 1)?;
    Ok(Some(Serial {
        interrupt_enable: port.interrupt_enable,
        interrupt_identification: port.interrupt_identification & !FIFO_BITS,
        line_control: port.line_control,
        line_status: port.line_status,
        modem_control: port.modem_control,
        modem_status: port.modem_status,
        scratch: port.scratch,
        baud_divisor: u16::from_le_bytes([port.baud_divisor_low, port.baud_divisor_high]),
        in_buffer: fits(List::try_from(port.in_buffer), || what.to_owned())?,
    }))
}

/// The registers of PCI hot-plug are not saved there.
fn check_slots(state: &MachineState) -> Result<(), ExportError> {
    const KIND: &str = "pci-hotplug";
    let what = "PCI hot-plug";
    let Some(registers) = &state.pci_hotplug else { return Ok(()) };
    let segments = if registers.version > 1 {
        read::<Segments>(what, registers, KIND, 2)?.segments
    } else {
        vec![read::<Slots>(what, registers, KIND, 1)?]
    };
    for (segment, slots) in segments.iter().enumerate() {
        let Slots { up, down, leaving, ejected } = slots;
        let busy = up | down | leaving | ejected;
        let problem =
            || format!("the guest has yet to take or eject devices {busy:#x} of segment {segment}");
        ensure(busy == 0, || what.to_owned(), problem)?;
    }
    Ok(())
}

/// Nor are those of vCPUs.
fn check_cpus(state: &MachineState) -> Result<(), ExportError> {
    let what = || "vCPU hot-plug".to_owned();
    let Some(registers) = &state.cpu_hotplug else { return Ok(()) };
    let cpus: Cpus = read(&what(), registers, "cpu-hotplug", 2)?;
    let waits = !cpus.coming.is_empty() || !cpus.going.is_empty() || !cpus.leaving.is_empty();
    let present = (0_u32..).take(state.vcpus.len());
    let are_all = cpus.present.iter().copied().eq(present);
    ensure(!waits && are_all, what, || "the guest has yet to take or eject vCPUs".to_owned())
}
