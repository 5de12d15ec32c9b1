// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--device`: functions of the host that are passed through to the guest.
//!
//! Owns the family and the rules within it. It must never look at the host.

use std::path::PathBuf;

use super::codec::{Choice, File, Id, Int, IntList, One, Opt, Toggle};
use super::descriptor::{ConfigFd, Fd};
use super::enums::option_enum;
use super::error::ConfigError;
use super::family::option_family;
use super::platform::PlatformConfig;

/// Number of BARs of a PCI function.
const BARS_COUNT: u64 = 6;

option_enum! {
    /// When guest memory is mapped for the DMA of passed-through devices.
    PinMode = "auto|overlap|strict|announce", default Auto {
        /// While the guest runs: as `Announce` where that takes seconds or a device is added, else as `Overlap`.
        Auto = "auto",
        /// While the guest runs; enabling DMA blocks until all memory is mapped.
        Overlap = "overlap",
        /// Before the guest's first instruction.
        Strict = "strict",
        /// While the guest runs; the guest finds the device, by hot-plug, once all memory is mapped.
        Announce = "announce",
    }
}

option_family! {
    /// A passed-through host device (VFIO).
    DeviceConfig "device" {
        /// Path of the device in sysfs.
        path: Option<PathBuf> = None, "path" as Opt<File>;
        /// Open descriptor of the device's node in /dev/vfio/devices, instead of a path.
        fd: Option<ConfigFd> = None, "fd" as Opt<Fd>;
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>, unsupported();
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// GPUDirect clique of the device, an NVIDIA GPU: GPUs of one clique reach each other by DMA.
        x_nv_gpudirect_clique: Option<u8> = None, "x_nv_gpudirect_clique" as Opt<Int>, range(0, 15);
        /// BARs that are not mapped into the guest.
        x_exclude_mmap_bars: Vec<u64> = Vec::new(), "x_exclude_mmap_bars" as One<IntList>;
        /// When guest memory is mapped for DMA.
        pin: PinMode = PinMode::Auto, "pin" as One<Choice>;
    }
}

impl DeviceConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self, platform: Option<&PlatformConfig>) -> Result<(), ConfigError> {
        let id = self.id.clone().unwrap_or_default();
        let refuse = |problem: &str| {
            let problem = problem.to_owned();
            Err(ConfigError::Device { what: "device", id: id.clone(), problem })
        };
        let has_path = self.path.as_ref().is_some_and(|path| !path.as_os_str().is_empty());
        match &self.fd {
            None if !has_path => {
                return refuse("needs a path, its directory in /sys/bus/pci/devices");
            }
            None => {}
            Some(_) if has_path => return refuse("path and fd exclude each other"),
            Some(fd) => {
                fd.check().or_else(refuse)?;
                // It stays bound to the iommufd that it was first used with, also after a reboot.
                if platform.is_none_or(|platform| platform.iommufd_fd.is_none()) {
                    return refuse(
                        "fd needs --platform iommufd=on,iommufd_fd=..., to which it is bound",
                    );
                }
            }
        }
        if self.x_exclude_mmap_bars.iter().any(|bar| *bar >= BARS_COUNT) {
            return refuse("x_exclude_mmap_bars names a BAR that does not exist (0 to 5 do)");
        }
        if self.x_nv_gpudirect_clique.is_some() {
            // The guest's driver would rely on what does not work.
            if platform.is_some_and(|platform| !platform.vfio_p2p_dma) {
                return refuse("x_nv_gpudirect_clique needs --platform vfio_p2p_dma=on");
            }
            if platform.is_some_and(|platform| platform.iommufd) {
                return refuse(
                    "x_nv_gpudirect_clique needs type1: with iommufd=on devices do not reach each other",
                );
            }
        }
        Ok(())
    }
}
