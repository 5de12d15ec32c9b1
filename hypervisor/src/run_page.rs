// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The `kvm_run` page of a vCPU, mapped a second time.
//!
//! Owns that second mapping. It lets other threads set `immediate_exit` while the vCPU thread holds
//! the vCPU exclusively, and provides what kvm-ioctls omits from its exits. Must never write
//! anything but `immediate_exit`.

use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::kvm_run;

/// `struct kvm_run` is within the first page of a vCPU's mapping.
const LEN_BYTES: usize = 4096;
const _: () = assert!(size_of::<kvm_run>() <= LEN_BYTES);

/// A second mapping of `struct kvm_run`.
#[derive(Debug)]
pub struct RunPage(NonNull<kvm_run>);

// SAFETY: the mapping is valid until drop on whatever thread that happens, and every access through
// a shared reference is atomic or a volatile copy of plain integers.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

impl RunPage {
    /// Maps the page of a vCPU.
    pub fn map(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LEN_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(address.cast())
            .map(Self)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))
    }

    /// Sets whether the next KVM_RUN completes pending I/O and returns at once.
    pub fn set_immediate_exit(&self, on: bool) {
        // SAFETY: the byte lies within the mapping, which lives as long as `self`; all accesses
        // through this mapping are atomic.
        let byte = unsafe {
            AtomicU8::from_ptr(
                self.0.as_ptr().cast::<u8>().add(offset_of!(kvm_run, immediate_exit)),
            )
        };
        byte.store(u8::from(on), Ordering::SeqCst);
    }

    /// Copies a field of the exit information from the page.
    fn exit_field<T: Copy>(&self) -> T {
        const OFFSET: usize = offset_of!(kvm_run, __bindgen_anon_1);
        const { assert!(size_of::<T>() <= 256 && align_of::<T>() <= 8) };
        // SAFETY: the exit union lies within the mapping, is 256 bytes long and 8-byte aligned; T
        // is one of the kernel's plain integer structures, for which all bytes are valid (this
        // function is private, and its two callers pass such). Volatile, as the kernel writes it.
        unsafe { self.0.as_ptr().cast::<u8>().add(OFFSET).cast::<T>().read_volatile() }
    }

    /// Bytes per element of the port access of the last exit; at least 1.
    pub fn pio_element_len_bytes(&self) -> usize {
        let io = self.exit_field::<kvm_bindings::kvm_run__bindgen_ty_1__bindgen_ty_4>();
        usize::from(io.size).max(1)
    }

    /// Kind and data words of the internal error of the last exit.
    pub fn internal_error(&self) -> (u32, Vec<u64>) {
        let error = self.exit_field::<kvm_bindings::kvm_run__bindgen_ty_1__bindgen_ty_13>();
        let count = usize::try_from(error.ndata).map_or(0, |count| count.min(error.data.len()));
        (error.suberror, error.data.iter().take(count).copied().collect())
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and nothing borrows from it.
        unsafe { libc::munmap(self.0.as_ptr().cast(), LEN_BYTES) };
    }
}
