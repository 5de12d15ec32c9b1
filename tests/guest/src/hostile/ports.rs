// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accesses to I/O ports, of devices and of none, in every width.
//!
//! Owns the vCPU that makes them: CPL 3 cannot everywhere, so one that was never started works through a table of
//! them in real mode, and halts. Must never write what switches the machine off or resets it, which is no fault.

use core::arch::global_asm;

use super::{Attacker, low_half, low_quarter};
use crate::abi;
use crate::mem;
use crate::smp;

/// The table: how many, whether all are done, and the accesses.
const TABLE_GPA: u64 = abi::TRAMPOLINE_GPA + abi::PAGE_BYTES;
const DONE_GPA: u64 = TABLE_GPA + 2;
const ACCESSES_GPA: u64 = TABLE_GPA + 16;
const ACCESS_BYTES: u64 = 8;
const ACCESSES_MAX: u64 = 48;
/// What string instructions read and write.
const STRING_GPA: u64 = TABLE_GPA + 0x800;
const STRING_BYTES_MAX: u64 = 255;
const STRING_ROOM_BYTES: u64 = 0x400;

/// Twice the number of an operation, as in the table of jumps: writes of 1, 2 and 4 bytes, reads of them, strings of
/// them that are written and read.
const WRITES: u64 = 3;
const READS: u64 = 3;
const OPERATIONS: u64 = 12;
const WRITE_BYTE: u64 = 0;
const FIRST_STRING: u64 = WRITES + READS;
const FIRST_STRING_READ: u64 = FIRST_STRING + WRITES;

/// The accesses after which the idle vCPU is not asked again: it is not there.
const FAILURES_MAX: u32 = 4;

/// Ports of devices, and how many: keyboard controller, clock, POST code, debug console, serial port, firmware output,
/// ACPI power, timer, event device, PCI hot-plug, vCPU hot-plug, memory hot-plug, PCI configuration, both PICs, PIT,
/// what other machines have.
const PORTS: [(u16, u64); 21] = [
    (0x60, 5),
    (0x70, 2),
    (0x80, 1),
    (0xe9, 1),
    (0x3f8, 8),
    (0x402, 1),
    (POWER, 8),
    (0x608, 4),
    (0x60c, 4),
    (PCI_HOTPLUG, 16),
    (CPU_HOTPLUG, 64),
    (MEMORY_HOTPLUG, 0x90),
    (PCI_ADDRESS, 8),
    (0x20, 2),
    (0xa0, 2),
    (0x40, 4),
    (0x92, 1),
    (0x4d0, 2),
    (0x505, 1),
    (0x510, 12),
    (0xcf9, 1),
];
const POWER: u16 = 0x600;
const POWER_VALUES: [u8; 2] = [1, 5 << 2 | 1 << 5];
const KEYBOARD: u16 = 0x64;
const KEYBOARD_RESET: u8 = 0xfe;
const PCI_HOTPLUG: u16 = 0x610;
const PCI_EJECT: u16 = PCI_HOTPLUG + 8;
const PCI_SEGMENT: u16 = PCI_HOTPLUG + 12;
const CPU_HOTPLUG: u16 = 0x640;
const CPU_EJECT: u16 = CPU_HOTPLUG + 4;
const MEMORY_HOTPLUG: u16 = 0x680;
const PCI_ADDRESS: u16 = 0xcf8;
const PCI_DATA: u16 = 0xcfc;

unsafe extern "C" {
    static port_worker: u8;
    static port_worker_end: u8;
}

global_asm!(
    r#"
    .macro call_string instruction
    movw  %si, %bp
    movw  %cx, %bx
    movzbw 3(%si), %cx
    movw  ${string}, %si
    movw  %si, %di
    rep \instruction
    movw  %bp, %si
    movw  %bx, %cx
    jmp   8f
    .endm
    .section .text.boot,"ax",@progbits
    .balign 16
    .code16
    .globl port_worker
port_worker:
    cld
    xorw  %ax, %ax
    movw  %ax, %ds
    movw  %ax, %es
    movw  %ax, %ss
    movw  ${table}, %si
    movw  (%si), %cx
    addw  $16, %si
1:  testw %cx, %cx
    jz    9f
    movw  (%si), %dx
    movzbw 2(%si), %bx
    movl  4(%si), %eax
    jmp   *%cs:(port_jumps - port_worker)(%bx)
port_out8:
    outb  %al, %dx
    jmp   8f
port_out16:
    outw  %ax, %dx
    jmp   8f
port_out32:
    outl  %eax, %dx
    jmp   8f
port_in8:
    inb   %dx, %al
    jmp   7f
port_in16:
    inw   %dx, %ax
    jmp   7f
port_in32:
    inl   %dx, %eax
7:  movl  %eax, 4(%si)
    jmp   8f
port_outs8:
    call_string outsb
port_outs16:
    call_string outsw
port_outs32:
    call_string outsl
port_ins8:
    call_string insb
port_ins16:
    call_string insw
port_ins32:
    call_string insl
8:  addw  $8, %si
    decw  %cx
    jmp   1b
9:  movb  $1, {done}
1:  hlt
    jmp   1b
    .balign 2
port_jumps:
    .word port_out8 - port_worker, port_out16 - port_worker, port_out32 - port_worker
    .word port_in8 - port_worker, port_in16 - port_worker, port_in32 - port_worker
    .word port_outs8 - port_worker, port_outs16 - port_worker, port_outs32 - port_worker
    .word port_ins8 - port_worker, port_ins16 - port_worker, port_ins32 - port_worker
    .globl port_worker_end
port_worker_end:
    .code64
    .text
"#,
    table = const TABLE_GPA,
    done = const DONE_GPA,
    string = const STRING_GPA,
    options(att_syntax)
);

/// The vCPU that makes the accesses.
#[derive(Clone, Copy)]
pub(super) struct Ports {
    pub vcpu: u64,
    pub khz: u64,
    failures: u32,
}

impl Ports {
    pub(super) fn new(vcpu: u64, khz: u64) -> Self {
        Self { vcpu, khz, failures: 0 }
    }
}

/// One access.
#[derive(Clone, Copy)]
struct Access {
    port: u16,
    operation: u64,
    value: u32,
}

impl Access {
    /// Whether it is what ends the machine by design.
    fn ends_all(self) -> bool {
        let Self { port, operation, value } = self;
        let byte = value.to_le_bytes()[0];
        let is_string = (FIRST_STRING..FIRST_STRING_READ).contains(&operation);
        match port {
            POWER => is_string || operation < WRITES && POWER_VALUES.contains(&byte),
            KEYBOARD => is_string || operation == WRITE_BYTE && byte == KEYBOARD_RESET,
            _ => false,
        }
    }
}

impl Attacker {
    /// Makes a table full of accesses; returns whether they were made. Most of them take what the registers of hot-plug may
    /// give.
    pub(super) fn access_ports(&mut self) -> bool {
        if self.ports.failures >= FAILURES_MAX {
            return false;
        }
        // A vCPU that is late may still work through the last table.
        if self.ports.failures == 0 || mem::load8(DONE_GPA) != 0 {
            self.fill_table();
        }
        let code = (&raw const port_worker, &raw const port_worker_end);
        let Ports { vcpu, khz, failures } = self.ports;
        let done = smp::run_elsewhere(vcpu, khz, code, || mem::load8(DONE_GPA) != 0);
        self.ports.failures = if done { 0 } else { failures + 1 };
        done
    }

    fn fill_table(&mut self) {
        let count = 1 + self.below(ACCESSES_MAX);
        for number in 0..count {
            let mut access = self.port_access();
            if access.ends_all() {
                access.operation = WRITES;
            }
            let at = ACCESSES_GPA + number * ACCESS_BYTES;
            let times = self.below(STRING_BYTES_MAX / 4 + 1).to_le_bytes()[0];
            mem::store16(at, access.port);
            mem::store8(at + 2, (access.operation * 2).to_le_bytes()[0]);
            mem::store8(at + 3, times);
            mem::store32(at + 4, access.value);
        }
        for word in (0..STRING_ROOM_BYTES).step_by(8) {
            mem::store(STRING_GPA + word, self.random.number());
        }
        mem::store16(TABLE_GPA, low_quarter(count));
        mem::store8(DONE_GPA, 0);
    }

    fn port_access(&mut self) -> Access {
        let value = match self.below(6) {
            0 => self.bits(),
            1 => low_half(self.below(16)),
            2 => 1 << self.below(32),
            3 => u32::MAX,
            4 => low_half(self.below(256)) << 8 | low_half(self.below(16)),
            _ => 0,
        };
        let word = |port, value| Access { port, operation: 2, value };
        match self.below(16) {
            // What a driver does.
            0 => word(PCI_EJECT, value),
            1 => word(CPU_EJECT, if self.one_in(4) { value } else { low_half(self.below(8)) }),
            2 => word(PCI_SEGMENT, value),
            3 => word(PCI_ADDRESS, 1 << 31 | self.bits() & 0xf_ffff),
            4 => Access { port: PCI_DATA, operation: WRITES + 2, value: 0 },
            5 => Access {
                port: [PCI_HOTPLUG, PCI_HOTPLUG + 4, CPU_HOTPLUG, MEMORY_HOTPLUG]
                    .get(usize::try_from(self.below(4)).unwrap_or(0))
                    .copied()
                    .unwrap_or(PCI_HOTPLUG),
                operation: WRITES + 2,
                value: 0,
            },
            other => {
                let port = if other == 15 {
                    self.half()
                } else {
                    let pick = usize::try_from(self.below(PORTS.len() as u64)).unwrap_or(0);
                    let (first, count) = PORTS.get(pick).copied().unwrap_or((POWER, 8));
                    // From before the first register to behind the last.
                    first.wrapping_sub(3).wrapping_add(low_quarter(self.below(count + 4)))
                };
                let strings = if self.one_in(12) { OPERATIONS } else { FIRST_STRING };
                Access { port, operation: self.below(strings), value }
            }
        }
    }
}
