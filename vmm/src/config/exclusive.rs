// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Exclusive resources: images and taps that only one device of a VM can use.
//!
//! Owns the rules between devices and the names that are reserved for the VMM. It must never look at the
//! host: two paths to one image are found out when its lock is taken.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::VmConfig;
use super::error::ConfigError;
use super::net::NetConfig;
use super::value::MacAddr;

/// Prefix of ids that the VMM assigns.
pub const RESERVED_PREFIX: &str = "__";

fn id(id: Option<&String>) -> String {
    id.cloned().unwrap_or_default()
}

/// Checks the MAC address of a network device, which has an id by now.
///
/// # Errors
/// Names the device.
pub(super) fn check_mac(net: &NetConfig) -> Result<(), ConfigError> {
    if !net.mac.is_some_and(MacAddr::is_zero) {
        return Ok(());
    }
    let problem = "a MAC address of zeros is not valid; leave mac out for a random one".to_owned();
    Err(ConfigError::Device { what: "net", id: id(net.id.as_ref()), problem })
}

impl VmConfig {
    /// Checks that no two devices share an exclusive resource; all have ids by now.
    ///
    /// # Errors
    /// Names both devices.
    pub(super) fn check_exclusive(&self) -> Result<(), ConfigError> {
        self.check_images()?;
        self.check_interfaces()
    }

    /// Checks ids and addresses for reserved ones.
    ///
    /// # Errors
    /// Names the first.
    pub(super) fn check_reserved(&self) -> Result<(), ConfigError> {
        self.net.iter().flatten().try_for_each(check_mac)?;
        let mut zones = self.memory.zones.iter().flatten();
        match zones.find(|zone| zone.id.starts_with(RESERVED_PREFIX)) {
            Some(zone) => Err(ConfigError::ReservedId { id: zone.id.clone() }),
            None => Ok(()),
        }
    }

    /// Checks that images are shared by read-only disks only.
    fn check_images(&self) -> Result<(), ConfigError> {
        let mut users: BTreeMap<PathBuf, (String, bool)> = BTreeMap::new();
        for disk in self.disks.iter().flatten() {
            let Some(path) = &disk.path else { continue };
            // Normalised, without doubled slashes and dots.
            let path: PathBuf = path.components().collect();
            let what = format!("the image {}", path.display());
            let (second, readonly) = (id(disk.id.as_ref()), disk.readonly);
            match users.insert(path, (second.clone(), readonly)) {
                Some((first, other)) if !(readonly && other) => {
                    return Err(ConfigError::InUse { what, first, second });
                }
                _ => {}
            }
        }
        // Two of the same path may be temporary files in one directory; a file is locked.
        for pmem in self.pmem.iter().flatten() {
            let path: PathBuf = pmem.file.components().collect();
            let what = format!("the image {}", path.display());
            match users.get(&path) {
                Some((first, other)) if !(pmem.discard_writes && *other) => {
                    let (first, second) = (first.clone(), id(pmem.id.as_ref()));
                    return Err(ConfigError::InUse { what, first, second });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_interfaces(&self) -> Result<(), ConfigError> {
        let mut users: BTreeMap<&str, String> = BTreeMap::new();
        for net in self.net.iter().flatten() {
            let second = id(net.id.as_ref());
            // A pattern such as `vmtap%d` gives a new interface each time.
            let Some(tap) = net.tap.as_ref().filter(|tap| !tap.contains('%')) else { continue };
            if let Some(first) = users.insert(tap, second.clone()) {
                let what = format!("the tap {tap}");
                return Err(ConfigError::InUse { what, first, second });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;

    fn complete(mut config: Value) -> Result<VmConfig, String> {
        config["payload"] = json!({ "kernel": "/k" });
        let config = serde_json::from_value::<VmConfig>(config).unwrap();
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn an_image_or_a_tap_in_two_devices_is_refused_by_both_names() {
        let disks = |first: Value, second: Value| complete(json!({ "disks": [first, second] }));
        let (a, b) = (json!({ "path": "/i", "id": "a" }), json!({ "path": "//i", "id": "b" }));
        let error = disks(a.clone(), b).unwrap_err();
        assert_eq!(error, "'a' and 'b' both name the image /i, which only one device can use");
        disks(a.clone(), json!({ "path": "/i", "readonly": true })).unwrap_err();
        disks(a, json!({ "path": "/j" })).unwrap();
        let read = json!({ "path": "/i", "readonly": true });
        disks(read.clone(), read).unwrap();

        let nets = json!({ "net": [{ "tap": "t", "id": "x" }, { "tap": "t" }] });
        let error = complete(nets).unwrap_err();
        assert_eq!(error, "'x' and '_net0' both name the tap t, which only one device can use");
        complete(json!({ "net": [{ "tap": "t" }, { "tap": "u" }, {}, {}] })).unwrap();
        complete(json!({ "net": [{ "tap": "vmtap%d" }, { "tap": "vmtap%d" }] })).unwrap();
    }

    #[test]
    fn addresses_and_names_that_cannot_be() {
        let error = complete(json!({ "net": [{ "mac": "00:00:00:00:00:00", "id": "x" }] }));
        assert!(error.unwrap_err().contains("'x'"));
        let error = complete(json!({ "net": [{ "mac": "00:00:00:00:00:00" }] }));
        assert!(error.unwrap_err().contains("'_net0'"));
        complete(json!({ "net": [{ "mac": "02:00:00:00:00:00" }] })).unwrap();
        let zone = |id: &str| {
            complete(json!({ "memory": { "size": 0, "zones": [{ "id": id, "size": 1 << 30 }] } }))
        };
        zone("mem_0").unwrap();
        assert!(zone("__mem_a").unwrap_err().contains("'__mem_a'"));
    }
}
