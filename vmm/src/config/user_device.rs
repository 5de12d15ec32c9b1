// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--user-device`: PCI devices that another process emulates (vfio-user).
//!
//! Owns the family and the rules within it. It must never look at the socket.

use std::path::PathBuf;

use super::codec::{File, Id, Int, One, Opt};
use super::error::ConfigError;
use super::family::option_family;
use super::vm::VmConfig;

option_family! {
    /// A PCI device that another process emulates (vfio-user).
    UserDeviceConfig "user-device" {
        /// Socket at which that process listens.
        socket: PathBuf = PathBuf::new(), "socket" as One<File>, required();
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
    }
}

impl UserDeviceConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.socket.as_os_str().is_empty() {
            return Err(self.refused("needs a socket"));
        }
        Ok(())
    }

    fn refused(&self, problem: &str) -> ConfigError {
        let id = self.id.clone().unwrap_or_default();
        ConfigError::Device { what: "user-device", id, problem: problem.to_owned() }
    }
}

impl VmConfig {
    /// The process that emulates a device maps the files of guest memory, and of nothing else.
    pub(super) fn check_user_devices(&self) -> Result<(), ConfigError> {
        let Some(device) = self.user_devices.iter().flatten().next() else { return Ok(()) };
        if !self.memory.is_shared() {
            return Err(device.refused("needs --memory shared=on"));
        }
        if self.pmem.iter().flatten().next().is_some() {
            return Err(device.refused(
                "persistent memory and vfio-user devices are not possible in one VM: the devices could not reach it",
            ));
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

    fn shared(devices: &Value) -> Result<VmConfig, String> {
        let memory = json!({ "size": 1 << 30, "shared": true });
        complete(&json!({ "memory": memory, "user_devices": devices }))
    }

    #[test]
    fn a_device_has_a_socket_and_a_name() {
        let device = UserDeviceConfig::parse("socket=/s,id=u,pci_segment=1,pci_device_id=7");
        let device = device.unwrap();
        assert_eq!((device.socket.to_str().unwrap(), device.id.as_deref()), ("/s", Some("u")));
        assert_eq!((device.pci_segment, device.pci_device_id), (1, Some(7)));
        UserDeviceConfig::parse("id=u").unwrap_err();
        let config = shared(&json!([{ "socket": "/a" }, { "socket": "/b", "id": "b" }])).unwrap();
        let ids = config.user_devices.iter().flatten().map(|device| device.id.clone().unwrap());
        assert_eq!(ids.collect::<Vec<_>>(), ["_vfio_user0", "b"]);
        for (device, why) in [
            (json!({ "socket": "" }), "needs a socket"),
            (json!({ "socket": "/a", "id": "__rng" }), "__rng"),
            (json!({ "socket": "/a", "pci_device_id": 32 }), "pci_device_id"),
            (json!({ "socket": "/a", "pci_segment": 3 }), "segment"),
        ] {
            let refused = serde_json::from_value::<Vec<UserDeviceConfig>>(json!([device]))
                .map_err(|error| error.to_string())
                .and_then(|devices| shared(&json!(devices)))
                .unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn memory_that_a_device_cannot_have_is_refused() {
        let device = json!([{ "socket": "/s", "id": "u" }]);
        let one = || serde_json::from_value(device[0].clone()).unwrap();
        for (options, why) in [
            (json!({ "memory": { "size": 1 << 30 } }), "shared=on"),
            (
                json!({ "memory": { "size": 1 << 30, "shared": true }, "pmem": [{ "file": "/p" }] }),
                "persistent memory",
            ),
        ] {
            let mut with = options.clone();
            with.as_object_mut().unwrap().insert("user_devices".to_owned(), device.clone());
            let error = complete(&with).unwrap_err();
            assert!(error.contains(why) && error.contains("'u'"), "{error}");
            // And when it is added.
            let config = complete(&options).unwrap();
            let error = NewDevice::User(one()).add_to(&config).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let huge = json!({ "size": 1 << 30, "hugepages": true });
        complete(&json!({ "memory": huge, "user_devices": device })).unwrap();
    }

    #[test]
    fn a_device_can_be_added_and_removed() {
        let config = complete(&json!({ "memory": { "size": 1 << 30, "shared": true } })).unwrap();
        let added = UserDeviceConfig::parse("socket=/s").unwrap();
        let (mut config, device) = NewDevice::User(added).add_to(&config).unwrap();
        assert_eq!(device.id(), "_vfio_user0");
        config.set_pci_device_id("_vfio_user0", 7);
        assert_eq!(config.user_devices.as_ref().unwrap()[0].pci_device_id, Some(7));
        let without = config.without("_vfio_user0").unwrap();
        assert_eq!(without.user_devices, None);
        assert_eq!(config.ids_not_in(&without), ["_vfio_user0"]);
    }
}
