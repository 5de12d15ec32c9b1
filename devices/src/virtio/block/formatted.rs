// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk images in a format: the layer between the requests of a driver and a file that is not the disk byte
//! for byte.
//!
//! Owns the period in which the tables of an image are in memory: from [`Formatted::load`], after the image has been
//! locked, to [`Formatted::unload`], before the lock is released. No request reaches the file at any other time, so
//! that tables which another host may change are never used or written. Must never detect the format of an image: a
//! guest may have written it.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, RwLock, RwLockWriteGuard};
use thiserror::Error;

use super::image::SECTOR_BYTES;
use super::placed::{Place, Transfer, Transfers};
use super::request::Range;

/// Format of a disk image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// The file is the disk, byte for byte.
    #[default]
    Raw,
    /// Fixed VHD: the disk and a footer.
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

/// Error of an image in a format.
#[derive(Debug, Error)]
pub enum FormatError {
    /// The image has another format.
    #[error("it is not a {0} image")]
    Signature(&'static str),
    /// The image uses an unsupported feature.
    #[error("it uses {0}, which this version does not support")]
    Unsupported(String),
    /// The image allocates blocks, and is on a block device.
    #[error(
        "it grows as it is written to, which it cannot do on a block device: use readonly=on, a regular file, or a fixed \
        image"
    )]
    OnDevice,
    /// The tables are inconsistent.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// The image has a backing file, and `backing_files` is off.
    #[error("it has the backing file '{0}', which is opened only with backing_files=on")]
    BackingRefused(String),
    /// The image does not state the format of its backing file.
    #[error(
        "it does not say the format of its backing file '{0}': have it written down (qemu-img rebase -u -F FORMAT)"
    )]
    BackingFormat(String),
    /// The name of the backing file is not a path.
    #[error("its backing file '{0}' is not named by a path")]
    BackingName(String),
    /// The backing file cannot be opened.
    #[error("cannot open its backing file {path}")]
    BackingOpen {
        /// Path of the backing file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The backing file is not a regular file.
    #[error("its backing file {0} is not a regular file")]
    BackingKind(PathBuf),
    /// The chain of backing files contains a cycle.
    #[error("its backing file {0} is an image that has it as a backing file")]
    BackingLoop(PathBuf),
    /// The chain of backing files is too long.
    #[error("it has more than {0} backing files, each behind the next")]
    BackingDepth(usize),
    /// The backing file cannot be used.
    #[error("its backing file {path} cannot be used")]
    Backing {
        /// Path of the backing file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<FormatError>,
    },
    /// Another VM has the backing file locked.
    #[error("its backing file {0} is in use by another VM that may write to it (lock held)")]
    BackingInUse(PathBuf),
    /// Input or output failed.
    #[error("cannot read it")]
    Io(#[from] io::Error),
}

/// Driver of a format, for an image whose tables are in memory.
pub(super) trait FormatDriver: Send + Sync {
    /// Reads from the disk at an offset.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes to the disk at an offset.
    fn write(&self, buffer: &[u8], offset: u64) -> io::Result<()>;
    /// Deallocates the whole units of a range. No other operation is in progress.
    fn discard(&mut self, range: Range) -> io::Result<()>;
    /// Makes a range read as zeros and keeps it allocated. No other operation is in progress, as it may replace a
    /// whole unit whose other parts it found to be zero.
    fn write_zeroes(&mut self, range: Range) -> io::Result<()>;
    /// Makes a range read as zeros and deallocates it. No other operation is in progress.
    fn write_zeroes_and_free(&mut self, range: Range) -> io::Result<()>;
    /// Where a range is in the image's own file, if it is there in one piece and a read, or a write, of it changes nothing
    /// else; none if in doubt. Until an operation that must be alone it stays there.
    fn place(&self, _offset: u64, _len_bytes: u64, _write: bool) -> Option<Place> {
        None
    }
    /// Writes modified tables to the file, not necessarily to stable storage.
    fn write_tables(&self) -> io::Result<()>;
    /// Writes modified tables and leaves an image that needs no repair. No other operation is in progress, and the next
    /// one may follow.
    fn close(&mut self) -> io::Result<()> {
        self.write_tables()
    }
}

/// An open image whose tables are not in memory.
pub(super) trait Unloaded: Send + Sync {
    /// Size of the disk.
    fn size_bytes(&self) -> u64;
    /// Size of a logical block.
    fn sector_bytes(&self) -> u64 {
        SECTOR_BYTES
    }
    /// Unit of allocation.
    fn unit_bytes(&self) -> u64;
    /// Paths of the backing files.
    fn other_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }
    /// Locks or unlocks the backing files.
    fn lock_others(&self, _lock: bool) -> Result<(), FormatError> {
        Ok(())
    }
    /// Whether its driver tells the places of data ([`FormatDriver::place`]).
    fn has_places(&self) -> bool {
        false
    }
    /// Checks whether it can be loaded, without writing. No other host may write to it meanwhile.
    fn check(&self) -> Result<(), FormatError>;
    /// Reads the tables.
    fn load(&self) -> Result<Box<dyn FormatDriver>, FormatError>;
}

/// An image in a format.
pub(super) struct Formatted {
    unloaded: Box<dyn Unloaded>,
    /// Held for reading during an operation, and for writing during one that must be alone.
    driver: RwLock<Option<Box<dyn FormatDriver>>>,
    /// Those that go past the driver. One begins only with the lock above.
    transfers: Arc<Transfers>,
    /// Operations that may still begin beside those in progress.
    free: Mutex<usize>,
    freed: Condvar,
}

/// Maximum number of concurrent operations. Each keeps tables in use, of which a driver has room for 128; so does the
/// thread of each queue, for as long as it looks up a place.
const CONCURRENT_MAX: usize = 64;

/// The right to carry out an operation beside others.
struct Turn<'a>(&'a Formatted);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.freed.notify_one();
    }
}

impl Formatted {
    pub(super) fn new(unloaded: Box<dyn Unloaded>) -> Self {
        Self {
            unloaded,
            driver: RwLock::new(None),
            transfers: Arc::default(),
            free: Mutex::new(CONCURRENT_MAX),
            freed: Condvar::new(),
        }
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

    pub(super) fn has_places(&self) -> bool {
        self.unloaded.has_places()
    }

    pub(super) fn other_paths(&self) -> Vec<PathBuf> {
        self.unloaded.other_paths()
    }

    pub(super) fn lock_others(&self, lock: bool) -> Result<(), FormatError> {
        self.unloaded.lock_others(lock)
    }

    /// Checks whether the image can be loaded, unless it is.
    pub(super) fn check(&self) -> Result<(), FormatError> {
        if self.driver.read().is_some() { Ok(()) } else { self.unloaded.check() }
    }

    /// Reads the tables, unless they are in memory. The image must be locked.
    pub(super) fn load(&self) -> Result<(), FormatError> {
        let mut driver = self.exclusively();
        if driver.is_none() {
            *driver = Some(self.unloaded.load()?);
        }
        Ok(())
    }

    /// Writes modified tables and drops all. Even after an error the file is not accessed again before the next
    /// load.
    pub(super) fn unload(&self) -> io::Result<()> {
        let Some(mut driver) = self.exclusively().take() else { return Ok(()) };
        driver.close()
    }

    /// Blocks all operations until the returned value is dropped.
    #[cfg(test)]
    pub(super) fn hold(&self) -> impl Drop + '_ {
        self.exclusively()
    }

    /// How many requests went straight to the file so far.
    #[cfg(test)]
    pub(super) fn transfers_begun(&self) -> usize {
        self.transfers.begun()
    }

    /// Whether no operation may begin beside those in progress.
    #[cfg(test)]
    pub(super) fn is_busy(&self) -> bool {
        *self.free.lock() == 0
    }

    /// The driver, with no operation and no transfer in progress.
    fn exclusively(&self) -> RwLockWriteGuard<'_, Option<Box<dyn FormatDriver>>> {
        let driver = self.driver.write();
        self.transfers.wait();
        driver
    }

    /// Begins a transfer that goes straight to the file, if it can; does not wait for operations that must be alone. It
    /// may read a table.
    pub(super) fn begin_transfer(
        &self,
        offset: u64,
        len_bytes: u64,
        write: bool,
    ) -> Option<Transfer> {
        let driver = self.driver.try_read()?;
        let place = driver.as_deref()?.place(offset, len_bytes, write)?;
        Some(self.transfers.begin(place))
    }

    fn turn(&self) -> Turn<'_> {
        let mut free = self.free.lock();
        self.freed.wait_while(&mut free, |free| *free == 0);
        *free -= 1;
        Turn(self)
    }

    fn with<T>(&self, work: impl FnOnce(&dyn FormatDriver) -> io::Result<T>) -> io::Result<T> {
        let _turn = self.turn();
        work(self.driver.read().as_deref().ok_or_else(not_loaded)?)
    }

    fn alone<T>(&self, work: impl FnOnce(&mut dyn FormatDriver) -> io::Result<T>) -> io::Result<T> {
        match self.exclusively().as_mut() {
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
        self.alone(|driver| {
            if free { driver.write_zeroes_and_free(range) } else { driver.write_zeroes(range) }
        })
    }

    /// Leaves an image that needs no repair; no effect on one that is not loaded.
    pub(super) fn close(&self) -> io::Result<()> {
        self.exclusively().as_mut().map_or(Ok(()), |driver| driver.close())
    }

    /// Writes modified tables; no effect on an image that is not loaded.
    pub(super) fn write_tables(&self) -> io::Result<()> {
        self.driver.read().as_ref().map_or(Ok(()), |driver| driver.write_tables())
    }
}

fn not_loaded() -> io::Error {
    io::Error::other("the image is not loaded, as its lock is not held")
}
