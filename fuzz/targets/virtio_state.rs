// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of the virtio devices, as a migration brings it.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_state);
