// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How many values untrusted JSON may hold, by its kind.
//!
//! Owns the limits of this crate's readers; `json-bound` counts.

pub use ::json_bound::{TooManyValues, check};

/// Maximum number of values in a machine state: 254 vCPUs have 330,000, a device a few hundred.
pub const STATE_VALUES_MAX: usize = 2 << 20;

/// Maximum number of values in a configuration: the largest have some thousand.
pub const CONFIG_VALUES_MAX: usize = 256 << 10;
