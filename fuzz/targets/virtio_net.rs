// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings and frames of a network device.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_net);
