// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The file behind a persistent memory device.
//!
//! Owns which files can be one: their size and how they are opened. The lock is that of disks, so that one file is not
//! written by a disk and by persistent memory at the same time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use super::mapping::{self, PmemMapping};
use crate::virtio::block::{DiskError, DiskLock};

/// Size and addresses are multiples of it: a huge page of x86-64.
pub const PMEM_ALIGN_BYTES: usize = 2 << 20;
const ALIGN: u64 = PMEM_ALIGN_BYTES as u64;

/// What a persistent memory device is backed by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PmemConfig {
    /// A file or block device; a directory for a temporary file in it.
    pub path: PathBuf,
    /// Size in bytes; by default that of the file.
    pub size_bytes: Option<u64>,
    /// Whether writes of the guest never reach the file, which is opened read-only then.
    pub discard_writes: bool,
}

/// Why a file cannot be persistent memory.
#[derive(Debug, Error)]
pub enum PmemError {
    /// The file cannot be used.
    #[error("{path} cannot be persistent memory{}", if *.is_refused { "; discard_writes=on needs no write access to it" } else { "" })]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Whether it must not be written.
        is_refused: bool,
        /// The cause.
        #[source]
        source: DiskError,
    },
    /// A directory, and no size for a file in it.
    #[error("{path} is a directory: size= has to say how large the temporary file in it is to be")]
    NoSize {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A directory, for a file that is never written.
    #[error("{path} is a directory, and a temporary file in it cannot have discard_writes=on")]
    DiscardedTemporary {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The temporary file cannot be made.
    #[error("cannot make a temporary file of {size_bytes} bytes in {path}")]
    Temporary {
        /// Path of the directory.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is shorter than configured.
    #[error("{path} has {file_bytes} bytes, fewer than size={size_bytes}")]
    TooShort {
        /// Path of the file.
        path: PathBuf,
        /// Length of the file.
        file_bytes: u64,
        /// The configured size.
        size_bytes: u64,
    },
    /// The size is not one that a guest can map.
    #[error(
        "persistent memory of {size_bytes} bytes ({path}) is not possible: the size has to be a multiple of 2 MiB, \
         and not zero"
    )]
    Size {
        /// Path of the file.
        path: PathBuf,
        /// The size.
        size_bytes: u64,
    },
    /// The size is not one of whole huge pages of the host.
    #[error(
        "{path} has pages of {page_bytes} bytes, and a size of {size_bytes} bytes is not a multiple of that"
    )]
    HugePages {
        /// Path of the file.
        path: PathBuf,
        /// The size.
        size_bytes: u64,
        /// Size of its pages.
        page_bytes: u64,
    },
    /// The host does not map the file.
    #[error("cannot map {path}")]
    Map {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// An open file, mapped as persistent memory.
pub struct PmemFile {
    lock: DiskLock,
    mapping: Arc<PmemMapping>,
    is_temporary: bool,
}

impl PmemFile {
    /// Opens and maps the file, or maps the open file `kept` of the machine before. The lock is not taken:
    /// see [`Self::lock`].
    ///
    /// # Errors
    /// Names the file and the rule.
    pub fn open(config: &PmemConfig, kept: Option<DiskLock>) -> Result<Self, PmemError> {
        let path = || config.path.clone();
        if let Some(size_bytes) = config.size_bytes {
            check_size(config, size_bytes)?;
        }
        let is_dir = config.path.is_dir();
        let lock = match kept {
            Some(lock) => lock.again(),
            None if is_dir => DiskLock::of(&config.path, Arc::new(temporary(config)?), false),
            None => DiskLock::open(path(), config.discard_writes),
        };
        let lock = lock.map_err(|source| {
            let refused = |error: &io::Error| {
                let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem];
                kinds.contains(&error.kind()) && !config.discard_writes
            };
            let is_refused = matches!(&source, DiskError::Open { source, .. } if refused(source));
            PmemError::File { path: path(), is_refused, source }
        })?;
        let file_bytes = lock.file_len_bytes();
        let size_bytes = config.size_bytes.unwrap_or(file_bytes);
        if size_bytes > file_bytes {
            return Err(PmemError::TooShort { path: path(), file_bytes, size_bytes });
        }
        check_size(config, size_bytes)?;
        let map = |source| PmemError::Map { path: path(), source };
        let page_bytes = mapping::host_page_bytes(lock.file()).map_err(map)?;
        if !size_bytes.is_multiple_of(page_bytes) {
            return Err(PmemError::HugePages { path: path(), size_bytes, page_bytes });
        }
        let len = usize::try_from(size_bytes)
            .map_err(|_| map(io::Error::from(io::ErrorKind::FileTooLarge)))?;
        let mapping = PmemMapping::new(lock.file(), len, config.discard_writes).map_err(map)?;
        // Asked of the open file: what is at the path may be another one by now.
        let is_temporary = lock.file().metadata().map_err(map)?.nlink() == 0;
        Ok(Self { lock, mapping: Arc::new(mapping), is_temporary })
    }

    /// The lock of the file, to be taken before the guest runs and released when another VMM takes the guest
    /// over; also what writes it back.
    pub fn lock(&self) -> DiskLock {
        self.lock.clone()
    }

    /// The mapped file.
    pub fn mapping(&self) -> &Arc<PmemMapping> {
        &self.mapping
    }

    /// Whether the file has no name, so that no other process can open it.
    pub fn is_temporary(&self) -> bool {
        self.is_temporary
    }

    /// Size in bytes, a multiple of [`PMEM_ALIGN_BYTES`].
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }
}

fn check_size(config: &PmemConfig, size_bytes: u64) -> Result<(), PmemError> {
    if size_bytes > 0 && size_bytes.is_multiple_of(ALIGN) {
        return Ok(());
    }
    Err(PmemError::Size { path: config.path.clone(), size_bytes })
}

/// A file without a name, which ends with its last user.
fn temporary(config: &PmemConfig) -> Result<File, PmemError> {
    let path = config.path.clone();
    let Some(size_bytes) = config.size_bytes else { return Err(PmemError::NoSize { path }) };
    if config.discard_writes {
        return Err(PmemError::DiscardedTemporary { path });
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(&config.path);
    let sized = file.and_then(|file| file.set_len(size_bytes).map(|()| file));
    sized.map_err(|source| PmemError::Temporary { path, size_bytes, source })
}
