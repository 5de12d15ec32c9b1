// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state, clocks and dirty logs on real KVM. Skipped without /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::sync::Arc;

use common::{CODE, Event, Guest, MEMORY_LEN_BYTES, Memory, Recorder, boot, kvm, start, vm};
use hypervisor::{
    ClockPolicy, ClockState, Hypervisor, IrqchipState, ManualDirtyLog, MemslotConfig, MemslotError,
    TimeBase, VcpuState, VcpuStateError, Vm, VmConfig,
};

/// Counts in EBX and in memory at 0x2000, forever, and says when it has begun.
#[rustfmt::skip]
const COUNTER: [u8; 16] = [
    0xe6, 0x70,                     // out 0x70, al
    0x66, 0x43,                     // inc ebx
    0x66, 0x89, 0x1e, 0x00, 0x20,   // mov [0x2000], ebx
    0x0f, 0x31,                     // rdtsc
    0xeb, 0xf5,                     // jmp to the inc
    0, 0, 0,
];

fn state_of(guest: &Guest) -> VcpuState {
    guest.threads.on_one(0, |vcpu| vcpu.state().unwrap()).unwrap()
}

fn wait_until_above(memory: &Memory, count: u32) {
    let deadline = std::time::Instant::now() + common::PATIENCE;
    while memory.read_u32(0x2000) <= count {
        assert!(std::time::Instant::now() < deadline, "the guest does not count");
        std::thread::yield_now();
    }
}

/// A counter that has counted, paused.
fn paused_counter(kvm: &Hypervisor) -> Guest {
    let guest = Guest::new(kvm, &COUNTER);
    guest.threads.resume_all();
    assert!(matches!(guest.next(), Event::Out(0x70, _)));
    wait_until_above(&guest.memory, 100);
    guest.threads.pause_all().unwrap();
    guest
}

/// A second VM with the first one's memory and `state`.
fn restore(kvm: &Hypervisor, from: &Guest, state: &VcpuState, clock: &ClockState) -> Guest {
    let (recorder, events) = Recorder::new();
    let (vm, memory) = vm(kvm, false);
    memory.copy_from(&from.memory);
    let vcpu = vm.create_vcpu(0).unwrap();
    let time = vm.restore_clock(clock, ClockPolicy::Continue).unwrap();
    vcpu.set_state(state, &time).unwrap();
    vm.set_irqchips(&from.vm.irqchips().unwrap()).unwrap();
    Guest { threads: start(vec![vcpu], recorder), events, vm, memory }
}

#[test]
fn a_guest_continues_in_another_vm_with_exactly_its_state() {
    let Some(kvm) = kvm() else { return };
    let guest = paused_counter(&kvm);
    let text = serde_json::to_string(&state_of(&guest)).unwrap();
    let clock = guest.vm.clock().unwrap();
    let saved: VcpuState = serde_json::from_str(&text).unwrap();
    assert!(text.len() < 64 * 1024, "{} bytes of state", text.len());
    let second = restore(&kvm, &guest, &saved, &clock);
    // Time and the timer's counter move; all else must be as it was.
    let here = state_of(&second);
    let still = |state: &VcpuState| {
        let mut state = state.clone();
        state.tsc.value = 0;
        state.tsc.offset = None;
        state
    };
    assert_eq!(still(&here), still(&saved));
    let count = u32::try_from(saved.regs.rbx).unwrap();
    second.threads.resume_all();
    wait_until_above(&second.memory, count + 100);
    second.threads.pause_all().unwrap();
    let regs = state_of(&second).regs;
    assert!(regs.rbx > saved.regs.rbx && regs.rbx < saved.regs.rbx + (1 << 31));
    // The first guest is still where it was.
    assert_eq!(state_of(&guest).regs, saved.regs);
}

#[test]
fn the_tsc_continues_from_the_saved_value() {
    let Some(kvm) = kvm() else { return };
    let guest = paused_counter(&kvm);
    let clock = guest.vm.clock().unwrap();
    let saved = state_of(&guest);
    let second = restore(&kvm, &guest, &saved, &clock);
    let here = state_of(&second);
    let khz = u64::from(saved.tsc.khz.unwrap());
    let passed = here.tsc.value.wrapping_sub(saved.tsc.value);
    // Guest time stood still between the two, so little has passed; and never less than nothing.
    assert!(passed < khz * 1000 * 30, "{} then {}", saved.tsc.value, here.tsc.value);
    if saved.tsc.offset == Some(0) {
        test_skip::skip!("exact TSC, as this host cannot move a guest's TSC away from its own");
        return;
    }
    // With the TSC of the guest in hand at both clock readings, the offset must be exact.
    if let (Some(offset), Some(offset_here)) = (saved.tsc.offset, here.tsc.offset) {
        let after = second.vm.clock().unwrap();
        if let (Some(host), Some(host_here)) = (clock.host_tsc, after.host_tsc) {
            let cycles =
                host_here.wrapping_add(offset_here).wrapping_sub(host.wrapping_add(offset));
            let elapsed_ns = after.clock_ns - clock.clock_ns;
            let expected = u128::from(elapsed_ns) * u128::from(khz) / 1_000_000;
            let difference = u128::from(cycles).abs_diff(expected);
            // Rates of clock and TSC differ by rounding only: far below a microsecond.
            assert!(difference < u128::from(khz) / 1000, "{cycles} {expected}");
        }
    }
}

#[test]
fn guest_time_stands_still_or_catches_up_as_asked() {
    let Some(kvm) = kvm() else { return };
    let (vm, _memory) = vm(&kvm, false);
    let _vcpu = vm.create_vcpu(0).unwrap();
    let mut clock = vm.clock().unwrap();
    clock.clock_ns = 5_000_000_000;
    clock.realtime_ns -= 100_000_000_000;
    let still = vm.restore_clock(&clock, ClockPolicy::Continue).unwrap();
    assert!(still.elapsed_ns < 60_000_000_000, "{still:?}");
    let moved = vm.restore_clock(&clock, ClockPolicy::CatchUp).unwrap();
    assert!((100_000_000_000..160_000_000_000).contains(&moved.elapsed_ns), "{moved:?}");
    // A destination whose clock is behind does not turn guest time back.
    clock.realtime_ns += 1_000_000_000_000;
    let behind = vm.restore_clock(&clock, ClockPolicy::CatchUp).unwrap();
    assert!(behind.here.clock_ns >= 5_000_000_000, "{behind:?}");
    assert!(behind.elapsed_ns < 60_000_000_000, "{behind:?}");
}

#[test]
fn state_that_the_host_cannot_take_is_refused_by_name() {
    let Some(kvm) = kvm() else { return };
    let guest = paused_counter(&kvm);
    let saved = state_of(&guest);
    let time = TimeBase::default();
    let try_state = |state: &VcpuState| {
        let (vm, _memory) = vm(&kvm, false);
        let vcpu = vm.create_vcpu(0).unwrap();
        vcpu.set_state(state, &time)
    };
    try_state(&saved).unwrap();
    let mut state = saved.clone();
    // EFER is set with the special registers; SYSENTER_EIP must be canonical.
    state.msrs.push(hypervisor::MsrValue { index: 0x8765_4321, value: 1 });
    match try_state(&state).unwrap_err() {
        VcpuStateError::MsrsRefused(msrs) => assert_eq!(msrs[0].index, 0x8765_4321),
        error => panic!("{error:?}"),
    }
    let mut state = saved.clone();
    state.sregs.cr4 = u64::MAX;
    assert!(matches!(try_state(&state), Err(VcpuStateError::Kernel(_))));
    if !guest.vm.capabilities().tsc_control {
        let mut state = saved;
        state.tsc.khz = state.tsc.khz.map(|khz| khz + khz / 100);
        assert!(matches!(try_state(&state), Err(VcpuStateError::TscFrequency { .. })));
    }
}

#[test]
fn interrupt_controllers_keep_their_state() {
    let Some(kvm) = kvm() else { return };
    // Programs the first PIC: vectors from 0x48, all masked but line 1.
    let guest = Guest::new(
        &kvm,
        &[
            0xb0, 0x11, 0xe6, 0x20, 0xb0, 0x48, 0xe6, 0x21, 0xb0, 0x04, 0xe6, 0x21, 0xb0, 0x01,
            0xe6, 0x21, 0xb0, 0xfd, 0xe6, 0x21, 0xe6, 0x10,
        ],
    );
    let fresh = guest.vm.irqchips().unwrap();
    guest.threads.resume_all();
    guest.wait_for_leave();
    let saved = guest.vm.irqchips().unwrap();
    assert_ne!(saved.pic_master, fresh.pic_master);
    let text = serde_json::to_string(&saved).unwrap();
    let state: IrqchipState = serde_json::from_str(&text).unwrap();
    let second = Vm::create(&kvm, &VmConfig::default()).unwrap();
    let _vcpu = second.create_vcpu(0).unwrap();
    second.set_irqchips(&state).unwrap();
    assert_eq!(second.irqchips().unwrap(), saved);
    let other = IrqchipState { version: 9, ..state };
    assert!(second.set_irqchips(&other).is_err());
}

#[test]
fn the_dirty_log_has_the_pages_that_the_guest_wrote() {
    let Some(kvm) = kvm() else { return };
    let (recorder, events) = Recorder::new();
    let (vm, memory) = vm(&kvm, true);
    #[rustfmt::skip]
    memory.write(CODE, &[
        0xa2, 0x00, 0x30,       // mov [0x3000], al
        0xa2, 0xff, 0x5f,       // mov [0x5fff], al
        0xe6, 0x10,             // out LEAVE_PORT, al
        0xeb, 0xf6,             // again
    ]);
    let vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &vcpu, CODE, 0);
    let guest = Guest { threads: start(vec![vcpu], recorder), events, vm, memory };
    let mut bits = Vec::new();
    let read = |bits: &mut Vec<u64>| {
        guest.vm.dirty_log(0, bits).unwrap();
        assert_eq!(bits.len(), MEMORY_LEN_BYTES / 4096 / 64);
        bits[0]
    };
    let manual = guest.vm.capabilities().manual_dirty_log;
    if manual == ManualDirtyLog::InitiallySet {
        assert_eq!(read(&mut bits), u64::MAX);
    }
    guest.vm.clear_dirty_log(0, 0, 64, &[u64::MAX]).unwrap();
    assert_eq!(read(&mut bits), 0);
    guest.threads.resume_all();
    guest.wait_for_leave();
    assert_eq!(read(&mut bits), (1 << 3) | (1 << 5));
    if manual != ManualDirtyLog::None {
        // Reading does not clear; clearing takes what it is given only, and arms it again.
        guest.vm.clear_dirty_log(0, 0, 64, &[1 << 5]).unwrap();
        assert_eq!(read(&mut bits), 1 << 3);
        guest.threads.resume_all();
        guest.wait_for_leave();
        assert_eq!(read(&mut bits), (1 << 3) | (1 << 5));
        let bad = guest.vm.clear_dirty_log(0, 0, 63, &[0]);
        assert!(matches!(bad, Err(MemslotError::BadRange { .. })));
    }
    guest.vm.set_dirty_logging(0, false).unwrap();
    let off = guest.vm.dirty_log(0, &mut bits);
    assert!(matches!(off, Err(MemslotError::NotLogged { slot: 0 })));
}

/// A migration reads the log after a round and again at the stop, with nothing sent in between.
#[test]
fn pages_of_two_readings_are_all_noted_where_reading_clears_the_log() {
    let Some(kvm) = kvm() else { return };
    for kvm in [Hypervisor::without_manual_dirty_log(common::kvm().unwrap()), kvm] {
        let (recorder, events) = Recorder::new();
        let (vm, memory) = vm(&kvm, true);
        #[rustfmt::skip]
        memory.write(CODE, &[
            0xa2, 0x00, 0x30,       // mov [0x3000], al
            0xe6, 0x10,             // out LEAVE_PORT, al
            0xa2, 0xff, 0x5f,       // mov [0x5fff], al
            0xe6, 0x10,             // out LEAVE_PORT, al
        ]);
        let vcpu = vm.create_vcpu(0).unwrap();
        boot(&kvm, &vcpu, CODE, 0);
        let guest = Guest { threads: start(vec![vcpu], recorder), events, vm, memory };
        let mut noted = Vec::new();
        guest.vm.add_dirty_log(0, &mut noted).unwrap();
        guest.vm.clear_dirty_log(0, 0, 64, &[u64::MAX]).unwrap();
        noted.fill(0);
        for expected in [1 << 3, 1 << 3 | 1 << 5] {
            guest.threads.resume_all();
            guest.wait_for_leave();
            guest.vm.add_dirty_log(0, &mut noted).unwrap();
            assert_eq!(noted[0], expected, "{:?}", guest.vm.capabilities().manual_dirty_log);
        }
    }
}

#[test]
fn slots_keep_their_mapping_and_give_it_back() {
    let Some(kvm) = kvm() else { return };
    let (vm, memory) = vm(&kvm, false);
    let slot: MemslotConfig = vm.memory_slots()[0];
    // SAFETY: the same mapping, which `memory` keeps; the call is refused.
    let again = unsafe { vm.set_memory_slot(slot, memory.clone()) };
    assert!(matches!(again, Err(MemslotError::Taken { slot: 0 })));
    let overlapping = MemslotConfig { slot: 1, gpa: 0x1000, len_bytes: 0x1000, ..slot };
    // SAFETY: within the same mapping; the kernel refuses the overlap.
    let overlapping = unsafe { vm.set_memory_slot(overlapping, memory.clone()) };
    assert!(matches!(overlapping, Err(MemslotError::Kernel { slot: 1, .. })), "{overlapping:?}");
    assert_eq!(Arc::strong_count(&memory), 2);
    vm.remove_memory_slot(0).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
    assert!(matches!(vm.remove_memory_slot(0), Err(MemslotError::Unknown { slot: 0 })));
}

#[test]
fn a_vcpu_keeps_the_guests_memory_mapped() {
    let Some(kvm) = kvm() else { return };
    let (vm, memory) = vm(&kvm, false);
    let vcpu = vm.create_vcpu(0).unwrap();
    drop(vm);
    assert_eq!(Arc::strong_count(&memory), 2);
    drop(vcpu);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn the_probe_finds_what_this_vmm_needs() {
    let Some(kvm) = kvm() else { return };
    let capabilities = kvm.capabilities();
    eprintln!("{capabilities:#?}");
    assert!(capabilities.memory_slots_max >= 32);
    assert!(capabilities.irq_routes_max >= 1024);
    assert!(!kvm.msr_indices().is_empty());
    assert!(!kvm.supported_cpuid().unwrap().as_slice().is_empty());
    kvm.feature_msrs().unwrap();
}

#[test]
fn what_firmware_would_set_is_set_on_a_vcpu_that_waits_for_its_start() {
    const MISC_ENABLE: u32 = 0x1a0;
    const MTRR_DEFAULT: u32 = 0x2ff;
    let Some(kvm) = kvm() else { return };
    let (vm, _memory) = vm(&kvm, false);
    let vcpu = vm.create_vcpu(1).unwrap();
    let value = |index| vcpu.read_registers(&[index]).unwrap()[0].value;
    let before = value(MISC_ENABLE);
    let mtrr =
        kvm_bindings::kvm_msr_entry { index: MTRR_DEFAULT, data: 0x806, ..Default::default() };
    let bits = vec![(MISC_ENABLE, 1)];
    vcpu.init(&hypervisor::VcpuInit { msrs: vec![mtrr], msr_bits: bits, ..common::waiting(&kvm) })
        .unwrap();
    assert_eq!(value(MTRR_DEFAULT), 0x806);
    assert_eq!(value(MISC_ENABLE), before | 1, "what the processor lacks is still said");
}

/// Without the permission the state component is missing from leaf 0xD, and tile data with it.
#[test]
fn amx_is_whole_or_refused() {
    const TILES: u32 = 1 << 24;
    let Some(kvm) = kvm() else { return };
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let has_tiles = flags.split_whitespace().any(|flag| flag == "amx_tile");
    match kvm.supported_cpuid_with_amx() {
        Ok(cpuid) => {
            let leaf = |function| {
                let leaves = cpuid.as_slice().iter();
                leaves.clone().find(|leaf| (leaf.function, leaf.index) == (function, 0)).unwrap()
            };
            assert_ne!(leaf(7).edx & TILES, 0);
            assert_eq!(leaf(0xd).eax >> 17 & 3, 3);
        }
        // The other tests of this process make vCPUs.
        Err(hypervisor::AmxError::TooLate) => assert!(has_tiles),
        Err(error) => assert!(!has_tiles, "{error}"),
    }
}
