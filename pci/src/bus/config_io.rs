// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration mechanism 1 (PCI 3.0, 3.2.2.3.2): ports 0xCF8 (address) and 0xCFC (data).
//!
//! Reaches the first 256 bytes of the functions of segment 0. Never keeps the segment alive.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use devices::bus::BusDevice;

use super::{ConfigAddress, PciSegment};

const ADDRESS_ENABLE: u32 = 1 << 31;
/// The reserved and the two lowest bits read as zero.
const ADDRESS_WRITABLE: u32 = 0x80ff_fffc;
const DATA_OFFSET: u64 = 4;
const PORTS_LEN_BYTES: u64 = 8;

/// The eight configuration ports from 0xCF8.
pub struct PciConfigIo {
    segment: Weak<PciSegment>,
    /// The address register. Guests that share it between vCPUs use a lock.
    address: AtomicU32,
}

impl PciConfigIo {
    /// The configuration ports of `segment`.
    pub fn new(segment: &Arc<PciSegment>) -> Self {
        Self { segment: Arc::downgrade(segment), address: AtomicU32::new(0) }
    }

    /// The address register, to be saved.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// Restores the address register; any value is harmless.
    pub fn set_address(&self, address: u32) {
        self.address.store(address & ADDRESS_WRITABLE, Ordering::Relaxed);
    }

    fn target(&self, port_offset: u64) -> Option<(Arc<PciSegment>, ConfigAddress)> {
        let address = self.address();
        if address & ADDRESS_ENABLE == 0 || !(DATA_OFFSET..PORTS_LEN_BYTES).contains(&port_offset) {
            return None;
        }
        let [register, device_function, bus, _] = address.to_le_bytes();
        let byte_in_register = u16::try_from(port_offset & 3).ok()?;
        let address = ConfigAddress {
            bus,
            device: device_function >> 3,
            function: device_function & 7,
            offset: u16::from(register) + byte_in_register,
        };
        Some((self.segment.upgrade()?, address))
    }
}

impl BusDevice for PciConfigIo {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address().to_le_bytes());
            return;
        }
        match self.target(offset) {
            Some((segment, address)) => segment.read_config(address, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // Only 32-bit accesses reach the address register; its single bytes are ports of other devices on
        // real machines.
        if offset == 0 {
            if let Ok(word) = <[u8; 4]>::try_from(data) {
                self.set_address(u32::from_le_bytes(word));
            }
            return;
        }
        if let Some((segment, address)) = self.target(offset) {
            segment.write_config(address, data);
        }
    }
}
