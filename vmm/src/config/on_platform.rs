// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The platform of a configuration, and what it does not allow.
//!
//! Owns the rules between options and platforms. What they are is up to each platform ([`crate::platform`]); its name
//! must never be asked for here.

use serde_json::Value;

use super::codec::JsonOnly;
use super::error::ConfigError;
use super::family::option_family;
use super::value::FieldValue as _;
use super::vm::VmConfig;
use crate::platform::{Platform, PlatformName};

option_family! {
    /// The device number of a device for which no option names one.
    PciNumber "pci-number" {
        /// Id of the device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// Its number in segment 0.
        number: u8 = 0, "" as JsonOnly, range(1, 31), required_json();
    }
}

/// Whether JSON says anything.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        _ => true,
    }
}

impl VmConfig {
    /// Name of the platform.
    pub fn platform_name(&self) -> PlatformName {
        self.platform.as_ref().map_or_else(PlatformName::default, |platform| platform.platform)
    }

    /// The platform.
    pub fn machine_platform(&self) -> &'static Platform {
        self.platform_name().definition()
    }

    /// The kept number of a device for which no option names one.
    pub fn kept_pci_number(&self, id: &str) -> Option<u8> {
        let mut kept = self.pci_numbers.iter().flatten();
        kept.find(|kept| kept.id == id).map(|kept| kept.number)
    }

    /// Refuses what makes another machine than the platform's.
    pub(super) fn check_platform(&self) -> Result<(), ConfigError> {
        let platform = self.machine_platform();
        let refuse = |option: &str, why: &str| {
            let name = platform.name.text();
            let problem = format!("platform={name} has no {option}: {why}");
            Err(ConfigError::Device { what: "platform", id: String::new(), problem })
        };
        if !platform.refused.is_empty() {
            // A configuration that has no JSON form is refused elsewhere.
            let json = self.sparse().unwrap_or_default();
            for refused in platform.refused {
                let pointer = format!("/{}", refused.path.replace('.', "/"));
                if json.pointer(&pointer).is_some_and(is_set) {
                    return refuse(refused.path, refused.why);
                }
            }
        }
        let most = platform.disk_queue_size_max;
        for disk in self.disks.iter().flatten() {
            if !disk.vhost_user && disk.queue_size > most {
                let option = format!("disk with queue_size={}", disk.queue_size);
                return refuse(&option, &format!("at most {most} is possible here"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use serde_json::json;

    use super::*;
    use crate::config::Family as _;
    use crate::config::PlatformConfig;

    fn complete(more: &Value) -> Result<VmConfig, String> {
        let mut json = json!({
            "payload": {"kernel": "/k"},
            "memory": {"size": 1 << 30, "shared": true},
            "platform": {"platform": "cloud-hypervisor-53"},
        });
        json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = serde_json::from_value::<VmConfig>(json).map_err(|error| error.to_string())?;
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn the_platform_is_kept_and_written_only_if_it_is_another() {
        let config = complete(&json!({})).unwrap();
        assert_eq!(config.platform_name(), PlatformName::CloudHypervisor53);
        let written = config.sparse().unwrap();
        assert_eq!(written["platform"], json!({"platform": "cloud-hypervisor-53"}));
        let own = PlatformConfig::parse("num_pci_segments=2,platform=godwit").unwrap();
        assert_eq!(own.sparse().unwrap(), json!({"num_pci_segments": 2}));
        let other = PlatformConfig::parse("platform=cloud-hypervisor-53").unwrap();
        assert_eq!(other.platform, PlatformName::CloudHypervisor53);
        assert!(PlatformConfig::parse("platform=cloud-hypervisor-99").is_err());
    }

    #[test]
    fn what_the_platform_does_not_have_is_refused_by_its_name() {
        for (more, named) in [
            (json!({"iommu": true}), "iommu"),
            (json!({"rng": {"src": "/dev/urandom", "iommu": true}}), "iommu"),
            (json!({"devices": [{"path": "/sys/bus/pci/devices/0000:01:00.0"}]}), "devices"),
            (json!({"user_devices": [{"socket": "/s"}]}), "user_devices"),
            (json!({"vdpa": [{"path": "/dev/vhost-vdpa-0", "num_queues": 1}]}), "vdpa"),
            (json!({"disks": [{"path": "/d", "queue_size": 2048}]}), "queue_size=2048"),
            (json!({"balloon": {"size": 0, "free_page_hinting": true}}), "free_page_hinting"),
            (json!({"balloon": {"size": 0, "statistics_interval_s": 1}}), "statistics_interval_s"),
            (json!({"balloon": {"size": 0, "prezero_hints": true}}), "prezero_hints"),
        ] {
            let error = complete(&more).unwrap_err();
            assert!(error.contains("cloud-hypervisor-53") && error.contains(named), "{error}");
            let mut own = more.clone();
            own["platform"] = json!({});
            complete(&own).unwrap();
        }
        complete(&json!({"devices": [], "disks": [{"path": "/d", "queue_size": 1024}]})).unwrap();
        complete(&json!({"balloon": {"size": 0, "free_page_reporting": true}})).unwrap();
    }
}
