// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings of a balloon: pages that enter and leave it, statistics, hints, reports.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_balloon);
