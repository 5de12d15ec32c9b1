// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio transport over PCI.

use json_bound::Budget;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::lists::{Fixed, List};
use crate::pci::{CONFIGURATION, MsixConfig, PciConfiguration};
use crate::tree::{Node, NodeReader};

const COMMON: &str = "virtio_pci_common_config";
/// Maximum number of queues of a device.
const QUEUES_MAX: usize = 1024;
/// Identification of a virtio device: vendor, and device number of the type 0.
const VENDOR: u32 = 0x1af4;
const DEVICE_BASE: u32 = 0x1040;

/// Registers of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "registers")]
pub struct Queue {
    pub max_size: u16,
    pub size: u16,
    pub ready: bool,
    pub desc_table: u64,
    pub avail_ring: u64,
    pub used_ring: u64,
}

/// The transport's own state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportData {
    /// Whether the device runs.
    pub device_activated: bool,
    /// Its queues.
    pub queues: List<Queue, QUEUES_MAX>,
    /// ISR status.
    pub interrupt_status: u64,
    /// Offset of the PCI configuration access capability, plus 2.
    pub cap_pci_cfg_offset: u64,
    /// Its bytes from there on.
    pub cap_pci_cfg: Fixed<u8, 18>,
}

/// The common configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "registers")]
pub struct CommonConfig {
    pub driver_status: u8,
    pub config_generation: u8,
    pub device_feature_select: u32,
    pub driver_feature_select: u32,
    pub queue_select: u16,
    pub msix_config: u16,
    /// The vector of each queue.
    pub msix_queues: List<u16, QUEUES_MAX>,
}

/// A transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Its own state.
    pub data: TransportData,
    /// Its configuration space.
    pub configuration: PciConfiguration,
    /// The common configuration.
    pub common: CommonConfig,
    /// MSI-X.
    pub msix: MsixConfig,
}

impl Transport {
    pub(crate) fn read(mut node: NodeReader, budget: &mut Budget) -> Result<Self, DocumentError> {
        let data: TransportData = node.state(budget)?;
        let configuration = PciConfiguration::read(&mut node, budget)?;
        let common_node = node.require(COMMON)?;
        let common: CommonConfig = common_node.state(budget)?;
        let msix = MsixConfig::read(&mut node, budget)?;
        let queues = data.queues.len();
        let vectors = common.msix_queues.len();
        if vectors != queues {
            let problem =
                format!("msix_queues: vectors of {vectors} queues, and there are {queues}");
            return Err(common_node.out_of_bounds(problem));
        }
        if data.interrupt_status > u64::from(u8::MAX) {
            let problem = format!("interrupt_status: {:#x} is no byte", data.interrupt_status);
            return Err(node.out_of_bounds(problem));
        }
        if configuration.virtio_type().is_none() {
            let path = format!("{}/{CONFIGURATION}", node.path());
            let problem = "registers[0]: not a virtio device".to_owned();
            return Err(DocumentError::OutOfBounds { path, problem });
        }
        common_node.end()?;
        node.end()?;
        Ok(Self { data, configuration, common, msix })
    }

    pub(crate) fn write(&self, path: &str) -> Result<Node, DocumentError> {
        let mut node = Node::of(path, &self.data)?;
        self.configuration.write(&mut node)?;
        node.add(COMMON, Node::of(COMMON, &self.common)?);
        self.msix.write(&mut node)?;
        Ok(node)
    }

    /// Type of the virtio device, by the identification of the function; 0 is no type.
    pub fn device_type(&self) -> u16 {
        self.configuration.virtio_type().unwrap_or(0)
    }
}

impl PciConfiguration {
    fn virtio_type(&self) -> Option<u16> {
        let [identification, ..] = *self.registers;
        let kind = (identification >> 16).checked_sub(DEVICE_BASE)?;
        (identification & 0xffff == VENDOR && kind != 0).then(|| u16::try_from(kind).ok())?
    }
}
