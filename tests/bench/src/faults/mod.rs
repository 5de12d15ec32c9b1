// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Benchmarks of the way of a page that a vCPU waits for: `fault-path` and `fault-model`.
//!
//! | file | owns |
//! | --- | --- |
//! | `path` | each fault source with 1 to 160 vCPUs, between two processes, beside the floor |
//! | `model` | what is counted and read of each fault source, and what 160 processors would give |
//! | `moved` | one migration: what is counted while vCPUs wait for pages |
//! | `counts` | system calls and sleeps of processes |
//! | `floor` | a round trip on a socket pair and a copy, on as many threads |

mod counts;
mod floor;
pub mod model;
mod moved;
pub mod path;

/// A page.
const PAGE_BYTES: usize = 4096;
