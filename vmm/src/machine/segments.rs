// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PCI segments of a machine.
//!
//! Owns their number, the ranges of configuration space, and the sharing out of the device windows. Everything but
//! segment 0 is reached through memory only: the configuration ports and the ports for I/O BARs are those of
//! segment 0. A machine with one segment is what it was before there could be several, down to each address.

use std::sync::Arc;

use arch::acpi::{self, IntxRoute};
use arch::layout::{self, GpaRange, HighHole};
use arch::windows::{ShareRule, WindowRules};
use devices::bus::BusError;
use memory::GuestRam;
use pci::{
    BarKind, Bdf, DeviceNumber, ECAM_SEGMENT_LEN_BYTES, MmioRange, MmioWindows, PciDevice, PciEcam,
    PciError, PciSegment, PlacementError,
};
use thiserror::Error;

use super::space::AddressSpace;
use crate::config::VmConfig;
use crate::config::segments::ApertureWeights;

/// Most address bits that a guest's CPUID can name.
const ADDRESS_BITS_MAX: u8 = 52;
/// Largest weight that advice is looked for.
const ADVISED_WEIGHT_MAX: u32 = 4096;

/// Why the segments of a machine cannot be made.
#[derive(Debug, Error)]
pub enum SegmentsError {
    /// RAM leaves no space for the BARs of devices.
    #[error("guest memory leaves no address space for PCI devices; raise max_phys_bits")]
    NoDeviceWindow,
    /// A segment would have hardly any addresses.
    #[error(
        "{segments} PCI segments cannot share the {width}-bit device window of {len_bytes:#x} bytes by their \
         mmio{width}_aperture_weight: the least of them would have fewer than {} bytes",
        layout::SHARE_MIN_BYTES
    )]
    Share {
        /// Number of segments.
        segments: usize,
        /// 32 or 64.
        width: u8,
        /// Length of the window.
        len_bytes: u64,
    },
    /// The guest has been shown a larger address space where it booted.
    #[error(
        "the PCI devices of the guest may have addresses of {needed} bits, and this host has {here}"
    )]
    AddressBits {
        /// Address bits where the guest booted.
        needed: u8,
        /// Address bits here.
        here: u8,
    },
    /// The configuration of a guest that has booted elsewhere lacks what its tables were made for.
    #[error(
        "a guest on the platform {platform} has tables for a number of address bits, and its configuration \
         does not say which (pci_address_bits)"
    )]
    NoAddressBits {
        /// Name of the platform.
        platform: &'static str,
    },
    /// The bus cannot be made.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The addresses of the configuration space are taken.
    #[error("cannot place the configuration space")]
    Ecam(#[from] BusError),
}

/// Why a device has no place on a bus.
#[derive(Debug, Error)]
pub enum PlaceError {
    /// The machine has no such segment.
    #[error("there is no PCI segment {0}")]
    NoSegment(u16),
    /// The windows of the segment are too small.
    #[error("{advice}")]
    NoRoom {
        /// What helps.
        advice: String,
        /// The cause.
        #[source]
        source: PciError,
    },
    /// Any other reason of the bus.
    #[error(transparent)]
    Bus(#[from] PciError),
}

/// The device windows of a machine, and what they are shared out by.
#[derive(Clone, Debug)]
struct Windows {
    ram_end_gpa: u64,
    address_bits: u8,
    hole: HighHole,
    weights: ApertureWeights,
    rules: WindowRules,
}

impl Windows {
    fn low() -> GpaRange {
        GpaRange { gpa: layout::MMIO32_GPA, len_bytes: layout::MMIO32_BYTES }
    }

    fn high(&self) -> Option<GpaRange> {
        self.rules.high(self.ram_end_gpa, self.address_bits, self.hole)
    }

    fn shared_out(&self) -> Result<Vec<MmioWindows>, SegmentsError> {
        let high = self.high().ok_or(SegmentsError::NoDeviceWindow)?;
        let none = |window: GpaRange, width| SegmentsError::Share {
            segments: self.weights.mmio32.len(),
            width,
            len_bytes: window.len_bytes,
        };
        let low = self.shares_of(Self::low(), &self.weights.mmio32, 32);
        let low = low.ok_or_else(|| none(Self::low(), 32))?;
        let shares = self.shares_of(high, &self.weights.mmio64, 64);
        let high = shares.ok_or_else(|| none(high, 64))?;
        let of = |range: GpaRange| MmioRange { start_gpa: range.gpa, len_bytes: range.len_bytes };
        let both = low.into_iter().zip(high);
        Ok(both.map(|(low, high)| MmioWindows { below_4g: of(low), above_4g: of(high) }).collect())
    }

    /// The shares of a window of this width.
    fn shares_of(&self, window: GpaRange, weights: &[u32], width: u8) -> Option<Vec<GpaRange>> {
        if width == 64 {
            self.rules.high_shares(window, weights)
        } else {
            self.rules.low_shares(window, weights)
        }
    }

    /// Whether a segment has room for BARs of `needed` bytes, the longest of which has `longest`.
    fn fits(window: Option<GpaRange>, weights: &[u32], at: u16, needed: Needed) -> bool {
        let shares = window.and_then(|window| layout::shares(window, weights));
        let share = shares.as_deref().and_then(|shares| shares.get(usize::from(at)));
        let room = share.and_then(|share| {
            let start_gpa = share.gpa.checked_next_multiple_of(needed.longest.max(1))?;
            share.end_gpa().checked_sub(start_gpa)
        });
        // A small BAR that is placed first costs the longest one its place.
        let bytes = needed.bytes.checked_next_multiple_of(needed.longest.max(1));
        room.zip(bytes).is_some_and(|(room, bytes)| room >= bytes)
    }

    /// The smallest weight of a segment for which it has room.
    fn weight_for(
        window: Option<GpaRange>,
        weights: &[u32],
        at: u16,
        needed: Needed,
    ) -> Option<u32> {
        let mut weights = weights.to_vec();
        let first = weights.get(usize::from(at))?.checked_add(1)?;
        (first..=ADVISED_WEIGHT_MAX).find(|weight| {
            weights[usize::from(at)] = *weight;
            Self::fits(window, &weights, at, needed)
        })
    }

    /// The smallest number of address bits for which a segment has room.
    fn bits_for(&self, at: u16, needed: Needed) -> Option<u8> {
        (self.address_bits.saturating_add(1)..=ADDRESS_BITS_MAX).find(|bits| {
            let window = self.rules.high(self.ram_end_gpa, *bits, self.hole);
            Self::fits(window, &self.weights.mmio64, at, needed)
        })
    }

    /// What helps a segment in which BARs find no room.
    fn advice(&self, at: u16, kind: BarKind, needed: Needed) -> String {
        let is_wide = kind == BarKind::Memory64;
        let (width, window, weights) = if is_wide {
            (64, self.high(), &self.weights.mmio64)
        } else {
            (32, Some(Self::low()), &self.weights.mmio32)
        };
        let is_known = weights.len() == 1 || self.rules.shares == ShareRule::Nearest;
        let weight = Self::weight_for(window, weights, at, needed);
        let weight = weight.filter(|_| weights.len() > 1 && is_known);
        let weight = weight.map(|weight| {
            format!(
                "--pci-segment pci_segment={at},mmio{width}_aperture_weight={weight} is enough for \
                 the devices so far"
            )
        });
        let bits = self.bits_for(at, needed).filter(|_| is_wide && is_known).map(|bits| {
            format!("{bits} address bits are enough for them, and the VM has {}", self.address_bits)
        });
        let needs = format!(
            "the {width}-bit BARs of PCI segment {at} need {} MiB, the longest {} MiB, for which its window has no room",
            needed.bytes.div_ceil(1 << 20),
            needed.longest.div_ceil(1 << 20),
        );
        let parts = std::iter::once(needs).chain(weight).chain(bits);
        parts.collect::<Vec<_>>().join("; ")
    }
}

/// Addresses that BARs need.
#[derive(Clone, Copy, Debug)]
struct Needed {
    bytes: u64,
    longest: u64,
}

/// The segments of a machine, by number; there is at least one.
pub struct Segments {
    first: Arc<PciSegment>,
    list: Vec<Arc<PciSegment>>,
    shares: Vec<MmioWindows>,
    windows: Windows,
}

impl Segments {
    /// Makes the segments that the configuration asks for, with their configuration space in `space`, for a host
    /// with so many address bits.
    ///
    /// # Errors
    /// There are no addresses for them.
    pub fn make(
        config: &VmConfig,
        ram: &GuestRam,
        host_bits: u8,
        space: &Arc<AddressSpace>,
    ) -> Result<Self, SegmentsError> {
        let weights = config.aperture_weights();
        let platform = config.machine_platform();
        if platform.keeps_address_bits && config.pci_address_bits.is_none() {
            return Err(SegmentsError::NoAddressBits { platform: platform.name.text() });
        }
        let kept = config.pci_address_bits.filter(|_| depends_on_address_bits(config));
        if let Some(needed) = kept.filter(|bits| *bits > host_bits) {
            return Err(SegmentsError::AddressBits { needed, here: host_bits });
        }
        let windows = Windows {
            ram_end_gpa: ram_end_gpa(ram),
            address_bits: kept.unwrap_or(host_bits),
            hole: config.memory.hole(),
            weights,
            rules: platform.windows,
        };
        let shares = windows.shared_out()?;
        let mut list = Vec::new();
        for (number, window) in (0_u16..).zip(&shares) {
            let segment = space.new_segment(number, *window, platform.bars)?;
            let name =
                if number == 0 { "PCI ECAM".to_owned() } else { format!("PCI ECAM {number}") };
            let ecam = Arc::new(PciEcam::new(&segment));
            space.insert_memory(ecam_gpa(number), ECAM_SEGMENT_LEN_BYTES, &name, ecam)?;
            list.push(segment);
        }
        let first = list.first().cloned().ok_or(SegmentsError::NoDeviceWindow)?;
        Ok(Self { first, list, shares, windows })
    }

    /// Segment 0, which has the configuration ports.
    pub fn first(&self) -> &Arc<PciSegment> {
        &self.first
    }

    /// A machine with this segment.
    #[cfg(test)]
    pub fn of_test(first: Arc<PciSegment>) -> Self {
        let weights = ApertureWeights { mmio32: vec![1], mmio64: vec![1] };
        let rules = arch::windows::GODWIT_WINDOWS;
        let windows =
            Windows { ram_end_gpa: 0, address_bits: 40, hole: HighHole::None, weights, rules };
        Self { list: vec![Arc::clone(&first)], first, shares: Vec::new(), windows }
    }

    /// Address bits by which the windows are laid out.
    pub fn address_bits(&self) -> u8 {
        self.windows.address_bits
    }

    /// Number of the last segment.
    pub fn last(&self) -> u16 {
        u16::try_from(self.list.len().saturating_sub(1)).unwrap_or(u16::MAX)
    }

    /// All segments, by number.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<PciSegment>> {
        self.list.iter()
    }

    /// The segment with this number.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, number: u16) -> Result<&Arc<PciSegment>, PlaceError> {
        self.list.get(usize::from(number)).ok_or(PlaceError::NoSegment(number))
    }

    /// The segment of an address in this machine.
    pub fn of(&self, bdf: Bdf) -> Option<&Arc<PciSegment>> {
        self.list.get(usize::from(bdf.segment()))
    }

    /// The segment of an address, and the device number in it.
    fn slot(&self, bdf: Bdf) -> Option<(&Arc<PciSegment>, DeviceNumber)> {
        Some((self.of(bdf)?, DeviceNumber::new(bdf.device()).ok()?))
    }

    /// See [`PciSegment::release`].
    pub fn release(&self, bdf: Bdf) {
        if let Some((segment, number)) = self.slot(bdf) {
            segment.release(number);
        }
    }

    /// Has each wait for a device that is still being opened reported: see [`PciSegment::report_waits`].
    pub fn report_waits(&self, on_waited: &Arc<dyn Fn() + Send + Sync>) {
        for segment in &self.list {
            let on_waited = Arc::clone(on_waited);
            segment.report_waits(Box::new(move || on_waited()));
        }
    }

    /// See [`PciSegment::hide`].
    pub fn hide(&self, bdf: Bdf) {
        if let Some((segment, number)) = self.slot(bdf) {
            segment.hide(number);
        }
    }

    /// See [`PciSegment::hide_unseen`].
    pub fn hide_unseen(&self, bdf: Bdf) -> bool {
        self.slot(bdf).is_some_and(|(segment, number)| segment.hide_unseen(number))
    }

    /// See [`PciSegment::deliver`].
    ///
    /// # Errors
    /// There is no such place, or no room for its BARs; says what helps then.
    pub fn deliver(&self, device: &Arc<dyn PciDevice>, bdf: Bdf) -> Result<(), PlaceError> {
        let none = PlaceError::NoSegment(bdf.segment());
        let (segment, number) = self.slot(bdf).ok_or(none)?;
        let delivered = segment.deliver(device, number);
        let explain = |source| self.explain(bdf.segment(), device.as_ref(), source);
        delivered.map(drop).map_err(explain)
    }

    /// See [`PciSegment::show`].
    pub fn show(&self, bdf: Bdf) {
        if let Some((segment, number)) = self.slot(bdf) {
            segment.show(number);
        }
    }

    /// See [`PciSegment::remove_device`].
    pub fn remove_device(&self, bdf: Bdf) {
        if let Some((segment, number)) = self.slot(bdf) {
            segment.remove_device(number);
        }
    }

    /// The segments as the ACPI tables describe them; `routes` has the interrupt lines of one.
    pub fn described(&self, routes: &[IntxRoute]) -> Vec<acpi::PciSegment> {
        let range =
            |range: MmioRange| GpaRange { gpa: range.start_gpa, len_bytes: range.len_bytes };
        let describe = |(id, windows): (u8, &MmioWindows)| acpi::PciSegment {
            id,
            ecam_gpa: ecam_gpa(id.into()),
            first_bus: 0,
            last_bus: 0,
            io_ports: (id == 0).then_some((layout::PCI_IO_PORT, layout::PCI_IO_LAST_PORT)),
            mmio32: Some(range(windows.below_4g)),
            mmio64: Some(range(windows.above_4g)),
            intx: routes.to_vec(),
        };
        (0..=u8::MAX).zip(&self.shares).map(describe).collect()
    }

    /// Says what helps if the BARs of `device` find no room in a segment.
    pub fn explain(&self, segment: u16, device: &dyn PciDevice, source: PciError) -> PlaceError {
        let PciError::Placement { source: PlacementError::NoRoom { index, .. }, .. } = &source
        else {
            return PlaceError::Bus(source);
        };
        let bars = device.bars();
        let kind = bars.iter().find(|bar| bar.index == *index).map(|bar| bar.kind);
        let Some(kind) = kind.filter(|kind| !matches!(kind, BarKind::Ports | BarKind::Rom)) else {
            return PlaceError::Bus(source);
        };
        let others = self.get(segment).map(|segment| segment.devices()).unwrap_or_default();
        let others = others.iter().flat_map(|(_, other)| other.bars());
        let lens = bars.into_iter().chain(others).filter(|bar| bar.kind == kind);
        let lens: Vec<u64> = lens.map(|bar| bar.len_bytes).collect();
        let needed = Needed {
            bytes: lens.iter().fold(0, |sum, len| sum.saturating_add(*len)),
            longest: lens.iter().copied().max().unwrap_or(0),
        };
        PlaceError::NoRoom { advice: self.windows.advice(segment, kind, needed), source }
    }
}

fn ram_end_gpa(ram: &GuestRam) -> u64 {
    let ends = ram.regions().iter().map(|region| region.gpa().saturating_add(region.len_bytes()));
    ends.max().unwrap_or(0)
}

/// Where the 64-bit window begins in a machine with this memory that has booted; `None` if there is no room for one, or its
/// address bits are not known.
pub fn device_window_gpa(config: &VmConfig, ram: &GuestRam) -> Option<u64> {
    let rules = config.machine_platform().windows;
    let window = rules.high(ram_end_gpa(ram), config.pci_address_bits?, config.memory.hole());
    window.map(|window| window.gpa)
}

/// The 64-bit window of a machine with this memory, of all its segments together.
#[cfg(test)]
pub fn wide_window(ram: &GuestRam, address_bits: u8, hole: HighHole) -> Option<GpaRange> {
    arch::windows::mmio64_window(ram_end_gpa(ram), address_bits, hole)
}

fn ecam_gpa(segment: u16) -> u64 {
    layout::ECAM_GPA + u64::from(segment) * layout::ECAM_BYTES_PER_BUS
}

/// Notes the address bits of the host at which a machine boots, as the shares of its segments depend on them.
pub fn keep_address_bits(config: &mut VmConfig, host_bits: u8) {
    config.pci_address_bits = depends_on_address_bits(config).then_some(host_bits);
}

/// Whether the guest has been shown what depends on the number of address bits.
fn depends_on_address_bits(config: &VmConfig) -> bool {
    config.pci_segments_count() > 1 || config.machine_platform().keeps_address_bits
}

const _: () = {
    use crate::config::segments::PCI_SEGMENTS_MAX;
    assert!(PCI_SEGMENTS_MAX as u64 * ECAM_SEGMENT_LEN_BYTES <= layout::ECAM_BYTES);
    assert!(ECAM_SEGMENT_LEN_BYTES == layout::ECAM_BYTES_PER_BUS);
};

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;
    use vm_allocator::{AddressAllocator, AllocPolicy};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn windows(mmio32: Vec<u32>, mmio64: Vec<u32>) -> Windows {
        let weights = ApertureWeights { mmio32, mmio64 };
        let rules = arch::windows::GODWIT_WINDOWS;
        Windows { ram_end_gpa: 5 * GIB, address_bits: 40, hole: HighHole::None, weights, rules }
    }

    #[test]
    fn one_segment_has_the_windows_that_there_are() {
        let shared = windows(vec![1], vec![5]).shared_out().unwrap();
        let low = MmioRange { start_gpa: 0xc000_0000, len_bytes: 640 << 20 };
        let high = MmioRange { start_gpa: 5 * GIB, len_bytes: (1 << 40) - (1 << 16) - 5 * GIB };
        assert_eq!(shared, [MmioWindows { below_4g: low, above_4g: high }]);
    }

    #[test]
    fn weights_that_leave_nothing_are_refused() {
        let error = windows(vec![1, u32::MAX], vec![1, 1]).shared_out().unwrap_err().to_string();
        assert!(error.contains("32-bit") && error.contains("mmio32_aperture_weight"), "{error}");
        let error = windows(vec![1, 1], vec![1, u32::MAX]).shared_out().unwrap_err().to_string();
        assert!(error.contains("64-bit") && error.contains("mmio64_aperture_weight"), "{error}");
        let none = Windows { ram_end_gpa: 1 << 40, ..windows(vec![1], vec![1]) };
        assert!(matches!(none.shared_out(), Err(SegmentsError::NoDeviceWindow)));
    }

    /// Whether BARs of these lengths are placed in this order in a segment.
    fn have_room(windows: &Windows, weights: &[u32], at: usize, lens: &[u64]) -> bool {
        let share = layout::shares(windows.high().unwrap(), weights).unwrap()[at];
        let mut addresses = AddressAllocator::new(share.gpa, share.len_bytes).unwrap();
        lens.iter().all(|len| addresses.allocate(*len, *len, AllocPolicy::FirstMatch).is_ok())
    }

    #[test]
    fn a_small_bar_that_comes_first_is_counted() {
        let two = windows(vec![1; 2], vec![1; 2]);
        let lens = [1 << 16, 256 * GIB, 256 * GIB];
        let needed = Needed { bytes: lens.iter().sum(), longest: 256 * GIB };
        // Shares of 768 GiB would do without the small one.
        assert!(!have_room(&two, &[1, 3], 1, &lens) && have_room(&two, &[1, 3], 1, &lens[1..]));
        let weight = Windows::weight_for(two.high(), &[1; 2], 1, needed);
        assert!(weight.is_none_or(|weight| have_room(&two, &[1, weight], 1, &lens)), "{weight:?}");
        let bits = two.bits_for(1, needed).unwrap();
        let more = Windows { address_bits: bits, ..two };
        assert!(have_room(&more, &[1; 2], 1, &lens), "{bits}");
    }

    #[test]
    fn advice_is_enough() {
        let four = windows(vec![1; 4], vec![1; 4]);
        let needed = Needed { bytes: 512 * GIB, longest: 128 * GIB };
        let advice = four.advice(1, BarKind::Memory64, needed);
        let weight = Windows::weight_for(four.high(), &[1; 4], 1, needed).unwrap();
        assert!(
            advice.contains(&format!("pci_segment=1,mmio64_aperture_weight={weight} ")),
            "{advice}"
        );
        let bits = four.bits_for(1, needed).unwrap();
        assert!(advice.contains(&format!("{bits} address bits")) && advice.contains("has 40"));
        assert!(Windows::fits(four.high(), &[1, weight, 1, 1], 1, needed), "{weight}");
        assert!(!Windows::fits(four.high(), &[1, weight - 1, 1, 1], 1, needed), "{weight}");
        let more = Windows { address_bits: bits, ..four };
        assert!(Windows::fits(more.high(), &[1; 4], 1, needed), "{bits}");
        let narrow =
            more.advice(1, BarKind::Memory32, Needed { bytes: 256 << 20, longest: 256 << 20 });
        assert!(
            narrow.contains("mmio32_aperture_weight=") && !narrow.contains("bits are"),
            "{narrow}"
        );
        let one = windows(vec![1], vec![1]).advice(
            0,
            BarKind::Memory64,
            Needed { bytes: 4096 * GIB, longest: GIB },
        );
        assert!(!one.contains("weight") && one.contains("43 address bits"), "{one}");
    }

    proptest! {
        #[test]
        fn bars_find_room_with_the_advised_weight_in_any_order(
            orders in proptest::collection::vec(16_u32..39, 1..12),
            others in proptest::collection::vec(1_u32..9, 1..6),
            ram_end_gpa in 0_u64..1 << 39,
        ) {
            let lens: Vec<u64> = orders.iter().map(|order| 1 << order).collect();
            let needed = Needed { bytes: lens.iter().sum(), longest: *lens.iter().max().unwrap() };
            let weights: Vec<u32> = std::iter::once(1).chain(others).collect();
            let windows = Windows { ram_end_gpa, address_bits: 44, ..windows(weights.clone(), weights.clone()) };
            let Some(advised) = Windows::weight_for(windows.high(), &weights, 0, needed) else { return Ok(()) };
            let weights: Vec<u32> = std::iter::once(advised).chain(weights.into_iter().skip(1)).collect();
            prop_assert!(have_room(&windows, &weights, 0, &lens));
        }

        #[test]
        fn windows_of_segments_never_overlap(
            weights in proptest::collection::vec((1_u32..50, 1_u32..50), 1..97),
            ram_end_gpa in 0_u64..1 << 41,
            address_bits in 32_u8..53,
            avoid: bool,
        ) {
            let (mmio32, mmio64) = weights.into_iter().unzip();
            let hole = if avoid { HighHole::AmdHyperTransport } else { HighHole::None };
            let weights = ApertureWeights { mmio32, mmio64 };
            let count = weights.mmio32.len();
            let rules = arch::windows::GODWIT_WINDOWS;
            let windows = Windows { ram_end_gpa, address_bits, hole, weights, rules };
            let Ok(shared) = windows.shared_out() else { return Ok(()) };
            prop_assert_eq!(shared.len(), count);
            let mut ends = (layout::MMIO32_GPA, ram_end_gpa.max(layout::HIGH_RAM_64_GPA));
            for MmioWindows { below_4g, above_4g } in shared {
                prop_assert!(below_4g.start_gpa >= ends.0 && above_4g.start_gpa >= ends.1);
                ends.0 = below_4g.start_gpa + below_4g.len_bytes;
                ends.1 = above_4g.start_gpa + above_4g.len_bytes;
            }
            prop_assert!(ends.0 <= layout::ECAM_GPA);
            prop_assert!(ends.1 <= 1 << address_bits);
        }
    }
}
