// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of devices that other processes serve over vhost-user.
//!
//! Owns the translation from options to devices, what the loss of a back end leads to (an event, and that no later guest gets the memory), and the rule that a machine with
//! such a device stays where it is.

use std::path::PathBuf;
use std::sync::Arc;

use devices::virtio::vhost_user::{VhostUser, VhostUserConfig, VhostUserError, VhostUserKind};
use memory::GuestRam;
use pci::Bdf;
use thiserror::Error;
use vm_memory::GuestAddressSpace as _;

use super::virtio::{BarPlacement, PciContext, VirtioDevices, VirtioError};
use crate::config::{DiskConfig, VmConfig};
use crate::events;

/// Why a vhost-user device cannot be created.
#[derive(Debug, Error)]
#[error("cannot make the vhost-user device '{id}'")]
pub struct VhostUserWiringError {
    /// Id of the device.
    id: String,
    /// The cause.
    #[source]
    source: VhostUserError,
}

/// A machine with vhost-user devices cannot be migrated or saved.
#[derive(Debug, Error)]
#[error("{} cannot be migrated or saved: the state of a vhost-user device is in its back end", .0.join(", "))]
pub struct NotMovable(Vec<String>);

/// Refuses to migrate, save, receive or restore a machine with vhost-user devices.
///
/// # Errors
/// Names the devices.
pub fn check_movable(config: &VmConfig) -> Result<(), NotMovable> {
    let devices = config.vhost_user_devices();
    if devices.is_empty() {
        return Ok(());
    }
    Err(NotMovable(devices.iter().map(|(_, id)| format!("'{id}'")).collect()))
}

/// Connects to the back end of a disk.
///
/// # Errors
/// Names the disk.
pub fn make_disk(
    disk: &DiskConfig,
    ram: &Arc<GuestRam>,
) -> Result<VhostUser, VhostUserWiringError> {
    let config = VhostUserConfig {
        id: disk.id.clone().unwrap_or_default(),
        kind: VhostUserKind::Block,
        socket: PathBuf::from(disk.vhost_socket.as_deref().unwrap_or_default()),
        num_queues: disk.num_queues,
        queue_size: disk.queue_size,
    };
    make(config, ram)
}

fn make(config: VhostUserConfig, ram: &Arc<GuestRam>) -> Result<VhostUser, VhostUserWiringError> {
    let id = config.id.clone();
    let lost = id.clone();
    let written = Arc::downgrade(ram);
    let on_lost = Arc::new(move |why: &str| {
        // It has the memory mapped, and perhaps requests in flight, also if it has only closed the connection.
        if let Some(ram) = written.upgrade() {
            ram.note_stray_writer();
        }
        log::warn!("the vhost-user back end of '{lost}' is lost: {why}");
        events::emit("vm", "back-end-lost", &[("id", &lost), ("error", why)]);
    });
    VhostUser::connect(config, &ram.guest_memory().memory(), on_lost)
        .map_err(|source| VhostUserWiringError { id, source })
}

impl VirtioDevices {
    /// Plugs a device whose back end is connected.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_vhost_user(
        &mut self,
        device: VhostUser,
        context: &PciContext<'_>,
        requested: Option<u8>,
        width: BarPlacement,
    ) -> Result<Bdf, VirtioError> {
        let (id, counters) = (device.id().to_owned(), device.counters());
        let bdf = self.plug_with(context, &id, Box::new(device), requested, width)?;
        self.counters.push((id.clone(), counters));
        self.vhost_users.push(id);
        Ok(bdf)
    }

    /// Adds a vhost-user device to the machine; its back end is connected.
    ///
    /// # Errors
    /// Names the device; nothing has changed then.
    pub fn add_vhost_user(
        &mut self,
        made: VhostUser,
        requested: Option<u8>,
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let bdf = self.plug_vhost_user(made, context, requested, BarPlacement::Wide)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }
}
