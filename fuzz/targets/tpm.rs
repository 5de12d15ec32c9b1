// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers of the process that implements a TPM, and accesses to its registers.

#![no_main]

godwit_fuzz::target!(devices::tpm::fuzz);
