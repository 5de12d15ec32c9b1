// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a vhost-user device.

use std::collections::BTreeMap;

use crate::virtio::Counters;
use crate::virtio::counters::Counter;

/// Counters of a vhost-user device. What the back end transfers is counted there.
#[derive(Debug, Default)]
pub struct VhostUserCounters {
    /// Interrupts that were forwarded to the driver.
    pub(super) interrupts: Counter,
    /// Changes of the configuration that the driver was told of.
    pub(super) config_changes: Counter,
}

impl Counters for VhostUserCounters {
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("config_changes", self.config_changes.get()),
            ("interrupts", self.interrupts.get()),
        ])
    }
}
