// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The dirty log of a machine: KVM's, VFIO's, those of vhost-user back ends and the VMM's own, merged.
//!
//! Owns the union of KVM's log (vCPUs), of the log of device writes in this process, of what
//! passed-through devices write by DMA, and of what back ends of vhost-user devices write. Tracking starts when the value is made and stops when it is
//! dropped.

use std::ops::Range;
use std::sync::Arc;

use devices::virtio::vhost_user::WriteLog;
use hypervisor::{ManualDirtyLog, MemslotConfig, MemslotError, Vm};
use memory::{GuestRam, RamRegion};
use parking_lot::Mutex;
use vfio::DmaLog;
use vm_migration::VmError;
use vm_migration::vm::DirtyLog;

use crate::machine::{check_logs, slots_in};

/// Size of a page of the logs.
const PAGE_BYTES: u64 = 4096;

/// The dirty log of a migrating machine.
pub struct MachineDirtyLog {
    vm: Vm,
    ram: Arc<GuestRam>,
    /// The memory slots by region.
    pieces: Vec<Vec<Piece>>,
    /// Dirty bits that KVM has reported and no slice has taken yet, by region: if reading clears KVM's log,
    /// this is the only copy. Locked once per slice by the one thread that copies it.
    noted: Vec<Mutex<Vec<u64>>>,
    /// DMA logs of passed-through devices; their bits are merged into the log of device writes.
    dma: Vec<DmaLog>,
    /// The same of the back ends of vhost-user devices.
    served: Vec<WriteLog>,
}

/// Logs of what does not run in this process.
pub struct DeviceLogs {
    /// Of passed-through devices.
    pub dma: Vec<DmaLog>,
    /// Of the back ends of vhost-user devices.
    pub served: Vec<WriteLog>,
}

/// A memory slot of a region; a region that is plugged in while the guest runs may have several, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    slot: u32,
    /// Its pages, as those of the region. They begin at a multiple of 64.
    pages: Range<u64>,
}

impl Piece {
    /// What of `pages` is in the slot, as pages of it, and the first word of it among those of `pages`.
    fn part_of(&self, pages: &Range<u64>) -> Option<(usize, Range<u64>)> {
        let (start, end) = (pages.start.max(self.pages.start), pages.end.min(self.pages.end));
        if start >= end {
            return None;
        }
        let from = usize::try_from((start - pages.start) / 64).ok()?;
        Some((from, start - self.pages.start..end - self.pages.start))
    }
}

/// The slots of all regions. They stay while the guest moves.
fn pieces(vm: &Vm, ram: &GuestRam) -> Vec<Vec<Piece>> {
    let page = |bytes: u64| bytes / PAGE_BYTES;
    let of_region = |region: &Arc<RamRegion>| {
        let slots = slots_in(vm, region).into_iter();
        let piece = |slot: MemslotConfig| {
            let first = page(slot.gpa.saturating_sub(region.gpa()));
            Piece { slot: slot.slot, pages: first..first.saturating_add(page(slot.len_bytes)) }
        };
        slots.map(piece).collect()
    };
    ram.regions().iter().map(of_region).collect()
}

/// Adds the bits of `piece`, of which the first is page `first`, to those of its region.
fn merge(bits: &[u64], first: u64, noted: &mut Vec<u64>) {
    let start = usize::try_from(first / 64).unwrap_or(usize::MAX);
    let end = start.saturating_add(bits.len());
    if noted.len() < end {
        noted.resize(end, 0);
    }
    for (word, bits) in noted.iter_mut().skip(start).zip(bits) {
        *word |= bits;
    }
}

/// Moves the bits from word `first_word` on to `words`; beyond the last slot of a region there are none.
fn take_noted(noted: &mut [u64], first_word: usize, words: &mut [u64]) {
    words.fill(0);
    for (word, bits) in words.iter_mut().zip(noted.iter_mut().skip(first_word)) {
        *word = std::mem::take(bits);
    }
}

impl MachineDirtyLog {
    /// Starts dirty tracking; `watch` starts the logs of what does not run in this process.
    ///
    /// # Errors
    /// A KVM call failed; tracking is off then.
    pub fn start(
        vm: Vm,
        ram: Arc<GuestRam>,
        watch: impl FnOnce() -> DeviceLogs,
    ) -> Result<Self, MemslotError> {
        ram.track_device_writes(true);
        let noted = ram.regions().iter().map(|_| Mutex::new(Vec::new())).collect();
        let pieces = pieces(&vm, &ram);
        let DeviceLogs { dma, served } = watch();
        let log = Self { vm, ram, pieces, noted, dma, served };
        for piece in log.pieces.iter().flatten() {
            log.vm.set_dirty_logging(piece.slot, true)?;
        }
        Ok(log)
    }
}

impl Drop for MachineDirtyLog {
    fn drop(&mut self) {
        for Piece { slot, .. } in self.pieces.iter().flatten() {
            if let Err(error) = self.vm.set_dirty_logging(*slot, false) {
                log::warn!("the dirty log of memory slot {slot} cannot be stopped: {error}");
            }
        }
        self.ram.track_device_writes(false);
    }
}

impl DirtyLog for MachineDirtyLog {
    fn begin_round(&self) -> Result<u64, VmError> {
        self.dma.iter().for_each(|log| log.collect(&self.ram));
        self.served.iter().for_each(|log| log.collect(&self.ram));
        // Requests that a lost back end has taken and not answered are in no state: the move would fail at its end.
        check_logs(&self.served)?;
        let mut pages = 0;
        for (index, region) in self.ram.regions().iter().enumerate() {
            let mut noted = self.noted[index].lock();
            for piece in &self.pieces[index] {
                if piece.pages.start == 0 && self.pieces[index].len() == 1 {
                    self.vm.add_dirty_log(piece.slot, &mut noted)?;
                    continue;
                }
                let mut bits = Vec::new();
                self.vm.dirty_log(piece.slot, &mut bits)?;
                merge(&bits, piece.pages.start, &mut noted);
            }
            pages += noted.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            pages += region.device_dirty().count();
        }
        Ok(pages)
    }

    fn devices_without_log(&self) -> Vec<String> {
        let dma = self.dma.iter().filter(|log| log.is_missing()).map(DmaLog::device_id);
        let served = self.served.iter().filter(|log| log.is_missing()).map(WriteLog::device_id);
        dma.chain(served).map(str::to_owned).collect()
    }

    fn collect_and_clear(
        &self,
        region: usize,
        pages: Range<u64>,
        words: &mut [u64],
    ) -> Result<(), VmError> {
        let first_word = usize::try_from(pages.start / 64)?;
        take_noted(&mut self.noted[region].lock(), first_word, words);
        // Write protection first: a write after it is in the next round's log.
        if self.vm.capabilities().manual_dirty_log != ManualDirtyLog::None
            && words.iter().any(|word| *word != 0)
        {
            for piece in &self.pieces[region] {
                let Some((from, part)) = piece.part_of(&pages) else { continue };
                let count = u32::try_from(part.end - part.start)?;
                let bits = words.get(from..).unwrap_or_default();
                let bits =
                    bits.get(..usize::try_from(u64::from(count).div_ceil(64))?).unwrap_or(bits);
                self.vm.clear_dirty_log(piece.slot, part.start, count, bits)?;
            }
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

#[cfg(test)]
#[path = "dirty_tests.rs"]
mod merged_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_several_slots_are_those_of_their_region() {
        let mut noted = Vec::new();
        merge(&[1, 2], 128, &mut noted);
        merge(&[4], 0, &mut noted);
        merge(&[8, 8, 8], 192, &mut noted);
        assert_eq!(noted, [4, 0, 1, 2 | 8, 8, 8]);
    }

    /// The buffer still holds what the slice before had.
    #[test]
    fn what_has_no_slot_is_not_dirty() {
        let mut noted = vec![1, 2, 3];
        for (first, expected) in [(0, [1, 2]), (2, [3, 0]), (0, [0, 0]), (5, [0, 0])] {
            let mut words = [u64::MAX; 2];
            take_noted(&mut noted, first, &mut words);
            assert_eq!(words, expected, "from word {first}");
        }
        let mut words = [u64::MAX; 2];
        take_noted(&mut [], 0, &mut words);
        assert_eq!(words, [0, 0]);
    }

    #[test]
    fn a_slice_is_cleared_in_each_slot_that_has_a_part_of_it() {
        let piece = Piece { slot: 3, pages: 128..320 };
        for (pages, part) in [
            (0..128, None),
            (320..640, None),
            (0..192, Some((2, 0..64))),
            (128..320, Some((0, 0..192))),
            (192..256, Some((0, 64..128))),
            (64..640, Some((1, 0..192))),
            (256..640, Some((0, 128..192))),
        ] {
            assert_eq!(piece.part_of(&pages), part, "{pages:?}");
        }
    }
}
