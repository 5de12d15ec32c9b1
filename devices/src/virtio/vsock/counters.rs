// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a socket device.

use std::collections::BTreeMap;

use crate::virtio::Counters;
use crate::virtio::counters::Counter;

/// Counters of all connections of a vsock device. Directions are those of the guest.
#[derive(Debug, Default)]
pub struct VsockCounters {
    pub(super) rx_bytes: Counter,
    pub(super) rx_packets: Counter,
    pub(super) tx_bytes: Counter,
    pub(super) tx_packets: Counter,
    pub(super) connections: Counter,
}

impl Counters for VsockCounters {
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("rx_bytes", self.rx_bytes.get()),
            ("rx_packets", self.rx_packets.get()),
            ("tx_bytes", self.tx_bytes.get()),
            ("tx_packets", self.tx_packets.get()),
            ("connections", self.connections.get()),
        ])
    }
}
