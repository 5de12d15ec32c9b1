// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A passed-through function: its configuration space, and accesses of a guest to that and to its BARs.

#![no_main]

godwit_fuzz::target!(vfio::fuzzing::fuzz_vfio_config);
