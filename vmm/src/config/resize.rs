// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bodies of `vm.resize`, `vm.resize-zone` and `vm.resize-disk`, and what the first two do to a VM that is
//! configured and not booted.
//!
//! Owns their definitions. An omitted field leaves the value unchanged.

use super::VmConfig;
use super::codec::JsonOnly;
use super::cpus::MAX_VCPUS;
use super::error::ConfigError;
use super::family::option_family;

option_family! {
    /// New sizes of a VM's resources.
    VmResize "resize" {
        /// Number of vCPUs.
        desired_vcpus: Option<u32> = None, "" as JsonOnly;
        /// Size of memory in bytes.
        desired_ram: Option<u64> = None, "" as JsonOnly;
        /// Size of the balloon in bytes.
        desired_balloon: Option<u64> = None, "" as JsonOnly;
    }
}

option_family! {
    /// New size of a memory zone.
    VmResizeZone "resize-zone" {
        /// Name of the zone.
        id: String = String::new(), "" as JsonOnly;
        /// Size of memory in bytes.
        desired_ram: Option<u64> = None, "" as JsonOnly;
    }
}

option_family! {
    /// New size of a disk.
    VmResizeDisk "resize-disk" {
        /// Name of the disk.
        id: String = String::new(), "" as JsonOnly;
        /// Size in bytes, a multiple of the disk's block size. A block device of the host must have it already.
        desired_size: Option<u64> = None, "" as JsonOnly;
    }
}

fn memory_refused(what: impl Into<String>, problem: &str) -> ConfigError {
    ConfigError::Memory { what: what.into(), problem: problem.to_owned() }
}

impl VmConfig {
    /// The configuration with other sizes, which the guest has when it boots. `desired_ram` is all of its memory:
    /// nothing of it is hot-plugged then.
    ///
    /// # Errors
    /// The VM has no balloon or consists of memory zones, or the configuration would not be valid.
    pub fn resized(&self, wanted: &VmResize) -> Result<Self, ConfigError> {
        let mut config = self.clone();
        if let Some(vcpus) = wanted.desired_vcpus {
            if !(1..=MAX_VCPUS).contains(&vcpus) {
                let problem = format!("boot_vcpus must be from 1 to {MAX_VCPUS}, not {vcpus}");
                return Err(ConfigError::Device { what: "cpus", id: String::new(), problem });
            }
            config.cpus.boot_vcpus = vcpus;
        }
        if let Some(size_bytes) = wanted.desired_ram {
            if config.memory.zones.as_ref().is_some_and(|zones| !zones.is_empty()) {
                return Err(memory_refused("memory", "it consists of zones: use vm.resize-zone"));
            }
            config.memory.size = size_bytes;
            config.memory.hotplugged_size = None;
        }
        if let Some(size_bytes) = wanted.desired_balloon {
            let Some(balloon) = &mut config.balloon else {
                let problem = "the VM has none".to_owned();
                return Err(ConfigError::Device { what: "balloon", id: String::new(), problem });
            };
            balloon.size = size_bytes;
        }
        config.complete_begun()
    }

    /// The configuration with another size of a memory zone, which the guest has when it boots.
    ///
    /// # Errors
    /// There is no such zone, or the configuration would not be valid.
    pub fn with_zone_size(&self, id: &str, size_bytes: u64) -> Result<Self, ConfigError> {
        let mut config = self.clone();
        let zone = config.memory.zones.iter_mut().flatten().find(|zone| zone.id == id);
        let zone = zone.ok_or_else(|| {
            memory_refused(format!("memory zone '{id}'"), "the VM has no such zone")
        })?;
        (zone.size, zone.hotplugged_size) = (size_bytes, None);
        config.complete_begun()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;

    fn config(more: &Value) -> VmConfig {
        let mut config = json!({"payload": {"kernel": "/k"},
            "cpus": {"boot_vcpus": 1, "max_vcpus": 4}, "memory": {"size": 1 << 30}});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value::<VmConfig>(config).unwrap().complete().unwrap()
    }

    #[test]
    fn what_is_named_has_its_size_at_boot_and_the_rest_stays() {
        let before = config(&json!({"balloon": {"size": 0}}));
        let wanted = VmResize { desired_vcpus: Some(3), ..VmResize::default() };
        let mut expected = before.clone();
        expected.cpus.boot_vcpus = 3;
        assert_eq!(before.resized(&wanted).unwrap(), expected);
        let wanted = VmResize {
            desired_ram: Some(2 << 30),
            desired_balloon: Some(1 << 20),
            ..VmResize::default()
        };
        expected = before.clone();
        expected.memory.size = 2 << 30;
        expected.balloon.as_mut().unwrap().size = 1 << 20;
        assert_eq!(before.resized(&wanted).unwrap(), expected);
    }

    #[test]
    fn all_memory_counts() {
        let memory = json!({"size": 1 << 30, "hotplug_method": "VirtioMem",
            "hotplug_size": 2_u64 << 30, "hotplugged_size": 1 << 30});
        let wanted = VmResize { desired_ram: Some(1 << 30), ..VmResize::default() };
        let resized = config(&json!({"memory": memory})).resized(&wanted).unwrap();
        assert_eq!((resized.memory.size, resized.memory.hotplugged_size), (1 << 30, None));
    }

    #[test]
    fn a_zone_has_its_size_at_boot() {
        let zones = json!([{"id": "a", "size": 1 << 30}, {"id": "b", "size": 1 << 30}]);
        let before = config(&json!({"memory": {"size": 0, "zones": zones}}));
        let resized = before.with_zone_size("b", 2 << 30).unwrap();
        let sizes: Vec<_> = resized.memory.zones.iter().flatten().map(|zone| zone.size).collect();
        assert_eq!(sizes, [1 << 30, 2 << 30]);
        let unknown = before.with_zone_size("c", 2 << 30).unwrap_err().to_string();
        assert!(unknown.contains("'c'"), "{unknown}");
        assert!(before.with_zone_size("b", 1).is_err(), "not of whole pages");
    }

    #[test]
    fn what_could_not_boot_is_refused() {
        let plain = config(&json!({}));
        let zones = json!([{"id": "a", "size": 1 << 30}]);
        let zoned = config(&json!({"memory": {"size": 0, "zones": zones}}));
        let none = VmResize::default();
        for (config, wanted, why) in [
            (&plain, VmResize { desired_vcpus: Some(0), ..none.clone() }, "boot_vcpus"),
            (&plain, VmResize { desired_vcpus: Some(5), ..none.clone() }, "maximum number"),
            (&plain, VmResize { desired_ram: Some(0), ..none.clone() }, "must not be 0"),
            (&plain, VmResize { desired_ram: Some(4097), ..none.clone() }, "multiple of"),
            (&plain, VmResize { desired_balloon: Some(0), ..none.clone() }, "balloon"),
            (&zoned, VmResize { desired_ram: Some(1 << 30), ..none }, "vm.resize-zone"),
        ] {
            let error = config.resized(&wanted).unwrap_err().to_string();
            assert!(error.contains(why), "{wanted:?}: {error}");
        }
    }
}
