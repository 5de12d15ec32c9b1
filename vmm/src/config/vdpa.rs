// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--vdpa`: devices of the host that serve virtqueues themselves (vDPA).
//!
//! Owns the family and the rules within it. It must never look at the device.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::codec::{File, Id, Int, One, Opt, Toggle};
use super::error::ConfigError;
use super::family::option_family;
use super::vm::VmConfig;

/// Queues that a device can have, as one of several queues.
pub const MAX_QUEUES: u16 = 254;

option_family! {
    /// A vDPA device: one of the host that serves virtqueues itself.
    VdpaConfig "vdpa" {
        /// Path of the device (/dev/vhost-vdpa-N).
        path: PathBuf = PathBuf::new(), "path" as One<File>, required();
        /// Number of queues.
        num_queues: u16 = 1, "num_queues" as One<Int>, required_json();
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>, unsupported();
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
    }
}

impl VdpaConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let problem = if self.path.as_os_str().is_empty() {
            "needs a path".to_owned()
        } else if !(1..=MAX_QUEUES).contains(&self.num_queues) {
            format!("num_queues={} is not 1 to {MAX_QUEUES}", self.num_queues)
        } else {
            return Ok(());
        };
        Err(self.refused(problem))
    }

    fn refused(&self, problem: String) -> ConfigError {
        let id = self.id.clone().unwrap_or_default();
        ConfigError::Device { what: "vdpa", id, problem }
    }
}

impl VmConfig {
    /// A vDPA device reaches memory that is mapped for it when it starts, and no other.
    pub(super) fn check_vdpa(&self) -> Result<(), ConfigError> {
        let mut users = BTreeMap::new();
        for vdpa in self.vdpa.iter().flatten() {
            // Normalised, without doubled slashes and dots.
            let path: PathBuf = vdpa.path.components().collect();
            let what = format!("the device {}", path.display());
            let second = vdpa.id.clone().unwrap_or_default();
            if let Some(first) = users.insert(path, second.clone()) {
                return Err(ConfigError::InUse { what, first, second });
            }
        }
        let Some(vdpa) = self.vdpa.iter().flatten().next() else { return Ok(()) };
        let refuse = |problem: &str| Err(vdpa.refused(problem.to_owned()));
        if self.pmem.iter().flatten().next().is_some() {
            return refuse(
                "persistent memory and vDPA devices are not possible in one VM: the devices could not reach it",
            );
        }
        if self.memory.has_hotplugged() {
            return refuse(
                "memory that was added (hotplugged_size) and vDPA devices are not possible in one VM: memory can \
                 neither come nor go while it is mapped for them",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Family as _, NewDevice};

    fn complete(options: &Value) -> Result<VmConfig, String> {
        let mut json = json!({ "payload": { "kernel": "/k" } });
        json.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        let config = serde_json::from_value::<VmConfig>(json).unwrap();
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn a_device_has_a_path_queues_and_a_name() {
        let device = VdpaConfig::parse("path=/dev/vhost-vdpa-0,num_queues=3").unwrap();
        assert_eq!((device.path.to_str().unwrap(), device.num_queues), ("/dev/vhost-vdpa-0", 3));
        assert_eq!(VdpaConfig::parse("path=/v").unwrap().num_queues, 1);
        let two = json!([{ "path": "/a", "num_queues": 1 }, { "path": "/b", "num_queues": 254, "id": "b" }]);
        let config = complete(&json!({ "vdpa": two })).unwrap();
        let ids = config.vdpa.iter().flatten().map(|vdpa| vdpa.id.clone().unwrap());
        assert_eq!(ids.collect::<Vec<_>>(), ["_vdpa0", "b"]);
        let one = |options: &Value| complete(&json!({ "vdpa": [options] })).unwrap_err();
        for (options, why) in [
            (json!({ "path": "", "num_queues": 1 }), "needs a path"),
            (json!({ "path": "/a", "num_queues": 0 }), "num_queues=0"),
            (json!({ "path": "/a", "num_queues": 255 }), "num_queues=255"),
            (json!({ "path": "/a", "num_queues": 1, "iommu": true }), "iommu"),
            (json!({ "path": "/a", "num_queues": 1, "id": "__rng" }), "__rng"),
        ] {
            let error = one(&options);
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_device_is_of_one_device_of_the_vm() {
        let two =
            json!([{ "path": "/dev/v", "num_queues": 1 }, { "path": "/dev//v", "num_queues": 1 }]);
        let error = complete(&json!({ "vdpa": two })).unwrap_err();
        assert!(error.contains("the device /dev/v") && error.contains("_vdpa1"), "{error}");
    }

    #[test]
    fn memory_that_a_device_cannot_be_given_is_refused() {
        let vdpa = json!([{ "path": "/v", "num_queues": 1, "id": "v" }]);
        for (options, why) in [
            (json!({ "pmem": [{ "file": "/p" }] }), "persistent memory"),
            (
                json!({ "memory": { "size": 1 << 30, "hotplug_size": 1 << 30, "hotplugged_size": 1 << 27 } }),
                "hotplugged_size",
            ),
            (
                json!({ "memory": { "size": 0, "hotplug_method": "VirtioMem", "zones":
                    [{ "id": "a", "size": 1 << 30, "hotplug_size": 1 << 30, "hotplugged_size": 1 << 27 }] } }),
                "hotplugged_size",
            ),
        ] {
            let mut with = options.clone();
            with.as_object_mut().unwrap().insert("vdpa".to_owned(), vdpa.clone());
            let error = complete(&with).unwrap_err();
            assert!(error.contains(why) && error.contains("'v'"), "{error}");
            // And when it is added.
            let config = complete(&options).unwrap();
            let added = serde_json::from_value(vdpa[0].clone()).unwrap();
            let error = NewDevice::Vdpa(added).add_to(&config).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        // Memory that may be added, but is not there.
        let grows = json!({ "size": 1 << 30, "hotplug_size": 1 << 30 });
        complete(&json!({ "memory": grows, "vdpa": vdpa })).unwrap();
    }

    #[test]
    fn a_device_can_be_added_and_removed() {
        let config = complete(&json!({})).unwrap();
        let added = VdpaConfig::parse("path=/v").unwrap();
        let (mut config, device) = NewDevice::Vdpa(added).add_to(&config).unwrap();
        assert_eq!(device.id(), "_vdpa0");
        config.set_pci_device_id("_vdpa0", 7);
        assert_eq!(config.vdpa.as_ref().unwrap()[0].pci_device_id, Some(7));
        let without = config.without("_vdpa0").unwrap();
        assert_eq!(without.vdpa, None);
        assert_eq!(config.ids_not_in(&without), ["_vdpa0"]);
    }
}
