// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Values that no recording has: whatever they are, they are taken over as they were; and what is said to be lost.

use hypervisor::Blob;
use proptest::prelude::*;

use super::*;

/// The machine that is made of what is written.
fn again(recorded: &Recorded) -> Adopted {
    let exported = recorded.exported();
    let document = Document::read(&exported.document.write().unwrap()).unwrap();
    let again = adopt(&exported.vm_config, &document.memory, &document, &recorded.memory);
    again.unwrap_or_else(|error| panic!("{}", error_text::chain(&error)))
}

fn json(state: &MachineState) -> Value {
    serde_json::to_value(state).unwrap()
}

/// Numbers from which a machine state is filled.
#[derive(Clone, Debug)]
struct Numbers {
    words: [u64; 16],
    bytes: Vec<u8>,
    flags: [bool; 4],
}

fn numbers() -> impl Strategy<Value = Numbers> {
    let bytes = prop::collection::vec(any::<u8>(), 1024);
    (any::<[u64; 16]>(), bytes, any::<[bool; 4]>()).prop_map(|(words, bytes, flags)| Numbers {
        words,
        bytes,
        flags,
    })
}

fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).unwrap()
}

fn small(word: u64) -> u16 {
    u16::try_from(word & u64::from(u16::MAX)).unwrap()
}

fn fill_vcpu(state: &mut MachineState, numbers: &Numbers) {
    let Numbers { words, bytes, flags } = numbers;
    let vcpu = &mut state.vcpus[1];
    vcpu.regs.rip = words[0];
    vcpu.regs.r15 = words[1];
    vcpu.sregs.cr2 = words[2];
    vcpu.sregs.gs.base = words[3];
    vcpu.xcrs.xcrs[0].value = words[4];
    vcpu.events.exception.error_code = low(words[5]);
    vcpu.events.nmi.pending = flags[0].into();
    vcpu.mp_state = low(words[6] % 5);
    for (msr, word) in vcpu.msrs.iter_mut().zip(words.iter().cycle()) {
        msr.value = *word;
    }
    // The id has to be that of CPUID in x2APIC mode, in which it is then written otherwise.
    let mut lapic = bytes.clone();
    lapic[0x20..0x24].copy_from_slice(&1_u32.to_le_bytes());
    vcpu.lapic = Blob::new(&lapic);
    vcpu.sregs.apic_base = 0xfee0_0800 | if flags[1] { 1 << 10 } else { 0 };
    // In the standard format, with the components of before.
    let mut xsave = vcpu.xsave.bytes().to_vec();
    xsave.resize(1024, 0);
    xsave[..512].copy_from_slice(&bytes[..512]);
    vcpu.xsave = Blob::new(&xsave);
}

fn fill_machine(recorded: &mut Recorded, numbers: &Numbers) {
    let Numbers { words, flags, .. } = numbers;
    let state = &mut recorded.adopted.state;
    fill_vcpu(state, numbers);
    state.clock.realtime_ns = words[7];
    state.clock.host_tsc = flags[2].then_some(words[8]);
    let mut chip = [0; 520];
    state.irqchips.ioapic.fill(&mut chip).unwrap();
    for (at, word) in words.iter().enumerate() {
        chip[32 + 8 * at..40 + 8 * at].copy_from_slice(&word.to_le_bytes());
    }
    chip[20] = u8::try_from(words[9] & 15).unwrap();
    state.irqchips.ioapic = Blob::new(&chip);
    let serial = &mut state.legacy.get_mut("serial").unwrap().data;
    serial["scratch"] = json!(words[10] & 0xff);
    serial["baud_divisor_high"] = json!(words[10] >> 8 & 0xff);
    serial["in_buffer"] = json!(&numbers.bytes[..9]);
    recorded.change("_net2", |state| {
        state.common.queue_select = small(words[11]);
        state.common.config_generation = numbers.bytes[0];
        state.common.isr = numbers.bytes[1] & 3;
        for (entry, word) in state.msix.entries.iter_mut().zip(words) {
            entry.address = *word;
            entry.data = low(word >> 7);
            entry.pending = word & 1 == 1;
            entry.masked = flags[3];
        }
        state.queues[0].vector = small(words[12] % 4);
        state.queues[1].vector = 0xffff;
    });
    recorded.change("__console", |state| {
        state.device.data = json!({"columns": small(words[13]), "rows": small(words[14])});
    });
    recorded.change("__balloon", |state| {
        state.device.data["target_pages"] = json!(low(words[15]));
        state.device.data["actual_pages"] = json!(low(words[0]));
    });
    recorded.change("__watchdog", |state| state.device.data = json!({"is_armed": flags[0]}));
    recorded.change("_disk0", |state| {
        state.device.data["writeback"] = json!(flags[1]);
        // The bytes of the PCI configuration access capability.
        state.config.registers[0x98 / 4 - 2] = low(words[1]);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_state_is_taken_over_as_it_was(numbers in numbers()) {
        let mut recorded = all_devices();
        fill_machine(&mut recorded, &numbers);
        let again = again(&recorded);
        let (before, after) = (json(&recorded.adopted.state), json(&again.state));
        // The timer follows the clock.
        for (field, value) in before.as_object().unwrap() {
            if field != "legacy" {
                prop_assert_eq!(value, &after[field]);
            }
        }
        prop_assert_eq!(&before["legacy"]["serial"], &after["legacy"]["serial"]);
    }

    #[test]
    fn plugged_blocks_are_those_that_were(runs in prop::collection::vec((1_u64..9, 1_u64..9), 0..7)) {
        let mut recorded = recorded_mem();
        let (mut at, mut plugged) = (0, Vec::new());
        for (gap, count) in runs {
            plugged.push((at + gap, count));
            at += gap + count;
        }
        recorded.change("__mem_mem0", |state| {
            state.device.data["plugged"] = json!(&plugged);
            state.device.data["requested_bytes"] = json!(at << 21);
        });
        let exported = recorded.exported();
        let bytes = plugged.iter().map(|(_, count)| count << 21).sum::<u64>();
        let ranges = exported.document.memory.memory_ranges.data.iter();
        let all = ranges.map(|range| range.length).sum::<u64>();
        prop_assert_eq!(all, (8 << 20) + bytes);
        prop_assert_eq!(exported.document.memory.current_ram, (8 << 20) + (at << 21));
        let again = again(&recorded);
        prop_assert_eq!(json(&recorded.adopted.state), json(&again.state));
    }
}

fn recorded_mem() -> Recorded {
    recorded!("virtio-mem")
}

/// A state of nested guests of this length, with the start of its header.
fn nested(len: usize, flags: u16, format: u16, vmxon: u64) -> Blob {
    let mut nested = vec![1; len];
    nested[..2].copy_from_slice(&flags.to_le_bytes());
    nested[2..4].copy_from_slice(&format.to_le_bytes());
    nested[4..8].copy_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
    nested[8..16].copy_from_slice(&vmxon.to_le_bytes());
    Blob::new(&nested)
}

#[test]
fn a_nested_state_of_a_header_alone_is_none_if_it_says_nothing() {
    const NESTED: usize = 4096;
    let mut recorded = plain();
    for (len, flags, format, vmxon) in
        [(128, 0, 0, u64::MAX), (128, 1 << 8, 1, 7), (128 + NESTED, 1, 0, 0x1000)]
    {
        let nested = nested(len, flags, format, vmxon);
        recorded.adopted.state.vcpus[0].nested = Some(nested.clone());
        let exported = recorded.exported();
        let Vcpu::Kvm(vcpu) = &exported.document.vcpus[&0];
        let bytes = vcpu.nested_state.as_ref().map(|state| Blob::new(&state[..len]));
        assert_eq!(bytes, (len > 128).then_some(nested));
    }
    // In VMX operation without nested guests; interrupts held back by SVM; a format that is not known.
    for (flags, format, vmxon) in [(0, 0, 0x1000), (0, 1, 0), (1 << 8, 2, u64::MAX)] {
        recorded.adopted.state.vcpus[0].nested = Some(nested(128, flags, format, vmxon));
        let error = recorded.refusal();
        assert!(error.contains("vCPU 0: it is ready to run nested guests"), "{error}");
    }
}

#[test]
fn registers_of_hyperv_are_there_if_the_configuration_has_them() {
    let mut recorded = plain();
    let timers = [0x4000_00b0, 0x4000_00b1];
    let msrs = timers.map(|index| hypervisor::MsrValue { index, value: 9 });
    recorded.adopted.state.vcpus[0].msrs.extend(msrs);
    for hyperv in [false, true] {
        recorded.adopted.config.cpus.kvm_hyperv = hyperv;
        let exported = recorded.exported();
        let Vcpu::Kvm(vcpu) = &exported.document.vcpus[&0];
        assert_eq!(vcpu.hyperv_synic, hyperv);
        assert_eq!(exported.vm_config["cpus"]["kvm_hyperv"], json!(hyperv));
        let found: Vec<_> = vcpu.msrs.iter().map(|msr| msr.index).collect();
        let found: Vec<_> = found.into_iter().filter(|msr| timers.contains(msr)).collect();
        assert_eq!(found, [timers[1], timers[0]], "a count before its configuration");
    }
}

#[test]
fn no_more_msrs_than_can_be_set_at_once() {
    let mut recorded = plain();
    let add = |recorded: &mut Recorded, first: u32, count: u32| {
        let msrs = (first..first + count).map(|index| hypervisor::MsrValue { index, value: 1 });
        recorded.adopted.state.vcpus[0].msrs.extend(msrs);
    };
    let count = |exported: &Exported| {
        let Vcpu::Kvm(vcpu) = &exported.document.vcpus[&0];
        u32::try_from(vcpu.msrs.len()).unwrap()
    };
    let before = count(&recorded.exported());
    add(&mut recorded, 0x5000, 255 - before - 64);
    add(&mut recorded, 0x400, 64);
    let exported = recorded.exported();
    assert_eq!((count(&exported), exported.losses.len()), (255, 0));
    add(&mut recorded, 0x440, 64);
    let exported = recorded.exported();
    assert_eq!(count(&exported), 255 - 64);
    assert!(exported.losses[0].contains("machine checks"), "{:?}", exported.losses);
    add(&mut recorded, 0x6000, 65);
    assert!(recorded.refusal().contains("vCPU 0: it has 256 MSRs, and 255"));
}

#[test]
fn each_memory_device_has_a_range_of_its_own() {
    const DEVICE: u64 = 128 << 20;
    let mut recorded = recorded!("acpi-hotplug");
    let part = recorded.adopted.memory.parts.iter_mut();
    let devices = |kind| matches!(kind, crate::adopt::PartKind::Devices { .. });
    let part = part.into_iter().find(|part| devices(part.kind)).unwrap();
    let gpa = part.gpa.start;
    part.kind = crate::adopt::PartKind::Devices { plugged_bytes: 2 * DEVICE };
    let mut plug = |places: [u64; 2]| {
        let devices = places.map(|gpa| json!({"gpa": gpa, "len_bytes": DEVICE}));
        let data = json!({"devices": devices, "coming": [], "selected": 0});
        let kind = "memory-hotplug".to_owned();
        let state = devices::virtio::DeviceSnapshot { kind, version: 2, data };
        recorded.adopted.state.memory_hotplug = Some(state);
        recorded.export()
    };
    let memory = plug([gpa, gpa + DEVICE]).unwrap().document.memory;
    let ranges = memory.memory_ranges.data.iter().map(|range| (range.gpa, range.length));
    let mappings = memory.guest_ram_mappings.iter().map(|mapping| (mapping.gpa, mapping.size));
    let mappings: Vec<_> = mappings.collect();
    assert_eq!(mappings[1..], [(gpa, DEVICE), (gpa + DEVICE, DEVICE)]);
    assert!(ranges.eq(mappings));
    for places in [[gpa - DEVICE, gpa + DEVICE], [gpa + DEVICE, gpa + DEVICE]] {
        let error = plug(places).unwrap_err().to_string();
        assert!(error.contains("memory hot-plug: "), "{error}");
    }
}

#[test]
fn a_disk_keeps_the_serial_number_that_it_has_here() {
    let mut recorded = all_devices();
    recorded.adopted.config.disks.as_mut().unwrap()[1].serial = Some("S".repeat(30));
    let disks = &recorded.exported().vm_config["disks"];
    assert_eq!(disks[0]["serial"], json!("_disk0"));
    assert_eq!(disks[1]["serial"], json!("S".repeat(20)), "as long as a driver reads it");
}

#[test]
fn sizes_of_zero_that_are_refused_there_are_left_out() {
    use crate::config::memory::HotplugMethod::{Acpi, VirtioMem};
    let mut recorded = recorded!("zones");
    let memory = |recorded: &Recorded| {
        let config = configuration::convert(&recorded.adopted.config, &mut Vec::new());
        config.unwrap()["memory"].clone()
    };
    let config = &mut recorded.adopted.config.memory;
    config.hotplug_method = Acpi;
    let zone = &mut config.zones.as_mut().unwrap()[1];
    (zone.hotplug_size, zone.hotplugged_size) = (Some(0), Some(0));
    let zone = &memory(&recorded)["zones"][1];
    assert_eq!((zone.get("hotplug_size"), zone.get("hotplugged_size")), (None, None));
    let mut recorded = plain();
    let config = &mut recorded.adopted.config.memory;
    (config.zones, config.hotplugged_size) = (Some(Vec::new()), Some(0));
    for (method, size) in [(Acpi, None), (Acpi, Some(1 << 30)), (VirtioMem, None)] {
        let config = &mut recorded.adopted.config.memory;
        (config.hotplug_method, config.hotplug_size) = (method, size);
        let memory = memory(&recorded);
        assert_eq!((memory.get("hotplugged_size"), memory.get("zones")), (None, None));
        assert_eq!(memory.get("hotplug_size").cloned(), size.map(|size| json!(size)));
    }
    recorded.adopted.config.memory.hotplug_size = Some(1 << 30);
    assert_eq!(memory(&recorded)["hotplugged_size"], json!(0));
}

/// A guest may enable it before it fills the table.
#[test]
fn msix_is_what_its_register_says() {
    let mut recorded = all_devices();
    recorded.change("_disk0", |state| {
        for entry in &mut state.msix.entries {
            (entry.address, entry.data, entry.masked, entry.pending) = (0, 0, true, false);
        }
    });
    let (transport, _) = &recorded.exported().document.devices.virtio["_disk0"];
    assert_eq!((transport.msix.enabled, transport.msix.masked), (true, false));
}

#[test]
fn what_is_lost_is_said() {
    let losses = |recorded: &Recorded| recorded.exported().losses.join("; ");
    assert_eq!(losses(&plain()), "");
    let mut recorded = all_devices();
    assert!(losses(&recorded).contains("'_vsock4'"), "{}", losses(&recorded));
    let state = &mut recorded.adopted.state;
    state.vcpus[1].debugregs.db[2] = 0x1000;
    state.vcpus[0].debugregs.dr7 = 0x2400;
    let mut chip = [0; 520];
    state.irqchips.ioapic.fill(&mut chip).unwrap();
    chip[24] = 2;
    state.irqchips.ioapic = Blob::new(&chip);
    state.legacy.get_mut("cmos").unwrap().version = 2;
    recorded.adopted.config.memory.prefault_threads = Some(3);
    recorded.adopted.config.memory.prefault = crate::config::Prefault::Background;
    let losses = losses(&recorded);
    for what in
        ["vCPU 1", "vCPU 0", "APIC (0x2)", "CMOS", "memory.prefault_threads", "memory.prefault has"]
    {
        assert!(losses.contains(what), "{what}: {losses}");
    }
    assert_eq!(recorded.exported().vm_config["memory"]["prefault"], json!(false));
}

#[test]
fn a_paravirtual_host_is_compared_by_what_it_shows_every_vm() {
    let exported = plain().exported();
    let leaf = |function: u32| {
        let leaves = exported.document.vm.common_cpuid.iter();
        leaves.filter(|leaf| leaf.function == function).copied().collect::<Vec<_>>()
    };
    assert_eq!(leaf(0x4000_0000)[0].eax, 0x4000_0001);
    assert!(leaf(0x4000_0010).is_empty());
    let features = leaf(1)[0];
    assert_eq!((features.ebx >> 16, features.ecx >> 27 & 1, features.edx >> 28 & 1), (0, 0, 0));
    assert_eq!((leaf(7)[0].ecx >> 4 & 1, leaf(0xb).len(), leaf(0xb)[0].ecx), (0, 1, 0));
}

/// v53 puts it at the highest free place, whatever its register says.
#[test]
fn a_panic_device_that_is_elsewhere_there_is_said() {
    let mut recorded = all_devices();
    let losses = |recorded: &Recorded| recorded.exported().losses.join("; ");
    assert!(!losses(&recorded).contains("panic"), "{}", losses(&recorded));
    let state = &mut recorded.adopted.state.pci.get_mut(PVPANIC_ID).unwrap().state;
    let register = &mut state.data["config"]["registers"][4];
    *register = json!(register.as_u64().unwrap() - 0x1000);
    assert!(losses(&recorded).contains("its panic device is at"), "{}", losses(&recorded));
}
