// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The file behind a zone that names one: opened or created, locked, examined, sized, emptied.
//!
//! Owns the order of these steps: nothing changes a file before this process has its lock,
//! and the lock is that of the file that is at the path then. Must never shrink a file, never remove one
//! that it has not created and locked, and never open what is neither a file nor a directory.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::PAGE_BYTES;
use crate::backing_error::BackingError;
use crate::config::ZoneSpec;
use crate::file_lock::{self, FileUse, LockError};
use crate::populated::file_data_runs;
use crate::zone_kind::ZoneKind;

/// `f_type` of hugetlbfs.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
const TMPFS_MAGIC: u64 = 0x0102_1994;
const NFS_MAGIC: u64 = 0x6969;

/// Most times that a file is opened anew because another has replaced it meanwhile; endless replacement is
/// an error.
const OPENINGS_MAX: u32 = 16;

/// Bytes that are emptied per system call: a signal waits for the end of the call.
const EMPTY_STEP_BYTES: u64 = 1 << 30;

/// A file of guest memory that stays locked while its zone does not exist, as during a reboot.
#[derive(Debug, Clone)]
pub struct LockedFile {
    pub(crate) zone: String,
    pub(crate) file: Arc<File>,
    pub(crate) kind: ZoneKind,
}

/// An open file that this process has locked.
#[derive(Debug)]
pub struct ZoneFile {
    file: Arc<File>,
    path: PathBuf,
    kind: ZoneKind,
    hugetlb_page_bytes: Option<u64>,
    holds_data: bool,
    locked: bool,
    /// The file is removed if it is not used.
    remove: bool,
}

impl ZoneFile {
    /// Opens or creates the file at `path` and locks it. For a directory it creates an unnamed file, which
    /// needs no lock. The lock in `held` is used if it is of the file at `path`.
    ///
    /// # Errors
    /// When it cannot be opened, is not a file, or another process uses it.
    pub fn open(
        zone: &ZoneSpec,
        path: &Path,
        locked: Option<&LockedFile>,
    ) -> Result<Self, BackingError> {
        let error = |source| open_error(zone, path, source);
        if let Ok(data) = fs::metadata(path) {
            if data.is_dir() {
                let file = unnamed_in(path, &options()).map_err(error)?;
                return Self::of(zone, path, Arc::new(file), ZoneKind::Shared);
            }
            if !data.is_file() {
                return Err(not_a_file(zone, path));
            }
        }
        for _ in 0..OPENINGS_MAX {
            let locked = locked.filter(|locked| is_at(path, &locked.file));
            let (file, created) = match locked {
                Some(locked) => (Arc::clone(&locked.file), false),
                None => open_or_create(path).map_err(error).map(|(f, new)| (Arc::new(f), new))?,
            };
            if !file.metadata().map_err(error)?.is_file() {
                return Err(not_a_file(zone, path));
            }
            // Data that the VM has written itself may be written again.
            let may_write =
                zone.shared || locked.is_some_and(|locked| locked.kind == ZoneKind::Shared);
            let kind = match lock_as_needed(zone, path, &file, may_write) {
                Ok(kind) => kind,
                Err(error) => {
                    // Another process that has locked a file created here may continue to use it.
                    if created && !matches!(error, BackingError::InUse { .. }) {
                        let _ = fs::remove_file(path);
                    }
                    return Err(error);
                }
            };
            if is_at(path, &file) {
                let mut opened = Self::of(zone, path, file, kind)?;
                (opened.locked, opened.remove) = (true, created);
                return Ok(opened);
            }
        }
        Err(BackingError::Replaced { zone: zone.id.clone(), path: path.to_owned() })
    }

    fn of(
        zone: &ZoneSpec,
        path: &Path,
        file: Arc<File>,
        kind: ZoneKind,
    ) -> Result<Self, BackingError> {
        let error = |source| open_error(zone, path, source);
        let hugetlb_page_bytes = hugetlbfs_page_bytes(&file).map_err(error)?;
        let holds_data = zone_holds_data(zone, &file).map_err(error)?;
        let path = path.to_owned();
        let (locked, remove) = (false, false);
        Ok(Self { file, path, kind, hugetlb_page_bytes, holds_data, locked, remove })
    }

    /// How it is to be mapped: privately if it holds data that the zone must not change.
    pub fn kind(&self) -> ZoneKind {
        self.kind
    }

    /// The page size, if the file is on hugetlbfs.
    pub fn hugetlb_page_bytes(&self) -> Option<u64> {
        self.hugetlb_page_bytes
    }

    /// True when a page of the zone may not be zero.
    pub fn holds_data(&self) -> bool {
        self.holds_data
    }

    /// Length of the file of `zone`.
    pub fn len_bytes(&self, zone: &ZoneSpec) -> Result<u64, BackingError> {
        let metadata = self.file.metadata();
        metadata.map(|data| data.len()).map_err(|source| open_error(zone, &self.path, source))
    }

    /// True when others can open it and a lock keeps them from using it.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// Extends the file to the length of the zone.
    ///
    /// # Errors
    /// When it must not be changed, or the file system has no room.
    pub fn size(&self, zone: &ZoneSpec) -> Result<(), BackingError> {
        let (id, path) = (|| zone.id.clone(), || self.path.clone());
        zone.check_page_size(self.hugetlb_page_bytes.unwrap_or(PAGE_BYTES))?;
        let metadata =
            self.file.metadata().map_err(|source| open_error(zone, &self.path, source))?;
        let (len_bytes, size_bytes) = (metadata.len(), zone.size_bytes);
        let private = self.kind == ZoneKind::PrivateFile;
        if len_bytes < size_bytes {
            if private {
                let (zone, path) = (id(), path());
                return Err(BackingError::ShortPrivateFile { zone, path, len_bytes, size_bytes });
            }
            let error =
                |source| BackingError::SizeFile { zone: id(), path: path(), size_bytes, source };
            self.file.set_len(size_bytes).map_err(error)?;
        }
        if zone.reserve && !private && self.hugetlb_page_bytes.is_none() {
            check_room(zone, &self.path, &self.file, metadata.blocks().saturating_mul(512))?;
        }
        Ok(())
    }

    /// Returns the file, which is kept.
    pub fn into_file(mut self) -> Arc<File> {
        self.remove = false;
        Arc::clone(&self.file)
    }
}

impl Drop for ZoneFile {
    fn drop(&mut self) {
        // Under the lock of the file at the path, no other process has used it.
        if self.remove && is_at(&self.path, &self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether [`ZoneFile::open`] would find a file that it may use. Nothing is made, and nothing is locked.
///
/// # Errors
/// As [`ZoneFile::open`], as far as that is known before.
pub fn look(zone: &ZoneSpec, path: &Path) -> Result<(), BackingError> {
    let error = |source| open_error(zone, path, source);
    match fs::metadata(path) {
        Ok(data) if data.is_dir() => Ok(()),
        Ok(data) if data.is_file() => {
            let file = options().open(path).map_err(error)?;
            // A file with data is only read without shared=on.
            let wanted = if zone.shared || !zone_holds_data(zone, &file).map_err(error)? {
                FileUse::Written
            } else {
                FileUse::Read
            };
            if file_lock::is_free(&file, wanted) {
                return Ok(());
            }
            Err(in_use(zone, path, &file))
        }
        Ok(_) => Err(not_a_file(zone, path)),
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = fs::metadata(folder.unwrap_or(Path::new("."))).map_err(error)?;
            if folder.is_dir() { Ok(()) } else { Err(error(missing)) }
        }
        Err(other) => Err(error(other)),
    }
}

fn in_use(zone: &ZoneSpec, path: &Path, file: &File) -> BackingError {
    let identity = file.metadata().map_or((0, 0), |data| (data.dev(), data.ino()));
    let (zone, path, holder) = (zone.id.clone(), path.to_owned(), file_lock::holders(file));
    BackingError::InUse { zone, path, holder, identity }
}

fn open_error(zone: &ZoneSpec, path: &Path, source: io::Error) -> BackingError {
    BackingError::OpenFile { zone: zone.id.clone(), path: path.to_owned(), source }
}

fn not_a_file(zone: &ZoneSpec, path: &Path) -> BackingError {
    BackingError::NotAFile { zone: zone.id.clone(), path: path.to_owned() }
}

/// Locks a file as its use requires, which depends on whether it holds data that the zone must not write
/// (without `may_write`).
fn lock_as_needed(
    zone: &ZoneSpec,
    path: &Path,
    file: &File,
    may_write: bool,
) -> Result<ZoneKind, BackingError> {
    let lock = |wanted| lock_for(zone, path, file, wanted);
    let is_data = || zone_holds_data(zone, file).map_err(|source| open_error(zone, path, source));
    if may_write {
        return lock(FileUse::Written).map(|()| ZoneKind::Shared);
    }
    // Checked under a lock that other readers can hold at the same time.
    lock(FileUse::Read)?;
    if is_data()? {
        return Ok(ZoneKind::PrivateFile);
    }
    if lock(FileUse::Written).is_ok() {
        return Ok(ZoneKind::Shared);
    }
    // Two processes that check at the same moment exclude each other. Both drop their read locks; one of
    // them gets the write lock, and by then the file may hold data.
    let _ = file_lock::unlock(file);
    lock(FileUse::Written)?;
    if is_data()? {
        lock(FileUse::Read)?;
        return Ok(ZoneKind::PrivateFile);
    }
    Ok(ZoneKind::Shared)
}

/// Locks the file of a zone.
///
/// # Errors
/// Names the zone, the path, and the holder of the lock.
pub fn lock_for(
    zone: &ZoneSpec,
    path: &Path,
    file: &File,
    wanted: FileUse,
) -> Result<(), BackingError> {
    file_lock::lock(file, wanted).map_err(|error| {
        let (id, path) = (zone.id.clone(), path.to_owned());
        match error {
            LockError::Held => in_use(zone, &path, file),
            LockError::NoLocks => BackingError::NoLocks { zone: id, path },
            LockError::Other(source) => BackingError::LockFile { zone: id, path, source },
        }
    })
}

/// Discards the first `len_bytes` of a file: they read as zero and use no space.
///
/// # Errors
/// When the file system supports neither way of doing that.
pub fn empty(file: &File, len_bytes: u64) -> io::Result<()> {
    let end = file.metadata()?.len().min(len_bytes);
    let mut at = 0;
    while at < end {
        let step = EMPTY_STEP_BYTES.min(end - at);
        match punch_hole(file, at, step) {
            Ok(()) => at += step,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                return cut_and_extend(file, len_bytes, error);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The same where holes cannot be punched; data after `len_bytes` must not be lost.
fn cut_and_extend(file: &File, len_bytes: u64, why: io::Error) -> io::Result<()> {
    let whole = file.metadata()?.len();
    if whole > len_bytes {
        return Err(why);
    }
    file.set_len(0)?;
    file.set_len(whole)
}

fn punch_hole(file: &File, at: u64, len_bytes: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
    let len = libc::off_t::try_from(len_bytes).map_err(io::Error::other)?;
    // SAFETY: takes numbers only; the descriptor is open.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, at, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True when `file` belongs to a zone with this path on this host: it is the file at the path, or an
/// unnamed file in the directory at the path.
pub fn is_of(path: &Path, file: &File) -> bool {
    let (Ok(there), Ok(ours)) = (fs::metadata(path), file.metadata()) else { return false };
    is_at(path, file) || there.is_dir() && ours.nlink() == 0 && there.dev() == ours.dev()
}

/// True when `file` is at `path` now.
fn is_at(path: &Path, file: &File) -> bool {
    let identity = |data: fs::Metadata| (data.dev(), data.ino());
    let there = fs::metadata(path).map(identity);
    matches!((there, file.metadata().map(identity)), (Ok(there), Ok(ours)) if there == ours)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    // Without O_NONBLOCK, opening a pipe without a peer would block forever.
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NONBLOCK);
    options
}

/// Opens the file at `path`, or creates it (true). Its contents are not touched.
fn open_or_create(path: &Path) -> io::Result<(File, bool)> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    // A file that exists for `create_new` and not for `open` was removed in between.
    for _ in 0..OPENINGS_MAX {
        match options().create_new(true).open(path) {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        match options().open(path) {
            Ok(file) => return Ok((file, false)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// A file in `dir` that is removed with its last descriptor.
fn unnamed_in(dir: &Path, options: &OpenOptions) -> io::Result<File> {
    match options.clone().custom_flags(libc::O_TMPFILE).open(dir) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            named_then_removed(dir, options)
        }
        result => result,
    }
}

fn named_then_removed(dir: &Path, options: &OpenOptions) -> io::Result<File> {
    /// Existing names are skipped, up to a limit.
    const TRIES_MAX: u32 = 1000;
    let pid = std::process::id();
    for number in 0..TRIES_MAX {
        let path = dir.join(format!(".guest-ram-{pid}-{number}"));
        match options.clone().create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

fn file_system(file: &File) -> io::Result<libc::statfs> {
    // SAFETY: all-zero bytes are a valid value of this plain C structure.
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `info` outlives the call.
    match unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut info) } {
        0 => Ok(info),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Room that the file's system has left; `None` if it has no limit, or does not say.
pub fn free_bytes(file: &File) -> Option<u64> {
    // A tmpfs without a limit reports no blocks at all.
    let info = file_system(file).ok().filter(|info| info.f_blocks > 0)?;
    Some(info.f_bavail.saturating_mul(u64::try_from(info.f_bsize).ok()?))
}

/// True when the file is on another host, of which NFS is asked.
pub fn is_on_nfs(file: &File) -> bool {
    file_system(file).is_ok_and(|info| u64::try_from(info.f_type) == Ok(NFS_MAGIC))
}

/// True when the file exists in memory only. If that is unknown, it does not count as such.
pub fn is_in_memory(file: &File) -> bool {
    file_system(file).is_ok_and(|info| u64::try_from(info.f_type) == Ok(TMPFS_MAGIC))
}

/// The page size, if the file is on hugetlbfs.
pub fn hugetlbfs_page_bytes(file: &File) -> io::Result<Option<u64>> {
    let info = file_system(file)?;
    if u64::try_from(info.f_type) != Ok(HUGETLBFS_MAGIC) {
        return Ok(None);
    }
    Ok(u64::try_from(info.f_bsize).ok().filter(|size| size.is_power_of_two()))
}

/// True when any of the first `len_bytes` of a file may not be zero.
pub fn holds_data(file: &File, len_bytes: u64, hugetlb: bool) -> io::Result<bool> {
    if hugetlb {
        // hugetlbfs cannot list holes.
        return Ok(file.metadata()?.blocks() > 0);
    }
    Ok(len_bytes > 0 && !file_data_runs(file, 0..len_bytes)?.is_empty())
}

/// The same for the part of a file that the zone uses.
fn zone_holds_data(zone: &ZoneSpec, file: &File) -> io::Result<bool> {
    let used_bytes = file.metadata()?.len().min(zone.size_bytes);
    holds_data(file, used_bytes, hugetlbfs_page_bytes(file)?.is_some())
}

/// Checks for `reserve=on` that the file system has room for the unallocated part of a file.
fn check_room(
    zone: &ZoneSpec,
    path: &Path,
    file: &File,
    allocated_bytes: u64,
) -> Result<(), BackingError> {
    // A file system that does not report its free space is not checked.
    let Some(free_bytes) = free_bytes(file) else { return Ok(()) };
    let missing_bytes = zone.size_bytes.saturating_sub(allocated_bytes);
    if missing_bytes > free_bytes {
        let (zone, path) = (zone.id.clone(), path.to_owned());
        return Err(BackingError::FileSystemFull { zone, path, missing_bytes, free_bytes });
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
#[path = "zone_file_tests.rs"]
mod tests;
