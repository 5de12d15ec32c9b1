// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ring of a real-time clock.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_rtc);
