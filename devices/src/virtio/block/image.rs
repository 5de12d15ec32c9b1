// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The image behind a block device: a file or a block device of the host, raw or in a format.
//!
//! Owns the open file, its size and alignment as the host reports them, and the size of the disk in it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use log::warn;
use parking_lot::Mutex;
use thiserror::Error;

use super::device::BlockConfig;
use super::formatted::{DiskFormat, FormatError, Formatted};
use super::qcow2::Chain;
use super::stable_storage::Condition;
use super::synchronous::AlignedBuffer;
use super::vhd;
use super::vhdx::Vhdx;
use crate::syscalls::check;

/// Unit of sector numbers (virtio 1.3, 5.2.4).
pub(super) const SECTOR_BYTES: u64 = 512;
/// Maximum logical block size adopted from the host.
const BLOCK_BYTES_MAX: u64 = 4096;
/// Alignment for direct I/O if the host does not report one.
const DIRECT_ALIGN_DEFAULT_BYTES: u64 = 4096;

// Block device ioctls (linux/fs.h) that libc lacks.
const BLKSSZGET: libc::Ioctl = 0x1268;
const BLKPBSZGET: libc::Ioctl = 0x127b;
const BLKIOMIN: libc::Ioctl = 0x1278;
const BLKIOOPT: libc::Ioctl = 0x1279;
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The image cannot be opened.
    #[error("cannot open disk {path}{}", if *.direct { " with direct=on" } else { "" })]
    Open {
        /// Path of the image.
        path: PathBuf,
        /// Whether direct I/O is configured.
        direct: bool,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The path is neither a regular file nor a block device.
    #[error("disk {path} is neither a regular file nor a block device")]
    Kind {
        /// Path of the image.
        path: PathBuf,
    },
    /// The image cannot be used in the configured format.
    #[error("disk {path} cannot be used as {format}")]
    Format {
        /// Path of the image.
        path: PathBuf,
        /// The format.
        format: DiskFormat,
        /// The cause.
        #[source]
        source: FormatError,
    },
    /// The size cannot be determined.
    #[error("cannot find out about disk {path}")]
    Inspect {
        /// Path of the image.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another VM holds the lock.
    #[error(
        "disk {path} is in use by another VM (lock held): stop that VM, or give both readonly=on"
    )]
    InUse {
        /// Path of the image.
        path: PathBuf,
    },
    /// The lock cannot be taken or released.
    #[error("cannot change the lock on disk {path}")]
    Lock {
        /// Path of the image.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Written data could not be made stable.
    #[error(
        "writes to disk {path} that the guest counts as done could not be put on stable storage"
    )]
    NotStable {
        /// Path of the image.
        path: PathBuf,
        /// The error of this or an earlier flush.
        #[source]
        source: io::Error,
    },
    /// The page cache cannot be dropped, and may hold outdated contents.
    #[error("cannot drop what the page cache of this host has of disk {path}")]
    Cache {
        /// Path of the image.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The number or size of queues is invalid.
    #[error("disk {path} cannot have {what} {value}: it must be {allowed}")]
    Queues {
        /// Path of the image.
        path: PathBuf,
        /// Name of the value.
        what: &'static str,
        /// The value.
        value: u16,
        /// The valid range.
        allowed: &'static str,
    },
}

/// Block sizes reported to the guest.
#[expect(clippy::struct_field_names, reason = "the unit belongs to the name")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Topology {
    pub(super) logical_block_bytes: u64,
    pub(super) physical_block_bytes: u64,
    pub(super) io_min_bytes: u64,
    pub(super) io_opt_bytes: u64,
}

/// An open image.
pub(crate) struct Disk {
    path: PathBuf,
    file: Arc<File>,
    readonly: bool,
    direct: bool,
    is_device: bool,
    format: DiskFormat,
    /// Maps the disk to the file, if they differ; shared by successive devices.
    formatted: Option<Arc<Formatted>>,
    /// State of the open file, shared by successive devices.
    pub(super) condition: Arc<Condition>,
    file_len_bytes: AtomicU64,
    /// Size of the disk.
    size_bytes: AtomicU64,
    topology: Topology,
    /// Alignment of addresses and offsets for direct I/O in bytes; 1 without direct I/O.
    address_align_bytes: usize,
    offset_align_bytes: u64,
    /// Held during read-modify-write of a block.
    pub(super) partial_write: Mutex<()>,
    #[cfg(test)]
    pub(super) refusal: Arc<super::tests::Refusal>,
}

impl Disk {
    /// Opens a raw image.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn open(path: &Path, readonly: bool, direct: bool) -> Result<Self, DiskError> {
        let raw = BlockConfig { path: path.to_owned(), readonly, direct, ..BlockConfig::default() };
        Self::open_as(&raw)
    }

    /// Opens an image in a format, with its backing files. Its tables are not read yet.
    pub(crate) fn open_as(config: &BlockConfig) -> Result<Self, DiskError> {
        let disk = Self::open_file(&config.path, config.readonly, config.direct)?;
        disk.interpret(config.format, config.backing_files)
    }

    fn open_file(path: &Path, readonly: bool, direct: bool) -> Result<Self, DiskError> {
        // Opening a FIFO blocks, and O_NONBLOCK is not used for disks, as io_uring honours it.
        if path.metadata().is_ok_and(|there| there.file_type().is_fifo()) {
            return Err(DiskError::Kind { path: path.to_owned() });
        }
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new()
            .read(true)
            .write(!readonly)
            .custom_flags(flags | libc::O_CLOEXEC)
            .open(path)
            .map_err(|source| DiskError::Open { path: path.to_owned(), direct, source })?;
        Self::inspect(path, Arc::new(file), readonly, direct)
    }

    /// The same open file and lock, for the next device; its size is determined again.
    pub(super) fn again(&self) -> Result<Self, DiskError> {
        let mut disk =
            Self::inspect(&self.path, Arc::clone(&self.file), self.readonly, self.direct)?;
        disk.condition = Arc::clone(&self.condition);
        #[cfg(test)]
        disk.refusal.clone_from(&self.refusal);
        disk.format = self.format;
        if let Some(formatted) = &self.formatted {
            disk.take_format(Arc::clone(formatted));
        } else if self.format != DiskFormat::Raw {
            disk = disk.interpret(self.format, false)?;
        }
        Ok(disk)
    }

    /// Finds out about the disk in the file.
    fn interpret(mut self, format: DiskFormat, backing_files: bool) -> Result<Self, DiskError> {
        self.format = format;
        match format {
            DiskFormat::Raw => {}
            DiskFormat::FixedVhd => {
                let size_bytes = self.vhd_size_bytes();
                self.size_bytes =
                    AtomicU64::new(size_bytes.map_err(|source| self.format_error(source))?);
            }
            DiskFormat::Vhdx => {
                let vhdx = Vhdx::open(&self);
                let vhdx = vhdx.map_err(|source| self.format_error(source))?;
                self.take_format(Arc::new(Formatted::new(Box::new(vhdx))));
            }
            DiskFormat::Qcow2 => {
                let chain = Chain::open(&self, backing_files);
                let chain = chain.map_err(|source| self.format_error(source))?;
                self.take_format(Arc::new(Formatted::new(Box::new(chain))));
            }
        }
        self.warn_of_rest();
        Ok(self)
    }

    fn take_format(&mut self, formatted: Arc<Formatted>) {
        self.size_bytes = AtomicU64::new(formatted.size_bytes());
        // The blocks of the disk are those of the image, on every host that it moves to.
        let logical_block_bytes = formatted.sector_bytes();
        let physical_block_bytes = self.topology.physical_block_bytes.max(logical_block_bytes);
        self.topology = Topology {
            logical_block_bytes,
            physical_block_bytes,
            io_min_bytes: physical_block_bytes,
            io_opt_bytes: 0,
        };
        // What the host needs, the format's driver sees to.
        (self.address_align_bytes, self.offset_align_bytes) = (1, 1);
        self.formatted = Some(formatted);
    }

    fn vhd_size_bytes(&self) -> Result<u64, FormatError> {
        let too_short = || FormatError::Damaged("it is shorter than a footer".to_owned());
        let footer_bytes = vhd::FOOTER_BYTES as u64;
        let file_len_bytes = self.file_len_bytes();
        let at = file_len_bytes.checked_sub(footer_bytes).ok_or_else(too_short)?;
        // Direct I/O reads whole blocks, of which the file may have a part at its end.
        let start = at / DIRECT_ALIGN_DEFAULT_BYTES * DIRECT_ALIGN_DEFAULT_BYTES;
        let room = usize::try_from(2 * DIRECT_ALIGN_DEFAULT_BYTES).unwrap_or(usize::MAX);
        let mut buffer = AlignedBuffer::new(room);
        let buffer = buffer.get_mut(room)?;
        // One call: where the file ends, none that goes on from there is aligned.
        let len = self.file.read_at(buffer, start)?;
        let skip = usize::try_from(at - start).unwrap_or(0);
        let footer = buffer.get(..len).and_then(|read| read.get(skip..)?.first_chunk());
        vhd::size_bytes(footer.ok_or_else(too_short)?, file_len_bytes)
    }

    fn warn_of_rest(&self) {
        let rest_bytes = self.size_bytes() % self.topology.logical_block_bytes;
        if rest_bytes != 0 {
            warn!(
                "disk {}: the last {rest_bytes} bytes are not a whole block and are not visible to the guest",
                self.path.display(),
            );
        }
    }

    pub(super) fn inspect(
        path: &Path,
        file: Arc<File>,
        readonly: bool,
        direct: bool,
    ) -> Result<Self, DiskError> {
        let inspect = |source| DiskError::Inspect { path: path.to_owned(), source };
        let metadata = file.metadata().map_err(inspect)?;
        let kind = metadata.file_type();
        let is_device = kind.is_block_device();
        if !is_device && !kind.is_file() {
            return Err(DiskError::Kind { path: path.to_owned() });
        }
        let (address_align, offset_align) =
            if direct { direct_alignment(&file, is_device) } else { (1, 1) };
        let (file_len_bytes, topology) = if is_device {
            let len_bytes = device_len_bytes(&file).map_err(inspect)?;
            (len_bytes, device_topology(&file))
        } else {
            let block_bytes = offset_align.clamp(SECTOR_BYTES, BLOCK_BYTES_MAX);
            let topology = Topology {
                logical_block_bytes: block_bytes,
                physical_block_bytes: block_bytes,
                io_min_bytes: block_bytes,
                io_opt_bytes: 0,
            };
            (metadata.len(), topology)
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            readonly,
            direct,
            is_device,
            format: DiskFormat::Raw,
            formatted: None,
            condition: Arc::default(),
            file_len_bytes: AtomicU64::new(file_len_bytes),
            size_bytes: AtomicU64::new(file_len_bytes),
            topology,
            address_align_bytes: usize::try_from(address_align).unwrap_or(4096),
            offset_align_bytes: offset_align,
            partial_write: Mutex::new(()),
            #[cfg(test)]
            refusal: Arc::default(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The same file, for what maps the disk to it.
    pub(super) fn share_file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    pub(super) fn format(&self) -> DiskFormat {
        self.format
    }

    /// What maps the disk to the file, where the file is not the disk.
    pub(super) fn formatted(&self) -> Option<&Formatted> {
        self.formatted.as_deref()
    }

    /// Adds the image to an error of its format.
    pub(super) fn format_error(&self, source: FormatError) -> DiskError {
        DiskError::Format { path: self.path.clone(), format: self.format, source }
    }

    /// Fills a buffer, which is aligned as the disk asks for, from the disk.
    pub(super) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.formatted {
            Some(formatted) => formatted.read(buffer, offset),
            None => self.file.read_exact_at(buffer, offset),
        }
    }

    /// Puts such a buffer on the disk.
    pub(super) fn write_all_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        match &self.formatted {
            Some(formatted) => formatted.write(buffer, offset),
            None => self.file.write_all_at(buffer, offset),
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The file for a write within the kernel; tests may refuse it.
    pub(super) fn file_to_change(&self) -> &File {
        #[cfg(test)]
        if let Some(full) = self.refusal.file() {
            return full;
        }
        &self.file
    }

    /// Whether the next call may change the image: always, except in tests.
    #[cfg_attr(not(test), expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests"))]
    pub(super) fn may_change(&self) -> io::Result<()> {
        #[cfg(test)]
        self.refusal.check()?;
        Ok(())
    }

    pub(super) fn readonly(&self) -> bool {
        self.readonly
    }

    pub(super) fn direct(&self) -> bool {
        self.direct
    }

    /// Whether the image is a host block device.
    pub(super) fn is_device(&self) -> bool {
        self.is_device
    }

    /// Discards a range of a block device. Punching a hole would make it read as zeros, which some devices
    /// implement by writing all of it, and others refuse.
    pub(super) fn discard_on_device(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let range = [offset, len_bytes];
        // SAFETY: BLKDISCARD reads two u64, which is what it gets; the descriptor is open.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD, &raw const range) })?;
        Ok(())
    }

    pub(super) fn file_len_bytes(&self) -> u64 {
        self.file_len_bytes.load(Ordering::Acquire)
    }

    /// Size of the disk, which may end in a part of a block.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Length of the file or device now.
    pub(super) fn host_len_bytes(&self) -> io::Result<u64> {
        file_or_device_len_bytes(&self.file)
    }

    /// Notes that a raw disk and its file have another size. Requests that are taken from now on are compared with it.
    pub(super) fn set_size_bytes(&self, size_bytes: u64) {
        self.file_len_bytes.store(size_bytes, Ordering::Release);
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    pub(super) fn topology(&self) -> Topology {
        self.topology
    }

    /// Size in sectors, rounded down to whole blocks.
    pub(super) fn capacity_sectors(&self) -> u64 {
        let block_bytes = self.topology.logical_block_bytes;
        self.size_bytes() / block_bytes * (block_bytes / SECTOR_BYTES)
    }

    /// What space is freed in units of.
    pub(super) fn discard_unit_bytes(&self) -> u64 {
        let unit_bytes = self.formatted.as_ref().map_or(0, |formatted| formatted.unit_bytes());
        unit_bytes.max(self.topology.logical_block_bytes)
    }

    pub(super) fn address_align_bytes(&self) -> usize {
        self.address_align_bytes
    }

    pub(super) fn offset_align_bytes(&self) -> u64 {
        self.offset_align_bytes
    }

    /// The disk with other alignments, as if the host required them.
    #[cfg(test)]
    pub(super) fn with_alignment(mut self, address_bytes: usize, offset_bytes: u64) -> Self {
        self.address_align_bytes = address_bytes;
        self.offset_align_bytes = offset_bytes;
        self
    }
}

/// Alignments of memory and of file offsets for direct I/O, in bytes.
pub(super) fn direct_alignment(file: &File, is_device: bool) -> (u64, u64) {
    if let Some((memory, offset)) = reported_alignment(file) {
        return (memory, offset);
    }
    if is_device {
        let block_bytes = device_topology(file).logical_block_bytes;
        return (block_bytes, block_bytes);
    }
    (DIRECT_ALIGN_DEFAULT_BYTES, DIRECT_ALIGN_DEFAULT_BYTES)
}

/// The alignment that the kernel reports (Linux 6.1 and later), if usable.
fn reported_alignment(file: &File) -> Option<(u64, u64)> {
    // SAFETY: statx is a plain C struct for which all zeros is a valid value.
    let mut answer: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, `answer` is a valid statx to be filled, and the
    // descriptor is open.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut answer,
        )
    };
    check(result).ok()?;
    let usable = |bytes: u32| bytes.is_power_of_two() && u64::from(bytes) <= BLOCK_BYTES_MAX;
    let (memory, offset) = (answer.stx_dio_mem_align, answer.stx_dio_offset_align);
    let known = answer.stx_mask & libc::STATX_DIOALIGN != 0;
    (known && usable(memory) && usable(offset)).then(|| (memory.into(), offset.into()))
}

/// Length of a file, or size of a device.
pub(super) fn file_or_device_len_bytes(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() { device_len_bytes(file) } else { Ok(metadata.len()) }
}

fn device_len_bytes(file: &File) -> io::Result<u64> {
    let mut len_bytes: u64 = 0;
    // SAFETY: BLKGETSIZE64 writes one u64, which is what it gets; the descriptor is open.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut len_bytes) })?;
    Ok(len_bytes)
}

fn device_topology(file: &File) -> Topology {
    let ask = |request: libc::Ioctl| {
        let mut value: libc::c_uint = 0;
        // SAFETY: each of these requests writes one (unsigned) int; the descriptor is open.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) };
        check(result).ok().map(|_| u64::from(value))
    };
    let block = |bytes: Option<u64>, least: u64| {
        bytes.filter(|bytes| bytes.is_power_of_two()).unwrap_or(least).max(least)
    };
    let logical_block_bytes = block(ask(BLKSSZGET), SECTOR_BYTES);
    Topology {
        logical_block_bytes,
        physical_block_bytes: block(ask(BLKPBSZGET), logical_block_bytes),
        io_min_bytes: block(ask(BLKIOMIN), logical_block_bytes),
        io_opt_bytes: ask(BLKIOOPT).unwrap_or(0),
    }
}
