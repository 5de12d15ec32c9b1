// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration space of a block device (virtio 1.3, 5.2.4).

use super::image::{Disk, SECTOR_BYTES};
use super::limits::BlockLimits;

/// Length of the supported part of the configuration.
const LEN_BYTES: usize = 60;
/// Offset of the only writable field.
pub(super) const WRITEBACK_OFFSET: u64 = 32;

/// Input of the configuration in addition to the disk.
pub(super) struct ConfigInput {
    pub(super) seg_max: u32,
    pub(super) num_queues: u16,
    pub(super) writeback: bool,
    pub(super) sparse: bool,
    pub(super) limits: BlockLimits,
}

/// Builds the configuration.
pub(super) fn build(disk: &Disk, input: &ConfigInput) -> [u8; LEN_BYTES] {
    let topology = disk.topology();
    let block_bytes = topology.logical_block_bytes;
    let in_blocks = |bytes: u64| bytes / block_bytes;
    let exponent = (topology.physical_block_bytes / block_bytes).checked_ilog2().unwrap_or(0);
    let discard_sectors = narrow(disk.discard_unit_bytes() / SECTOR_BYTES);

    let mut bytes = [0; LEN_BYTES];
    let mut put = |offset: usize, value: &[u8]| {
        for (to, from) in bytes.iter_mut().skip(offset).zip(value) {
            *to = *from;
        }
    };
    put(0, &disk.capacity_sectors().to_le_bytes());
    put(12, &input.seg_max.to_le_bytes());
    put(20, &narrow(block_bytes).to_le_bytes());
    put(24, &[u8::try_from(exponent).unwrap_or(0), 0]);
    put(26, &u16::try_from(in_blocks(topology.io_min_bytes)).unwrap_or(1).to_le_bytes());
    put(28, &narrow(in_blocks(topology.io_opt_bytes)).to_le_bytes());
    put(32, &[u8::from(input.writeback)]);
    put(34, &input.num_queues.to_le_bytes());
    put(36, &input.limits.discard_sectors_max.to_le_bytes());
    put(40, &input.limits.discard_ranges_max.to_le_bytes());
    put(44, &discard_sectors.to_le_bytes());
    put(48, &input.limits.zero_sectors_max.to_le_bytes());
    put(52, &input.limits.zero_ranges_max.to_le_bytes());
    // Writing zeroes may deallocate storage.
    put(56, &[u8::from(input.sparse)]);
    bytes
}

fn narrow(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
