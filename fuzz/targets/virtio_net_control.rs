// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Control queue of a network device.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_net_control);
