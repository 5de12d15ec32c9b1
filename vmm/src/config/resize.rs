// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The body of `vm.resize`.
//!
//! Owns its definition. What is left out stays as it is.

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
