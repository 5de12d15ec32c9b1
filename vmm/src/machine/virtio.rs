// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of virtio devices onto the PCI bus.
//!
//! Owns the devices in the order in which they were plugged, which is the order of their
//! addresses, and the handles by which a running VM reaches them: locks, taps, counters.

use std::collections::BTreeMap;
use std::sync::Arc;

use devices::virtio::balloon::{BalloonError, BalloonHandle};
use devices::virtio::block::{Block, DiskLock, DiskResizer, FullDisk};
use devices::virtio::console::{Console, ConsoleConfig, ConsoleResizer};
use devices::virtio::iommu::{Iommu, IommuHandle};
use devices::virtio::mem::{MemError, MemHandle};
use devices::virtio::net::Net;
use devices::virtio::rng::{Rng, RngConfig, RngError};
use devices::virtio::rtc::{Rtc, RtcConfig};
use devices::virtio::vdpa::VdpaEnd;
use devices::virtio::vhost_user::VhostUserHandle;
use devices::virtio::vsock::{Vsock, VsockSocket};
use devices::virtio::watchdog::{Watchdog, WatchdogConfig, WatchdogHandle};
use devices::virtio::{ActivationThread, Counters};
use hypervisor::Vm;
use memory::GuestRam;
use pci::{Bdf, BdfError, PciDevice as _, VirtioPciDevice, VirtioPciError};
use thiserror::Error;

use super::balloons;
use super::consoles::Consoles;
use super::disks::{self, DiskWiringError};
use super::events::{EventSink, GuestEvent, Power};
use super::exclusive::{self, ExclusiveError, LockedImages};
use super::iommus;
use super::limits::RateGroups;
use super::mems::{self, Wired};
use super::nets::{self, NetHandle, NetWiringError};
use super::passthrough::DiscardingDevices;
use super::place::{Place, TakenNumbers};
use super::pmems::{self, PmemRange, PmemWiringError};
use super::segments::{PlaceError, Segments};
use super::user_devices::UserDeviceError;
use super::vdpas::VdpaWiringError;
use super::vhost_users::{self, VhostUserWiringError};
use super::vsocks::{self, VsockHandle};
use crate::config::vm::{IOMMU_ID, WATCHDOG_ID};
use crate::config::{DiskConfig, NetConfig, VmConfig, VsockConfig};

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
    balloon: Option<BalloonHandle>,
    watchdog: Option<WatchdogHandle>,
    console: Option<ConsoleResizer>,
    mems: Vec<(String, MemHandle)>,
    /// Addresses of persistent memory; its locks are among those of the disks.
    pub(super) pmems: Vec<(String, PmemRange)>,
    pub(super) counters: Vec<(String, Arc<dyn Counters>)>,
    /// Devices with reserved numbers, whose BARs are placed after those of passed-through devices.
    pub(super) unplaced: Vec<(Bdf, Arc<VirtioPciDevice>)>,
    taken: TakenNumbers,
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
        let mut taken = TakenNumbers::reserve(config, context.segments)?;
        let pmems = pmems::make(config, context, images)?;
        let iommu = iommus::make(config)?;
        devices.iommu = iommu.as_ref().map(Iommu::handle);
        if let Some(endpoint) = &consoles.virtio {
            let id = config.console.id.clone().unwrap_or_default();
            let console =
                Console::new(ConsoleConfig { id: id.clone(), endpoint: Arc::clone(endpoint) });
            devices.console = Some(console.resizer());
            let place = Place::new(config.console.pci_segment, config.console.pci_device_id)
                .behind_iommu(config.console.iommu);
            devices.plug(context, &id, Box::new(console), place)?;
        }
        for disk in config.disks.iter().flatten() {
            let place = Place::of_boot_disk(config, disk.pci_segment, disk.pci_device_id)
                .behind_iommu(disk.iommu);
            if disk.vhost_user {
                let made = vhost_users::make_disk(disk, context.ram)?;
                devices.plug_vhost_user(made, context, place)?;
            } else {
                let made = disks::make(disk, images, &devices.rate_groups)?;
                devices.plug_disk(disk, made, context, place)?;
            }
        }
        for net in config.net.iter().flatten() {
            if net.vhost_user {
                let made = vhost_users::make_net(net, context.ram)?;
                let place = Place::new(net.pci_segment, net.pci_device_id);
                devices.plug_vhost_user(made, context, place)?;
            } else {
                devices.plug_net(net, nets::make(net)?, context)?;
            }
        }
        devices.plug_served(config, context)?;
        // Before the balloon, which offers less while nothing is discarded.
        devices.plug_vdpas(config, context)?;
        let id = config.rng.id.clone().unwrap_or_default();
        let rng = Rng::new(RngConfig { id: id.clone(), source: config.rng.src.clone() })?;
        let place = Place::new(config.rng.pci_segment, config.rng.pci_device_id)
            .behind_iommu(config.rng.iommu);
        devices.plug(context, &id, Box::new(rng), place)?;
        if let Some(rtc) = &config.rtc {
            let id = rtc.id.clone().unwrap_or_default();
            let device = Rtc::new(RtcConfig { id: id.clone() });
            let place = Place::new(rtc.pci_segment, rtc.pci_device_id).behind_iommu(rtc.iommu);
            devices.plug(context, &id, Box::new(device), place)?;
        }
        for pmem in pmems {
            devices.plug_pmem(pmem, context)?;
        }
        if let Some(vsock) = &config.vsock {
            devices.plug_vsock(vsock, vsocks::make(vsock), context)?;
        }
        // Before the balloon, here and after a restore: they determine its maximum size.
        for Wired { id, device, handle } in mems::make(config, context.ram)? {
            devices.mems.push((id.clone(), handle));
            let place = Place::new(0, taken.take_highest());
            devices.plug(context, &id, Box::new(device), place)?;
        }
        if config.watchdog {
            let power = Arc::clone(power);
            let expired = Arc::new(move || power.signal(GuestEvent::WatchdogExpired));
            let watchdog = Watchdog::new(WatchdogConfig::new(WATCHDOG_ID.to_owned(), expired));
            devices.watchdog = Some(watchdog.handle());
            let place = Place::new(0, taken.take_highest());
            devices.plug(context, WATCHDOG_ID, Box::new(watchdog), place)?;
        }
        if let Some(iommu) = iommu {
            let place = Place::new(0, taken.take_highest());
            devices.plug(context, IOMMU_ID, Box::new(iommu), place)?;
        }
        if let Some(balloon) = &config.balloon {
            let id = balloon.id.clone().unwrap_or_default();
            let device = balloons::make(balloon, context.ram, devices.coming_bytes())?;
            for (_, mem) in &devices.mems {
                let handle = device.handle();
                mem.on_growth(Arc::new(move || handle.memory_has_grown()));
            }
            devices.balloon = Some(device.handle());
            devices.counters.push((id.clone(), device.counters()));
            let place = Place::new(balloon.pci_segment, balloon.pci_device_id);
            devices.plug(context, &id, Box::new(device), place)?;
        }
        devices.taken = taken;
        Ok(devices)
    }

    fn plug_disk(
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

    fn plug_net(
        &mut self,
        net: &NetConfig,
        (device, handle): (Net, NetHandle),
        context: &PciContext<'_>,
    ) -> Result<Bdf, VirtioError> {
        let id = net.id.clone().unwrap_or_default();
        let place = Place::new(net.pci_segment, net.pci_device_id).behind_iommu(net.iommu);
        let bdf = self.plug(context, &id, Box::new(device), place)?;
        self.counters.push((id.clone(), handle.counters()));
        self.nets.push((id, handle));
        Ok(bdf)
    }

    fn plug_vsock(
        &mut self,
        vsock: &VsockConfig,
        (device, handle): (Vsock, VsockHandle),
        context: &PciContext<'_>,
    ) -> Result<Bdf, VirtioError> {
        let id = vsock.id.clone().unwrap_or_default();
        let place = Place::new(vsock.pci_segment, vsock.pci_device_id).behind_iommu(vsock.iommu);
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

    /// Device numbers that options request in segment 0, and those that are counted down from the highest.
    pub fn taken_numbers(&self) -> &TakenNumbers {
        &self.taken
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
    fn coming_bytes(&self) -> u64 {
        let missing = |(_, mem): &(String, MemHandle)| {
            mem.requested_bytes().saturating_sub(mem.plugged_bytes())
        };
        self.mems.iter().map(missing).fold(0, u64::saturating_add)
    }

    /// The virtio-mem devices by id.
    pub fn mems(&self) -> &[(String, MemHandle)] {
        &self.mems
    }

    /// Counters by device and name.
    pub fn counters(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let count = |counters: &Arc<dyn Counters>| {
            counters.counters().into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        };
        self.counters.iter().map(|(id, counters)| (id.clone(), count(counters))).collect()
    }
}
