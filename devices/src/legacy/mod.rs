// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of the PC platform that are not on PCI.
//!
//! Each sits on a [`crate::bus::Bus`] at the address that the constants here name, and each has
//! its state behind [`crate::Snapshot`]. Requests to end or restart the machine go to the VMM
//! through [`PowerEvents`], and interrupts through an `EventFd`.

mod acpi;
mod calendar;
mod cmos;
#[cfg(test)]
mod cmos_tests;
mod cpu_hotplug;
mod cpu_selector;
mod debug;
#[cfg(any(test, feature = "testing"))]
mod fuzz;
mod generation_id;
mod i8042;
mod memory_hotplug;
mod memory_selector;
mod pci_hotplug;
mod serial;
#[cfg(test)]
mod tests;

pub use acpi::{
    GED_CPU_DEVICES_CHANGED, GED_GENERATION_CHANGED, GED_MEMORY_DEVICES_CHANGED,
    GED_PCI_DEVICES_CHANGED, GED_POWER_BUTTON_CHANGED, GED_REGISTER_LEN_BYTES, GedDevice,
    PM_TIMER_FREQUENCY_HZ, PM_TIMER_LEN_BYTES, PM_TIMER_PORT, POWER_CONTROL_LEN_BYTES,
    POWER_CONTROL_PORT, PmTimer, PowerControl, RESET_VALUE, SLEEP_S5_VALUE,
};
pub use cmos::{CMOS_CLOCK_VERSION, CMOS_LEN_BYTES, CMOS_PORT, Clock, Cmos, HostClock};
pub use cpu_hotplug::{CPU_HOTPLUG_LEN_BYTES, CPU_HOTPLUG_PORT, CpuHotplug, OnCpuEject};
pub use cpu_selector::{CPU_SELECTOR_LEN_BYTES, CpuSelector};
pub use debug::{
    DEBUG_CONSOLE_LEN_BYTES, DEBUG_CONSOLE_PORT, DEBUG_PORT, DEBUG_PORT_LEN_BYTES, DebugConsole,
    DebugPort, FirmwareOutput,
};
#[cfg(any(test, feature = "testing"))]
pub use fuzz::fuzz;
pub use generation_id::{GENERATION_ID_LEN_BYTES, GenerationId};
pub use i8042::{I8042, I8042_DATA_PORTS, I8042_LEN_BYTES, I8042_PORT};
pub use memory_hotplug::{
    MEMORY_DEVICES_MAX, MEMORY_HOTPLUG_LEN_BYTES, MEMORY_HOTPLUG_PORT, MemoryDevice, MemoryHotplug,
};
pub use memory_selector::{MEMORY_SELECTOR_LEN_BYTES, MemorySelector};
pub use pci_hotplug::{
    OnEject, PCI_HOTPLUG_LEN_BYTES, PCI_HOTPLUG_PORT, PCI_HOTPLUG_SEGMENTS_VERSION, PciHotplug,
};
pub use serial::{SERIAL_COM1_IRQ, SERIAL_COM1_PORT, SERIAL_LEN_BYTES, Serial, SerialError};

/// Requests of the guest that concern the whole machine.
///
/// Called on vCPU threads, so an implementation must only notify the thread that owns the VM.
pub trait PowerEvents: Send + Sync {
    /// The guest requests a reset.
    fn reset(&self);
    /// The guest requests power-off.
    fn shutdown(&self);
}
