// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Metrics: what a monitoring system reads of a VMM, as OpenMetrics text.
//!
//! ```text
//! VMM thread ──VmReading──┐            counters of devices, memory, vCPUs: what it alone can look at
//! Progress of a migration ┼─> Hub ──> Page ──> text
//! HTTP threads, process ──┘            what any thread can look at
//! ```
//!
//! Owns names and meanings of all metrics, and their text. A scrape reads counters that exist anyway: nothing is counted
//! for it on the path of a guest, and nothing here takes a lock that such a path takes. What is not known is left out,
//! never 0. It must never know how a scrape is asked for, nor what a VM is made of.
//!
//! | module | owns |
//! | --- | --- |
//! | `families` | the table of metrics |
//! | `text` | their text, in two formats |
//! | `hub` | what is there without the VMM thread, and the page of a scrape |
//! | `reading` | what the VMM thread says of the VM |
//! | `devices` | from names of `vm.counters` to metrics |
//! | `migration` | from the progress document to metrics |
//! | `requests` | what is counted of requests to the API |
//! | `process` | what the kernel says of the process |

mod devices;
mod families;
mod hub;
mod migration;
mod process;
mod reading;
mod requests;
mod text;

#[cfg(test)]
mod parser_tests;
#[cfg(test)]
mod reference_tests;

pub use hub::{Hub, Versions};
pub use process::thread_cpu_ns;
pub use reading::{PinReading, PopulatingReading, VcpuReading, VmReading, ZoneReading, states};
pub use requests::Requests;
pub use text::{CONTENT_TYPE, Format};
