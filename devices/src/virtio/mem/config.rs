// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration space of a memory device (virtio 1.3, 5.15.4).
//!
//! Owns its layout. A driver can read it but not write it.

/// Length of the configuration in bytes.
const CONFIG_BYTES: usize = 56;

/// The device configuration; sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ConfigSpace {
    pub(super) block_bytes: u64,
    pub(super) gpa: u64,
    pub(super) region_bytes: u64,
    pub(super) plugged_bytes: u64,
    pub(super) requested_bytes: u64,
    /// NUMA node; it counts with `VIRTIO_MEM_F_ACPI_PXM` only.
    pub(super) node: u16,
}

impl ConfigSpace {
    pub(super) fn bytes(&self) -> [u8; CONFIG_BYTES] {
        let fields = [
            self.block_bytes,
            // Sixteen bits, and padding.
            u64::from(self.node),
            self.gpa,
            self.region_bytes,
            self.region_bytes,
            self.plugged_bytes,
            self.requested_bytes,
        ];
        let mut bytes = [0; CONFIG_BYTES];
        for (to, field) in bytes.chunks_exact_mut(8).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_standard() {
        let config = ConfigSpace {
            block_bytes: 1,
            gpa: 3,
            region_bytes: 4,
            plugged_bytes: 6,
            requested_bytes: 7,
            node: 2,
        };
        let fields: Vec<u8> = config.bytes().iter().step_by(8).copied().collect();
        assert_eq!(fields, [1, 2, 3, 4, 4, 6, 7]);
    }
}
