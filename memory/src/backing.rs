// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is behind a zone: anonymous memory, a memfd, a hugetlb memfd, or a file.
//!
//! Owns creating and sizing it. Must never shrink a file, never touch data that a file already
//! holds unless the zone is shared, and leave no file behind when it fails.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{Backing, ConfigError, HugePageSize, ZoneSpec};
use crate::host::{Host, HugePagePolicy};
use crate::populated::file_data_runs;
use crate::{PAGE_BYTES, ZoneKind};

/// `f_type` of hugetlbfs.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The pages of a zone, not yet mapped.
#[derive(Debug)]
pub struct ZoneBacking {
    pub kind: ZoneKind,
    pub file: Option<Arc<File>>,
    pub page_bytes: u64,
    pub hugetlb: bool,
    /// The file held data before the guest: the zero map has to know.
    pub holds_data: bool,
    /// Populated and zeroed before it came here.
    pub prezeroed: bool,
}

/// What is in a file that is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivenContent {
    /// Anything.
    Unknown,
    /// Every page is there, and zero.
    PopulatedZeroes,
}

/// A backing that could not be had.
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
    GivenFile { zone: String, what: &'static str },
    #[error("memory zone '{zone}': the file handed over for it could not be examined")]
    ExamineGivenFile {
        zone: String,
        #[source]
        source: io::Error,
    },
}

impl ZoneBacking {
    /// The backing of `zone` on a host with this huge page policy.
    pub fn create(
        zone: &ZoneSpec,
        host: &Host,
        policy: HugePagePolicy,
    ) -> Result<Self, BackingError> {
        match &zone.backing {
            Backing::Anonymous => Ok(Self::anonymous()),
            Backing::Auto if prefers_private(zone, policy) => Ok(Self::anonymous()),
            Backing::Auto | Backing::Memfd => Self::memfd(zone),
            Backing::Hugetlb { page_size } => Self::hugetlb(zone, *page_size, host),
            Backing::File(path) => Self::path(zone, path),
        }
    }

    fn anonymous() -> Self {
        Self {
            kind: ZoneKind::PrivateAnonymous,
            file: None,
            page_bytes: PAGE_BYTES,
            hugetlb: false,
            holds_data: false,
            prezeroed: false,
        }
    }

    fn shared(file: File, page_bytes: u64, hugetlb: bool) -> Self {
        let file = Some(Arc::new(file));
        let kind = ZoneKind::Shared;
        Self { kind, file, page_bytes, hugetlb, holds_data: false, prezeroed: false }
    }

    fn memfd(zone: &ZoneSpec) -> Result<Self, BackingError> {
        let file = sized_memfd(zone, 0)?;
        Ok(Self::shared(file, PAGE_BYTES, false))
    }

    fn hugetlb(zone: &ZoneSpec, size: HugePageSize, host: &Host) -> Result<Self, BackingError> {
        let page_bytes = size.bytes().or_else(|| host.default_huge_page_bytes()).unwrap_or(2 << 20);
        zone.check_page_size(page_bytes)?;
        if host.hugetlb_pool(page_bytes).is_none() {
            return Err(BackingError::NoSuchHugePages { zone: zone.id.clone(), page_bytes });
        }
        // The kernel takes the logarithm of the page size in the upper bits of the flags.
        let flags = libc::MFD_HUGETLB | (page_bytes.trailing_zeros() << libc::MFD_HUGE_SHIFT);
        let file = sized_memfd(zone, flags)?;
        Ok(Self::shared(file, page_bytes, true))
    }

    fn path(zone: &ZoneSpec, path: &Path) -> Result<Self, BackingError> {
        let id = || zone.id.clone();
        let opened = open(path).map_err(|source| BackingError::OpenFile {
            zone: id(),
            path: path.to_owned(),
            source,
        })?;
        let result = Self::opened(zone, path, &opened.file);
        match result {
            Ok(shape) => Ok(Self { file: Some(Arc::new(opened.file)), ..shape }),
            Err(error) => {
                if opened.created {
                    let _ = std::fs::remove_file(path);
                }
                Err(error)
            }
        }
    }

    /// Examines and sizes an open file; the result lacks the file itself.
    fn opened(zone: &ZoneSpec, path: &Path, file: &File) -> Result<Self, BackingError> {
        let id = || zone.id.clone();
        let open_error = |source| BackingError::OpenFile { zone: id(), path: path.into(), source };
        let metadata = file.metadata().map_err(open_error)?;
        if !metadata.is_file() {
            return Err(BackingError::NotAFile { zone: id(), path: path.into() });
        }
        let hugetlb_page = hugetlbfs_page_bytes(file).map_err(open_error)?;
        let page_bytes = hugetlb_page.unwrap_or(PAGE_BYTES);
        zone.check_page_size(page_bytes)?;
        let len_bytes = metadata.len();
        let size_bytes = zone.size_bytes;
        let used = len_bytes.min(size_bytes);
        let holds_data = holds_data(file, used, hugetlb_page.is_some()).map_err(open_error)?;
        let private = holds_data && !zone.shared;
        if len_bytes < size_bytes {
            if private {
                let path = path.to_owned();
                return Err(BackingError::ShortPrivateFile {
                    zone: id(),
                    path,
                    len_bytes,
                    size_bytes,
                });
            }
            file.set_len(size_bytes).map_err(|source| BackingError::SizeFile {
                zone: id(),
                path: path.into(),
                size_bytes,
                source,
            })?;
        }
        if zone.reserve && !private && hugetlb_page.is_none() {
            check_room(zone, path, file, metadata.blocks().saturating_mul(512))?;
        }
        let kind = if private { ZoneKind::PrivateFile } else { ZoneKind::Shared };
        let hugetlb = hugetlb_page.is_some();
        Ok(Self { kind, file: None, page_bytes, hugetlb, holds_data, prezeroed: false })
    }

    /// The backing of `zone` from a file that somebody handed over. It must be of the kind that the
    /// zone asks for, and nobody may be able to make it shorter: that would be a SIGBUS later.
    ///
    /// Where its content is known to be zero it is not looked for, which would take time that grows
    /// with the size.
    pub fn given(
        zone: &ZoneSpec,
        file: Arc<File>,
        content: GivenContent,
    ) -> Result<Self, BackingError> {
        let examine = |source| BackingError::ExamineGivenFile { zone: zone.id.clone(), source };
        let refuse = |what| Err(BackingError::GivenFile { zone: zone.id.clone(), what });
        let metadata = file.metadata().map_err(examine)?;
        if !metadata.is_file() {
            return refuse("not a memfd or regular file");
        }
        // A shorter file would be a SIGBUS later.
        if metadata.len() < zone.size_bytes {
            return refuse("shorter than the zone");
        }
        // SAFETY: takes and returns numbers; the descriptor is open.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(examine(io::Error::last_os_error()));
        }
        if flags & libc::O_ACCMODE != libc::O_RDWR {
            return refuse("not open for reading and writing");
        }
        let hugetlb_page = hugetlbfs_page_bytes(&file).map_err(examine)?;
        let page_bytes = hugetlb_page.unwrap_or(PAGE_BYTES);
        let hugetlb = hugetlb_page.is_some();
        match (&zone.backing, hugetlb) {
            (Backing::Anonymous, _) => return refuse("the zone is to be private memory"),
            (Backing::Hugetlb { .. }, false) => return refuse("not made of huge pages"),
            (Backing::Memfd | Backing::Auto, true) => return refuse("made of huge pages"),
            (Backing::Hugetlb { page_size }, true)
                if page_size.bytes().is_some_and(|bytes| bytes != page_bytes) =>
            {
                return refuse("made of huge pages of another size");
            }
            _ => {}
        }
        zone.check_page_size(page_bytes)?;
        // Files of ordinary file systems know no seals.
        // SAFETY: takes and returns numbers; the descriptor is open.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) }.max(0);
        if !matches!(zone.backing, Backing::File(_)) && seals & libc::F_SEAL_SHRINK == 0 {
            return refuse("not sealed against shrinking");
        }
        if seals & (libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE) != 0 {
            return refuse("sealed against writing");
        }
        let prezeroed = content == GivenContent::PopulatedZeroes;
        let holds_data =
            !prezeroed && holds_data(&file, zone.size_bytes, hugetlb).map_err(examine)?;
        let file = Some(file);
        Ok(Self { kind: ZoneKind::Shared, file, page_bytes, hugetlb, holds_data, prezeroed })
    }
}

/// Whether a zone that leaves the choice to us becomes private anonymous memory.
fn prefers_private(zone: &ZoneSpec, policy: HugePagePolicy) -> bool {
    if zone.shared {
        return false;
    }
    zone.mergeable || (zone.thp && policy.private && !policy.shared)
}

fn sized_memfd(zone: &ZoneSpec, flags: u32) -> Result<File, BackingError> {
    let make = || {
        let file = memfd(&format!("ram-{}", zone.id), flags)?;
        file.set_len(zone.size_bytes)?;
        // A process that this memory is shared with must not be able to cut it: SIGBUS for all.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: takes and returns numbers; the descriptor is open.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
            0 => Ok(file),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let (id, size_bytes) = (&zone.id, zone.size_bytes);
    make().map_err(|source| BackingError::Memfd { zone: id.clone(), size_bytes, source })
}

pub(crate) fn memfd(name: &str, flags: u32) -> io::Result<File> {
    let name = CString::new(name).map_err(io::Error::other)?;
    let common = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
    let create = |flags: u32| {
        // SAFETY: `name` is a C string that outlives the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    };
    match create(common | libc::MFD_NOEXEC_SEAL) {
        // Before Linux 6.3 the flag does not exist.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => create(common),
        result => result,
    }
}

struct Opened {
    file: File,
    /// By us, at the path, so that we remove it if we cannot use it.
    created: bool,
}

fn open(path: &Path) -> io::Result<Opened> {
    let mut options = OpenOptions::new();
    // Without O_NONBLOCK, opening a pipe with nobody at the other end would wait for ever.
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NONBLOCK);
    if path.is_dir() {
        return unnamed_in(path, &options).map(|file| Opened { file, created: false });
    }
    match options.clone().create_new(true).open(path) {
        Ok(file) => Ok(Opened { file, created: true }),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            options.open(path).map(|file| Opened { file, created: false })
        }
        Err(error) => Err(error),
    }
}

/// A file in `dir` that vanishes with its last descriptor.
fn unnamed_in(dir: &Path, options: &OpenOptions) -> io::Result<File> {
    match options.clone().custom_flags(libc::O_TMPFILE).open(dir) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            named_then_removed(dir, options)
        }
        result => result,
    }
}

fn named_then_removed(dir: &Path, options: &OpenOptions) -> io::Result<File> {
    /// Names taken by leftovers are skipped, within reason.
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

/// The page size, if the file is on hugetlbfs.
fn hugetlbfs_page_bytes(file: &File) -> io::Result<Option<u64>> {
    let info = file_system(file)?;
    if u64::try_from(info.f_type) != Ok(HUGETLBFS_MAGIC) {
        return Ok(None);
    }
    Ok(u64::try_from(info.f_bsize).ok().filter(|size| size.is_power_of_two()))
}

fn holds_data(file: &File, len_bytes: u64, hugetlb: bool) -> io::Result<bool> {
    if hugetlb {
        // hugetlbfs cannot list holes.
        return Ok(file.metadata()?.blocks() > 0);
    }
    Ok(len_bytes > 0 && !file_data_runs(file, 0..len_bytes)?.is_empty())
}

/// `reserve=on` for a file: there must be room for what it has not got yet.
fn check_room(
    zone: &ZoneSpec,
    path: &Path,
    file: &File,
    allocated_bytes: u64,
) -> Result<(), BackingError> {
    // A file system that does not say how much room it has is not asked.
    let Ok(info) = file_system(file) else { return Ok(()) };
    let block_bytes = u64::try_from(info.f_bsize).unwrap_or(0);
    let missing_bytes = zone.size_bytes.saturating_sub(allocated_bytes);
    let free_bytes = info.f_bavail.saturating_mul(block_bytes);
    // A tmpfs without a limit counts no blocks at all.
    if info.f_blocks > 0 && missing_bytes > free_bytes {
        let (zone, path) = (zone.id.clone(), path.to_owned());
        return Err(BackingError::FileSystemFull { zone, path, missing_bytes, free_bytes });
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
#[path = "backing_tests.rs"]
mod tests;
