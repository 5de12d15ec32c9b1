// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opening the backend of a device that is hot-plugged.
//!
//! Owns a thread that does not hold the machine: a path may take forever to open, and a cancelled addition
//! must not block the machine any longer. What such a thread opens after that is closed again. Passed-through devices
//! are opened with the memory that they are to reach, by [`super::passthrough`].

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};

use devices::virtio::block::{Block, DiskLock};
use devices::virtio::net::Net;
use devices::virtio::pmem::PmemFile;
use devices::virtio::vdpa::Vdpa;
use devices::virtio::vhost_user::VhostUser;
use devices::virtio::vsock::Vsock;
use memory::GuestRam;
use vfio::user::UserFunction;

use super::exclusive::ExclusiveError;
use super::limits::RateGroups;
use super::nets::{self, NetHandle};
use super::pausing::{CancelToken, POLL_INTERVAL};
use super::place::Place;
use super::pmems;
use super::user_devices;
use super::vdpas;
use super::vhost_users;
use super::virtio::{HotAddError, VirtioError};
use super::vsocks::{self, VsockHandle};
use super::{LockedImages, MachineError, disks};
use crate::config::{
    DeviceConfig, DiskConfig, NetConfig, NewDevice, PmemConfig, UserDeviceConfig, VdpaConfig,
    VmConfig, VsockConfig,
};

/// A device that can be plugged into a machine.
pub enum Opened {
    /// A passed-through device, to be opened later.
    Host(DeviceConfig),
    /// A disk, whose image is open and locked.
    Disk(DiskConfig, (Block, DiskLock)),
    /// A network device, whose tap is open.
    Net(NetConfig, (Net, NetHandle)),
    /// A device whose back end is connected, and where it is to be.
    VhostUser(Box<VhostUser>, Place),
    /// Persistent memory, whose file is open and locked.
    Pmem(PmemConfig, PmemFile),
    /// A device that another process emulates, which is connected.
    User(UserDeviceConfig, Box<UserFunction>),
    /// A vDPA device, which is open.
    Vdpa(VdpaConfig, Box<Vdpa>),
    /// A vsock device, whose socket listens.
    Vsock(VsockConfig, (Vsock, VsockHandle)),
}

/// Opens the backing of a device for a machine with `ram` and the groups `groups`. `config` is the machine's configuration including the device; it is
/// returned with what was detected.
///
/// # Errors
/// Names the device, or [`MachineError::AddWithdrawn`] when the addition is cancelled; whatever was opened
/// is closed.
pub fn open(
    device: &NewDevice,
    config: VmConfig,
    ram: &Arc<GuestRam>,
    groups: &RateGroups,
    cancel: &CancelToken,
) -> Result<(Opened, VmConfig), MachineError> {
    let (id, device, ram) = (device.id().to_owned(), device.clone(), Arc::clone(ram));
    let groups = groups.clone();
    let token = cancel.clone();
    let open = move || open_now(device, config, &ram, &groups, &token);
    match run_unless_cancelled(open, cancel) {
        Ok(Some(result)) => result.map_err(MachineError::HotAdd),
        Ok(None) => Err(MachineError::AddWithdrawn { id }),
        Err(source) => Err(MachineError::OpenThread { id, source }),
    }
}

/// Runs `open` on a thread and waits for it until cancelled; what the thread opens after that is closed
/// again.
///
/// # Errors
/// The thread cannot be started.
pub fn run_unless_cancelled<T: Send + 'static>(
    open: impl FnOnce() -> T + Send + 'static,
    cancel: &CancelToken,
) -> io::Result<Option<T>> {
    let (opened, is_open) = channel();
    // Without a receiver the result is dropped.
    stoppable_thread::spawn("open-device", move || drop(opened.send(open())))?;
    loop {
        match is_open.recv_timeout(POLL_INTERVAL) {
            Ok(result) if !cancel.is_cancelled() => return Ok(Some(result)),
            Err(RecvTimeoutError::Timeout) if !cancel.is_cancelled() => {}
            _ => return Ok(None),
        }
    }
}

fn open_now(
    device: NewDevice,
    mut config: VmConfig,
    ram: &Arc<GuestRam>,
    groups: &RateGroups,
    cancel: &CancelToken,
) -> Result<(Opened, VmConfig), HotAddError> {
    let opened = match device {
        NewDevice::Host(device) => Opened::Host(device),
        NewDevice::Disk(disk) if disk.vhost_user => {
            let made = vhost_users::make_disk(&disk, ram).map_err(VirtioError::from)?;
            Opened::VhostUser(Box::new(made), Place::new(disk.pci_segment, disk.pci_device_id))
        }
        NewDevice::Disk(disk) => {
            disks::detect_formats(&mut config).map_err(VirtioError::from)?;
            let limits = config.machine_platform().offers.disk_limits;
            let made = disks::make(&disk, limits, &mut LockedImages::default(), groups)
                .map_err(VirtioError::from)?;
            let id = || disk.id.clone().unwrap_or_default();
            made.1.lock().map_err(|source| ExclusiveError::Disk { id: id(), source })?;
            made.1.load().map_err(|source| ExclusiveError::Load { id: id(), source })?;
            Opened::Disk(disk, made)
        }
        NewDevice::Net(net) if net.vhost_user => {
            let made = vhost_users::make_net(&net, ram).map_err(VirtioError::from)?;
            Opened::VhostUser(Box::new(made), Place::new(net.pci_segment, net.pci_device_id))
        }
        NewDevice::Net(net) => {
            let made = nets::make(&net).map_err(VirtioError::from)?;
            let id = || net.id.clone().unwrap_or_default();
            made.1.attach().map_err(|source| ExclusiveError::Tap { id: id(), source })?;
            Opened::Net(net, made)
        }
        NewDevice::Fs(fs) => {
            let made = vhost_users::make_fs(&fs, ram).map_err(VirtioError::from)?;
            Opened::VhostUser(Box::new(made), Place::new(fs.pci_segment, fs.pci_device_id))
        }
        NewDevice::GenericVhostUser(device) => {
            let made = vhost_users::make_generic(&device, ram).map_err(VirtioError::from)?;
            Opened::VhostUser(Box::new(made), Place::new(device.pci_segment, device.pci_device_id))
        }
        NewDevice::Pmem(pmem) => {
            let file = pmems::open(&pmem, &mut LockedImages::default());
            let file = file.map_err(VirtioError::from)?;
            let id = || pmem.id.clone().unwrap_or_default();
            file.lock().lock().map_err(|source| ExclusiveError::Disk { id: id(), source })?;
            Opened::Pmem(pmem, file)
        }
        NewDevice::User(device) => {
            let made = user_devices::make(&device, ram, cancel)?;
            Opened::User(device, Box::new(made))
        }
        NewDevice::Vdpa(vdpa) => {
            let made = vdpas::make(&vdpa, ram).map_err(VirtioError::from)?;
            Opened::Vdpa(vdpa, Box::new(made))
        }
        NewDevice::Vsock(vsock) => {
            let made = vsocks::make(&vsock);
            let id = || vsock.id.clone().unwrap_or_default();
            let attached = made.1.socket.attach();
            attached.map_err(|source| ExclusiveError::Socket { id: id(), source })?;
            Opened::Vsock(vsock, made)
        }
    };
    Ok((opened, config))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn what_is_open_after_it_was_cancelled_is_closed_again() {
        let cancel = CancelToken::default();
        let ((begun, has_begun), (go_on, hold)) = (channel(), channel::<()>());
        // Dropped together with what was opened.
        let (open, is_closed) = channel::<()>();
        let asked = cancel.clone();
        let waits = std::thread::spawn(move || {
            let open = move || {
                let _ = begun.send(());
                let _ = hold.recv();
                open
            };
            run_unless_cancelled(open, &asked).unwrap().is_none()
        });
        has_begun.recv_timeout(PATIENCE).unwrap();
        cancel.cancel();
        assert!(waits.join().unwrap(), "it came although it still hangs");
        drop(go_on);
        assert_eq!(is_closed.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn what_is_open_in_time_is_there() {
        assert_eq!(run_unless_cancelled(|| 7, &CancelToken::default()).unwrap(), Some(7));
    }
}
