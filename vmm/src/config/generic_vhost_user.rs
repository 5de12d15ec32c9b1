// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--generic-vhost-user`: virtio devices of any type, which another process serves over vhost-user.
//!
//! Owns the family and the rules within it. It must never look at the socket, nor know a type of device.

use std::path::PathBuf;

use super::codec::{File, Id, Int, IntList, One, Opt};
use super::error::ConfigError;
use super::family::option_family;

/// Queues that a device can have, as one of several queues.
pub const MAX_QUEUES: usize = 254;
/// The largest size of a queue (virtio 1.3, 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

option_family! {
    /// A virtio device of any type, served by another process over vhost-user.
    GenericVhostUserConfig "generic-vhost-user" {
        /// Socket at which that process listens.
        socket: PathBuf = PathBuf::new(), "socket" as One<File>, required();
        /// Descriptors of each queue, powers of two.
        queue_sizes: Vec<u16> = Vec::new(), "queue_sizes" as One<IntList>, required();
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// Virtio device type.
        device_type: u32 = 0, "virtio_id" as One<Int>, required(), range(1, 63);
    }
}

impl GenericVhostUserConfig {
    /// Virtio device type; the range of the option fits.
    pub fn virtio_id(&self) -> u16 {
        u16::try_from(self.device_type).unwrap_or(0)
    }

    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |size: &&u16| !size.is_power_of_two() || !(2..=MAX_QUEUE_SIZE).contains(*size);
        let problem = if self.socket.as_os_str().is_empty() {
            "needs a socket".to_owned()
        } else if self.queue_sizes.is_empty() || self.queue_sizes.len() > MAX_QUEUES {
            format!("queue_sizes has to name 1 to {MAX_QUEUES} queues")
        } else if let Some(size) = self.queue_sizes.iter().find(wrong) {
            format!("{size} in queue_sizes is not a power of two from 2 to {MAX_QUEUE_SIZE}")
        } else {
            return Ok(());
        };
        let id = self.id.clone().unwrap_or_default();
        Err(ConfigError::Device { what: "generic-vhost-user", id, problem })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;
    use crate::config::{Family as _, VmConfig};

    fn complete(device: &str, shared: bool) -> Result<VmConfig, String> {
        let device = GenericVhostUserConfig::parse(device).map_err(|error| error.to_string())?;
        let json = json!({ "payload": { "kernel": "/k" },
            "memory": { "size": 1 << 30, "shared": shared } });
        let mut config = serde_json::from_value::<VmConfig>(json).unwrap();
        config.generic_vhost_user = Some(vec![device]);
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn a_device_has_a_type_and_queues() {
        let config = complete("socket=/s,virtio_id=26,queue_sizes=[512,1024]", true).unwrap();
        let device = &config.generic_vhost_user.as_ref().unwrap()[0];
        assert_eq!((device.virtio_id(), &device.queue_sizes), (26, &vec![512, 1024]));
        let name = "_generic_vhost_user0";
        assert_eq!(config.vhost_user_devices(), [("generic-vhost-user", name)]);
        for (device, shared, why) in [
            ("socket=/s,virtio_id=26,queue_sizes=[64]", false, "shared=on"),
            ("socket=/s,virtio_id=0,queue_sizes=[64]", true, "from 1 to 63"),
            ("socket=/s,virtio_id=64,queue_sizes=[64]", true, "from 1 to 63"),
            ("socket=/s,queue_sizes=[64]", true, "virtio_id"),
            ("socket=/s,virtio_id=26,queue_sizes=[]", true, "queue_sizes"),
            ("socket=/s,virtio_id=26,queue_sizes=[64,100]", true, "100 in queue_sizes"),
            ("socket=/s,virtio_id=26,queue_sizes=[1]", true, "1 in queue_sizes"),
        ] {
            let error = complete(device, shared).unwrap_err();
            assert!(error.contains(why), "{device}: {error}");
        }
    }
}
