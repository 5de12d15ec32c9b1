// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ring of a persistent memory device.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_pmem);
