// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of devices that other processes serve over vhost-user.
//!
//! Owns the translation from options to devices, what the loss of a back end leads to (an event, and that no later guest gets the memory), and the rule that a machine with
//! such a device stays where it is, unless its state moves.

use std::path::PathBuf;
use std::sync::Arc;

use devices::virtio::vhost_user::{
    NetOffloads, VhostUser, VhostUserConfig, VhostUserError, VhostUserHandle, VhostUserKind,
    WriteLog,
};
use memory::GuestRam;
use pci::Bdf;
use thiserror::Error;
use vm_memory::GuestAddressSpace as _;

use super::place::Place;
use super::virtio::{PciContext, VirtioDevices, VirtioError};
use crate::config::net::VhostMode;
use crate::config::{DiskConfig, FsConfig, GenericVhostUserConfig, MacAddr, NetConfig, VmConfig};
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

/// The state of a vhost-user device cannot be had.
#[derive(Debug, Error)]
#[error("the vhost-user device '{id}' cannot be saved")]
pub struct StateNotGiven {
    id: String,
    #[source]
    source: VhostUserError,
}

/// A machine with vhost-user devices cannot be migrated or saved.
#[derive(Debug, Error)]
pub enum NotMovable {
    /// Devices whose state stays in their back ends.
    #[error("{} cannot be migrated or saved: the state of a vhost-user device is in its back end", .0.join(", "))]
    State(Vec<String>),
    /// Devices whose back ends are lost, and may write guest memory that nothing logs.
    #[error(
        "{} cannot be migrated or saved: the vhost-user back end is lost, and may still write guest memory; remove the \
         device, or reboot the VM",
        .0.join(", ")
    )]
    Lost(Vec<String>),
}

fn quoted<'a>(ids: impl Iterator<Item = &'a str>) -> Vec<String> {
    ids.map(|id| format!("'{id}'")).collect()
}

/// Refuses to migrate, save, receive or restore a machine with vhost-user devices that are neither networks nor file systems.
///
/// # Errors
/// Names the devices.
pub fn check_movable(config: &VmConfig) -> Result<(), NotMovable> {
    let devices = config.vhost_user_devices();
    let stay =
        quoted(devices.iter().filter(|(what, _)| !["net", "fs"].contains(what)).map(|(_, id)| *id));
    if stay.is_empty() { Ok(()) } else { Err(NotMovable::State(stay)) }
}

/// Refuses to go on with a move during which back ends have been lost.
///
/// # Errors
/// Names the devices.
pub fn check_logs(logs: &[WriteLog]) -> Result<(), NotMovable> {
    refuse_lost(logs.iter().filter(|log| log.is_lost()).map(WriteLog::device_id))
}

fn refuse_lost<'a>(ids: impl Iterator<Item = &'a str>) -> Result<(), NotMovable> {
    let lost = quoted(ids);
    if lost.is_empty() { Ok(()) } else { Err(NotMovable::Lost(lost)) }
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
        listens: false,
        num_queues: disk.num_queues,
        queue_size: disk.queue_size,
    };
    make(config, ram)
}

/// Connects to the back end of a network device, or waits until it has connected.
///
/// # Errors
/// Names the device.
pub fn make_net(net: &NetConfig, ram: &Arc<GuestRam>) -> Result<VhostUser, VhostUserWiringError> {
    let kind = VhostUserKind::Net {
        // Completed configurations have one.
        mac: net.mac.map(MacAddr::bytes).unwrap_or_default(),
        mtu: net.mtu,
        offloads: NetOffloads {
            csum: net.offload_csum,
            tso: net.offload_tso,
            ufo: net.offload_ufo,
        },
    };
    let config = VhostUserConfig {
        id: net.id.clone().unwrap_or_default(),
        kind,
        socket: PathBuf::from(net.vhost_socket.as_deref().unwrap_or_default()),
        listens: net.vhost_mode == VhostMode::Server,
        num_queues: net.num_queues,
        queue_size: net.queue_size,
    };
    make(config, ram)
}

/// Connects to the back end of a file system.
///
/// # Errors
/// Names the device.
pub fn make_fs(fs: &FsConfig, ram: &Arc<GuestRam>) -> Result<VhostUser, VhostUserWiringError> {
    let config = VhostUserConfig {
        id: fs.id.clone().unwrap_or_default(),
        kind: VhostUserKind::Fs { tag: fs.tag.clone() },
        socket: fs.socket.clone(),
        listens: false,
        num_queues: fs.num_queues,
        queue_size: fs.queue_size,
    };
    make(config, ram)
}

/// Connects to the back end of a device of any type.
///
/// # Errors
/// Names the device.
pub fn make_generic(
    device: &GenericVhostUserConfig,
    ram: &Arc<GuestRam>,
) -> Result<VhostUser, VhostUserWiringError> {
    let queue_sizes = device.queue_sizes.clone();
    let config = VhostUserConfig {
        id: device.id.clone().unwrap_or_default(),
        kind: VhostUserKind::Generic { device_id: device.virtio_id(), queue_sizes },
        socket: device.socket.clone(),
        listens: false,
        num_queues: 0,
        queue_size: 0,
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
    /// Plugs the file systems of a machine.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_fs(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        for fs in config.fs.iter().flatten() {
            let made = make_fs(fs, context.ram)?;
            self.plug_vhost_user(made, context, Place::new(fs.pci_segment, fs.pci_device_id))?;
        }
        Ok(())
    }

    /// Plugs the devices of any type.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_generic(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        for device in config.generic_vhost_user.iter().flatten() {
            let made = make_generic(device, context.ram)?;
            let place = Place::new(device.pci_segment, device.pci_device_id);
            self.plug_vhost_user(made, context, place)?;
        }
        Ok(())
    }

    /// Plugs a device whose back end is connected.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_vhost_user(
        &mut self,
        device: VhostUser,
        context: &PciContext<'_>,
        place: Place,
    ) -> Result<Bdf, VirtioError> {
        let (id, counters, handle) = (device.id().to_owned(), device.counters(), device.handle());
        let bdf = self.plug(context, &id, Box::new(device), place)?;
        self.counters.push((id, counters));
        self.vhost_users.push(handle);
        Ok(bdf)
    }

    /// Refuses to migrate or save a machine if a back end is lost, or keeps its state.
    ///
    /// # Errors
    /// Names the devices.
    pub(super) fn check_back_ends(&self) -> Result<(), NotMovable> {
        let stay =
            quoted(self.vhost_users.iter().filter(|it| !it.has_state()).map(VhostUserHandle::id));
        if !stay.is_empty() {
            return Err(NotMovable::State(stay));
        }
        refuse_lost(self.vhost_users.iter().filter(|it| it.is_lost()).map(VhostUserHandle::id))
    }

    /// Has back ends give their states, for their devices to be saved.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn fetch_states(&self) -> Result<(), StateNotGiven> {
        self.vhost_users.iter().try_for_each(|device| {
            let id = device.id().to_owned();
            device.fetch_state().map_err(|source| StateNotGiven { id, source })
        })
    }

    /// Starts to log what back ends write to guest memory; ends when the logs are dropped.
    pub(super) fn watch_back_ends(&self, ram: &GuestRam) -> Vec<WriteLog> {
        self.vhost_users.iter().map(|device| device.watch_writes(ram)).collect()
    }

    /// Whether another process serves a device.
    pub(super) fn has_vhost_users(&self) -> bool {
        !self.vhost_users.is_empty()
    }

    /// Adds a vhost-user device to the machine; its back end is connected.
    ///
    /// # Errors
    /// Names the device; nothing has changed then.
    pub fn add_vhost_user(
        &mut self,
        made: VhostUser,
        place: Place,
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let bdf = self.plug_vhost_user(made, context, place)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }
}
