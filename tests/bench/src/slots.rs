// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lower bound of a VM's start: the time that the kernel alone takes to set up memory for a bare
//! VM.
//!
//! Owns one VM for one measurement: no vCPU, no interrupt controller, nothing populated. With
//! two-dimensional paging the time does not depend on the size; with shadow paging the kernel
//! clears a reverse map of eight bytes for each page.

use std::error::Error;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::Kvm;

const LOW_RAM_END: u64 = 3 << 30;
const HIGH_RAM_GPA: u64 = 4 << 30;

/// Time that the kernel takes for the memory slots of a guest with `len_bytes` of shared memory.
///
/// # Errors
/// When there is no memory or no KVM.
pub fn time_to_register(len_bytes: u64) -> Result<Duration, Box<dyn Error>> {
    let len = usize::try_from(len_bytes)?;
    // SAFETY: the name is a string with its end; the descriptor is checked and used only here.
    let fd = unsafe { libc::memfd_create(c"slots".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: a new mapping at an address of the kernel's choice; its result is checked.
    let hva = unsafe {
        libc::ftruncate(fd, libc::off_t::try_from(len_bytes)?);
        let hva = libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            fd,
            0,
        );
        libc::close(fd);
        hva
    };
    if hva == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    let took = register(hva as u64, len_bytes);
    // SAFETY: the mapping made above; the VM that used it is gone.
    unsafe { libc::munmap(hva, len) };
    took
}

fn register(hva: u64, len_bytes: u64) -> Result<Duration, Box<dyn Error>> {
    let vm = Kvm::new()?.create_vm()?;
    let low = len_bytes.min(LOW_RAM_END);
    let slots = [(0, low, hva), (HIGH_RAM_GPA, len_bytes - low, hva + low)];
    let start = Instant::now();
    for (slot, (guest_phys_addr, memory_size, userspace_addr)) in (0_u32..).zip(slots) {
        if memory_size == 0 {
            continue;
        }
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr,
            memory_size,
            userspace_addr,
        };
        // SAFETY: the range is mapped for longer than the VM lives, and nothing else uses it.
        unsafe { vm.set_user_memory_region(region)? };
    }
    Ok(start.elapsed())
}
