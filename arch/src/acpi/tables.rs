// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The ACPI tables that are not AML: FADT, MADT, MCFG, TPM2.
//!
//! Owns their contents; acpi_tables has the formats, except for the MADT entries with x2APIC ids,
//! which are written here. Format: ACPI 6.5, sections 5.2.9 and 5.2.12; PCI Firmware 3.3, 4.1.2.

use acpi_tables::Aml;
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::mcfg::MCFG;
use acpi_tables::sdt::Sdt;
use acpi_tables::tpm2::{PlatformClass, StartMethod, Tpm2};

use super::inputs::{AcpiCpu, AcpiInputs};
use super::registers::TableRules;
use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout;

// IA-PC boot architecture flags (section 5.2.9.3).
const VGA_NOT_PRESENT: u16 = 1 << 2;
const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;
/// CMOS register that holds the century.
const CMOS_CENTURY: u8 = 0x32;

const MADT_REVISION: u8 = 5;
/// The table's header and its two fields.
const MADT_FIXED_BYTES: u32 = 44;
const TYPE_LOCAL_APIC: u8 = 0;
const TYPE_IO_APIC: u8 = 1;
const TYPE_OVERRIDE: u8 = 2;
const TYPE_LOCAL_APIC_NMI: u8 = 4;
const TYPE_LOCAL_X2APIC: u8 = 9;
const TYPE_LOCAL_X2APIC_NMI: u8 = 10;
const CPU_ENABLED: u32 = 1;
const CPU_ONLINE_CAPABLE: u32 = 2;
/// Ids from here on need the x2APIC form; 255 is the broadcast id of the older one.
pub(super) const FIRST_X2APIC_ID: u32 = 255;

fn io_register(port: u16, bits: u8, access: AccessSize) -> GAS {
    GAS::new(AddressSpace::SystemIo, bits, 0, access, u64::from(port))
}

/// Hardware-reduced: no SCI, no fixed events; power off and reset through one port.
pub fn fadt(inputs: &AcpiInputs, dsdt_gpa: u64) -> Vec<u8> {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt_gpa)
        .flag(Flags::Wbinvd)
        // No fixed buttons; the power button is a device.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    let power = io_register(layout::ACPI_POWER_PORT, 8, AccessSize::ByteAccess);
    fadt.reset_reg = power;
    fadt.reset_value = layout::ACPI_POWER_RESET_VALUE;
    fadt.sleep_control_reg = power;
    fadt.sleep_status_reg = power;
    let mut boot_arch = 0;
    if inputs.rules.has_legacy_flags {
        boot_arch = VGA_NOT_PRESENT;
        if inputs.cmos {
            fadt.century = CMOS_CENTURY;
        } else {
            boot_arch |= CMOS_RTC_NOT_PRESENT;
        }
    }
    fadt.iapc_boot_arch = boot_arch.into();
    if let Some(port) = inputs.pm_timer_port {
        // Officially ignored on a hardware-reduced machine; Linux finds its timer by it.
        fadt = fadt.flag(Flags::TmrValExt);
        fadt.pm_tmr_blk = u32::from(port).into();
        fadt.pm_tmr_len = 4;
        fadt.x_pm_tmr_blk = io_register(port, 32, AccessSize::DwordAccess);
    }
    let table: FADT = fadt.finalize();
    let mut bytes = Vec::with_capacity(FADT::len());
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Interrupt controllers: one entry for each vCPU, the I/O APIC, and NMI on every LINT1.
pub fn madt(inputs: &AcpiInputs) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut any_x2apic = false;
    for (uid, cpu) in (0_u32..).zip(&inputs.cpus) {
        any_x2apic |= cpu.apic_id >= FIRST_X2APIC_ID;
        push_cpu(&mut entries, uid, *cpu, &inputs.rules);
    }
    entries.extend([TYPE_IO_APIC, 12, 0, 0]);
    entries.extend(u32::try_from(layout::IOAPIC_GPA).unwrap_or(0).to_le_bytes());
    entries.extend(0_u32.to_le_bytes()); // first interrupt number
    for irq in inputs.rules.identity_overrides {
        // Bus 0, polarity and trigger as the bus has them.
        entries.extend([TYPE_OVERRIDE, 10, 0, *irq]);
        entries.extend(u32::from(*irq).to_le_bytes());
        entries.extend([0; 2]);
    }
    // For all processors; polarity and trigger as the bus has them; LINT1.
    if inputs.rules.has_nmi {
        entries.extend([TYPE_LOCAL_APIC_NMI, 6, 0xff, 0, 0, 1]);
    }
    if any_x2apic && inputs.rules.has_nmi {
        entries.extend([TYPE_LOCAL_X2APIC_NMI, 12, 0, 0, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]);
    }
    let mut table =
        Sdt::new(*b"APIC", MADT_FIXED_BYTES, MADT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.write_u32(36, u32::try_from(layout::LAPIC_GPA).unwrap_or(0));
    table.append_slice(&entries);
    table.as_slice().to_vec()
}

/// The entry of a processor, which its `_MAT` returns, too.
pub(super) fn madt_entry(uid: u32, cpu: AcpiCpu, rules: &TableRules) -> Vec<u8> {
    let mut entry = Vec::new();
    push_cpu(&mut entry, uid, cpu, rules);
    entry
}

fn push_cpu(entries: &mut Vec<u8>, uid: u32, cpu: AcpiCpu, rules: &TableRules) {
    let may_come = if rules.all_may_come { CPU_ONLINE_CAPABLE } else { 0 };
    let flags = if cpu.enabled { CPU_ENABLED | may_come } else { CPU_ONLINE_CAPABLE };
    let small = (u8::try_from(uid), u8::try_from(cpu.apic_id));
    match small {
        (Ok(uid), Ok(apic_id)) if cpu.apic_id < FIRST_X2APIC_ID && !rules.wide_apic_ids => {
            entries.extend([TYPE_LOCAL_APIC, 8, uid, apic_id]);
            entries.extend(flags.to_le_bytes());
        }
        _ => {
            entries.extend([TYPE_LOCAL_X2APIC, 16, 0, 0]);
            entries.extend(cpu.apic_id.to_le_bytes());
            entries.extend(flags.to_le_bytes());
            entries.extend(uid.to_le_bytes());
        }
    }
}

/// Where the control area of the TPM's command response buffer is, by which commands are started (TCG ACPI
/// Specification 1.4, 8.3). None for a machine without one.
pub fn tpm2(inputs: &AcpiInputs) -> Option<Vec<u8>> {
    let control_gpa = inputs.tpm_gpa?.saturating_add(layout::TPM_CONTROL_OFFSET);
    let (class, start) = (PlatformClass::Client, StartMethod::Crb);
    let table = Tpm2::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, class, control_gpa, start);
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    Some(bytes)
}

/// Where each segment's configuration space is.
pub fn mcfg(inputs: &AcpiInputs) -> Vec<u8> {
    let mut table = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for segment in &inputs.segments {
        // The base in the table is that of bus 0.
        let bus_0 = u64::from(segment.first_bus) * layout::ECAM_BYTES_PER_BUS;
        let base = segment.ecam_gpa.saturating_sub(bus_0);
        table.add_ecam(base, u16::from(segment.id), segment.first_bus, segment.last_bus);
    }
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}
