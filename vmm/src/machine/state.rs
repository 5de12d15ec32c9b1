// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a machine, without its memory.
//!
//! Owns only the form: plain, versioned and untrusted. Each part interprets its own state.

use std::collections::BTreeMap;

use devices::legacy::{CMOS_CLOCK_VERSION, Cmos, PCI_HOTPLUG_SEGMENTS_VERSION};
use devices::virtio::DeviceSnapshot;
use hypervisor::{ClockState, CpuidEntry, IrqchipState, VCPU_STATE_VERSION, VcpuState};
use pci::{NARROW_BAR_VERSION, PciDeviceState, VIRTIO_PCI_KIND};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vfio::{INTEGRATED_ENDPOINT_VERSION, ROM_VERSION, VFIO_PCI_KIND};
use vm_migration::vm::STATE_BYTES_MAX;

use crate::json_bound::{self, STATE_VALUES_MAX, TooManyValues};
use crate::platform::PlatformName;

/// The newest version that is read. What is written has the lowest version that can say it:
///
/// | version | has |
/// | --- | --- |
/// | 1 | `pci_hotplug`, or nothing of it: programs of that version wrote both; no other part may be new |
/// | 2 | version 2 of vCPUs; a generation ID among the legacy devices |
/// | 3 | version 2 of virtio devices, which have a 32-bit BAR |
/// | 4 | version 2 of the CMOS, which has a clock that the guest has set; version 2 of passed-through devices, which are integrated endpoints |
/// | 5 | `cpu_hotplug`: vCPUs that the guest has yet to notice or to eject |
/// | 6 | version 2 of `pci_hotplug`, which is of several PCI segments |
/// | 7 | `memory_hotplug`: memory devices of ACPI |
/// | 8 | version 3 of passed-through devices, whose expansion ROM the guest sees |
/// | 9 | `platform`: another than this program's own |
pub const MACHINE_STATE_VERSION: u32 = 9;

/// First version with platforms.
pub const PLATFORMS_VERSION: u32 = 9;

/// First version with expansion ROMs of passed-through devices.
pub const ROMS_VERSION: u32 = 8;

/// First version with memory devices of ACPI.
const MEMORY_HOTPLUG_VERSION: u32 = 7;

/// First version with several PCI segments.
pub const PCI_SEGMENTS_VERSION: u32 = 6;

/// First version with virtio devices that have 32-bit BARs.
pub const NARROW_BARS_VERSION: u32 = 3;

/// First version with passed-through endpoints shown as integrated ones.
pub const INTEGRATED_ENDPOINTS_VERSION: u32 = 4;

/// First version with a CMOS that has its own clock.
const CMOS_CLOCK_STATE_VERSION: u32 = 4;

/// First version with the registers of vCPU hotplug.
const CPU_HOTPLUG_VERSION: u32 = 5;

/// Name of the CMOS among the legacy devices.
const CMOS: &str = "cmos";

/// Name of the generation ID among the legacy devices.
pub const GENERATION_ID: &str = "vmgenid";

/// Maximum total length in bytes of the hardware states of passed-through devices, so that the state of a
/// machine with this number of vCPUs is accepted by a destination and by a restore. They are stored as
/// base64, four bytes for three, next to the state of vCPUs and devices.
pub fn hardware_state_len_bytes_max(vcpus: u32) -> u64 {
    /// For emulated devices, interrupt controllers and names; far more than needed.
    const MACHINE_BYTES: u64 = 16 << 20;
    /// For a vCPU with the largest known register file (AMX), as JSON.
    const VCPU_BYTES: u64 = 128 << 10;
    let others_bytes = MACHINE_BYTES.saturating_add(VCPU_BYTES.saturating_mul(vcpus.into()));
    STATE_BYTES_MAX.saturating_sub(others_bytes) / 4 * 3
}

/// A state that is too long for any reader.
#[derive(Debug, Error)]
#[error(
    "the state of the VM has {len_bytes} bytes, and can have {STATE_BYTES_MAX}; remove the \
     passed-through devices with the largest state first"
)]
pub struct StateTooLong {
    len_bytes: u64,
}

/// Why a state cannot be serialised.
#[derive(Debug, Error)]
pub enum StateJsonError {
    /// The state is too long.
    #[error(transparent)]
    TooLong(#[from] StateTooLong),
    /// JSON serialisation failed.
    #[error("the state cannot be written as JSON")]
    Json(#[from] serde_json::Error),
}

/// State of a PCI function, with its address.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciFunctionState {
    /// Address, which the guest knows, so that it must be the same here.
    pub bdf: String,
    /// State of the function.
    pub state: PciDeviceState,
}

/// State of a machine, except memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// See [`MACHINE_STATE_VERSION`].
    pub version: u32,
    /// The platform, which is that of the configuration beside this.
    #[serde(default, skip_serializing_if = "is_own")]
    pub platform: PlatformName,
    /// CPUID that all vCPUs were shown when the guest booted.
    pub shown: Vec<CpuidEntry>,
    /// Guest clock.
    pub clock: ClockState,
    /// The vCPUs, in order of their index.
    pub vcpus: Vec<VcpuState>,
    /// PICs and IOAPIC.
    pub irqchips: IrqchipState,
    /// Legacy devices by name.
    pub legacy: BTreeMap<String, DeviceSnapshot>,
    /// Address register of the PCI configuration ports.
    pub pci_config_address: u32,
    /// The hot-plug registers; absent in earlier versions.
    #[serde(default)]
    pub pci_hotplug: Option<DeviceSnapshot>,
    /// The vCPU hot-plug registers; absent if the guest sees all vCPUs and has nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_hotplug: Option<DeviceSnapshot>,
    /// The memory hot-plug registers; absent if there are none, or all memory that was plugged in is one memory device
    /// that the guest knows of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_hotplug: Option<DeviceSnapshot>,
    /// PCI functions by id.
    pub pci: BTreeMap<String, PciFunctionState>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls gets a reference")]
fn is_own(platform: &PlatformName) -> bool {
    *platform == PlatformName::default()
}

/// Why bytes are not a machine state.
#[derive(Debug, Error)]
pub enum MachineStateError {
    /// A part has a later version.
    #[error("the {part} has version {found}, and the newest known here is {known}")]
    Newer {
        /// Name of the part.
        part: &'static str,
        /// Its version.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
    /// The reader does not support the version that the state needs.
    #[error(
        "the destination reads machine states up to version {newest}, and this one needs {needed}"
    )]
    BeyondReader {
        /// Version that the state needs.
        needed: u32,
        /// Newest version of the reader.
        newest: u32,
    },
    /// The state has a part that its version does not include.
    #[error("the machine state has version {version} and {part}, which came with a later version")]
    NotInVersion {
        /// Version of the state.
        version: u32,
        /// Name of the part.
        part: &'static str,
    },
    /// More values than any machine has.
    #[error("the machine state cannot be taken")]
    TooLarge(#[from] TooManyValues),
    /// The JSON is malformed.
    #[error("the machine state is malformed")]
    Malformed(#[source] serde_json::Error),
}

/// The parts with a version of their own in every version of the state. Devices keep theirs in their own
/// data.
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
    /// Serialises the state, within the length that a reader accepts.
    ///
    /// # Errors
    /// The state is too long.
    pub fn to_json(&self) -> Result<Vec<u8>, StateJsonError> {
        let json = serde_json::to_vec(self)?;
        let len_bytes = u64::try_from(json.len()).unwrap_or(u64::MAX);
        if len_bytes > STATE_BYTES_MAX {
            return Err(StateTooLong { len_bytes }.into());
        }
        Ok(json)
    }

    /// Parses a state. Versions are checked first, so that a later version is reported as such whatever
    /// else has changed.
    ///
    /// # Errors
    /// The version is newer, or the bytes are malformed.
    pub fn from_json(bytes: &[u8]) -> Result<Self, MachineStateError> {
        let newer = |part, found, known| Err(MachineStateError::Newer { part, found, known });
        json_bound::check(bytes, STATE_VALUES_MAX)?;
        let versions: Versions =
            serde_json::from_slice(bytes).map_err(MachineStateError::Malformed)?;
        if versions.version > MACHINE_STATE_VERSION {
            return newer("machine state", versions.version, MACHINE_STATE_VERSION);
        }
        if let Some(vcpu) = versions.vcpus.iter().find(|vcpu| vcpu.version > VCPU_STATE_VERSION) {
            return newer("state of a vCPU", vcpu.version, VCPU_STATE_VERSION);
        }
        let state: Self = serde_json::from_slice(bytes).map_err(MachineStateError::Malformed)?;
        match state.newest_part() {
            Some((needed, part)) if state.version < needed => {
                Err(MachineStateError::NotInVersion { version: state.version, part })
            }
            _ => Ok(state),
        }
    }

    /// The newest version that a part of this state needs, if above 1, and the part.
    fn newest_part(&self) -> Option<(u32, &'static str)> {
        let is_narrow = |function: &PciFunctionState| {
            let state = &function.state;
            state.kind == VIRTIO_PCI_KIND && state.version >= NARROW_BAR_VERSION
        };
        let is_passed_from = |version| {
            move |function: &PciFunctionState| {
                let state = &function.state;
                state.kind == VFIO_PCI_KIND && state.version >= version
            }
        };
        let has_clock = |cmos: &DeviceSnapshot| cmos.version >= CMOS_CLOCK_VERSION;
        let has_segments = |slots: &DeviceSnapshot| slots.version >= PCI_HOTPLUG_SEGMENTS_VERSION;
        if !is_own(&self.platform) {
            Some((PLATFORMS_VERSION, "a platform"))
        } else if self.pci.values().any(is_passed_from(ROM_VERSION)) {
            Some((ROMS_VERSION, "a passed-through device with an expansion ROM"))
        } else if self.memory_hotplug.is_some() {
            Some((MEMORY_HOTPLUG_VERSION, "memory devices of ACPI"))
        } else if self.pci_hotplug.as_ref().is_some_and(has_segments) {
            Some((PCI_SEGMENTS_VERSION, "several PCI segments"))
        } else if self.cpu_hotplug.is_some() {
            Some((CPU_HOTPLUG_VERSION, "vCPUs that come or go"))
        } else if self.legacy.get(CMOS).is_some_and(has_clock) {
            Some((CMOS_CLOCK_STATE_VERSION, "a CMOS clock that the guest has set"))
        } else if self.pci.values().any(is_passed_from(INTEGRATED_ENDPOINT_VERSION)) {
            Some((
                INTEGRATED_ENDPOINTS_VERSION,
                "a passed-through device as an integrated endpoint",
            ))
        } else if self.pci.values().any(is_narrow) {
            Some((NARROW_BARS_VERSION, "a virtio device with a 32-bit BAR"))
        } else if self.vcpus.iter().any(|vcpu| vcpu.version > 1) {
            Some((2, "a vCPU of version 2"))
        } else if self.legacy.contains_key(GENERATION_ID) {
            Some((2, "a generation ID"))
        } else {
            None
        }
    }

    /// The lowest version that can represent this state.
    pub fn needed_version(&self) -> u32 {
        self.newest_part().map_or(1, |(version, _)| version)
    }

    /// The state for a reader of versions up to `newest`, without the parts that it can do without: the
    /// generation ID keeps its place in guest memory and is not renewed there; the CMOS clock follows the
    /// host again; vCPUs that come or go do not.
    ///
    /// # Errors
    /// A part is needed for the guest to continue.
    pub fn for_reader(mut self, newest: u32) -> Result<Self, MachineStateError> {
        if newest < 2 && self.legacy.remove(GENERATION_ID).is_some() {
            log::warn!(
                "the destination is an older version: the guest's generation ID will not be renewed \
                 when a snapshot made there is restored"
            );
        }
        if newest < CMOS_CLOCK_STATE_VERSION
            && self.legacy.get_mut(CMOS).is_some_and(Cmos::forget_clock)
        {
            log::warn!(
                "the destination is an older version: the guest's CMOS clock will show the host's time \
                 there, and not what the guest has set it to"
            );
        }
        if newest < CPU_HOTPLUG_VERSION && self.cpu_hotplug.take().is_some() {
            log::warn!(
                "the destination is an older version: vCPUs that the guest has not taken up or ejected yet \
                 stay as they are there"
            );
        }
        self.version = self.needed_version();
        if self.version > newest {
            return Err(MachineStateError::BeyondReader { needed: self.version, newest });
        }
        Ok(self)
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
