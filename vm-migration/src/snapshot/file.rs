// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory file of a snapshot: reads and writes between it and guest memory, bypassing the page cache.
//!
//! May contain `unsafe`: vectored reads and writes, and one view of aligned pages as bytes. Owns
//! the choice between O_DIRECT and the page cache: a file system that refuses direct access is
//! used through the cache, from which the transferred pages are then dropped. Transfers are multiples of a
//! page at page-aligned offsets, as O_DIRECT requires.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::SnapshotError;
use crate::iovecs::Iovecs;
use crate::layout::{PAGE_BYTES, to_usize};
use crate::ram::GuestSlice;

/// A page with page alignment.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// A page-aligned buffer.
pub(crate) struct AlignedBuffer {
    pages: Vec<Page>,
}

impl AlignedBuffer {
    /// A buffer of `pages` pages, all zero.
    pub(crate) fn new(pages: u64) -> Self {
        Self { pages: vec![Page([0; 4096]); to_usize(pages)] }
    }

    /// The buffer's bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.pages.len() * size_of::<Page>();
        // SAFETY: pages are plain bytes without padding, initialised and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), len) }
    }
}

/// One piece of a transfer.
pub(crate) enum Piece<'m> {
    /// Guest memory.
    Guest(GuestSlice<'m>),
    /// This many bytes between others of the file: zeros when written, ignored when read.
    Gap(usize),
}

/// The memory file.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    file: File,
    path: PathBuf,
    direct: AtomicBool,
}

impl MemoryFile {
    /// Creates a file of this length, without contents.
    pub(crate) fn create(path: &Path, len_bytes: u64) -> Result<Self, SnapshotError> {
        let memory = Self::create_empty(path)?;
        memory.set_len(len_bytes)?;
        Ok(memory)
    }

    /// Creates an empty file.
    pub(crate) fn create_empty(path: &Path) -> Result<Self, SnapshotError> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        Self::open_with(&options, path, "create")
    }

    /// Makes it this long; what is new are holes.
    pub(crate) fn set_len(&self, len_bytes: u64) -> Result<(), SnapshotError> {
        self.file.set_len(len_bytes).map_err(SnapshotError::io("set the length of", &self.path))
    }

    /// What the host says of it.
    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Opens a file for reading.
    pub(crate) fn open(path: &Path) -> Result<Self, SnapshotError> {
        // Opening a pipe would wait for its other end.
        if path.metadata().is_ok_and(|there| !there.is_file()) {
            return Err(SnapshotError::Foreign(path.to_owned()));
        }
        Self::open_with(OpenOptions::new().read(true), path, "open")
    }

    fn open_with(
        options: &OpenOptions,
        path: &Path,
        what: &'static str,
    ) -> Result<Self, SnapshotError> {
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(path);
        let (file, direct) = match direct {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                // Some file systems create the file before they refuse `O_DIRECT`.
                (options.clone().create_new(false).open(path), false)
            }
            other => (other, true),
        };
        let file = file.map_err(SnapshotError::io(what, path))?;
        Ok(Self { file, path: path.to_owned(), direct: AtomicBool::new(direct) })
    }

    /// Another descriptor of the file.
    pub(crate) fn share(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// True when the page cache is bypassed.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its current length.
    pub(crate) fn len_bytes(&self) -> Result<u64, SnapshotError> {
        let metadata = self.file.metadata().map_err(SnapshotError::io("look at", &self.path))?;
        Ok(metadata.len())
    }

    /// Syncs the file.
    pub(crate) fn sync(&self) -> Result<(), SnapshotError> {
        self.file.sync_all().map_err(SnapshotError::io("write to the disk", &self.path))
    }

    /// Writes pieces consecutively from `offset` on.
    pub(crate) fn write(&self, pieces: &[Piece<'_>], offset: u64) -> Result<(), SnapshotError> {
        // The kernel only reads from it.
        let mut zeros = gap_buffer(pieces);
        self.transfer(pieces, &mut zeros, offset, libc::pwritev)
            .map_err(SnapshotError::io("write", &self.path))
    }

    /// Reads pieces consecutively from `offset` on.
    pub(crate) fn read(&self, pieces: &[Piece<'_>], offset: u64) -> Result<(), SnapshotError> {
        let mut scratch = gap_buffer(pieces);
        self.transfer(pieces, &mut scratch, offset, libc::preadv)
            .map_err(SnapshotError::io("read", &self.path))
    }

    /// Writes a buffer.
    pub(crate) fn write_buffer(
        &self,
        buffer: &mut AlignedBuffer,
        offset: u64,
    ) -> Result<(), SnapshotError> {
        let bytes = buffer.bytes_mut();
        let start = bytes.as_mut_ptr();
        let mut iovecs = [libc::iovec { iov_base: start.cast(), iov_len: bytes.len() }];
        self.transfer_all(&mut iovecs, offset, libc::pwritev)
            .map_err(SnapshotError::io("write", &self.path))
    }

    /// Reads into a buffer.
    pub(crate) fn read_buffer(&self, buffer: &mut [u8], offset: u64) -> Result<(), SnapshotError> {
        let start = buffer.as_mut_ptr();
        let mut iovecs = [libc::iovec { iov_base: start.cast(), iov_len: buffer.len() }];
        self.transfer_all(&mut iovecs, offset, libc::preadv)
            .map_err(SnapshotError::io("read", &self.path))
    }

    fn transfer(
        &self,
        pieces: &[Piece<'_>],
        gaps: &mut AlignedBuffer,
        offset: u64,
        call: Call,
    ) -> io::Result<()> {
        let gap = gaps.bytes_mut().as_mut_ptr();
        let mut iovecs: Vec<libc::iovec> = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Guest(slice) => {
                    libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() }
                }
                Piece::Gap(len) => libc::iovec { iov_base: gap.cast(), iov_len: *len },
            })
            .collect();
        self.transfer_all(&mut iovecs, offset, call)
    }

    /// Transfers all of `iovecs`, which the callers in this file build from guest slices and buffers that
    /// outlive the call.
    fn transfer_all(
        &self,
        iovecs: &mut [libc::iovec],
        mut offset: u64,
        call: Call,
    ) -> io::Result<()> {
        let (start, mut total) = (offset, 0);
        let mut left = Iovecs::new(iovecs);
        while let Some(now) = left.next_call() {
            let at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
            // SAFETY: each entry is guest memory, mapped readable and writable (contract of
            // `GuestMemoryMap`), or a live buffer of this process that is exclusively ours; the
            // kernel may race with the guest, never with references of ours.
            let done = unsafe {
                call(
                    self.file.as_raw_fd(),
                    now.as_ptr(),
                    libc::c_int::try_from(now.len()).unwrap_or(libc::c_int::MAX),
                    at,
                )
            };
            let done = match usize::try_from(done) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(done) => done,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() == io::ErrorKind::Interrupted || self.without_direct(&error) {
                        continue;
                    }
                    return Err(error);
                }
            };
            offset += done as u64;
            total += done as u64;
            left.advance(done);
        }
        if !self.is_direct() {
            self.forget(start, total);
        }
        Ok(())
    }

    /// Continues without `O_DIRECT` after a transfer was refused although the file was opened with it (a
    /// disk with larger blocks, for example). True when it was switched off.
    fn without_direct(&self, error: &io::Error) -> bool {
        if error.raw_os_error() != Some(libc::EINVAL) || !self.direct.swap(false, Ordering::Relaxed)
        {
            return false;
        }
        log::info!("{} cannot be accessed past the page cache", self.path.display());
        // SAFETY: flags by value on our own descriptor.
        unsafe {
            let flags = libc::fcntl(self.file.as_raw_fd(), libc::F_GETFL);
            libc::fcntl(self.file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) == 0
        }
    }

    /// Drops a transferred range from the page cache, as far as it is on the disk.
    fn forget(&self, offset: u64, len_bytes: u64) {
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len_bytes)) else {
            return;
        };
        let fd = self.file.as_raw_fd();
        // SAFETY: numbers by value on our own descriptor. Both are advice; failing is no harm.
        unsafe {
            libc::sync_file_range(fd, offset, len, libc::SYNC_FILE_RANGE_WRITE);
            libc::posix_fadvise(fd, offset, len, libc::POSIX_FADV_DONTNEED);
        }
    }
}

type Call = unsafe extern "C" fn(
    libc::c_int,
    *const libc::iovec,
    libc::c_int,
    libc::off_t,
) -> libc::ssize_t;

/// A buffer of zeros, as long as the longest gap.
fn gap_buffer(pieces: &[Piece<'_>]) -> AlignedBuffer {
    let gap = |piece: &Piece<'_>| match piece {
        Piece::Gap(len) => *len as u64,
        Piece::Guest(_) => 0,
    };
    AlignedBuffer::new(pieces.iter().map(gap).max().unwrap_or(0).div_ceil(PAGE_BYTES))
}
