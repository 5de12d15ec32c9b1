// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Live migration: protocol, connections, precopy, postcopy, progress.
//!
//! Owns how a guest moves, but not what a guest is. The VMM implements the traits in [`vm`] and
//! [`ram`] and calls two functions; all code here runs, and is tested, without KVM, devices or
//! HTTP. It must never know any of the three.
//!
//! | module | owns |
//! | --- | --- |
//! | [`source`], [`destination`] | the two state machines |
//! | [`commit`] | which side has the guest: the decisions of both, without their threads |
//! | [`protocol`] | messages and their bytes |
//! | [`transport`] | addresses, sockets, waits |
//! | [`vm`], [`ram`], [`fault`] | the traits that the VMM implements |
//! | [`page_server`] | another process that sends the last pages |
//! | [`snapshot`] | saving a guest to a directory, and restoring it |
//! | [`uffd`] | userfaultfd, the fault source of stock kernels |
//! | [`layout`] | guest addresses and pages; `page-bitmap` has the ownership of pages |
//! | [`options`], [`progress`], [`history`], [`error`], [`report`] | the user's options, and what the user is shown |
//! | `phase` | side, phase, and where the guest is |
//! | `migration_check` | what a check of a migration says |
//! | [`document`], `figures` | the progress document; the figures that the sides exchange at the end |
//! | `own_figures` | what vCPUs count of their own faults |
//! | `iovecs` | how far a vectored transfer has come |
//! | `descriptors` | fewer connections where a process lacks descriptors |
//! | `page_server_status` | the state of a page server in the progress document |
//! | [`bell`] | what wakes a thread that waits for a page |
//! | [`cancel`], [`steering`] | cancel, and other requests to a running migration |
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use vm_migration::{Address, Cancel, MemoryMode, Progress, ReceiveOptions, SendOptions, Side};
//! # use vm_migration::{destination, source, vm::{DestinationBuilder, SourceVm}};
//! fn send<V: SourceVm>(vm: V) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut options = SendOptions::new("tcp:target.example:4444".parse::<Address>()?);
//!     options.memory_mode = MemoryMode::Postcopy;
//!     let progress = Arc::new(Progress::new(Side::Source));
//!     match source::migrate(vm, &options, &progress, &Cancel::new()?) {
//!         Ok(finished) => println!("{:?}", finished.report),
//!         Err(failure) => match *failure {
//!             source::SendFailure::Resumed { vm, error } => { /* the guest runs here, in `vm` */ }
//!             other => eprintln!("{}", other.error()),
//!         },
//!     }
//!     Ok(())
//! }
//!
//! fn receive<B: DestinationBuilder>(builder: B) -> Result<(), Box<dyn std::error::Error>> {
//!     let listener = destination::Listener::bind(&"tcp:0.0.0.0:4444".parse()?)?;
//!     let progress = Arc::new(Progress::new(Side::Destination));
//!     let options = ReceiveOptions::default();
//!     match listener.receive(builder, &options, &progress, &Cancel::new()?) {
//!         Ok(received) => {
//!             // `received.vm` runs. In postcopy its pages still arrive:
//!             if let Some(faults) = received.faults {
//!                 faults.wait().map_err(|paused| paused.error)?;
//!             }
//!         }
//!         Err(failure) => return Err(failure.error.into()),
//!     }
//!     Ok(())
//! }
//! ```

pub mod bell;
pub mod borders;
pub mod cancel;
mod channel;
pub mod commit;
mod cursor;
mod descriptors;
pub mod destination;
pub mod document;
pub mod error;
pub mod fault;
mod figures;
pub mod history;
mod iovecs;
mod latency;
pub mod layout;
mod left_threads;
mod migration_check;
mod opening;
pub mod options;
mod own_figures;
pub mod page_server;
mod page_server_status;
mod partial_pages;
mod phase;
mod poll_thread;
pub mod progress;
pub mod protocol;
pub mod ram;
pub mod report;
mod session;
pub mod snapshot;
pub mod source;
pub mod steering;
mod stride;
mod threads;
pub mod transport;
pub mod uffd;
pub mod vm;
mod waits;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(all(test, not(loom)))]
mod tests;

pub use cancel::Cancel;
pub use document::{Mode, ProgressDocument};
pub use error::{Cause, GuestLocation, MigrationError, Side};
pub use history::History;
pub use left_threads::{Stay, left_threads};
pub use migration_check::{CheckFinding, MigrationCheck, MigrationForecast};
pub use options::{
    Compression, Convergence, DirtyClear, Limits, MemoryMode, ReceiveOptions, SendOptions,
    TimeoutStrategy,
};
pub use progress::{Event, FaultWaits, Observer, Phase, Progress};
pub use report::FailureReport;
pub use steering::Steering;
pub use transport::Address;
pub use vm::VmError;

#[cfg(any(test, feature = "testing"))]
pub use page_server::fuzz_orders;
#[cfg(any(test, feature = "testing"))]
pub use protocol::fuzzing::fuzz_stream;
#[cfg(all(any(test, feature = "testing"), not(loom)))]
pub use transport::{TlsRecordsOutcome, fuzz_tls_records, tls_records_outcome};
