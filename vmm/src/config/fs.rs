// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--fs`: shared directories (virtio-fs), which another process serves over vhost-user.
//!
//! Owns the family and the rules within it. It must never look at the socket.

use std::path::PathBuf;

use super::codec::{File, Id, Int, One, Opt, Text};
use super::error::ConfigError;
use super::family::option_family;

/// Bytes of a tag in the configuration of the device (virtio 1.3, 5.11.4).
pub const MAX_TAG_BYTES: usize = 36;

option_family! {
    /// A shared directory (virtio-fs).
    FsConfig "fs" {
        /// Name by which the guest mounts it, at most 36 bytes.
        tag: String = String::new(), "tag" as One<Text>, required();
        /// Socket at which the file server listens.
        socket: PathBuf = PathBuf::new(), "socket" as One<File>, required();
        /// Number of request queues. The device has one more, for requests of high priority.
        num_queues: u16 = 1, "num_queues" as One<Int>, range(1, 253);
        /// Descriptors of each queue, a power of two.
        queue_size: u16 = 1024, "queue_size" as One<Int>, range(2, 32768);
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
    }
}

impl FsConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self, max_vcpus: u32) -> Result<(), ConfigError> {
        let (tag, queues, size) = (&self.tag, self.num_queues, self.queue_size);
        let problem = if tag.is_empty() {
            "needs a tag".to_owned()
        } else if tag.len() > MAX_TAG_BYTES {
            format!("tag '{tag}' is longer than {MAX_TAG_BYTES} bytes")
        } else if tag.contains('\0') {
            "its tag contains a zero byte, with which the guest ends it".to_owned()
        } else if self.socket.as_os_str().is_empty() {
            "needs a socket".to_owned()
        } else if !size.is_power_of_two() {
            format!("queue_size {size} is not a power of two")
        } else if u32::from(queues) > max_vcpus {
            format!("num_queues {queues} exceeds the number of vCPUs ({max_vcpus})")
        } else {
            return Ok(());
        };
        Err(ConfigError::Device { what: "fs", id: self.id.clone().unwrap_or_default(), problem })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Family as _, VmConfig};

    fn complete(fs: &[&str], memory: &Value) -> Result<VmConfig, String> {
        let json = json!({ "payload": { "kernel": "/k" }, "memory": memory });
        let mut config = serde_json::from_value::<VmConfig>(json).unwrap();
        let fs = fs.iter().map(|fs| FsConfig::parse(fs)).collect::<Result<_, _>>();
        config.fs = Some(fs.map_err(|error| error.to_string())?);
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_system_has_the_defaults_of_cloud_hypervisor() {
        let memory = json!({ "size": 1 << 30, "shared": true });
        let config = complete(&["tag=t,socket=/s"], &memory).unwrap();
        let fs = &config.fs.as_ref().unwrap()[0];
        assert_eq!((fs.num_queues, fs.queue_size), (1, 1024));
        assert_eq!(config.vhost_user_devices(), [("fs", "_fs0")]);
    }

    #[test]
    fn what_a_file_system_cannot_be_is_refused_by_name() {
        let shared = || json!({ "size": 1 << 30, "shared": true });
        let long = format!("tag={},socket=/s", "t".repeat(MAX_TAG_BYTES));
        complete(&[&long], &shared()).unwrap();
        let long = format!("tag={},socket=/s", "t".repeat(MAX_TAG_BYTES + 1));
        for (fs, memory, why) in [
            (&["tag=t,socket=/s"][..], json!({ "size": 1 << 30 }), "shared=on"),
            (&[&long], shared(), "longer than 36 bytes"),
            (&["tag=,socket=/s"], shared(), "needs 'tag='"),
            (&["tag=t,socket="], shared(), "needs 'socket='"),
            (&["tag=t"], shared(), "socket"),
            (&["tag=t,socket=/s,queue_size=100"], shared(), "not a power of two"),
            (&["tag=t,socket=/s,num_queues=2"], shared(), "num_queues 2 exceeds"),
            (&["tag=t,socket=/s,id=a", "tag=u,socket=/r,id=a"], shared(), "'a'"),
            (
                &["tag=t,socket=/s,pci_device_id=9", "tag=u,socket=/r,pci_device_id=9"],
                shared(),
                "9",
            ),
        ] {
            let error = complete(fs, &memory).unwrap_err();
            assert!(error.contains(why), "{fs:?}: {error}");
        }
        for (tag, socket, why) in
            [("", "/s", "needs a tag"), ("t", "", "needs a socket"), ("\0", "/s", "zero")]
        {
            let (tag, socket) = (tag.to_owned(), socket.into());
            let fs = FsConfig { tag, socket, ..FsConfig::default() };
            let error = fs.validate(1).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
