// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The whole document: the nodes of the root, and what belongs together.
//!
//! Owns the order of reading: bytes and values are counted before anything is parsed; each node is taken once, and a
//! node that is left is refused.

use std::collections::BTreeMap;

use json_bound::Budget;

use crate::config::text_within;
use crate::device_tree::DeviceManagerData;
use crate::error::DocumentError;
use crate::legacy::{Ioapic, Serial};
use crate::memory::MemoryManager;
use crate::pci::Pvpanic;
use crate::text::{parse, print};
use crate::transport::Transport;
use crate::tree::{Node, NodeReader, ROOT};
use crate::vcpu::Vcpu;
use crate::virtio::Virtio;
use crate::vm::VmData;

/// Maximum length of a document in bytes; a vCPU has about 70 KiB, with nested guests 100 KiB.
pub const DOCUMENT_BYTES_MAX: usize = 256 << 20;
/// Maximum number of values: a vCPU has 5,000, with nested guests 14,000; a device 3,000; a memory device one for each
/// 2 MiB.
const VALUES_MAX: usize = 8 << 20;
/// Maximum number of values of the tree itself, without the texts in it: a node has 5, and a device up to 5 nodes.
const TREE_VALUES_MAX: usize = 256 << 10;
/// Maximum number of vCPUs, more than the number that any machine here can have.
const VCPUS_MAX: u32 = 1024;

/// What the id of a transport begins with; the id of its device follows.
pub const TRANSPORT_PREFIX: &str = "_virtio-pci-";

const CPU_MANAGER: &str = "cpu-manager";
const MEMORY_MANAGER: &str = "memory-manager";
const DEVICE_MANAGER: &str = "device-manager";
const IOAPIC: &str = "__ioapic";
const SERIAL: &str = "__serial";
const DEBUG_CONSOLE: &str = "__debug_console";
const PVPANIC: &str = "__pvpanic";
const VFIO: &str = "vfio_common";

/// The devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceManager {
    /// Which there are.
    pub data: DeviceManagerData,
    /// The I/O APIC.
    pub ioapic: Ioapic,
    /// The serial port.
    pub serial: Option<Serial>,
    /// Whether there is a debug console.
    pub debug_console: bool,
    /// The panic device.
    pub pvpanic: Option<Pvpanic>,
    /// Virtio devices by id, each with its transport.
    pub virtio: BTreeMap<String, (Transport, Virtio)>,
}

/// A snapshot document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// State of the root.
    pub vm: VmData,
    /// vCPUs by index.
    pub vcpus: BTreeMap<u32, Vcpu>,
    /// Where RAM is.
    pub memory: MemoryManager,
    /// The devices.
    pub devices: DeviceManager,
}

impl Document {
    /// Reads a document from untrusted bytes.
    ///
    /// # Errors
    /// Names the node and the field.
    pub fn read(bytes: &[u8]) -> Result<Self, DocumentError> {
        let text = text_within(ROOT, bytes, DOCUMENT_BYTES_MAX)?;
        let mut root = NodeReader::root(parse(ROOT, text, &mut Budget::new(TREE_VALUES_MAX))?);
        let mut budget = Budget::new(VALUES_MAX);
        let vm = root.state(&mut budget)?;
        let vcpus = read_vcpus(root.require(CPU_MANAGER)?, &mut budget)?;
        let memory_node = root.require(MEMORY_MANAGER)?;
        let memory: MemoryManager = memory_node.state(&mut budget)?;
        if let Some(problem) = memory.problem() {
            return Err(memory_node.out_of_bounds(problem));
        }
        memory_node.end()?;
        let devices = DeviceManager::read(root.require(DEVICE_MANAGER)?, &mut budget)?;
        root.end()?;
        Ok(Self { vm, vcpus, memory, devices })
    }

    /// Writes the document in the form that is read.
    ///
    /// # Errors
    /// A state cannot be written as JSON.
    pub fn write(&self) -> Result<Vec<u8>, DocumentError> {
        let mut root = Node::of(ROOT, &self.vm)?;
        let mut vcpus = Node::default();
        for (index, vcpu) in &self.vcpus {
            let id = index.to_string();
            vcpus.add(&id, Node::of(&id, vcpu)?);
        }
        root.add(CPU_MANAGER, vcpus);
        root.add(MEMORY_MANAGER, Node::of(MEMORY_MANAGER, &self.memory)?);
        root.add(DEVICE_MANAGER, self.devices.write()?);
        print(ROOT, &root).map(String::into_bytes)
    }
}

fn read_vcpus(
    mut node: NodeReader,
    budget: &mut Budget,
) -> Result<BTreeMap<u32, Vcpu>, DocumentError> {
    node.has_no_state()?;
    let mut vcpus = BTreeMap::new();
    for id in node.ids() {
        let index = id.parse::<u32>().ok();
        // The canonical number only, so that no vCPU is there twice.
        let Some(index) = index.filter(|index| *index < VCPUS_MAX && index.to_string() == id)
        else {
            continue;
        };
        let vcpu = node.require(&id)?;
        vcpus.insert(index, vcpu.state(budget)?);
        vcpu.end()?;
    }
    node.end()?;
    Ok(vcpus)
}

impl DeviceManager {
    fn read(mut node: NodeReader, budget: &mut Budget) -> Result<Self, DocumentError> {
        let data: DeviceManagerData = node.state(budget)?;
        if let Some(problem) = data.problem() {
            return Err(node.out_of_bounds(problem));
        }
        let ioapic_node = node.require(IOAPIC)?;
        let ioapic = ioapic_node.state(budget)?;
        ioapic_node.end()?;
        let serial = match node.take(SERIAL) {
            Some(child) => {
                let serial = child.state(budget)?;
                child.end()?;
                Some(serial)
            }
            None => None,
        };
        let debug_console = match node.take(DEBUG_CONSOLE) {
            Some(child) => {
                child.state::<()>(budget)?;
                child.end()?;
                true
            }
            None => false,
        };
        let pvpanic = node.take(PVPANIC).map(|child| Pvpanic::read(child, budget)).transpose()?;
        let mut virtio = BTreeMap::new();
        for transport_id in node.ids() {
            let Some(id) = transport_id.strip_prefix(TRANSPORT_PREFIX) else { continue };
            let transport = Transport::read(node.require(&transport_id)?, budget)?;
            let device = Virtio::read(node.require(id)?, transport.device_type(), budget)?;
            virtio.insert(id.to_owned(), (transport, device));
        }
        if let Some(id) = node.ids().first() {
            let child = node.require(id)?;
            let path = child.path().to_owned();
            return Err(if child.has(VFIO) {
                DocumentError::Unsupported { path, what: "a passed-through device" }
            } else {
                DocumentError::UnknownNode { path }
            });
        }
        Ok(Self { data, ioapic, serial, debug_console, pvpanic, virtio })
    }

    fn write(&self) -> Result<Node, DocumentError> {
        let mut node = Node::of(DEVICE_MANAGER, &self.data)?;
        node.add(IOAPIC, Node::of(IOAPIC, &self.ioapic)?);
        if let Some(serial) = &self.serial {
            node.add(SERIAL, Node::of(SERIAL, serial)?);
        }
        if self.debug_console {
            node.add(DEBUG_CONSOLE, Node::of(DEBUG_CONSOLE, &())?);
        }
        if let Some(pvpanic) = &self.pvpanic {
            node.add(PVPANIC, pvpanic.write(PVPANIC)?);
        }
        for (id, (transport, device)) in &self.virtio {
            let transport_id = format!("{TRANSPORT_PREFIX}{id}");
            node.add(&transport_id, transport.write(&transport_id)?);
            node.add(id, device.write(id)?);
        }
        Ok(node)
    }
}

/// Fuzzes both documents: what is read is written so that it reads the same. Returns whether it could be read.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_document(bytes: &[u8]) -> bool {
    let Some((first, rest)) = bytes.split_first() else { return false };
    if *first == b'c' {
        let Ok(message) = crate::ConfigMessage::read(rest) else { return false };
        let written = message.write().map(|bytes| crate::ConfigMessage::read(&bytes));
        assert!(matches!(written, Ok(Ok(again)) if again == message), "read otherwise");
    } else {
        let Ok(document) = Document::read(rest) else { return false };
        let written = document.write().map(|bytes| Document::read(&bytes));
        assert!(matches!(written, Ok(Ok(again)) if again == document), "read otherwise");
    }
    true
}
