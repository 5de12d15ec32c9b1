// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opens a snapshot: reads and verifies all of it except memory and its index.
//!
//! Owns the order: manifest, lengths, checksums, and only then contents. A snapshot's files are untrusted
//! input.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::draft::partial;
use super::error::SnapshotError;
use super::file::MemoryFile;
use super::geometry::Geometry;
use super::index::Index;
use super::manifest::{MANIFEST_BYTES_MAX, Manifest, Sealed};
use super::{CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, MEMORY_FILE, STATE_FILE};
use crate::layout::{Layout, LayoutError};
use crate::protocol::codec::{CONFIG_BYTES_MAX, STATE_BYTES_MAX};

/// Most memory that a snapshot may hold: what x86-64 can address.
const MEMORY_BYTES_MAX: u64 = 1 << 52;

/// A part of guest memory in the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPart {
    /// First guest physical address.
    pub gpa: u64,
    /// Length in guest memory and in the file, in bytes.
    pub len_bytes: u64,
    /// Where it begins in the file, in bytes.
    pub offset_bytes: u64,
}

/// A snapshot whose documents have been verified. Its memory file is open, and stays readable when the
/// directory is removed.
#[derive(Debug)]
pub struct Opened {
    directory: PathBuf,
    manifest: Manifest,
    config: Vec<u8>,
    state: Vec<u8>,
    /// Read once the size of the machine's memory is known, which bounds it.
    index: Unread,
    memory: MemoryFile,
}

impl Opened {
    /// Opens the snapshot in a directory.
    ///
    /// # Errors
    /// Names the file that is missing, truncated, damaged, of another program or too new.
    pub fn open(directory: &Path) -> Result<Self, SnapshotError> {
        let path = directory.join(MANIFEST_FILE);
        let bytes = match Unread::open(&path, None).and_then(|file| file.read(MANIFEST_BYTES_MAX)) {
            Err(SnapshotError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(why_no_manifest(directory));
            }
            other => other?,
        };
        let manifest = Manifest::decode(&bytes, &path)?;
        if manifest.memory_len_bytes > MEMORY_BYTES_MAX {
            let why = "it has more memory than any machine".to_owned();
            return Err(SnapshotError::Malformed { path, why });
        }
        let sealed = |name: &str, seal: &Sealed, max| {
            Unread::open(&directory.join(name), Some(seal.len_bytes))?.sealed(seal, max)
        };
        let config = sealed(CONFIG_FILE, &manifest.config, CONFIG_BYTES_MAX)?;
        let state = sealed(STATE_FILE, &manifest.state, STATE_BYTES_MAX)?;
        let index = Unread::open(&directory.join(INDEX_FILE), Some(manifest.index.len_bytes))?;
        let memory = MemoryFile::open(&directory.join(MEMORY_FILE))?;
        let (found, expected) = (memory.len_bytes()?, manifest.memory_len_bytes);
        if found != expected {
            let path = memory.path().to_owned();
            return Err(SnapshotError::Length { path, found, expected });
        }
        let directory = directory.to_owned();
        Ok(Self { directory, manifest, config, state, index, memory })
    }

    /// The configuration of the machine.
    pub fn config_json(&self) -> &[u8] {
        &self.config
    }

    /// The state of vCPUs and devices.
    pub fn state_json(&self) -> &[u8] {
        &self.state
    }

    /// Size of guest memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.manifest.memory_len_bytes
    }

    /// True when the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.memory.is_direct()
    }

    /// The parts of guest memory in the memory file. Only what [`check_layout`](Self::check_layout) has accepted of
    /// them is known to be in the file.
    pub fn memory_parts(&self) -> impl Iterator<Item = MemoryPart> {
        self.manifest.regions.iter().map(|region| MemoryPart {
            gpa: region.gpa,
            len_bytes: region.len_bytes,
            offset_bytes: region.offset_bytes,
        })
    }

    /// The memory file, open for reading: to be mapped, which verifies nothing.
    ///
    /// # Errors
    /// When the process may not open another file descriptor.
    pub fn memory_file(&self) -> Result<File, SnapshotError> {
        self.memory.share().map_err(SnapshotError::Resource)
    }

    /// Checks that the machine's memory layout is the snapshot's.
    ///
    /// # Errors
    /// Names both layouts if it is not.
    pub fn check_layout(&self, layout: &Layout) -> Result<(), SnapshotError> {
        self.geometry_for(layout).map(|_| ())
    }

    fn geometry_for(&self, layout: &Layout) -> Result<Geometry, SnapshotError> {
        let geometry = Geometry::new(layout);
        if !self.manifest.fits(layout, &geometry) {
            let there = self.manifest.regions_in_words();
            let here = layout.to_string();
            return Err(SnapshotError::Layout(LayoutError::Differs { here, there }));
        }
        Ok(geometry)
    }

    /// Checks that the machine's memory layout is the snapshot's, and reads the index.
    pub(crate) fn index_for(&self, layout: &Layout) -> Result<(Geometry, Index), SnapshotError> {
        let geometry = self.geometry_for(layout)?;
        let bytes = self.index.sealed(&self.manifest.index, Index::len_bytes(geometry.chunks()))?;
        let index = Index::decode(&bytes, &geometry)
            .map_err(|fault| fault.at(&self.directory.join(INDEX_FILE)))?;
        Ok((geometry, index))
    }

    /// The memory file.
    pub(crate) fn memory(&self) -> &MemoryFile {
        &self.memory
    }

    /// The memory file; the rest of the snapshot is closed.
    pub(crate) fn into_memory(self) -> MemoryFile {
        self.memory
    }
}

fn why_no_manifest(directory: &Path) -> SnapshotError {
    match std::fs::metadata(directory) {
        Err(error) => SnapshotError::io("open the directory", directory)(error),
        Ok(_) if partial(directory, MANIFEST_FILE).exists() => {
            SnapshotError::NotFinished(directory.to_owned())
        }
        Ok(_) => SnapshotError::NotASnapshot(directory.to_owned()),
    }
}

/// An open file of the snapshot that has not been read.
#[derive(Debug)]
struct Unread {
    file: File,
    path: PathBuf,
    len_bytes: u64,
}

impl Unread {
    /// Opens a file, of a given length or of any.
    fn open(path: &Path, expected: Option<u64>) -> Result<Self, SnapshotError> {
        // Opening a pipe would wait for its other end.
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = opened.map_err(SnapshotError::io("open", path))?;
        let metadata = file.metadata().map_err(SnapshotError::io("look at", path))?;
        let (path, len_bytes) = (path.to_owned(), metadata.len());
        if !metadata.is_file() {
            return Err(SnapshotError::Foreign(path));
        }
        match expected {
            Some(expected) if expected != len_bytes => {
                Err(SnapshotError::Length { path, found: len_bytes, expected })
            }
            _ => Ok(Self { file, path, len_bytes }),
        }
    }

    /// Reads the file, if it is not longer than `max`.
    fn read(&self, max: u64) -> Result<Vec<u8>, SnapshotError> {
        let (path, found) = (&self.path, self.len_bytes);
        if found > max {
            let why = format!("it has {found} bytes where {max} are the most");
            return Err(SnapshotError::Malformed { path: path.clone(), why });
        }
        let mut bytes = Vec::new();
        // The file may grow while it is read.
        let mut all = (&self.file).take(found);
        all.read_to_end(&mut bytes).map_err(SnapshotError::io("read", path))?;
        Ok(bytes)
    }

    /// Reads the file and checks it against the length and checksum in the manifest.
    fn sealed(&self, seal: &Sealed, max: u64) -> Result<Vec<u8>, SnapshotError> {
        let bytes = self.read(max)?;
        if crc32c::crc32c(&bytes) == seal.crc32c {
            return Ok(bytes);
        }
        let path = self.path.clone();
        Err(SnapshotError::Damaged { path, part: "its contents".to_owned() })
    }
}
