// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bodies of `vm.resize` and `vm.resize-zone`.
//!
//! Owns their definitions. What is left out stays as it is.

use super::codec::JsonOnly;
use super::family::option_family;

option_family! {
    /// What a VM is to have from now on.
    VmResize "resize" {
        /// Number of vCPUs.
        desired_vcpus: Option<u32> = None, "" as JsonOnly;
        /// Bytes of memory.
        desired_ram: Option<u64> = None, "" as JsonOnly;
        /// Bytes in the balloon.
        desired_balloon: Option<u64> = None, "" as JsonOnly;
    }
}

option_family! {
    /// What a memory zone is to have from now on.
    VmResizeZone "resize-zone" {
        /// Name of the zone.
        id: String = String::new(), "" as JsonOnly;
        /// Bytes of memory.
        desired_ram: Option<u64> = None, "" as JsonOnly;
    }
}
