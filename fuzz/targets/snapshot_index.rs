// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory index of a snapshot, a file of a user.

#![no_main]

godwit_fuzz::target!(vm_migration::snapshot::fuzz_index);
