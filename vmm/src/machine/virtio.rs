// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of virtio devices onto the PCI bus.
//!
//! Owns the devices in the order in which they were plugged, which is the order of their
//! addresses, and the handles by which a running VM reaches them: locks, taps, counters.

use std::collections::BTreeMap;
use std::sync::Arc;

use devices::virtio::balloon::{BalloonError, BalloonHandle};
use devices::virtio::block::{Block, DiskLock, DiskResizer, FullDisk};
use devices::virtio::console::ConsoleResizer;
use devices::virtio::iommu::{Iommu, IommuHandle};
use devices::virtio::mem::{MemError, MemHandle};
use devices::virtio::net::Net;
use devices::virtio::rng::RngError;
use devices::virtio::vdpa::VdpaEnd;
use devices::virtio::vhost_user::VhostUserHandle;
use devices::virtio::vsock::{Vsock, VsockSocket};
use devices::virtio::watchdog::WatchdogHandle;
use devices::virtio::{ActivationThread, Counters, Offering};
use hypervisor::Vm;
use memory::GuestRam;
use pci::{Bdf, BdfError, PciDevice as _, VirtioPciDevice, VirtioPciError};
use thiserror::Error;

use super::boot_devices::Early;
use super::consoles::Consoles;
use super::disks::DiskWiringError;
use super::events::{EventSink, GuestEvent, Power};
use super::exclusive::{self, ExclusiveError, LockedImages};
use super::iommus;
use super::limits::RateGroups;
use super::nets::{NetHandle, NetWiringError};
use super::passthrough::DiscardingDevices;
use super::place::{Place, TakenNumbers};
use super::pmems::{self, PmemRange, PmemWiringError};
use super::segments::{PlaceError, Segments};
use super::user_devices::UserDeviceError;
use super::vdpas::VdpaWiringError;
use super::vhost_users::VhostUserWiringError;
use super::vsocks::VsockHandle;
use crate::config::{DiskConfig, NetConfig, VmConfig, VsockConfig};
use crate::platform::Platform;

/// Why a virtio device cannot be created.
#[derive(Debug, Error)]
pub enum VirtioError {
    /// A disk cannot be created.
    #[error(transparent)]
    Disk(#[from] DiskWiringError),
    /// A network device cannot be created.
    #[error(transparent)]
    Net(#[from] NetWiringError),
    /// A vhost-user device cannot be created.
    #[error(transparent)]
    VhostUser(#[from] VhostUserWiringError),
    /// A vDPA device cannot be created.
    #[error(transparent)]
    Vdpa(#[from] VdpaWiringError),
    /// Persistent memory cannot be created.
    #[error(transparent)]
    Pmem(#[from] PmemWiringError),
    /// The entropy device cannot be created.
    #[error("cannot make the entropy device")]
    Rng(#[from] RngError),
    /// The balloon cannot be created.
    #[error("cannot make the balloon")]
    Balloon(#[from] BalloonError),
    /// A virtio-mem device cannot be created.
    #[error("cannot make a memory device")]
    Mem(#[from] MemError),
    /// The IOMMU cannot be created.
    #[error("cannot make the virtual IOMMU; raise the limit of open files")]
    Iommu(#[source] std::io::Error),
    /// The requested device number is not available.
    #[error("cannot use the pci_device_id of '{id}'")]
    Number {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: BdfError,
    },
    /// The configuration space of the panic device cannot be built.
    #[error("cannot lay out '{id}'")]
    Layout {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: pci::ConfigError,
    },
    /// The PCI transport cannot be created.
    #[error("cannot put '{id}' on the PCI bus")]
    Transport {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: VirtioPciError,
    },
    /// The device cannot be placed on the PCI bus.
    #[error("cannot give '{id}' a place on the PCI bus")]
    Bus {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: PlaceError,
    },
}

/// Why a device cannot be added to a running machine.
#[derive(Debug, Error)]
pub enum HotAddError {
    /// The device cannot be created.
    #[error(transparent)]
    Device(#[from] VirtioError),
    /// The process that emulates it is of no use.
    #[error(transparent)]
    User(#[from] UserDeviceError),
    /// Its image, tap or socket cannot be taken.
    #[error(transparent)]
    Exclusive(#[from] ExclusiveError),
}

/// The virtio devices of a machine.
#[derive(Default)]
pub struct VirtioDevices {
    pub(super) functions: Vec<(Bdf, Arc<VirtioPciDevice>)>,
    pub(super) locks: Vec<(String, DiskLock)>,
    pub(super) resizers: Vec<(String, DiskResizer)>,
    /// Disks with on_full=pause, which keep requests that wait for free space.
    pub(super) full_disks: Vec<(String, FullDisk)>,
    pub(super) nets: Vec<(String, NetHandle)>,
    pub(super) sockets: Vec<(String, Arc<VsockSocket>)>,
    /// The devices that other processes serve.
    pub(super) vhost_users: Vec<VhostUserHandle>,
    /// The vDPA devices.
    pub(super) vdpas: Vec<(String, VdpaEnd)>,
    pub(super) iommu: Option<IommuHandle>,
    pub(super) balloon: Option<BalloonHandle>,
    pub(super) watchdog: Option<WatchdogHandle>,
    pub(super) console: Option<ConsoleResizer>,
    pub(super) mems: Vec<(String, MemHandle)>,
    /// Addresses of persistent memory; its locks are among those of the disks.
    pub(super) pmems: Vec<(String, PmemRange)>,
    pub(super) counters: Vec<(String, Arc<dyn Counters>)>,
    /// Devices with reserved numbers, whose BARs are placed after those of passed-through devices.
    pub(super) unplaced: Vec<(Bdf, Arc<VirtioPciDevice>)>,
    pub(super) taken: TakenNumbers,
    /// Limits that disks share.
    pub(super) rate_groups: RateGroups,
    /// Receives the events of full disks.
    sink: Option<EventSink>,
}

/// What a PCI device is created with.
pub struct PciContext<'a> {
    /// The PCI segments.
    pub segments: &'a Segments,
    /// The VM, for interrupts and ioeventfds.
    pub vm: &'a Vm,
    /// Guest memory.
    pub ram: &'a Arc<GuestRam>,
    /// The thread on which virtio devices are activated.
    pub activation: &'a Arc<ActivationThread>,
    /// The platform.
    pub platform: &'static Platform,
}

impl VirtioDevices {
    /// Creates all configured devices. Disks take the images in `images` that fit, with their locks; other
    /// locks and taps are taken later. Guest events go to `sink`.
    ///
    /// # Errors
    /// Names the device.
    pub fn wire(
        config: &VmConfig,
        consoles: &Consoles,
        context: &PciContext<'_>,
        images: &mut LockedImages,
        sink: EventSink,
        power: &Arc<Power>,
    ) -> Result<Self, VirtioError> {
        let rate_groups = RateGroups::new(config);
        let mut devices = Self { sink: Some(sink), rate_groups, ..Self::default() };
        devices.taken = TakenNumbers::reserve(config, context.segments)?;
        let pmems = pmems::make(config, context, images)?;
        let iommu = iommus::make(config)?;
        devices.iommu = iommu.as_ref().map(Iommu::handle);
        let mut early = Early { consoles, images, power, pmems, iommu };
        for kind in context.platform.numbers.order {
            devices.plug_kind(*kind, config, context, &mut early)?;
        }
        Ok(devices)
    }

    pub(super) fn plug_disk(
        &mut self,
        disk: &DiskConfig,
        (block, lock): (Block, DiskLock),
        context: &PciContext<'_>,
        place: Place,
    ) -> Result<Bdf, VirtioError> {
        let id = disk.id.clone().unwrap_or_default();
        let counters = block.counters();
        let full_disk = block.full_disk();
        let resizer = block.resizer();
        let block = Offering::of(Box::new(block), context.platform.offers.disk);
        let bdf = self.plug(context, &id, Box::new(block), place)?;
        self.locks.push((id.clone(), lock));
        self.resizers.push((id.clone(), resizer));
        if let Some(full_disk) = full_disk {
            if let Some(sink) = self.sink.clone() {
                let id = id.clone();
                full_disk.on_full(move || sink(GuestEvent::DiskFull { id: id.clone() }));
            }
            self.full_disks.push((id.clone(), full_disk));
        }
        self.counters.push((id, counters));
        Ok(bdf)
    }

    pub(super) fn plug_net(
        &mut self,
        net: &NetConfig,
        (device, handle): (Net, NetHandle),
        context: &PciContext<'_>,
    ) -> Result<Bdf, VirtioError> {
        let id = net.id.clone().unwrap_or_default();
        let place = Place::new(net.pci_segment, net.pci_device_id).behind_iommu(net.iommu);
        let device = Offering::of(Box::new(device), context.platform.offers.net);
        let bdf = self.plug(context, &id, Box::new(device), place)?;
        self.counters.push((id.clone(), handle.counters()));
        self.nets.push((id, handle));
        Ok(bdf)
    }

    pub(super) fn plug_vsock(
        &mut self,
        vsock: &VsockConfig,
        (device, handle): (Vsock, VsockHandle),
        context: &PciContext<'_>,
    ) -> Result<Bdf, VirtioError> {
        let id = vsock.id.clone().unwrap_or_default();
        let place = Place::new(vsock.pci_segment, vsock.pci_device_id).behind_iommu(vsock.iommu);
        let device = Offering::of(Box::new(device), context.platform.offers.vsock);
        let bdf = self.plug(context, &id, Box::new(device), place)?;
        self.counters.push((id.clone(), handle.counters));
        self.sockets.push((id, handle.socket));
        Ok(bdf)
    }

    /// Unplugs the device at `bdf`, writes its image back, and releases its lock or tap. Returns its id;
    /// `None` if it is not hot-pluggable.
    pub fn remove(&mut self, bdf: Bdf, segments: &Segments) -> Option<String> {
        let at = self.functions.iter().position(|(at, _)| *at == bdf)?;
        let id = self.functions.get(at)?.1.id().to_owned();
        let lock = self.locks.iter().position(|(other, _)| *other == id);
        let net = self.nets.iter().position(|(other, _)| *other == id);
        let socket = self.sockets.iter().position(|(other, _)| *other == id);
        let vhost_user = self.vhost_users.iter().position(|other| other.id() == id);
        let vdpa = self.vdpas.iter().position(|(other, _)| *other == id);
        if [lock, net, socket, vhost_user, vdpa].iter().all(Option::is_none) {
            return None;
        }
        let (_, function) = self.functions.remove(at);
        segments.remove_device(bdf);
        // Ends its threads, so that none writes to the image or takes frames any more.
        function.reset();
        if let Some(iommu) = &self.iommu {
            iommu.remove(iommus::number(bdf));
        }
        self.counters.retain(|(other, _)| *other != id);
        self.full_disks.retain(|(other, _)| *other != id);
        self.resizers.retain(|(other, _)| *other != id);
        // The guest has no access to the memory from here on.
        self.pmems.retain(|(other, _)| *other != id);
        if let Some((id, lock)) = lock.map(|at| self.locks.remove(at)) {
            exclusive::write_back_and_unlock(&id, &lock);
        }
        if let Some(at) = vhost_user {
            self.vhost_users.remove(at);
        }
        if let Some(at) = vdpa {
            self.vdpas.remove(at);
        }
        if let Some((_, net)) = net.map(|at| self.nets.remove(at)) {
            net.detach();
        }
        if let Some((_, socket)) = socket.map(|at| self.sockets.remove(at)) {
            socket.detach();
        }
        Some(id)
    }

    /// Informs the guest of the current size of its terminal.
    pub fn follow_terminal(&self) {
        if let Some(console) = &self.console {
            console.follow_terminal();
        }
    }

    /// Has all network devices announce the guest on the network.
    pub fn announce(&self) {
        for (_, net) in &self.nets {
            net.announce();
        }
        for device in &self.vhost_users {
            device.announce();
        }
    }

    /// Pauses all devices, so that none accesses guest memory.
    pub fn pause(&self) {
        self.functions.iter().for_each(|(_, function)| function.pause());
    }

    /// Resumes all devices.
    pub fn resume(&self) {
        self.functions.iter().for_each(|(_, function)| function.resume());
    }

    /// Adds a disk to the machine; its image is locked.
    ///
    /// # Errors
    /// Names the disk; nothing has changed then. Its lock ends with the open file.
    pub fn add_disk(
        &mut self,
        disk: &DiskConfig,
        made: (Block, DiskLock),
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let place = Place::new(disk.pci_segment, disk.pci_device_id).behind_iommu(disk.iommu);
        let bdf = self.plug_disk(disk, made, context, place)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }

    /// Adds a network device to the machine; its tap is open.
    ///
    /// # Errors
    /// Names the device; nothing has changed then.
    pub fn add_net(
        &mut self,
        net: &NetConfig,
        made: (Net, NetHandle),
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let bdf = self.plug_net(net, made, context)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }

    /// Adds a vsock device to the machine; its socket listens.
    ///
    /// # Errors
    /// Names the device; nothing has changed then.
    pub fn add_vsock(
        &mut self,
        vsock: &VsockConfig,
        made: (Vsock, VsockHandle),
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let bdf = self.plug_vsock(vsock, made, context)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }

    /// Pauses the newest device, if the machine is paused.
    pub(super) fn pause_if_machine_is(&self, is_paused: bool) {
        if is_paused && let Some((_, function)) = self.functions.last() {
            function.pause();
        }
    }

    /// Device numbers that options request in segment 0, and those of devices for which no option names one.
    pub fn taken_numbers(&self) -> &TakenNumbers {
        &self.taken
    }

    /// The same, to take another.
    pub fn taken_mut(&mut self) -> &mut TakenNumbers {
        &mut self.taken
    }

    /// The function with this id.
    pub(super) fn function_of(&self, id: &str) -> Option<Arc<VirtioPciDevice>> {
        let mut functions = self.functions.iter();
        functions
            .find(|(_, function)| function.id() == id)
            .map(|(_, function)| Arc::clone(function))
    }

    /// The functions with their addresses.
    pub fn functions(&self) -> &[(Bdf, Arc<VirtioPciDevice>)] {
        &self.functions
    }

    /// The handle of the watchdog, if there is one.
    pub fn watchdog(&self) -> Option<&WatchdogHandle> {
        self.watchdog.as_ref()
    }

    /// The balloon, if there is one.
    pub fn balloon(&self) -> Option<&BalloonHandle> {
        self.balloon.as_ref()
    }

    /// The devices that discard and populate guest memory.
    pub fn discarding_devices(&self) -> DiscardingDevices {
        let mems = self.mems.iter().map(|(_, device)| device.clone()).collect();
        DiscardingDevices { balloon: self.balloon.clone(), mems }
    }

    /// Bytes that the virtio-mem devices are still to plug.
    pub(super) fn coming_bytes(&self) -> u64 {
        let missing = |(_, mem): &(String, MemHandle)| {
            mem.requested_bytes().saturating_sub(mem.plugged_bytes())
        };
        self.mems.iter().map(missing).fold(0, u64::saturating_add)
    }

    /// The virtio-mem devices by id.
    pub fn mems(&self) -> &[(String, MemHandle)] {
        &self.mems
    }

    /// The devices' counters, which outlive them.
    pub fn counter_handles(&self) -> Vec<(String, Arc<dyn Counters>)> {
        self.counters.clone()
    }

    /// Counters by device and name.
    pub fn counters(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let count = |counters: &Arc<dyn Counters>| {
            counters.counters().into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        };
        self.counters.iter().map(|(id, counters)| (id.clone(), count(counters))).collect()
    }
}
