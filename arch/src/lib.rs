// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The x86-64 platform presented to the guest: memory map, CPUID, firmware tables, boot state.
//!
//! Owns the physical memory map, the boot protocols (PVH and the 64-bit Linux protocol of a
//! bzImage), the registers a boot vCPU starts with, the CPUID each vCPU sees, and the ACPI and
//! SMBIOS tables. It reads images and writes guest memory; it never opens a device, makes an
//! ioctl or knows what is inside a device. Everything in a kernel image or an initramfs is
//! untrusted: a bad one is a named error, never a panic or an allocation of its choosing.

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the arch crate describes an x86_64 machine and builds for x86_64 only");

pub mod acpi;
mod arch_capabilities;
pub mod boot;
pub mod core_dump;
pub mod cpuid;
pub mod feature_msrs;
pub mod layout;
pub mod regs;
pub mod smbios;
pub mod windows;

pub use boot::{BootEntry, BootError, BootSpec, load_kernel};

/// Feeds arbitrary bytes to the kernel loader, for fuzzing: whatever they are, it must return.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_kernel_image(bytes: &[u8]) {
    boot::fuzz_kernel_image(bytes);
}
