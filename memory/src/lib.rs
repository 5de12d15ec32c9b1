// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM.
//!
//! Owns the zones of guest memory: their backings, their two mappings, prefault, and the per-page
//! residency and zero maps that every other room reads. Knows nothing of KVM, of devices or of the
//! migration protocol.

/// Tracks the guest pages that devices inside this process wrote (KVM does not see those writes).
pub type DeviceDirtyLog = vm_memory::bitmap::AtomicBitmap;

/// Guest physical memory as devices see it: checked accesses by guest physical address.
pub type GuestMemory = vm_memory::GuestMemoryMmap<DeviceDirtyLog>;

/// A handle that always gives the current [`GuestMemory`], also after memory was added.
pub type GuestMemoryHandle = vm_memory::GuestMemoryAtomic<GuestMemory>;
