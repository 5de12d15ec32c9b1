// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The parts of a machine but for its vCPUs: KVM's VM, memory, buses and devices.
//!
//! Owns the order in which they are made and find each other. Must never run a vCPU.

use std::sync::Arc;

use arch::cpuid::{CpuTopology, VmCpuid};
use arch::layout;
use devices::virtio::ActivationThread;
use hypervisor::{KvmError, Vcpu, Vm};
use kvm_bindings::CpuId;
use memory::GuestRam;
use pci::{PciConfigIo, PciDevice as _};

use super::consoles::Consoles;
use super::cpu_hotplug::CpuHotplug;
use super::error::MachineError;
use super::events::{EventSink, Power};
use super::exclusive::LockedImages;
use super::host::Host;
use super::hotplug::Hotplug;
use super::legacy::{FixedPlaces, LegacyDevices};
use super::memory_hotplug::MemoryHotplug;
use super::panics::PanicFunction;
use super::passthrough::{OpenInput, Passthrough};
use super::segments::Segments;
use super::space::AddressSpace;
use super::tpms::TpmDevice;
use super::user_devices::UserDevices;
use super::virtio::{PciContext, VirtioDevices};
use super::{boot, panics, ram};
use crate::config::VmConfig;
use crate::config::console::DEBUG_CONSOLE_PORT;
use crate::config::cpus::CpusConfig;
use crate::config::on_platform::PciNumber;
use crate::config::vm::{IOMMU_ID, PVPANIC_ID, WATCHDOG_ID};

/// A machine without vCPU threads.
pub(super) struct MachineParts {
    // Drop order matters: devices end before memory.
    pub(super) devices: VirtioDevices,
    pub(super) passthrough: Passthrough,
    pub(super) user_devices: UserDevices,
    pub(super) panics: Option<PanicFunction>,
    pub(super) legacy: LegacyDevices,
    pub(super) tpm: TpmDevice,
    pub(super) hotplug: Hotplug,
    pub(super) cpu_hotplug: CpuHotplug,
    pub(super) memory_hotplug: Option<MemoryHotplug>,
    pub(super) segments: Segments,
    pub(super) config_ports: Arc<PciConfigIo>,
    pub(super) space: Arc<AddressSpace>,
    pub(super) power: Arc<Power>,
    pub(super) vm: Vm,
    pub(super) ram: Arc<GuestRam>,
    pub(super) activation: Arc<ActivationThread>,
    pub(super) topology: CpuTopology,
}

/// What exists before any device of a machine.
pub(super) struct BuildInput<'a> {
    pub(super) ram: Arc<GuestRam>,
    pub(super) open: OpenInput<'a>,
    pub(super) images: &'a mut LockedImages,
}

impl MachineParts {
    /// Creates the devices and connects them.
    ///
    /// # Errors
    /// Names what is missing.
    pub(super) fn build(
        config: &VmConfig,
        consoles: &Consoles,
        host: &Host,
        sink: EventSink,
        BuildInput { ram, open, images }: BuildInput<'_>,
    ) -> Result<Self, MachineError> {
        let bits = host.phys_bits(&config.cpus);
        let platform = config.machine_platform();
        let vm = Vm::create_with_memory(
            &host.hypervisor,
            &hypervisor::VmConfig {
                tss_gpa: layout::KVM_TSS_GPA,
                identity_map_gpa: layout::KVM_IDENTITY_MAP_GPA,
                interrupts: platform.interrupts,
            },
            |vm| Ok::<_, MachineError>(ram::attach(vm, &ram, config.memory.hotplug_method)?),
        )?;
        let space = Arc::new(AddressSpace::default());
        let power = Power::new(Arc::clone(&sink));
        let segments = Segments::make(config, &ram, bits, &space)?;
        let registers = boot::registers_of(config, &ram, &segments);
        let fixed = FixedPlaces {
            debug_port: config.debug_console.iobase.unwrap_or(DEBUG_CONSOLE_PORT),
            ged_gsi: platform.ged_gsi,
            ged: registers.ged,
            ports: platform.ports,
        };
        let legacy = LegacyDevices::wire(&vm, &space, &ram, consoles, fixed, &power)?;

        let tpm = TpmDevice::wire(config, &space, open.opening, open.cancel)?;
        let config_ports = Arc::new(PciConfigIo::new(segments.first()));
        space.insert_ports(
            layout::PCI_CONFIG_PORT,
            u64::from(layout::PCI_CONFIG_PORT_COUNT),
            "PCI configuration ports",
            config_ports.clone(),
        )?;
        let hotplug = Hotplug::wire(&space, &segments, registers.pci, Arc::clone(&sink))?;
        let vcpus = config.cpus.boot_vcpus;
        let cpu_hotplug = CpuHotplug::wire(&space, vcpus, registers.cpus, Arc::clone(&sink))?;
        let memory_hotplug = MemoryHotplug::wire(config, &space, &ram, registers.memory)?;
        let activation = ActivationThread::start().map_err(MachineError::ActivationThread)?;
        let pci = PciContext {
            segments: &segments,
            vm: &vm,
            ram: &ram,
            activation: &activation,
            platform,
        };
        let ban = Passthrough::ban_discards(config, &ram);
        let mut devices =
            VirtioDevices::wire(config, consoles, &pci, images, Arc::clone(&sink), &power)?;
        let panics =
            panics::wire(config, segments.first(), devices.taken_mut(), Arc::clone(&sink))?;
        let user_devices = UserDevices::wire(config, &pci)?;
        space.set_revocable(user_devices.revocable());
        let passthrough = Passthrough::wire(config, &pci, ban, sink, open)?;
        if !passthrough.is_opening() {
            devices.place_later(&segments)?;
        }
        let topology = boot::topology(&config.cpus)?;
        Ok(Self {
            devices,
            passthrough,
            user_devices,
            panics,
            legacy,
            tpm,
            hotplug,
            cpu_hotplug,
            memory_hotplug,
            segments,
            config_ports,
            space,
            power,
            vm,
            ram,
            activation,
            topology,
        })
    }

    /// The numbers of devices for which no option names one, if the platform wants them to be kept.
    pub(super) fn kept_numbers(&self) -> Option<Vec<PciNumber>> {
        let mut ids = vec![IOMMU_ID, WATCHDOG_ID, PVPANIC_ID];
        ids.extend(self.devices.mems().iter().map(|(id, _)| id.as_str()));
        let virtio = self.devices.functions().iter();
        let virtio = virtio.map(|(bdf, device)| (device.id(), bdf));
        let panics = self.panics.iter().map(|(bdf, device)| (device.id(), bdf));
        let first = virtio.chain(panics).filter(|(_, bdf)| bdf.segment() == 0);
        let numbers = first.map(|(id, bdf)| (id, bdf.device()));
        self.devices.taken_numbers().to_be_kept(&ids, numbers)
    }

    /// The vCPUs, not started.
    pub(super) fn create_vcpus(&self, config: &VmConfig) -> Result<Vec<Vcpu>, MachineError> {
        (0..config.cpus.boot_vcpus)
            .map(|index| Ok(self.create_vcpu(self.topology.apic_id(index), &config.cpus)?))
            .collect()
    }

    /// A vCPU, without state.
    pub(super) fn create_vcpu(&self, apic_id: u32, config: &CpusConfig) -> Result<Vcpu, KvmError> {
        let mut vcpu = self.vm.create_vcpu(apic_id)?;
        if config.kvm_hyperv {
            vcpu.enable_hyperv()?;
        }
        Ok(vcpu)
    }

    /// The CPUID that the vCPUs would be shown if the guest booted here.
    pub(super) fn cpuid(&self, vcpus: &[Vcpu], host: &CpuId, config: &VmConfig) -> VmCpuid {
        let tsc_khz = vcpus.first().and_then(Vcpu::tsc_khz);
        boot::vm_cpuid(host, config, self.topology, tsc_khz)
    }
}
