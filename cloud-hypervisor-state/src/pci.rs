// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration space and MSI-X of a PCI function, and the panic device with its own.

use json_bound::Budget;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::legacy::PvpanicData;
use crate::lists::{Fixed, List, present};
use crate::tree::{Node, NodeReader};

pub(crate) const CONFIGURATION: &str = "pci_configuration";
pub(crate) const MSIX: &str = "msix_config";
/// Length of configuration space in bytes.
const CONFIGURATION_BYTES: u64 = 4096;
/// Maximum number of vectors of MSI-X.
const VECTORS_MAX: usize = 2048;
/// Maximum number of BARs that are to be moved.
const MOVES_MAX: usize = 16;

/// Kind of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "names of the format")]
pub enum BarRegion {
    Memory32BitRegion,
    IoRegion,
    Memory64BitRegion,
}

/// A BAR register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciBar {
    /// The last decoded value, with type bits.
    pub addr: u32,
    /// The mask.
    pub size: u32,
    /// Whether it is in use.
    pub used: bool,
    /// Its kind; none for the upper half of a 64-bit BAR.
    #[serde(rename = "type", deserialize_with = "present")]
    pub region: Option<BarRegion>,
}

/// A move of a BAR that waits for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BarMove {
    /// Its address.
    pub old_base: u64,
    /// Its address afterwards.
    pub new_base: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its kind.
    pub region_type: BarRegion,
}

/// A configuration space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciConfiguration {
    /// Its registers.
    pub registers: Fixed<u32, 1024>,
    /// Bits of each that a guest can write.
    pub writable_bits: Fixed<u32, 1024>,
    /// The BARs.
    pub bars: Fixed<PciBar, 6>,
    /// The expansion ROM.
    pub rom_bar_addr: u32,
    /// Its mask.
    pub rom_bar_size: u32,
    /// Whether it is there.
    pub rom_bar_used: bool,
    /// Offset and length of the last capability.
    #[serde(deserialize_with = "present")]
    pub last_capability: Option<(u64, u64)>,
    /// Register of the capability of MSI-X.
    #[serde(deserialize_with = "present")]
    pub msix_cap_reg_idx: Option<u64>,
    /// Moves that wait for memory decoding.
    pub pending_bar_reprogram: List<BarMove, MOVES_MAX>,
}

impl PciConfiguration {
    pub(crate) fn read(
        parent: &mut NodeReader,
        budget: &mut Budget,
    ) -> Result<Self, DocumentError> {
        let node = parent.require(CONFIGURATION)?;
        let read: Self = node.state(budget)?;
        let problem = match (read.last_capability, read.msix_cap_reg_idx) {
            (Some((offset, len)), _)
                if offset.checked_add(len).is_none_or(|end| end > CONFIGURATION_BYTES) =>
            {
                Some("last_capability: it is outside of configuration space")
            }
            (_, Some(register)) if register >= CONFIGURATION_BYTES / 4 => {
                Some("msix_cap_reg_idx: it is outside of configuration space")
            }
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(node.out_of_bounds(problem.to_owned()));
        }
        node.end()?;
        Ok(read)
    }

    pub(crate) fn write(&self, parent: &mut Node) -> Result<(), DocumentError> {
        parent.add(CONFIGURATION, Node::of(CONFIGURATION, self)?);
        Ok(())
    }
}

/// An entry of an MSI-X table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "registers")]
pub struct MsixEntry {
    pub msg_addr_lo: u32,
    pub msg_addr_hi: u32,
    pub msg_data: u32,
    pub vector_ctl: u32,
}

/// MSI-X of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixConfig {
    /// The table.
    pub table_entries: List<MsixEntry, VECTORS_MAX>,
    /// The pending bits.
    pub pba_entries: List<u64, { VECTORS_MAX / 64 + 1 }>,
    /// The function mask; without meaning if not enabled.
    pub masked: bool,
    /// Whether MSI-X is enabled.
    pub enabled: bool,
}

impl MsixConfig {
    pub(crate) fn read(
        parent: &mut NodeReader,
        budget: &mut Budget,
    ) -> Result<Self, DocumentError> {
        let node = parent.require(MSIX)?;
        let read: Self = node.state(budget)?;
        let (vectors, words) = (read.table_entries.len(), read.pba_entries.len());
        if words != vectors / 64 + 1 {
            let problem = format!("pba_entries: {words} words for {vectors} vectors");
            return Err(node.out_of_bounds(problem));
        }
        node.end()?;
        Ok(read)
    }

    pub(crate) fn write(&self, parent: &mut Node) -> Result<(), DocumentError> {
        parent.add(MSIX, Node::of(MSIX, self)?);
        Ok(())
    }
}

/// The panic device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pvpanic {
    /// Its own state.
    pub data: PvpanicData,
    /// Its configuration space.
    pub configuration: PciConfiguration,
}

impl Pvpanic {
    pub(crate) fn read(mut node: NodeReader, budget: &mut Budget) -> Result<Self, DocumentError> {
        let data = node.state(budget)?;
        let configuration = PciConfiguration::read(&mut node, budget)?;
        node.end()?;
        Ok(Self { data, configuration })
    }

    pub(crate) fn write(&self, id: &str) -> Result<Node, DocumentError> {
        let mut node = Node::of(id, &self.data)?;
        self.configuration.write(&mut node)?;
        Ok(node)
    }
}
