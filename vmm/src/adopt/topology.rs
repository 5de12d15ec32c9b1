// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which devices there are and where: the tree of the device manager, the nodes and the configuration have to agree.

use std::collections::{BTreeMap, BTreeSet};

use cloud_hypervisor_state::{DeviceNode, Document, Resource, TRANSPORT_PREFIX, Virtio};
use pci::Bdf;

use super::error::{AdoptError, ensure};
use crate::config::memory::HotplugMethod;
use crate::config::on_platform::PciNumber;
use crate::config::vm::{PVPANIC_ID, WATCHDOG_ID};
use crate::config::{ConsoleMode, VmConfig};
use crate::machine::later_memory_id;

const PATH: &str = "device-manager";
/// Feature bit of a network that says its MTU.
const NET_MTU: u64 = 1 << 3;

/// Where a function is, by the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its address.
    pub bdf: Bdf,
    /// Its BARs: number, address, length.
    pub bars: Vec<(u64, u64, u64)>,
}

/// The places of all functions.
#[derive(Debug, Default)]
pub struct Topology {
    /// Virtio devices by their id there.
    places: BTreeMap<String, Place>,
    panic_device: Option<Place>,
    /// Addresses of persistent memory.
    pmems: BTreeMap<String, u64>,
    /// MTUs that networks have offered.
    mtus: BTreeMap<String, u16>,
}

fn at(id: &str) -> String {
    format!("{PATH}: device_tree.{id}")
}

/// The id of a device in a machine of this program.
pub fn name_here(id: &str, device: &Virtio) -> String {
    if matches!(device, Virtio::Mem(_)) { later_memory_id(id) } else { id.to_owned() }
}

/// Reads the tree, in which each node is that of a device in the document.
///
/// # Errors
/// Names the node that is missing, unknown or elsewhere.
pub fn of(document: &Document) -> Result<Topology, AdoptError> {
    let manager = &document.devices;
    let tree = &manager.data.device_tree.0;
    let mut known: BTreeSet<String> = BTreeSet::from(["__ioapic".to_owned()]);
    known.extend(manager.serial.iter().map(|_| "__serial".to_owned()));
    known.extend(manager.debug_console.then(|| "__debug_console".to_owned()));
    known.extend(manager.pvpanic.iter().map(|_| PVPANIC_ID.to_owned()));
    let mut places = BTreeMap::new();
    for (id, (_, kind)) in &manager.virtio {
        let transport_id = format!("{TRANSPORT_PREFIX}{id}");
        let transport = node(tree, &transport_id)?;
        let device = node(tree, id)?;
        ensure(
            transport.children.first() == Some(id) && transport.children.len() == 1,
            || at(&transport_id),
            || "its device is not its only child".to_owned(),
        )?;
        ensure(
            device.parent.as_ref() == Some(&transport_id) && device.pci_bdf.is_none(),
            || at(id),
            || "its transport is not its parent".to_owned(),
        )?;
        check_range(id, device, kind)?;
        places.insert(id.clone(), place(&transport_id, transport)?);
        known.extend([transport_id, id.clone()]);
    }
    let panic_device = match &manager.pvpanic {
        Some(_) => Some(place(PVPANIC_ID, node(tree, PVPANIC_ID)?)?),
        None => None,
    };
    for id in &known {
        node(tree, id)?;
    }
    if let Some(id) = tree.keys().find(|id| !known.contains(*id)) {
        return Err(AdoptError::refused(at(id), "a device without a state"));
    }
    let all = places.values().chain(&panic_device).map(|place| place.bdf.to_string());
    let mut addresses = BTreeSet::new();
    for address in all {
        let problem = format!("two functions at {address}");
        ensure(addresses.insert(address), || format!("{PATH}: device_tree"), || problem)?;
    }
    let pmems = manager.virtio.iter().filter_map(|(id, (_, device))| match device {
        Virtio::Pmem(pmem) => Some((id.clone(), pmem.config.start)),
        _ => None,
    });
    let mtus = manager.virtio.iter().filter_map(|(id, (_, device))| match device {
        Virtio::Net(net) if net.avail_features & NET_MTU != 0 => Some((id.clone(), net.config.mtu)),
        _ => None,
    });
    let (pmems, mtus) = (pmems.collect(), mtus.collect());
    Ok(Topology { places, panic_device, pmems, mtus })
}

fn node<'a>(
    tree: &'a BTreeMap<String, DeviceNode>,
    id: &str,
) -> Result<&'a DeviceNode, AdoptError> {
    tree.get(id).ok_or_else(|| AdoptError::refused(at(id), "the node is missing"))
}

/// Only persistent memory has a range of addresses besides its BARs: that of its memory.
fn check_range(id: &str, node: &DeviceNode, device: &Virtio) -> Result<(), AdoptError> {
    let wanted = match device {
        Virtio::Pmem(pmem) => {
            vec![Resource::MmioAddressRange { base: pmem.config.start, size: pmem.config.size }]
        }
        _ => Vec::new(),
    };
    ensure(
        *node.resources == *wanted,
        || at(id),
        || "its resources are not those of its configuration".to_owned(),
    )
}

fn place(id: &str, node: &DeviceNode) -> Result<Place, AdoptError> {
    let text = node.pci_bdf.as_deref().unwrap_or_default();
    let bdf = text.parse::<Bdf>().ok();
    let bdf = bdf.filter(|bdf| (bdf.bus(), bdf.function()) == (0, 0) && bdf.device() != 0);
    let wrong =
        || AdoptError::refused(at(id), format!("no function can be at '{}'", text.escape_debug()));
    let bdf = bdf.ok_or_else(wrong)?;
    let is_prefetchable = |it: &Resource| matches!(it, Resource::PciBar { prefetchable: true, .. });
    ensure(
        !node.resources.iter().any(is_prefetchable),
        || at(id),
        || "a prefetchable BAR".to_owned(),
    )?;
    let bars = node.resources.iter().filter_map(|resource| match *resource {
        Resource::PciBar { index, base, size, .. } => Some((index, base, size)),
        Resource::MmioAddressRange { .. } => None,
    });
    Ok(Place { bdf, bars: bars.collect() })
}

impl Topology {
    /// The place of a virtio device.
    ///
    /// # Errors
    /// There is no such device.
    pub fn place(&self, id: &str) -> Result<&Place, AdoptError> {
        self.places.get(id).ok_or_else(|| AdoptError::refused(at(id), "the node is missing"))
    }

    /// The place of the panic device.
    ///
    /// # Errors
    /// There is none.
    pub fn panic_device(&self) -> Result<&Place, AdoptError> {
        let missing = || AdoptError::refused(at(PVPANIC_ID), "the node is missing");
        self.panic_device.as_ref().ok_or_else(missing)
    }

    /// The address of persistent memory.
    pub fn pmem_gpa(&self, id: &str) -> Option<u64> {
        self.pmems.get(id).copied()
    }

    /// The numbers in segment 0 of devices for which no option names one.
    pub fn unlisted_numbers(&self, document: &Document) -> Option<Vec<PciNumber>> {
        let is_unlisted = |device: &Virtio| matches!(device, Virtio::Watchdog(_) | Virtio::Mem(_));
        let virtio = document.devices.virtio.iter().filter_map(|(id, (_, device))| {
            let place = self.places.get(id).filter(|_| is_unlisted(device))?;
            Some((name_here(id, device), place.bdf))
        });
        let panics = self.panic_device.iter().map(|place| (PVPANIC_ID.to_owned(), place.bdf));
        let first = virtio.chain(panics).filter(|(_, bdf)| bdf.segment() == 0);
        let numbers: Vec<_> =
            first.map(|(id, bdf)| PciNumber { id, number: bdf.device() }).collect();
        (!numbers.is_empty()).then_some(numbers)
    }

    /// The MTU that a network has offered: there that of its tap, if no option says one.
    pub fn mtu(&self, id: &str) -> Option<u16> {
        self.mtus.get(id).copied()
    }

    /// The addresses of all functions, by the ids that they have here.
    pub fn addresses(&self, document: &Document) -> BTreeMap<String, Bdf> {
        let virtio = self.places.iter().map(|(id, place)| {
            let here = document.devices.virtio.get(id);
            let here = here.map_or_else(|| id.clone(), |(_, device)| name_here(id, device));
            (here, place.bdf)
        });
        let panics = self.panic_device.iter().map(|place| (PVPANIC_ID.to_owned(), place.bdf));
        virtio.chain(panics).collect()
    }
}

/// Checks that the configuration has the devices of the document.
///
/// # Errors
/// Names the device that only one of them has.
pub fn check(config: &VmConfig, document: &Document) -> Result<(), AdoptError> {
    let mut wanted = configured(config);
    for (id, (_, device)) in &document.devices.virtio {
        let kind = kind_of(device);
        let found = wanted.remove(id.as_str());
        ensure(
            found == Some(kind),
            || format!("{PATH}/{id}"),
            || match found {
                Some(other) => {
                    format!("{kind}, and the configuration has {other} of this name")
                }
                None => format!("{kind} that the configuration does not have"),
            },
        )?;
    }
    if let Some((id, kind)) = wanted.pop_first() {
        let problem = format!("the node is missing: the configuration has {kind}");
        return Err(AdoptError::refused(format!("{PATH}/{id}"), problem));
    }
    let fixed = [
        ("__serial", config.serial.mode != ConsoleMode::Off, document.devices.serial.is_some()),
        (
            "__debug_console",
            config.debug_console.mode != ConsoleMode::Off,
            document.devices.debug_console,
        ),
        (PVPANIC_ID, config.pvpanic, document.devices.pvpanic.is_some()),
    ];
    for (id, in_config, in_document) in fixed {
        ensure(
            in_config == in_document,
            || format!("{PATH}/{id}"),
            || format!("there: {in_document}, in the configuration: {in_config}"),
        )?;
    }
    Ok(())
}

/// What a device is, in words.
fn kind_of(device: &Virtio) -> &'static str {
    match device {
        Virtio::Net(_) => "a network",
        Virtio::VhostUserNet(_) => "a vhost-user network",
        Virtio::Block(_) => "a disk",
        Virtio::Console(_) => "a console",
        Virtio::Rng(_) => "an entropy device",
        Virtio::Balloon(_) => "a balloon",
        Virtio::Rtc(_) => "a clock",
        Virtio::Vsock(_) => "a socket device",
        Virtio::Mem(_) => "a memory device",
        Virtio::Fs(_) => "a file system",
        Virtio::Pmem(_) => "persistent memory",
        Virtio::Watchdog(_) => "a watchdog",
    }
}

/// The virtio devices of a configuration, by the id that they have there.
fn configured(config: &VmConfig) -> BTreeMap<&str, &'static str> {
    let mut devices: Vec<(Option<&str>, &'static str)> = Vec::new();
    if config.console.mode != ConsoleMode::Off {
        devices.push((config.console.id.as_deref(), "a console"));
    }
    devices.push((config.rng.id.as_deref(), "an entropy device"));
    if config.watchdog {
        devices.push((Some(WATCHDOG_ID), "a watchdog"));
    }
    if let Some(balloon) = &config.balloon {
        devices.push((balloon.id.as_deref(), "a balloon"));
    }
    if let Some(rtc) = &config.rtc {
        devices.push((rtc.id.as_deref(), "a clock"));
    }
    if let Some(vsock) = &config.vsock {
        devices.push((vsock.id.as_deref(), "a socket device"));
    }
    for disk in config.disks.iter().flatten() {
        devices.push((disk.id.as_deref(), "a disk"));
    }
    for net in config.net.iter().flatten() {
        devices.push((
            net.id.as_deref(),
            if net.vhost_user { "a vhost-user network" } else { "a network" },
        ));
    }
    for pmem in config.pmem.iter().flatten() {
        devices.push((pmem.id.as_deref(), "persistent memory"));
    }
    for fs in config.fs.iter().flatten() {
        devices.push((fs.id.as_deref(), "a file system"));
    }
    if config.memory.hotplug_method == HotplugMethod::VirtioMem {
        let is_later = |size: Option<u64>| size.is_some_and(|size| size > 0);
        match &config.memory.zones {
            Some(zones) if !zones.is_empty() => {
                for zone in zones.iter().filter(|zone| is_later(zone.hotplug_size)) {
                    devices.push((Some(&zone.id), "a memory device"));
                }
            }
            _ if is_later(config.memory.hotplug_size) => {
                devices.push((Some(crate::config::memory::DEFAULT_ZONE), "a memory device"));
            }
            _ => {}
        }
    }
    devices.into_iter().filter_map(|(id, kind)| Some((id?, kind))).collect()
}
