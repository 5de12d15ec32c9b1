// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests on real KVM: exits, pausing, stopping. Skipped without /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use common::{
    CODE, Event, Guest, LEAVE_PORT, MEMORY_LEN_BYTES, PATIENCE, Recorder, boot, kvm, start, vm,
};
use hypervisor::{
    ExitHandler, FaultAction, StopReason, ThreadsConfig, ThreadsError, Vcpu, VcpuThreads,
};
use parking_lot::Mutex;

#[test]
fn a_guest_writes_ports_and_can_be_paused_in_hlt() {
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0xba, 0x70, 0x00,       // mov dx, 0x70
        0xb0, b'H',             // mov al, 'H'
        0xee,                   // out dx, al
        0xb8, b'i', b'!',       // mov ax, "i!"
        0xef,                   // out dx, ax
        0xf4,                   // hlt
        0xeb, 0xfd,             // jmp to the hlt
    ]);
    assert_eq!(guest.threads.first_run(), None);
    let before = Instant::now();
    guest.threads.resume_all();
    assert_eq!(guest.next(), Event::Out(0x70, b"H".to_vec()));
    assert_eq!(guest.next(), Event::Out(0x70, b"i!".to_vec()));
    assert!(guest.threads.first_run().unwrap() >= before);
    guest.threads.pause_all().unwrap();
    assert!(guest.threads.all_parked());
}

#[test]
fn a_string_instruction_is_split_into_its_elements() {
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0xfc,                   // cld
        0xbe, 0x00, 0x20,       // mov si, 0x2000
        0xb9, 0x03, 0x00,       // mov cx, 3
        0xba, 0x70, 0x00,       // mov dx, 0x70
        0xf3, 0x6e,             // rep outsb
        0xb9, 0x02, 0x00,       // mov cx, 2
        0xf3, 0x6f,             // rep outsw
        0xf4,                   // hlt
    ]);
    guest.memory.write(0x2000, b"abcdefg");
    guest.threads.resume_all();
    for expected in [&b"a"[..], b"b", b"c", b"de", b"fg"] {
        assert_eq!(guest.next(), Event::Out(0x70, expected.to_vec()));
    }
}

#[test]
fn a_vcpu_that_leaves_has_finished_its_access_and_continues_after_it() {
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0xe4, 0x5a,             // in al, 0x5a
        0xe6, 0x10,             // out LEAVE_PORT, al
        0xe6, 0x70,             // out 0x70, al
        0xf4,                   // hlt
    ]);
    guest.threads.resume_all();
    guest.wait_for_leave();
    let (rip, rax) = guest
        .threads
        .on_one(0, |vcpu| vcpu.regs().map(|regs| (regs.rip, regs.rax)).unwrap())
        .unwrap();
    assert_eq!((rip, rax & 0xff), (u64::from(CODE) + 4, 0x5a));
    guest.threads.resume_all();
    assert_eq!(guest.next(), Event::Out(0x70, vec![0x5a]));
}

/// A handler waits on its thread, as for a page that does not come: a kick gets it out at any moment.
fn a_kick_gets_a_vcpu_out(equip: impl FnOnce(&mut Recorder) + Send + 'static) {
    let Some(kvm) = kvm() else { return };
    let (done, finished) = channel();
    std::thread::spawn(move || {
        let (vm, memory) = vm(&kvm, false);
        memory.write(CODE, &[0xe6, 0x70, 0xeb, 0xfc]); // out 0x70, al; loop
        let vcpu = vm.create_vcpu(0).unwrap();
        boot(&kvm, &vcpu, CODE, 0);
        let (mut recorder, _events) = Recorder::new();
        equip(&mut recorder);
        let threads = start(vec![vcpu], recorder);
        for round in 0..500 {
            threads.resume_all();
            (0..round * 20).for_each(|_| std::hint::spin_loop());
            threads.pause_all().unwrap();
            assert!(threads.all_parked());
        }
        done.send(()).unwrap();
    });
    finished.recv_timeout(PATIENCE).expect("a kick was lost");
}

#[test]
fn a_kick_gets_a_vcpu_out_of_a_sleep_in_its_handler() {
    a_kick_gets_a_vcpu_out(|recorder| recorder.on_out = Some(Box::new(std::thread::park)));
}

#[test]
fn a_kick_is_told_to_a_handler_that_waits_for_something_else_as_well() {
    a_kick_gets_a_vcpu_out(|recorder| {
        let (kick, kicked) = sync_channel(1);
        let kicked = Mutex::new(kicked);
        recorder.on_kick = Some(Box::new(move |vcpu| {
            // One that was not taken is enough.
            let _ = kick.try_send(vcpu);
        }));
        recorder.on_out = Some(Box::new(move || assert_eq!(kicked.lock().recv(), Ok(0))));
    });
}

/// Two vCPUs loop, one in the guest, one through its handler; no kick may be lost.
#[test]
fn a_thousand_pauses_never_lose_a_kick() {
    let Some(kvm) = kvm() else { return };
    let (done, finished) = channel();
    let work = std::thread::spawn(move || {
        let (vm, memory) = vm(&kvm, false);
        memory.write(CODE, &[0x66, 0xff, 0x06, 0x00, 0x20, 0xeb, 0xf9]); // inc dword [0x2000]; loop
        memory.write(0x1100, &[0xe4, 0x70, 0xeb, 0xfc]); // in al, 0x70; loop
        let vcpus: Vec<_> = [CODE, 0x1100]
            .into_iter()
            .zip(0..)
            .map(|(entry, index)| {
                let vcpu = vm.create_vcpu(index).unwrap();
                boot(&kvm, &vcpu, entry, 0);
                vcpu
            })
            .collect();
        let (recorder, _events) = Recorder::new();
        let threads = start(vcpus, recorder);
        let mut longest = Duration::ZERO;
        for round in 0..1000 {
            let count = memory.read_u32(0x2000);
            threads.resume_all();
            match round % 4 {
                // At once, so that the kick meets a thread that is about to enter the guest;
                0 => {}
                // a little later, at moments that differ;
                1 => (0..round * 10).for_each(|_| std::hint::spin_loop()),
                // in the guest.
                _ => {
                    while memory.read_u32(0x2000) == count {
                        std::thread::yield_now();
                    }
                }
            }
            let begin = Instant::now();
            threads.pause_all().unwrap();
            longest = longest.max(begin.elapsed());
            assert!(threads.all_parked());
            let count = memory.read_u32(0x2000);
            if round % 50 == 0 {
                // Parked means parked.
                std::thread::yield_now();
                assert_eq!(memory.read_u32(0x2000), count);
            }
        }
        // The guest still runs.
        let count = memory.read_u32(0x2000);
        threads.resume_all();
        while memory.read_u32(0x2000) == count {
            std::thread::yield_now();
        }
        threads.stop_all().unwrap();
        done.send(longest).unwrap();
    });
    match finished.recv_timeout(PATIENCE) {
        Ok(longest) => assert!(longest < Duration::from_secs(5), "{longest:?}"),
        Err(error) => panic!("a kick was lost, or the guest stands still: {error}"),
    }
    work.join().unwrap();
}

#[test]
fn an_application_processor_waits_for_init_and_sipi() {
    let Some(kvm) = kvm() else { return };
    let (vm, memory) = vm(&kvm, false);
    #[rustfmt::skip]
    memory.write(CODE, &[ // data segment at the local APIC
        0x66, 0xc7, 0x06, 0x10, 0x03, 0, 0, 0, 1,       // mov dword [0x310], 1 << 24
        0x66, 0xc7, 0x06, 0x00, 0x03, 0, 0x45, 0, 0,    // mov dword [0x300], INIT
        0x66, 0xc7, 0x06, 0x00, 0x03, 2, 0x46, 0, 0,    // mov dword [0x300], SIPI to 0x2000
        0xf4,                                           // hlt
    ]);
    memory.write(0x2000, &[0xe6, 0x77, 0xf4]); // out 0x77, al; hlt
    let boot_vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &boot_vcpu, CODE, 0xfee0_0000);
    let second = vm.create_vcpu(1).unwrap();
    second.init(&common::waiting(&kvm)).unwrap();
    let (recorder, events) = Recorder::new();
    let threads = start(vec![boot_vcpu, second], recorder);
    threads.resume_all();
    // A vCPU that waits for its start can be paused as well.
    threads.pause_all().unwrap();
    threads.resume_all();
    let event = events.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, Event::Out(0x77, _)), "{event:?}");
}

#[test]
fn a_triple_fault_stops_its_vcpu_and_leaves_its_state_readable() {
    let Some(kvm) = kvm() else { return };
    // lidt [0x2000], which is empty; ud2
    let guest = Guest::new(&kvm, &[0x0f, 0x01, 0x1e, 0x00, 0x20, 0x0f, 0x0b]);
    guest.threads.resume_all();
    assert_eq!(guest.next(), Event::Stopped(0, StopReason::Shutdown));
    guest.threads.pause_all().unwrap();
    guest.threads.resume_all();
    assert!(guest.threads.all_parked());
    guest.threads.on_one(0, |vcpu| vcpu.regs().map(drop).unwrap()).unwrap();
}

#[test]
fn a_memory_fault_is_reported_and_can_be_retried() {
    let Some(kvm) = kvm() else { return };
    let (vm, memory) = vm(&kvm, false);
    // mov [0x5000], al; out LEAVE_PORT, al
    memory.write(CODE, &[0xa2, 0x00, 0x50, 0xe6, 0x10]);
    memory.write(0x5000, &[1]);
    memory.protect(5, libc::PROT_NONE);
    let (mut recorder, events) = Recorder::new();
    let target = Arc::clone(&memory);
    recorder.on_fault = Some(Box::new(move |access| {
        assert!(access.gpa.is_none_or(|gpa| gpa & !0xfff == 0x5000));
        target.protect(5, libc::PROT_READ | libc::PROT_WRITE);
        FaultAction::Retry
    }));
    let vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &vcpu, CODE, 0);
    let threads = start(vec![vcpu], recorder);
    threads.resume_all();
    match events.recv_timeout(PATIENCE).unwrap() {
        Event::Fault(_) => {
            let event = events.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(event, Event::Out(LEAVE_PORT, _)), "{event:?}");
        }
        // An emulated write that meets the fault becomes MMIO, as if there were no memory.
        event => assert!(matches!(event, Event::MmioWrite(0x5000, _)), "{event:?}"),
    }
}

#[test]
fn only_parked_vcpus_take_closures_and_each_runs_on_its_own_thread() {
    let Some(kvm) = kvm() else { return };
    let guest = Guest::new(&kvm, &[0xeb, 0xfe]);
    let name = guest
        .threads
        .on_each(|vcpu| (vcpu.index(), std::thread::current().name().map(str::to_owned)))
        .unwrap();
    assert_eq!(name, [(0, Some("vcpu0".to_owned()))]);
    let unknown = guest.threads.on_one(7, |_| ()).unwrap_err();
    assert!(matches!(unknown, ThreadsError::Unknown { index: 7 }));
    guest.threads.resume_all();
    let running = guest.threads.on_one(0, |_| ()).unwrap_err();
    assert!(matches!(running, ThreadsError::NotParked { index: 0 }));
    guest.threads.pause_all().unwrap();
    guest.rip();
    guest.threads.stop_all().unwrap();
    assert!(matches!(guest.threads.on_one(0, |_| ()), Err(ThreadsError::Exited { .. })));
}

#[test]
fn a_vcpu_thread_cannot_wait_for_vcpus() {
    let Some(kvm) = kvm() else { return };
    let (vm, memory) = vm(&kvm, false);
    memory.write(CODE, &[0xe6, 0x70, 0xf4]);
    let vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &vcpu, CODE, 0);
    let threads: Arc<OnceLock<Weak<VcpuThreads>>> = Arc::default();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let (mut recorder, events) = Recorder::new();
    let (seen, kept) = (Arc::clone(&threads), Arc::clone(&answers));
    recorder.on_out = Some(Box::new(move || {
        let threads = seen.get().and_then(Weak::upgrade).unwrap();
        kept.lock().push((threads.pause_all(), threads.stop_all()));
    }));
    let running = Arc::new(start(vec![vcpu], recorder));
    threads.set(Arc::downgrade(&running)).unwrap();
    running.resume_all();
    events.recv_timeout(PATIENCE).unwrap();
    let answers = answers.lock();
    let [(pause, stop)] = answers.as_slice() else { panic!("{answers:?}") };
    assert!(matches!(pause, Err(ThreadsError::FromVcpu)));
    assert!(matches!(stop, Err(ThreadsError::FromVcpu)));
}

#[test]
fn a_hook_that_fails_is_an_error_of_the_start() {
    let Some(kvm) = kvm() else { return };
    let (vm, _memory) = vm(&kvm, false);
    let vcpu = vm.create_vcpu(0).unwrap();
    let handler: Arc<dyn ExitHandler> = Arc::new(Recorder::new().0);
    let on_start = Arc::new(|_index| Err(std::io::Error::from_raw_os_error(libc::EPERM)));
    let config = ThreadsConfig { handler, on_start: Some(on_start) };
    let answer = VcpuThreads::start(vec![vcpu], config);
    assert!(matches!(answer.map(drop), Err(ThreadsError::Start { index: 0, .. })));
}

/// A guest that counts in its memory is kept out for as long as the throttle says and gets in between, can be
/// paused and stopped in the middle of it, and runs freely afterwards. A busy host may keep it out as well, but
/// lets it in again and again.
#[test]
fn a_throttled_vcpu_runs_its_share_and_can_be_paused_at_any_time() {
    // Of 100 ms outside.
    const OUTSIDE: Duration = Duration::from_millis(50);
    const TURN: Duration = Duration::from_millis(100);
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0x66, 0xff, 0x06, 0x00, 0x20,   // inc dword [0x2000]
        0xeb, 0xf9,                     // jmp to it
    ]);
    let runs_for = |time: Duration| {
        let before = guest.memory.read_u32(0x2000);
        std::thread::sleep(time);
        guest.memory.read_u32(0x2000) != before
    };
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < PATIENCE, "{what}");
        }
    };
    // Longer than a throttle of 99 % lets it run.
    let runs_freely = || (0..6).all(|_| runs_for(TURN / 5));
    guest.threads.resume_all();
    until("it never runs freely", &runs_freely);
    let throttle = guest.threads.throttle().unwrap();
    throttle.set(99);
    for _ in 0..5 {
        until("it is never kept out", &|| !runs_for(OUTSIDE));
        until("it stands still", &|| runs_for(TURN));
    }
    let begin = Instant::now();
    for _ in 0..100 {
        guest.threads.pause_all().unwrap();
        assert!(guest.threads.all_parked());
        guest.threads.resume_all();
    }
    assert!(begin.elapsed() < PATIENCE, "a pause waits for the throttle");
    drop(throttle);
    until("it is still kept out", &runs_freely);
    let throttle = guest.threads.throttle().unwrap();
    throttle.set(99);
    guest.threads.stop_all().unwrap();
}

/// Tables are filled on the vCPUs' threads while they run, and while they are paused in the middle of
/// it. Where KVM cannot fill them, it says so on such a thread.
#[test]
fn a_vcpu_fills_its_tables_and_goes_back_to_the_guest() {
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0x66, 0xff, 0x06, 0x00, 0x20,   // inc dword [0x2000]
        0xeb, 0xf9,                     // jmp to it
    ]);
    let memory_bytes = u64::try_from(MEMORY_LEN_BYTES).unwrap();
    guest.threads.resume_all();
    for round in 0..100 {
        let (tell, told) = channel();
        let runs = move || vec![0..4096, 4096..memory_bytes];
        let filling = guest.threads.fill_stage2(runs, move |end| tell.send(end).unwrap()).unwrap();
        if round % 2 == 0 {
            guest.threads.pause_all().unwrap();
            guest.threads.resume_all();
        }
        let end = told.recv_timeout(PATIENCE).expect("the vCPU does not come for its task");
        drop(filling);
        assert!(!end.is_stopped, "{end:?}");
        if kvm.capabilities().pre_fault_memory {
            assert!(end.error.is_none() && end.filled_bytes == memory_bytes, "{end:?}");
        } else {
            assert!(end.error.is_some() && end.filled_bytes == 0, "{end:?}");
        }
        let count = guest.memory.read_u32(0x2000);
        let begin = Instant::now();
        while guest.memory.read_u32(0x2000) == count {
            assert!(begin.elapsed() < PATIENCE, "the guest stands still");
            std::thread::yield_now();
        }
    }
    guest.threads.stop_all().unwrap();
}

/// A vCPU that was removed is out of the guest for good, and one that is added again waits to be started.
#[test]
fn a_vcpu_is_added_removed_and_added_again() {
    let Some(kvm) = kvm() else { return };
    // Both write their ports endlessly.
    let mut guest = Guest::new(&kvm, &[0xe6, 0x71, 0xeb, 0xfc]);
    guest.memory.write(0x2000, &[0xe6, 0x72, 0xeb, 0xfc]);
    let second = guest.vm.create_vcpu(1).unwrap();
    common::boot(&kvm, &second, 0x2000, 0);
    let tsc = guest.threads.on_one(0, |vcpu| vcpu.shared_tsc()).unwrap().unwrap();
    second.follow_tsc(&tsc).unwrap();
    assert_eq!(second.shared_tsc().unwrap(), tsc);
    guest.threads.add(vec![second]).map_err(|refused| refused.error).unwrap();
    assert_eq!(guest.threads.count(), 2);
    let seen = |guest: &Guest, port: u16| {
        let begin = Instant::now();
        while !matches!(guest.next(), Event::Out(at, _) if at == port) {
            assert!(begin.elapsed() < PATIENCE, "nothing at {port:#x}");
        }
    };
    guest.threads.resume_all();
    seen(&guest, 0x72);
    seen(&guest, 0x71);
    let kept = guest.threads.interrupt(0, |vcpu| vcpu.index(), || true).unwrap();
    assert_eq!(kept, 0);
    guest.threads.remove_last();
    assert_eq!(guest.threads.count(), 1);
    guest.threads.pause_all().unwrap();
    assert!(guest.threads.all_parked());
    while guest.events.try_recv().is_ok() {}
    guest.threads.resume_all();
    for _ in 0..1_000 {
        assert!(matches!(guest.next(), Event::Out(0x71, _)), "a removed vCPU runs");
    }
    let unknown = guest.threads.add_again(7, |vcpu| vcpu.wait_for_start()).unwrap();
    assert!(!unknown.unwrap());
    assert!(guest.threads.add_again(1, |vcpu| vcpu.wait_for_start()).unwrap().unwrap());
    guest.threads.resume_all();
    for _ in 0..1_000 {
        assert!(matches!(guest.next(), Event::Out(0x71, _)), "it runs before it is started");
    }
    guest.threads.stop_all().unwrap();
}

/// KVM makes no second vCPU of a number, so those that could not be added have to come back.
#[test]
fn vcpus_whose_thread_cannot_be_set_up_come_back() {
    let Some(kvm) = kvm() else { return };
    let (recorder, _events) = Recorder::new();
    let (vm, _memory) = vm(&kvm, false);
    let fails = Arc::new(AtomicBool::new(true));
    let on_start = {
        let fails = Arc::clone(&fails);
        Arc::new(move |index: u32| match index {
            2 if fails.load(Ordering::SeqCst) => Err(std::io::Error::other("no such CPU")),
            _ => Ok(()),
        })
    };
    let config = ThreadsConfig { handler: Arc::new(recorder), on_start: Some(on_start) };
    let make = |index| vm.create_vcpu(index).unwrap();
    let mut threads = VcpuThreads::start(vec![make(0)], config).unwrap();
    let refused = threads.add(vec![make(1), make(2), make(3)]).err().unwrap();
    assert!(matches!(refused.error, ThreadsError::Start { index: 2, .. }), "{}", refused.error);
    assert_eq!((refused.added, threads.count()), (1, 2));
    let indexes: Vec<u32> = refused.unused.iter().map(Vcpu::index).collect();
    assert_eq!(indexes, [2]);
    assert!(vm.create_vcpu(2).is_err(), "KVM has made a second one");
    fails.store(false, Ordering::SeqCst);
    threads.add(refused.unused).map_err(|refused| refused.error).unwrap();
    assert!(threads.add_again(3, |vcpu| vcpu.wait_for_start()).unwrap().unwrap());
    assert_eq!(threads.count(), 4);
    assert_eq!(threads.on_each(|vcpu| vcpu.index()).unwrap(), [0, 1, 2, 3]);
    threads.stop_all().unwrap();
}

/// The flag of the guest's clock page is set (KVM's documents of the kvmclock MSRs), whatever the vCPU does, and
/// none is kept from the guest.
#[test]
fn a_standstill_is_reported_at_any_time() {
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0x66, 0xb9, 0x01, 0x4d, 0x56, 0x4b, // mov ecx, MSR_KVM_SYSTEM_TIME_NEW
        0x66, 0xb8, 0x01, 0x30, 0x00, 0x00, // mov eax, 0x3000 and enabled
        0x66, 0x31, 0xd2,                   // xor edx, edx
        0x0f, 0x30,                         // wrmsr
        0xe6, 0x71,                         // out 0x71, al: ready
        0xeb, 0xfe,                         // jmp to itself
    ]);
    let flags = || guest.memory.read_u32(0x3000 + 28) >> 8 & 0xff;
    let has_stood_still = || flags() & 2 != 0;
    let standstill = guest.threads.standstill();
    guest.threads.resume_all();
    assert!(matches!(guest.next(), Event::Out(0x71, _)));
    assert!(!has_stood_still());
    for is_paused in [false, true] {
        if is_paused {
            guest.threads.pause_all().unwrap();
        }
        guest.memory.write(0x3000 + 29, &[0]);
        standstill.report();
        if is_paused {
            guest.threads.resume_all();
        }
        let begin = Instant::now();
        while !has_stood_still() {
            assert!(begin.elapsed() < PATIENCE, "the guest is not told, paused: {is_paused}");
            std::thread::yield_now();
        }
    }
    guest.threads.stop_all().unwrap();
    drop(guest);
    standstill.report();
}
