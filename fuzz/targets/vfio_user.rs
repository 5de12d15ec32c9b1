// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a vfio-user device server sends.

#![no_main]

godwit_fuzz::target!(vfio::user::fuzz_vfio_user);
