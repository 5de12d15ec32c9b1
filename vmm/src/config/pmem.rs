// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--pmem`: persistent memory, a file of the host that is guest memory.
//!
//! Owns the family and the rules within it. It must never look at the file.

use std::path::PathBuf;

use super::codec::{Bytes, File, Id, Int, JsonOnly, One, Opt, Toggle};
use super::error::ConfigError;
use super::family::option_family;

/// What sizes and addresses are a multiple of.
pub const PMEM_ALIGN_BYTES: u64 = 2 << 20;

option_family! {
    /// Persistent memory (virtio-pmem).
    PmemConfig "pmem" {
        /// Backing file or block device; a directory for a temporary file in it.
        file: PathBuf = PathBuf::new(), "file" as One<File>, required();
        /// Size in bytes, a multiple of 2 MiB; by default that of the file.
        size: Option<u64> = None, "size" as Opt<Bytes>;
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>;
        /// Keep what the guest writes out of the file, which is opened read-only. It is lost when the VM ends.
        discard_writes: bool = false, "discard_writes" as One<Toggle>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// Address at which the guest has found it, where it stays. Kept by the VMM.
        gpa: Option<u64> = None, "" as JsonOnly, hidden();
    }
}

impl PmemConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let is_aligned = |value: u64| value.is_multiple_of(PMEM_ALIGN_BYTES);
        let problem = match (self.size, self.gpa) {
            _ if self.file.as_os_str().is_empty() => "needs a file".to_owned(),
            (Some(size), _) if size == 0 || !is_aligned(size) => {
                format!("size {size} is not a multiple of 2 MiB, or zero")
            }
            (_, Some(gpa)) if !is_aligned(gpa) => {
                format!("its address {gpa:#x} is not a multiple of 2 MiB")
            }
            _ => return Ok(()),
        };
        Err(ConfigError::Device { what: "pmem", id: self.id.clone().unwrap_or_default(), problem })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Family as _, NewDevice, VmConfig};

    fn complete(more: Value) -> Result<VmConfig, String> {
        let mut json = more;
        json["payload"] = json!({ "kernel": "/k" });
        let config: VmConfig = serde_json::from_value(json).unwrap();
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn a_pmem_is_named_and_keeps_its_place_and_size() {
        let config = complete(json!({ "pmem": [{ "file": "/p" }, { "file": "/q", "id": "q" }] }));
        let mut config = config.unwrap();
        let ids = config.pmem.iter().flatten().map(|pmem| pmem.id.clone().unwrap());
        assert_eq!(ids.collect::<Vec<_>>(), ["_pmem0", "q"]);
        config.settle_pmem("q", 4 << 30, 2 << 20);
        config.set_pci_device_id("q", 7);
        let place = config.pci_places().into_iter().find(|place| *place.id == Some("q".into()));
        assert_eq!(place.unwrap().number, Some(7));
        let settled = config.pmem.as_ref().unwrap()[1].clone();
        assert_eq!((settled.gpa, settled.size), (Some(4 << 30), Some(2 << 20)));
        let read: VmConfig =
            serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(read.complete().unwrap(), config, "the address travels with the guest");
        assert!(config.without("q").unwrap().without("_pmem0").unwrap().pmem.is_none());
    }

    #[test]
    fn what_persistent_memory_cannot_be_is_refused_by_name() {
        let path = "/sys/bus/pci/devices/0000:01:00.0";
        for (config, why) in [
            (json!({ "pmem": [{ "file": "" }] }), "needs a file"),
            (json!({ "pmem": [{ "file": "/p", "size": 0 }] }), "2 MiB"),
            (json!({ "pmem": [{ "file": "/p", "size": 4096 }] }), "2 MiB"),
            (json!({ "pmem": [{ "file": "/p", "gpa": 4096 }] }), "2 MiB"),
            (json!({ "pmem": [{ "file": "/p" }], "disks": [{ "path": "//p" }] }), "the image /p"),
            (json!({ "pmem": [{ "file": "/p", "pci_segment": 1 }] }), "no PCI segment 1"),
            (
                json!({ "pmem": [{ "file": "/p" }], "devices": [{ "path": path }] }),
                "passed-through",
            ),
        ] {
            let error = complete(config.clone()).unwrap_err();
            assert!(error.contains(why), "{config}: {error}");
        }
        let read = json!({ "file": "/p", "discard_writes": true });
        complete(json!({ "pmem": [read, read] })).unwrap();
        let dir = json!({ "file": "/d", "size": 2 << 20 });
        complete(json!({ "pmem": [dir, dir] })).unwrap();
    }

    #[test]
    fn it_comes_and_goes() {
        let before = complete(json!({})).unwrap();
        let pmem = PmemConfig::parse("file=/p,size=2M,discard_writes=on,id=p").unwrap();
        let (config, added) = NewDevice::Pmem(pmem.clone()).add_to(&before).unwrap();
        assert_eq!((added.id(), config.ids_not_in(&before)), ("p", vec!["p".to_owned()]));
        assert_eq!(config.without("p").unwrap(), before);
        let again = NewDevice::Pmem(pmem).add_to(&config).unwrap_err();
        assert_eq!(again, ConfigError::DuplicateId { id: "p".to_owned() });
    }
}
