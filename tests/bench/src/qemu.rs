// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Constants of every benchmark that runs QEMU.

/// QEMU's executable.
pub const PROGRAM: &str = "qemu-system-x86_64";

/// The smallest firmware for it.
pub const QBOOT: &str = "/usr/share/qemu/qboot.rom";

/// The host's processor. On AMD, QEMU offers `IA32_ARCH_CAPABILITIES` although the processor has no
/// such register, and aborts where KVM refuses to set it.
pub const CPU: &str = "host,-arch-capabilities";
