// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of writing and reading snapshots.
//!
//! Owns their wording: every error names the file.

use std::io;
use std::path::{Path, PathBuf};

use crate::layout::LayoutError;
use crate::uffd::UffdError;

/// Why a snapshot cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// An operation on a file failed.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// A document above the size that can be restored.
    #[error("{what} of the VM has {len_bytes} bytes, but a snapshot holds at most {limit_bytes}")]
    TooLong {
        /// The document.
        what: &'static str,
        /// Its length.
        len_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A directory that is not empty.
    #[error("{} exists already; give an empty directory for a new snapshot", .0.display())]
    Exists(PathBuf),
    /// Two snapshots to one directory at the same time.
    #[error("another snapshot is being written to {}", .0.display())]
    Busy(PathBuf),
    /// The manifest is missing, and the directory holds an unfinished snapshot.
    #[error("the snapshot in {} was never finished; take a new one", .0.display())]
    NotFinished(PathBuf),
    /// The manifest is missing.
    #[error(
        "{} contains no complete snapshot of this program: {} is missing",
        .0.display(),
        super::MANIFEST_FILE
    )]
    NotASnapshot(PathBuf),
    /// A file of another program.
    #[error("{} is not a file of this program's snapshots", .0.display())]
    Foreign(PathBuf),
    /// Written by a later version.
    #[error("{} has format version {found}, and the newest known here is {known}", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that is supported.
        known: u32,
    },
    /// Invalid contents.
    #[error("{} is malformed: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A file of the wrong length.
    #[error("{} has {found} bytes where the manifest says {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length by the manifest.
        expected: u64,
    },
    /// Contents that differ from what was written.
    #[error("{} is damaged: the checksum of {part} is wrong", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The part that was checked.
        part: String,
    },
    /// The memory layout of another machine.
    #[error("the memory of the snapshot is not that of the machine in its configuration")]
    Layout(#[source] LayoutError),
    /// Memory that is to be saved is not there.
    #[error("a range of memory that the snapshot is to have does not exist")]
    Range(#[source] LayoutError),
    /// An error in handling guest memory.
    #[error("guest memory could not be accessed")]
    Memory(#[source] io::Error),
    /// An error of the fault source.
    #[error("guest memory cannot be restored on demand; use memory_restore_mode=copy")]
    OnDemand(#[source] UffdError),
    /// Pages that were read could not be made visible.
    #[error("a page of the snapshot could not be loaded: {0}")]
    Pages(String),
    /// A thread could not be started, or a descriptor not created.
    #[error("the host refused a resource for the snapshot")]
    Resource(#[source] io::Error),
    /// A cancel was requested.
    #[error("the snapshot was cancelled")]
    Cancelled,
}

impl SnapshotError {
    /// Returns a function that adds the operation and the file to an I/O error.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
