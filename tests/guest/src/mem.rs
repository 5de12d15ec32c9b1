// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Access to guest-physical memory, which is identity-mapped and belongs to this program alone.
//!
//! Owns the raw pointers: no other module makes one from an address. Accesses are volatile, since
//! the host reads (and for the parameter page writes) the same memory.

use crate::abi;

/// Reads a 64-bit word.
#[inline]
pub fn load(gpa: u64) -> u64 {
    // SAFETY: every caller passes an address inside RAM that the layout or the ABI assigns, which
    // is identity-mapped; no Rust object lives there, so the access cannot alias a reference.
    unsafe { core::ptr::read_volatile(gpa as *const u64) }
}

/// Writes a 64-bit word.
#[inline]
pub fn store(gpa: u64, value: u64) {
    // SAFETY: as for `load`; what is written is the data of the ABI or of a test page.
    unsafe { core::ptr::write_volatile(gpa as *mut u64, value) }
}

/// Reads 32 bits, of memory or of a device.
#[inline]
pub fn load32(gpa: u64) -> u32 {
    // SAFETY: as for `load`; device addresses below 4 GiB are mapped by the tables in the image.
    unsafe { core::ptr::read_volatile(gpa as *const u32) }
}

/// Writes 32 bits, to memory or to a device.
#[inline]
pub fn store32(gpa: u64, value: u32) {
    // SAFETY: as for `load32`.
    unsafe { core::ptr::write_volatile(gpa as *mut u32, value) }
}

/// Reads a byte.
pub fn load8(gpa: u64) -> u8 {
    // SAFETY: as for `load`.
    unsafe { core::ptr::read_volatile(gpa as *const u8) }
}

/// Writes a byte.
pub fn store8(gpa: u64, value: u8) {
    // SAFETY: as for `store`.
    unsafe { core::ptr::write_volatile(gpa as *mut u8, value) }
}

/// Writes 16 bits, to memory or to a device.
pub fn store16(gpa: u64, value: u16) {
    // SAFETY: as for `load32`.
    unsafe { core::ptr::write_volatile(gpa as *mut u16, value) }
}

/// Reads 16 bits, of memory or of a device.
pub fn load16(gpa: u64) -> u16 {
    // SAFETY: as for `load32`.
    unsafe { core::ptr::read_volatile(gpa as *const u16) }
}

/// Writes 32 bits so many times with one instruction, which KVM emulates where a device is.
pub fn fill32(gpa: u64, value: u32, count: u64) {
    // SAFETY: as for `store32`, for `count` words; the direction flag is clear, as for `clear_page`.
    unsafe {
        core::arch::asm!(
            "rep stosd",
            inout("rdi") gpa => _,
            inout("rcx") count => _,
            in("eax") value,
            options(nostack, preserves_flags)
        );
    }
}

/// Writes 16 bytes with one instruction.
pub fn store128(gpa: u64, value: u64) {
    // SAFETY: as for `store`; the instruction asks for no alignment.
    unsafe {
        core::arch::asm!(
            "movq xmm0, {value}",
            "movdqu [{gpa}], xmm0",
            value = in(reg) value,
            gpa = in(reg) gpa,
            out("xmm0") _,
            options(nostack, preserves_flags)
        );
    }
}

/// Clears a page as kernels do, with one instruction.
#[inline]
pub fn clear_page(gpa: u64) {
    // SAFETY: as for `store`, for 512 words from an address that is a page's; the direction flag is
    // clear in every function, by the calling convention.
    unsafe {
        core::arch::asm!(
            "rep stosq",
            inout("rdi") gpa => _,
            inout("rcx") abi::PAGE_BYTES / 8 => _,
            in("rax") 0_u64,
            options(nostack, preserves_flags)
        );
    }
}

/// Clears whole words.
pub fn clear(gpa: u64, bytes: u64) {
    for offset in (0..bytes).step_by(8) {
        store(gpa + offset, 0);
    }
}

/// A page or block whose fields are 64-bit words at known offsets.
#[derive(Clone, Copy)]
pub struct Block {
    gpa: u64,
}

impl Block {
    /// The block at `gpa`.
    pub const fn at(gpa: u64) -> Self {
        Self { gpa }
    }

    /// Reads a field.
    #[inline]
    pub fn get(self, offset: u64) -> u64 {
        load(self.gpa + offset)
    }

    /// Writes a field.
    #[inline]
    pub fn set(self, offset: u64, value: u64) {
        store(self.gpa + offset, value);
    }

    /// Adds to a field that only this vCPU writes.
    #[inline]
    pub fn add(self, offset: u64, value: u64) {
        self.set(offset, self.get(offset).wrapping_add(value));
    }

    /// Address of a field.
    #[inline]
    pub const fn gpa_of(self, offset: u64) -> u64 {
        self.gpa + offset
    }
}
