// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The dirty log of a machine: KVM's, VFIO's and the VMM's own, merged.
//!
//! Owns the union of KVM's log (vCPUs), of the log of device writes in this process, and of what
//! passed-through devices write by DMA. Tracking starts when the value is made and stops when it is
//! dropped.

use std::ops::Range;
use std::sync::Arc;

use hypervisor::{ManualDirtyLog, MemslotError, Vm};
use memory::GuestRam;
use parking_lot::Mutex;
use vfio::DmaLog;
use vm_migration::VmError;
use vm_migration::vm::DirtyLog;

/// The dirty log of a migrating machine.
pub struct MachineDirtyLog {
    vm: Vm,
    ram: Arc<GuestRam>,
    /// Dirty bits that KVM has reported and no slice has taken yet, by region: if reading clears KVM's log,
    /// this is the only copy. Locked once per slice by the one thread that copies it.
    noted: Vec<Mutex<Vec<u64>>>,
    /// DMA logs of passed-through devices; their bits are merged into the log of device writes.
    dma: Vec<DmaLog>,
}

fn slot_of(region: usize) -> u32 {
    u32::try_from(region).unwrap_or(u32::MAX)
}

impl MachineDirtyLog {
    /// Starts dirty tracking; `watch_dma` starts the DMA logs of passed-through devices.
    ///
    /// # Errors
    /// A KVM call failed; tracking is off then.
    pub fn start(
        vm: Vm,
        ram: Arc<GuestRam>,
        watch_dma: impl FnOnce() -> Vec<DmaLog>,
    ) -> Result<Self, MemslotError> {
        ram.track_device_writes(true);
        let noted = ram.regions().iter().map(|_| Mutex::new(Vec::new())).collect();
        let log = Self { vm, ram, noted, dma: watch_dma() };
        for region in 0..log.ram.regions().len() {
            log.vm.set_dirty_logging(slot_of(region), true)?;
        }
        Ok(log)
    }
}

impl Drop for MachineDirtyLog {
    fn drop(&mut self) {
        for region in 0..self.ram.regions().len() {
            if let Err(error) = self.vm.set_dirty_logging(slot_of(region), false) {
                log::warn!("the dirty log of region {region} cannot be stopped: {error}");
            }
        }
        self.ram.track_device_writes(false);
    }
}

impl DirtyLog for MachineDirtyLog {
    fn begin_round(&self) -> Result<u64, VmError> {
        self.dma.iter().for_each(|log| log.collect(&self.ram));
        let mut pages = 0;
        for (index, region) in self.ram.regions().iter().enumerate() {
            let mut noted = self.noted[index].lock();
            self.vm.add_dirty_log(slot_of(index), &mut noted)?;
            pages += noted.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            pages += region.device_dirty().count();
        }
        Ok(pages)
    }

    fn devices_without_log(&self) -> Vec<String> {
        self.dma
            .iter()
            .filter(|log| log.is_missing())
            .map(|log| log.device_id().to_owned())
            .collect()
    }

    fn collect_and_clear(
        &self,
        region: usize,
        pages: Range<u64>,
        words: &mut [u64],
    ) -> Result<(), VmError> {
        let first_word = usize::try_from(pages.start / 64)?;
        {
            let mut noted = self.noted[region].lock();
            for (word, bits) in words.iter_mut().zip(noted.iter_mut().skip(first_word)) {
                *word = std::mem::take(bits);
            }
        }
        // Write protection first: a write after it is in the next round's log.
        if self.vm.capabilities().manual_dirty_log != ManualDirtyLog::None
            && words.iter().any(|word| *word != 0)
        {
            let count = u32::try_from(pages.end - pages.start)?;
            self.vm.clear_dirty_log(slot_of(region), pages.start, count, words)?;
        }
        // The last round requests all of memory in this way, slice by slice, while the guest is stopped.
        let mut buffer = [0; 64];
        let mut first = pages.start;
        for words in words.chunks_mut(buffer.len()) {
            let end = pages.end.min(first + 64 * words.len() as u64);
            let device = &mut buffer[..words.len()];
            self.ram.regions()[region].device_dirty().take(first..end, device);
            for (word, bits) in words.iter_mut().zip(device) {
                *word |= *bits;
            }
            first = end;
        }
        Ok(())
    }
}
