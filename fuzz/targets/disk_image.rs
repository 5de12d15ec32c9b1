// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk images in formats, which are opened, read and written.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_disk_image);
