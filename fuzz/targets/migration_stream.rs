// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a migration peer sends, in either direction.

#![no_main]

godwit_fuzz::target!(vm_migration::fuzz_stream);
