// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Adding devices to a configuration and removing them (hot-plug).
//!
//! Owns the body of `vm.remove-device` and the effect on a whole configuration of adding or removing a
//! device. It must never look at the host.

use super::codec::JsonOnly;
use super::error::ConfigError;
use super::exclusive::check_mac;
use super::family::option_family;
use super::{
    DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, NetConfig, PmemConfig,
    UserDeviceConfig, VdpaConfig, VmConfig, VsockConfig,
};

option_family! {
    /// The device to remove.
    VmRemoveDevice "remove-device" {
        /// Name of the device.
        id: String = String::new(), "" as JsonOnly;
    }
}

/// A device to add.
#[derive(Clone, Debug, PartialEq)]
pub enum NewDevice {
    /// A passed-through device.
    Host(DeviceConfig),
    /// A disk.
    Disk(DiskConfig),
    /// A network device.
    Net(NetConfig),
    /// A shared directory.
    Fs(FsConfig),
    /// A vhost-user device of any type.
    GenericVhostUser(GenericVhostUserConfig),
    /// A device that another process emulates.
    User(UserDeviceConfig),
    /// A vDPA device.
    Vdpa(VdpaConfig),
    /// A vsock device.
    Vsock(VsockConfig),
    /// Persistent memory.
    Pmem(PmemConfig),
}

impl NewDevice {
    /// Id of the device, once completed.
    pub fn id(&self) -> &str {
        let id = match self {
            Self::Host(device) => &device.id,
            Self::Disk(disk) => &disk.id,
            Self::Net(net) => &net.id,
            Self::Fs(fs) => &fs.id,
            Self::GenericVhostUser(device) => &device.id,
            Self::User(device) => &device.id,
            Self::Vdpa(vdpa) => &vdpa.id,
            Self::Vsock(vsock) => &vsock.id,
            Self::Pmem(pmem) => &pmem.id,
        };
        id.as_deref().unwrap_or_default()
    }

    /// The same for a guest that runs, whose tables name what is behind the IOMMU already.
    ///
    /// # Errors
    /// As [`Self::add_to`]; and the device would have to be named there.
    pub fn add_to_running(self, config: &VmConfig) -> Result<(VmConfig, Self), ConfigError> {
        let (config, added) = self.add_to(config)?;
        config.check_added_behind(added.id())?;
        Ok((config, added))
    }

    /// Adds the device: the new configuration, and the device with its defaults filled in. Only the device
    /// is validated by the rules for new devices, as the existing ones may have been accepted by an earlier
    /// version.
    ///
    /// # Errors
    /// A rule that the device violates, by itself or together with the existing devices.
    pub fn add_to(self, config: &VmConfig) -> Result<(VmConfig, Self), ConfigError> {
        let mut config = config.clone();
        match &self {
            Self::Host(device) => config.devices.get_or_insert_default().push(device.clone()),
            Self::Disk(disk) => config.disks.get_or_insert_default().push(disk.clone()),
            Self::Net(net) => config.net.get_or_insert_default().push(net.clone()),
            Self::Fs(fs) => config.fs.get_or_insert_default().push(fs.clone()),
            Self::GenericVhostUser(device) => {
                config.generic_vhost_user.get_or_insert_default().push(device.clone());
            }
            Self::Pmem(pmem) => config.pmem.get_or_insert_default().push(pmem.clone()),
            Self::User(device) => config.user_devices.get_or_insert_default().push(device.clone()),
            Self::Vdpa(vdpa) => config.vdpa.get_or_insert_default().push(vdpa.clone()),
            Self::Vsock(vsock) => {
                if let Some(VsockConfig { id, .. }) = &config.vsock {
                    let id = id.clone().unwrap_or_default();
                    return Err(ConfigError::SecondVsock { id });
                }
                config.vsock = Some(vsock.clone());
            }
        }
        let config = config.complete_with(|config| match &self {
            Self::Net(_) => config.net.iter().flatten().last().map_or(Ok(()), check_mac),
            _ => Ok(()),
        })?;
        let last = match &self {
            Self::Host(_) => config.devices.iter().flatten().last().cloned().map(Self::Host),
            Self::Disk(_) => config.disks.iter().flatten().last().cloned().map(Self::Disk),
            Self::Net(_) => config.net.iter().flatten().last().cloned().map(Self::Net),
            Self::Fs(_) => config.fs.iter().flatten().last().cloned().map(Self::Fs),
            Self::GenericVhostUser(_) => {
                let last = config.generic_vhost_user.iter().flatten().last();
                last.cloned().map(Self::GenericVhostUser)
            }
            Self::User(_) => config.user_devices.iter().flatten().last().cloned().map(Self::User),
            Self::Vdpa(_) => config.vdpa.iter().flatten().last().cloned().map(Self::Vdpa),
            Self::Vsock(_) => config.vsock.clone().map(Self::Vsock),
            Self::Pmem(_) => config.pmem.iter().flatten().last().cloned().map(Self::Pmem),
        };
        Ok((config, last.unwrap_or(self)))
    }
}

/// Removes the matching elements from a list; returns whether there was one.
fn take_out<T>(list: &mut Option<Vec<T>>, is_meant: impl Fn(&T) -> bool) -> bool {
    let Some(elements) = list else { return false };
    let before = elements.len();
    elements.retain(|element| !is_meant(element));
    let found = elements.len() != before;
    if elements.is_empty() {
        *list = None;
    }
    found
}

impl VmConfig {
    /// The configuration without a device; `None` if there is no such hot-pluggable device.
    #[must_use]
    pub fn without(&self, id: &str) -> Option<Self> {
        let mut config = self.clone();
        let is = |other: &Option<String>| other.as_deref() == Some(id);
        let found = take_out(&mut config.devices, |device| is(&device.id))
            | take_out(&mut config.disks, |disk| is(&disk.id))
            | take_out(&mut config.net, |net| is(&net.id))
            | take_out(&mut config.fs, |fs| is(&fs.id))
            | take_out(&mut config.generic_vhost_user, |device| is(&device.id))
            | take_out(&mut config.pmem, |pmem| is(&pmem.id))
            | take_out(&mut config.user_devices, |device| is(&device.id))
            | take_out(&mut config.vdpa, |vdpa| is(&vdpa.id))
            | config.vsock.take_if(|vsock| is(&vsock.id)).is_some();
        found.then_some(config)
    }

    /// Ids of the hot-pluggable devices that `other` lacks.
    #[must_use]
    pub fn ids_not_in(&self, other: &Self) -> Vec<String> {
        let ids = |config: &Self| -> Vec<String> {
            let disks = config.disks.iter().flatten().filter_map(|disk| disk.id.clone());
            let nets = config.net.iter().flatten().filter_map(|net| net.id.clone());
            let fs = config.fs.iter().flatten().filter_map(|fs| fs.id.clone());
            let generic = config.generic_vhost_user.iter().flatten();
            let fs = fs.chain(generic.filter_map(|device| device.id.clone()));
            let fs = fs.chain(config.pmem.iter().flatten().filter_map(|pmem| pmem.id.clone()));
            let devices = config.devices.iter().flatten().filter_map(|device| device.id.clone());
            let vdpas = config.vdpa.iter().flatten().filter_map(|vdpa| vdpa.id.clone());
            let users = config.user_devices.iter().flatten();
            let users = users.filter_map(|device| device.id.clone());
            let devices = devices.chain(vdpas).chain(users);
            let vsock = config.vsock.iter().filter_map(|vsock| vsock.id.clone());
            disks.chain(nets).chain(fs).chain(devices).chain(vsock).collect()
        };
        let others = ids(other);
        ids(self).into_iter().filter(|id| !others.contains(id)).collect()
    }

    /// Records where persistent memory is and how long, so that both stay.
    pub fn settle_pmem(&mut self, id: &str, gpa: u64, len_bytes: u64) {
        for pmem in self.pmem.iter_mut().flatten().filter(|pmem| pmem.id.as_deref() == Some(id)) {
            (pmem.gpa, pmem.size) = (Some(gpa), Some(len_bytes));
        }
    }

    /// Records the PCI device number of a device in the configuration.
    pub fn set_pci_device_id(&mut self, id: &str, number: u8) {
        let disks = self.disks.iter_mut().flatten().map(|disk| (&disk.id, &mut disk.pci_device_id));
        let nets = self.net.iter_mut().flatten().map(|net| (&net.id, &mut net.pci_device_id));
        let fs = self.fs.iter_mut().flatten().map(|fs| (&fs.id, &mut fs.pci_device_id));
        let generic = self.generic_vhost_user.iter_mut().flatten();
        let fs = fs.chain(generic.map(|device| (&device.id, &mut device.pci_device_id)));
        let pmems = self.pmem.iter_mut().flatten().map(|pmem| (&pmem.id, &mut pmem.pci_device_id));
        let fs = fs.chain(pmems);
        let devices = self.devices.iter_mut().flatten();
        let devices = devices.map(|device| (&device.id, &mut device.pci_device_id));
        let vdpas = self.vdpa.iter_mut().flatten().map(|vdpa| (&vdpa.id, &mut vdpa.pci_device_id));
        let users = self.user_devices.iter_mut().flatten();
        let users = users.map(|device| (&device.id, &mut device.pci_device_id));
        let devices = devices.chain(vdpas).chain(users);
        let balloon = self.balloon.iter_mut().map(|it| (&it.id, &mut it.pci_device_id));
        let vsock = self.vsock.iter_mut().map(|it| (&it.id, &mut it.pci_device_id));
        let rtc = self.rtc.iter_mut().map(|it| (&it.id, &mut it.pci_device_id));
        let single = balloon.chain(vsock).chain(rtc);
        let others = [
            (&self.console.id, &mut self.console.pci_device_id),
            (&self.rng.id, &mut self.rng.pci_device_id),
        ];
        for (other, wish) in disks.chain(nets).chain(fs).chain(devices).chain(single).chain(others)
        {
            if other.as_deref() == Some(id) {
                *wish = Some(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    fn config() -> VmConfig {
        let json = serde_json::json!({
            "payload": {"kernel": "/k"},
            "disks": [{"path": "/a"}, {"path": "/b", "id": "data"}],
            "balloon": {"size": 0},
        });
        serde_json::from_value::<VmConfig>(json).unwrap().complete().unwrap()
    }

    fn disk(json: serde_json::Value) -> NewDevice {
        NewDevice::Disk(serde_json::from_value(json).unwrap())
    }

    fn host(json: serde_json::Value) -> NewDevice {
        NewDevice::Host(serde_json::from_value(json).unwrap())
    }

    #[test]
    fn what_is_added_is_complete_and_can_be_taken_out_again() {
        let before = config();
        let (config, added) = disk(serde_json::json!({"path": "/c"})).add_to(&before).unwrap();
        assert!(!added.id().is_empty());
        assert_eq!(config.disks.as_ref().unwrap().len(), 3);
        assert_eq!(config.without(added.id()).unwrap(), before);
        let device = host(serde_json::json!({"path": "/sys/d", "id": "gpu"}));
        let (config, added) = device.add_to(&before).unwrap();
        assert_eq!(added.id(), "gpu");
        assert_eq!(config.without("gpu").unwrap(), before, "no empty list stays");
    }

    #[test]
    fn there_is_one_socket_device_and_it_can_go() {
        let before = config();
        let vsock = |cid: u64| {
            let json = serde_json::json!({"cid": cid, "socket": "/s", "pci_device_id": 9});
            NewDevice::Vsock(serde_json::from_value(json).unwrap())
        };
        let (config, added) = vsock(3).add_to(&before).unwrap();
        let id = added.id();
        assert!(id.starts_with("_vsock"), "{id}");
        assert_eq!(config.ids_not_in(&before), [id]);
        let error = vsock(4).add_to(&config).unwrap_err();
        assert_eq!(error, ConfigError::SecondVsock { id: id.to_owned() });
        let error = disk(serde_json::json!({"path": "/c", "pci_device_id": 9})).add_to(&config);
        assert_eq!(error.unwrap_err(), ConfigError::DuplicateSlot { segment: 0, slot: 9 });
        let mut settled = config.clone();
        settled.set_pci_device_id(id, 12);
        assert_eq!(settled.vsock.unwrap().pci_device_id, Some(12));
        assert_eq!(config.without(id).unwrap(), before);
    }

    #[test]
    fn what_another_process_serves_comes_and_goes_if_memory_is_shared() {
        let fs = serde_json::json!({"tag": "t", "socket": "/s", "num_queues": 1, "queue_size": 64});
        let generic = serde_json::json!({"socket": "/s", "queue_sizes": [64], "device_type": 26});
        let devices = [
            (NewDevice::Fs(serde_json::from_value(fs).unwrap()), "_fs"),
            (
                NewDevice::GenericVhostUser(serde_json::from_value(generic).unwrap()),
                "_generic_vhost_user",
            ),
        ];
        for (device, prefix) in devices {
            let private = config();
            let error = device.clone().add_to(&private).unwrap_err().to_string();
            assert!(error.contains("needs --memory shared=on"), "{error}");
            let mut before = private;
            before.memory.shared = true;
            let (config, added) = device.add_to(&before).unwrap();
            let id = added.id().to_owned();
            assert!(id.starts_with(prefix), "{id}");
            assert_eq!(config.ids_not_in(&before), [id.as_str()]);
            let mut settled = config.clone();
            settled.set_pci_device_id(&id, 12);
            let places = settled.pci_places();
            let place = places.iter().find(|place| *place.id == Some(id.clone())).unwrap();
            assert_eq!((place.segment, place.number), (0, Some(12)));
            assert_eq!(config.without(&id).unwrap(), before);
        }
    }

    #[test]
    fn names_places_and_hosts_devices_are_given_once() {
        let (config, _) = host(serde_json::json!({"path": "/sys/d", "pci_device_id": 9}))
            .add_to(&config())
            .unwrap();
        let refused = |device: NewDevice| device.add_to(&config).unwrap_err();
        let error = refused(disk(serde_json::json!({"path": "/c", "id": "data"})));
        assert_eq!(error, ConfigError::DuplicateId { id: "data".into() });
        let error = refused(disk(serde_json::json!({"path": "/c", "pci_device_id": 9})));
        assert_eq!(error, ConfigError::DuplicateSlot { segment: 0, slot: 9 });
        let error = refused(host(serde_json::json!({"path": "/sys/d"})));
        assert_eq!(error, ConfigError::DuplicatePath { path: "/sys/d".into() });
        assert!(matches!(refused(host(serde_json::json!({}))), ConfigError::Device { .. }));
    }

    /// A guest may run with what only an earlier version accepted.
    #[test]
    fn a_guest_that_has_begun_with_what_is_refused_now_is_given_devices() {
        let json = serde_json::json!({
            "payload": {"kernel": "/k"},
            "memory": {"size": 0, "zones": [{"id": "__x", "size": 1 << 30}]},
            "net": [{"mac": "00:00:00:00:00:00"}],
        });
        let json = serde_json::from_value::<VmConfig>(json).unwrap();
        assert!(json.clone().complete().is_err());
        let begun = json.complete_begun().unwrap();
        let (config, _) = disk(serde_json::json!({"path": "/c"})).add_to(&begun).unwrap();
        let net = |mac: &str| {
            let net = serde_json::json!({"mac": mac, "id": "new"});
            NewDevice::Net(serde_json::from_value(net).unwrap())
        };
        net("02:00:00:00:00:01").add_to(&config).unwrap();
        let error = net("00:00:00:00:00:00").add_to(&config).unwrap_err();
        assert!(error.to_string().contains("'new'"), "{error}");
        let error = disk(serde_json::json!({"path": "/d", "id": "__d"})).add_to(&config);
        assert_eq!(error.unwrap_err(), ConfigError::ReservedId { id: "__d".into() });
    }

    #[test]
    fn numbers_stay_whichever_device_goes() {
        let mut config = config();
        for (id, number) in [("data", 4), ("__console", 1), ("__rng", 5), ("__balloon", 6)] {
            config.set_pci_device_id(id, number);
        }
        assert_eq!(config.disks.as_ref().unwrap()[1].pci_device_id, Some(4));
        assert_eq!(config.disks.as_ref().unwrap()[0].pci_device_id, None);
        assert_eq!(config.rng.pci_device_id, Some(5));
        assert_eq!(config.console.pci_device_id, Some(1));
        assert_eq!(config.balloon.as_ref().unwrap().pci_device_id, Some(6));
        assert!(config.clone().complete().is_ok());
        assert_eq!(config.without("__rng"), None);
        assert_eq!(config.without("absent"), None);
    }
}
