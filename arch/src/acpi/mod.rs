// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ACPI tables, which describe the machine to the guest.
//!
//! Owns RSDP, XSDT, FADT, MADT, MCFG, SRAT, SLIT, TPM2, VIOT and DSDT, their contents and their place in guest memory.
//! The machine is hardware-reduced, as cloud-hypervisor's is: no SCI, no fixed registers but power
//! and reset. Must never know a device: everything comes in as numbers in [`AcpiInputs`].

pub mod cpu_hotplug;
pub mod cpu_selector;
mod dsdt;
pub mod ged;
pub mod hotplug;
mod inputs;
pub mod memory_hotplug;
pub mod memory_selector;
mod numa;
mod registers;
mod tables;
#[cfg(test)]
mod tests;
mod viot;

use acpi_tables::Aml;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

pub use inputs::{AcpiCpu, AcpiInputs, AcpiMemory, GedInputs, IntxRoute, PciSegment};
pub use numa::{AcpiInitiator, AcpiNuma, DOMAINS_MAX};
pub use registers::{GODWIT_TABLES, HotplugProtocol, HotplugRegisters, RegisterPlace, TableRules};
pub use viot::{AcpiIommu, PciFunction};

use crate::layout;

// Creator of the tables, in the fields that guests show.
const OEM_ID: [u8; 6] = *b"GODWIT";
const OEM_TABLE_ID: [u8; 8] = *b"GODWITVM";
const OEM_REVISION: u32 = 1;
/// Tables start at multiples of this.
const TABLE_ALIGN: usize = 16;

/// Why the tables could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcpiError {
    /// Names of processors have three digits.
    #[error("ACPI tables can describe 1 to 4096 vCPUs, not {cpus}")]
    CpuCount {
        /// How many there are.
        cpus: usize,
    },
    /// The registers have a bit for each processor.
    #[error("vCPUs can come and go in a machine of at most 256, not {cpus}")]
    HotplugCpuCount {
        /// How many there are.
        cpus: usize,
    },
    /// A segment that cannot be described.
    #[error("PCI segment {id} cannot be described to the guest: {what}")]
    Segment {
        /// Its number.
        id: u8,
        /// What is wrong.
        what: &'static str,
    },
    /// Something is in a NUMA node that is not described.
    #[error("the guest has {nodes} NUMA nodes, and something is in node {domain}")]
    Domain {
        /// The node.
        domain: u32,
        /// Number of nodes.
        nodes: usize,
    },
    /// The area below 1 MiB is full.
    #[error("the ACPI tables have {len_bytes} bytes, there is room for {max_bytes}")]
    TooLarge {
        /// Length of all tables.
        len_bytes: usize,
        /// Room for them.
        max_bytes: u64,
    },
    /// There is no RAM where they belong.
    #[error("cannot write the ACPI tables to guest memory at {gpa:#x}")]
    Write {
        /// Where.
        gpa: u64,
        /// What the memory said.
        #[source]
        source: GuestMemoryError,
    },
}

/// Makes the tables and writes them to guest memory at [`layout::ACPI_GPA`].
///
/// Returns the address of the RSDP, for [`crate::BootSpec`].
pub fn write_tables(mem: &GuestMemory, inputs: &AcpiInputs) -> Result<u64, AcpiError> {
    let bytes = build_tables(inputs)?;
    let gpa = layout::ACPI_GPA;
    mem.write_slice(&bytes, GuestAddress(gpa))
        .map_err(|source| AcpiError::Write { gpa, source })?;
    Ok(layout::RSDP_GPA)
}

/// The tables as they are to lie at [`layout::ACPI_GPA`], the RSDP first.
pub fn build_tables(inputs: &AcpiInputs) -> Result<Vec<u8>, AcpiError> {
    inputs.check()?;
    let mut area = vec![0; Rsdp::len()];
    let dsdt_gpa = place(&mut area, &dsdt::dsdt(inputs));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let fixed = [tables::fadt(inputs, dsdt_gpa), tables::madt(inputs), tables::mcfg(inputs)];
    let nodes = numa::srat(inputs).into_iter().chain(numa::slit(inputs));
    let others = tables::tpm2(inputs).into_iter().chain(viot::viot(inputs));
    for table in fixed.into_iter().chain(nodes).chain(others) {
        xsdt.add_entry(place(&mut area, &table));
    }
    let xsdt_gpa = place(&mut area, &to_bytes(&xsdt));
    let rsdp = to_bytes(&Rsdp::new(OEM_ID, xsdt_gpa));
    area[..rsdp.len()].copy_from_slice(&rsdp);

    let max_bytes = layout::GENERATION_ID_GPA - layout::ACPI_GPA;
    if area.len() as u64 > max_bytes {
        return Err(AcpiError::TooLarge { len_bytes: area.len(), max_bytes });
    }
    Ok(area)
}

/// Appends a table and returns the address it will have.
fn place(area: &mut Vec<u8>, table: &[u8]) -> u64 {
    area.resize(area.len().next_multiple_of(TABLE_ALIGN), 0);
    let gpa = layout::ACPI_GPA + area.len() as u64;
    area.extend_from_slice(table);
    gpa
}

fn to_bytes(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}
