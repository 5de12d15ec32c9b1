// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a migration peer sends before and after a TLS handshake, and what happens to records on their way.

#![no_main]

godwit_fuzz::target!(vm_migration::fuzz_tls_records);
