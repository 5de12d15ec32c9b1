// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings and requests of a block device.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_block);
