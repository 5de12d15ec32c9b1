// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtual IOMMU across the families of a configuration: whether there is one, and what may be behind it.
//!
//! Owns the rules. A device is behind the IOMMU if it says so (`iommu=on`). The segments that `iommu_segments` names
//! have no other devices, and only there such devices are added while the guest runs: its tables tell at boot what is
//! behind the IOMMU. It must never place a device.

use super::disk::OnFull;
use super::error::ConfigError;
use super::segments::PciPlace;
use super::vm::VmConfig;

impl VmConfig {
    /// The segments whose devices are all behind the IOMMU.
    pub fn iommu_segments(&self) -> &[u16] {
        let platform = self.platform.as_ref();
        platform.and_then(|platform| platform.iommu_segments.as_deref()).unwrap_or_default()
    }

    /// Bits of the addresses that the IOMMU translates.
    pub fn iommu_address_bits(&self) -> u8 {
        self.platform.as_ref().map_or(64, |platform| platform.iommu_address_width_bits)
    }

    /// Ids of the devices behind the IOMMU that are named to the guest one by one.
    pub fn named_behind_iommu(&self) -> Vec<&str> {
        let is_named =
            |place: &PciPlace<'_>| place.iommu && !self.iommu_segments().contains(&place.segment);
        let places = self.pci_places().into_iter().filter(is_named);
        places.map(|place| place.id.as_deref().unwrap_or_default()).collect()
    }

    pub(super) fn needs_iommu(&self) -> bool {
        !self.iommu_segments().is_empty() || self.pci_places().iter().any(|place| place.iommu)
    }

    pub(super) fn check_iommu(&self) -> Result<(), ConfigError> {
        let segments = self.iommu_segments();
        let of_platform = |problem| ConfigError::Device {
            what: "platform",
            id: String::new(),
            problem: format!("iommu_segments: {problem}"),
        };
        if let Some(missing) = segments.iter().find(|it| **it >= self.pci_segments_count()) {
            let count = self.pci_segments_count();
            let problem = format!("there is no PCI segment {missing} (num_pci_segments={count})");
            return Err(of_platform(problem));
        }
        if segments.contains(&0) {
            let problem = "segment 0 has the IOMMU itself; give the devices behind it another one";
            return Err(of_platform(problem.to_owned()));
        }
        for place in self.pci_places() {
            self.check_place_behind(place)?;
        }
        Ok(())
    }

    fn check_place_behind(&self, place: PciPlace<'_>) -> Result<(), ConfigError> {
        let PciPlace { family, id, segment, iommu, .. } = place;
        let refuse = |problem: String| {
            let id = id.clone().unwrap_or_default();
            Err(ConfigError::Device { what: family, id, problem })
        };
        let is_meant = |other: &Option<String>| other == id;
        let mut disks = self.disks.iter().flatten().filter(|disk| is_meant(&disk.id));
        let mut served = self.vhost_user_devices().into_iter();
        let is_served = served.any(|(_, other)| Some(other) == id.as_deref());
        if iommu && is_served {
            return refuse(
                "iommu=on is not possible with vhost_user=on: the back end reads guest memory \
                 itself; leave one of them out"
                    .to_owned(),
            );
        }
        if iommu && disks.any(|disk| disk.on_full == OnFull::Pause) {
            return refuse(
                "iommu=on is not possible with on_full=pause: requests that wait would keep the \
                 guest's driver from removing mappings; use on_full=report"
                    .to_owned(),
            );
        }
        if !iommu && self.iommu_segments().contains(&segment) {
            let can =
                matches!(family, "disk" | "net" | "pmem" | "vsock" | "rng" | "rtc" | "console");
            let remedy =
                if can && !is_served { "give it iommu=on, or" } else { "it cannot be there:" };
            return refuse(format!(
                "PCI segment {segment} is behind the IOMMU (iommu_segments): {remedy} use another segment"
            ));
        }
        Ok(())
    }

    /// Whether a device may be added to the running guest, as far as the IOMMU is concerned.
    pub(super) fn check_added_behind(&self, id: &str) -> Result<(), ConfigError> {
        if !self.named_behind_iommu().contains(&id) {
            return Ok(());
        }
        let problem = "with iommu=on it can only be added in a segment that was behind the IOMMU at \
                       boot: name one in --platform iommu_segments, and give it as pci_segment";
        let places = self.pci_places();
        let place = places.iter().find(|place| place.id.as_deref() == Some(id));
        let what = place.map_or("device", |place| place.family);
        Err(ConfigError::Device { what, id: id.to_owned(), problem: problem.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;
    use crate::config::NewDevice;

    fn complete(more: &Value) -> Result<VmConfig, String> {
        let mut json =
            json!({"payload": {"kernel": "/k"}, "memory": {"size": 1 << 30, "shared": true}});
        json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = serde_json::from_value::<VmConfig>(json).map_err(|error| error.to_string())?;
        config.complete().map_err(|error| error.to_string())
    }

    fn segments() -> Value {
        json!({"num_pci_segments": 3, "iommu_segments": [2], "iommu_address_width_bits": 48})
    }

    #[test]
    fn each_device_that_can_be_behind_it_brings_one() {
        assert!(!complete(&json!({})).unwrap().iommu);
        for device in [
            json!({"disks": [{"path": "/d", "id": "it", "iommu": true}]}),
            json!({"net": [{"tap": "t", "id": "it", "iommu": true}]}),
            json!({"pmem": [{"file": "/p", "id": "it", "iommu": true}]}),
            json!({"vsock": {"cid": 3, "socket": "/v", "id": "it", "iommu": true}}),
            json!({"rng": {"src": "/r", "id": "it", "iommu": true}}),
            json!({"console": {"mode": "Null", "id": "it", "iommu": true}}),
            json!({"rtc": {"id": "it", "iommu": true}}),
        ] {
            let config = complete(&device).unwrap();
            assert!(config.iommu, "{device}");
            assert_eq!(config.named_behind_iommu(), ["it"], "{device}");
            assert_eq!(config.iommu_address_bits(), 64);
        }
        let config = complete(&json!({"platform": segments()})).unwrap();
        assert!(config.iommu && config.named_behind_iommu().is_empty());
        assert_eq!((config.iommu_segments(), config.iommu_address_bits()), (&[2][..], 48));
        assert!(complete(&json!({"iommu": true})).unwrap().iommu);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let disk = |more: Value| {
            let mut disk = json!({"path": "/d", "id": "data"});
            disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"platform": segments(), "disks": [disk]})
        };
        let served = json!({"vhost_user": true, "path": null, "vhost_socket": "/s", "iommu": true});
        let fs = json!({"tag": "t", "socket": "/s", "num_queues": 1, "queue_size": 64, "pci_segment": 2});
        for (config, why) in [
            (disk(json!({"pci_segment": 2})), "disk 'data': PCI segment 2 is behind the IOMMU"),
            (disk(json!({"iommu": true, "on_full": "Pause"})), "not possible with on_full=pause"),
            (disk(served), "not possible with vhost_user=on"),
            (json!({"platform": segments(), "fs": [fs]}), "it cannot be there"),
            (json!({"platform": {"iommu_segments": [0]}}), "segment 0 has the IOMMU itself"),
            (json!({"platform": {"iommu_segments": [1]}}), "there is no PCI segment 1"),
            (json!({"platform": {"iommu_address_width_bits": 65}}), "iommu_address_width"),
            (json!({"balloon": {"size": 0, "iommu": true}}), "balloon.iommu"),
            (json!({"devices": [{"path": "/d", "iommu": true}]}), "devices[0].iommu"),
        ] {
            let error = complete(&config).unwrap_err();
            assert!(error.contains(why), "{config}: {error}");
        }
        complete(&disk(json!({"pci_segment": 2, "iommu": true}))).unwrap();
        complete(&disk(json!({"pci_segment": 1, "iommu": true}))).unwrap();
    }

    #[test]
    fn devices_behind_it_are_added_where_the_guest_expects_them() {
        let config = complete(&json!({"platform": segments()})).unwrap();
        let add = |segment: u16, iommu: bool| {
            let disk = json!({"path": "/d", "pci_segment": segment, "iommu": iommu});
            NewDevice::Disk(serde_json::from_value(disk).unwrap())
        };
        // Before the guest is there, its tables can still name any.
        assert!(add(1, true).add_to(&config).is_ok());
        let add = |segment, iommu| add(segment, iommu).add_to_running(&config);
        add(2, true).unwrap();
        add(1, false).unwrap();
        let error = add(1, true).unwrap_err().to_string();
        assert!(error.contains("can only be added in a segment that was behind"), "{error}");
        assert!(add(2, false).unwrap_err().to_string().contains("give it iommu=on"));
    }
}
