// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a whole machine, without its memory.
//!
//! Owns the form only: plain, versioned and untrusted. What a part means is the part's business.

use std::collections::BTreeMap;

use devices::virtio::DeviceSnapshot;
use hypervisor::{ClockState, CpuidEntry, IrqchipState, VCPU_STATE_VERSION, VcpuState};
use pci::PciDeviceState;
use serde::{Deserialize, Serialize};
use thiserror::Error;

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
    /// What all vCPUs were made to show when the guest booted.
    pub shown: Vec<CpuidEntry>,
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
    /// PCI devices that come and go; earlier versions had none.
    #[serde(default)]
    pub pci_hotplug: Option<DeviceSnapshot>,
    /// PCI functions by id.
    pub pci: BTreeMap<String, PciFunctionState>,
}

/// Why bytes are not the state of a machine.
#[derive(Debug, Error)]
pub enum MachineStateError {
    /// A part was written by a later version.
    #[error("the {part} has version {found}, and the newest known here is {known}")]
    Newer {
        /// The part.
        part: &'static str,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// Anything else.
    #[error("the machine state is malformed")]
    Malformed(#[source] serde_json::Error),
}

/// What has a version of its own in every version of the state. Devices have theirs beside data
/// that only they read.
#[derive(Deserialize)]
struct Versions {
    version: u32,
    #[serde(default)]
    vcpus: Vec<Version>,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl MachineState {
    /// Reads a state. Versions come first, so that a later one is named as such whatever else has
    /// changed with it.
    ///
    /// # Errors
    /// A later version, or no state at all.
    pub fn from_json(bytes: &[u8]) -> Result<Self, MachineStateError> {
        let newer = |part, found, known| Err(MachineStateError::Newer { part, found, known });
        let versions: Versions =
            serde_json::from_slice(bytes).map_err(MachineStateError::Malformed)?;
        if versions.version > MACHINE_STATE_VERSION {
            return newer("machine state", versions.version, MACHINE_STATE_VERSION);
        }
        if let Some(vcpu) = versions.vcpus.iter().find(|vcpu| vcpu.version > VCPU_STATE_VERSION) {
            return newer("state of a vCPU", vcpu.version, VCPU_STATE_VERSION);
        }
        serde_json::from_slice(bytes).map_err(MachineStateError::Malformed)
    }
}
