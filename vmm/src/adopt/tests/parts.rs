// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the values of a part mean: vCPUs, interrupt controllers, registers of functions, memory.

use super::*;

/// Offset of the APIC's base address in the kernel's structure.
const APIC_BASE: usize = 272;

/// Puts a vCPU into x2APIC mode, with this in the register of its APIC id.
fn in_x2apic_mode(recorded: &mut Recorded, index: u32, register: u32) {
    let vcpu = recorded.vcpu(index);
    vcpu.sregs[APIC_BASE + 1] |= 1 << 2;
    for (to, byte) in vcpu.lapic_state.regs[0x20..0x24].iter_mut().zip(register.to_le_bytes()) {
        *to = byte.cast_signed();
    }
}

fn apic_id(adopted: &Adopted, index: usize) -> u32 {
    let mut page = [0; 1024];
    adopted.state.vcpus[index].lapic.fill(&mut page).unwrap();
    u32::from_le_bytes(page[0x20..0x24].try_into().unwrap())
}

#[test]
fn an_apic_id_in_x2apic_mode_gets_all_bits() {
    let mut recorded = recorded!("plain-2");
    assert_eq!(apic_id(&recorded.adopted(), 1), 1 << 24, "as in xAPIC mode");
    in_x2apic_mode(&mut recorded, 1, 1 << 24);
    let adopted = recorded.adopted();
    assert_eq!((apic_id(&adopted, 0), apic_id(&adopted, 1)), (0, 1));
    // The format in which it is with ids that need more bits.
    in_x2apic_mode(&mut recorded, 1, 1);
    assert_eq!(apic_id(&recorded.adopted(), 1), 1);
    // Another vCPU's.
    for id in [2, 2 << 24, 1 << 24 | 1] {
        in_x2apic_mode(&mut recorded, 1, id);
        let error = recorded.refusal();
        assert!(error.contains("cpu-manager/1: lapic_state.regs[32]: the APIC id"), "{error}");
        assert!(error.contains("not that of CPUID, 0x1"), "{error}");
    }
}

#[test]
fn with_many_apic_ids_they_have_all_bits_already() {
    let mut recorded = recorded!("plain-2");
    recorded.config["cpus"]["max_vcpus"] = json!(150);
    // Ids with gaps: two bits for three threads, and 50 cores.
    recorded.config["cpus"]["topology"] = json!({
        "threads_per_core": 3, "cores_per_die": 5, "dies_per_package": 1, "packages": 10
    });
    in_x2apic_mode(&mut recorded, 1, 1);
    assert_eq!(apic_id(&recorded.adopted(), 1), 1);
}

#[test]
fn registers_without_a_record_have_the_values_of_reset() {
    let adopted = recorded!("plain-2").adopted();
    for vcpu in &adopted.state.vcpus {
        assert_eq!((vcpu.debugregs.dr6, vcpu.debugregs.dr7), (0xffff_0ff0, 0x400));
        assert_eq!((vcpu.pdptrs, vcpu.ssp, &vcpu.nested), (None, None, &None));
        assert!(vcpu.msrs.iter().all(|msr| msr.index != 0x10));
        assert_eq!(vcpu.tsc.khz, Some(2_600_000));
        assert_eq!(vcpu.tsc.value, adopted.state.vcpus[0].tsc.value, "one TSC for all");
    }
}

#[test]
fn registers_are_those_of_the_document() {
    let mut recorded = plain();
    recorded.vcpu(0).regs[..8].copy_from_slice(&0x1122_3344_u64.to_le_bytes());
    recorded.vcpu(0).mp_state[0] = 3;
    let adopted = recorded.adopted();
    let vcpu = &adopted.state.vcpus[0];
    assert_eq!((vcpu.regs.rax, vcpu.mp_state), (0x1122_3344, 3));
    assert_ne!(vcpu.sregs.cr3, 0);
    assert_eq!(vcpu.xcrs.xcrs[0].value & 1, 1);
    let xsave = &recorded.vcpu(0).xsave;
    let bytes: Vec<u8> = xsave.region.iter().flat_map(|word| word.to_le_bytes()).collect();
    assert!(bytes.starts_with(vcpu.xsave.bytes()));
}

#[test]
fn vcpus_that_the_guest_has_ejected_are_left_out() {
    let recorded = recorded!("debian-plugged");
    assert_eq!((recorded.document.vcpus.len(), recorded.adopted().state.vcpus.len()), (3, 2));
}

#[test]
fn features_are_those_of_all_vcpus_and_topology_is_that_of_the_first() {
    for (name, recorded) in [("plain-2", recorded!("plain-2")), ("debian-2", recorded!("debian-2"))]
    {
        let adopted = recorded.adopted();
        let (shown, first) = (&adopted.state.shown, &adopted.state.vcpus[0].cpuid);
        let common = &recorded.document.vm.common_cpuid;
        let answer = |entries: &[hypervisor::CpuidEntry], function: u32, index: u32| {
            let mut entries = entries.iter();
            let entry = entries.find(|it| (it.function, it.index) == (function, index));
            entry.map(|entry| entry.answer)
        };
        let [theirs, features] =
            [1, 7].map(|leaf| common.iter().find(|it| it.function == leaf).unwrap());
        let [eax, ebx, ecx, edx] = answer(shown, 1, 0).unwrap();
        // Two vCPUs and HTT; no bit of the processor that KVM does not offer.
        assert_eq!((eax, ecx), (theirs.eax, theirs.ecx), "{name}");
        assert_eq!((ebx >> 16 & 0xff, edx), (2, theirs.edx | 1 << 28), "{name}");
        assert_eq!(answer(shown, 7, 0).unwrap()[1], features.ebx, "{name}");
        let of_vcpus = [(4, 0), (0xb, 0), (0xb, 1), (0x1f, 1), (0x4000_0000, 0), (0x4000_0010, 0)];
        for (function, index) in of_vcpus.into_iter().chain([(0x8000_001e, 0)]) {
            let expected = answer(first, function, index);
            assert_eq!(answer(shown, function, index), expected, "{name} {function:#x}");
        }
        assert_eq!(answer(shown, 0xb, 1).unwrap()[1], 2, "{name}");
        let places: Vec<_> = shown.iter().map(|entry| (entry.function, entry.index)).collect();
        assert!(places.is_sorted() && places.windows(2).all(|pair| pair[0] != pair[1]), "{name}");
    }
    // Of an AMD processor.
    let debian = recorded!("debian-2").adopted().state.shown;
    let answer = |leaf: u32| debian.iter().find(|it| it.function == leaf).unwrap().answer;
    assert_eq!((answer(0x8000_0001)[2], answer(0x8000_0008)[2]), (0x40_0177, 0x2001));
}

#[test]
fn a_guest_without_nested_guests_needs_none_here() {
    let mut recorded = recorded!("debian-2");
    let leaf = |recorded: &Recorded, leaf: u32| {
        let shown = recorded.adopted().state.shown;
        shown.iter().find(|it| it.function == leaf).map(|it| it.answer).unwrap()
    };
    let entries = recorded.document.vm.common_cpuid.iter().map(|entry| {
        let mut entry = *entry;
        match entry.function {
            1 => entry.ecx |= 1 << 5,
            0x8000_0001 => entry.ecx |= 1 << 2,
            0x8000_000a => (entry.eax, entry.ebx, entry.edx) = (1, 0x10, 9),
            _ => {}
        }
        entry
    });
    let mut entries: Vec<_> = entries.collect();
    if entries.iter().all(|entry| entry.function != 0x8000_000a) {
        let mut svm = entries[0];
        (svm.function, svm.eax, svm.ebx, svm.ecx, svm.edx) = (0x8000_000a, 1, 0x10, 0, 9);
        entries.push(svm);
    }
    recorded.document.vm.common_cpuid = List::try_from(entries).ok().unwrap();
    assert_eq!(leaf(&recorded, 0x8000_000a), [1, 0x10, 0, 9]);
    assert_ne!(leaf(&recorded, 0x8000_0001)[2] & 1 << 2, 0);
    recorded.config["cpus"]["nested"] = json!(false);
    assert_eq!(leaf(&recorded, 0x8000_000a), [0; 4]);
    assert_eq!(leaf(&recorded, 1)[2] & 1 << 5, 0);
    assert_eq!(leaf(&recorded, 0x8000_0001)[2] & 1 << 2, 0);
}

#[test]
fn an_interrupt_is_not_raised_twice() {
    let mut recorded = plain();
    recorded.vcpu(0).sregs[280 + 4] = 1;
    assert_eq!(recorded.adopted().state.vcpus[0].sregs.interrupt_bitmap, [0; 4]);
}

#[test]
fn interrupt_controllers_are_the_kernels_with_masked_pics() {
    let mut recorded = plain();
    recorded.document.devices.ioapic.reg_entries[4] = 0x0100_0000_0000_0031;
    recorded.document.devices.ioapic.used_entries[4] = true;
    recorded.document.devices.ioapic.id_reg = 2;
    recorded.document.devices.ioapic.reg_sel = 0x18;
    let chips = recorded.adopted().state.irqchips;
    let mut chip = [0; 520];
    for (pic, lines) in [(&chips.pic_master, 0xf8), (&chips.pic_slave, 0xde)] {
        pic.fill(&mut chip).unwrap();
        assert_eq!(chip[8..24], [0, 0, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, lines]);
    }
    chips.ioapic.fill(&mut chip).unwrap();
    let word = |at: usize| u64::from_le_bytes(chip[at..at + 8].try_into().unwrap());
    assert_eq!(word(8), 0xfec0_0000);
    assert_eq!(word(16), 2 << 32 | 0x18);
    assert_eq!(word(32 + 8 * 3), 0x1_0000);
    assert_eq!(word(32 + 8 * 4), 0x0100_0000_0000_0031);
}

#[test]
fn a_bar_that_was_just_sized_has_its_address() {
    let mut recorded = all_devices();
    for id in ["_disk0", "__rng"] {
        let configuration = &mut recorded.transport(id).configuration;
        for register in [4, 5] {
            configuration.registers[register] |= configuration.writable_bits[register];
        }
    }
    let adopted = recorded.adopted();
    assert_eq!(virtio(&adopted, "_disk0").config.registers[4], 3_891_789_824);
    let rng = virtio(&adopted, "__rng").config;
    assert_eq!(rng.registers[4..6], [0xfe80_0004, 0x7f]);
    // Neither the address nor the mask.
    recorded.transport("__rng").configuration.registers[4] = 0x1234_0004;
    assert!(recorded.refusal().contains("_virtio-pci-__rng/pci_configuration: bars[0]"));
}

#[test]
fn the_access_capability_has_its_own_bytes() {
    let mut recorded = all_devices();
    let transport = recorded.transport("__rng");
    transport.data.cap_pci_cfg[2] = 3;
    transport.data.cap_pci_cfg[6] = 0xaa;
    transport.data.cap_pci_cfg[14] = 0x55;
    // At 0x74: link and id, length, type, BAR, identity, offset, length, data.
    let config = virtio(&recorded.adopted(), "__rng").config;
    assert_eq!(config.registers[0x74 / 4] & 0xff, 9);
    assert_eq!(config.registers[0x74 / 4] >> 24, 5);
    assert_eq!(config.registers[0x78 / 4], 3);
    assert_eq!(config.registers[0x7c / 4], 0xaa);
    assert_eq!(config.registers[0x84 / 4], 0x55);
}

#[test]
fn the_mask_of_msix_counts_if_it_is_enabled() {
    let mut recorded = all_devices();
    let set = |recorded: &mut Recorded, register: u32, enabled: bool, masked: bool| {
        let transport = recorded.transport("__rng");
        let index = usize::try_from(transport.configuration.msix_cap_reg_idx.unwrap()).unwrap();
        let control = &mut transport.configuration.registers[index];
        *control = *control & 0x3fff_ffff | register << 30;
        (transport.msix.enabled, transport.msix.masked) = (enabled, masked);
    };
    set(&mut recorded, 0b10, false, true);
    assert!(recorded.refusal().contains("enabled, masked"), "a vector could be raised");
    let msix = &mut recorded.transport("__rng").msix;
    for vector in 0..msix.table_entries.len() {
        msix.table_entries = changed(&msix.table_entries, vector, |it| it.vector_ctl = 1);
    }
    for (register, enabled, masked, is_taken) in [
        (0b00, false, true, true),
        (0b01, false, false, true),
        (0b10, true, false, true),
        (0b10, false, true, true),
        (0b11, true, true, true),
        (0b10, true, true, false),
        (0b00, true, false, false),
        (0b10, false, false, false),
    ] {
        set(&mut recorded, register, enabled, masked);
        assert_eq!(recorded.adopt().is_ok(), is_taken, "{register:b} {enabled} {masked}");
    }
    assert!(recorded.refusal().contains("_virtio-pci-__rng/msix_config: enabled, masked"));
}

#[test]
fn vectors_have_their_messages_and_pending_bits() {
    let mut recorded = all_devices();
    let msix: &mut MsixConfig = &mut recorded.transport("__rng").msix;
    msix.table_entries = changed(&msix.table_entries, 1, |entry| {
        (entry.msg_addr_hi, entry.vector_ctl) = (7, 1);
    });
    msix.pba_entries = changed(&msix.pba_entries, 0, |word| *word = 0b10);
    let entries = virtio(&recorded.adopted(), "__rng").msix.entries;
    assert_eq!(entries[1].address, 7 << 32 | 0xfee0_0000);
    assert!(entries[1].masked && entries[1].pending && !entries[0].pending);
    let msix: &mut MsixConfig = &mut recorded.transport("__rng").msix;
    msix.pba_entries = changed(&msix.pba_entries, 0, |word| *word = 0b100);
    assert!(recorded.refusal().contains("a bit of vector 2, which does not exist"));
}

#[test]
fn devices_states_are_this_programs() {
    let mut recorded = all_devices();
    let Virtio::Block(disk) = &mut recorded.device("_disk0").1 else { panic!("a disk") };
    disk.config.writeback = 0;
    let Virtio::Net(net) = &mut recorded.device("_net2").1 else { panic!("a network") };
    net.acked_features &= !(1 << 7);
    let adopted = recorded.adopted();
    let data = |id: &str| virtio(&adopted, id).device.data;
    assert_eq!(
        data("_disk0"),
        json!({"writeback": false, "capacity_sectors": 2048, "readonly": false})
    );
    assert_eq!(data("_disk1")["readonly"], json!(true));
    // GUEST_CSUM, TSO6, ECN, UFO; the guest is to announce itself.
    let offloads = 1 << 1 | 1 << 8 | 1 << 9 | 1 << 10;
    assert_eq!(
        data("_net2"),
        json!({
            "mac": [0x52, 0x54, 0, 0x12, 0x34, 0x56],
            "offloads": offloads, "active_pairs": 1, "announce_pending": true
        })
    );
    assert_eq!(data("_pmem3"), json!({"gpa": 0x7f_ffc0_0000_u64, "len_bytes": 2 << 20}));
    assert_eq!(data("__watchdog"), json!({"is_armed": true}));
    assert_eq!(adopted.platform.offered["_vsock4"], 1 << 35 | 1 << 32);
    let clock = devices::virtio::rtc::RtcConfig { id: "clock".to_owned() };
    let mut clock = devices::virtio::rtc::Rtc::new(clock);
    devices::virtio::VirtioDevice::restore(&mut clock, &virtio(&adopted, "__rtc").device).unwrap();
}

#[test]
fn blocks_of_a_memory_device_become_ranges() {
    let mut recorded = recorded!("virtio-mem");
    let Virtio::Mem(mem) = &mut recorded.device("mem0").1 else { panic!("memory") };
    let mut bitmap = mem.blocks_state.bitmap.to_vec();
    for block in [1, 2, 5] {
        bitmap[block] = true;
    }
    mem.blocks_state.bitmap = List::try_from(bitmap).ok().unwrap();
    assert!(recorded.refusal().contains("device-manager/mem0: config.plugged_size"));
    let Virtio::Mem(mem) = &mut recorded.device("mem0").1 else { panic!("memory") };
    mem.config.plugged_size = 6 << 20;
    let data = virtio(&recorded.adopted(), "__mem_mem0").device.data;
    assert_eq!(data["plugged"], json!([[1, 2], [5, 1]]));
    assert_eq!(data["requested_bytes"], json!(128 << 20));
}

#[test]
fn memory_devices_of_acpi_are_apart_from_what_was_there_at_boot() {
    let recorded = recorded!("acpi-hotplug");
    let adopted = recorded.adopted();
    let memory = &adopted.config.memory;
    assert_eq!((memory.size, memory.hotplugged_size), (8 << 20, Some(128 << 20)));
    // The guest has not noticed it.
    let registers = adopted.state.memory_hotplug.as_ref().unwrap();
    let device = json!({"gpa": 4_u64 << 30, "len_bytes": 128 << 20});
    assert_eq!(registers.data, json!({"devices": [device], "coming": [0]}));
    assert!(adopted.memory.holds(4 << 30, 128 << 20));
    assert!(!adopted.memory.holds(4 << 30, (128 << 20) + 1));
    devices::Snapshot::restore(&devices::legacy::MemoryHotplug::new(None), registers).unwrap();
}

#[test]
fn a_memory_device_that_waits_is_announced_again() {
    let pending = |recorded: &Recorded| recorded.adopted().state.legacy["ged"].data.clone();
    let mut recorded = recorded!("acpi-hotplug");
    assert_eq!(pending(&recorded), json!({"pending": 2}));
    recorded.document.memory.hotplug_slots[0].inserting = false;
    assert_eq!(pending(&recorded), json!({"pending": 0}));
}

#[test]
fn the_size_of_memory_is_that_at_boot_whatever_was_asked_for_later() {
    let sizes = |recorded: &Recorded| {
        let memory = recorded.adopted().config.memory;
        (memory.size, memory.hotplugged_size)
    };
    for asked in [4_u64 << 20, 8 << 20, 1 << 30] {
        let mut recorded = recorded!("acpi-hotplug");
        recorded.config["memory"]["size"] = json!(asked);
        assert_eq!(sizes(&recorded), (8 << 20, Some(128 << 20)), "{asked:#x}");
        let mut recorded = plain();
        recorded.config["memory"]["size"] = json!(asked);
        assert_eq!(sizes(&recorded), (8 << 20, None), "{asked:#x}");
    }
}

#[test]
fn a_clock_has_its_time_and_perhaps_the_hosts_tsc() {
    let mut recorded = plain();
    let mut bytes = [0; 48];
    bytes[..8].copy_from_slice(&7_u64.to_le_bytes());
    bytes[16..24].copy_from_slice(&8_u64.to_le_bytes());
    bytes[24..32].copy_from_slice(&9_u64.to_le_bytes());
    for (flags, tsc) in [(4, None), (4 | 8, Some(9))] {
        bytes[8] = flags;
        let clock = cloud_hypervisor_state::Clock::Kvm(bytes.into());
        recorded.document.vm.clock = Some(clock);
        let clock = recorded.adopted().state.clock;
        assert_eq!((clock.clock_ns, clock.realtime_ns, clock.host_tsc), (7, 8, tsc));
    }
    bytes[8] = 2;
    recorded.document.vm.clock = Some(cloud_hypervisor_state::Clock::Kvm(bytes.into()));
    assert!(recorded.refusal().contains("(root): clock: the real time"));
    recorded.document.vm.clock = None;
    assert!(recorded.refusal().contains("(root): clock: missing"));
}

#[test]
fn what_is_lost_is_said() {
    let mut recorded = all_devices();
    let Virtio::Console(console) = &mut recorded.device("__console").1 else { panic!("a console") };
    console.in_buffer = List::try_from(vec![65, 66]).ok().unwrap();
    let serial = recorded.document.devices.serial.as_mut().unwrap();
    serial.in_buffer = List::try_from(vec![65; 65]).ok().unwrap();
    let losses = recorded.adopted().losses;
    assert!(losses.iter().any(|loss| loss.contains("console '__console' loses 2 bytes")));
    assert!(losses.iter().any(|loss| loss.contains("serial port loses 1 bytes")));
}

#[test]
fn a_reset_device_has_accepted_nothing() {
    let mut recorded = all_devices();
    let transport = recorded.transport("__rng");
    (transport.data.device_activated, transport.common.driver_status) = (false, 0);
    let rng = virtio(&recorded.adopted(), "__rng");
    assert_eq!((rng.common.driver_features, rng.common.active), (0, false));
    assert!(rng.queues[0].progress.is_none());
    let transport = recorded.transport("_net2");
    (transport.data.device_activated, transport.common.driver_status) = (false, 0);
    let net = virtio(&recorded.adopted(), "_net2").device.data;
    assert_eq!((&net["offloads"], &net["announce_pending"]), (&json!(0), &json!(false)));
}

#[test]
fn functions_of_the_platform_take_the_states() {
    use devices::virtio::rng::{Rng, RngConfig};
    use devices::virtio::rtc::{Rtc, RtcConfig};
    use devices::virtio::{Offering, VirtioDevice};
    use pci::fakes::{FakeIoEvents, FakeMsiSource};
    use pci::{BarWidth, PciDevice as _, VirtioPciDevice, VirtioPciForm};

    let adopted = all_devices().adopted();
    let platform = adopted.config.machine_platform();
    let layout = ::memory::RamLayout {
        hole_start: 3 << 30,
        hole_end: 4 << 30,
        high_hole: None,
        end: 1 << 39,
        later_align_bytes: 128 << 20,
    };
    let memory = ::memory::RamConfig { zones: vec![::memory::ZoneSpec::new("mem0", 8 << 20)] };
    let memory = ::memory::GuestRam::new(&memory, layout).unwrap();
    let rng = RngConfig { id: "__rng".to_owned(), source: "/dev/urandom".into() };
    let rtc = RtcConfig { id: "__rtc".to_owned() };
    let devices: [(&str, Box<dyn VirtioDevice>); 2] = [
        ("__rng", Box::new(Offering::of(Box::new(Rng::new(rng).unwrap()), platform.offers.rng))),
        ("__rtc", Box::new(Offering::of(Box::new(Rtc::new(rtc)), platform.offers.rtc))),
    ];
    for (id, device) in devices {
        let function = VirtioPciDevice::with_form(
            id.to_owned(),
            device,
            VirtioPciForm { width: BarWidth::Bits64, rules: &platform.virtio_pci },
            memory.guest_memory(),
            &FakeMsiSource::new(8),
            std::sync::Arc::new(FakeIoEvents::default()),
        )
        .unwrap();
        let state = &adopted.state.pci[id].state;
        let taken = pci::PciDevice::restore(&function, state);
        taken.unwrap_or_else(|error| panic!("{id}: {}", error_text::chain(&error)));
        // What the guest reads is what it has read.
        let theirs = virtio(&adopted, id).config.registers;
        for (offset, expected) in (0_u16..).step_by(4).zip(theirs) {
            let mut register = [0; 4];
            function.read_config(offset, &mut register);
            assert_eq!(u32::from_le_bytes(register), expected, "{id} {offset:#x}");
        }
    }
}
