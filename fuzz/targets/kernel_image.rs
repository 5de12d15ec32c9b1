// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Kernel images and initramfs: PVH ELF, bzImage and what claims to be one.

#![no_main]

godwit_fuzz::target!(arch::fuzz_kernel_image);
