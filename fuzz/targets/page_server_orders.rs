// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a page server is told by the VMM that has started it: the guest's memory, and how to continue.

#![no_main]

godwit_fuzz::target!(vm_migration::fuzz_orders);
