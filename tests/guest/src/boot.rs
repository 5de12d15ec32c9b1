// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first instructions of every vCPU: PVH entry or real mode, to 64-bit code at CPL 3.
//!
//! Owns the GDT, the identity page tables of the first 4 GiB and the code that runs
//! at CPL 0. That code may be emulated at a microsecond or two an instruction, so it must never do
//! work that CPL 3 can do: tables are prebuilt in the image, the `iretq` frames are prebuilt in
//! memory, and the local APIC is driven from CPL 3, where its page is mapped.

use core::arch::global_asm;

use crate::abi;

/// Frame that `iretq` takes an application processor to CPL 3 with, and the argument it gets.
/// Written by vCPU 0, one application processor at a time.
#[repr(C)]
pub struct Mailbox {
    /// Entry point at CPL 3.
    pub rip: u64,
    cs: u64,
    rflags: u64,
    /// Initial stack pointer.
    pub rsp: u64,
    ss: u64,
    /// Passed in `edi`: the vCPU's index.
    pub vcpu: u64,
}

unsafe extern "C" {
    /// First byte of the real-mode trampoline in the image.
    pub static ap_trampoline: u8;
    /// First byte after it.
    pub static ap_trampoline_end: u8;
    /// First byte of what a processor does instead that only writes to an I/O port.
    pub static port_writer: u8;
    /// Its value, 32 bits.
    pub static port_writer_value: u8;
    /// Its port, 16 bits.
    pub static port_writer_port: u8;
    /// A byte that it makes 1 when it has.
    pub static port_writer_done: u8;
    /// First byte after it.
    pub static port_writer_end: u8;
    /// The mailbox, in the image.
    pub static mut ap_mailbox: Mailbox;
    /// The page-directory-pointer table of the first 512 GiB; entries 0 to 3 are in use.
    pub static mut pdpt: [u64; 512];
}

global_asm!(
    include_str!("pvh_note.S"),
    r#"
    .section .text.boot,"ax",@progbits
    .code32
    .globl start32
start32:                            # ebx: start_info; flat segments, paging off
    movl  %ebx, %edi
    movl  $pml4, %eax
    movl  %eax, %cr3
    movl  $0x620, %eax              # PAE, OSFXSR, OSXMMEXCPT
    movl  %eax, %cr4
    movl  $0xc0000080, %ecx         # EFER: SCE, LME
    xorl  %edx, %edx
    movl  $0x101, %eax
    wrmsr
    movl  $0x80050033, %eax         # PG, AM, WP, NE, ET, MP, PE
    movl  %eax, %cr0
    lgdt  gdtr
    ljmp  $0x10, $start64
    .code64
start64:
    movl  $0x18, %eax
    movl  %eax, %ss
    movl  %eax, %ds
    movl  %eax, %es
    movl  $bsp_frame, %esp
    iretq

    # Copied to one page below 1 MiB. A processor that was started by SIPI has CS.base at it.
    .balign 16
    .code16
    .globl ap_trampoline
ap_trampoline:
    lgdtl %cs:(ap_gdtr - ap_trampoline)
    movl  $pml4, %eax
    movl  %eax, %cr3
    movl  $0x620, %eax
    movl  %eax, %cr4
    movl  $0xc0000080, %ecx
    xorl  %edx, %edx
    movl  $0x101, %eax
    wrmsr
    movl  $0x80050033, %eax
    movl  %eax, %cr0                # straight from real mode to long mode
    ljmpl $0x10, $ap64
    .balign 4
ap_gdtr:
    .word gdt_end - gdt - 1
    .long gdt
    .globl ap_trampoline_end
ap_trampoline_end:

    # The same for a processor that writes to a port, which CPL 3 cannot everywhere.
    .balign 16
    .code16
    .globl port_writer
port_writer:
    movw  %cs:(port_writer_port - port_writer), %dx
    movl  %cs:(port_writer_value - port_writer), %eax
    outl  %eax, %dx
    movb  $1, %cs:(port_writer_done - port_writer)
1:  hlt
    jmp   1b
    .balign 4
    .globl port_writer_value
port_writer_value:
    .long 0
    .globl port_writer_port
port_writer_port:
    .word 0
    .globl port_writer_done
port_writer_done:
    .byte 0
    .globl port_writer_end
port_writer_end:
    .code64
ap64:
    movl  $0x18, %eax
    movl  %eax, %ss
    movl  %eax, %ds
    movl  %eax, %es
    movl  $ap_mailbox, %esp
    movl  40(%rsp), %edi
    iretq

    .section .data.boot,"aw",@progbits
    .balign 8
bsp_frame:
    .quad bsp_main, 0x33, 0x2, {bsp_stack}, 0x2b
    .globl ap_mailbox
ap_mailbox:
    .quad 0, 0x33, 0x2, 0, 0x2b, 0
gdt:
    .quad 0, 0
    .quad 0x00af9b000000ffff        # 0x10 code, CPL 0, 64-bit
    .quad 0x00cf93000000ffff        # 0x18 data, CPL 0
    .quad 0x00cffb000000ffff        # 0x20 code, CPL 3, 32-bit
    .quad 0x00cff3000000ffff        # 0x28 data, CPL 3
    .quad 0x00affb000000ffff        # 0x30 code, CPL 3, 64-bit
gdt_end:
gdtr:
    .word gdt_end - gdt - 1
    .long gdt

    .section .tables,"aw",@progbits
    .balign 4096
pml4:
    .quad pdpt + 7
    .fill 511, 8, 0
    .globl pdpt
pdpt:
    .quad pd + 7, pd + 0x1007, pd + 0x2007, pd + 0x3007
    .fill 508, 8, 0
pd:                                 # the first 4 GiB in 2 MiB pages, user, writable
    .set page, 0
    .rept 2048
    .quad page * 0x200000 + 0xe7
    .set page, page + 1
    .endr
    .text
    .code64
"#,
    bsp_stack = const abi::stack_top(0),
    options(att_syntax)
);
