// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses of a guest to the BAR of a virtio device.

#![no_main]

godwit_fuzz::target!(pci::fuzz_transport);
