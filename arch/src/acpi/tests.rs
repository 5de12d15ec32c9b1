// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the tables' structure, and of the AML by ACPICA's own compiler where it is installed.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;
use std::process::Command;

use super::memory_hotplug::MemoryHotplug;
use super::*;
use crate::layout::GpaRange;

fn segment(id: u8) -> PciSegment {
    PciSegment {
        id,
        ecam_gpa: layout::ECAM_GPA + u64::from(id) * layout::ECAM_BYTES_PER_BUS,
        first_bus: 0,
        last_bus: 0,
        io_ports: (id == 0).then_some((layout::PCI_IO_PORT, layout::PCI_IO_LAST_PORT)),
        mmio32: Some(GpaRange { gpa: layout::MMIO32_GPA, len_bytes: layout::MMIO32_BYTES }),
        mmio64: Some(GpaRange { gpa: 8 << 30, len_bytes: (1 << 45) - (8 << 30) }),
        intx: Vec::new(),
    }
}

fn at_port(port: u16) -> HotplugRegisters {
    HotplugRegisters { place: RegisterPlace::Ports(port), protocol: HotplugProtocol::Events }
}

fn inputs(vcpus: u32) -> AcpiInputs {
    let mut inputs = AcpiInputs::new(0..vcpus, vec![segment(0)]);
    inputs.tpm_gpa = Some(layout::TPM_GPA);
    inputs.cpu_hotplug = inputs.cpu_hotplug.filter(|_| vcpus <= cpu_hotplug::CPUS_MAX);
    inputs
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

/// The table at an address, by its own length field.
fn table_at(area: &[u8], gpa: u64) -> &[u8] {
    let offset = usize::try_from(gpa - layout::ACPI_GPA).unwrap();
    assert_eq!(offset % TABLE_ALIGN, 0);
    let len = u32_at(area, offset + 4) as usize;
    &area[offset..offset + len]
}

/// All tables, found the way a guest finds them.
fn tables(area: &[u8]) -> Vec<&[u8]> {
    let xsdt = table_at(area, u64_at(area, 24));
    assert_eq!(&xsdt[..4], b"XSDT");
    let mut found: Vec<_> =
        (36..xsdt.len()).step_by(8).map(|at| table_at(area, u64_at(xsdt, at))).collect();
    let fadt = *found.iter().find(|table| &table[..4] == b"FACP").unwrap();
    found.push(table_at(area, u64_at(fadt, 140)));
    found.push(xsdt);
    found
}

fn table(area: &[u8], signature: [u8; 4]) -> &[u8] {
    tables(area).into_iter().find(|table| table[..4] == signature).unwrap()
}

#[test]
fn every_checksum_is_right() {
    for vcpus in [1, 2, 255, 300] {
        let area = build_tables(&inputs(vcpus)).unwrap();
        assert_eq!(&area[..8], b"RSD PTR ");
        assert_eq!((sum(&area[..20]), sum(&area[..36])), (0, 0));
        assert_eq!(tables(&area).len(), 6);
        for table in tables(&area) {
            assert_eq!(sum(table), 0, "{}", String::from_utf8_lossy(&table[..4]));
        }
    }
}

#[test]
fn the_control_area_of_the_tpm_is_in_its_table() {
    let area = build_tables(&inputs(1)).unwrap();
    let tpm = table(&area, *b"TPM2");
    assert_eq!(u64_at(tpm, 40), 0xfed4_0040);
    assert_eq!(u32_at(tpm, 48), 7, "command response buffer");
    let area = build_tables(&AcpiInputs { tpm_gpa: None, ..inputs(1) }).unwrap();
    assert!(tables(&area).iter().all(|table| &table[..4] != b"TPM2"));
    assert!(!area.windows(8).any(|bytes| bytes == b"MSFT0101"));
}

#[test]
fn tables_are_written_where_the_rsdp_says() {
    let mem = GuestMemory::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
    assert_eq!(write_tables(&mem, &inputs(1)).unwrap(), layout::RSDP_GPA);
    let mut signature = [0; 8];
    mem.read_slice(&mut signature, GuestAddress(layout::RSDP_GPA)).unwrap();
    assert_eq!(&signature, b"RSD PTR ");
    let small = GuestMemory::from_ranges(&[(GuestAddress(0), 64 << 10)]).unwrap();
    assert!(matches!(write_tables(&small, &inputs(1)), Err(AcpiError::Write { .. })));
}

#[test]
fn fadt_has_power_and_reset() {
    let area = build_tables(&inputs(1)).unwrap();
    let fadt = table(&area, *b"FACP");
    let flags = u32_at(fadt, 112);
    assert_eq!(flags & (1 << 20 | 1 << 10 | 1 << 8), 1 << 20 | 1 << 10 | 1 << 8);
    let register = [1, 8, 0, 1, 0x00, 0x06, 0, 0, 0, 0, 0, 0];
    assert_eq!(&fadt[116..128], register, "reset register");
    assert_eq!(fadt[128], 1);
    assert_eq!(&fadt[244..256], register, "sleep control");
    assert_eq!(&fadt[256..268], register, "sleep status");
    assert_eq!(&fadt[208..220], [1, 32, 0, 3, 0x08, 0x06, 0, 0, 0, 0, 0, 0], "PM timer");
    let without = AcpiInputs { pm_timer_port: None, cmos: false, ..inputs(1) };
    let area = build_tables(&without).unwrap();
    let fadt = table(&area, *b"FACP");
    assert_eq!((u32_at(fadt, 76), fadt[208], u32_at(fadt, 112) & 1 << 8), (0, 0, 0));
    assert_eq!(fadt[109], 1 << 5 | 1 << 2);
}

#[test]
fn madt_lists_every_vcpu_once() {
    let mut inputs = inputs(300);
    inputs.cpus[2].enabled = false;
    let area = build_tables(&inputs).unwrap();
    let madt = table(&area, *b"APIC");
    assert_eq!(u32_at(madt, 36), 0xfee0_0000);
    let mut cpus = Vec::new();
    let mut others = Vec::new();
    let mut at = 44;
    while at < madt.len() {
        match madt[at] {
            0 => cpus.push((madt[at + 2].into(), madt[at + 3].into(), u32_at(madt, at + 4))),
            9 => cpus.push((u32_at(madt, at + 12), u32_at(madt, at + 4), u32_at(madt, at + 8))),
            kind => others.push(kind),
        }
        at += usize::from(madt[at + 1]);
    }
    assert_eq!(at, madt.len());
    assert_eq!(others, [1, 4, 10]);
    let expected: Vec<_> = (0..300).map(|n| (n, n, if n == 2 { 2 } else { 1 })).collect();
    assert_eq!(cpus, expected);
}

/// 1 GiB at boot, 8 GiB that may come.
fn memory() -> Vec<AcpiMemory> {
    vec![
        AcpiMemory { range: GpaRange { gpa: 0, len_bytes: 1 << 30 }, hotplug: false, domain: 0 },
        AcpiMemory {
            range: GpaRange { gpa: 4 << 30, len_bytes: 8 << 30 },
            hotplug: true,
            domain: 0,
        },
    ]
}

/// What an SRAT says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Affinities {
    /// APIC id, domain and flags of each processor.
    cpus: Vec<(u32, u32, u32)>,
    /// Address, length, domain and flags of each range.
    memory: Vec<(u64, u64, u32, u32)>,
    /// Domain, segment, bus and function of each generic initiator.
    initiators: Vec<(u32, u16, u8, u8)>,
}

fn affinities(srat: &[u8]) -> Affinities {
    assert_eq!((sum(srat), srat[8], u32_at(srat, 36)), (0, 3, 1));
    let mut said = Affinities::default();
    let mut at = 48;
    while at < srat.len() {
        let entry = &srat[at..];
        match entry[..2] {
            [0, 16] => {
                let domain = u32::from_le_bytes([entry[2], entry[9], entry[10], entry[11]]);
                assert_eq!(entry[8], 0);
                said.cpus.push((u32::from(entry[3]), domain, u32_at(entry, 4)));
            }
            [1, 40] => {
                let (gpa, len) = (u64_at(entry, 8), u64_at(entry, 16));
                said.memory.push((gpa, len, u32_at(entry, 2), u32_at(entry, 28)));
            }
            [2, 24] => said.cpus.push((u32_at(entry, 8), u32_at(entry, 4), u32_at(entry, 12))),
            [5, 32] => {
                assert_eq!((entry[3], u32_at(entry, 24)), (1, 1));
                let segment = u16::from_le_bytes([entry[8], entry[9]]);
                said.initiators.push((u32_at(entry, 4), segment, entry[10], entry[11]));
            }
            _ => panic!("an entry of type {} and length {}", entry[0], entry[1]),
        }
        at += usize::from(entry[1]);
    }
    assert_eq!(at, srat.len());
    said
}

#[test]
fn memory_that_may_come_is_named_with_all_other() {
    let with = AcpiInputs { memory: memory(), ..inputs(300) };
    let area = build_tables(&with).unwrap();
    let said = affinities(table(&area, *b"SRAT"));
    assert_eq!(said.cpus, (0..300).map(|apic_id| (apic_id, 0, 1)).collect::<Vec<_>>());
    assert_eq!(said.memory, [(0, 1 << 30, 0, 1), (4 << 30, 8 << 30, 0, 3)]);
    assert!(tables(&area).iter().all(|table| table[..4] != *b"SLIT"));
}

/// Two nodes with processors and memory, and a device as the third.
fn nodes(vcpus: u32) -> AcpiInputs {
    let mut inputs = AcpiInputs { memory: memory(), ..inputs(vcpus) };
    inputs.cpus.iter_mut().skip(1).for_each(|cpu| cpu.domain = 1);
    inputs.memory[1].domain = 1;
    let device = AcpiInitiator { domain: 2, segment: 0, bus: 0, device: 5, function: 0 };
    inputs.numa = Some(AcpiNuma {
        distances: vec![vec![10, 20, 25], vec![21, 10, 30], vec![25, 30, 10]],
        segments: vec![(1, 1)],
        initiators: vec![device],
    });
    inputs
}

#[test]
fn nodes_have_processors_memory_and_devices() {
    let area = build_tables(&nodes(300)).unwrap();
    let said = affinities(table(&area, *b"SRAT"));
    let cpus: Vec<_> = (0..300).map(|apic_id| (apic_id, u32::from(apic_id > 0), 1)).collect();
    assert_eq!(said.cpus, cpus);
    assert_eq!(said.memory, [(0, 1 << 30, 0, 1), (4 << 30, 8 << 30, 1, 3)]);
    assert_eq!(said.initiators, [(2, 0, 0, 5 << 3)]);
    let slit = table(&area, *b"SLIT");
    assert_eq!((sum(slit), slit[8], u64_at(slit, 36)), (0, 1, 3));
    assert_eq!(slit[44..], [10, 20, 25, 21, 10, 30, 25, 30, 10]);
}

/// Domains have 32 bits, of which the entry of an APIC id below 255 has the upper 24 elsewhere.
#[test]
fn many_domains_are_told_apart() {
    let mut inputs = inputs(256);
    let last = DOMAINS_MAX - 1;
    inputs.cpus[0].domain = last;
    inputs.cpus[255].domain = last;
    let row = vec![20; DOMAINS_MAX as usize];
    inputs.numa =
        Some(AcpiNuma { distances: vec![row; DOMAINS_MAX as usize], ..AcpiNuma::default() });
    let said = affinities(table(&build_tables(&inputs).unwrap(), *b"SRAT"));
    // In the order of domains, by which Linux numbers its nodes.
    let at = [0, 253, 254, 255].map(|at| said.cpus[at]);
    assert_eq!(at, [(1, 0, 1), (254, 0, 1), (0, last, 1), (255, last, 1)]);
}

#[test]
fn what_is_in_no_node_that_is_described_is_refused() {
    let refused = |change: &dyn Fn(&mut AcpiInputs)| {
        let mut inputs = nodes(2);
        change(&mut inputs);
        let refused = build_tables(&inputs);
        assert!(matches!(refused, Err(AcpiError::Domain { domain: 3, nodes: 3 })), "{refused:?}");
    };
    refused(&|inputs| inputs.cpus[0].domain = 3);
    refused(&|inputs| inputs.memory[0].domain = 3);
    refused(&|inputs| inputs.numa.as_mut().unwrap().segments[0].1 = 3);
    refused(&|inputs| inputs.numa.as_mut().unwrap().initiators[0].domain = 3);
    let without = AcpiInputs { numa: None, ..nodes(2) };
    let refused = build_tables(&without);
    assert!(matches!(refused, Err(AcpiError::Domain { domain: 1, nodes: 1 })), "{refused:?}");
}

#[test]
fn memory_that_stays_needs_no_table() {
    let mut fixed = AcpiInputs { memory: memory(), ..inputs(2) };
    fixed.memory.iter_mut().for_each(|memory| memory.hotplug = false);
    for inputs in [fixed, inputs(2)] {
        let area = build_tables(&inputs).unwrap();
        assert!(tables(&area).iter().all(|table| table[..4] != *b"SRAT"));
    }
}

#[test]
fn mcfg_has_each_segment() {
    let inputs = AcpiInputs::new(0..1, vec![segment(0), segment(3)]);
    let area = build_tables(&inputs).unwrap();
    let mcfg = table(&area, *b"MCFG");
    assert_eq!(mcfg.len(), 44 + 2 * 16);
    assert_eq!((u64_at(mcfg, 60), mcfg[68]), (layout::ECAM_GPA + (3 << 20), 3));
}

#[test]
fn impossible_inputs_are_refused() {
    let refused = |change: &dyn Fn(&mut PciSegment)| {
        let mut segment = segment(0);
        change(&mut segment);
        let inputs = AcpiInputs::new(0..1, vec![segment]);
        assert!(matches!(build_tables(&inputs), Err(AcpiError::Segment { id: 0, .. })));
    };
    refused(&|s| s.first_bus = 1);
    refused(&|s| s.ecam_gpa = 1 << 32);
    refused(&|s| s.io_ports = Some((2, 1)));
    refused(&|s| s.io_ports = Some((0, u16::MAX)));
    refused(&|s| s.mmio32 = Some(GpaRange { gpa: 0, len_bytes: 0 }));
    refused(&|s| s.mmio64 = Some(GpaRange { gpa: 1, len_bytes: u64::MAX }));
    refused(&|s| s.mmio32 = Some(GpaRange { gpa: u64::from(u32::MAX), len_bytes: 4096 }));
    refused(&|s| s.intx = vec![IntxRoute { device: 32, pin: 0, gsi: 16 }]);
    assert!(matches!(build_tables(&inputs(0)), Err(AcpiError::CpuCount { cpus: 0 })));
    let many = AcpiInputs { extra_aml: vec![0xa3; 400 << 10], ..inputs(1) };
    assert!(matches!(build_tables(&many), Err(AcpiError::TooLarge { .. })));
}

#[test]
fn largest_machine_fits() {
    // As many as can be asked for, each with a route for the pin of each device.
    let with_pins = |id: u8| {
        let route = |device| IntxRoute { device, pin: 0, gsi: 16 + u32::from(device % 8) };
        PciSegment { intx: (1..32).map(route).collect(), ..segment(id) }
    };
    let segments = || (0..96).map(with_pins).collect::<Vec<_>>();
    let all = build_tables(&AcpiInputs::new(0..cpu_hotplug::CPUS_MAX, segments())).unwrap();
    assert_eq!(table(&all, *b"MCFG").len(), 44 + 96 * 16);
    let fixed = AcpiInputs { cpu_hotplug: None, ..AcpiInputs::new(0..4096, vec![with_pins(0)]) };
    build_tables(&fixed).unwrap();
    // All nodes with one segment, or all segments with the nodes of a large host.
    for (segments, domains, ranges) in
        [(vec![with_pins(0)], DOMAINS_MAX, 1024), (segments(), 64, 256)]
    {
        let mut most = AcpiInputs::new(0..cpu_hotplug::CPUS_MAX, segments);
        let row = vec![20; domains as usize];
        most.numa =
            Some(AcpiNuma { distances: vec![row; domains as usize], ..AcpiNuma::default() });
        most.memory = vec![memory()[1]; ranges];
        build_tables(&most).unwrap();
    }
    let beyond = AcpiInputs::new(0..=cpu_hotplug::CPUS_MAX, segments());
    assert!(matches!(build_tables(&beyond), Err(AcpiError::HotplugCpuCount { cpus: 257 })));
}

/// Disassembles, then compiles what came out: the compiler checks names, types and return values.
fn check_with_iasl(dir: &Path, inputs: &AcpiInputs) -> Option<String> {
    let area = build_tables(inputs).unwrap();
    let aml = dir.join("dsdt.aml");
    std::fs::write(&aml, table(&area, *b"DSDT")).unwrap();
    let disassembled = Command::new("iasl").current_dir(dir).args(["-d", "dsdt.aml"]).output();
    let disassembled = match disassembled {
        Ok(output) => output,
        Err(error) => {
            test_skip::skip!("iasl (package acpica-tools) cannot be run: {error}");
            return None;
        }
    };
    assert!(disassembled.status.success(), "{disassembled:?}");
    let source = std::fs::read_to_string(dir.join("dsdt.dsl")).unwrap();
    let compiled =
        Command::new("iasl").current_dir(dir).args(["-we", "-p", "again", "dsdt.dsl"]).output();
    let compiled = compiled.unwrap();
    let text = String::from_utf8_lossy(&compiled.stdout).into_owned()
        + &String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{text}\n{source}");
    for (name, signature) in [
        ("facp.aml", *b"FACP"),
        ("apic.aml", *b"APIC"),
        ("mcfg.aml", *b"MCFG"),
        ("srat.aml", *b"SRAT"),
        ("slit.aml", *b"SLIT"),
    ] {
        let found = tables(&area).into_iter().find(|table| table[..4] == signature);
        let Some(bytes) = found else { continue };
        std::fs::write(dir.join(name), bytes).unwrap();
        let output = Command::new("iasl").current_dir(dir).args(["-d", name]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !text.contains("Error"), "{name}: {text}");
        let decoded = std::fs::read_to_string(dir.join(name).with_extension("dsl")).unwrap();
        assert!(!decoded.contains("Invalid") && !decoded.contains("Unknown"), "{decoded}");
    }
    Some(source)
}

#[test]
fn aml_is_what_acpica_understands() {
    let dir = tempfile::tempdir().unwrap();
    let mut full = AcpiInputs::new(0..3, vec![segment(0)]);
    full.segments[0].intx = vec![IntxRoute { device: 3, pin: 1, gsi: 16 }];
    full.cpus[2].enabled = false;
    full.memory = memory();
    let Some(source) = check_with_iasl(dir.path(), &full) else { return };
    for expected in [
        "Device (PC00)",
        "\"PNP0A08\"",
        "Device (PWRB)",
        "\"ACPI0013\"",
        "Notify (\\_SB.PWRB, 0x80)",
        "OperationRegion (GEDR, SystemIO, 0x060C, One)",
        "Name (_PRT",
        "0x0003FFFF",
        "Device (COM1)",
        "Device (RTC0)",
        "Method (_OSC, 4, Serialized)",
        "33db4d5b-1ff7-401c-9657-7441c03dd766",
        "Device (C002)",
        "OperationRegion (CPRG, SystemIO, 0x0640, 0x40)",
        "Offset (0x20)",
        "If (P002)",
        "CPEJ = 0x02",
        "Notify (C002, Arg1)",
        "\\_SB.CPUS.CPSC ()",
        "OperationRegion (PCST, SystemIO, 0x0610, 0x10)",
        "Device (S001)",
        "Device (S031)",
        "Name (_ADR, 0x001F0000)",
        "\\_SB.PHPR.PCEJ (0x1F)",
        "Notify (S031, 0x03)",
        "\\_SB.PC00.PCNT ()",
        "Name (\\_S5",
        "Device (VGEN)",
        "\"VM_Gen_Counter\"",
        "\"VMGENCTR\"",
        "Name (_DDN, \"VM_Gen_Counter\")",
        "Name (ADDR, Package (0x02)",
        "0x000EF000",
        "Notify (\\_SB.VGEN, 0x80)",
    ] {
        assert!(source.contains(expected), "no {expected} in\n{source}");
    }
    assert!(!source.contains("PSEG") && !source.contains("BLCK"), "one segment is never selected");
    let bare = AcpiInputs {
        serial_gsi: None,
        pm_timer_port: None,
        ged: None,
        generation_id_gpa: None,
        cmos: false,
        pci_hotplug: None,
        cpu_hotplug: None,
        ..AcpiInputs::new(0..300, vec![segment(0)])
    };
    let source = check_with_iasl(dir.path(), &bare).unwrap();
    for absent in ["COM1", "RTC0", "PWRB", "ACPI0013", "_PRT", "PHPR", "_EJ0", "VGEN", "CPRG"] {
        assert!(!source.contains(absent), "{absent} in\n{source}");
    }
}

#[test]
fn aml_has_memory_devices_where_memory_may_come() {
    let dir = tempfile::tempdir().unwrap();
    let hotplug = MemoryHotplug { registers: at_port(layout::MEMORY_HOTPLUG_PORT), domain: 1 };
    let inputs = AcpiInputs { memory_hotplug: Some(hotplug), ..inputs(1) };
    let Some(source) = check_with_iasl(dir.path(), &inputs) else { return };
    for expected in [
        "Device (MHPC)",
        "OperationRegion (MMRG, SystemIO, 0x0680, 0x90)",
        "Device (MD00)",
        "Device (MD07)",
        "\"PNP0C80\"",
        "If (M007)",
        "MCRS (B7_L, B7_H, L7_L, L7_H)",
        "MOST (0x07, Arg1)",
        "._MIN, MIN)",
        "._MAX, MAX)",
        "._LEN, LEN)",
        "Notify (MD07, One)",
        "\\_SB.MHPC.MMSC ()",
    ] {
        assert!(source.contains(expected), "no {expected} in\n{source}");
    }
    assert!(!source.contains("Name (_PXM"), "{source}");
    let with_nodes = AcpiInputs { memory_hotplug: Some(hotplug), ..nodes(2) };
    let source = check_with_iasl(dir.path(), &with_nodes).unwrap();
    let device = source.split_once("Device (MD07)").unwrap().1;
    let (_, node) = device.split_once("Name (_PXM, ").unwrap();
    assert!(node.starts_with("One"), "{node}");
    let without = check_with_iasl(dir.path(), &self::inputs(1)).unwrap();
    assert!(!without.contains("MHPC") && !without.contains("PNP0C80"), "{without}");
}

#[test]
fn aml_names_the_nodes_of_processors_and_segments() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = nodes(3);
    inputs.segments.push(segment(1));
    inputs.cpus[2].enabled = false;
    let Some(source) = check_with_iasl(dir.path(), &inputs) else { return };
    let domain_of = |device: &str| {
        let from = source.split_once(&format!("Device ({device})\n")).unwrap().1;
        let (_, name) = from.split_once("Name (_PXM, ").unwrap();
        name.split_once(')').unwrap().0.to_owned()
    };
    let domains = ["C000", "C001", "C002", "PC00", "PC01"].map(domain_of);
    assert_eq!(domains, ["Zero", "One", "One", "Zero", "One"]);
    let fixed = AcpiInputs { cpu_hotplug: None, ..nodes(2) };
    let source = check_with_iasl(dir.path(), &fixed).unwrap();
    assert_eq!(source.matches("Name (_PXM").count(), 3, "{source}");
    let without = AcpiInputs { memory: memory(), ..self::inputs(2) };
    let source = check_with_iasl(dir.path(), &without).unwrap();
    assert!(!source.contains("_PXM"), "{source}");
}

#[test]
fn slots_of_several_segments_are_what_acpica_understands() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = AcpiInputs::new(0..1, vec![segment(0), segment(1), segment(0x5f)]);
    inputs.segments[1].intx = vec![IntxRoute { device: 3, pin: 0, gsi: 19 }];
    let Some(source) = check_with_iasl(dir.path(), &inputs) else { return };
    for expected in [
        "Device (PC00)",
        "Device (PC01)",
        "Device (PC5F)",
        "Name (_SEG, 0x5F)",
        "Name (_UID, 0x5F)",
        "Mutex (BLCK, 0x00)",
        "Method (PCEJ, 2, Serialized)",
        "PSEG = Arg1",
        "B0EJ = (One << Arg0)",
        "\\_SB.PHPR.PCEJ (0x1F, 0x5F)",
        "Acquire (\\_SB.PHPR.BLCK, 0xFFFF)",
        "\\_SB.PHPR.PSEG = 0x5F",
        "Local1 = \\_SB.PHPR.PCID",
        "Release (\\_SB.PHPR.BLCK)",
        "PCNN (Local1, 0x03)",
        "Notify (S031, Arg1)",
        "\\_SB.PC00.PCNT ()",
        "\\_SB.PC5F.PCNT ()",
    ] {
        assert!(source.contains(expected), "no {expected} in\n{source}");
    }
    for (once, what) in [("0x0CF8", "configuration ports"), ("Name (_PRT", "routes")] {
        // A port is named as the first and the last address.
        let count = source.matches(once).count();
        assert!((1..=2).contains(&count), "{what}: {count}");
    }
}

/// BARs that are placed in a window that the host bridge does not name are moved by the guest.
#[test]
fn the_host_bridge_names_its_memory_windows() {
    // Address space descriptors (ACPI 6.5, 6.4.3.5): granularity, first, last, offset, length.
    let narrow = [0, layout::MMIO32_GPA, layout::ECAM_GPA - 1, 0, layout::MMIO32_BYTES];
    let narrow = narrow.map(|field| u32::try_from(field).unwrap().to_le_bytes()).concat();
    let window = segment(0).mmio64.unwrap();
    let wide = [0, window.gpa, window.end_gpa() - 1, 0, window.len_bytes];
    let wide = wide.map(u64::to_le_bytes).concat();
    let table = dsdt::dsdt(&inputs(1));
    for descriptor in [narrow, wide] {
        let named = table.windows(descriptor.len()).filter(|bytes| **bytes == *descriptor).count();
        assert_eq!(named, 1, "{descriptor:x?}");
    }
}

#[path = "selector_tests.rs"]
mod selectors;
