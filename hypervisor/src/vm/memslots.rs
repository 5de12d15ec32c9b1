// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory slots of a VM and their dirty logs.
//!
//! Owns which slots exist, and with each slot a share in the mapping behind it, so that guest
//! memory cannot be unmapped while the guest can reach it. Must never touch the memory itself.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use kvm_bindings::{
    KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, kvm_userspace_memory_region,
    kvm_userspace_memory_region2,
};
use kvm_ioctls::VmFd;
use parking_lot::{Mutex, MutexGuard};
use thiserror::Error;

use super::Vm;
use crate::ioctl;
use crate::userfault::UserfaultBitmap;

/// Page size of KVM's interfaces in bytes, whatever the host page size.
const PAGE_LEN_BYTES: u64 = 4096;

/// Location and properties of a memory slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemslotConfig {
    /// Number of the slot, chosen by the caller.
    pub slot: u32,
    /// Guest physical address of its first byte; a multiple of 4 KiB.
    pub gpa: u64,
    /// Host virtual address of its first byte; a multiple of 4 KiB.
    pub hva: u64,
    /// Length; a multiple of 4 KiB, not zero.
    pub len_bytes: u64,
    /// Whether writes are logged from the start.
    pub log_dirty: bool,
    /// Whether guest writes exit as MMIO.
    pub readonly: bool,
}

/// Why an operation on a memory slot or its dirty log failed.
#[derive(Debug, Error)]
pub enum MemslotError {
    /// The addresses or the length are invalid.
    #[error(
        "memory slot {slot} ({len_bytes:#x} bytes at guest address {gpa:#x}) is empty, not a \
         multiple of 4 KiB, or too large"
    )]
    Malformed {
        /// Number of the slot.
        slot: u32,
        /// Guest physical address.
        gpa: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// The slot number is in use.
    #[error("memory slot {slot} exists already")]
    Taken {
        /// Number of the slot.
        slot: u32,
    },
    /// There is no such slot.
    #[error("there is no memory slot {slot}")]
    Unknown {
        /// Number of the slot.
        slot: u32,
    },
    /// Dirty logging is off for the slot.
    #[error("writes to memory slot {slot} are not logged")]
    NotLogged {
        /// Number of the slot.
        slot: u32,
    },
    /// The range to clear is invalid.
    #[error(
        "cannot clear {pages} pages from page {first_page} of the dirty log of memory slot {slot}, \
         which has {slot_pages}: the start must be a multiple of 64, the length too unless it ends \
         with the slot, and the bitmap as long"
    )]
    BadRange {
        /// Number of the slot.
        slot: u32,
        /// Pages in the slot.
        slot_pages: u64,
        /// First page to clear.
        first_page: u64,
        /// Pages to clear.
        pages: u32,
    },
    /// This KVM has no userfault exits.
    #[error(
        "KVM of this kernel has no userfault exits: the package godwit-kvm, or \
         scripts/kvm-modules, builds one that has them"
    )]
    NoUserfault,
    /// The bitmap has another size than the slot.
    #[error(
        "a userfault bitmap of {pages} pages cannot be that of memory slot {slot}, which has {slot_pages}"
    )]
    BitmapLength {
        /// Number of the slot.
        slot: u32,
        /// Pages in the slot.
        slot_pages: u64,
        /// Pages that the bitmap covers.
        pages: u64,
    },
    /// The kernel refused the request.
    #[error("the kernel refused to {what} memory slot {slot}")]
    Kernel {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// Number of the slot.
        slot: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

pub(crate) struct Memslot {
    pub(crate) config: MemslotConfig,
    /// The bitmap that the kernel reads; only dropped after the kernel has been told.
    userfault: Option<Arc<UserfaultBitmap>>,
    /// Keeps the mapping at `config.hva` alive.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Memslot {
    pub(crate) fn pages(&self) -> u64 {
        self.config.len_bytes / PAGE_LEN_BYTES
    }
}

/// The memory slots of one VM.
#[derive(Default)]
pub(crate) struct Memslots(Mutex<BTreeMap<u32, Memslot>>);

impl Memslots {
    /// Held across the ioctl, so that table and kernel agree.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Memslot>> {
        self.0.lock()
    }
}

/// Tells the kernel about a slot; `len_bytes` 0 removes it. `userfault` is the flag of a slot with a
/// bitmap, and the bitmap.
///
/// # Safety
///
/// The mapping at `config.hva` must be there for as long as the kernel has the slot.
unsafe fn set_kernel_slot(
    fd: &VmFd,
    config: &MemslotConfig,
    len_bytes: u64,
    userfault: Option<(u32, &UserfaultBitmap)>,
) -> io::Result<()> {
    let mut flags = 0;
    if config.log_dirty {
        flags |= KVM_MEM_LOG_DIRTY_PAGES;
    }
    if config.readonly {
        flags |= KVM_MEM_READONLY;
    }
    if let Some((flag, bitmap)) = userfault {
        let region = kvm_userspace_memory_region2 {
            slot: config.slot,
            flags: flags | flag,
            guest_phys_addr: config.gpa,
            memory_size: len_bytes,
            userspace_addr: config.hva,
            ..Default::default()
        };
        // SAFETY: the caller promises that the mapping stays.
        return unsafe { ioctl::set_memory_region2(fd, &region, bitmap.hva()) };
    }
    let region = kvm_userspace_memory_region {
        slot: config.slot,
        flags,
        guest_phys_addr: config.gpa,
        memory_size: len_bytes,
        userspace_addr: config.hva,
    };
    // SAFETY: the caller promises that the mapping stays.
    unsafe { fd.set_user_memory_region(region) }.map_err(io::Error::from)
}

fn check(config: &MemslotConfig) -> Result<(), MemslotError> {
    let MemslotConfig { slot, gpa, hva, len_bytes, .. } = *config;
    let aligned = [gpa, hva, len_bytes].iter().all(|value| value.is_multiple_of(PAGE_LEN_BYTES));
    let ends = gpa.checked_add(len_bytes).is_some() && hva.checked_add(len_bytes).is_some();
    if aligned && ends && len_bytes > 0 && hva > 0 {
        Ok(())
    } else {
        Err(MemslotError::Malformed { slot, gpa, len_bytes })
    }
}

/// The kernel reads a bit for each page of the slot.
fn check_bitmap(
    slot: u32,
    slot_pages: u64,
    bitmap: Option<&UserfaultBitmap>,
) -> Result<(), MemslotError> {
    match bitmap.map(UserfaultBitmap::pages) {
        Some(pages) if pages != slot_pages => {
            Err(MemslotError::BitmapLength { slot, slot_pages, pages })
        }
        _ => Ok(()),
    }
}

impl Vm {
    /// Makes host memory the guest's memory at `config.gpa`.
    ///
    /// `owner` is kept until the slot is removed or the VM is gone.
    ///
    /// # Safety
    ///
    /// `config.hva` must be the start of at least `config.len_bytes` mapped bytes which stay mapped
    /// until `owner` is dropped and which hold nothing that Rust code assumes to be unchanging or
    /// unshared: the guest reads and writes them at any time.
    pub unsafe fn set_memory_slot(
        &self,
        config: MemslotConfig,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), MemslotError> {
        check(&config)?;
        let MemslotConfig { slot, .. } = config;
        let mut slots = self.shared().slots.lock();
        if slots.contains_key(&slot) {
            return Err(MemslotError::Taken { slot });
        }
        // SAFETY: the caller promises that the mapping lives as long as `owner`, which is kept in
        // the table below until the kernel has dropped the slot.
        unsafe { set_kernel_slot(&self.shared().fd, &config, config.len_bytes, None) }
            .map_err(|source| MemslotError::Kernel { what: "make", slot, source })?;
        slots.insert(slot, Memslot { config, userfault: None, _owner: owner });
        Ok(())
    }

    /// Removes the slot. Guest accesses to it are MMIO from now on.
    pub fn remove_memory_slot(&self, slot: u32) -> Result<(), MemslotError> {
        let mut slots = self.shared().slots.lock();
        let config = slots.get(&slot).ok_or(MemslotError::Unknown { slot })?.config;
        // SAFETY: a length of zero removes the slot; no mapping is used.
        unsafe { set_kernel_slot(&self.shared().fd, &config, 0, None) }
            .map_err(|source| MemslotError::Kernel { what: "remove", slot, source })?;
        slots.remove(&slot);
        Ok(())
    }

    /// Starts or stops dirty logging of a slot.
    ///
    /// With [`ManualDirtyLog::InitiallySet`] all pages are dirty at first.
    pub fn set_dirty_logging(&self, slot: u32, on: bool) -> Result<(), MemslotError> {
        let mut slots = self.shared().slots.lock();
        let entry = slots.get_mut(&slot).ok_or(MemslotError::Unknown { slot })?;
        let changed = MemslotConfig { log_dirty: on, ..entry.config };
        let userfault = self.userfault_flag().zip(entry.userfault.as_deref());
        // SAFETY: same addresses as before, and the table keeps the owner of the mapping.
        unsafe { set_kernel_slot(&self.shared().fd, &changed, changed.len_bytes, userfault) }
            .map_err(|source| MemslotError::Kernel {
                what: "change dirty logging of",
                slot,
                source,
            })?;
        entry.config = changed;
        Ok(())
    }

    /// Makes vCPUs exit at the pages of a slot that are marked in `bitmap` ([`crate::FaultCause::Marked`]);
    /// `None` ends that.
    ///
    /// May be called while vCPUs run. Pages that KVM had mapped fault again afterwards; without the bitmap,
    /// huge mappings are restored. A vCPU may still report an earlier exit.
    ///
    /// # Errors
    /// [`MemslotError::NoUserfault`] if KVM lacks support; [`MemslotError::BitmapLength`] if the bitmap is
    /// not as long as the slot; [`MemslotError::Kernel`] otherwise, such as for another bitmap while one is
    /// in use.
    pub fn set_userfault(
        &self,
        slot: u32,
        bitmap: Option<Arc<UserfaultBitmap>>,
    ) -> Result<(), MemslotError> {
        let flag = self.userfault_flag().ok_or(MemslotError::NoUserfault)?;
        let mut slots = self.shared().slots.lock();
        let entry = slots.get_mut(&slot).ok_or(MemslotError::Unknown { slot })?;
        check_bitmap(slot, entry.pages(), bitmap.as_deref())?;
        let userfault = bitmap.as_deref().map(|bitmap| (flag, bitmap));
        let config = entry.config;
        // SAFETY: same addresses as before, and the table keeps the owner of the mapping.
        unsafe { set_kernel_slot(&self.shared().fd, &config, config.len_bytes, userfault) }
            .map_err(|source| MemslotError::Kernel {
                what: "change userfault exits of",
                slot,
                source,
            })?;
        entry.userfault = bitmap;
        Ok(())
    }

    fn userfault_flag(&self) -> Option<u32> {
        self.capabilities().userfault.and_then(|support| support.slot_flag)
    }

    /// All slots, in order of slot number.
    pub fn memory_slots(&self) -> Vec<MemslotConfig> {
        self.shared().slots.lock().values().map(|slot| slot.config).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_slots_are_refused_before_the_kernel_sees_them() {
        let good = MemslotConfig {
            slot: 1,
            gpa: 0x1000,
            hva: 0x10_0000,
            len_bytes: 0x2000,
            log_dirty: false,
            readonly: false,
        };
        assert!(check(&good).is_ok());
        for bad in [
            MemslotConfig { len_bytes: 0, ..good },
            MemslotConfig { len_bytes: 0x2001, ..good },
            MemslotConfig { gpa: 0x800, ..good },
            MemslotConfig { hva: 0x800, ..good },
            MemslotConfig { hva: 0, ..good },
            MemslotConfig { gpa: !0xfff, ..good },
            MemslotConfig { hva: !0xfff, ..good },
        ] {
            assert!(matches!(check(&bad), Err(MemslotError::Malformed { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_bitmap_of_another_length_is_refused() {
        let bitmap = UserfaultBitmap::new(64, true).ok();
        assert!(check_bitmap(1, 64, bitmap.as_ref()).is_ok());
        assert!(check_bitmap(1, 64, None).is_ok());
        for slot_pages in [63, 65, 128] {
            let refused = check_bitmap(1, slot_pages, bitmap.as_ref());
            assert!(matches!(refused, Err(MemslotError::BitmapLength { pages: 64, .. })));
        }
    }
}
