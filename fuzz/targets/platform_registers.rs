// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses to the registers of the platform, what their owners do meanwhile, and saved states of them.

#![no_main]

godwit_fuzz::target!(devices::legacy::fuzz);
