// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where the BARs of a segment lie, and what of that is mapped.
//!
//! Owns the two address windows and the record of every BAR: where its register points, which
//! range it holds in a window, and which range is mapped. Only a BAR that decodes and holds the
//! range its register points to is mapped, so a guest can never lay a BAR over RAM, over another
//! device or outside the windows: such a BAR is just not mapped, and comes back as soon as its
//! range is free or its register points elsewhere.
//!
//! A BAR that does not decode holds its range softly: new devices are not placed there, but a BAR
//! that does decode may take it (guests shuffle BARs with decoding off).

#[cfg(test)]
mod tests;

use std::sync::Arc;

use devices::bus::BusDevice;
use log::warn;
use thiserror::Error;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use crate::address::DeviceNumber;
use crate::device::PciDevice;
use crate::locks::LogBudget;

/// A range of guest physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MmioRange {
    /// First guest physical address.
    pub start_gpa: u64,
    /// Length.
    pub len_bytes: u64,
}

/// The ranges in which BARs may lie. Nothing else may lie there: no RAM, no ECAM, no interrupt
/// controller, no other segment's BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioWindows {
    /// Below 4 GiB; 32-bit BARs are placed here.
    pub below_4g: MmioRange,
    /// Usually above 4 GiB; 64-bit BARs are placed here.
    pub above_4g: MmioRange,
}

/// Width of a memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit address, one register.
    Memory32,
    /// 64-bit address, two registers.
    Memory64,
}

/// One BAR of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarDescription {
    /// Index of its (first) register, 0 to 5.
    pub index: u8,
    /// Width.
    pub kind: BarKind,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
    /// Size, a power of two.
    pub len_bytes: u64,
}

/// What a function's BAR registers say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarDecode {
    /// Memory decode is on.
    pub enabled: bool,
    /// Index and address of each BAR.
    pub gpas: Vec<(u8, u64)>,
}

/// Why the address space refused a mapping.
#[derive(Debug, Error)]
#[error("the MMIO address space refused the range")]
pub struct MapError {
    /// Its reason.
    #[from]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// The MMIO address space in which BARs are mapped.
///
/// Calls come from inside an access of a vCPU to configuration space, so an implementation must
/// not hold a lock during dispatch that it needs here. Calls come one at a time from a segment.
pub trait BarMapper: Send + Sync {
    /// Accesses to `range` go to `device` from now on.
    fn map(&self, range: MmioRange, device: Arc<dyn BusDevice>) -> Result<(), MapError>;
    /// Accesses to `range` go nowhere from now on; it was mapped before.
    fn unmap(&self, range: MmioRange) -> Result<(), MapError>;
    /// What was mapped at `from` is at `to` from now on, which has the same length. After an error
    /// it is still at `from`.
    fn relocate(&self, from: MmioRange, to: MmioRange) -> Result<(), MapError>;
}

/// One BAR of one function, as the MMIO bus sees it.
pub struct BarWindow {
    device: Arc<dyn PciDevice>,
    index: u8,
}

impl BusDevice for BarWindow {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.device.read_bar(self.index, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.device.write_bar(self.index, offset, data);
    }
}

/// Why BARs could not be placed.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// A window is impossible.
    #[error("the PCI MMIO window of {len_bytes:#x} bytes at {start_gpa:#x} is impossible")]
    Window {
        /// Its start.
        start_gpa: u64,
        /// Its length.
        len_bytes: u64,
        /// What is wrong with it.
        #[source]
        source: vm_allocator::Error,
    },
    /// A window is full.
    #[error(
        "no room for BAR {index} of PCI device {id} ({len_bytes:#x} bytes) in the window from \
         {start_gpa:#x} to {last_gpa:#x}"
    )]
    NoRoom {
        /// Id of the device.
        id: String,
        /// Index of the BAR.
        index: u8,
        /// Size of the BAR.
        len_bytes: u64,
        /// First address of the window.
        start_gpa: u64,
        /// Last address of the window.
        last_gpa: u64,
        /// The allocator's reason.
        #[source]
        source: vm_allocator::Error,
    },
}

/// A range held in one of the windows.
#[derive(Clone, Copy, Debug)]
struct Claim {
    window: usize,
    range: RangeInclusive,
}

/// All that is known of one BAR.
struct PlacedBar {
    owner: DeviceNumber,
    device: Arc<dyn PciDevice>,
    description: BarDescription,
    /// Where the register points.
    wanted_gpa: u64,
    /// Whether the function decodes memory accesses.
    decodes: bool,
    claim: Option<Claim>,
    mapped: Option<MmioRange>,
}

impl PlacedBar {
    fn claims_wanted(&self) -> bool {
        self.claim.is_some_and(|claim| claim.range.start() == self.wanted_gpa)
    }

    fn range_at(&self, start_gpa: u64) -> MmioRange {
        MmioRange { start_gpa, len_bytes: self.description.len_bytes }
    }
}

const WINDOW_BELOW_4G: usize = 0;
const WINDOW_ABOVE_4G: usize = 1;

/// The BARs of one segment.
pub struct BarPlacement {
    mapper: Arc<dyn BarMapper>,
    windows: [AddressAllocator; 2],
    bars: Vec<PlacedBar>,
    log_budget: LogBudget,
}

impl BarPlacement {
    /// A placement without BARs.
    pub fn new(windows: MmioWindows, mapper: Arc<dyn BarMapper>) -> Result<Self, PlacementError> {
        let allocator =
            |window: MmioRange| {
                let MmioRange { start_gpa, len_bytes } = window;
                AddressAllocator::new(start_gpa, len_bytes)
                    .map_err(|source| PlacementError::Window { start_gpa, len_bytes, source })
            };
        Ok(Self {
            mapper,
            windows: [allocator(windows.below_4g)?, allocator(windows.above_4g)?],
            bars: Vec::new(),
            log_budget: LogBudget::default(),
        })
    }

    /// Gives every BAR of a function an address; all or none.
    pub fn add(
        &mut self,
        owner: DeviceNumber,
        device: &Arc<dyn PciDevice>,
    ) -> Result<(), PlacementError> {
        let mut descriptions = device.bars();
        // Large ones first leaves the fewest gaps.
        descriptions.sort_by_key(|bar| std::cmp::Reverse(bar.len_bytes));
        let mut claims = Vec::with_capacity(descriptions.len());
        for description in descriptions {
            match self.place(device.id(), description) {
                Ok(claim) => claims.push((description, claim)),
                Err(error) => {
                    for (_, claim) in claims {
                        self.free(claim);
                    }
                    return Err(error);
                }
            }
        }
        for (description, claim) in claims {
            device.place_bar(description.index, claim.range.start());
            self.bars.push(PlacedBar {
                owner,
                device: Arc::clone(device),
                description,
                wanted_gpa: claim.range.start(),
                decodes: false,
                claim: Some(claim),
                mapped: None,
            });
        }
        self.refresh(owner);
        Ok(())
    }

    /// Forgets the BARs of a function; what was mapped of them is not any more.
    pub fn remove(&mut self, owner: DeviceNumber) {
        for at in (0..self.bars.len())
            .rev()
            .filter(|at| self.bars[*at].owner == owner)
            .collect::<Vec<_>>()
        {
            self.unmap(at);
            let bar = self.bars.swap_remove(at);
            if let Some(claim) = bar.claim {
                self.free(claim);
            }
        }
        // Others may have waited for these ranges.
        self.settle();
    }

    fn place(&mut self, id: &str, bar: BarDescription) -> Result<Claim, PlacementError> {
        let window = match bar.kind {
            BarKind::Memory32 => WINDOW_BELOW_4G,
            BarKind::Memory64 => WINDOW_ABOVE_4G,
        };
        let allocator = &mut self.windows[window];
        allocator
            .allocate(bar.len_bytes, bar.len_bytes, AllocPolicy::FirstMatch)
            .map(|range| Claim { window, range })
            .map_err(|source| PlacementError::NoRoom {
                id: id.to_owned(),
                index: bar.index,
                len_bytes: bar.len_bytes,
                start_gpa: allocator.base(),
                last_gpa: allocator.end(),
                source,
            })
    }

    /// Brings the mappings of a function in line with its registers.
    pub fn refresh(&mut self, owner: DeviceNumber) {
        self.observe(|bar| bar.owner == owner);
        self.settle();
    }

    /// Brings all mappings in line with the registers.
    pub fn refresh_all(&mut self) {
        self.observe(|_| true);
        self.settle();
    }

    fn observe(&mut self, of_interest: impl Fn(&PlacedBar) -> bool) {
        for bar in self.bars.iter_mut().filter(|bar| of_interest(bar)) {
            let decode = bar.device.bar_decode();
            bar.decodes = decode.enabled;
            let gpa = decode.gpas.iter().find(|(index, _)| *index == bar.description.index);
            if let Some((_, gpa)) = gpa {
                bar.wanted_gpa = *gpa;
            }
        }
    }

    /// Goes over all BARs until nothing changes: what one gives up, another may be waiting for.
    ///
    /// Ends because a decoding BAR only ever takes a range that is free or softly held, and others
    /// take free ones only.
    fn settle(&mut self) {
        // First of all, as the range of a BAR that does not decode may be taken at once.
        for at in 0..self.bars.len() {
            if !self.bars[at].decodes {
                self.unmap(at);
            }
        }
        loop {
            let mut changed = false;
            for at in 0..self.bars.len() {
                changed |= self.step(at);
            }
            if !changed {
                return;
            }
        }
    }

    fn step(&mut self, at: usize) -> bool {
        let mut changed = false;
        if !self.bars[at].claims_wanted() {
            let given_up = self.bars[at].claim.take();
            if let Some(claim) = given_up {
                self.free(claim);
            }
            let claim = self.claim_wanted(at);
            self.bars[at].claim = claim;
            changed |= given_up.is_some() || claim.is_some();
            if claim.is_some() {
                self.relocate(at);
            } else {
                self.unmap(at);
            }
        }
        if self.bars[at].decodes && self.bars[at].claims_wanted() {
            changed |= self.map(at);
        }
        changed
    }

    /// Holds the range that the register points to, if it lies in a window and is free.
    fn claim_wanted(&mut self, at: usize) -> Option<Claim> {
        let bar = &self.bars[at];
        let len_bytes = bar.description.len_bytes;
        let last_gpa = bar.wanted_gpa.checked_add(len_bytes - 1)?;
        let range = RangeInclusive::new(bar.wanted_gpa, last_gpa).ok()?;
        let window = self
            .windows
            .iter()
            .position(|window| window.base() <= range.start() && range.end() <= window.end())?;
        if bar.decodes && !self.take_soft_claims(range) {
            return None;
        }
        // Asked for an exact range inside of one that is taken, the allocator gives it.
        let taken = |bar: &PlacedBar| bar.claim.is_some_and(|claim| claim.range.overlaps(&range));
        if self.bars.iter().any(taken) {
            return None;
        }
        self.windows[window]
            .allocate(len_bytes, len_bytes, AllocPolicy::ExactMatch(range.start()))
            .ok()
            .map(|range| Claim { window, range })
    }

    /// Frees what soft holders have of `wanted`, unless a decoding BAR has a part of it: taking
    /// anything then would help nobody, and the holders would take it back for ever.
    fn take_soft_claims(&mut self, wanted: RangeInclusive) -> bool {
        let overlaps = |claim: &Claim| claim.range.overlaps(&wanted);
        if self.bars.iter().any(|bar| bar.decodes && bar.claim.as_ref().is_some_and(overlaps)) {
            return false;
        }
        let claims: Vec<Claim> = self
            .bars
            .iter_mut()
            .filter_map(|bar| bar.claim.take_if(|claim| overlaps(claim)))
            .collect();
        for claim in claims {
            self.free(claim);
        }
        true
    }

    fn free(&mut self, claim: Claim) {
        let freed = self.windows[claim.window].free(&claim.range);
        debug_assert!(freed.is_ok(), "a claim that the allocator does not know");
    }

    fn map(&mut self, at: usize) -> bool {
        let bar = &mut self.bars[at];
        if bar.mapped.is_some() {
            return false;
        }
        let range = bar.range_at(bar.wanted_gpa);
        let index = bar.description.index;
        let window = Arc::new(BarWindow { device: Arc::clone(&bar.device), index });
        match self.mapper.map(range, window) {
            Ok(()) => {
                bar.mapped = Some(range);
                bar.device.bar_moved(index, Some(range.start_gpa));
                true
            }
            Err(error) => {
                self.complain("map", at, range, &error);
                false
            }
        }
    }

    fn unmap(&mut self, at: usize) -> bool {
        let bar = &mut self.bars[at];
        let Some(range) = bar.mapped.take() else { return false };
        bar.device.bar_moved(bar.description.index, None);
        if let Err(error) = self.mapper.unmap(range) {
            self.complain("unmap", at, range, &error);
        }
        true
    }

    /// Moves a mapped BAR to where it points now; does nothing for one that is not mapped.
    fn relocate(&mut self, at: usize) {
        let bar = &mut self.bars[at];
        let Some(from) = bar.mapped else { return };
        let to = bar.range_at(bar.wanted_gpa);
        let index = bar.description.index;
        bar.device.bar_moved(index, None);
        match self.mapper.relocate(from, to) {
            Ok(()) => {
                bar.mapped = Some(to);
                bar.device.bar_moved(index, Some(to.start_gpa));
            }
            Err(error) => {
                self.complain("relocate", at, to, &error);
                self.unmap(at);
            }
        }
    }

    fn complain(&self, what: &str, at: usize, range: MmioRange, error: &MapError) {
        if self.log_budget.take() {
            let bar = &self.bars[at];
            let (id, index) = (bar.device.id(), bar.description.index);
            let reason = &error.source;
            warn!("PCI device {id}: cannot {what} BAR {index} at {:#x}: {reason}", range.start_gpa);
        }
    }
}
