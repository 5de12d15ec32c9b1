// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option strings of the command line: the first line of the input names the family.

#![no_main]

godwit_fuzz::target!(vmm::config::fuzz_option_string);
