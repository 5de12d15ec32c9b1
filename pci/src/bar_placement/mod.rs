// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Placement of the BARs of a segment, and their mappings.
//!
//! Owns the windows, two of memory and perhaps one of ports, and the record of every BAR: where its
//! register points, which range it holds in a window, and which range is mapped. Only a BAR that
//! decodes and holds the range its register points to is mapped, so a guest can never lay a BAR over
//! RAM, over another device or outside the windows: such a BAR is just not mapped, and is mapped again as
//! soon as its range is free or its register points elsewhere.
//!
//! A BAR that does not decode only reserves its range: new devices are not placed there, but a BAR
//! that does decode may take it (guests move BARs with decoding off).
//!
//! The window below 4 GiB is small and filled from its end, so that its beginning, which has the largest
//! alignment, is left to large BARs. A function whose 32-bit BAR finds no room there is asked for a
//! 64-bit one.

mod reserved;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use devices::bus::BusDevice;
use devices::{LogLimit, log_limited};
use log::warn;
use pci_address::DeviceNumber;
use thiserror::Error;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use crate::bar::{BarDescription, BarKind};
use crate::device::PciDevice;

pub use reserved::RangeWish;
pub use rules::{BarRules, FilledFrom, GODWIT_BARS};

/// A range of guest physical addresses; for an I/O BAR a range of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MmioRange {
    /// First guest physical address.
    pub start_gpa: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// The address windows for BARs, which must not contain anything else: no RAM, ECAM, interrupt controller,
/// or BARs of another segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioWindows {
    /// Below 4 GiB; 32-bit BARs are placed here.
    pub below_4g: MmioRange,
    /// Usually above 4 GiB; 64-bit BARs are placed here.
    pub above_4g: MmioRange,
}

/// The ports for I/O BARs, which no other device or segment may use.
pub struct PortWindow {
    /// First port.
    pub first: u16,
    /// Last port.
    pub last: u16,
    /// The address space of the ports.
    pub mapper: Arc<dyn BarMapper>,
}

/// Why a BAR cannot be mapped.
#[derive(Debug, Error)]
#[error("the address space refused the range")]
pub struct MapError {
    /// The cause.
    #[from]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// An address space in which BARs are mapped: MMIO or I/O ports.
///
/// Called from within a vCPU's access to configuration space, so an implementation must not hold a lock
/// during dispatch that it needs here. A segment makes one call at a time.
pub trait BarMapper: Send + Sync {
    /// Dispatches accesses to `range` to `device`.
    fn map(&self, range: MmioRange, device: Arc<dyn BusDevice>) -> Result<(), MapError>;
    /// Removes the mapping of `range`.
    fn unmap(&self, range: MmioRange) -> Result<(), MapError>;
    /// Moves the mapping from `from` to `to`, which has the same length. After an error it is still at
    /// `from`.
    fn relocate(&self, from: MmioRange, to: MmioRange) -> Result<(), MapError>;
}

/// A mapped BAR, as the bus of its address space sees it.
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

/// Why BARs cannot be placed.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// A window is invalid.
    #[error("the PCI window of {len_bytes:#x} bytes at {start_gpa:#x} is impossible")]
    Window {
        /// Its first address.
        start_gpa: u64,
        /// Its length in bytes.
        len_bytes: u64,
        /// The cause.
        #[source]
        source: vm_allocator::Error,
    },
    /// The segment has no port window.
    #[error("no room for BAR {index} of PCI device {id}: its PCI segment has no ports")]
    NoPorts {
        /// Id of the device.
        id: String,
        /// Index of the BAR.
        index: u8,
    },
    /// The window has no such range left.
    #[error(
        "no room for {len_bytes:#x} bytes{} in the window from {start_gpa:#x} to {last_gpa:#x}",
        .at.map(|at| format!(" at {at:#x}")).unwrap_or_default()
    )]
    NoRange {
        /// The address that is asked for.
        at: Option<u64>,
        /// Length in bytes.
        len_bytes: u64,
        /// First address of the window.
        start_gpa: u64,
        /// Last address of the window.
        last_gpa: u64,
        /// The cause.
        #[source]
        source: vm_allocator::Error,
    },
    /// Something else is in the range.
    #[error("another device has a part of the {len_bytes:#x} bytes at {at:#x}")]
    RangeTaken {
        /// The address that is asked for.
        at: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// A window has no space left.
    #[error(
        "no room for BAR {index} of PCI device {id} ({len_bytes:#x} bytes) in the window from \
         {start_gpa:#x} to {last_gpa:#x}"
    )]
    NoRoom {
        /// Id of the device.
        id: String,
        /// Index of the BAR.
        index: u8,
        /// Length of the BAR in bytes.
        len_bytes: u64,
        /// First address of the window.
        start_gpa: u64,
        /// Last address of the window.
        last_gpa: u64,
        /// The cause.
        #[source]
        source: vm_allocator::Error,
    },
}

/// A range allocated in one of the windows.
#[derive(Clone, Copy, Debug)]
struct Claim {
    window: usize,
    range: RangeInclusive,
}

impl Claim {
    /// Windows are disjoint, or in different address spaces.
    fn overlaps(&self, other: &Self) -> bool {
        self.window == other.window && self.range.overlaps(&other.range)
    }
}

/// State of a BAR.
struct PlacedBar {
    owner: DeviceNumber,
    device: Arc<dyn PciDevice>,
    /// As at placement; a restored state may have changed its width since.
    description: BarDescription,
    /// Address in the register.
    wanted_gpa: u64,
    /// Whether the function decodes the BAR.
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
const WINDOW_PORTS: usize = 2;

/// The BARs of one segment.
pub struct BarPlacement {
    mapper: Arc<dyn BarMapper>,
    port_mapper: Option<Arc<dyn BarMapper>>,
    rules: BarRules,
    /// The memory windows, then the port window if there is one.
    windows: Vec<AddressAllocator>,
    bars: Vec<PlacedBar>,
    /// Ranges for something other than a BAR, which no BAR may take.
    reserved: Vec<Claim>,
    log_limit: LogLimit,
}

impl BarPlacement {
    /// A placement without BARs, which chooses addresses by `rules`. Without a port window, I/O BARs are never mapped.
    pub fn new(
        windows: MmioWindows,
        rules: BarRules,
        mapper: Arc<dyn BarMapper>,
        ports: Option<PortWindow>,
    ) -> Result<Self, PlacementError> {
        let allocator =
            |window: MmioRange| {
                let MmioRange { start_gpa, len_bytes } = window;
                AddressAllocator::new(start_gpa, len_bytes)
                    .map_err(|source| PlacementError::Window { start_gpa, len_bytes, source })
            };
        let mut allocators = vec![allocator(windows.below_4g)?, allocator(windows.above_4g)?];
        if let Some(PortWindow { first, last, .. }) = &ports {
            let (start_gpa, end) = (u64::from(*first), u64::from(*last) + 1);
            let len_bytes = end.saturating_sub(start_gpa);
            allocators.push(allocator(MmioRange { start_gpa, len_bytes })?);
        }
        Ok(Self {
            mapper,
            port_mapper: ports.map(|ports| ports.mapper),
            rules,
            windows: allocators,
            bars: Vec::new(),
            reserved: Vec::new(),
            log_limit: LogLimit::default(),
        })
    }

    /// Allocates addresses for all BARs of a function, or none. An I/O BAR or expansion ROM for which there is no
    /// space gets none: functions must work without (PCIe 4.0, 1.3.2.2), unless the guest makes space. A 32-bit BAR
    /// for which there is no space becomes a 64-bit one, if the function supports that.
    pub fn add(
        &mut self,
        owner: DeviceNumber,
        device: &Arc<dyn PciDevice>,
    ) -> Result<(), PlacementError> {
        let mut descriptions = device.bars();
        // What can be done without last, else large ones first, for the fewest gaps.
        descriptions
            .sort_by_key(|bar| (bar.kind == BarKind::Rom, std::cmp::Reverse(bar.len_bytes)));
        let mut claims = Vec::with_capacity(descriptions.len());
        for mut description in descriptions {
            let mut placed = self.place(device.id(), description);
            let is_narrow = description.kind == BarKind::Memory32;
            if placed.is_err() && is_narrow && device.widen_bar(description.index) {
                description.kind = BarKind::Memory64;
                placed = self.place(device.id(), description);
            } else if placed.is_err() && is_narrow && self.displace_roms() {
                placed = self.place(device.id(), description);
            }
            match placed {
                Ok(claim) => claims.push((description, Some(claim))),
                Err(error) if matches!(description.kind, BarKind::Ports | BarKind::Rom) => {
                    warn!("{error}; the guest may place it");
                    claims.push((description, None));
                }
                Err(error) => {
                    for claim in claims.into_iter().filter_map(|(_, claim)| claim) {
                        self.free(claim);
                    }
                    // Those that had to make room.
                    self.resolve_claims();
                    return Err(error);
                }
            }
        }
        for (description, claim) in claims {
            let wanted_gpa = claim.map_or(0, |claim| claim.range.start());
            device.place_bar(description.index, wanted_gpa);
            self.bars.push(PlacedBar {
                owner,
                device: Arc::clone(device),
                description,
                wanted_gpa,
                decodes: false,
                claim,
                mapped: None,
            });
        }
        self.refresh(owner);
        Ok(())
    }

    /// Removes the BARs of a function and their mappings.
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
        // Other BARs may be waiting for these ranges.
        self.resolve_claims();
    }

    fn place(&mut self, id: &str, bar: BarDescription) -> Result<Claim, PlacementError> {
        let (window, policy) = match bar.kind {
            BarKind::Memory32 | BarKind::Rom => (WINDOW_BELOW_4G, AllocPolicy::LastMatch),
            BarKind::Memory64 => (WINDOW_ABOVE_4G, self.rules.policy_64()),
            BarKind::Ports => (WINDOW_PORTS, AllocPolicy::FirstMatch),
        };
        let (id, index, len_bytes) = (id.to_owned(), bar.index, bar.len_bytes);
        let align_bytes = self.rules.align_bytes(&bar);
        let Some(allocator) = self.windows.get_mut(window) else {
            return Err(PlacementError::NoPorts { id, index });
        };
        allocator
            .allocate(bar.len_bytes, align_bytes, policy)
            .map(|range| Claim { window, range })
            .map_err(|source| PlacementError::NoRoom {
                id,
                index,
                len_bytes,
                start_gpa: allocator.base(),
                last_gpa: allocator.end(),
                source,
            })
    }

    /// Frees the ranges of expansion ROMs that do not decode, for a BAR that a function needs; returns whether there
    /// were any. They get them back if there is room after all.
    fn displace_roms(&mut self) -> bool {
        let is_idle = |bar: &&mut PlacedBar| bar.description.kind == BarKind::Rom && !bar.decodes;
        let idle = self.bars.iter_mut().filter(is_idle);
        let claims: Vec<Claim> = idle.filter_map(|bar| bar.claim.take()).collect();
        for claim in &claims {
            self.free(*claim);
        }
        !claims.is_empty()
    }

    /// Updates the mappings of a function from its registers.
    pub fn refresh(&mut self, owner: DeviceNumber) {
        self.observe(|bar| bar.owner == owner);
        self.resolve_claims();
    }

    /// Updates all mappings from the registers.
    pub fn refresh_all(&mut self) {
        self.observe(|_| true);
        self.resolve_claims();
    }

    fn observe(&mut self, of_interest: impl Fn(&PlacedBar) -> bool) {
        for bar in self.bars.iter_mut().filter(|bar| of_interest(bar)) {
            let decode = bar.device.bar_decode();
            bar.decodes = match bar.description.kind {
                BarKind::Memory32 | BarKind::Memory64 => decode.enabled,
                BarKind::Ports => decode.ports_enabled,
                BarKind::Rom => decode.enabled && decode.rom_enabled,
            };
            let gpa = decode.gpas.iter().find(|(index, _)| *index == bar.description.index);
            if let Some((_, gpa)) = gpa {
                bar.wanted_gpa = *gpa;
            }
        }
    }

    /// Iterates over all BARs until nothing changes, as one may wait for a range that another frees.
    ///
    /// Terminates because a decoding BAR only takes ranges that are free or softly held, and other BARs
    /// take free ones only.
    fn resolve_claims(&mut self) {
        // First, as the range of a BAR that does not decode may be taken at once.
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
            let released = self.bars[at].claim.take();
            if let Some(claim) = released {
                self.free(claim);
            }
            let claim = self.claim_wanted(at);
            self.bars[at].claim = claim;
            changed |= released.is_some() || claim.is_some();
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

    /// Allocates the range in the register, if it is in a window and free.
    fn claim_wanted(&mut self, at: usize) -> Option<Claim> {
        let bar = &self.bars[at];
        let len_bytes = bar.description.len_bytes;
        let is_of_ports = bar.description.kind == BarKind::Ports;
        let last_gpa = bar.wanted_gpa.checked_add(len_bytes - 1)?;
        let range = RangeInclusive::new(bar.wanted_gpa, last_gpa).ok()?;
        let (window, _) = self.windows.iter().enumerate().find(|(at, window)| {
            (*at == WINDOW_PORTS) == is_of_ports
                && window.base() <= range.start()
                && range.end() <= window.end()
        })?;
        let wanted = Claim { window, range };
        // Before a soft claim is taken for nothing.
        if self.reserved.iter().any(|claim| claim.overlaps(&wanted)) {
            return None;
        }
        if bar.decodes && !self.take_soft_claims(&wanted) {
            return None;
        }
        // The allocator returns an exact range even inside one that is taken.
        let taken = |bar: &PlacedBar| bar.claim.is_some_and(|claim| claim.overlaps(&wanted));
        if self.bars.iter().any(taken) {
            return None;
        }
        self.windows
            .get_mut(window)?
            .allocate(len_bytes, len_bytes, AllocPolicy::ExactMatch(range.start()))
            .ok()
            .map(|range| Claim { window, range })
    }

    /// Frees the soft claims that overlap `wanted`, unless a decoding BAR holds a part of it: then nothing
    /// would be gained, and the holders would take it back forever.
    fn take_soft_claims(&mut self, wanted: &Claim) -> bool {
        let overlaps = |claim: &Claim| claim.overlaps(wanted);
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
        let window = self.windows.get_mut(claim.window);
        let freed = window.is_some_and(|window| window.free(&claim.range).is_ok());
        debug_assert!(freed, "a claim that the allocator does not know");
    }

    /// The address space of a BAR. A mapped one has one, as it holds a range in a window.
    fn mapper(&self, at: usize) -> &Arc<dyn BarMapper> {
        match (self.bars[at].description.kind, &self.port_mapper) {
            (BarKind::Ports, Some(ports)) => ports,
            _ => &self.mapper,
        }
    }

    fn map(&mut self, at: usize) -> bool {
        let mapper = Arc::clone(self.mapper(at));
        let bar = &mut self.bars[at];
        if bar.mapped.is_some() {
            return false;
        }
        let range = bar.range_at(bar.wanted_gpa);
        let index = bar.description.index;
        let window = Arc::new(BarWindow { device: Arc::clone(&bar.device), index });
        match mapper.map(range, window) {
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
        let mapper = Arc::clone(self.mapper(at));
        let bar = &mut self.bars[at];
        let Some(range) = bar.mapped.take() else { return false };
        bar.device.bar_moved(bar.description.index, None);
        if let Err(error) = mapper.unmap(range) {
            self.complain("unmap", at, range, &error);
        }
        true
    }

    /// Moves a mapped BAR to the address in its register; no effect on one that is not mapped.
    fn relocate(&mut self, at: usize) {
        let mapper = Arc::clone(self.mapper(at));
        let bar = &mut self.bars[at];
        let Some(from) = bar.mapped else { return };
        let to = bar.range_at(bar.wanted_gpa);
        let index = bar.description.index;
        bar.device.bar_moved(index, None);
        match mapper.relocate(from, to) {
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
        let bar = &self.bars[at];
        let (id, index) = (bar.device.id(), bar.description.index);
        let (gpa, reason) = (range.start_gpa, &error.source);
        log_limited!(
            self.log_limit,
            Warn,
            "PCI device {id}: cannot {what} BAR {index} at {gpa:#x}: {reason}"
        );
    }
}
