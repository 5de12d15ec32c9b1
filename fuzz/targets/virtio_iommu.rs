// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings of an IOMMU and of a device behind it.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_iommu);
