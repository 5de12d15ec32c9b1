// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--disk`: block devices.
//!
//! Owns the family and the rules within it. It must never open an image.

use std::path::PathBuf;

use super::codec::{
    Choice, File, Id, Int, IntList, JsonOnly, One, Opt, Text, Toggle, ValueCodec, pair_items,
};
use super::enums::option_enum;
use super::error::ConfigError;
use super::family::option_family;
use super::rate_limiter::{RateLimiterConfig, RateLimiterKeys};

/// Bytes of a serial number in the virtio block specification (5.2.6.1).
pub const MAX_SERIAL_BYTES: usize = 20;

/// Smallest usable queue: a request takes three descriptors.
pub const MIN_QUEUE_SIZE: u16 = 4;

option_enum! {
    /// Format of a disk image.
    ImageType = "qcow2|raw|vhd|vhdx|unknown", default Unknown {
        /// Fixed VHD.
        FixedVhd = "vhd",
        /// QCOW2.
        Qcow2 = "qcow2",
        /// Raw.
        Raw = "raw",
        /// VHDX.
        Vhdx = "vhdx",
        /// Raw, unless the image looks like another format: then it is refused.
        Unknown = "unknown",
    }
}

option_enum! {
    /// Which part of a disk image is locked while it is in use.
    LockGranularity = "byte-range|full", default ByteRange {
        /// The byte range that the image covers when it is opened.
        ByteRange = "byte-range",
        /// The whole file, even if it grows.
        Full = "full",
    }
}

option_enum! {
    /// Handling of a guest request that fails because the host's storage is full.
    OnFull = "report|pause", default Report {
        /// The guest gets an I/O error.
        Report = "report",
        /// The VM is paused until there is free space.
        Pause = "pause",
    }
}

option_family! {
    /// Host CPUs on which a queue is served.
    VirtQueueAffinity "queue-affinity" {
        /// The queue.
        queue_index: u16 = 0, "" as JsonOnly, required_json();
        /// The host CPUs.
        host_cpus: Vec<u32> = Vec::new(), "" as JsonOnly, required_json();
    }
}

option_family! {
    /// A block device.
    DiskConfig "disk" {
        /// Disk image or block device.
        path: Option<PathBuf> = None, "path" as Opt<File>;
        /// Read-only for the guest.
        readonly: bool = false, "readonly" as One<Toggle>;
        /// Bypass the host's page cache.
        direct: bool = false, "direct" as One<Toggle>;
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>;
        /// Number of queues.
        num_queues: u16 = 1, "num_queues" as One<Int>, range(1, 254);
        /// Descriptors of each queue, a power of two.
        queue_size: u16 = 128, "queue_size" as One<Int>, range(4, 32768);
        /// Served by another process over vhost-user.
        vhost_user: bool = false, "vhost_user" as One<Toggle>;
        /// Socket at which that process listens.
        vhost_socket: Option<String> = None, "socket" as Opt<Text>;
        /// Limits on bandwidth and operations.
        rate_limiter_config: Option<RateLimiterConfig> = None, "" as RateLimiterKeys;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// Serial number that the guest sees, at most 20 bytes.
        serial: Option<String> = None, "serial" as Opt<Text>;
        /// Rate limit group that the disk belongs to.
        rate_limit_group: Option<String> = None, "rate_limit_group" as Opt<Id>;
        /// Host CPUs for each queue.
        queue_affinity: Option<Vec<VirtQueueAffinity>> = None,
            "queue_affinity" as Opt<QueueAffinityText>;
        /// Open the backing files that a qcow2 image names.
        backing_files: bool = false, "backing_files" as One<Toggle>;
        /// Deallocate storage on the host when the guest discards blocks.
        sparse: bool = true, "sparse" as One<Toggle>;
        /// Format of the image.
        image_type: ImageType = ImageType::Unknown, "image_type" as One<Choice>;
        /// Which part of the image is locked while it is in use.
        lock_granularity: LockGranularity = LockGranularity::ByteRange,
            "lock_granularity" as One<Choice>;
        /// Handling of a write that fails because the host's storage is full (ENOSPC, EDQUOT): report an
        /// I/O error to the guest, or pause the VM until there is free space.
        on_full: OnFull = OnFull::Report, "on_full" as One<Choice>;
        /// Do not use io_uring.
        disable_io_uring: bool = false, "_disable_io_uring" as One<Toggle>, hidden();
        /// Do not use Linux AIO (never used here, accepted for old scripts).
        disable_aio: bool = false, "_disable_aio" as One<Toggle>, hidden();
    }
}

impl DiskConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self, max_vcpus: u32) -> Result<(), ConfigError> {
        let name = self.id.as_deref().unwrap_or_default();
        let refuse = |problem: String| {
            Err(ConfigError::Device { what: "disk", id: name.to_owned(), problem })
        };
        if self.vhost_user {
            self.validate_vhost_user().map_err(|problem| ConfigError::Device {
                what: "disk",
                id: name.to_owned(),
                problem: problem.to_owned(),
            })?;
        } else if self.vhost_socket.is_some() {
            return refuse("socket needs vhost_user=on".into());
        } else if self.path.as_ref().is_none_or(|path| path.as_os_str().is_empty()) {
            return refuse("needs a path".into());
        }
        if self.rate_limit_group.is_some() && self.rate_limiter_config.is_some() {
            return refuse("rate_limit_group and limits of its own exclude each other".into());
        }
        if !self.queue_size.is_power_of_two() || self.queue_size < MIN_QUEUE_SIZE {
            return refuse(format!(
                "queue_size {} is not a power of two from 4 on",
                self.queue_size
            ));
        }
        if u32::from(self.num_queues) > max_vcpus {
            return refuse(format!(
                "num_queues {} exceeds the number of vCPUs ({max_vcpus})",
                self.num_queues
            ));
        }
        let mut seen = std::collections::BTreeSet::new();
        for entry in self.queue_affinity.iter().flatten() {
            let queue = entry.queue_index;
            if queue >= self.num_queues {
                return refuse(format!(
                    "queue_affinity names queue {queue}, num_queues is {}",
                    self.num_queues
                ));
            }
            if entry.host_cpus.is_empty() || !seen.insert(queue) {
                return refuse(format!("queue_affinity of queue {queue} is empty or given twice"));
            }
        }
        if let Some(serial) = &self.serial
            && serial.len() > MAX_SERIAL_BYTES
        {
            return refuse(format!("serial '{serial}' is longer than {MAX_SERIAL_BYTES} bytes"));
        }
        Ok(())
    }
}

impl DiskConfig {
    /// Validates the options of a disk that another process serves: those of images have no effect there.
    fn validate_vhost_user(&self) -> Result<(), &'static str> {
        if self.vhost_socket.as_ref().is_none_or(String::is_empty) {
            return Err("vhost_user=on needs a socket");
        }
        let of_images = [
            (self.path.is_some(), "path and vhost_user=on exclude each other"),
            (self.readonly, "readonly is for the vhost-user back end to say"),
            (self.direct, "direct is for the vhost-user back end to say"),
            (self.serial.is_some(), "serial is for the vhost-user back end to say"),
            (self.backing_files, "backing_files and vhost_user=on exclude each other"),
            (self.on_full != OnFull::Report, "on_full and vhost_user=on exclude each other"),
            (
                self.rate_limit_group.is_some(),
                "rate_limit_group and vhost_user=on exclude each other",
            ),
            (self.rate_limiter_config.is_some(), "limits and vhost_user=on exclude each other"),
            (self.queue_affinity.is_some(), "queue_affinity is for the vhost-user back end to say"),
        ];
        of_images
            .iter()
            .find(|(is_given, _)| *is_given)
            .map_or(Ok(()), |(_, problem)| Err(*problem))
    }
}

/// `[queue@[cpus],...]`.
#[derive(Debug)]
pub struct QueueAffinityText;

impl ValueCodec<Vec<VirtQueueAffinity>> for QueueAffinityText {
    const SYNTAX: &'static str = "<list_of_queue_indices_with_their_associated_cpuset>";

    fn parse(raw: &str) -> Result<Vec<VirtQueueAffinity>, String> {
        const EXPECTED: &str = "expected queues with their host CPUs, like [0@[0,1],1@[2-3]]";
        let mut out = Vec::new();
        for (queue, cpus) in pair_items(raw).ok_or(EXPECTED)? {
            let queue_index = queue.parse().map_err(|_| EXPECTED)?;
            let host_cpus = <IntList as ValueCodec<Vec<u32>>>::parse(cpus)?;
            out.push(VirtQueueAffinity { queue_index, host_cpus });
        }
        Ok(out)
    }

    fn print(value: &Vec<VirtQueueAffinity>) -> String {
        let items: Vec<_> = value
            .iter()
            .map(|entry| format!("{}@{}", entry.queue_index, IntList::print(&entry.host_cpus)))
            .collect();
        format!("[{}]", items.join(","))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use crate::config::{DiskConfig, Family as _, VmConfig};

    fn complete(disk: &str, memory: &Value) -> Result<VmConfig, String> {
        let disk = DiskConfig::parse(disk).map_err(|error| error.to_string())?;
        let json = json!({ "payload": { "kernel": "/k" }, "memory": memory });
        let mut config = serde_json::from_value::<VmConfig>(json).unwrap();
        config.disks = Some(vec![disk]);
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn a_vhost_user_disk_needs_a_socket_and_shared_memory() {
        let shared = || json!({ "size": 1 << 30, "shared": true });
        let disk = "vhost_user=on,socket=/s";
        let config = complete(disk, &shared()).unwrap();
        assert_eq!(config.vhost_user_devices(), [("disk", "_disk0")]);
        let huge = json!({ "size": 1 << 30, "hugepages": true });
        complete(disk, &huge).unwrap();
        for (disk, memory, why) in [
            (disk, json!({ "size": 1 << 30 }), "shared=on"),
            (
                disk,
                json!({ "size": 0, "zones": [
                    { "id": "a", "size": 1 << 30, "shared": true }, { "id": "b", "size": 1 << 30 }
                ] }),
                "shared=on",
            ),
            ("vhost_user=on", shared(), "needs a socket"),
            ("socket=/s,path=/d", shared(), "socket needs vhost_user=on"),
            ("vhost_user=on,socket=/s,path=/d", shared(), "path and vhost_user=on"),
            ("vhost_user=on,socket=/s,readonly=on", shared(), "readonly is for"),
            ("vhost_user=on,socket=/s,serial=a", shared(), "serial is for"),
            ("vhost_user=on,socket=/s,on_full=pause", shared(), "on_full and"),
            ("vhost_user=on,socket=/s,num_queues=2", shared(), "num_queues 2 exceeds"),
        ] {
            let error = complete(disk, &memory).unwrap_err();
            assert!(error.contains(why), "{disk}: {error}");
        }
    }
}
