// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Snapshots: saving a guest to a directory, and restoring it.
//!
//! Owns the files, their formats and when a snapshot is complete. Works on [`GuestMemoryMap`] and
//! two opaque documents (configuration and state); it must never know what a machine is.
//!
//! | file | what it is | module |
//! | --- | --- | --- |
//! | `config.json`, `state.json` | documents of the machine | |
//! | `memory-ranges` | all regions of RAM, one after the other, with holes | [`save`] |
//! | `memory-index` | which pages are in it, and a checksum for every 64 KiB | `index` |
//! | `manifest.json` | version, lengths, checksums, memory layout; written last | `manifest` |
//!
//! ```text
//! save     Draft (hidden names) > memory, documents, index > fsync > rename > manifest renamed last
//! restore  open: manifest > documents, index verified > copy: everything read and verified
//!                                                     > ondemand: faults and filler, verified
//!                                                     > mapped by the machine: memory is not verified
//! ```
//!
//! A directory without a manifest is not a snapshot, whatever else it holds.
//!
//! [`save_ranges`] writes one in the form of others, without index and manifest, which this module does not read.
//! [`write_core`] writes memory to one file of a format that others read; it cannot be restored.
//!
//! [`GuestMemoryMap`]: crate::ram::GuestMemoryMap

mod block;
mod copy;
mod core_file;
mod draft;
mod error;
mod file;
mod geometry;
mod index;
mod manifest;
mod ondemand;
mod open;
mod ranges;
mod save;

#[cfg(all(test, not(loom)))]
mod tests;

pub use copy::{CopyReport, copy_in};
pub use core_file::{CoreError, CoreFormat, CoreReport, PAGE_START_BYTES, write_core};
pub use error::SnapshotError;
pub use manifest::FORMAT_VERSION;
pub use ondemand::{FillEnd, FillReport, Filling, Stuck};
pub use open::{MemoryPart, Opened};
pub use ranges::save_ranges;
pub use save::{SaveReport, Saved, save};

#[cfg(any(test, feature = "testing"))]
pub use index::fuzz_index;
#[cfg(any(test, feature = "testing"))]
pub use manifest::fuzz_manifest;

/// File with the configuration of the machine.
pub const CONFIG_FILE: &str = "config.json";
/// File with the state of vCPUs and devices.
pub const STATE_FILE: &str = "state.json";
/// File with the contents of RAM.
pub const MEMORY_FILE: &str = "memory-ranges";
/// File with the index of the memory file.
pub const INDEX_FILE: &str = "memory-index";
/// File with the manifest, whose presence makes the snapshot complete.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Default number of threads that read or write memory: enough to keep a fast disk busy while some
/// compute checksums.
pub fn default_threads() -> usize {
    (2 * process_facts::usable_processors()).clamp(4, 16)
}
