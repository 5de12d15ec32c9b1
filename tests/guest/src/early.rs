// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that stays what firmware is at first: 32-bit protected mode without page tables, as PVH enters it.
//!
//! Says on the serial port what command line it got and, of each virtio disk, where the registers are and
//! how many sectors it has, read from there; then it switches the machine off. With a command line that begins
//! with `echo` it first sends back each byte that arrives at the serial port, up to a `q`. Must never go beyond
//! what 32 bits reach.
#![no_std]
#![no_main]

use core::arch::global_asm;

global_asm!(
    include_str!("pvh_note.S"),
    r#"
    .section .text.boot,"ax",@progbits
    .code32
    .globl start32
start32:                            # ebx: start_info; flat segments, paging off
    movl  $stack_end, %esp
    movl  $text_cmdline, %esi
    call  print
    movl  0x18(%ebx), %esi          # cmdline_paddr
    movl  (%esi), %eax
    movl  %eax, first_word
    call  print
    movl  $text_end, %esi
    call  print
    xorl  %edi, %edi                # device number on bus 0
next_device:
    movl  %edi, %eax
    shll  $11, %eax
    orl   $0x80000000, %eax
    movl  %eax, %ebp
    xorl  %ecx, %ecx
    call  config_read
    cmpl  $0x10421af4, %eax         # a modern virtio device of type 2
    jne   done_device
    call  disk
done_device:
    incl  %edi
    cmpl  $32, %edi
    jb    next_device
    movl  $text_last, %esi
    call  print
    cmpl  $0x6f686365, first_word   # "echo"
    jne   off
echo:
    pause
    movw  $0x3fd, %dx               # line status
    inb   %dx, %al
    testb $1, %al                   # a byte is there
    jz    echo
    movw  $0x3f8, %dx
    inb   %dx, %al
    outb  %al, %dx
    cmpb  $113, %al                 # q
    jne   echo
off:
    movw  $0x600, %dx               # sleep type 5, sleep enable
    movb  $0x34, %al
    outb  %al, %dx
stop:
    hlt
    jmp   stop

disk:                               # of the function ebp
    movl  $text_disk, %esi
    call  print
    movl  $0x10, %ecx
    call  config_read
    movl  %eax, registers
    call  print_hex
    testb $7, %al
    jz    narrow
    movl  $text_wide, %esi
    jmp   print
narrow:
    movl  $0x04, %ecx               # memory decoding on
    call  config_read
    orl   $2, %eax
    outl  %eax, %dx
    movl  $0x34, %ecx
    call  config_read
next_capability:
    movzbl %al, %ecx
    andl  $0xfc, %ecx
    jz    no_sectors
    call  config_read
    movl  %eax, %ebx
    xorl  $0x04000009, %ebx         # vendor's own, of virtio: the device's configuration
    andl  $0xff0000ff, %ebx
    movb  %ah, %al
    jnz   next_capability
    addl  $8, %ecx
    call  config_read
    addl  registers, %eax
    movl  (%eax), %ebx              # the capacity's lower half
    movl  $text_sectors, %esi
    call  print
    movl  %ebx, %eax
    call  print_hex
no_sectors:
    movl  $text_end, %esi
    jmp   print

config_read:                        # eax: register ecx of the function ebp; dx stays at the data
    leal  (%ebp, %ecx), %eax
    movw  $0xcf8, %dx
    outl  %eax, %dx
    movw  $0xcfc, %dx
    inl   %dx, %eax
    ret

print_hex:                          # eax, which stays
    pushl %eax
    movl  $8, %ecx
    movw  $0x3f8, %dx
    movl  %eax, %esi
next_digit:
    roll  $4, %esi
    movl  %esi, %eax
    andb  $15, %al
    addb  $48, %al
    cmpb  $57, %al
    jbe   digit
    addb  $39, %al
digit:
    outb  %al, %dx
    loop  next_digit
    popl  %eax
    ret

print:                              # the text at esi; uses al and dx
    movw  $0x3f8, %dx
next_character:
    lodsb
    testb %al, %al
    jz    printed
    outb  %al, %dx
    jmp   next_character
printed:
    ret

    .section .data.boot,"aw",@progbits
registers:
    .long 0
first_word:
    .long 0
text_cmdline:
    .asciz "command line ["
text_end:
    .asciz "]\n"
text_disk:
    .asciz "disk ["
text_wide:
    .asciz " is out of reach]\n"
text_sectors:
    .asciz " sectors "
text_last:
    .asciz "that is all\n"
    .balign 16
    .fill 256, 1, 0
stack_end:
    .text
    .code64
"#,
    options(att_syntax)
);

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}
