// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM: VM configuration, HTTP API, life cycle, and wiring of memory, vCPUs and devices.
//!
//! Owns the life cycle of the VM, the configuration, the HTTP API and the event monitor. It must
//! never contain wire formats or ioctls; those belong to the crates below.
//!
//! | module | owns |
//! | --- | --- |
//! | `adopt` | VMs of cloud-hypervisor: from their documents to configuration, memory and state |
//! | `api` | HTTP API on a Unix socket: endpoints, OpenAPI, descriptors that come along |
//! | `config` | option families: option strings, JSON, schema and rules of a VM configuration |
//! | `control` | the VMM thread: the life cycle of the VM, one request at a time |
//! | `descriptor_limit` | the limit on open files |
//! | `export` | VMs of this program as those of cloud-hypervisor: from configuration, memory and state to its documents |
//! | `machine` | a machine: memory, vCPUs and devices, wired together |
//! | `metrics` | what a monitoring system reads: names, meanings and text of metrics |
//! | `migration` | a machine as `vm-migration` needs it: memory, dirty log, state, faults |
//! | `preflight` | what this host lacks for a VM, found without starting one |
//! | `page_server` | this program as the process that sends the last pages of a postcopy |
//! | `events` | the event monitor |
//! | `options` | what `main` passes to the VMM, and why the VMM ended |
//! | `output_queue` | a bounded queue of text for a slow reader: log, events |
//! | `panicking` | the end of a process in which a thread panics |
//! | `platform` | which machine a guest sees, as far as that is no option: named, versioned values |
//! | `sandbox` | what each thread may ask of the kernel, and what the process gives up |
//! | `signals` | signals of the process as events of its main thread |
//! | `json_text`, `json_bound` | JSON as text; bounds on JSON from outside |

pub mod adopt;
pub mod api;
pub mod config;
pub mod control;
pub mod descriptor_limit;
pub mod events;
pub mod export;
pub mod machine;
pub mod metrics;
pub mod migration;
pub mod options;
pub mod output_queue;
pub mod page_server;
pub mod panicking;
pub mod platform;
pub mod preflight;
pub mod sandbox;
pub mod signals;

mod json_bound;
mod json_text;
#[cfg(test)]
mod testing;

pub use control::{RunError, run};
pub use options::{ExitReason, VmmOptions};
