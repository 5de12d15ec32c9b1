// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The separate mapping of guest memory for vCPUs.
//!
//! Owns the choice between that mapping and `main` for the guest's memory slot. What watches one of
//! the two does not watch the other: an access of a vCPU can be refused while devices wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{AccessError, RamRegion, map};
use crate::mapping::Mapping;
use crate::zone_kind::ZoneKind;

impl RamRegion {
    /// Creates a mapping for vCPUs alone. To be called before [`slot_addr`](Self::slot_addr) is
    /// used for the guest's memory slot; a second call has no effect.
    ///
    /// # Errors
    /// When the memory is private, or cannot be mapped.
    pub fn map_for_vcpus(&self) -> Result<(), AccessError> {
        if self.kind() != ZoneKind::Shared {
            return Err(AccessError::NoAlias { zone: self.zone_id().to_owned() });
        }
        let _making = self.lock_mappings();
        self.vcpus_in_main.store(false, Ordering::Release);
        if self.vcpus.get().is_some() {
            return Ok(());
        }
        let made = map(&self.zone, self.gpa, self.len_bytes, self.file_offset)
            .map_err(|source| AccessError::MapAlias { zone: self.zone_id().to_owned(), source })?;
        self.advise_huge_pages(&made);
        let made = Arc::new(made);
        self.zone.add_view(&made, self.file_offset);
        let _ = self.vcpus.set(made);
        Ok(())
    }

    /// Lets the vCPUs of the next guest use `main`. The mapping stays, as the slot of the guest before may still name it.
    pub(crate) fn return_vcpus_to_main(&self) {
        self.vcpus_in_main.store(true, Ordering::Release);
    }

    /// The vCPUs' own mapping, if they use one.
    pub(super) fn vcpus(&self) -> Option<&Arc<Mapping>> {
        self.vcpus.get().filter(|_| !self.vcpus_in_main.load(Ordering::Acquire))
    }

    /// Start of the vCPUs' own mapping, if they use one.
    pub fn vcpus_ptr(&self) -> Option<*mut u8> {
        self.vcpus().map(|mapping| mapping.start())
    }

    /// Host address for KVM's memory slot.
    pub fn slot_addr(&self) -> u64 {
        self.vcpus_ptr().map_or_else(|| self.host_addr(), |start| start.addr() as u64)
    }
}
