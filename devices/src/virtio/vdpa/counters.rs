// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a vDPA device.

use std::collections::BTreeMap;

use crate::virtio::Counters;
use crate::virtio::counters::Counter;

/// Counters of a vDPA device. What the device transfers the VMM does not see.
#[derive(Debug, Default)]
pub struct VdpaCounters {
    /// Interrupts that were forwarded to the driver.
    pub(super) interrupts: Counter,
}

impl Counters for VdpaCounters {
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([("interrupts", self.interrupts.get())])
    }
}
