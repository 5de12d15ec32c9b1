// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Dispatch of port and memory accesses to devices.

/// A device that answers accesses in an address range.
///
/// Methods take `&self`, as several vCPUs may access a device at once; a device that needs it has
/// a lock of its own, held only for the access. `data` is 1, 2, 4 or 8 bytes long (little endian);
/// any other length, and any offset, must be harmless.
pub trait BusDevice: Send + Sync {
    /// Fills `data` with what the guest reads at `offset` from the start of the range.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Takes what the guest wrote at `offset` from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
}
