// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a whole machine, without its memory.
//!
//! Owns the form only: plain, versioned and untrusted. What a part means is the part's business.

use std::collections::BTreeMap;

use devices::virtio::DeviceSnapshot;
use hypervisor::{ClockState, IrqchipState, VcpuState};
use pci::PciDeviceState;
use serde::{Deserialize, Serialize};

/// Version that is written, and the newest that is read.
pub const MACHINE_STATE_VERSION: u32 = 1;

/// State of one PCI function, and where it sits.
#[derive(Debug, Serialize, Deserialize)]
pub struct PciFunctionState {
    /// Its address; the guest knows it, so it must be the same here.
    pub bdf: String,
    /// Its own state.
    pub state: PciDeviceState,
}

/// State of a machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    /// See [`MACHINE_STATE_VERSION`].
    pub version: u32,
    /// Guest time.
    pub clock: ClockState,
    /// The vCPUs, in order of their numbers.
    pub vcpus: Vec<VcpuState>,
    /// PICs and IOAPIC.
    pub irqchips: IrqchipState,
    /// Legacy devices by name.
    pub legacy: BTreeMap<String, DeviceSnapshot>,
    /// Address register of the PCI configuration ports.
    pub pci_config_address: u32,
    /// PCI functions by id.
    pub pci: BTreeMap<String, PciFunctionState>,
}
