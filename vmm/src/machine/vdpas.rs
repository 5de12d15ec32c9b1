// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of vDPA devices.
//!
//! Owns the translation from options to devices, what they mean for the memory of the machine, and the rule that a
//! machine with such a device stays where it is.

use std::sync::Arc;

use devices::virtio::vdpa::{Vdpa, VdpaDeviceConfig, VdpaError};
use memory::GuestRam;
use pci::Bdf;
use thiserror::Error;

use super::place::Place;
use super::virtio::{PciContext, VirtioDevices, VirtioError};
use crate::config::{VdpaConfig, VmConfig};

/// Why a vDPA device cannot be created.
#[derive(Debug, Error)]
#[error("cannot make the vDPA device '{id}'")]
pub struct VdpaWiringError {
    /// Id of the device.
    id: String,
    /// The cause.
    #[source]
    source: VdpaError,
}

/// A machine with vDPA devices cannot be migrated or saved.
#[derive(Debug, Error)]
#[error(
    "{} cannot be migrated or saved: what a vDPA device writes to memory is in no log, and its state is in the device",
    .0.join(", ")
)]
pub struct VdpaNotMovable(Vec<String>);

/// Refuses to migrate, save, receive or restore a machine with vDPA devices.
///
/// # Errors
/// Names the devices.
pub fn check_movable(config: &VmConfig) -> Result<(), VdpaNotMovable> {
    let ids = config.vdpa.iter().flatten().filter_map(|vdpa| vdpa.id.as_deref());
    let ids: Vec<_> = ids.map(|id| format!("'{id}'")).collect();
    if ids.is_empty() { Ok(()) } else { Err(VdpaNotMovable(ids)) }
}

/// Opens a device. Nothing of guest memory is discarded as long as it is there.
///
/// # Errors
/// Names the device.
pub fn make(vdpa: &VdpaConfig, ram: &Arc<GuestRam>) -> Result<Vdpa, VdpaWiringError> {
    let id = vdpa.id.clone().unwrap_or_default();
    let config =
        VdpaDeviceConfig { id: id.clone(), path: vdpa.path.clone(), num_queues: vdpa.num_queues };
    let device =
        Vdpa::open(config, ram).map_err(|source| VdpaWiringError { id: id.clone(), source })?;
    if !device.can_suspend() {
        log::info!("the vDPA device '{id}' cannot be suspended: it goes on while the VM is paused");
    }
    if ram.regions().iter().any(|region| !region.is_hugetlb() && !region.spec().shared) {
        log::warn!(
            "guest memory is private: a vDPA device of the kernel's software (VDUSE, vdpa_sim) as which '{id}' may be \
             implemented does not reach it, use --memory shared=on with those"
        );
    }
    Ok(device)
}

impl VirtioDevices {
    /// Plugs the vDPA devices of a machine.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_vdpas(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        for vdpa in config.vdpa.iter().flatten() {
            self.plug_vdpa(vdpa, make(vdpa, context.ram)?, context)?;
        }
        Ok(())
    }

    fn plug_vdpa(
        &mut self,
        vdpa: &VdpaConfig,
        device: Vdpa,
        context: &PciContext<'_>,
    ) -> Result<Bdf, VirtioError> {
        let (id, counters) = (device.id().to_owned(), device.counters());
        let end = device.end_handle();
        let place = Place::of_vdpa(vdpa.pci_segment, vdpa.pci_device_id);
        let bdf = self.plug(context, &id, Box::new(device), place)?;
        self.counters.push((id.clone(), counters));
        self.vdpas.push((id, end));
        Ok(bdf)
    }

    /// Adds a vDPA device to the machine; it is open.
    ///
    /// # Errors
    /// Names the device; nothing has changed then.
    pub fn add_vdpa(
        &mut self,
        vdpa: &VdpaConfig,
        made: Vdpa,
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let bdf = self.plug_vdpa(vdpa, made, context)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }

    /// The first vDPA device, because of which memory can neither come nor go.
    pub fn first_vdpa(&self) -> Option<&str> {
        self.vdpas.first().map(|(id, _)| id.as_str())
    }

    /// Lets no device map more memory: its VM ends, which would have to wait for all of it.
    pub fn end_vdpas(&self) {
        self.vdpas.iter().for_each(|(_, end)| end.end());
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use memory::{RamConfig, RamLayout, ZoneSpec};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_machine_with_such_devices_stays_where_it_is() {
        let config = |vdpa| {
            let json = json!({ "payload": { "kernel": "/k" }, "vdpa": vdpa });
            serde_json::from_value::<VmConfig>(json).unwrap().complete().unwrap()
        };
        check_movable(&config(json!(null))).unwrap();
        let one = |path: &str| json!({ "path": path, "num_queues": 1 });
        let error = check_movable(&config(json!([one("/a"), one("/b")]))).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("'_vdpa0', '_vdpa1' cannot be migrated or saved"), "{error}");
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_named() {
        let zones = vec![ZoneSpec::new("mem0", 4 << 20)];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let path = "/nowhere/vhost-vdpa-0";
        let vdpa =
            VdpaConfig { path: path.into(), id: Some("v".to_owned()), ..VdpaConfig::default() };
        let error = error_text::chain(&make(&vdpa, &ram).err().unwrap());
        assert!(error.contains("'v'") && error.contains(path), "{error}");
        assert_eq!(ram.discards_banned(), None);
    }
}
