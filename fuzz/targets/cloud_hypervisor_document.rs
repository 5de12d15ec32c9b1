// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration and state of a VM, as cloud-hypervisor writes them.

#![no_main]

godwit_fuzz::target!(cloud_hypervisor_state::fuzz_document);
