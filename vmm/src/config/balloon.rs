// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--balloon`: the virtio-balloon device.
//!
//! Owns its definition and the rules within it.

use super::codec::{Bytes, Id, Int, One, Opt, Toggle};
use super::error::ConfigError;
use super::family::option_family;

/// Page size of the balloon, whatever the page size of the guest.
const PAGE_BYTES: u64 = 4096;

option_family! {
    /// The balloon device.
    BalloonConfig "balloon" {
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>, unsupported();
        /// Target size of the balloon in bytes.
        size: u64 = 0, "size" as One<Bytes>, required_json();
        /// Deflate the balloon when the guest runs out of memory.
        deflate_on_oom: bool = false, "deflate_on_oom" as One<Toggle>;
        /// Free page reporting: pages reported free by the guest are returned to the host at once.
        free_page_reporting: bool = false, "free_page_reporting" as One<Toggle>;
        /// Free page hints: a migration asks the guest for its free pages and does not send them.
        free_page_hinting: bool = false, "free_page_hinting" as One<Toggle>;
        /// Interval in seconds at which the guest is asked for memory statistics; 0 for never.
        statistics_interval_s: u32 = 0, "statistics_interval_s" as One<Int>, range(0, 86400);
        /// Tell the guest which pages are zero when returned to it, with feature bits that are proposed
        /// and not yet part of the standard.
        prezero_hints: bool = false, "prezero_hints" as One<Toggle>;
    }
}

impl BalloonConfig {
    /// Validates the options within the family, and against the size of guest memory.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self, memory_bytes: u64) -> Result<(), ConfigError> {
        let refuse = |problem: String| {
            let id = self.id.clone().unwrap_or_default();
            Err(ConfigError::Device { what: "balloon", id, problem })
        };
        if self.size > memory_bytes {
            return refuse(format!(
                "the size {} is more than the {memory_bytes} bytes of memory that the VM can have",
                self.size
            ));
        }
        if !self.size.is_multiple_of(PAGE_BYTES) {
            return refuse(format!("the size {} is not a multiple of {PAGE_BYTES}", self.size));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;
    use crate::config::{Family as _, VmConfig};

    fn vm(balloon: &str) -> VmConfig {
        let payload = serde_json::json!({"payload": {"kernel": "/k"}, "memory": {"size": 1 << 30}});
        let config: VmConfig = serde_json::from_value(payload).unwrap();
        VmConfig { balloon: Some(BalloonConfig::parse(balloon).unwrap()), ..config }
    }

    #[test]
    fn every_key_is_read() {
        let text = "id=b,size=256M,deflate_on_oom=on,free_page_reporting=on,\
                    free_page_hinting=on,statistics_interval_s=5,prezero_hints=on";
        let balloon = BalloonConfig::parse(text).unwrap();
        assert_eq!((balloon.size, balloon.statistics_interval_s), (256 << 20, 5));
        assert!(balloon.deflate_on_oom && balloon.free_page_reporting);
        assert!(balloon.free_page_hinting && balloon.prezero_hints);
        assert!(BalloonConfig::parse("size=0,statistics_interval_s=86401").is_err());
        assert_eq!(BalloonConfig::parse("").unwrap(), BalloonConfig::default());
    }

    #[test]
    fn it_gets_a_name_and_keeps_it() {
        let config = vm("size=1G").complete().unwrap();
        assert_eq!(config.balloon.as_ref().unwrap().id.as_deref(), Some("__balloon"));
        assert_eq!(config.clone().complete().unwrap(), config);
    }

    #[test]
    fn it_may_be_as_large_as_all_memory_that_there_can_be() {
        let text = "size=1G,hotplug_method=virtio-mem,hotplug_size=8G,hotplugged_size=2G";
        let memory = crate::config::MemoryConfig::parse(text).unwrap();
        let with = |balloon: &str| VmConfig { memory: memory.clone(), ..vm(balloon) }.complete();
        assert_eq!(with("size=9G").unwrap().balloon.unwrap().size, 9 << 30);
        assert!(with("size=10G").is_err());
    }

    #[test]
    fn impossible_balloons_are_refused() {
        let refused = |text: &str| vm(text).complete().unwrap_err().to_string();
        assert!(refused("size=2G").contains("more than the 1073741824 bytes"));
        assert!(refused("size=4097").contains("not a multiple"));
        assert!(refused("size=0,iommu=on").contains("balloon.iommu"));
        assert!(refused("id=__rng").contains("__rng"));
    }
}
