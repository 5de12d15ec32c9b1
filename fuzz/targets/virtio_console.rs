// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings of a console.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_console);
