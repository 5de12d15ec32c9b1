// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of virtio devices onto the PCI bus.
//!
//! Owns the devices in the order in which they were plugged, which is the order of their
//! addresses, and the handles by which a running VM reaches them: locks, taps, counters.
//!
//! Disks of a VM that boots have 32-bit BARs, as cloud-hypervisor's have (`device_manager.rs` of v53):
//! firmware drives them, and it has page tables for the first 4 GiB. All else has 64-bit ones, a disk
//! that is added later, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use devices::virtio::balloon::{BalloonError, BalloonHandle};
use devices::virtio::block::{Block, DiskLock, DiskResizer, FullDisk};
use devices::virtio::console::{Console, ConsoleConfig, ConsoleResizer};
use devices::virtio::mem::{MemError, MemHandle};
use devices::virtio::net::Net;
use devices::virtio::rng::{Rng, RngConfig, RngError};
use devices::virtio::vsock::{Vsock, VsockSocket};
use devices::virtio::watchdog::{Watchdog, WatchdogConfig, WatchdogHandle};
use devices::virtio::{Activated, ActivationThread, Counters, VirtioDevice};
use hypervisor::Vm;
use hypervisor::irq::IoEvents;
use memory::GuestRam;
use pci::{
    BarWidth, Bdf, BdfError, DEVICES_PER_BUS_COUNT, DeviceNumber, PciDevice, PciError, PciSegment,
    VirtioPciDevice, VirtioPciError,
};
use thiserror::Error;

use super::balloons;
use super::consoles::Consoles;
use super::disks::{self, DiskWiringError};
use super::events::{EventSink, GuestEvent, Power};
use super::exclusive::{self, ExclusiveError, LockedImages};
use super::limits::RateGroups;
use super::mems::{self, Wired};
use super::nets::{self, NetHandle, NetWiringError};
use super::passthrough::DiscardingDevices;
use super::vhost_users::{self, VhostUserWiringError};
use super::vsocks::{self, VsockHandle};
use crate::config::vm::WATCHDOG_ID;
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
    /// The entropy device cannot be created.
    #[error("cannot make the entropy device")]
    Rng(#[from] RngError),
    /// The balloon cannot be created.
    #[error("cannot make the balloon")]
    Balloon(#[from] BalloonError),
    /// A virtio-mem device cannot be created.
    #[error("cannot make a memory device")]
    Mem(#[from] MemError),
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
        source: PciError,
    },
}

/// Why a device cannot be added to a running machine.
#[derive(Debug, Error)]
pub enum HotAddError {
    /// The device cannot be created.
    #[error(transparent)]
    Device(#[from] VirtioError),
    /// Its image, tap or socket cannot be taken.
    #[error(transparent)]
    Exclusive(#[from] ExclusiveError),
}

/// The virtio devices of a machine.
#[derive(Default)]
pub struct VirtioDevices {
    functions: Vec<(Bdf, Arc<VirtioPciDevice>)>,
    pub(super) locks: Vec<(String, DiskLock)>,
    pub(super) resizers: Vec<(String, DiskResizer)>,
    /// Disks with on_full=pause, which keep requests that wait for free space.
    pub(super) full_disks: Vec<(String, FullDisk)>,
    pub(super) nets: Vec<(String, NetHandle)>,
    pub(super) sockets: Vec<(String, Arc<VsockSocket>)>,
    /// Ids of the devices that other processes serve.
    pub(super) vhost_users: Vec<String>,
    balloon: Option<BalloonHandle>,
    watchdog: Option<WatchdogHandle>,
    console: Option<ConsoleResizer>,
    mems: Vec<(String, MemHandle)>,
    pub(super) counters: Vec<(String, Arc<dyn Counters>)>,
    /// Devices with reserved numbers, whose BARs are placed after those of passed-through devices.
    unplaced: Vec<(DeviceNumber, Arc<VirtioPciDevice>)>,
    /// Device numbers that options request, and those that are counted down from the highest.
    taken: BTreeSet<u8>,
    /// Limits that disks share.
    pub(super) rate_groups: RateGroups,
    /// Receives the events of full disks.
    sink: Option<EventSink>,
}

/// What a PCI device is created with.
pub struct PciContext<'a> {
    /// The PCI segment.
    pub segment: &'a Arc<PciSegment>,
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
        let width = disk_width(config);
        let mut taken: BTreeSet<u8> =
            config.removed_device_numbers.iter().flatten().copied().collect();
        for (id, number) in requested_numbers(config) {
            taken.insert(number.get());
            context
                .segment
                .reserve(number, &id)
                .map_err(|source| VirtioError::Bus { id, source })?;
        }
        if let Some(endpoint) = &consoles.virtio {
            let id = config.console.id.clone().unwrap_or_default();
            let console =
                Console::new(ConsoleConfig { id: id.clone(), endpoint: Arc::clone(endpoint) });
            devices.console = Some(console.resizer());
            devices.plug(context, &id, Box::new(console), config.console.pci_device_id)?;
        }
        for disk in config.disks.iter().flatten() {
            if disk.vhost_user {
                let made = vhost_users::make_disk(disk, context.ram)?;
                devices.plug_vhost_user(made, context, disk.pci_device_id, width)?;
            } else {
                let made = disks::make(disk, images, &devices.rate_groups)?;
                devices.plug_disk(disk, made, context, width)?;
            }
        }
        for net in config.net.iter().flatten() {
            if net.vhost_user {
                let made = vhost_users::make_net(net, context.ram)?;
                devices.plug_vhost_user(made, context, net.pci_device_id, BarPlacement::Wide)?;
            } else {
                devices.plug_net(net, nets::make(net)?, context)?;
            }
        }
        devices.plug_served(config, context)?;
        let id = config.rng.id.clone().unwrap_or_default();
        let rng = Rng::new(RngConfig { id: id.clone(), source: config.rng.src.clone() })?;
        devices.plug(context, &id, Box::new(rng), config.rng.pci_device_id)?;
        if let Some(vsock) = &config.vsock {
            devices.plug_vsock(vsock, vsocks::make(vsock), context)?;
        }
        // Before the balloon, here and after a restore: they determine its maximum size.
        for Wired { id, device, handle } in mems::make(config, context.ram)? {
            devices.mems.push((id.clone(), handle));
            // From the highest number down, and so the same on another host whatever was plugged before.
            let free = |number: &u8| taken.insert(*number);
            let number = (1..DEVICES_PER_BUS_COUNT).rev().find(free);
            devices.plug(context, &id, Box::new(device), number)?;
        }
        if config.watchdog {
            let power = Arc::clone(power);
            let expired = Arc::new(move || power.signal(GuestEvent::WatchdogExpired));
            let watchdog = Watchdog::new(WatchdogConfig::new(WATCHDOG_ID.to_owned(), expired));
            // For the same reason: its number is not in the configuration.
            let free = |number: &u8| taken.insert(*number);
            let number = (1..DEVICES_PER_BUS_COUNT).rev().find(free);
            devices.watchdog = Some(watchdog.handle());
            devices.plug(context, WATCHDOG_ID, Box::new(watchdog), number)?;
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
            devices.plug(context, &id, Box::new(device), balloon.pci_device_id)?;
        }
        devices.taken = taken;
        Ok(devices)
    }

    fn plug_disk(
        &mut self,
        disk: &DiskConfig,
        (block, lock): (Block, DiskLock),
        context: &PciContext<'_>,
        width: BarPlacement,
    ) -> Result<Bdf, VirtioError> {
        let id = disk.id.clone().unwrap_or_default();
        let counters = block.counters();
        let full_disk = block.full_disk();
        let resizer = block.resizer();
        let bdf = self.plug_with(context, &id, Box::new(block), disk.pci_device_id, width)?;
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
        let bdf = self.plug(context, &id, Box::new(device), net.pci_device_id)?;
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
        let bdf = self.plug(context, &id, Box::new(device), vsock.pci_device_id)?;
        self.counters.push((id.clone(), handle.counters));
        self.sockets.push((id, handle.socket));
        Ok(bdf)
    }

    fn plug(
        &mut self,
        context: &PciContext<'_>,
        id: &str,
        device: Box<dyn VirtioDevice>,
        requested: Option<u8>,
    ) -> Result<Bdf, VirtioError> {
        self.plug_with(context, id, device, requested, BarPlacement::Wide)
    }

    pub(super) fn plug_with(
        &mut self,
        context: &PciContext<'_>,
        id: &str,
        device: Box<dyn VirtioDevice>,
        requested: Option<u8>,
        width: BarPlacement,
    ) -> Result<Bdf, VirtioError> {
        let number = requested.map(|number| device_number(id, number)).transpose()?;
        let events: Arc<dyn IoEvents> = Arc::new(context.vm.clone());
        let function = VirtioPciDevice::new(
            id.to_owned(),
            Box::new(Activated::on(context.activation, device)),
            width.of_bar(),
            context.ram.guest_memory(),
            context.vm,
            events,
        )
        .map_err(|source| VirtioError::Transport { id: id.to_owned(), source })?;
        let function = Arc::new(function);
        let bus = |source| VirtioError::Bus { id: id.to_owned(), source };
        let bdf = if width == BarPlacement::NarrowLater {
            let number = context.segment.expect(number, id).map_err(bus)?;
            self.unplaced.push((number, Arc::clone(&function)));
            Bdf::on_root_bus(context.segment.segment(), number)
        } else {
            let as_pci: Arc<dyn PciDevice> = function.clone();
            context.segment.add_device(&as_pci, number).map_err(bus)?
        };
        self.functions.push((bdf, function));
        Ok(bdf)
    }

    /// Places the BARs of the devices that were deferred until the passed-through devices are on the bus,
    /// whose 32-bit BARs have no alternative, while those of virtio devices become 64-bit ones where there
    /// is no space. Does nothing if there are none.
    ///
    /// # Errors
    /// Names the device.
    pub fn place_later(&mut self, segment: &PciSegment) -> Result<(), VirtioError> {
        // One that fails, and those after it, are left to `release_numbers`.
        while let Some((number, function)) = self.unplaced.first() {
            let as_pci: Arc<dyn PciDevice> = function.clone();
            segment
                .deliver(&as_pci, *number)
                .map_err(|source| VirtioError::Bus { id: as_pci.id().to_owned(), source })?;
            self.unplaced.remove(0);
        }
        Ok(())
    }

    /// Releases vCPUs that wait for a device that will not be placed.
    pub fn release_numbers(&self, segment: &PciSegment) {
        self.unplaced.iter().for_each(|(number, _)| segment.release(*number));
    }

    /// Unplugs the device at `bdf`, writes its image back, and releases its lock or tap. Returns its id;
    /// `None` if it is not hot-pluggable.
    pub fn remove(&mut self, bdf: Bdf, segment: &PciSegment) -> Option<String> {
        let at = self.functions.iter().position(|(at, _)| *at == bdf)?;
        let id = self.functions.get(at)?.1.id().to_owned();
        let lock = self.locks.iter().position(|(other, _)| *other == id);
        let net = self.nets.iter().position(|(other, _)| *other == id);
        let socket = self.sockets.iter().position(|(other, _)| *other == id);
        let vhost_user = self.vhost_users.iter().position(|other| *other == id);
        if lock.is_none() && net.is_none() && socket.is_none() && vhost_user.is_none() {
            return None;
        }
        let (_, function) = self.functions.remove(at);
        if let Ok(number) = DeviceNumber::new(bdf.device()) {
            segment.remove_device(number);
        }
        // Ends its threads, so that none writes to the image or takes frames any more.
        function.reset();
        self.counters.retain(|(other, _)| *other != id);
        self.full_disks.retain(|(other, _)| *other != id);
        self.resizers.retain(|(other, _)| *other != id);
        if let Some((id, lock)) = lock.map(|at| self.locks.remove(at)) {
            exclusive::write_back_and_unlock(&id, &lock);
        }
        if let Some(at) = vhost_user {
            self.vhost_users.remove(at);
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
        let bdf = self.plug_disk(disk, made, context, BarPlacement::Wide)?;
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

    /// Device numbers that options request, and those that are counted down from the highest.
    pub fn taken_numbers(&self) -> &BTreeSet<u8> {
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

/// Width of a device's BAR, and when it is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarPlacement {
    /// 64 bits, placed at once.
    Wide,
    /// 32 bits if there is space, placed at once.
    Narrow,
    /// 32 bits if there is space after the passed-through devices are placed.
    NarrowLater,
}

impl BarPlacement {
    fn of_bar(self) -> BarWidth {
        match self {
            Self::Wide => BarWidth::Bits64,
            Self::Narrow | Self::NarrowLater => BarWidth::Bits32,
        }
    }
}

/// Placement of the disks present at boot.
fn disk_width(config: &VmConfig) -> BarPlacement {
    let passes_through = config.devices.iter().flatten().next().is_some();
    if passes_through { BarPlacement::NarrowLater } else { BarPlacement::Narrow }
}

fn device_number(id: &str, number: u8) -> Result<DeviceNumber, VirtioError> {
    DeviceNumber::new(number).map_err(|source| VirtioError::Number { id: id.to_owned(), source })
}

/// Devices with a configured number, which are placed first so that no other takes it.
fn requested_numbers(config: &VmConfig) -> Vec<(String, DeviceNumber)> {
    config
        .pci_device_ids()
        .into_iter()
        .filter_map(|(id, requested)| {
            let number = DeviceNumber::new(requested?).ok()?;
            Some((id.clone().unwrap_or_default(), number))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    /// The 32-bit BARs of passed-through devices have no alternative.
    #[test]
    fn disks_come_after_passed_through_devices() {
        let mut config: VmConfig =
            serde_json::from_str(r#"{"payload":{"kernel":"/k"},"disks":[{"path":"/d"}]}"#).unwrap();
        assert_eq!(disk_width(&config), BarPlacement::Narrow);
        config.devices = Some(Vec::new());
        assert_eq!(disk_width(&config), BarPlacement::Narrow);
        let device = r#"{"path":"/sys/bus/pci/devices/0000:01:00.0"}"#;
        config.devices = Some(vec![serde_json::from_str(device).unwrap()]);
        assert_eq!(disk_width(&config), BarPlacement::NarrowLater);
    }
}
