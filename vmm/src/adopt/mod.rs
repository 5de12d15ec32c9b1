// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM of cloud-hypervisor as one of this program: from its documents to configuration, memory and machine state.
//!
//! Owns what the values of those documents mean here, and what cannot be taken over. A pure function: it has no KVM, file
//! or socket, and reads guest memory only through [`ReadGuest`]. The documents are untrusted. What is refused is named by
//! the path of its node; nothing is ever dropped in silence: what a guest may notice is in [`Adopted::losses`].
//!
//! | module | what it converts |
//! | --- | --- |
//! | `configuration` | the configuration, with the place of each device |
//! | `memory` | where RAM is, memory devices of ACPI |
//! | `vcpu` | registers, CPUID, MSRs, the local APIC |
//! | `interrupts` | the I/O APIC; PICs that the guest has found absent |
//! | `clock` | the clock, and the TSC at its moment |
//! | `legacy` | devices at fixed addresses |
//! | `functions` | configuration space, BARs and MSI-X of a PCI function |
//! | `transport` | the virtio transport, positions of queues |
//! | `own_states`, `features` | the virtio devices' own states; what they may have offered |
//! | `place` | whether a snapshot has all memory, and a machine has it where the guest has found it |
//! | `topology` | which devices there are, and where |
//!
//! The machine is of the platform that the guest has seen; [`SeenPlatform`] has what of it the documents say.

mod clock;
mod configuration;
mod error;
mod features;
mod functions;
mod interrupts;
mod legacy;
mod memory;
mod own_states;
mod place;
mod topology;
mod transport;
mod vcpu;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::error::Error;

use cloud_hypervisor_state::{ConfigMessage, Document, MemoryManager};
use hypervisor::CpuidEntry;
use pci::Bdf;
use serde_json::Value;

use crate::config::{ImageType, VmConfig};
use crate::machine::MachineState;
use crate::platform::PlatformName;

pub use error::AdoptError;
use error::ensure;
pub use functions::Windows;
pub use memory::{MemoryLayout, MemoryPart, PartKind};
pub use place::{check_made, check_ranges, check_taps};

/// The platform of these guests.
const PLATFORM: PlatformName = PlatformName::CloudHypervisor53;

/// Guest memory, as far as it is read: the indices of rings, pages of the paravirtual clock.
pub trait ReadGuest {
    /// The two bytes at an address.
    ///
    /// # Errors
    /// They cannot be read.
    fn read_u16(&self, gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>>;
}

/// What the guest has seen that is no part of its configuration or state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenPlatform {
    /// Address bits by which windows and registers were placed.
    pub address_bits: u8,
    /// Where the window for 64-bit BARs starts.
    pub device_area_gpa: u64,
    /// Address of each PCI function by the id that it has here.
    pub addresses: BTreeMap<String, Bdf>,
    /// Features that each virtio device has offered, by the id that it has here.
    pub offered: BTreeMap<String, u64>,
    /// The number that the next name made by the VMM would have had.
    pub names_count: u64,
}

/// A VM that was converted.
#[derive(Debug)]
pub struct Adopted {
    /// Its configuration, complete.
    pub config: VmConfig,
    /// Network devices whose taps were given as descriptors, and have to be again.
    pub without_tap: Vec<String>,
    /// The platform.
    pub platform: SeenPlatform,
    /// Where its memory is.
    pub memory: MemoryLayout,
    /// State of everything except memory.
    pub state: MachineState,
    /// Whether the TSC of vCPUs is that of the clock's moment. If not, it is of a later one.
    is_tsc_of_clock: bool,
    /// What is lost and the guest or its user may notice, each a sentence for the log.
    pub losses: Vec<String>,
}

impl Adopted {
    /// Has the TSC of vCPUs go on from when their state arrived, in real time, unless it is that of the clock's moment:
    /// v53 reads it just before it sends that. All of the time since the clock's moment is added when the machine is
    /// restored, so what had passed by then is taken off.
    pub fn count_tsc_from(&mut self, arrived_ns: u64) {
        let passed_ns = arrived_ns.saturating_sub(self.state.clock.realtime_ns);
        for vcpu in self.state.vcpus.iter_mut().filter(|_| !self.is_tsc_of_clock) {
            vcpu.tsc = vcpu.tsc.earlier(passed_ns);
        }
    }
}

/// What is known of a VM before its state comes: enough for its memory, and for the refusals that need no state.
#[derive(Debug)]
pub struct Begun {
    /// Its configuration, complete but for the places of its devices.
    pub config: VmConfig,
    /// Network devices whose taps were given as descriptors, and have to be again.
    pub without_tap: Vec<String>,
    /// Where its memory is.
    pub memory: MemoryLayout,
    /// CPUID that its vCPUs were shown, but for what differs between vCPUs.
    pub shown: Vec<CpuidEntry>,
}

/// Gives private zones memory of their own: of a private mapping the contents are the guest's, and come with it. The file
/// stays as it is. What is lost is added to `losses`.
fn without_private_files(config: &mut VmConfig, losses: &mut Vec<String>) {
    for zone in config.memory.zones.iter_mut().flatten().filter(|zone| !zone.shared) {
        if let Some(file) = zone.file.take() {
            let (zone, file) = (&zone.id, file.display());
            losses.push(format!(
                "zone '{zone}' has memory of its own in place of a private copy of {file}"
            ));
        }
    }
}

/// Refuses images that the source still changes when it has handed the VM over: it writes the tables of qcow2 when it closes
/// them, and those of VHDX with each request that it was late with.
fn check_images(config: &VmConfig) -> Result<(), AdoptError> {
    for disk in config.disks.iter().flatten() {
        let id = disk.id.as_deref().unwrap_or_default();
        ensure(
            disk.readonly || !matches!(disk.image_type, ImageType::Qcow2 | ImageType::Vhdx),
            || format!("config.disks: '{id}'"),
            || {
                let why = "cloud-hypervisor may change the tables of a qcow2 or VHDX image after the VM has moved";
                format!(
                    "{why}: convert it to raw, or restore a snapshot once cloud-hypervisor has ended"
                )
            },
        )?;
    }
    Ok(())
}

/// Converts what comes before the state of a VM. It is the configuration of [`adopt`] but for the places of devices.
///
/// # Errors
/// Names the part that cannot be taken over.
pub fn begin(message: &ConfigMessage) -> Result<Begun, AdoptError> {
    let early = &message.memory_manager_data;
    let raw = configuration::read(&message.vm_config, early, &topology::Topology::default())?;
    let mut config = raw.config;
    config.platform.get_or_insert_default().platform = PLATFORM;
    let mut config = config.complete_begun().map_err(AdoptError::Config)?;
    // What is lost is said once the whole VM is converted.
    without_private_files(&mut config, &mut Vec::new());
    check_images(&config)?;
    let memory = memory::layout(&config.memory, early, early)?;
    config.pci_address_bits = Some(vcpu::address_bits("common_cpuid", &message.common_cpuid)?);
    let shown = vcpu::shown(&message.common_cpuid, None, &config.cpus);
    Ok(Begun { config, without_tap: raw.without_tap, memory, shown })
}

/// Fuzzes the conversion: a line with the configuration, then the document. What is made of them has a state that is read
/// as it was written. Returns whether they could be converted.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_adopt(data: &[u8]) -> bool {
    struct Counting;
    impl ReadGuest for Counting {
        fn read_u16(&self, gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>> {
            // Some of the positions fit.
            Ok(u16::from_le_bytes([gpa.to_le_bytes()[1] & 3, 0]))
        }
    }
    let Some(end) = data.iter().position(|byte| *byte == b'\n') else { return false };
    let (config, document) = data.split_at(end);
    let read = cloud_hypervisor_state::ConfigMessage::read_vm_config;
    let (Ok(config), Ok(document)) = (read(config), Document::read(document)) else { return false };
    let Ok(mut adopted) = adopt(&config, &document.memory, &document, &Counting) else {
        return false;
    };
    adopted.count_tsc_from(u64::MAX);
    let json = adopted.state.to_json().unwrap_or_default();
    let again = MachineState::from_json(&json).map(|state| state.to_json().unwrap_or_default());
    assert!(matches!(again, Ok(again) if again == json), "read otherwise");
    true
}

/// Converts a VM.
///
/// `memory` is the state of the memory manager that came with the configuration; in a snapshot that of the document.
///
/// # Errors
/// Names the part that cannot be taken over.
pub fn adopt(
    vm_config: &Value,
    memory: &MemoryManager,
    document: &Document,
    guest: &dyn ReadGuest,
) -> Result<Adopted, AdoptError> {
    let mut losses = Vec::new();
    let topology = topology::of(document)?;
    let raw = configuration::read(vm_config, memory, &topology)?;
    let mut config = raw.config;
    config.platform.get_or_insert_default().platform = PLATFORM;
    let mut config = config.complete_begun().map_err(AdoptError::Config)?;
    topology::check(&config, document)?;
    without_private_files(&mut config, &mut losses);
    let layout = memory::layout(&config.memory, memory, &document.memory)?;
    let clock = clock::convert(&document.vm)?;
    let vcpus = vcpu::convert(document, &config.cpus, &clock, guest)?;
    let windows = functions::Windows::of(&layout, vcpus.address_bits)?;
    config.pci_address_bits = Some(vcpus.address_bits);
    config.pci_numbers = topology.unlisted_numbers(document);
    let shown = vcpu::shown(&document.vm.common_cpuid, vcpus.states.first(), &config.cpus);
    let bar_len_bytes = config.machine_platform().virtio_pci.bar_len_bytes;
    for disk in config.disks.iter().flatten().filter(|disk| disk.serial.is_none()) {
        let id = disk.id.as_deref().unwrap_or_default();
        losses.push(format!("disk '{id}' has another serial number here, as no option says one"));
    }
    let mut pci = BTreeMap::new();
    let mut offered = BTreeMap::new();
    for (id, (transport, device)) in &document.devices.virtio {
        let here = topology::name_here(id, device);
        let known = features::check(id, device)?;
        let accepted = transport::accepted_now(transport, known.accepted);
        let state = own_states::convert(id, device, &layout, accepted, &mut losses)?;
        let place = topology.place(id)?;
        let input =
            transport::Input { id, transport, device, place, windows: &windows, bar_len_bytes };
        let state = transport::convert(&input, accepted, state, &layout, guest)?;
        offered.insert(here.clone(), known.offered);
        pci.insert(here, state);
    }
    if let Some(panics) = &document.devices.pvpanic {
        let state = functions::panic_device(panics, topology.panic_device()?, &windows)?;
        pci.insert(crate::config::vm::PVPANIC_ID.to_owned(), state);
    }
    let mut state = MachineState {
        version: 1,
        platform: PLATFORM,
        shown,
        clock,
        vcpus: vcpus.states,
        irqchips: interrupts::convert(&document.devices.ioapic)?,
        legacy: legacy::convert(document, &layout, &clock, &mut losses),
        pci_config_address: 0,
        pci_hotplug: None,
        cpu_hotplug: None,
        memory_hotplug: memory::devices(&document.memory),
        pci,
    };
    state.version = state.needed_version();
    Ok(Adopted {
        without_tap: raw.without_tap,
        platform: SeenPlatform {
            address_bits: vcpus.address_bits,
            device_area_gpa: layout.device_area_gpa,
            addresses: topology.addresses(document),
            offered,
            names_count: document.devices.data.device_id_cnt,
        },
        config,
        memory: layout,
        state,
        is_tsc_of_clock: vcpus.is_tsc_of_clock,
        losses,
    })
}
