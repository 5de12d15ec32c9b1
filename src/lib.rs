// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the binaries `cloud-hypervisor` and `ch-remote` share: command lines, logging, exit codes.
//!
//! It must never know how anything works; that is the business of the `vmm` crate.

pub mod cli;

#[cfg(test)]
mod architecture_tests;
#[cfg(test)]
mod limits_tests;
#[cfg(test)]
mod module_circle_tests;
