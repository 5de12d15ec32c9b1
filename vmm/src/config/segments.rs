// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI segments across the families of a configuration: which device is on which, and with which number.
//!
//! Owns the rules for them, and the shares of the device windows that segments ask for. It must never place a
//! device.

use std::collections::BTreeSet;

use super::error::ConfigError;
use super::platform::{PciSegmentConfig, PlatformConfig};
use super::vm::VmConfig;

/// Most PCI segments of a machine, as many as cloud-hypervisor has: their configuration space and their ACPI
/// tables fit.
pub const PCI_SEGMENTS_MAX: u16 = 96;

/// Where a device asks to be on the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciPlace<'a> {
    /// Option family of the device.
    pub family: &'static str,
    /// Id of the device, once completed.
    pub id: &'a Option<String>,
    /// Its segment.
    pub segment: u16,
    /// Its device number, if it asks for one or has one.
    pub number: Option<u8>,
    /// Whether it asks to be behind the IOMMU.
    pub iommu: bool,
}

/// Weights of the segments, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApertureWeights {
    /// Shares of the window below 4 GiB.
    pub mmio32: Vec<u32>,
    /// Shares of the window for 64-bit BARs.
    pub mmio64: Vec<u32>,
}

impl VmConfig {
    /// Number of PCI segments.
    pub fn pci_segments_count(&self) -> u16 {
        self.platform.as_ref().map_or(1, |platform| platform.num_pci_segments)
    }

    /// The weights of all segments: 1 for those that are not configured. Of two entries for one segment the last
    /// one counts.
    pub fn aperture_weights(&self) -> ApertureWeights {
        let ones = || vec![1; usize::from(self.pci_segments_count())];
        let mut weights = ApertureWeights { mmio32: ones(), mmio64: ones() };
        for segment in self.pci_segments.iter().flatten() {
            let at = usize::from(segment.pci_segment);
            if let Some(weight) = weights.mmio32.get_mut(at) {
                *weight = segment.mmio32_aperture_weight;
            }
            if let Some(weight) = weights.mmio64.get_mut(at) {
                *weight = segment.mmio64_aperture_weight;
            }
        }
        weights
    }

    /// The devices that have a place on the PCI bus.
    pub fn pci_places(&self) -> Vec<PciPlace<'_>> {
        let mut places = Vec::new();
        let mut push = |family, id, segment, number, iommu| {
            places.push(PciPlace { family, id, segment, number, iommu });
        };
        for disk in self.disks.iter().flatten() {
            push("disk", &disk.id, disk.pci_segment, disk.pci_device_id, disk.iommu);
        }
        for net in self.net.iter().flatten() {
            push("net", &net.id, net.pci_segment, net.pci_device_id, net.iommu);
        }
        for fs in self.fs.iter().flatten() {
            push("fs", &fs.id, fs.pci_segment, fs.pci_device_id, false);
        }
        for it in self.generic_vhost_user.iter().flatten() {
            push("generic-vhost-user", &it.id, it.pci_segment, it.pci_device_id, false);
        }
        for pmem in self.pmem.iter().flatten() {
            push("pmem", &pmem.id, pmem.pci_segment, pmem.pci_device_id, pmem.iommu);
        }
        for vdpa in self.vdpa.iter().flatten() {
            push("vdpa", &vdpa.id, vdpa.pci_segment, vdpa.pci_device_id, vdpa.iommu);
        }
        for device in self.user_devices.iter().flatten() {
            push("user-device", &device.id, device.pci_segment, device.pci_device_id, false);
        }
        for device in self.devices.iter().flatten() {
            push("device", &device.id, device.pci_segment, device.pci_device_id, device.iommu);
        }
        push(
            "console",
            &self.console.id,
            self.console.pci_segment,
            self.console.pci_device_id,
            self.console.iommu,
        );
        push("rng", &self.rng.id, self.rng.pci_segment, self.rng.pci_device_id, self.rng.iommu);
        if let Some(balloon) = &self.balloon {
            push("balloon", &balloon.id, balloon.pci_segment, balloon.pci_device_id, balloon.iommu);
        }
        if let Some(vsock) = &self.vsock {
            push("vsock", &vsock.id, vsock.pci_segment, vsock.pci_device_id, vsock.iommu);
        }
        if let Some(rtc) = &self.rtc {
            push("rtc", &rtc.id, rtc.pci_segment, rtc.pci_device_id, rtc.iommu);
        }
        places
    }

    /// Refuses segments that do not exist, and a device number that two devices of a segment ask for.
    pub(super) fn check_slots(&self) -> Result<(), ConfigError> {
        let count = self.pci_segments_count();
        let missing = |what, id: String, segment| {
            let last = count.saturating_sub(1);
            let there = if last == 0 {
                "segment 0 is the only one".to_owned()
            } else {
                format!("the segments are 0 to {last}")
            };
            let problem = format!(
                "there is no PCI segment {segment}: {there} (--platform num_pci_segments={count})"
            );
            ConfigError::Device { what, id, problem }
        };
        for PciSegmentConfig { pci_segment, .. } in self.pci_segments.iter().flatten() {
            if *pci_segment >= count {
                return Err(missing("pci-segment", String::new(), *pci_segment));
            }
        }
        let mut slots = BTreeSet::new();
        for PciPlace { family, id, segment, number, .. } in self.pci_places() {
            if segment >= count {
                return Err(missing(family, id.clone().unwrap_or_default(), segment));
            }
            if let Some(slot) = number
                && !slots.insert((segment, slot))
            {
                return Err(ConfigError::DuplicateSlot { segment, slot });
            }
        }
        Ok(())
    }
}

impl PciSegmentConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let zero = if self.mmio32_aperture_weight == 0 {
            "mmio32_aperture_weight"
        } else if self.mmio64_aperture_weight == 0 {
            "mmio64_aperture_weight"
        } else {
            return Ok(());
        };
        let id = self.pci_segment.to_string();
        let problem = format!("{zero} is 0, and has to be at least 1");
        Err(ConfigError::Device { what: "pci-segment", id, problem })
    }
}

impl PlatformConfig {
    /// Refuses a number of segments that no machine has.
    pub(super) fn check_segments(&self) -> Result<(), ConfigError> {
        if (1..=PCI_SEGMENTS_MAX).contains(&self.num_pci_segments) {
            return Ok(());
        }
        let problem =
            format!("num_pci_segments={} is not 1 to {PCI_SEGMENTS_MAX}", self.num_pci_segments);
        Err(ConfigError::Device { what: "platform", id: String::new(), problem })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

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

    fn four() -> Value {
        json!({"num_pci_segments": 4})
    }

    #[test]
    fn every_kind_of_device_has_a_segment() {
        let at = |mut device: Value, segment: u16| {
            device["pci_segment"] = segment.into();
            device
        };
        let devices = |segment| {
            json!({
                "platform": four(),
                "disks": [at(json!({"path": "/d"}), segment)],
                "net": [at(json!({"tap": "t"}), segment)],
                "fs": [at(json!({"tag": "t", "socket": "/s", "num_queues": 1, "queue_size": 64}), segment)],
                "generic_vhost_user":
                    [at(json!({"socket": "/s", "queue_sizes": [64], "device_type": 26}), segment)],
                "devices": [at(json!({"path": "/sys/d"}), segment)],
                "vdpa": [at(json!({"path": "/dev/v", "num_queues": 1}), segment)],
                "vsock": at(json!({"cid": 3, "socket": "/v"}), segment),
                "rng": at(json!({"src": "/dev/urandom"}), segment),
                "console": at(json!({"mode": "Null"}), segment),
                "balloon": at(json!({"size": 0}), segment),
            })
        };
        let config = complete(&devices(3)).unwrap();
        let places = config.pci_places();
        assert_eq!(places.len(), 10);
        assert!(places.iter().all(|place| place.segment == 3), "{places:?}");
        for (family, place) in devices(4).as_object().unwrap() {
            if family == "platform" {
                continue;
            }
            let error = complete(&json!({"platform": four(), family: place})).unwrap_err();
            assert!(error.contains("no PCI segment 4: the segments are 0 to 3"), "{error}");
        }
    }

    #[test]
    fn what_there_is_not_is_refused_by_name() {
        let disk = |segment: u16| json!([{"path": "/d", "id": "data", "pci_segment": segment}]);
        for (config, why) in [
            (
                json!({"disks": disk(1)}),
                "disk 'data': there is no PCI segment 1: segment 0 is the only",
            ),
            (json!({"platform": {"num_pci_segments": 0}}), "num_pci_segments=0 is not 1 to 96"),
            (json!({"platform": {"num_pci_segments": 97}}), "num_pci_segments=97 is not 1 to 96"),
            (
                json!({"pci_segments": [{"pci_segment": 1}]}),
                "pci-segment: there is no PCI segment 1",
            ),
            (
                json!({"pci_segments": [{"pci_segment": 0, "mmio32_aperture_weight": 0}]}),
                "pci-segment '0': mmio32_aperture_weight is 0",
            ),
            (
                json!({"pci_segments": [{"pci_segment": 0, "mmio64_aperture_weight": 0}]}),
                "pci-segment '0': mmio64_aperture_weight is 0",
            ),
            (
                json!({"platform": {"iommu_segments": [1]}}),
                "iommu_segments: there is no PCI segment 1",
            ),
        ] {
            let error = complete(&config).unwrap_err();
            assert!(error.contains(why), "{config}: {error}");
        }
        complete(&json!({"platform": {"num_pci_segments": 96}, "disks": disk(95)})).unwrap();
    }

    #[test]
    fn numbers_are_given_once_in_each_segment() {
        let disk = |id: &str, segment: u16| json!({"path": format!("/{id}"), "id": id, "pci_segment": segment, "pci_device_id": 5});
        let disks = |disks: Value| json!({"platform": four(), "disks": disks});
        let config = complete(&disks(json!([disk("a", 0), disk("b", 1)]))).unwrap();
        let error = complete(&disks(json!([disk("a", 2), disk("b", 2)]))).unwrap_err();
        assert!(error.contains("pci_device_id 5 is used twice in PCI segment 2"), "{error}");
        let add = |segment: u16| {
            let disk = serde_json::from_value(disk("c", segment)).unwrap();
            NewDevice::Disk(disk).add_to(&config)
        };
        add(3).unwrap();
        assert_eq!(add(1).unwrap_err(), ConfigError::DuplicateSlot { segment: 1, slot: 5 });
        assert!(add(4).unwrap_err().to_string().contains("no PCI segment 4"));
    }

    #[test]
    fn weights_are_one_unless_given() {
        let config = complete(&json!({
            "platform": four(),
            "pci_segments": [
                {"pci_segment": 2, "mmio64_aperture_weight": 7},
                {"pci_segment": 1, "mmio32_aperture_weight": 9},
                {"pci_segment": 1, "mmio32_aperture_weight": 3},
            ],
        }));
        let weights = config.unwrap().aperture_weights();
        assert_eq!(weights.mmio32, [1, 3, 1, 1]);
        assert_eq!(weights.mmio64, [1, 1, 7, 1]);
        let one = complete(&json!({})).unwrap().aperture_weights();
        assert_eq!((one.mmio32, one.mmio64), (vec![1], vec![1]));
    }
}
