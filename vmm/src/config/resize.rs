// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bodies of `vm.resize`, `vm.resize-zone` and `vm.resize-disk`.
//!
//! Owns their definitions. An omitted field leaves the value unchanged.

use super::codec::JsonOnly;
use super::family::option_family;

option_family! {
    /// New sizes of a VM's resources.
    VmResize "resize" {
        /// Number of vCPUs.
        desired_vcpus: Option<u32> = None, "" as JsonOnly;
        /// Size of memory in bytes.
        desired_ram: Option<u64> = None, "" as JsonOnly;
        /// Size of the balloon in bytes.
        desired_balloon: Option<u64> = None, "" as JsonOnly;
    }
}

option_family! {
    /// New size of a memory zone.
    VmResizeZone "resize-zone" {
        /// Name of the zone.
        id: String = String::new(), "" as JsonOnly;
        /// Size of memory in bytes.
        desired_ram: Option<u64> = None, "" as JsonOnly;
    }
}

option_family! {
    /// New size of a disk.
    VmResizeDisk "resize-disk" {
        /// Name of the disk.
        id: String = String::new(), "" as JsonOnly;
        /// Size in bytes, a multiple of the disk's block size. A block device of the host must have it already.
        desired_size: Option<u64> = None, "" as JsonOnly;
    }
}
