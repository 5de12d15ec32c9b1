// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM requests that kvm-ioctls has no wrapper for, or none that can be called safely.
//!
//! Owns the request numbers and the `unsafe` around them: every function here is safe to call with
//! any arguments. Must never hold state.

use std::io;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_device_attr, kvm_dirty_log,
    kvm_dirty_log__bindgen_ty_1, kvm_nested_state, kvm_pre_fault_memory, kvm_sregs2,
    kvm_userspace_memory_region2, kvm_xsave,
};
use vmm_sys_util::ioctl::{ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr, ioctl_iowr_nr};

ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
ioctl_iow_nr!(KVM_SET_USER_MEMORY_REGION2, KVMIO, 0x49, kvm_userspace_memory_region2);
ioctl_iow_nr!(KVM_SET_XSAVE, KVMIO, 0xa5, kvm_xsave);
ioctl_ior_nr!(KVM_GET_XSAVE, KVMIO, 0xa4, kvm_xsave);
ioctl_iowr_nr!(KVM_GET_NESTED_STATE, KVMIO, 0xbe, kvm_nested_state);
ioctl_iow_nr!(KVM_SET_NESTED_STATE, KVMIO, 0xbf, kvm_nested_state);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
ioctl_ior_nr!(KVM_GET_XSAVE2, KVMIO, 0xcf, kvm_xsave);
ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// Maximum length of nested state in bytes: the header and two VMCS pages.
pub const NESTED_STATE_LEN_BYTES: usize = 128 + 2 * 4096;
/// Length in bytes of the XSAVE area of `KVM_GET_XSAVE`, and the minimum for KVM_GET_XSAVE2.
pub const XSAVE_LEN_BYTES: usize = 4096;

fn done(answer: i32) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Changes a memory slot to one with a userfault bitmap at `bitmap_hva`.
///
/// # Safety
///
/// The mapping at `region.userspace_addr` must be there for as long as the kernel has the slot. The
/// bitmap is only read, and need not be valid for safety's sake.
pub unsafe fn set_memory_region2(
    vm: &impl AsRawFd,
    region: &kvm_userspace_memory_region2,
    bitmap_hva: u64,
) -> io::Result<()> {
    let mut region = *region;
    // The bindings are older than the field: it is the first word of the padding.
    region.pad2[0] = bitmap_hva;
    // SAFETY: the kernel reads one kvm_userspace_memory_region2, and the caller promises that the
    // memory in it stays.
    done(unsafe { ioctl_with_ref(vm, KVM_SET_USER_MEMORY_REGION2(), &region) })
}

/// Reads the dirty log of `slot`, whose size is `pages`, into `bitmap`, which is resized to it.
///
/// The caller vouches for `pages`: see the SAFETY comment.
///
/// # Safety
///
/// `pages` must be at least the number of pages of the slot, and the slot must not change
/// meanwhile: the kernel writes as many bits as the slot has pages.
pub unsafe fn get_dirty_log(
    vm: &impl AsRawFd,
    slot: u32,
    pages: usize,
    bitmap: &mut Vec<u64>,
) -> io::Result<()> {
    bitmap.clear();
    bitmap.resize(pages.div_ceil(64), 0);
    let request = kvm_dirty_log {
        slot,
        padding1: 0,
        __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap: bitmap.as_mut_ptr().cast() },
    };
    // SAFETY: the kernel writes one bit per page of the slot, rounded up to whole u64, and the
    // caller promises that `bitmap` has at least those.
    done(unsafe { ioctl_with_ref(vm, KVM_GET_DIRTY_LOG(), &request) })
}

/// Clears the dirty bits that are set in `bitmap` (bit 0 is `first_page`) and re-arms protection.
pub fn clear_dirty_log(
    vm: &impl AsRawFd,
    slot: u32,
    first_page: u64,
    pages: u32,
    bitmap: &[u64],
) -> io::Result<()> {
    let words = usize::try_from(pages).map_or(usize::MAX, |pages| pages.div_ceil(64));
    if bitmap.len() < words {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut request = kvm_clear_dirty_log {
        slot,
        num_pages: pages,
        first_page,
        __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
            dirty_bitmap: bitmap.as_ptr().cast_mut().cast(),
        },
    };
    // SAFETY: the kernel only reads from the bitmap, `pages` bits rounded up to whole u64, which
    // was checked above to be there.
    done(unsafe { ioctl_with_mut_ref(vm, KVM_CLEAR_DIRTY_LOG(), &mut request) })
}

/// Special registers with the page directory pointers (KVM_CAP_SREGS2).
pub fn get_sregs2(vcpu: &impl AsRawFd) -> io::Result<kvm_sregs2> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: the kernel writes one kvm_sregs2.
    done(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

/// Sets the special registers with the page directory pointers (KVM_CAP_SREGS2).
pub fn set_sregs2(vcpu: &impl AsRawFd, sregs: &kvm_sregs2) -> io::Result<()> {
    // SAFETY: the kernel reads one kvm_sregs2.
    done(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

/// An XSAVE area, aligned like the kernel's structure.
pub struct XsaveArea(Vec<u32>);

impl XsaveArea {
    /// A zeroed area of at least `len_bytes` and 4 KiB.
    pub fn new(len_bytes: usize) -> Self {
        Self(vec![0; len_bytes.max(XSAVE_LEN_BYTES).div_ceil(4)])
    }

    /// The bytes of the area.
    pub fn bytes(&self) -> &[u8] {
        zerocopy::IntoBytes::as_bytes(self.0.as_slice())
    }

    /// The bytes of the area.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        zerocopy::IntoBytes::as_mut_bytes(self.0.as_mut_slice())
    }
}

/// Reads the XSAVE area; `extended` uses KVM_GET_XSAVE2.
///
/// # Safety
///
/// With `extended`, `area` must have at least the length that KVM_CAP_XSAVE2 reports for the VM of
/// this vCPU.
pub unsafe fn get_xsave(
    vcpu: &impl AsRawFd,
    area: &mut XsaveArea,
    extended: bool,
) -> io::Result<()> {
    let request = if extended { KVM_GET_XSAVE2() } else { KVM_GET_XSAVE() };
    // SAFETY: KVM_GET_XSAVE writes 4096 bytes, which every area has; KVM_GET_XSAVE2 writes what
    // the caller promises that the area has.
    done(unsafe { ioctl_with_mut_ptr(vcpu, request, area.0.as_mut_ptr()) })
}

/// Writes the XSAVE area.
///
/// # Safety
///
/// As for [`get_xsave`]: the kernel reads as much as KVM_CAP_XSAVE2 reports.
pub unsafe fn set_xsave(vcpu: &impl AsRawFd, area: &XsaveArea) -> io::Result<()> {
    // SAFETY: the caller promises that the area is as long as what the kernel reads.
    done(unsafe { ioctl_with_ptr(vcpu, KVM_SET_XSAVE(), area.0.as_ptr()) })
}

/// A buffer for the nested state of any kernel.
pub struct NestedBuffer([u64; NESTED_STATE_LEN_BYTES / 8]);

impl NestedBuffer {
    /// A zeroed buffer.
    pub fn new() -> Box<Self> {
        Box::new(Self([0; NESTED_STATE_LEN_BYTES / 8]))
    }

    /// The whole buffer.
    pub fn bytes(&self) -> &[u8] {
        zerocopy::IntoBytes::as_bytes(&self.0[..])
    }

    /// The whole buffer.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        zerocopy::IntoBytes::as_mut_bytes(&mut self.0[..])
    }

    /// The `size` field of the header, which the kernel trusts.
    pub fn size_bytes(&self) -> usize {
        usize::try_from(self.0[0] >> 32).unwrap_or(usize::MAX)
    }

    /// Sets the `size` field of the header.
    pub fn set_size_bytes(&mut self, size_bytes: u32) {
        self.0[0] = (self.0[0] & 0xffff_ffff) | (u64::from(size_bytes) << 32);
    }
}

/// Reads the nested virtualisation state (KVM_CAP_NESTED_STATE).
pub fn get_nested_state(vcpu: &impl AsRawFd, buffer: &mut NestedBuffer) -> io::Result<()> {
    buffer.set_size_bytes(u32::try_from(NESTED_STATE_LEN_BYTES).unwrap_or(0));
    // SAFETY: the kernel writes no more than the `size` field says, which was just set to the
    // length of the buffer.
    done(unsafe { ioctl_with_mut_ptr(vcpu, KVM_GET_NESTED_STATE(), buffer.0.as_mut_ptr()) })
}

/// Writes the nested virtualisation state (KVM_CAP_NESTED_STATE).
pub fn set_nested_state(vcpu: &impl AsRawFd, buffer: &NestedBuffer) -> io::Result<()> {
    if buffer.size_bytes() > NESTED_STATE_LEN_BYTES {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: the kernel reads as much as the `size` field says, which is within the buffer.
    done(unsafe { ioctl_with_ptr(vcpu, KVM_SET_NESTED_STATE(), buffer.0.as_ptr()) })
}

/// Reads a 64-bit attribute of a vCPU.
pub fn get_vcpu_attribute(vcpu: &impl AsRawFd, group: u32, attribute: u32) -> io::Result<u64> {
    let mut value = 0_u64;
    let request = kvm_device_attr {
        flags: 0,
        group,
        attr: u64::from(attribute),
        addr: std::ptr::from_mut(&mut value).expose_provenance() as u64,
    };
    // SAFETY: the vCPU attributes that this crate asks for (KVM_VCPU_TSC_OFFSET) are 64 bits wide,
    // and `addr` points to that much.
    done(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &request) })?;
    Ok(value)
}

/// Writes a 64-bit attribute of a vCPU.
pub fn set_vcpu_attribute(
    vcpu: &impl AsRawFd,
    group: u32,
    attribute: u32,
    value: u64,
) -> io::Result<()> {
    let request = kvm_device_attr {
        flags: 0,
        group,
        attr: u64::from(attribute),
        addr: std::ptr::from_ref(&value).expose_provenance() as u64,
    };
    // SAFETY: the kernel reads 64 bits from `addr`, which outlives the call.
    done(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &request) })
}

/// Fills stage-2 (KVM_CAP_PRE_FAULT_MEMORY); returns the number of bytes done.
pub fn pre_fault_memory(vcpu: &impl AsRawFd, gpa: u64, len_bytes: u64) -> io::Result<u64> {
    let mut request = kvm_pre_fault_memory { gpa, size: len_bytes, ..Default::default() };
    // SAFETY: the kernel reads and writes one kvm_pre_fault_memory and touches guest memory only
    // as the guest itself may.
    done(unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut request) })?;
    Ok(len_bytes.saturating_sub(request.size))
}
