// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM of cloud-hypervisor, made one of this program.

#![no_main]

godwit_fuzz::target!(vmm::adopt::fuzz_adopt);
