// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! JSON bodies of the HTTP API.

#![no_main]

godwit_fuzz::target!(vmm::config::fuzz_api_json);
