// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The tree of a VM's devices in `vm.info`.
//!
//! Owns its form, which is cloud-hypervisor's: the transport of a virtio device is a separate node,
//! which has the place on the PCI bus and the BARs, and the device is its child. It must never
//! look at anything but a description of the machine.

use std::collections::BTreeMap;

use pci::{BarDescription, BarKind};
use serde_json::{Value, json};

use crate::api::DeviceNode;
use crate::config::{ConsoleMode, VmConfig};
use crate::machine::{FunctionInfo, Machine};

/// Prefix of the name of a virtio device's transport.
const TRANSPORT: &str = "_virtio-pci-";

/// Devices by name.
type Tree = BTreeMap<String, DeviceNode>;

/// The device tree of a machine.
pub fn of_machine(machine: &Machine) -> Tree {
    let mut tree = of_functions(&machine.functions());
    for id in legacy(machine.config()) {
        let node = DeviceNode { id: id.to_owned(), ..DeviceNode::default() };
        tree.insert(id.to_owned(), node);
    }
    tree
}

/// The devices that are not on the PCI bus.
fn legacy(config: &VmConfig) -> impl Iterator<Item = &'static str> {
    let has = |mode, id| (mode != ConsoleMode::Off).then_some(id);
    let serial = has(config.serial.mode, "__serial");
    let debug = has(config.debug_console.mode, "__debug_console");
    [Some("__ioapic"), serial, debug].into_iter().flatten()
}

fn of_functions(functions: &[FunctionInfo]) -> Tree {
    let mut tree = Tree::new();
    for function in functions {
        let mut place = DeviceNode {
            id: function.id.clone(),
            resources: function.bars.iter().map(|(bar, gpa)| resource(bar, *gpa)).collect(),
            pci_bdf: Some(function.bdf.to_string()),
            ..DeviceNode::default()
        };
        if function.is_virtio {
            place.id.insert_str(0, TRANSPORT);
            place.children = vec![function.id.clone()];
            let device = DeviceNode {
                id: function.id.clone(),
                parent: Some(place.id.clone()),
                ..DeviceNode::default()
            };
            tree.insert(device.id.clone(), device);
        }
        tree.insert(place.id.clone(), place);
    }
    tree
}

fn resource(bar: &BarDescription, gpa: u64) -> Value {
    let kind = match bar.kind {
        BarKind::Memory32 | BarKind::Rom => "Mmio32",
        BarKind::Memory64 => "Mmio64",
        BarKind::Ports => "Io",
    };
    json!({"PciBar": {
        "index": bar.index,
        "base": gpa,
        "size": bar.len_bytes,
        "type_": kind,
        "prefetchable": bar.prefetchable,
    }})
}

#[cfg(test)]
mod tests {
    use pci::{Bdf, DeviceNumber};

    use super::*;

    fn function(id: &str, number: u8, is_virtio: bool, bars: Vec<(BarDescription, u64)>) -> Tree {
        let number = DeviceNumber::new(number).expect("a number on the bus");
        let bdf = Bdf::on_root_bus(0, number);
        of_functions(&[FunctionInfo { id: id.to_owned(), bdf, is_virtio, bars }])
    }

    fn bar(index: u8, kind: BarKind, len_bytes: u64) -> BarDescription {
        BarDescription { index, kind, prefetchable: index == 2, len_bytes }
    }

    #[test]
    fn a_virtio_device_hangs_on_its_transport() {
        let bars = vec![(bar(0, BarKind::Memory64, 1 << 19), 1 << 32)];
        let tree = serde_json::to_value(function("_disk0", 3, true, bars)).expect("JSON");
        let expected = json!({
            "_virtio-pci-_disk0": {
                "id": "_virtio-pci-_disk0",
                "resources": [{"PciBar": {
                    "index": 0, "base": 1_u64 << 32, "size": 1 << 19, "type_": "Mmio64",
                    "prefetchable": false,
                }}],
                "children": ["_disk0"],
                "pci_bdf": "0000:00:03.0",
            },
            "_disk0": {
                "id": "_disk0", "resources": [], "parent": "_virtio-pci-_disk0", "children": [],
            },
        });
        assert_eq!(tree, expected);
    }

    #[test]
    fn a_passed_through_device_has_its_place_itself() {
        let bars = vec![
            (bar(0, BarKind::Memory32, 4096), 0xc000_0000),
            (bar(2, BarKind::Memory64, 1 << 30), 1 << 40),
            (bar(5, BarKind::Ports, 32), 0),
        ];
        let tree = function("_vfio1", 31, false, bars);
        let node = tree.get("_vfio1").expect("the device");
        assert_eq!((tree.len(), node.pci_bdf.as_deref()), (1, Some("0000:00:1f.0")));
        let of = |key: &str| -> Vec<Value> {
            node.resources.iter().map(|it| it["PciBar"][key].clone()).collect()
        };
        assert_eq!(of("type_"), [json!("Mmio32"), json!("Mmio64"), json!("Io")]);
        assert_eq!(of("prefetchable"), [json!(false), json!(true), json!(false)]);
        assert_eq!(of("base"), [json!(0xc000_0000_u64), json!(1_u64 << 40), json!(0)]);
    }

    #[test]
    fn consoles_without_a_place_on_the_bus_are_there_unless_they_are_off() {
        let mut config = VmConfig::default();
        config.serial.mode = ConsoleMode::Null;
        config.debug_console.mode = ConsoleMode::Off;
        assert_eq!(legacy(&config).collect::<Vec<_>>(), ["__ioapic", "__serial"]);
        config.serial.mode = ConsoleMode::Off;
        config.debug_console.mode = ConsoleMode::File;
        assert_eq!(legacy(&config).collect::<Vec<_>>(), ["__ioapic", "__debug_console"]);
    }
}
