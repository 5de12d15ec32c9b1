// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is counted of passed-through devices.
//!
//! Owns the names and their meaning. It must never wait for a device.

use std::collections::BTreeMap;
use std::time::Instant;

use pci::PciDevice as _;
use vfio::{PinState, VfioPciDevice};

use super::Passthrough;

impl Passthrough {
    /// Per device, in microseconds: when it was open, when all memory was mapped for it, when its driver
    /// enabled DMA, and how long that waited.
    pub fn counters(
        &self,
        clock_us: impl Fn(Instant) -> u64,
    ) -> BTreeMap<String, BTreeMap<String, u64>> {
        let pinned = match self.progress().map(|progress| progress.state) {
            Some(PinState::Pinned { at, .. }) => Some(at),
            _ => None,
        };
        let of_device = |device: &VfioPciDevice| {
            let times = device.bus_master_times();
            let mut counters = BTreeMap::new();
            if let Some(at) = self.opened.get(device.id()) {
                counters.insert("opened_monotonic_us".to_owned(), clock_us(*at));
            }
            if let Some(asked) = times.asked {
                counters.insert("bus_master_asked_monotonic_us".to_owned(), clock_us(asked));
            }
            if let (Some(asked), Some(granted)) = (times.asked, times.granted) {
                let waited = granted.saturating_duration_since(asked).as_micros();
                let waited = u64::try_from(waited).unwrap_or(u64::MAX);
                counters.insert("bus_master_waited_us".to_owned(), waited);
            }
            if let Some(at) = pinned {
                counters.insert("pinned_monotonic_us".to_owned(), clock_us(at));
            }
            counters.insert("left_behind".to_owned(), u64::from(device.is_left()));
            counters.insert("lost".to_owned(), u64::from(device.is_lost()));
            counters
        };
        self.devices.iter().map(|(_, device)| (device.id().to_owned(), of_device(device))).collect()
    }
}
