// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk images in a format: the layer between the requests of a driver and a file that is not the disk byte
//! for byte.
//!
//! Owns the time at which the tables of an image are in memory: from [`Formatted::load`], which comes after the
//! image's lock, to [`Formatted::unload`], which comes before the lock is released. Outside of it no
//! request reaches the file, so that tables that another host may change are never used or written. Must never find
//! out a format by looking at an image: a guest may have written what is there.

use std::fmt;
use std::io;
use std::path::PathBuf;

use parking_lot::RwLock;
use thiserror::Error;

use super::image::SECTOR_BYTES;
use super::request::Range;

/// Format of a disk image, as the configuration names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// The file is the disk.
    #[default]
    Raw,
    /// Fixed VHD: the disk, and a footer behind it.
    FixedVhd,
    /// QCOW2, version 2 or 3.
    Qcow2,
    /// VHDX, fixed or dynamic.
    Vhdx,
}

impl fmt::Display for DiskFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::FixedVhd => "fixed VHD",
            Self::Qcow2 => "qcow2",
            Self::Vhdx => "VHDX",
        })
    }
}

/// Why an image cannot be used in the format that it is said to have.
#[derive(Debug, Error)]
pub enum FormatError {
    /// It is in another format, or none.
    #[error("it is not a {0} image")]
    Signature(&'static str),
    /// Part of the format that this version does not know.
    #[error("it uses {0}, which this version does not support")]
    Unsupported(String),
    /// Its tables contradict each other or the file.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// It needs another file, and following references is not allowed.
    #[error("it has the backing file '{0}', which is opened only with backing_files=on")]
    BackingRefused(String),
    /// The same, and how that file is to be read is not known.
    #[error(
        "it does not say the format of its backing file '{0}': have it written down (qemu-img rebase -u -F FORMAT)"
    )]
    BackingFormat(String),
    /// A name that is not that of a file.
    #[error("its backing file '{0}' is not named by a path")]
    BackingName(String),
    /// The backing file cannot be opened.
    #[error("cannot open its backing file {path}")]
    BackingOpen {
        /// The file.
        path: PathBuf,
        /// The host's answer.
        #[source]
        source: io::Error,
    },
    /// The backing file is a device, a directory or the like.
    #[error("its backing file {0} is not a regular file")]
    BackingKind(PathBuf),
    /// The backing file is a file that is in the chain already.
    #[error("its backing file {0} is an image that has it as a backing file")]
    BackingLoop(PathBuf),
    /// The chain of backing files is too long.
    #[error("it has more than {0} backing files, each behind the next")]
    BackingDepth(usize),
    /// The backing file cannot be used.
    #[error("its backing file {path} cannot be used")]
    Backing {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<FormatError>,
    },
    /// Another VM writes to the backing file.
    #[error("its backing file {0} is in use by another VM that may write to it (lock held)")]
    BackingInUse(PathBuf),
    /// The host does not read or write it.
    #[error("cannot read it")]
    Io(#[from] io::Error),
}

/// An image whose tables are in memory.
pub(super) trait FormatDriver: Send + Sync {
    /// Fills the buffer with what is on the disk from an offset on.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Puts the buffer on the disk from an offset on.
    fn write(&self, buffer: &[u8], offset: u64) -> io::Result<()>;
    /// Frees what is behind the whole units of allocation of a range. No other operation is under way.
    fn discard(&mut self, range: Range) -> io::Result<()>;
    /// Makes a range read as zeros, and keeps its space.
    fn write_zeroes(&self, range: Range) -> io::Result<()>;
    /// The same, and frees its space. No other operation is under way.
    fn write_zeroes_and_free(&mut self, range: Range) -> io::Result<()>;
    /// Writes tables that have changed to the file; the host may have them in its cache afterwards.
    fn write_tables(&self) -> io::Result<()>;
}

/// What is known of an image without its tables: enough to make a device, and to load it when it is locked.
pub(super) trait Unloaded: Send + Sync {
    /// Size of the disk.
    fn size_bytes(&self) -> u64;
    /// Smallest block that its user reads and writes.
    fn sector_bytes(&self) -> u64 {
        SECTOR_BYTES
    }
    /// Unit of allocation.
    fn unit_bytes(&self) -> u64;
    /// Paths of the files that belong to it beside the image itself.
    fn other_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }
    /// Locks the files that belong to it beside the image itself, or gives the locks back.
    fn lock_others(&self, _lock: bool) -> Result<(), FormatError> {
        Ok(())
    }
    /// Whether it could be loaded. It is only read; the host that has it may write nothing meanwhile.
    fn check(&self) -> Result<(), FormatError>;
    /// Reads its tables.
    fn load(&self) -> Result<Box<dyn FormatDriver>, FormatError>;
}

/// An image in a format.
pub(super) struct Formatted {
    unloaded: Box<dyn Unloaded>,
    /// Held for reading while an operation is under way, and for writing where no other may be.
    driver: RwLock<Option<Box<dyn FormatDriver>>>,
}

impl Formatted {
    pub(super) fn new(unloaded: Box<dyn Unloaded>) -> Self {
        Self { unloaded, driver: RwLock::new(None) }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.unloaded.size_bytes()
    }

    pub(super) fn sector_bytes(&self) -> u64 {
        self.unloaded.sector_bytes()
    }

    pub(super) fn unit_bytes(&self) -> u64 {
        self.unloaded.unit_bytes()
    }

    pub(super) fn other_paths(&self) -> Vec<PathBuf> {
        self.unloaded.other_paths()
    }

    pub(super) fn lock_others(&self, lock: bool) -> Result<(), FormatError> {
        self.unloaded.lock_others(lock)
    }

    /// Whether the image could be loaded, if it is not.
    pub(super) fn check(&self) -> Result<(), FormatError> {
        if self.driver.read().is_some() { Ok(()) } else { self.unloaded.check() }
    }

    /// Reads the tables of the image, if they are not in memory. The image must be locked.
    pub(super) fn load(&self) -> Result<(), FormatError> {
        let mut driver = self.driver.write();
        if driver.is_none() {
            *driver = Some(self.unloaded.load()?);
        }
        Ok(())
    }

    /// Writes the tables and forgets them: whatever comes of it, the file is not touched again
    /// before it is loaded anew.
    pub(super) fn unload(&self) -> io::Result<()> {
        let Some(driver) = self.driver.write().take() else { return Ok(()) };
        driver.write_tables()
    }

    /// As if an operation that has to be alone were under way, until the answer is dropped.
    #[cfg(test)]
    pub(super) fn hold(&self) -> impl Drop + '_ {
        self.driver.write()
    }

    fn with<T>(&self, work: impl FnOnce(&dyn FormatDriver) -> io::Result<T>) -> io::Result<T> {
        work(self.driver.read().as_deref().ok_or_else(not_loaded)?)
    }

    fn alone<T>(&self, work: impl FnOnce(&mut dyn FormatDriver) -> io::Result<T>) -> io::Result<T> {
        match self.driver.write().as_mut() {
            Some(driver) => work(driver.as_mut()),
            None => Err(not_loaded()),
        }
    }

    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.with(|driver| driver.read(buffer, offset))
    }

    pub(super) fn write(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.with(|driver| driver.write(buffer, offset))
    }

    pub(super) fn discard(&self, range: Range) -> io::Result<()> {
        self.alone(|driver| driver.discard(range))
    }

    pub(super) fn write_zeroes(&self, range: Range, free: bool) -> io::Result<()> {
        if free {
            self.alone(|driver| driver.write_zeroes_and_free(range))
        } else {
            self.with(|driver| driver.write_zeroes(range))
        }
    }

    /// Nothing is to be written if it is not loaded: that was done when it was unloaded.
    pub(super) fn write_tables(&self) -> io::Result<()> {
        self.driver.read().as_ref().map_or(Ok(()), |driver| driver.write_tables())
    }
}

fn not_loaded() -> io::Error {
    io::Error::other("the image is not loaded, as its lock is not held")
}
