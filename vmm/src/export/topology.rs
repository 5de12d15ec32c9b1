// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The tree of devices: which there are, and where.

use std::collections::BTreeMap;

use cloud_hypervisor_state::{
    BarType, DeviceManagerData, DeviceNode, List, Named, Resource, TRANSPORT_PREFIX, Virtio,
};

use super::error::{ExportError, ensure, fits};
use super::functions::Bar;
use super::legacy::Legacy;
use crate::config::vm::PVPANIC_ID;

const IOAPIC: &str = "__ioapic";
const SERIAL: &str = "__serial";
const DEBUG_CONSOLE: &str = "__debug_console";

/// Where a function is.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its address.
    pub bdf: String,
    /// Its BAR 0.
    pub bar: Bar,
}

/// The tree, as far as it is known.
#[derive(Debug, Default)]
pub struct Tree(BTreeMap<String, DeviceNode>);

fn resource(bar: &Bar) -> Resource {
    Resource::PciBar {
        index: 0,
        base: bar.gpa,
        size: bar.len_bytes,
        type_: if bar.is_wide { BarType::Mmio64 } else { BarType::Mmio32 },
        prefetchable: false,
    }
}

impl Tree {
    /// The devices at fixed addresses.
    ///
    /// # Errors
    /// None that can be: a node without resources always fits.
    pub fn of(legacy: &Legacy) -> Result<Self, ExportError> {
        let mut tree = Self::default();
        tree.add(IOAPIC, Vec::new(), None, Vec::new(), None)?;
        if legacy.serial.is_some() {
            tree.add(SERIAL, Vec::new(), None, Vec::new(), None)?;
        }
        if legacy.debug_console {
            tree.add(DEBUG_CONSOLE, Vec::new(), None, Vec::new(), None)?;
        }
        Ok(tree)
    }

    fn add(
        &mut self,
        id: &str,
        resources: Vec<Resource>,
        parent: Option<String>,
        children: Vec<String>,
        pci_bdf: Option<String>,
    ) -> Result<(), ExportError> {
        let node = DeviceNode {
            id: id.to_owned(),
            resources: fits(List::try_from(resources), || id.to_owned())?,
            parent,
            children: fits(List::try_from(children), || id.to_owned())?,
            pci_bdf,
        };
        let before = self.0.insert(id.to_owned(), node);
        let problem = || "two devices have this name there".to_owned();
        ensure(before.is_none(), || format!("device '{id}'"), problem)
    }

    /// Adds a virtio device with its transport.
    ///
    /// # Errors
    /// There is a device of this name.
    pub fn add_virtio(
        &mut self,
        id: &str,
        device: &Virtio,
        place: Place,
    ) -> Result<(), ExportError> {
        let transport = format!("{TRANSPORT_PREFIX}{id}");
        let memory = match device {
            Virtio::Pmem(pmem) => {
                let (base, size) = (pmem.config.start, pmem.config.size);
                vec![Resource::MmioAddressRange { base, size }]
            }
            _ => Vec::new(),
        };
        self.add(id, memory, Some(transport.clone()), Vec::new(), None)?;
        let bars = vec![resource(&place.bar)];
        self.add(&transport, bars, None, vec![id.to_owned()], Some(place.bdf))
    }

    /// Adds the panic device.
    ///
    /// # Errors
    /// There is a device of this name.
    pub fn add_panic_device(&mut self, place: Place) -> Result<(), ExportError> {
        self.add(PVPANIC_ID, vec![resource(&place.bar)], None, Vec::new(), Some(place.bdf))
    }

    /// The state of the device manager. Names that it makes later have numbers above those that there are.
    pub fn finish(self) -> DeviceManagerData {
        let number = |id: &String| -> Option<u64> {
            let name = id.strip_prefix('_')?;
            name.trim_start_matches(|it: char| it.is_ascii_lowercase()).parse().ok()
        };
        let last = self.0.keys().filter_map(number).max();
        DeviceManagerData {
            device_tree: Named(self.0),
            device_id_cnt: last.map_or(0, |last| last.saturating_add(1)),
        }
    }
}
