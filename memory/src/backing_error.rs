// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of the backing of a zone.
//!
//! Owns the messages, which name the zone, the file and what to do. The checks are in `backing` and
//! `zone_file`.

use std::io;
use std::path::PathBuf;

use crate::config::ConfigError;

/// Why a zone's backing could not be created.
#[expect(missing_docs, reason = "each variant's message says what it is")]
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "memory zone '{zone}': the host has no huge pages of {} KiB: start the host with \
         hugepagesz= and hugepages= for this size",
        page_bytes >> 10
    )]
    NoSuchHugePages { zone: String, page_bytes: u64 },
    #[error("memory zone '{zone}': could not make a memfd of {size_bytes} bytes")]
    Memfd {
        zone: String,
        size_bytes: u64,
        #[source]
        source: io::Error,
    },
    #[error("memory zone '{zone}': could not open or create the backing file {}", path.display())]
    OpenFile {
        zone: String,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "memory zone '{zone}': {} is neither a regular file nor a directory",
        path.display()
    )]
    NotAFile { zone: String, path: PathBuf },
    #[error(
        "memory zone '{zone}': {} is locked by {holder}; a file is the memory of one VM, page server, \
         migration or restore at a time: wait until that has ended, or use another file",
        path.display()
    )]
    InUse {
        zone: String,
        path: PathBuf,
        holder: String,
        /// Device and inode number.
        identity: (u64, u64),
    },
    #[error(
        "memory zone '{zone}': the file system of {} has no locks, so nothing would keep another VM \
         from using the same file: use a file system that has them, or name a directory",
        path.display()
    )]
    NoLocks { zone: String, path: PathBuf },
    #[error("memory zone '{zone}': could not lock {}", path.display())]
    LockFile {
        zone: String,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "memory zone '{zone}': {} is replaced by another file again and again while it is opened",
        path.display()
    )]
    Replaced { zone: String, path: PathBuf },
    #[error(
        "memory zone '{zone}': {} holds data, which the received memory would replace, and only the received \
         configuration names it: allow it (receive-migration allow=[{}:memory,...], with everything else \
         that may be named), remove the file, or use another",
        path.display(), path.display()
    )]
    HoldsData { zone: String, path: PathBuf },
    /// A file that the program which sends the contents may use, without a lock.
    #[error(
        "memory zone '{zone}': {} has {len_bytes} bytes, and may be in use: the program that the VM comes from \
         takes no lock of it. Remove the file if nothing uses it, or use another",
        path.display()
    )]
    NotNew {
        /// The zone.
        zone: String,
        /// Its file.
        path: PathBuf,
        /// Length of the file.
        len_bytes: u64,
    },
    #[error(
        "memory zone '{zone}': could not discard the contents of {}, which the incoming memory is \
         to replace",
        path.display()
    )]
    EmptyFile {
        zone: String,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "memory zone '{zone}': could not set the size of {} to {size_bytes} bytes",
        path.display()
    )]
    SizeFile {
        zone: String,
        path: PathBuf,
        size_bytes: u64,
        #[source]
        source: io::Error,
    },
    #[error(
        "memory zone '{zone}': {} holds data but only {len_bytes} of {size_bytes} bytes, and \
         shared=off forbids to extend it: use shared=on or a file of the right size",
        path.display()
    )]
    ShortPrivateFile { zone: String, path: PathBuf, len_bytes: u64, size_bytes: u64 },
    #[error(
        "memory zone '{zone}': with reserve=on, {} needs {missing_bytes} bytes more, and its file \
         system has {free_bytes} free",
        path.display()
    )]
    FileSystemFull { zone: String, path: PathBuf, missing_bytes: u64, free_bytes: u64 },
    #[error("memory zone '{zone}': the file handed over for it is not usable: {what}")]
    ProvidedFile { zone: String, what: &'static str },
    #[error("memory zone '{zone}': the file handed over for it could not be examined")]
    ExamineProvidedFile {
        zone: String,
        #[source]
        source: io::Error,
    },
}
