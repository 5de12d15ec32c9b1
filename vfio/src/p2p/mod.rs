// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Peer-to-peer DMA: BARs of passed-through functions, mapped in the IOMMU for the others.
//!
//! Owns the record of what is to be mapped in the IOMMU and of what is mapped. A BAR that a guest reaches at an
//! address is mapped there, and unmapped when the guest no longer reaches it. Guest memory has
//! priority: if a BAR cannot be mapped, the VM continues without the mapping, and BARs take only a part of the
//! mappings that an IOMMU allows.
//!
//! ```text
//!   nothing is mapped -- two functions, and the first of them passes the gate --> BARs are mapped
//! ```
//!
//! Before that the mappings would have no use: without Bus Master Enable there is no DMA, and a function does not
//! need the IOMMU to reach its own BARs. What that will take is part of the forecast of the guest's first wait
//! ([`P2pBars::time_to_map`]). So the guest's first accesses to configuration space do not wait
//! for the kernel, which is busy with guest memory then, and those of a VM with one device never do.

#[cfg(any(test, feature = "testing"))]
pub mod fakes;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::{debug, error, warn};
use parking_lot::Mutex;

use super::mapping::BarMapping;

/// Inverse of the share of the IOMMU's mappings that BARs may take: half of what guest memory leaves.
const ENTRIES_SHARE: u64 = 8;

/// Bytes of BARs that are mapped a second before anything was: a page at a time, 32 GiB of a BAR take Linux about a second.
const BYTES_PER_SECOND: u64 = 32 << 30;
/// The same since Linux 6.15, which maps a page of the kernel's page tables at a time, of up to 1 GiB: less than a
/// millisecond.
const HUGE_BYTES_PER_SECOND: u64 = 32 << 40;
/// The first such kernel.
const HUGE_SINCE: (u32, u32) = (6, 15);

/// An IOMMU address space that can map device memory.
pub trait P2pTarget: Send + Sync {
    /// Maps device memory at a guest physical address. The caller keeps `memory` until it is unmapped.
    ///
    /// # Errors
    /// The kernel's error.
    fn map_bar(&self, gpa: u64, memory: &BarMapping) -> io::Result<()>;
    /// Unmaps a range that was mapped as one.
    ///
    /// # Errors
    /// The kernel's error.
    fn unmap_bar(&self, gpa: &Range<u64>) -> io::Result<()>;
    /// Maximum number of mappings, if limited.
    fn entries(&self) -> Option<u64>;
}

/// The function that owns BARs.
#[derive(Debug)]
struct Owner {
    id: String,
    /// Whether it was logged that a part of it is not reachable.
    was_told: AtomicBool,
}

/// State of a part of a BAR in the IOMMU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MapState {
    /// To be mapped once functions may use DMA.
    Waits,
    Mapped,
    /// The kernel refused it; retried when the BAR moves.
    Refused,
}

/// A part of a BAR that is mapped in the guest.
struct Bar {
    owner: Arc<Owner>,
    memory: Arc<BarMapping>,
    state: MapState,
}

#[derive(Default)]
struct State {
    functions: usize,
    /// Whether a function has passed the gate.
    may_dma: bool,
    bars: BTreeMap<u64, Bar>,
    /// Lengths of what there is of each function that can be mapped, whether the guest has it at an address or not.
    mappable: Vec<(Arc<Owner>, Vec<u64>)>,
    mapped: u64,
    /// Bytes that were mapped, and what that took.
    measured: (u64, Duration),
    /// Mappings that the kernel refused to unmap; their devices are kept open as long as the VM.
    stuck: Vec<Arc<BarMapping>>,
}

/// The BARs of all functions that share one set of DMA mappings.
pub struct P2pBars {
    target: Arc<dyn P2pTarget>,
    entries_max: u64,
    /// What the kernel maps a second, as long as nothing was mapped.
    bytes_per_second: u64,
    /// Held while BARs are mapped and unmapped. Only used by changes of BAR decoding and by writes that set
    /// Bus Master Enable, not by those of the power state; locked last.
    state: Mutex<State>,
}

impl P2pBars {
    /// Without BARs.
    pub fn new(target: Arc<dyn P2pTarget>) -> Arc<Self> {
        let entries_max = target.entries().map_or(u64::MAX, |entries| entries / ENTRIES_SHARE);
        let is_huge = memory::running_release().is_some_and(|release| release >= HUGE_SINCE);
        let bytes_per_second = if is_huge { HUGE_BYTES_PER_SECOND } else { BYTES_PER_SECOND };
        Arc::new(Self { target, entries_max, bytes_per_second, state: Mutex::default() })
    }

    /// Adds a function, until the returned value is dropped. `mappable`: lengths of the parts of its BARs that can be
    /// mapped.
    pub fn join(self: &Arc<Self>, id: &str, mappable: Vec<u64>) -> Peer {
        let owner = Arc::new(Owner { id: id.to_owned(), was_told: AtomicBool::new(false) });
        let mut state = self.state.lock();
        state.functions += 1;
        state.mappable.push((Arc::clone(&owner), mappable));
        self.map_what_is_not(&mut state);
        drop(state);
        Peer { bars: Arc::clone(self), owner }
    }

    /// How long the first function that passes the gate waits for the BARs of all, if the guest has all of them at an
    /// address by then; none later, and none if there is only one. By what such mappings have taken here, or by what is
    /// known of the kernel.
    pub fn time_to_map(&self) -> Duration {
        let state = self.state.lock();
        if state.may_dma || state.functions < 2 {
            return Duration::ZERO;
        }
        let mut lens: Vec<_> = state.mappable.iter().flat_map(|(_, lens)| lens).copied().collect();
        // The most that it can be.
        lens.sort_unstable_by(|one, other| other.cmp(one));
        let count = usize::try_from(self.entries_max).unwrap_or(usize::MAX);
        let bytes = lens.into_iter().take(count).fold(0, u64::saturating_add);
        let (done, took) = match state.measured {
            (0, _) => (self.bytes_per_second, Duration::from_secs(1)),
            measured => measured,
        };
        let nanos = u128::from(bytes).saturating_mul(took.as_nanos()) / u128::from(done.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn map_what_is_not(&self, state: &mut State) {
        if !state.may_dma || state.functions < 2 {
            return;
        }
        let State { bars, mapped, measured, .. } = state;
        for (gpa, bar) in bars.iter_mut().filter(|(_, bar)| bar.state == MapState::Waits) {
            let begun = Instant::now();
            let result = if *mapped < self.entries_max {
                self.target.map_bar(*gpa, &bar.memory)
            } else {
                Err(io::Error::other("too many are (dma_entry_limit of vfio_iommu_type1)"))
            };
            if let Err(error) = result {
                bar.state = MapState::Refused;
                bar.owner.tell(*gpa, bar.memory.len_bytes(), &error);
            } else {
                bar.state = MapState::Mapped;
                *mapped += 1;
                measured.0 = measured.0.saturating_add(bar.memory.len_bytes());
                measured.1 = measured.1.saturating_add(begun.elapsed());
            }
        }
    }
}

impl Owner {
    fn tell(&self, gpa: u64, len_bytes: u64, error: &io::Error) {
        if !self.was_told.swap(true, Ordering::Relaxed) {
            let id = &self.id;
            warn!(
                "other passed-through devices cannot reach all of device {id} by DMA, as {len_bytes:#x} \
                 bytes of it at {gpa:#x} cannot be mapped in the IOMMU: {error}"
            );
        }
    }
}

/// A function among [`P2pBars`].
pub struct Peer {
    bars: Arc<P2pBars>,
    owner: Arc<Owner>,
}

impl Peer {
    /// Adds a part of its BARs that the guest has mapped at `gpa`.
    pub fn show(&self, gpa: u64, memory: &Arc<BarMapping>) {
        let mut state = self.bars.state.lock();
        let (owner, memory) = (Arc::clone(&self.owner), Arc::clone(memory));
        // BARs never overlap in the guest, so the entry is free.
        state.bars.entry(gpa).or_insert(Bar { owner, memory, state: MapState::Waits });
        self.bars.map_what_is_not(&mut state);
    }

    /// Removes a part before the guest unmaps it.
    pub fn hide(&self, gpa: u64, memory: &Arc<BarMapping>) {
        let mut state = self.bars.state.lock();
        let Some(bar) = state.bars.remove(&gpa).filter(|bar| bar.state == MapState::Mapped) else {
            return;
        };
        match self.bars.target.unmap_bar(&(gpa..gpa.saturating_add(memory.len_bytes()))) {
            Ok(()) => state.mapped = state.mapped.saturating_sub(1),
            Err(error) => {
                let id = &self.owner.id;
                error!(
                    "a BAR of device {id} at {gpa:#x} stays mapped in the IOMMU, and the device with \
                     this VM: {error}"
                );
                state.stuck.push(bar.memory);
            }
        }
    }

    /// Records that a function passes the gate: from now on functions may use p2p.
    pub fn pass_gate(&self) {
        let mut state = self.bars.state.lock();
        if !state.may_dma {
            state.may_dma = true;
            self.bars.map_what_is_not(&mut state);
            debug!("{} parts of BARs are mapped for DMA of other devices", state.mapped);
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut state = self.bars.state.lock();
        state.functions = state.functions.saturating_sub(1);
        state.mappable.retain(|(owner, _)| !Arc::ptr_eq(owner, &self.owner));
    }
}
