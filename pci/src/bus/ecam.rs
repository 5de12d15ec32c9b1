// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Enhanced configuration access (PCIe 4.0, 7.2.2): configuration space as memory.
//!
//! One bus per segment is decoded. Never keeps the segment alive.

use std::sync::{Arc, Weak};

use devices::bus::BusDevice;

use super::{ConfigAddress, PciSegment};
use crate::config_space::CONFIG_SPACE_LEN_BYTES;

/// Length of the ECAM range of a segment: 1 bus of 32 devices of 8 functions of 4 KiB.
pub const ECAM_SEGMENT_LEN_BYTES: u64 = 1 << 20;

/// The configuration space of a segment as a memory range.
pub struct PciEcam {
    segment: Weak<PciSegment>,
}

impl PciEcam {
    /// The ECAM range of `segment`.
    pub fn new(segment: &Arc<PciSegment>) -> Self {
        Self { segment: Arc::downgrade(segment) }
    }

    fn target(&self, offset: u64) -> Option<(Arc<PciSegment>, ConfigAddress)> {
        if offset >= ECAM_SEGMENT_LEN_BYTES {
            return None;
        }
        let byte = |shift: u32, mask: u64| u8::try_from(offset >> shift & mask).ok();
        let offset_in_function =
            u16::try_from(offset & u64::from(CONFIG_SPACE_LEN_BYTES - 1)).ok()?;
        let address = ConfigAddress {
            bus: 0,
            device: byte(15, 0x1f)?,
            function: byte(12, 0x7)?,
            offset: offset_in_function,
        };
        Some((self.segment.upgrade()?, address))
    }
}

impl BusDevice for PciEcam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.target(offset) {
            Some((segment, address)) => segment.read_config(address, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((segment, address)) = self.target(offset) {
            segment.write_config(address, data);
        }
    }
}
