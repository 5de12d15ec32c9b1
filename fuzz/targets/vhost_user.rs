// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers of a vhost-user back end.

#![no_main]

godwit_fuzz::target!(devices::virtio::fuzz::fuzz_vhost_user);
