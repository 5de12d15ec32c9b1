// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Inputs of the ACPI tables.
//!
//! Owns the plain data a caller fills in and the check that it makes sense. Must never refer to a
//! device object: numbers and addresses only.

use super::AcpiError;
use super::cpu_hotplug::CPUS_MAX;
use super::memory_hotplug::MemoryHotplug;
use super::numa::AcpiNuma;
use super::registers::{
    GODWIT_TABLES, HotplugProtocol, HotplugRegisters, RegisterPlace, TableRules,
};
use super::viot::AcpiIommu;
use crate::layout::{self, GpaRange};

/// One vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcpiCpu {
    /// Its APIC id, as in CPUID.
    pub apic_id: u32,
    /// There from the start; otherwise it can be brought online later.
    pub enabled: bool,
    /// Its NUMA node, as a proximity domain.
    pub domain: u32,
}

/// Routes a device's interrupt pin to an I/O APIC pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntxRoute {
    /// PCI device number, below 32.
    pub device: u8,
    /// 0 for INTA to 3 for INTD.
    pub pin: u8,
    /// Interrupt number.
    pub gsi: u32,
}

/// A PCI segment, with one root bus or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciSegment {
    /// Segment number; its device in the namespace is `\_SB.PCnn`, nn in hexadecimal.
    pub id: u8,
    /// Configuration space of the first bus.
    pub ecam_gpa: u64,
    /// First bus number.
    pub first_bus: u8,
    /// Last bus number.
    pub last_bus: u8,
    /// Window for I/O BARs: first and last port. Configuration ports must be outside.
    pub io_ports: Option<(u16, u16)>,
    /// Window for 32-bit BARs.
    pub mmio32: Option<GpaRange>,
    /// Window for 64-bit BARs.
    pub mmio64: Option<GpaRange>,
    /// Interrupt pins, if any device uses them; empty leaves MSI as the only way.
    pub intx: Vec<IntxRoute>,
}

impl PciSegment {
    /// Length of the segment's configuration space.
    pub fn ecam_bytes(&self) -> u64 {
        let buses = u64::from(self.last_bus).saturating_sub(u64::from(self.first_bus)) + 1;
        buses * layout::ECAM_BYTES_PER_BUS
    }
}

/// The generic event device; see [`super::ged`] for its register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GedInputs {
    /// Its interrupt.
    pub gsi: u32,
    /// Where its event status register is.
    pub place: RegisterPlace,
}

/// Guest memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcpiMemory {
    /// Where it is.
    pub range: GpaRange,
    /// It is not there at first, and may come and go while the guest runs.
    pub hotplug: bool,
    /// Its NUMA node, as a proximity domain.
    pub domain: u32,
}

/// Everything that the tables depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpiInputs {
    /// All vCPUs in the order of their indexes; an index is the processor's UID.
    pub cpus: Vec<AcpiCpu>,
    /// All memory that there is or may ever be, if some of it may come later or there are NUMA nodes.
    pub memory: Vec<AcpiMemory>,
    /// NUMA nodes, if the guest is to know of any.
    pub numa: Option<AcpiNuma>,
    /// All PCI segments.
    pub segments: Vec<PciSegment>,
    /// Interrupt of COM1 if there is one.
    pub serial_gsi: Option<u32>,
    /// Port of the PM timer if there is one.
    pub pm_timer_port: Option<u16>,
    /// Generic event device, with the power button.
    pub ged: Option<GedInputs>,
    /// There is a CMOS clock at its usual ports.
    pub cmos: bool,
    /// Where the PCI hotplug registers are if devices may come and go; see
    /// [`super::hotplug`].
    pub pci_hotplug: Option<RegisterPlace>,
    /// The vCPU hotplug registers if vCPUs may come and go; see [`super::cpu_hotplug`] and [`super::cpu_selector`].
    pub cpu_hotplug: Option<HotplugRegisters>,
    /// Memory hotplug if memory may come as memory devices; it needs the generic event device.
    pub memory_hotplug: Option<MemoryHotplug>,
    /// Where the generation ID is if there is one; it needs the generic event device.
    pub generation_id_gpa: Option<u64>,
    /// Where the registers of the TPM are if there is one.
    pub tpm_gpa: Option<u64>,
    /// The virtual IOMMU if there is one.
    pub iommu: Option<AcpiIommu>,
    /// What the platform decides.
    pub rules: TableRules,
    /// Further AML at the top level of the DSDT.
    pub extra_aml: Vec<u8>,
}

impl AcpiInputs {
    /// A machine with these vCPUs, all there from the start, and the fixed devices of [`crate::layout`].
    pub fn new(apic_ids: impl IntoIterator<Item = u32>, segments: Vec<PciSegment>) -> Self {
        Self {
            cpus: apic_ids
                .into_iter()
                .map(|apic_id| AcpiCpu { apic_id, enabled: true, domain: 0 })
                .collect(),
            memory: Vec::new(),
            numa: None,
            segments,
            serial_gsi: Some(layout::SERIAL_GSI),
            pm_timer_port: Some(layout::ACPI_PM_TIMER_PORT),
            ged: Some(GedInputs {
                gsi: layout::GED_GSI,
                place: RegisterPlace::Ports(layout::GED_PORT),
            }),
            cmos: true,
            pci_hotplug: Some(RegisterPlace::Ports(layout::PCI_HOTPLUG_PORT)),
            cpu_hotplug: Some(HotplugRegisters {
                place: RegisterPlace::Ports(layout::CPU_HOTPLUG_PORT),
                protocol: HotplugProtocol::Events,
            }),
            memory_hotplug: None,
            generation_id_gpa: Some(layout::GENERATION_ID_GPA),
            tpm_gpa: None,
            iommu: None,
            rules: GODWIT_TABLES,
            extra_aml: Vec::new(),
        }
    }

    /// Refuses what the tables could not express.
    pub(super) fn check(&self) -> Result<(), AcpiError> {
        // Three hexadecimal digits name a processor.
        const MAX_CPUS: usize = 0x1000;
        if self.cpus.is_empty() || self.cpus.len() > MAX_CPUS {
            return Err(AcpiError::CpuCount { cpus: self.cpus.len() });
        }
        let can_hotplug = u32::try_from(self.cpus.len()).is_ok_and(|cpus| cpus <= CPUS_MAX);
        if self.cpu_hotplug.is_some() && !can_hotplug {
            return Err(AcpiError::HotplugCpuCount { cpus: self.cpus.len() });
        }
        for segment in &self.segments {
            segment.check()?;
        }
        self.check_domains()
    }
}

impl PciSegment {
    fn check(&self) -> Result<(), AcpiError> {
        let bad = |what| Err(AcpiError::Segment { id: self.id, what });
        if self.first_bus > self.last_bus {
            return bad("the last bus is before the first");
        }
        if self.ecam_gpa.saturating_add(self.ecam_bytes()) > u64::from(u32::MAX) {
            return bad("the configuration space does not end below 4 GiB");
        }
        if self.io_ports.is_some_and(|(first, last)| first > last || (first, last) == (0, u16::MAX))
        {
            return bad("the port window is empty or all ports");
        }
        for window in [self.mmio32, self.mmio64].into_iter().flatten() {
            if window.len_bytes == 0 || window.gpa.checked_add(window.len_bytes).is_none() {
                return bad("a memory window is empty or wraps around");
            }
        }
        if self.mmio32.is_some_and(|window| window.end_gpa() > 1 << 32) {
            return bad("the 32-bit window reaches above 4 GiB");
        }
        if self.intx.iter().any(|route| route.device > 31 || route.pin > 3) || self.intx.len() > 128
        {
            return bad("an interrupt route names no device or pin");
        }
        Ok(())
    }
}
