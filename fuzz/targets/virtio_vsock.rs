// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings of a socket device, and packets in them.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_vsock);
