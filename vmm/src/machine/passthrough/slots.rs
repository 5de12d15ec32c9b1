// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! BARs of passed-through devices as memory slots of KVM.
//!
//! Owns the numbers of these slots. Never touches what is behind them.

use std::collections::BTreeSet;
use std::sync::Arc;

use hypervisor::{MemslotConfig, Vm};
use parking_lot::Mutex;
use pci::MapError;
use vfio::{BarMapping, BarSlots};

/// First memory slot number for BARs; lower numbers are for RAM.
const FIRST_BAR_SLOT: u32 = 1024;
/// The same for devices that other processes emulate. KVM has 32764 slots.
const FIRST_USER_SLOT: u32 = 16 << 10;

/// Maps BARs as KVM memory slots.
pub struct KvmBarSlots {
    vm: Vm,
    first: u32,
    /// Slot numbers in use; only locked briefly.
    taken: Mutex<BTreeSet<u32>>,
}

impl KvmBarSlots {
    /// BAR slots of `vm`.
    pub fn new(vm: Vm) -> Self {
        Self { vm, first: FIRST_BAR_SLOT, taken: Mutex::default() }
    }

    /// Those for devices that other processes emulate.
    pub fn of_user_devices(vm: Vm) -> Self {
        Self { vm, first: FIRST_USER_SLOT, taken: Mutex::default() }
    }

    fn take(&self) -> u32 {
        let mut taken = self.taken.lock();
        let free = (self.first..u32::MAX).find(|number| !taken.contains(number));
        let number = free.unwrap_or(u32::MAX);
        taken.insert(number);
        number
    }

    fn release(&self, number: u32) {
        self.taken.lock().remove(&number);
    }
}

impl BarSlots for KvmBarSlots {
    fn map(&self, gpa: u64, memory: &Arc<BarMapping>) -> Result<u32, MapError> {
        let slot = self.take();
        let config = MemslotConfig {
            slot,
            gpa,
            hva: memory.host_addr(),
            len_bytes: memory.len_bytes(),
            log_dirty: false,
            readonly: false,
        };
        // SAFETY: the mapping is `len_bytes` long and stays until it is dropped, of which the slot
        // holds a share; nothing in this process reads or writes it.
        let made = unsafe { self.vm.set_memory_slot(config, Arc::<BarMapping>::clone(memory)) };
        made.map_err(|error| {
            self.release(slot);
            MapError { source: Box::new(error) }
        })?;
        Ok(slot)
    }

    fn unmap(&self, slot: u32) -> Result<(), MapError> {
        self.vm.remove_memory_slot(slot).map_err(|error| MapError { source: Box::new(error) })?;
        self.release(slot);
        Ok(())
    }
}
