// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses of a guest to PCI configuration space, by ECAM and by ports.

#![no_main]

godwit_fuzz::target!(pci::fuzz_config_space);
