// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of PCI devices that other processes emulate (vfio-user).
//!
//! Owns the devices, the order in which they come and go, what the loss of a server leads to (an event, a device that
//! reads as ones, and that no later guest gets the memory), and the rule that a machine with such a device stays where
//! it is. Guest memory is with the server before the guest sees the device, and taken back after it has been reset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use memory::GuestRam;
use parking_lot::Mutex;
use pci::{Bdf, DeviceNumber, PciDevice};
use thiserror::Error;
use vfio::user::{UserError, UserFunction, Watch};
use vfio::{DmaGate, IntxLine, VfioError, VfioPciDevice, VfioWiring};

use super::CancelToken;
use super::passthrough::{KvmBarSlots, line_of};
use super::segments::{PlaceError, Segments};
use super::space::Revocable;
use super::virtio::PciContext;
use crate::config::{UserDeviceConfig, VmConfig};
use crate::events;

/// Why a device of another process cannot be used.
#[derive(Debug, Error)]
pub enum UserDeviceError {
    /// Its server is of no use.
    #[error("cannot use the vfio-user device '{id}'")]
    Server {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: UserError,
    },
    /// The function cannot be shown to a guest.
    #[error("cannot make the vfio-user device '{id}'")]
    Device {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: VfioError,
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

/// A machine with devices of other processes cannot be migrated or saved.
#[derive(Debug, Error)]
#[error(
    "{} cannot be migrated or saved: the state of a vfio-user device is in its server, and what that writes to memory \
     is in no log",
    .0.join(", ")
)]
pub struct UserNotMovable(Vec<String>);

/// Refuses to migrate, save, receive or restore a machine with devices of other processes.
///
/// # Errors
/// Names the devices.
pub fn check_movable(config: &VmConfig) -> Result<(), UserNotMovable> {
    let ids = config.user_devices.iter().flatten().filter_map(|device| device.id.as_deref());
    let ids: Vec<_> = ids.map(|id| format!("'{id}'")).collect();
    if ids.is_empty() { Ok(()) } else { Err(UserNotMovable(ids)) }
}

/// Connects to the server of a device, which has guest memory then.
///
/// # Errors
/// Names the device.
pub fn make(
    device: &UserDeviceConfig,
    ram: &Arc<GuestRam>,
    cancel: &CancelToken,
) -> Result<UserFunction, UserDeviceError> {
    let id = device.id.clone().unwrap_or_default();
    UserFunction::open(&id, &device.socket, ram, &|| cancel.is_cancelled())
        .map_err(|source| UserDeviceError::Server { id, source })
}

/// A device on the bus.
struct UserDevice {
    bdf: Bdf,
    /// Dropped first: it ends before the device does.
    watch: Watch,
    device: Arc<VfioPciDevice>,
    function: Arc<UserFunction>,
}

/// The devices of other processes.
pub struct UserDevices {
    devices: Vec<UserDevice>,
    slots: Arc<KvmBarSlots>,
    mapped: Arc<MappedBars>,
    ram: Arc<GuestRam>,
}

/// The devices whose servers may have taken memory from under a BAR.
#[derive(Default)]
struct MappedBars {
    devices: Mutex<Vec<Weak<VfioPciDevice>>>,
    /// How often memory was taken from the guest, and how often that was when a vCPU last asked for it: of several that
    /// ask at a time, one finds something.
    revocations: AtomicU64,
    seen: Mutex<BTreeMap<u32, u64>>,
}

impl MappedBars {
    fn note(&self) {
        self.revocations.fetch_add(1, Ordering::AcqRel);
    }
}

impl Revocable for MappedBars {
    fn revoke(&self, vcpu_index: u32) -> bool {
        // Before anything is looked for: another vCPU has either found all and counted it, or comes after this one.
        let mut seen = self.seen.lock();
        let devices: Vec<_> = self.devices.lock().iter().filter_map(Weak::upgrade).collect();
        let mut any = false;
        for device in devices.iter().filter(|device| device.stop_mapping()) {
            any = true;
            log::warn!(
                "the host could not provide memory that a vCPU accessed, perhaps as the server of vfio-user device '{}' \
                 has shortened the file of a BAR: accesses to its BARs go to the server from now on, which is slow",
                device.id()
            );
        }
        if any {
            self.note();
        }
        let now = self.revocations.load(Ordering::Acquire);
        seen.insert(vcpu_index, now).unwrap_or(0) != now
    }
}

impl UserDevices {
    /// Connects the devices of a machine.
    ///
    /// # Errors
    /// Names the device.
    pub fn wire(config: &VmConfig, context: &PciContext<'_>) -> Result<Self, UserDeviceError> {
        let mut this = Self {
            devices: Vec::new(),
            slots: Arc::new(KvmBarSlots::of_user_devices(context.vm.clone())),
            mapped: Arc::default(),
            ram: Arc::clone(context.ram),
        };
        for device in config.user_devices.iter().flatten() {
            this.add(device, make(device, context.ram, &CancelToken::default())?, context)?;
        }
        Ok(this)
    }

    /// What a vCPU may be without if the host cannot provide memory.
    pub fn revocable(&self) -> Arc<dyn Revocable> {
        Arc::<MappedBars>::clone(&self.mapped)
    }

    /// Places a device on the bus, whose server is connected.
    ///
    /// # Errors
    /// Names the device; nothing has changed then, and the session is over.
    pub fn add(
        &mut self,
        config: &UserDeviceConfig,
        function: UserFunction,
        context: &PciContext<'_>,
    ) -> Result<Bdf, UserDeviceError> {
        let id = config.id.clone().unwrap_or_default();
        let function = Arc::new(function);
        let added = self.plug(config, &id, &function, context);
        if added.is_err() {
            self.take_memory_back(&id, &function);
        }
        added
    }

    fn plug(
        &mut self,
        config: &UserDeviceConfig,
        id: &str,
        function: &Arc<UserFunction>,
        context: &PciContext<'_>,
    ) -> Result<Bdf, UserDeviceError> {
        let bus = |source| UserDeviceError::Bus { id: id.to_owned(), source };
        let segment = context.segments.get(config.pci_segment).map_err(bus)?;
        let requested = config.pci_device_id.and_then(|number| DeviceNumber::new(number).ok());
        let number = segment.choose(requested, id).map_err(|source| bus(source.into()))?;
        let added = self.make_device(config, id, number, function, context).and_then(|device| {
            let watch = self.watch(id, &device, function)?;
            let on_bus: Arc<dyn PciDevice> = device.clone();
            let bdf = segment.add_device(&on_bus, Some(number)).map_err(|source| {
                bus(context.segments.explain(segment.segment(), on_bus.as_ref(), source))
            })?;
            Ok(UserDevice { bdf, watch, device, function: Arc::clone(function) })
        });
        let added = added.inspect_err(|_| segment.release(number))?;
        let bdf = added.bdf;
        let mut mapped = self.mapped.devices.lock();
        mapped.retain(|device| device.strong_count() > 0);
        mapped.push(Arc::downgrade(&added.device));
        drop(mapped);
        self.devices.push(added);
        Ok(bdf)
    }

    fn make_device(
        &self,
        config: &UserDeviceConfig,
        id: &str,
        number: DeviceNumber,
        function: &Arc<UserFunction>,
        context: &PciContext<'_>,
    ) -> Result<Arc<VfioPciDevice>, UserDeviceError> {
        let failed = |source| UserDeviceError::Device { id: id.to_owned(), source };
        let line = context.vm.create_level_line(line_of(number));
        let line = line.map_err(|source| failed(VfioError::Line(source)))?;
        // All memory is with the server already.
        let gate = DmaGate::default();
        gate.open();
        let wiring = VfioWiring {
            msi_source: context.vm,
            slots: self.slots.clone(),
            gate: Arc::new(gate),
            intx: Some(Box::new(line) as Box<dyn IntxLine>),
            trapped_bars: Vec::new(),
            gpudirect_clique: None,
            has_ports: config.pci_segment == 0,
            peers: None,
        };
        let host: Arc<dyn vfio::HostFunction> = Arc::<UserFunction>::clone(function);
        let device = VfioPciDevice::new(id.to_owned(), host, wiring);
        // A server that is lost meanwhile has left ones behind, of which the error would be.
        if let Some(why) = function.lost() {
            let id = id.to_owned();
            return Err(UserDeviceError::Server { id, source: UserError::Lost(why) });
        }
        device.map(Arc::new).map_err(failed)
    }

    fn watch(
        &self,
        id: &str,
        device: &Arc<VfioPciDevice>,
        function: &UserFunction,
    ) -> Result<Watch, UserDeviceError> {
        let (lost, device) = (id.to_owned(), Arc::downgrade(device));
        let written = Arc::downgrade(&self.ram);
        let on_lost = Box::new(move |why: &str| {
            // It has the memory mapped, also if it has only closed the connection.
            if let Some(ram) = written.upgrade() {
                ram.note_stray_writer();
            }
            log::warn!("the server of vfio-user device '{lost}' is lost: {why}");
            events::emit("vm", "back-end-lost", &[("id", &lost), ("error", why)]);
            if let Some(device) = device.upgrade() {
                device.lose();
            }
        });
        function.watch(on_lost).map_err(|source| {
            let what = "start a thread for the server";
            UserDeviceError::Device { id: id.to_owned(), source: VfioError::Io { what, source } }
        })
    }

    /// Removes the device at `bdf`; returns its id.
    pub fn remove(&mut self, bdf: Bdf, segments: &Segments) -> Option<String> {
        let at = self.devices.iter().position(|device| device.bdf == bdf)?;
        let device = self.devices.remove(at);
        segments.remove_device(bdf);
        let id = device.device.id().to_owned();
        self.end_one(device);
        Some(id)
    }

    /// Resets all devices and takes guest memory back from their servers: the guest has ended. The sessions are over.
    pub fn end(&mut self) {
        for device in std::mem::take(&mut self.devices) {
            self.end_one(device);
        }
    }

    fn end_one(&self, UserDevice { watch, device, function, .. }: UserDevice) {
        // The end of the session is no loss.
        drop(watch);
        device.disarm();
        self.mapped.note();
        self.take_memory_back(device.id(), &function);
    }

    fn take_memory_back(&self, id: &str, function: &UserFunction) {
        if let Err(error) = function.take_memory_back() {
            // No later guest may have pages that it could still write.
            self.ram.note_stray_writer();
            let error = error_text::chain(&error);
            log::warn!(
                "the server of vfio-user device '{id}' may still have guest memory: {error}"
            );
        }
    }

    /// The devices with their addresses.
    pub fn devices(&self) -> impl Iterator<Item = (Bdf, &Arc<VfioPciDevice>)> {
        self.devices.iter().map(|device| (device.bdf, &device.device))
    }
}

impl Drop for UserDevices {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use memory::{RamConfig, RamLayout, ZoneSpec};
    use serde_json::json;

    use super::*;

    #[test]
    fn of_several_vcpus_that_find_memory_gone_each_tries_again_once() {
        let mapped = MappedBars::default();
        assert!(!mapped.revoke(0), "there is none that it could be");
        // As if another vCPU had found some.
        mapped.note();
        assert!(mapped.revoke(0) && mapped.revoke(7));
        assert!(!mapped.revoke(0) && !mapped.revoke(7), "something else is wrong");
        mapped.note();
        assert!(mapped.revoke(7));
    }

    #[test]
    fn a_machine_with_such_devices_stays_where_it_is() {
        let config = |devices| {
            let memory = json!({ "size": 1 << 30, "shared": true });
            let json =
                json!({ "payload": { "kernel": "/k" }, "memory": memory, "user_devices": devices });
            serde_json::from_value::<VmConfig>(json).unwrap().complete().unwrap()
        };
        check_movable(&config(json!(null))).unwrap();
        let devices = json!([{ "socket": "/a" }, { "socket": "/b", "id": "b" }]);
        let error = check_movable(&config(devices)).unwrap_err().to_string();
        assert!(error.starts_with("'_vfio_user0', 'b' cannot be migrated or saved"), "{error}");
    }

    #[test]
    fn memory_that_is_private_is_refused_by_name() {
        let zones = vec![ZoneSpec::new("mem0", 4 << 20)];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let device = UserDeviceConfig {
            socket: "/nowhere/socket".into(),
            id: Some("u".to_owned()),
            ..UserDeviceConfig::default()
        };
        let error = error_text::chain(&make(&device, &ram, &CancelToken::default()).err().unwrap());
        assert!(error.contains("'u'") && error.contains("shared=on"), "{error}");
    }
}
