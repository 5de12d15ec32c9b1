// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opening what is behind a device that is added to a machine.
//!
//! Owns a thread that the machine is not on: a path may take for ever to open, and a device that is given up
//! keeps the machine no longer. What such a thread opens after that is closed again. Passed-through devices
//! are opened with the machine, in [`super::passthrough`].

use std::sync::mpsc::{RecvTimeoutError, channel};

use devices::virtio::block::{Block, DiskLock};
use devices::virtio::net::Net;

use super::exclusive::ExclusiveError;
use super::nets::{self, NetHandle};
use super::pausing::{CancelToken, POLL_INTERVAL};
use super::virtio::{HotAddError, VirtioError};
use super::{LockedImages, MachineError, disks};
use crate::config::{DeviceConfig, DiskConfig, NetConfig, NewDevice, VmConfig};

/// A device that can be plugged into a machine.
pub enum Opened {
    /// A passed-through device, which is not open yet.
    Host(DeviceConfig),
    /// A disk, whose image is open and locked.
    Disk(DiskConfig, (Block, DiskLock)),
    /// A network device, whose tap is open.
    Net(NetConfig, (Net, NetHandle)),
}

/// Opens what is behind a device; `config` is the machine's with it, and comes back with what was found out.
///
/// # Errors
/// Naming the device, or [`MachineError::AddWithdrawn`] when it is given up; what was opened is closed.
pub fn open(
    device: &NewDevice,
    config: VmConfig,
    cancel: &CancelToken,
) -> Result<(Opened, VmConfig), MachineError> {
    let (id, device) = (device.id().to_owned(), device.clone());
    let (opened, is_open) = channel();
    std::thread::Builder::new()
        .name("open-device".to_owned())
        // Without a receiver what was opened is dropped.
        .spawn(move || drop(opened.send(open_now(device, config))))
        .map_err(|source| MachineError::OpenThread { id: id.clone(), source })?;
    loop {
        match is_open.recv_timeout(POLL_INTERVAL) {
            Ok(result) if !cancel.is_cancelled() => return result.map_err(MachineError::HotAdd),
            Err(RecvTimeoutError::Timeout) if !cancel.is_cancelled() => {}
            _ => return Err(MachineError::AddWithdrawn { id }),
        }
    }
}

fn open_now(device: NewDevice, mut config: VmConfig) -> Result<(Opened, VmConfig), HotAddError> {
    let opened = match device {
        NewDevice::Host(device) => Opened::Host(device),
        NewDevice::Disk(disk) => {
            disks::settle_formats(&mut config).map_err(VirtioError::from)?;
            let made =
                disks::make(&disk, &mut LockedImages::default()).map_err(VirtioError::from)?;
            let id = || disk.id.clone().unwrap_or_default();
            made.1.lock().map_err(|source| ExclusiveError::Disk { id: id(), source })?;
            Opened::Disk(disk, made)
        }
        NewDevice::Net(net) => {
            let made = nets::make(&net).map_err(VirtioError::from)?;
            let id = || net.id.clone().unwrap_or_default();
            made.1.attach().map_err(|source| ExclusiveError::Tap { id: id(), source })?;
            Opened::Net(net, made)
        }
    };
    Ok((opened, config))
}
