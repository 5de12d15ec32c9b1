// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Implements the traits of `vm-migration` for a machine.
//!
//! Owns the adapters between [`crate::machine`] and the traits of the `vm-migration` crate. Knows
//! nothing of the wire and nothing of the HTTP API.
//!
//! | module | owns |
//! | --- | --- |
//! | `source` | a machine that leaves |
//! | `destination` | a machine that arrives |
//! | `blobs` | states of devices that are sent as bytes |
//! | `snapshot` | a machine into a directory, and out of one |
//! | `adopted_arrival` | a machine that arrives from cloud-hypervisor |
//! | `adopted_snapshot` | a snapshot directory of cloud-hypervisor |
//! | `exported_machine` | a machine as cloud-hypervisor saves or sends it |
//! | `memory` | guest RAM as `vm-migration` sees it |
//! | `dirty` | the dirty log of guest and devices |
//! | `faults`, `fault_choice` | fault sources of postcopy, and which one `auto` means |
//! | `resident` | pages that must be present before a vCPU runs that is refused missing ones |
//! | `hints` | free page hints |
//! | `page_server` | the process that sends the last pages in this one's place |
//! | `disk_writer` | write-back of disks during precopy |
//! | `core_dump` | a core file for debuggers |
//! | `storage_thread` | writing files while the machine must not block |
//! | `document` | configuration and processor features for the destination |
//! | `grants` | what an arriving configuration may name on this host |
//! | `updates` | changes of configuration on restore |

mod adopted_arrival;
mod adopted_snapshot;
mod blobs;
pub mod core_dump;
pub mod destination;
pub mod dirty;
mod disk_writer;
pub mod document;
mod exported_machine;
pub mod fault_choice;
pub mod faults;
pub mod grants;
pub mod hints;
pub mod memory;
pub mod page_server;
mod resident;
pub mod snapshot;
pub mod source;
mod storage_thread;
mod updates;
