// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where BARs can be, by segment, and where v53 puts the panic device.
//!
//! Owns what is narrower there than here: a restored BAR must be in the share that its segment has of the window of its kind.

use std::ops::Range;

use arch::layout::{GpaRange, MMIO32_BYTES, MMIO32_GPA};
use pci::Bdf;

use super::Seen;
use super::error::ExportError;
use super::functions::Bar;
use crate::adopt::Windows as AnyWindows;

/// The place that the panic device gets: as long as its alignment.
const PANIC_PLACE_BYTES: u64 = 16;
const WHAT: &str = "the windows of PCI devices";

/// Where BARs can be.
#[derive(Clone, Debug)]
pub struct Windows {
    any: AnyWindows,
    /// The share of each segment below 4 GiB, and above.
    shares: Vec<[Range<u64>; 2]>,
    /// The narrow BARs of segment 0 but for the panic device's.
    low_bars: Vec<Range<u64>>,
}

fn range(range: &GpaRange) -> Range<u64> {
    range.gpa..range.gpa.saturating_add(range.len_bytes)
}

/// The number of a function's segment; one that cannot be read has no share.
fn segment_of(bdf: &str) -> usize {
    bdf.parse::<Bdf>().map_or(usize::MAX, |bdf| bdf.segment().into())
}

impl Windows {
    /// The windows of a machine.
    ///
    /// # Errors
    /// Where they are is not known, or its segments have no share of them.
    pub fn of(seen: &Seen<'_>) -> Result<Self, ExportError> {
        let refused = |problem: &str| ExportError::refused(WHAT, problem);
        let unknown = || refused("the address bits of the guest are not known");
        let bits = seen.config.pci_address_bits.ok_or_else(unknown)?;
        let any = AnyWindows::of(seen.layout, bits).map_err(|error| refused(&error.to_string()))?;
        let (rules, weights) =
            (seen.config.machine_platform().windows, seen.config.aperture_weights());
        let end = arch::windows::end_gpa(bits).saturating_sub(rules.end_bytes);
        let low = GpaRange { gpa: MMIO32_GPA, len_bytes: MMIO32_BYTES };
        let high = GpaRange::between(seen.layout.device_area_gpa, end);
        let low = rules.low_shares(low, &weights.mmio32);
        let high = rules.high_shares(high, &weights.mmio64);
        let no_share = || refused("a segment has no share of them");
        let (low, high) = low.zip(high).ok_or_else(no_share)?;
        let shares = low.iter().zip(&high).map(|(low, high)| [range(low), range(high)]);
        Ok(Self { any, shares: shares.collect(), low_bars: Vec::new() })
    }

    /// Whether these addresses are in the share that a function's segment has of the window of 32 or 64 bits, and not memory.
    pub fn hold(&self, bdf: &str, addresses: &Range<u64>, is_wide: bool) -> bool {
        let is_within = self.shares.get(segment_of(bdf)).is_some_and(|[low, high]| {
            let share = if is_wide { high } else { low };
            share.start <= addresses.start && addresses.end <= share.end
        });
        is_within && self.any.hold(addresses, is_wide)
    }

    /// Notes a BAR that the panic device cannot be put on.
    pub fn take(&mut self, bdf: &str, bar: &Bar) {
        if !bar.is_wide && segment_of(bdf) == 0 {
            self.low_bars.push(bar.range());
        }
    }

    /// Where the panic device is put, whatever its register says, once all other BARs are taken: at the highest free place.
    pub fn panic_device_gpa(&self) -> Option<u64> {
        let [low, _] = self.shares.first()?;
        let mut taken = self.low_bars.clone();
        taken.sort_by_key(|bar| bar.start);
        let mut end = low.end;
        for bar in taken.iter().rev() {
            if end.saturating_sub(bar.end) >= PANIC_PLACE_BYTES {
                break;
            }
            end = end.min(bar.start);
        }
        let gpa = end.checked_sub(PANIC_PLACE_BYTES)? / PANIC_PLACE_BYTES * PANIC_PLACE_BYTES;
        (gpa >= low.start).then_some(gpa)
    }
}
