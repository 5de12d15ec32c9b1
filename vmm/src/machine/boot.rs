// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Initial state of a machine: CPUID, firmware tables, kernel, registers.
//!
//! Owns the translation from options to what the `arch` crate needs.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use arch::acpi::{self, AcpiError, AcpiInputs, AcpiIommu, GedInputs, PciSegment};
use arch::cpuid::{
    self, CpuTopology, CpuidConfig, CpuidTooLong, FlatCount, TopologyError, VmCpuid,
};
use arch::layout::{self, GpaRange};
use arch::smbios::{self, SmbiosError, SmbiosInputs};
use arch::{BootEntry, BootError, BootSpec, regs};
use hypervisor::{BootRegisters, KvmError, Vcpu, VcpuInit};
use memory::{GuestMemory, GuestRam};
use pci::Bdf;
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryError};

use super::segments::Segments;
use super::{memory_hotplug, numa, ram};
use crate::config::{CpusConfig, PayloadConfig, PlatformConfig, VmConfig};
use crate::platform::PlacedRegisters;

/// Why a machine cannot boot.
#[derive(Debug, Error)]
pub enum MachineBootError {
    /// A file of the payload cannot be opened.
    #[error("cannot open the {what} {path}")]
    Open {
        /// Kernel, firmware or initramfs.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// No payload is configured.
    #[error(
        "nothing to boot is configured: give --kernel or --firmware, or payload.kernel or \
         payload.firmware in the JSON"
    )]
    NoPayload,
    /// The payload cannot be loaded.
    #[error("cannot load {files}")]
    Load {
        /// The kernel or firmware, and the initramfs if there is one.
        files: String,
        /// The cause.
        #[source]
        source: BootError,
    },
    /// Memory left by an earlier VM in a file cannot be cleared.
    #[error("cannot clear guest memory at {gpa:#x}")]
    Clear {
        /// Address of the page.
        gpa: u64,
        /// The cause.
        #[source]
        source: GuestMemoryError,
    },
    /// The ACPI tables cannot be built.
    #[error("cannot write the ACPI tables")]
    Acpi(#[source] AcpiError),
    /// The SMBIOS tables cannot be built.
    #[error("cannot write the SMBIOS tables")]
    Smbios(#[source] SmbiosError),
    /// The vCPU topology is invalid.
    #[error("the CPU topology is impossible")]
    Topology(#[source] TopologyError),
    /// The CPUID has too many entries.
    #[error("cannot describe the vCPUs")]
    Cpuid(#[source] CpuidTooLong),
    /// KVM does not return the registers of a vCPU.
    #[error("cannot read the registers of the boot vCPU")]
    Registers(#[source] KvmError),
}

/// The configured vCPU topology.
///
/// # Errors
/// The topology is invalid.
pub fn topology(config: &CpusConfig) -> Result<CpuTopology, MachineBootError> {
    let topology = match &config.topology {
        Some(t) => {
            CpuTopology::new(t.threads_per_core, t.cores_per_die, t.dies_per_package, t.packages)
        }
        None => CpuTopology::flat(u16::try_from(config.max_vcpus).unwrap_or(u16::MAX)),
    };
    topology.map_err(MachineBootError::Topology)
}

/// The CPUID of all vCPUs.
pub fn vm_cpuid(
    host: &kvm_bindings::CpuId,
    config: &VmConfig,
    topology: CpuTopology,
    tsc_khz: Option<u32>,
) -> VmCpuid {
    let rules = config.machine_platform().cpuid;
    let config = &config.cpus;
    let at_boot = || CpuTopology::flat(u16::try_from(config.boot_vcpus).unwrap_or(u16::MAX)).ok();
    let counted = match (rules.flat_count, &config.topology) {
        (FlatCount::AtBoot, None) => at_boot().unwrap_or(topology),
        (FlatCount::AtBoot, Some(_)) | (FlatCount::Possible, _) => topology,
    };
    let options = CpuidConfig {
        counted,
        rules,
        max_phys_bits: config.max_phys_bits,
        tsc_khz,
        nested: config.nested,
        amx: config.features.amx,
        hyperv: config.kvm_hyperv,
        ..CpuidConfig::new(topology)
    };
    cpuid::common_cpuid(host, &options)
}

fn open(what: &'static str, path: &Path) -> Result<File, MachineBootError> {
    // Opening a pipe without a writer would block; the configuration may be from another host.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.map_err(|source| MachineBootError::Open { what, path: path.to_owned(), source })
}

/// What a guest boots from. Firmware is loaded like a kernel, and finds the boot device itself.
struct Payload<'a> {
    what: &'static str,
    path: &'a Path,
    cmdline: &'a str,
    initramfs: Option<&'a Path>,
}

impl<'a> Payload<'a> {
    /// The kernel or firmware, of which exactly one is given.
    fn of(config: &'a PayloadConfig) -> Result<Self, MachineBootError> {
        let PayloadConfig { firmware, kernel, cmdline, initramfs, .. } = config;
        let given =
            |path: &'a Option<PathBuf>| path.as_deref().filter(|path| !path.as_os_str().is_empty());
        if let Some(path) = given(firmware) {
            for (name, is_given) in
                [("cmdline", cmdline.is_some()), ("initramfs", initramfs.is_some())]
            {
                if is_given {
                    log::warn!("payload.{name} is left out: firmware has no use for it");
                }
            }
            return Ok(Self { what: "firmware", path, cmdline: "", initramfs: None });
        }
        let path = given(kernel).ok_or(MachineBootError::NoPayload)?;
        let cmdline = cmdline.as_deref().unwrap_or_default();
        Ok(Self { what: "kernel", path, cmdline, initramfs: initramfs.as_deref() })
    }

    fn files(&self) -> String {
        let paths = std::iter::once(self.path).chain(self.initramfs);
        paths.map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    }
}

/// The same with its files open.
struct OpenPayload<'a> {
    payload: Payload<'a>,
    kernel: File,
    initramfs: Option<File>,
}

impl<'a> OpenPayload<'a> {
    fn of(config: &'a PayloadConfig) -> Result<Self, MachineBootError> {
        let payload = Payload::of(config)?;
        let kernel = open(payload.what, payload.path)?;
        let initramfs = payload.initramfs.map(|path| open("initramfs", path)).transpose()?;
        Ok(Self { payload, kernel, initramfs })
    }

    /// Loads them, with what the kernel finds in memory at its entry.
    fn load(&mut self, ram: &GuestRam, rsdp_gpa: u64) -> Result<BootEntry, MachineBootError> {
        let later: Vec<GpaRange> = ram::hotplug_regions(ram)
            .map(|region| GpaRange { gpa: region.gpa(), len_bytes: region.len_bytes() })
            .collect();
        let spec = BootSpec {
            cmdline: self.payload.cmdline,
            rsdp_gpa,
            reserved: &[],
            later: &later,
            ram_is_zero: ram.starts_zero(),
        };
        let memory = ram.guest_memory();
        arch::load_kernel(&memory.memory(), &mut self.kernel, self.initramfs.as_mut(), &spec)
            .map_err(|source| MachineBootError::Load { files: self.payload.files(), source })
    }
}

fn smbios_inputs(platform: Option<&PlatformConfig>) -> SmbiosInputs {
    let Some(platform) = platform else { return SmbiosInputs::default() };
    SmbiosInputs {
        manufacturer: platform.system_manufacturer.clone(),
        product_name: platform.system_product_name.clone(),
        version: platform.system_version.clone(),
        serial_number: platform.serial().map(ToOwned::to_owned),
        uuid: platform.uuid_bytes(),
        sku_number: platform.system_sku_number.clone(),
        family: platform.system_family.clone(),
        asset_tag: platform.chassis_asset_tag.clone(),
        oem_strings: platform.oem_strings.clone().unwrap_or_default(),
    }
}

/// Clears the range in which a guest searches for tables, which may hold those of an earlier VM in the same
/// memory.
fn clear_low_memory(memory: &GuestMemory) -> Result<(), MachineBootError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    for gpa in (0..layout::HIGH_RAM_GPA).step_by(ZEROS.len()) {
        memory
            .write_slice(&ZEROS, GuestAddress(gpa))
            .map_err(|source| MachineBootError::Clear { gpa, source })?;
    }
    Ok(())
}

/// The parts of a machine that is about to boot, as far as its tables tell of them.
pub struct LoadInput<'a> {
    /// Guest memory.
    pub ram: &'a GuestRam,
    /// The configuration.
    pub config: &'a VmConfig,
    /// The registers of the event device and of hotplug.
    pub registers: PlacedRegisters,
    /// The topology of the vCPUs.
    pub topology: &'a CpuTopology,
    /// The PCI segments, with the interrupt pins of devices.
    pub segments: Vec<PciSegment>,
    /// Tells where a passed-through device is, by its id.
    pub place: &'a dyn Fn(&str) -> Option<Bdf>,
    /// The virtual IOMMU if there is one.
    pub iommu: Option<AcpiIommu>,
    /// Whether there is a serial port.
    pub has_serial: bool,
}

/// The registers of the event device and of hotplug, where the platform of a machine has them.
pub fn registers_of(config: &VmConfig, ram: &GuestRam, segments: &Segments) -> PlacedRegisters {
    let has_memory_devices = memory_hotplug::is_configured(config, ram);
    config.machine_platform().registers.placed(segments.address_bits(), has_memory_devices)
}

/// Writes tables, kernel, initramfs and command line into guest memory.
///
/// # Errors
/// Names the file or table.
pub fn load(input: LoadInput<'_>) -> Result<BootEntry, MachineBootError> {
    let LoadInput { ram, config, registers, topology, segments, place, iommu, has_serial } = input;
    let mut payload = OpenPayload::of(&config.payload)?;
    let apic_ids = (0..config.cpus.max_vcpus).map(|index| topology.apic_id(index));
    let mut inputs = AcpiInputs::new(apic_ids, segments);
    for (index, cpu) in (0_u32..).zip(&mut inputs.cpus) {
        cpu.enabled = index < config.cpus.boot_vcpus;
    }
    if !has_serial {
        inputs.serial_gsi = None;
    }
    let platform = config.machine_platform();
    inputs.rules = platform.tables;
    inputs.ged = Some(GedInputs { gsi: platform.ged_gsi, place: registers.ged });
    inputs.pci_hotplug = Some(registers.pci);
    inputs.cpu_hotplug = Some(registers.cpus);
    inputs.generation_id_gpa =
        inputs.generation_id_gpa.filter(|_| platform.tables.has_generation_id);
    inputs.iommu = iommu;
    inputs.tpm_gpa = config.tpm.as_ref().map(|_| layout::TPM_GPA);
    inputs.memory_hotplug = memory_hotplug::described(config, ram, registers.memory);
    numa::describe(&mut inputs, config, ram, place);
    let memory = ram.guest_memory();
    let memory = &*memory.memory();
    if !ram.starts_zero() {
        clear_low_memory(memory)?;
    }
    let rsdp_gpa = acpi::write_tables(memory, &inputs).map_err(MachineBootError::Acpi)?;
    smbios::write_tables(memory, &smbios_inputs(config.platform.as_ref()))
        .map_err(MachineBootError::Smbios)?;
    payload.load(ram, rsdp_gpa)
}

/// Whether the payload could be loaded into memory like `ram`, which it is.
///
/// # Errors
/// As [`load`], but for tables.
pub fn check_payload(config: &PayloadConfig, ram: &GuestRam) -> Result<(), MachineBootError> {
    OpenPayload::of(config)?.load(ram, 0).map(drop)
}

/// Initial state of a vCPU; without `registers` it waits for the guest to start it.
pub fn vcpu_init(cpuid: kvm_bindings::CpuId, registers: Option<BootRegisters>) -> VcpuInit {
    let msr_bits = vec![regs::BOOT_MSR_BITS];
    VcpuInit { cpuid, registers, msrs: regs::boot_msrs(), msr_bits }
}

/// Registers of the boot vCPU.
///
/// # Errors
/// KVM does not return the current ones.
pub fn registers(vcpu: &Vcpu, entry: &BootEntry) -> Result<BootRegisters, MachineBootError> {
    let current = vcpu.sregs().map_err(MachineBootError::Registers)?;
    Ok(BootRegisters {
        regs: regs::boot_regs(entry),
        sregs: regs::boot_sregs(entry, &current),
        fpu: regs::boot_fpu(),
    })
}
