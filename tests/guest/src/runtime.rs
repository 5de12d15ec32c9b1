// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a Rust program needs when there is no operating system and no standard library: the
//! memory functions that the compiler calls, the panic handler, and a value set once.

use core::arch::asm;
use core::cell::UnsafeCell;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::abi::{self, control, failure, stage};
use crate::mem::Block;

/// A value that one vCPU sets and the others read.
pub struct Once<T> {
    set: AtomicBool,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: the value is written once, before `set` is released, and only read afterwards.
unsafe impl<T: Sync> Sync for Once<T> {}

impl<T> Once<T> {
    /// Not set yet.
    pub const fn new() -> Self {
        Self { set: AtomicBool::new(false), value: UnsafeCell::new(None) }
    }

    /// Sets the value. Only vCPU 0 calls this, once, before the others run.
    pub fn set(&self, value: T) -> &T {
        // SAFETY: no vCPU reads before `set` is true, and only vCPU 0 writes.
        let stored = unsafe { (*self.value.get()).insert(value) };
        self.set.store(true, Ordering::Release);
        stored
    }

    /// The value, when it is set.
    pub fn get(&self) -> Option<&T> {
        if !self.set.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: after `set` the value never changes.
        unsafe { (*self.value.get()).as_ref() }
    }
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    let page = Block::at(abi::CONTROL_GPA);
    page.set(control::PANIC_LINE, info.location().map_or(0, |at| u64::from(at.line())));
    page.set(control::FAILURE, failure::PANIC);
    page.set(control::STAGE, stage::FAILED);
    page.set(control::MAGIC, abi::MAGIC);
    loop {
        core::hint::spin_loop();
    }
}

/// Copies bytes forwards.
///
/// # Safety
/// As C's function of this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear throughout.
    unsafe {
        asm!("rep movsb", inout("rcx") bytes => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

/// Copies bytes between ranges that may overlap.
///
/// # Safety
/// As C's function of this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= bytes {
        // SAFETY: copying forwards reads every byte before it is overwritten.
        return unsafe { memcpy(to, from, bytes) };
    }
    // SAFETY: the caller vouches for both ranges; backwards for the same reason, and the direction
    // flag is cleared again.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") bytes => _,
            inout("rdi") to.wrapping_add(bytes).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(bytes).wrapping_sub(1) => _, options(nostack));
    }
    to
}

/// Sets bytes.
///
/// # Safety
/// As C's function of this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the range.
    unsafe {
        asm!("rep stosb", inout("rcx") bytes => _, inout("rdi") to => _,
            in("al") value.to_le_bytes()[0], options(nostack, preserves_flags));
    }
    to
}

/// Compares bytes.
///
/// # Safety
/// As C's function of this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    for index in 0..bytes {
        // SAFETY: the caller vouches for both ranges. Volatile, so that the compiler does not
        // turn this loop into a call of itself.
        let (x, y) = unsafe { (a.add(index).read_volatile(), b.add(index).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

/// Compares bytes for equality.
///
/// # Safety
/// As C's function of this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    // SAFETY: as for `memcmp`.
    unsafe { memcmp(a, b, bytes) }
}

/// Named by unwind tables of the precompiled core library; never called, panics do not unwind.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
