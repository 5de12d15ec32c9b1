// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a passed-through function.

#![no_main]

godwit_fuzz::target!(vfio::fuzzing::fuzz_vfio_state);
