// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--generic-vhost-user`: virtio devices of any type, which another process serves over vhost-user.
//!
//! Owns the family and the rules within it, and how types of devices are called. It must never look at the socket, nor
//! know what a type of device does.

use std::path::PathBuf;

use super::codec::{Codec, File, Id, Int, IntList, One, Opt};
use super::error::ConfigError;
use super::family::option_family;
use super::option_string::{KeySyntax, OptionError, Options, Printer};

/// Queues that a device can have, as one of several queues.
pub const MAX_QUEUES: usize = 254;
/// The largest size of a queue (virtio 1.3, 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;
/// The largest device type: the PCI device ids of virtio have room for no more.
pub const MAX_DEVICE_TYPE: u32 = 63;

/// The older key of the device type.
const OLD_TYPE_KEY: &str = "virtio_id";

/// Names of device types, as in cloud-hypervisor, and their numbers (virtio 1.3, 5).
const DEVICE_TYPES: [(&str, u32); 47] = [
    ("net", 1),
    ("block", 2),
    ("console", 3),
    ("rng", 4),
    ("balloon", 5),
    ("iomem", 6),
    ("rpmsg", 7),
    ("scsi", 8),
    ("9p", 9),
    ("mac80211_wlan", 10),
    ("rproc_serial", 11),
    ("caif", 12),
    ("memory_balloon", 13),
    ("gpu", 16),
    ("clock", 17),
    ("input", 18),
    ("vsock", 19),
    ("crypto", 20),
    ("signal_dist", 21),
    ("pstore", 22),
    (IOMMU, 23),
    ("mem", 24),
    ("sound", 25),
    ("fs", 26),
    ("pmem", 27),
    ("rpmb", 28),
    ("mac80211_hwsim", 29),
    ("video_encoder", 30),
    ("video_decoder", 31),
    ("scmi", 32),
    ("nitro_sec_mod", 33),
    ("i2c", 34),
    (WATCHDOG, 35),
    ("can", 36),
    ("dmabuf", 37),
    ("param_serv", 38),
    ("audio_policy", 39),
    ("bt", 40),
    ("gpio", 41),
    ("rdma", 42),
    ("camera", 43),
    ("ism", 44),
    ("spi", 45),
    ("tee", 46),
    ("cpu_balloon", 47),
    ("media", 48),
    ("usb", 49),
];

/// Types of which no device can be another process's: the VMM translates for one, and the other resets the machine.
const IOMMU: &str = "iommu";
const WATCHDOG: &str = "watchdog";

/// A device type by its number or name, under either key.
#[derive(Debug)]
pub struct DeviceType;

impl DeviceType {
    fn parse(raw: &str) -> Result<u32, String> {
        let named = DEVICE_TYPES.iter().find(|(name, _)| *name == raw).map(|(_, number)| *number);
        let number = match named {
            Some(number) => number,
            None => raw.parse().map_err(|_| {
                format!(
                    "expected a number from 1 to {MAX_DEVICE_TYPE}, or a name such as fs or gpu"
                )
            })?,
        };
        let alone = DEVICE_TYPES.iter().find(|(_, other)| *other == number);
        match alone {
            Some((name @ (IOMMU | WATCHDOG), _)) => {
                Err(format!("another process cannot serve this type of device ({name})"))
            }
            _ if (1..=MAX_DEVICE_TYPE).contains(&number) => Ok(number),
            _ => Err(format!("must be from 1 to {MAX_DEVICE_TYPE}, not {number}")),
        }
    }
}

impl Codec<u32> for DeviceType {
    fn keys(key: &'static str) -> Vec<KeySyntax> {
        let value = Some("<number_or_name>");
        vec![KeySyntax { key, value }, KeySyntax { key: OLD_TYPE_KEY, value }]
    }

    fn take(key: &'static str, options: &Options<'_>) -> Result<Option<u32>, OptionError> {
        if options.raw(OLD_TYPE_KEY).is_some() {
            log::warn!("{}: '{OLD_TYPE_KEY}' is deprecated, use '{key}'", options.family());
        }
        for key in [key, OLD_TYPE_KEY] {
            if let Some(raw) = options.raw(key) {
                let number = Self::parse(raw).map_err(|reason| options.bad_value(key, reason))?;
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn put(key: &'static str, value: &u32, out: &mut Printer) {
        out.pair(key, &value.to_string());
    }
}

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
        /// Virtio device type, by its number or by its name in the standard: fs, gpu, input, ...; `virtio_id` is the older
        /// key. JSON takes the number.
        device_type: u32 = 0, "device_type" as DeviceType, required(), range(1, 63);
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
        let config = complete("socket=/s,device_type=26,queue_sizes=[512,1024]", true).unwrap();
        let device = &config.generic_vhost_user.as_ref().unwrap()[0];
        assert_eq!((device.virtio_id(), &device.queue_sizes), (26, &vec![512, 1024]));
        let name = "_generic_vhost_user0";
        assert_eq!(config.vhost_user_devices(), [("generic-vhost-user", name)]);
        for (device, shared, why) in [
            ("socket=/s,virtio_id=26,queue_sizes=[64]", false, "shared=on"),
            ("socket=/s,virtio_id=0,queue_sizes=[64]", true, "from 1 to 63"),
            ("socket=/s,virtio_id=64,queue_sizes=[64]", true, "from 1 to 63"),
            ("socket=/s,device_type=64,queue_sizes=[64]", true, "from 1 to 63"),
            ("socket=/s,queue_sizes=[64]", true, "device_type"),
            ("socket=/s,virtio_id=26,queue_sizes=[]", true, "queue_sizes"),
            ("socket=/s,virtio_id=26,queue_sizes=[64,100]", true, "100 in queue_sizes"),
            ("socket=/s,virtio_id=26,queue_sizes=[1]", true, "1 in queue_sizes"),
        ] {
            let error = complete(device, shared).unwrap_err();
            assert!(error.contains(why), "{device}: {error}");
        }
    }

    #[test]
    fn a_type_has_a_name_and_two_keys() {
        let of = |device: &str| {
            let device =
                GenericVhostUserConfig::parse(&format!("socket=/s,queue_sizes=[64],{device}"));
            device.map(|device| device.device_type).map_err(|error| error.to_string())
        };
        for (text, number) in [
            ("device_type=fs", 26),
            ("virtio_id=fs", 26),
            ("virtio_id=26", 26),
            ("device_type=gpu,virtio_id=fs", 16),
            ("device_type=9p", 9),
            ("device_type=usb", 49),
            ("device_type=63", 63),
        ] {
            assert_eq!(of(text), Ok(number), "{text}");
        }
        for (text, why) in [
            ("device_type=FS", "'FS'"),
            ("device_type=gpus", "such as fs"),
            ("device_type=iommu", "cannot serve"),
            ("device_type=23", "cannot serve"),
            ("virtio_id=watchdog", "cannot serve"),
            ("virtio_id=35", "cannot serve"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn each_name_is_of_one_type() {
        assert!(DEVICE_TYPES.is_sorted_by(|left, right| left.1 < right.1));
        let names: std::collections::BTreeSet<_> = DEVICE_TYPES.iter().map(|it| it.0).collect();
        assert_eq!(names.len(), DEVICE_TYPES.len());
    }
}
