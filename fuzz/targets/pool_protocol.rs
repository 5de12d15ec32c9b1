// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What arrives over the socket of the pool of prezeroed memory, at either end.

#![no_main]

godwit_fuzz::target!(prezero_pool_client::fuzz_protocol);
