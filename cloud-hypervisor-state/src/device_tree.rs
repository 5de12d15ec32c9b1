// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device manager's own state: which devices there are, their addresses and resources.

use serde::{Deserialize, Serialize};

use crate::lists::{List, Named, is_name};

/// Maximum number of nodes: two for each device that the buses have room for.
const NODES_MAX: usize = 8192;
const RESOURCES_MAX: usize = 32;
const CHILDREN_MAX: usize = 32;
/// Length in bytes of an address such as `0000:00:01.0`.
const ADDRESS_BYTES: usize = 12;

/// Kind of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "names of the format")]
pub enum BarType {
    Io,
    Mmio32,
    Mmio64,
}

/// What a device occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Resource {
    /// A BAR.
    PciBar {
        /// Its number.
        index: u64,
        /// Its address.
        base: u64,
        /// Its length in bytes.
        size: u64,
        /// Its kind.
        type_: BarType,
        /// Whether it is prefetchable.
        prefetchable: bool,
    },
    /// Guest physical addresses.
    MmioAddressRange {
        /// The first.
        base: u64,
        /// Their number.
        size: u64,
    },
}

/// A device, or the transport of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceNode {
    /// Its id.
    pub id: String,
    /// What it occupies.
    pub resources: List<Resource, RESOURCES_MAX>,
    /// Its transport, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The devices behind it.
    pub children: List<String, CHILDREN_MAX>,
    /// Its address, if it is a PCI function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_bdf: Option<String>,
}

/// State of the device manager.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceManagerData {
    /// The devices by id.
    pub device_tree: Named<DeviceNode, NODES_MAX>,
    /// Number that the next id made by the VMM has.
    pub device_id_cnt: u64,
}

impl DeviceManagerData {
    /// The first value that is out of bounds, with its path.
    pub(crate) fn problem(&self) -> Option<String> {
        self.device_tree.0.iter().find_map(|(id, node)| {
            let at = |what: String| Some(format!("device_tree.{id}.{what}"));
            let names = node.parent.iter().chain(node.children.iter());
            if node.id != *id {
                return at(format!("id: '{}' is another name", node.id.escape_debug()));
            }
            if names.into_iter().any(|name| !is_name(name)) {
                return at(
                    "parent, children: a name is empty, too long or not printable".to_owned()
                );
            }
            if node.pci_bdf.as_ref().is_some_and(|bdf| bdf.len() != ADDRESS_BYTES) {
                return at("pci_bdf: not the address of a function".to_owned());
            }
            (0_usize..).zip(node.resources.iter()).find_map(|(index, resource)| {
                let (base, size) = match *resource {
                    Resource::PciBar { index, .. } if index > 5 => {
                        return at(format!("resources[{index}]: BAR {index} does not exist"));
                    }
                    Resource::PciBar { base, size, .. }
                    | Resource::MmioAddressRange { base, size } => (base, size),
                };
                let fits = size != 0 && base.checked_add(size).is_some();
                (!fits).then(|| at(format!("resources[{index}]: {size:#x} bytes at {base:#x}")))?
            })
        })
    }
}
