// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers of a vDPA device.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_vdpa);
