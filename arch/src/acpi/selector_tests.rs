// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of tables that a platform decides about, with registers in memory.

use super::*;

/// As for a platform with registers in memory.
fn with_selectors(vcpus: u32) -> AcpiInputs {
    let at = |gpa| HotplugRegisters {
        place: RegisterPlace::Memory(gpa),
        protocol: HotplugProtocol::Selector,
    };
    let rules = TableRules {
        event_device: "GEC_",
        wide_apic_ids: true,
        all_may_come: true,
        has_nmi: false,
        identity_overrides: &[4],
        has_legacy_flags: false,
        has_generation_id: false,
    };
    AcpiInputs {
        rules,
        ged: Some(GedInputs { gsi: 13, place: RegisterPlace::Memory(0x3fff_fffe_c000) }),
        pci_hotplug: Some(RegisterPlace::Memory(0x3fff_fffe_e000)),
        cpu_hotplug: Some(at(0x3fff_fffe_d000)),
        memory_hotplug: Some(MemoryHotplug { registers: at(0x3fff_fffe_f000), domain: 0 }),
        generation_id_gpa: None,
        ..inputs(vcpus)
    }
}

/// docs/cloud-hypervisor-state.md, section 5.5.
#[test]
fn a_platform_decides_what_the_tables_say_of_interrupts() {
    let mut inputs = with_selectors(3);
    inputs.cpus[2].enabled = false;
    let area = build_tables(&inputs).unwrap();
    let madt = table(&area, *b"APIC");
    let mut entries = Vec::new();
    let mut at = 44;
    while at < madt.len() {
        let len = usize::from(madt[at + 1]);
        entries.push(madt[at..at + len].to_vec());
        at += len;
    }
    let kinds: Vec<_> = entries.iter().map(|entry| entry[0]).collect();
    assert_eq!(kinds, [9, 9, 9, 1, 2], "no NMI");
    let flags: Vec<_> = entries[..3].iter().map(|entry| u32_at(entry, 8)).collect();
    assert_eq!(flags, [3, 3, 2]);
    assert_eq!(entries[4][2..], [0, 4, 4, 0, 0, 0, 0, 0]);
    let fadt = table(&area, *b"FACP");
    assert_eq!((fadt[108], &fadt[109..111]), (0, &[0, 0][..]), "no century, no flags");
}

#[test]
fn aml_of_registers_in_memory_is_what_acpica_understands() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = with_selectors(2);
    inputs.memory = memory();
    let Some(source) = check_with_iasl(dir.path(), &inputs) else { return };
    for expected in [
        "Device (GEC)",
        "OperationRegion (GEDR, SystemMemory, 0x00003FFFFFFEC000, One)",
        "OperationRegion (PCST, SystemMemory, 0x00003FFFFFFEE000, 0x10)",
        "Device (PRES)",
        "OperationRegion (PRST, SystemMemory, 0x00003FFFFFFED000, 0x0C)",
        "Mutex (CPLK, 0x00)",
        "CSTA (One)",
        "CEJ0 (One)",
        "Notify (C001, Arg1)",
        "\\_SB.CPUS.CSCN ()",
        "Device (MHPC)",
        "OperationRegion (MHPR, SystemMemory, 0x00003FFFFFFEF000, 0x18)",
        "Device (M007)",
        "MRES (0x07)",
        "\\_SB.MHPC.MSCN ()",
    ] {
        assert!(source.contains(expected), "no {expected} in\n{source}");
    }
    for absent in ["CPRG", "MMRG", "VGEN", "GED_", "0x060C"] {
        assert!(!source.contains(absent), "{absent} in\n{source}");
    }
}
