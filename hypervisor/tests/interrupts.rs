// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupts and I/O events on real KVM. Skipped without /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::os::fd::AsRawFd as _;
use std::time::Instant;

use common::{CODE, Event, Guest, PATIENCE, Recorder, boot, kvm, start, vm};
use hypervisor::irq::{IoEventAddress, IoEvents, MsiMessage, MsiSource};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// A guest that enables its local APIC, and reports each interrupt 0x41 on port 0x70.
fn interruptible() -> Option<Guest> {
    let kvm = kvm()?;
    let (recorder, events) = Recorder::new();
    let (vm, memory) = vm(&kvm, false);
    #[rustfmt::skip]
    memory.write(CODE, &[ // data segment at the local APIC
        0x66, 0xc7, 0x06, 0xf0, 0x00, 0xff, 0x01, 0, 0, // mov dword [0xf0], 0x1ff
        0xe6, 0x71,                                     // out 0x71, al: ready
        0xfb,                                           // sti
        0xf4,                                           // hlt
        0xeb, 0xfd,                                     // jmp to the hlt
    ]);
    #[rustfmt::skip]
    memory.write(0x2000, &[
        0xe6, 0x70,                                     // out 0x70, al
        0x66, 0xc7, 0x06, 0xb0, 0x00, 0, 0, 0, 0,       // mov dword [0xb0], 0: end of interrupt
        0xcf,                                           // iret
    ]);
    memory.write(0x41 * 4, &[0x00, 0x20, 0x00, 0x00]);
    let vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &vcpu, CODE, 0xfee0_0000);
    let guest = Guest { threads: start(vec![vcpu], recorder), events, vm, memory };
    guest.threads.resume_all();
    assert!(matches!(guest.next(), Event::Out(0x71, _)));
    Some(guest)
}

const MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_0000, data: 0x41 };

fn expect_interrupt(guest: &Guest) {
    let event = guest.next();
    assert!(matches!(event, Event::Out(0x70, _)), "{event:?}");
}

#[test]
fn a_message_interrupts_the_guest() {
    let Some(guest) = interruptible() else { return };
    let vector = guest.vm.create_vector().unwrap();
    vector.program(MESSAGE).unwrap();
    for _ in 0..3 {
        vector.trigger().unwrap();
        expect_interrupt(&guest);
    }
}

#[test]
fn a_trigger_that_came_while_masked_is_delivered_once_when_unmasked() {
    let Some(guest) = interruptible() else { return };
    let vector = guest.vm.create_vector().unwrap();
    vector.trigger().unwrap();
    vector.trigger().unwrap();
    assert!(guest.events.try_recv().is_err());
    vector.program(MESSAGE).unwrap();
    expect_interrupt(&guest);
    vector.mask().unwrap();
    vector.mask().unwrap();
    vector.trigger().unwrap();
    vector.program(MESSAGE).unwrap();
    expect_interrupt(&guest);
    assert!(guest.events.try_recv().is_err());
}

#[test]
fn a_pending_trigger_can_be_taken_only_while_masked() {
    let Some(guest) = interruptible() else { return };
    let vector = guest.vm.create_vector().unwrap();
    assert!(!vector.take_pending());
    vector.trigger().unwrap();
    assert!(vector.take_pending());
    assert!(!vector.take_pending());
    vector.program(MESSAGE).unwrap();
    vector.trigger().unwrap();
    expect_interrupt(&guest);
    assert!(!vector.take_pending());
}

#[test]
fn a_process_that_has_the_eventfd_keeps_no_thread_waiting() {
    let Some(guest) = interruptible() else { return };
    let vector = guest.vm.create_vector().unwrap();
    // The flag is that of the open file, which all that have a descriptor of it share.
    // SAFETY: plain values, and the descriptor is open.
    assert_eq!(unsafe { libc::fcntl(vector.eventfd().as_raw_fd(), libc::F_SETFL, 0) }, 0);
    assert!(!vector.take_pending());
    vector.trigger().unwrap();
    assert!(vector.take_pending());
    vector.program(MESSAGE).unwrap();
    vector.redeliver(MESSAGE).unwrap();
    expect_interrupt(&guest);
    assert!(guest.events.try_recv().is_err());
}

#[test]
fn a_vector_can_be_moved_and_dropped_while_others_work() {
    let Some(guest) = interruptible() else { return };
    let first = guest.vm.create_vector().unwrap();
    let second = guest.vm.create_vector().unwrap();
    // Vector 0x42 has no handler: were it raised, the guest would end.
    first.program(MsiMessage { data: 0x42, ..MESSAGE }).unwrap();
    second.program(MESSAGE).unwrap();
    first.program(MESSAGE).unwrap();
    first.trigger().unwrap();
    expect_interrupt(&guest);
    drop(first);
    second.trigger().unwrap();
    expect_interrupt(&guest);
}

#[test]
fn vectors_run_out_with_an_error_and_come_back() {
    let Some(kvm) = kvm() else { return };
    let (vm, _memory) = vm(&kvm, false);
    // Each vector has an eventfd, so that the limit of open files may be met first.
    let mut vectors: Vec<_> = (0..200).map(|_| vm.create_vector().unwrap()).collect();
    for (vector, data) in vectors.iter().zip(0..) {
        vector.program(MsiMessage { address: 0xfee0_0000, data }).unwrap();
    }
    vectors.truncate(100);
    vectors.extend((0..100).map(|_| vm.create_vector().unwrap()));
}

#[test]
fn an_interrupt_line_reaches_the_pic() {
    let Some(kvm) = kvm() else { return };
    let (recorder, events) = Recorder::new();
    let (vm, memory) = vm(&kvm, false);
    #[rustfmt::skip]
    memory.write(CODE, &[
        0xb0, 0x11, 0xe6, 0xa6, // a write to an unassigned port, to see that recording works
        0xb0, 0x11, 0xe6, 0x20, // mov al, 0x11; out 0x20, al: begin to initialise the PIC
        0xb0, 0x40, 0xe6, 0x21, // vectors from 0x40
        0xb0, 0x04, 0xe6, 0x21, // the other PIC is on line 2
        0xb0, 0x01, 0xe6, 0x21, // 8086 mode
        0xb0, 0xef, 0xe6, 0x21, // only line 4
        0xe6, 0xa7, 0xfb,       // ready; sti
        0xf4, 0xeb, 0xfd,       // hlt forever
    ]);
    memory.write(0x2000, &[0xe6, 0xa8, 0xb0, 0x20, 0xe6, 0x20, 0xcf]); // out; end; iret
    memory.write(0x44 * 4, &[0x00, 0x20, 0x00, 0x00]);
    let vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &vcpu, CODE, 0);
    let threads = start(vec![vcpu], recorder);
    let guest = Guest { threads, events, vm, memory };
    guest.threads.resume_all();
    assert!(matches!(guest.next(), Event::Out(0xa6, _)));
    assert!(matches!(guest.next(), Event::Out(0xa7, _)));
    let line = guest.vm.create_line(4).unwrap();
    assert_eq!(line.gsi(), 4);
    for _ in 0..2 {
        line.trigger().unwrap();
        assert!(matches!(guest.next(), Event::Out(0xa8, _)));
    }
    assert!(guest.vm.create_line(24).is_err());
}

#[test]
fn level_lines_share_a_number_and_take_it_back() {
    let Some(kvm) = kvm() else { return };
    let (vm, _memory) = vm(&kvm, false);
    assert!(vm.create_level_line(24).is_err());
    for _ in 0..2 {
        let lines = [16, 16, 23].map(|gsi| vm.create_level_line(gsi).unwrap());
        for line in &lines {
            line.event().write(1).unwrap();
        }
    }
}

#[test]
fn a_write_signals_an_eventfd_without_an_exit() {
    let Some(kvm) = kvm() else { return };
    let (recorder, events) = Recorder::new();
    let (vm, memory) = vm(&kvm, false);
    #[rustfmt::skip]
    memory.write(CODE, &[ // data segment where there is no memory
        0xe6, 0x50,             // out 0x50, al
        0xa2, 0x08, 0x00,       // mov [8], al
        0x66, 0xa3, 0x08, 0x00, // mov [8], eax
        0xe6, 0x51,             // out 0x51, al
        0xe6, 0x50,             // out 0x50, al
        0xf4,                   // hlt
    ]);
    let vcpu = vm.create_vcpu(0).unwrap();
    boot(&kvm, &vcpu, CODE, 0xd000_0000);
    let [port, memory_event] = [0; 2].map(|_| EventFd::new(EFD_NONBLOCK).unwrap());
    vm.register(&port, IoEventAddress::Pio(0x50)).unwrap();
    vm.register(&memory_event, IoEventAddress::Mmio(0xd000_0008)).unwrap();
    let events_of = Guest { threads: start(vec![vcpu], recorder), events, vm, memory };
    events_of.threads.resume_all();
    assert!(matches!(events_of.next(), Event::Out(0x51, _)));
    let deadline = Instant::now() + PATIENCE;
    let mut signals = 0;
    while signals < 2 && Instant::now() < deadline {
        signals += port.read().unwrap_or(0);
        std::thread::yield_now();
    }
    assert_eq!(signals, 2);
    assert_eq!(memory_event.read().unwrap(), 2);
    let vm = &events_of.vm;
    vm.unregister(&port, IoEventAddress::Pio(0x50)).unwrap();
    assert!(vm.unregister(&port, IoEventAddress::Pio(0x50)).is_err());
}

/// A guest without maskable interrupts that reports each non-maskable one on port 0x70.
#[test]
fn a_non_maskable_interrupt_reaches_a_guest_that_runs_and_one_that_is_paused() {
    let Some(kvm) = kvm() else { return };
    #[rustfmt::skip]
    let guest = Guest::new(&kvm, &[
        0xe6, 0x71, // out 0x71, al: ready
        0xf4,       // hlt
        0xeb, 0xfd, // jmp to the hlt
    ]);
    #[rustfmt::skip]
    guest.memory.write(0x2000, &[
        0xe6, 0x70, // out 0x70, al
        0xcf,       // iret, which lets the next one in
    ]);
    guest.memory.write(2 * 4, &[0x00, 0x20, 0x00, 0x00]);
    guest.threads.resume_all();
    assert!(matches!(guest.next(), Event::Out(0x71, _)));
    for _ in 0..3 {
        guest.threads.send_nmi();
        expect_interrupt(&guest);
    }
    guest.threads.pause_all().unwrap();
    guest.threads.send_nmi();
    // A job that comes behind it: nothing is reported while the guest is paused.
    guest.threads.on_one(0, |_| ()).unwrap();
    assert!(guest.events.try_recv().is_err());
    guest.threads.resume_all();
    expect_interrupt(&guest);
}
