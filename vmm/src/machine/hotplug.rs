// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hot-plug and hot-unplug of devices.
//!
//! Owns the registers by which the guest is told, and the order of things: a device is on the bus
//! before the guest hears of it, and is taken apart only when the guest has ejected it. The guest
//! ejects it on a vCPU's thread, where the device disappears at once; the rest happens when the owner of
//! the machine comes to it ([`Machine::take_ejected`]), here or, if the guest has moved meanwhile,
//! where it runs then.

use std::sync::Arc;

use arch::layout;
use devices::Snapshot as _;
use devices::legacy::{PCI_HOTPLUG_LEN_BYTES, PciHotplug};
use devices::virtio::{DeviceSnapshot, StateError};
use pci::{Bdf, DEVICES_PER_BUS_COUNT, DeviceNumber, PciSegment};
use thiserror::Error;

use super::events::{EventSink, GuestEvent};
use super::opening::{self, Opened};
use super::passthrough::PassthroughError;
use super::space::AddressSpace;
use super::virtio::{HotAddError, PciContext};
use super::{CancelToken, Machine, MachineError};
use crate::config::{NewDevice, VmConfig};
use crate::events;

/// Why a device cannot be taken from the guest.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RemoveError {
    /// There is none.
    #[error("the VM has no device '{0}'")]
    Unknown(String),
    /// It belongs to the machine.
    #[error("'{0}' cannot be removed: disks, network, vsock and passed-through devices can")]
    Fixed(String),
}

/// The registers of the guest's slots.
pub struct Hotplug {
    registers: Arc<PciHotplug>,
}

/// The device numbers of a register.
fn numbers(bits: u32) -> impl Iterator<Item = DeviceNumber> {
    let is_set = move |number: &DeviceNumber| bits & 1 << number.get() != 0;
    (1..DEVICES_PER_BUS_COUNT).filter_map(|number| DeviceNumber::new(number).ok()).filter(is_set)
}

impl Hotplug {
    /// Puts the registers into `space`; ejections are told to `sink`.
    ///
    /// # Errors
    /// Their place is taken.
    pub fn wire(
        space: &AddressSpace,
        segment: &Arc<PciSegment>,
        sink: EventSink,
    ) -> Result<Self, MachineError> {
        let segment = Arc::downgrade(segment);
        let registers = Arc::new(PciHotplug::new(Box::new(move |bits| {
            if let Some(segment) = segment.upgrade() {
                numbers(bits).for_each(|number| segment.hide(number));
            }
            sink(GuestEvent::Ejected);
        })));
        let port = layout::PCI_HOTPLUG_PORT;
        space.insert_ports(port, PCI_HOTPLUG_LEN_BYTES, "PCI hotplug", registers.clone())?;
        Ok(Self { registers })
    }

    /// State of the registers.
    pub fn save(&self) -> DeviceSnapshot {
        self.registers.save()
    }

    /// Takes a saved state.
    ///
    /// # Errors
    /// It is not one.
    pub fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.registers.restore(state)
    }

    /// Devices that are about to go: the guest was asked, or has let go already.
    fn going(&self) -> u32 {
        self.registers.leaving() | self.registers.ejected()
    }
}

impl Machine {
    /// Adds a device and tells the guest. `config` is the machine's configuration with it.
    ///
    /// # Errors
    /// Naming the device, also when its addition is cancelled while it is being opened; everything is as
    /// before.
    pub fn add_device(
        &mut self,
        device: &NewDevice,
        config: VmConfig,
        cancel: &CancelToken,
    ) -> Result<Bdf, MachineError> {
        let (opened, config) = opening::open(device, config, cancel)?;
        let context =
            PciContext { segment: &self.parts.segment, vm: &self.parts.vm, ram: &self.parts.ram };
        let bdf = match opened {
            Opened::Host(device) => {
                let discarding = self.parts.devices.discarding_devices();
                let added = self.parts.passthrough.add(&device, &context, discarding, cancel);
                let bdf = added.map_err(|error| match error {
                    PassthroughError::Cancelled => {
                        MachineError::AddWithdrawn { id: device.id.clone().unwrap_or_default() }
                    }
                    error => error.into(),
                })?;
                self.stop_added();
                bdf
            }
            Opened::Disk(disk, made) => self
                .parts
                .devices
                .add_disk(&disk, made, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::Net(net, made) => self
                .parts
                .devices
                .add_net(&net, made, &context, self.paused)
                .map_err(HotAddError::from)?,
            Opened::Vsock(vsock, made) => self
                .parts
                .devices
                .add_vsock(&vsock, made, &context, self.paused)
                .map_err(HotAddError::from)?,
        };
        self.config = config;
        self.record_device_numbers();
        self.parts.hotplug.registers.add(bdf.device());
        self.parts.legacy.tell_pci_changed();
        let id = device.id();
        log::info!("'{id}' was added at {bdf}");
        events::emit("vm", "device-added", &[("id", id), ("bdf", &bdf.to_string())]);
        Ok(bdf)
    }

    /// Of a paused machine a device that was added works no more than the others do.
    fn stop_added(&self) {
        if self.paused
            && let Err(error) = self.parts.passthrough.stop()
        {
            // The guest does not know it yet, so it has been told to do nothing. Saving and moving ask
            // again, and fail by this.
            log::warn!("{}", error_text::chain(&error));
        }
    }

    /// Writes down where every device sits, so that it is found there after a reboot and a move,
    /// whichever devices have come and gone before it.
    fn record_device_numbers(&mut self) {
        for function in self.functions() {
            self.config.set_pci_device_id(&function.id, function.bdf.device());
        }
    }

    /// Asks the guest to eject a device. Asking again is no failure.
    ///
    /// # Errors
    /// There is no such device, or it cannot go.
    pub fn ask_to_remove(&mut self, id: &str) -> Result<(), RemoveError> {
        let function = self.functions().into_iter().find(|function| function.id == id);
        let function = function.ok_or_else(|| RemoveError::Unknown(id.to_owned()))?;
        if self.config.without(id).is_none() {
            return Err(RemoveError::Fixed(id.to_owned()));
        }
        self.parts.hotplug.registers.request_unplug(function.bdf.device());
        // No thread waits for this: there is less to wait for when the guest has ejected it.
        drop(self.write_back_early(id));
        self.parts.legacy.tell_pci_changed();
        events::emit("vm", "device-removing", &[("id", id)]);
        Ok(())
    }

    /// Takes apart what the guest has ejected.
    pub fn take_ejected(&mut self) {
        for number in numbers(self.parts.hotplug.registers.ejected()) {
            let bdf = Bdf::on_root_bus(self.parts.segment.segment(), number);
            let id = self.parts.passthrough.remove(bdf, &self.parts.segment);
            let id = id.or_else(|| self.parts.devices.remove(bdf, &self.parts.segment));
            self.parts.hotplug.registers.gone(number.get());
            let Some(id) = id else { continue };
            self.record_device_numbers();
            if let Some(config) = self.config.without(&id) {
                self.config = config;
            }
            log::info!("'{id}' was removed");
            events::emit("vm", "device-removed", &[("id", &id)]);
        }
        // What it holds may go back to the host when no passed-through device is left.
        self.retry_discards();
    }

    /// Its configuration as it is to be after the guest's end: without the devices that were to go.
    pub fn lasting_config(&self) -> VmConfig {
        let going = self.parts.hotplug.going();
        let functions = self.functions();
        let leaving = functions.iter().filter(|function| going & 1 << function.bdf.device() != 0);
        leaving.fold(self.config.clone(), |config, function| {
            config.without(&function.id).unwrap_or(config)
        })
    }
}
