// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hot-plug and hot-unplug of devices.
//!
//! Owns the registers by which the guest is told, and the order of things: a device is on the bus
//! before the guest hears of it, and is taken apart only when the guest has ejected it. The guest
//! ejects it on a vCPU's thread, where the device disappears at once; the rest happens when the owner of
//! the machine comes to it ([`Machine::take_ejected`]), here or, if the guest has moved meanwhile,
//! where it runs then.

use std::sync::{Arc, Weak};
use std::time::Duration;

use arch::acpi::RegisterPlace;
use devices::Snapshot as _;
use devices::legacy::{OnEject, PCI_HOTPLUG_LEN_BYTES, PciHotplug};
use devices::virtio::{DeviceSnapshot, StateError};
use pci::{Bdf, DEVICES_PER_BUS_COUNT, DeviceNumber};
use thiserror::Error;

use super::events::{EventSink, GuestEvent};
use super::opening::{self, Opened};
use super::passthrough::{CallLimits, PassthroughError, Patience, WithheldStatus};
use super::segments::Segments;
use super::space::AddressSpace;
use super::virtio::{HotAddError, PciContext};
use super::{CancelToken, Machine, MachineError};
use crate::config::vm::{IOMMU_ID, PVPANIC_ID, WATCHDOG_ID};
use crate::config::{NewDevice, VmConfig};
use crate::events;

/// Why a device cannot be removed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RemoveError {
    /// No device has this id.
    #[error("the VM has no device '{0}'")]
    Unknown(String),
    /// The device cannot be unplugged.
    #[error(
        "'{0}' cannot be removed: disks, network, file system, vsock, vDPA, vfio-user, other vhost-user and passed-through devices and persistent memory can"
    )]
    Fixed(String),
    /// The guest's tables name the device for good.
    #[error(
        "'{0}' cannot be removed: it is behind the IOMMU in a segment that has other devices as well; those in \
         a segment of iommu_segments can"
    )]
    BehindIommu(String),
}

/// The hot-plug registers of the PCI slots.
pub struct Hotplug {
    registers: Arc<PciHotplug>,
    last_segment: u16,
}

/// The device numbers whose bits are set in a register.
fn numbers(bits: u32) -> impl Iterator<Item = DeviceNumber> {
    let is_set = move |number: &DeviceNumber| bits & 1 << number.get() != 0;
    (1..DEVICES_PER_BUS_COUNT).filter_map(|number| DeviceNumber::new(number).ok()).filter(is_set)
}

impl Hotplug {
    /// Places the registers in `space`; ejections are reported to `sink`.
    ///
    /// # Errors
    /// The addresses are taken.
    pub fn wire(
        space: &AddressSpace,
        segments: &Segments,
        place: RegisterPlace,
        sink: EventSink,
    ) -> Result<Self, MachineError> {
        let last_segment = segments.last();
        let segments: Vec<_> = segments.iter().map(Arc::downgrade).collect();
        let hide = Box::new(move |segment: u16, bits| {
            let segment = segments.get(usize::from(segment)).and_then(Weak::upgrade);
            if let Some(segment) = segment {
                numbers(bits).for_each(|number| segment.hide(number));
            }
        });
        let on_eject = OnEject { hide, notify: Box::new(move || sink(GuestEvent::Ejected)) };
        let registers = Arc::new(PciHotplug::new(last_segment, on_eject));
        let len_bytes = PCI_HOTPLUG_LEN_BYTES;
        space.insert_registers(place, len_bytes, "PCI hotplug", registers.clone())?;
        Ok(Self { registers, last_segment })
    }

    /// Saves the registers.
    pub fn save(&self) -> DeviceSnapshot {
        self.registers.save()
    }

    /// Restores the registers.
    ///
    /// # Errors
    /// The state is malformed.
    pub fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.registers.restore(state)
    }

    /// Whether a device is to be removed: the guest was asked to eject it, or has ejected it already.
    fn is_going(&self, bdf: Bdf) -> bool {
        numbers(self.registers.going(bdf.segment())).any(|number| number.get() == bdf.device())
    }

    /// The devices that the guest has ejected.
    fn ejected(&self) -> Vec<Bdf> {
        let of = |segment| {
            let numbers = numbers(self.registers.ejected(segment));
            numbers.map(move |number| Bdf::on_root_bus(segment, number))
        };
        (0..=self.last_segment).flat_map(of).collect()
    }
}

impl Machine {
    /// Adds a device and notifies the guest. `config` is the machine's configuration including the device.
    ///
    /// # Errors
    /// Names the device, also when the addition is cancelled while it is being opened; nothing has changed
    /// then.
    pub fn add_device(
        &mut self,
        device: &NewDevice,
        config: VmConfig,
        cancel: &CancelToken,
    ) -> Result<Bdf, MachineError> {
        let groups = &self.parts.devices.rate_groups;
        let (opened, config) = opening::open(device, config, &self.parts.ram, groups, cancel)?;
        let context = PciContext {
            segments: &self.parts.segments,
            vm: &self.parts.vm,
            ram: &self.parts.ram,
            activation: &self.parts.activation,
            platform: self.config.machine_platform(),
        };
        let bdf = match opened {
            Opened::Host(device) => {
                let discarding = self.parts.devices.discarding_devices();
                let added = self.parts.passthrough.add(&device, &context, discarding, cancel);
                if added.is_err() {
                    self.discard_what_devices_had();
                }
                let bdf = added.map_err(|error| match error {
                    PassthroughError::Cancelled => {
                        MachineError::AddWithdrawn { id: device.id.clone().unwrap_or_default() }
                    }
                    error => error.into(),
                })?;
                self.stop_added(&|| cancel.is_cancelled());
                bdf
            }
            Opened::Disk(disk, made) => self
                .parts
                .devices
                .add_disk(&disk, made, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::VhostUser(made, place) => self
                .parts
                .devices
                .add_vhost_user(*made, place, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::Net(net, made) => self
                .parts
                .devices
                .add_net(&net, made, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::Pmem(pmem, file) => self
                .parts
                .devices
                .add_pmem(&pmem, file, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::User(device, made) => {
                self.parts.user_devices.add(&device, *made, &context).map_err(HotAddError::from)?
            }
            Opened::Vdpa(vdpa, made) => self
                .parts
                .devices
                .add_vdpa(&vdpa, *made, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::Vsock(vsock, made) => self
                .parts
                .devices
                .add_vsock(&vsock, made, &context, self.paused)
                .map_err(HotAddError::from)?,
        };
        self.config = config;
        self.record_device_numbers();
        self.parts.devices.settle_pmems(&mut self.config);
        if self.parts.passthrough.withholds(bdf) {
            // At once if memory is mapped already.
            self.announce_ready();
        } else {
            self.announce(bdf, device.id());
        }
        if self.parts.passthrough.withholds(bdf) {
            log::info!("'{}' has {bdf}, which the guest sees once memory is mapped", device.id());
        }
        Ok(bdf)
    }

    /// Notifies the guest of a device that has come.
    fn announce(&self, bdf: Bdf, id: &str) {
        self.parts.hotplug.registers.add(bdf.segment(), bdf.device());
        self.parts.legacy.notify_pci_changed();
        log::info!("'{id}' was added at {bdf}");
        events::emit("vm", "device-added", &[("id", id), ("bdf", &bdf.to_string())]);
    }

    /// Notifies the guest of the withheld devices for which memory is mapped.
    fn announce_ready(&mut self) {
        for (bdf, id) in self.parts.passthrough.show_ready(&self.parts.segments) {
            self.announce(bdf, &id);
        }
    }

    /// Whether the guest does not see a device yet.
    pub fn withholds_devices(&self) -> bool {
        self.parts.passthrough.withholds_any()
    }

    /// Withholds the devices that the guest has not seen, as memory will be mapped for so long.
    pub fn withhold_unseen(&mut self, left: Duration) {
        self.parts.passthrough.withhold_unseen(&self.parts.segments, left);
    }

    /// The devices that the guest does not see yet.
    pub fn withheld_devices(&self) -> Vec<WithheldStatus> {
        self.parts.passthrough.withheld_devices()
    }

    /// Number of the newest ACPI event, if the guest has not read all of them: a device that has come or is to
    /// go, the power button.
    pub fn unread_event(&self) -> Option<u64> {
        self.parts.legacy.unread_event()
    }

    /// Raises the interrupt of unread ACPI events again.
    pub fn repeat_unread_events(&self) {
        self.parts.legacy.repeat_unread_events();
    }

    /// Pauses the added devices if the machine is paused.
    fn stop_added(&self, is_cancelled: &dyn Fn() -> bool) {
        let patience = Patience { is_cancelled, ..Patience::within(CallLimits::default()) };
        if self.paused
            && let Err(error) = self.parts.passthrough.stop_within(&patience)
        {
            // The guest does not know the device yet and has started nothing on it. Saving and migrating
            // check again, and fail.
            log::warn!("{}", error_text::chain(&error));
        }
    }

    /// Records the device number of each device in the configuration, so that it keeps its address after a
    /// reboot or migration, whatever devices have been added and removed before.
    fn record_device_numbers(&mut self) {
        for function in self.functions() {
            self.config.set_pci_device_id(&function.id, function.bdf.device());
        }
    }

    /// Notes that a device is gone whose number was requested, if devices were placed around it, which are in
    /// segment 0.
    fn keep_free(&mut self, bdf: Bdf) {
        let number = bdf.device();
        let mems = self.parts.devices.mems();
        let is_placed_down = |id: &str| {
            [IOMMU_ID, WATCHDOG_ID, PVPANIC_ID].contains(&id)
                || mems.iter().any(|(other, _)| other == id)
        };
        let functions = self.functions().into_iter();
        let mut below =
            functions.filter(|other| other.bdf.segment() == 0 && other.bdf.device() < number);
        let is_above = below.any(|other| is_placed_down(&other.id));
        let was_taken = bdf.segment() == 0 && self.parts.devices.taken_numbers().contains(number);
        if is_above && was_taken {
            let numbers = self.config.removed_device_numbers.get_or_insert_default();
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
    }

    /// Asks the guest to eject a device; may be repeated.
    ///
    /// # Errors
    /// There is no such device, or it cannot be unplugged.
    pub fn ask_to_remove(&mut self, id: &str) -> Result<(), RemoveError> {
        let function = self.functions().into_iter().find(|function| function.id == id);
        let function = function.ok_or_else(|| RemoveError::Unknown(id.to_owned()))?;
        if self.config.without(id).is_none() {
            return Err(RemoveError::Fixed(id.to_owned()));
        }
        if self.config.named_behind_iommu().contains(&id) {
            return Err(RemoveError::BehindIommu(id.to_owned()));
        }
        if self.parts.passthrough.withdraw(function.bdf) {
            events::emit("vm", "device-removing", &[("id", id)]);
            return Ok(());
        }
        self.parts.hotplug.registers.request_unplug(function.bdf.segment(), function.bdf.device());
        // Not waited for: it shortens the write-back after the ejection.
        drop(self.write_back_early(id));
        self.parts.legacy.notify_pci_changed();
        events::emit("vm", "device-removing", &[("id", id)]);
        Ok(())
    }

    /// Takes away the vCPUs that the guest has ejected. Tears down the devices that the guest has ejected, and those that
    /// it will never see; plugs those that were opened late; announces those for which memory is mapped now.
    pub fn take_ejected(&mut self) {
        self.take_ejected_vcpus();
        self.announce_ready();
        let refused = self.parts.passthrough.refused();
        for bdf in &refused {
            log::warn!("the device at {bdf} is removed; the guest has not seen it");
        }
        for bdf in self.parts.hotplug.ejected().into_iter().chain(refused) {
            let id = self.parts.passthrough.remove(bdf, &self.parts.segments);
            let mut had_memory = id.is_some();
            let id = id.or_else(|| self.parts.user_devices.remove(bdf, &self.parts.segments));
            let id = id.or_else(|| {
                let before = self.parts.devices.vdpas.len();
                let id = self.parts.devices.remove(bdf, &self.parts.segments);
                had_memory = self.parts.devices.vdpas.len() < before;
                id
            });
            if had_memory {
                self.discard_what_devices_had();
            }
            self.parts.hotplug.registers.gone(bdf.segment(), bdf.device());
            let Some(id) = id else { continue };
            self.forget(bdf, &id);
        }
        // After those that go: if memory could not be mapped for them, it is mapped anew for these.
        self.receive_late();
        // Memory may be discarded again when no passed-through device is left.
        self.retry_discards();
    }

    /// Plugs the passed-through devices that were opened late, withheld until memory is mapped. Takes those that could not
    /// be opened out of the configuration: the guest goes on without.
    fn receive_late(&mut self) {
        let context = PciContext {
            segments: &self.parts.segments,
            vm: &self.parts.vm,
            ram: &self.parts.ram,
            activation: &self.parts.activation,
            platform: self.config.machine_platform(),
        };
        let devices = &self.parts.devices;
        let discarding = || devices.discarding_devices();
        if self.parts.passthrough.receive_late(&context, &discarding) {
            self.stop_added(&|| false);
            // Memory may be mapped already.
            self.announce_ready();
        }
        let unopened = self.parts.passthrough.take_unopened();
        for (bdf, id) in &unopened {
            self.forget(*bdf, id);
        }
        if !unopened.is_empty() {
            self.discard_what_devices_had();
        }
    }

    /// Takes a device that is gone out of the configuration, and tells of it.
    fn forget(&mut self, bdf: Bdf, id: &str) {
        self.record_device_numbers();
        if let Some(config) = self.config.without(id) {
            self.config = config;
            self.keep_free(bdf);
        }
        log::info!("'{id}' was removed");
        events::emit("vm", "device-removed", &[("id", id)]);
    }

    /// Discards balloon memory that was populated for passed-through devices, if there are none any more: it
    /// was not, or not all of it, when they went before all memory was mapped.
    fn discard_what_devices_had(&self) {
        if let Some(balloon) = self.balloon()
            && self.parts.ram.discards_banned().is_none()
        {
            balloon.memory_was_populated();
        }
    }

    /// The configuration for the time after the guest has ended: without the devices and vCPUs to be removed.
    pub fn lasting_config(&self) -> VmConfig {
        let functions = self.functions();
        let leaving = functions.iter().filter(|function| {
            let is_withdrawn = self.parts.passthrough.is_withdrawn(function.bdf);
            is_withdrawn || self.parts.hotplug.is_going(function.bdf)
        });
        let config = self.with_lasting_vcpus(self.config.clone());
        leaving.fold(config, |config, function| config.without(&function.id).unwrap_or(config))
    }

    /// The same for a reboot: without the passed-through devices that the host does not give to the next boot, as a call of
    /// an earlier migration has them.
    pub fn rebooting_config(&self) -> VmConfig {
        let config = self.lasting_config();
        let hung = self.parts.passthrough.not_for_reboot(&config);
        hung.iter().fold(config, |config, id| {
            log::warn!("the VM reboots without '{id}', as a call of a migration has not returned");
            config.without(id).unwrap_or(config)
        })
    }
}
