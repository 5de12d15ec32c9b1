// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a source says of the machine that its peer is to build.

#![no_main]

godwit_fuzz::target!(vmm::migration::document::fuzz_document);
