# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Where a PVH loader enters this image: at start32, in 32-bit protected mode. Part of each program of the test guest.
    .section .note.pvh,"a",@note
    .align 4
    .long 4, 4, 18                  # name size, descriptor size, XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long start32
