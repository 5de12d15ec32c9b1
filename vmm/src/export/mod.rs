// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM of this program as one of cloud-hypervisor: from configuration, memory and machine state to its documents.
//!
//! Owns what those values are called there, and what v53 cannot have. The inverse of [`crate::adopt`], and a pure function
//! like it: it has no KVM, file or socket, and reads guest memory only through [`ReadGuest`]. What is refused is named, and
//! nothing has been written by then; what a guest or its user may notice is in [`Exported::losses`].
//!
//! | module | what it converts |
//! | --- | --- |
//! | `configuration` | the configuration |
//! | `memory` | mappings of RAM, memory devices of ACPI, ranges of a memory file |
//! | `vcpu` | registers, CPUID, MSRs, the local APIC; the CPUID by which hosts are compared |
//! | `interrupts` | the I/O APIC |
//! | `clock` | the clock |
//! | `legacy` | devices at fixed addresses; hot-plug that is under way, which is refused |
//! | `functions` | configuration space and MSI-X of a PCI function |
//! | `transport` | the virtio transport, positions of queues |
//! | `queued` | nothing: requests that may not be in a queue of a machine that is sent |
//! | `own_states` | the virtio devices' own states |
//! | `topology` | the tree of devices |
//! | `windows` | where BARs can be |
//!
//! Only a machine of the platform that those guests have seen can be written.

mod clock;
mod configuration;
mod error;
mod functions;
mod interrupts;
mod legacy;
mod memory;
mod own_states;
mod queued;
mod topology;
mod transport;
mod vcpu;
mod windows;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use cloud_hypervisor_state::{
    ConfigMessage, DeviceManager, Document, MemoryManager, Virtio, VmData,
};
use devices::virtio::DeviceSnapshot;
use hypervisor::CpuidEntry;
use pci::{VIRTIO_PCI_KIND, VirtioPciState};
use serde::Deserialize;
use serde_json::Value;

use crate::adopt::{MemoryLayout, ReadGuest};
use crate::config::VmConfig;
use crate::config::vm::PVPANIC_ID;
use crate::machine::{MachineState, PciFunctionState, SeenDevice};
use crate::platform::PlatformName;
use error::ensure;
use functions::Site;
use own_states::LaterMemory;
use topology::{Place, Tree};
use windows::Windows;

pub use error::ExportError;
pub use memory::layout_of;
pub use queued::check_queued;

/// The platform of these guests.
const PLATFORM: PlatformName = PlatformName::CloudHypervisor53;
/// Newest version of a virtio function's state that is understood here.
const VIRTIO_VERSION: u32 = pci::NARROW_BAR_VERSION;
const DRIVER: u8 = 2;

/// A machine, apart from its saved state.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// Its configuration.
    pub config: &'a VmConfig,
    /// Where its memory is.
    pub layout: &'a MemoryLayout,
    /// Its virtio devices by id.
    pub devices: &'a BTreeMap<String, SeenDevice>,
    /// Its memory.
    pub guest: &'a dyn ReadGuest,
}

/// A VM that was converted.
#[derive(Debug)]
pub struct Exported {
    /// Its configuration.
    pub vm_config: Value,
    /// Its state. The ranges of memory are those that have contents, in the order of a memory file.
    pub document: Document,
    /// What is lost and the guest or its user may notice, each a sentence for the log.
    pub losses: Vec<String>,
}

/// Checks that a machine is of the platform that those guests have seen.
///
/// # Errors
/// It is of another.
pub fn check_platform(config: &VmConfig) -> Result<(), ExportError> {
    let (here, wanted) = (config.platform_name().text(), PLATFORM.text());
    ensure(
        config.platform_name() == PLATFORM,
        || format!("platform={here}"),
        || format!("only a VM of the platform {wanted} is one of cloud-hypervisor"),
    )
}

/// Converts what comes before the state of a VM, while its guest runs: the configuration, the CPUID by which hosts are
/// compared, where memory is.
///
/// `shown` is the CPUID that all vCPUs were shown, `devices` are the registers of memory devices.
///
/// # Errors
/// Names the part that v53 does not have.
pub fn begin(
    config: &VmConfig,
    layout: &MemoryLayout,
    shown: &[CpuidEntry],
    devices: Option<&DeviceSnapshot>,
) -> Result<ConfigMessage, ExportError> {
    check_platform(config)?;
    // What is lost is said once the whole VM is converted.
    let vm_config = configuration::convert(config, &mut Vec::new())?;
    // Of the memory that the guest is to have of memory devices nothing has to be known yet.
    let memory = memory::convert(layout, devices, 0, &[])?;
    Ok(ConfigMessage { vm_config, common_cpuid: vcpu::common(shown)?, memory_manager_data: memory })
}

/// Converts a VM.
///
/// # Errors
/// Names the part that v53 does not have, or not in this state.
pub fn export(seen: &Seen<'_>, state: &MachineState) -> Result<Exported, ExportError> {
    check_platform(seen.config)?;
    let mut losses = Vec::new();
    let vm_config = configuration::convert(seen.config, &mut losses)?;
    let (vcpus, wanted) = (state.vcpus.len(), seen.config.cpus.boot_vcpus);
    ensure(
        u32::try_from(vcpus) == Ok(wanted),
        || "vCPUs".to_owned(),
        || format!("there are {vcpus}, and {wanted} in the configuration"),
    )?;
    let mut documents = BTreeMap::new();
    for (index, vcpu) in state.vcpus.iter().enumerate() {
        let hyperv = seen.config.cpus.kvm_hyperv;
        let vcpu = vcpu::convert(index, vcpu, hyperv, seen.guest, &mut losses)?;
        documents.insert(u32::try_from(index).unwrap_or(u32::MAX), vcpu);
    }
    let legacy = legacy::convert(state, &mut losses)?;
    let mut functions = Functions::new(seen, Tree::of(&legacy)?)?;
    for (id, function) in &state.pci {
        functions.add(id, function, &mut losses)?;
    }
    functions.check_panic_device(&mut losses);
    let Functions { tree, virtio, pvpanic, later, .. } = functions;
    let memory = memory_of(seen, state, &later)?;
    let document = Document {
        vm: VmData {
            clock: Some(clock::convert(&state.clock)),
            common_cpuid: vcpu::common(&state.shown)?,
        },
        vcpus: documents,
        memory,
        devices: DeviceManager {
            data: tree.finish(),
            ioapic: interrupts::convert(&state.irqchips, &mut losses)?,
            serial: legacy.serial,
            debug_console: legacy.debug_console,
            pvpanic,
            virtio,
        },
    };
    Ok(Exported { vm_config, document, losses })
}

fn memory_of(
    seen: &Seen<'_>,
    state: &MachineState,
    later: &[LaterMemory],
) -> Result<MemoryManager, ExportError> {
    let plugged: Vec<Range<u64>> = later.iter().flat_map(|it| it.plugged.clone()).collect();
    let requested = later.iter().fold(0, |sum: u64, it| sum.saturating_add(it.requested_bytes));
    let devices = state.memory_hotplug.as_ref();
    let ranges = memory::ranges(seen.layout, devices, &plugged)?;
    memory::convert(seen.layout, devices, requested, &ranges)
}

/// The PCI functions, one after another.
struct Functions<'a> {
    seen: &'a Seen<'a>,
    windows: Windows,
    bar_len_bytes: u64,
    tree: Tree,
    virtio: BTreeMap<String, (cloud_hypervisor_state::Transport, Virtio)>,
    pvpanic: Option<cloud_hypervisor_state::Pvpanic>,
    /// Where the panic device is here.
    panic_gpa: Option<u64>,
    /// Of each memory device.
    later: Vec<LaterMemory>,
}

impl<'a> Functions<'a> {
    fn new(seen: &'a Seen<'a>, tree: Tree) -> Result<Self, ExportError> {
        Ok(Self {
            seen,
            windows: Windows::of(seen)?,
            bar_len_bytes: seen.config.machine_platform().virtio_pci.bar_len_bytes,
            tree,
            virtio: BTreeMap::new(),
            pvpanic: None,
            panic_gpa: None,
            later: Vec::new(),
        })
    }

    fn add(
        &mut self,
        id: &str,
        function: &PciFunctionState,
        losses: &mut Vec<String>,
    ) -> Result<(), ExportError> {
        let what = format!("device '{id}'");
        let PciFunctionState { bdf, state } = function;
        let site = Site { what: &what, bdf, windows: &self.windows };
        if id == PVPANIC_ID {
            let (device, bar) = functions::panic_device(&site, state)?;
            self.panic_gpa = Some(bar.gpa);
            self.tree.add_panic_device(Place { bdf: bdf.clone(), bar })?;
            self.pvpanic = Some(device);
            return Ok(());
        }
        let problem = || format!("its state is version {} of {}", state.version, state.kind);
        let is_known = state.kind == VIRTIO_PCI_KIND && state.version <= VIRTIO_VERSION;
        ensure(is_known, || what.clone(), problem)?;
        let unseen = || ExportError::refused(&what, "the machine does not have it");
        let device = self.seen.devices.get(id).ok_or_else(unseen)?;
        let state = VirtioPciState::deserialize(&state.data)?;
        let common = &state.common;
        let source = own_states::Source {
            what: &what,
            id,
            device_type: state.device_id,
            state: &state.device,
            seen: device,
            accepted: if common.status & DRIVER == 0 { 0 } else { common.driver_features },
            active: common.active,
        };
        let converted = source.convert(self.seen.config, self.seen.layout, losses)?;
        let there = match converted {
            Virtio::Mem(_) => {
                self.later.push(source.later_memory(self.seen.layout)?);
                memory::zone_of(id)
            }
            _ => id.to_owned(),
        };
        let (sizes, len) = (&device.queue_sizes, self.bar_len_bytes);
        let (transport, bar) = transport::convert(&site, &state, sizes, len, self.seen)?;
        if let Virtio::Pmem(pmem) = &converted {
            let (start, end) =
                (pmem.config.start, pmem.config.start.saturating_add(pmem.config.size));
            let problem =
                || format!("its memory is at {start:#x}, outside of its segment's window");
            ensure(self.windows.hold(bdf, &(start..end), true), || what.clone(), problem)?;
        }
        self.windows.take(bdf, &bar);
        self.tree.add_virtio(&there, &converted, Place { bdf: bdf.clone(), bar })?;
        self.virtio.insert(there, (transport, converted));
        Ok(())
    }

    /// v53 does not put the panic device where its register says.
    fn check_panic_device(&self, losses: &mut Vec<String>) {
        let Some(here) = self.panic_gpa else { return };
        let there = self.windows.panic_device_gpa();
        if there != Some(here) {
            let there = there.map_or_else(|| "nowhere".to_owned(), |gpa| format!("at {gpa:#x}"));
            losses.push(format!(
                "panics of the guest are not noticed there: its panic device is at {here:#x}, and {there} there"
            ));
        }
    }
}
