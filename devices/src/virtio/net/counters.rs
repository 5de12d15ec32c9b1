// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a network device.

use std::collections::BTreeMap;

use crate::virtio::Counters;
use crate::virtio::counters::Counter;

/// Counters of all queue pairs of a network device. Directions are those of the guest.
#[derive(Debug, Default)]
pub struct NetCounters {
    pub(super) rx_bytes: Counter,
    pub(super) rx_frames: Counter,
    pub(super) tx_bytes: Counter,
    pub(super) tx_frames: Counter,
    pub(super) dropped: Counter,
}

impl NetCounters {
    /// Frames dropped because they did not fit, or the host refused them.
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }
}

impl Counters for NetCounters {
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("rx_bytes", self.rx_bytes.get()),
            ("rx_frames", self.rx_frames.get()),
            ("tx_bytes", self.tx_bytes.get()),
            ("tx_frames", self.tx_frames.get()),
            ("dropped", self.dropped.get()),
        ])
    }
}
