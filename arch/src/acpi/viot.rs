// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtual I/O translation table (VIOT): a virtio IOMMU, and the PCI functions behind it.
//!
//! Owns its format, and the numbers by which the guest's driver names those functions. Must never know what an IOMMU does.
//!
//! Format: ACPI 6.5, section 5.2.34.

use acpi_tables::sdt::Sdt;

use super::inputs::AcpiInputs;
use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};

const REVISION: u8 = 0;
/// The table's header and its fields.
const FIXED_BYTES: u32 = 48;
const COUNT_OFFSET: usize = 36;
const FIRST_NODE_OFFSET: usize = 38;
const TYPE_PCI_RANGE: u8 = 1;
const TYPE_VIRTIO_IOMMU_PCI: u8 = 3;
/// Routing ids of the first and last function on the root bus of a segment, but for the host bridge. Linux (6.15 and later)
/// asks the IOMMU for whatever is named here, and gives up all of it when one is not known there.
const FIRST_OF_ROOT_BUS: u16 = 8;
const LAST_OF_ROOT_BUS: u16 = 0xff;

/// A PCI function, by its segment and its routing id there.
pub type PciFunction = (u16, u16);

/// A virtio IOMMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcpiIommu {
    /// Its own place.
    pub place: PciFunction,
    /// Functions behind it.
    pub functions: Vec<PciFunction>,
    /// Segments of which every function is behind it.
    pub segments: Vec<u16>,
}

impl AcpiIommu {
    /// The number by which the driver of the IOMMU names a function.
    pub fn endpoint((segment, routing_id): PciFunction) -> u32 {
        u32::from(segment) << 16 | u32::from(routing_id)
    }
}

/// The table, if there is an IOMMU.
pub(super) fn viot(inputs: &AcpiInputs) -> Option<Vec<u8>> {
    let iommu = inputs.iommu.as_ref()?;
    let mut table = Sdt::new(*b"VIOT", FIXED_BYTES, REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let functions = iommu.functions.iter().map(|at| (*at, at.1));
    let segments =
        iommu.segments.iter().map(|segment| ((*segment, FIRST_OF_ROOT_BUS), LAST_OF_ROOT_BUS));
    let ranges: Vec<_> = functions.chain(segments).collect();
    let count = u16::try_from(ranges.len()).unwrap_or(u16::MAX).saturating_add(1);
    table.write_u16(COUNT_OFFSET, count);
    let first = u16::try_from(FIXED_BYTES).unwrap_or(0);
    table.write_u16(FIRST_NODE_OFFSET, first);
    let mut nodes = vec![TYPE_VIRTIO_IOMMU_PCI, 0, 16, 0];
    nodes.extend(iommu.place.0.to_le_bytes());
    nodes.extend(iommu.place.1.to_le_bytes());
    nodes.extend([0; 8]);
    for (start, last) in ranges {
        nodes.extend([TYPE_PCI_RANGE, 0, 24, 0]);
        nodes.extend(AcpiIommu::endpoint(start).to_le_bytes());
        nodes.extend(start.0.to_le_bytes());
        nodes.extend(start.0.to_le_bytes());
        nodes.extend(start.1.to_le_bytes());
        nodes.extend(last.to_le_bytes());
        // The IOMMU is the first node.
        nodes.extend(first.to_le_bytes());
        nodes.extend([0; 6]);
    }
    table.append_slice(&nodes);
    Some(table.as_slice().to_vec())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn the_table_names_the_iommu_and_what_is_behind_it() {
        let mut inputs = AcpiInputs::new([0], Vec::new());
        assert_eq!(viot(&inputs), None);
        inputs.iommu =
            Some(AcpiIommu { place: (0, 0xf0), functions: vec![(0, 0x18)], segments: vec![2] });
        let table = viot(&inputs).unwrap();
        assert_eq!((&table[..4], table.len()), (&b"VIOT"[..], 48 + 16 + 2 * 24));
        assert_eq!(usize::from(table[4]), table.len());
        assert_eq!(table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(table[36..48], [3, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(table[48..64], [3, 0, 16, 0, 0, 0, 0xf0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let of_device = [1, 0, 24, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 0x18, 0, 0x18, 0, 48, 0];
        assert_eq!(table[64..82], of_device);
        let of_segment = [1, 0, 24, 0, 8, 0, 2, 0, 2, 0, 2, 0, 8, 0, 0xff, 0, 48, 0];
        assert_eq!(table[88..106], of_segment);
    }
}
