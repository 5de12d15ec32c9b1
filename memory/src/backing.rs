// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Backings of a zone: anonymous memory, a memfd, a hugetlb memfd, or a file.
//!
//! Owns creating and sizing it. Must never shrink a file, never touch data that a file already
//! holds unless the zone is shared, and leave no file behind when it fails.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use crate::PAGE_BYTES;
use crate::backing_error::BackingError;
use crate::config::{Backing, HugePageSize, ZoneSpec};
use crate::file_lock::FileUse;
use crate::host::{Host, HugePagePolicy};
use crate::zone_file::{self, LockedFile, ZoneFile, holds_data, hugetlbfs_page_bytes};
use crate::zone_kind::ZoneKind;

/// The memory that backs a zone, not yet mapped.
#[derive(Debug)]
pub struct ZoneBacking {
    pub kind: ZoneKind,
    pub file: Option<Arc<File>>,
    pub page_bytes: u64,
    pub hugetlb: bool,
    /// The file held data before the guest, which the zero map must take into account.
    pub holds_data: bool,
    /// It was populated and zeroed before the zone was created.
    pub prezeroed: bool,
    /// It is a file that others can open, and `file` holds its lock.
    pub locked: bool,
    /// For an image: the parts of `file` that are not holes.
    pub image_data: Option<Arc<[Range<u64>]>>,
}

/// Contents of memory that has just been created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InitialContents {
    /// Files keep their contents.
    #[default]
    AsFound,
    /// None, because all contents are to arrive: files are emptied, except those that another process
    /// handed over; files that must not be written are not used.
    Nothing,
    /// Like [`Nothing`](Self::Nothing), but a file with data is refused instead of emptied, because only
    /// the sender of the contents has named it.
    MustBeEmpty,
    /// Like [`MustBeEmpty`](Self::MustBeEmpty), but a file that has a length is refused: the sender may be a program that
    /// uses the file and takes no lock of it, with memory that its guest has not touched.
    MustBeNew,
}

impl InitialContents {
    /// True when all contents are to arrive.
    pub fn is_to_arrive(self) -> bool {
        self != Self::AsFound
    }
}

/// Contents of a file that is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProvidedContent {
    /// Anything.
    Unknown,
    /// Every page is populated and zero.
    PopulatedZeroes,
}

impl ZoneBacking {
    /// Creates the backing of `zone` on a host with this huge page policy. A file is locked before it is
    /// touched, with the lock in `held` if there is one for it. It keeps its contents: see
    /// [`empty`](Self::empty).
    pub fn create(
        zone: &ZoneSpec,
        host: &Host,
        policy: HugePagePolicy,
        start: InitialContents,
        locked: Option<&LockedFile>,
    ) -> Result<Self, BackingError> {
        match &zone.backing {
            Backing::Anonymous => Ok(Self::anonymous()),
            Backing::Auto if prefers_private(zone, policy) => Ok(Self::anonymous()),
            Backing::Auto | Backing::Memfd => Self::memfd(zone),
            Backing::Hugetlb { page_size } => Self::hugetlb(zone, *page_size, host),
            Backing::File(path) => Self::path(zone, path, host, start, locked),
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
            locked: false,
            image_data: None,
        }
    }

    fn shared(file: File, page_bytes: u64, hugetlb: bool) -> Self {
        let file = Some(Arc::new(file));
        let kind = ZoneKind::Shared;
        let (holds_data, prezeroed, locked) = (false, false, false);
        let image_data = None;
        Self { kind, file, page_bytes, hugetlb, holds_data, prezeroed, locked, image_data }
    }

    fn memfd(zone: &ZoneSpec) -> Result<Self, BackingError> {
        let file = sized_memfd(zone, 0)?;
        Ok(Self::shared(file, PAGE_BYTES, false))
    }

    fn hugetlb(zone: &ZoneSpec, size: HugePageSize, host: &Host) -> Result<Self, BackingError> {
        Self::hugetlb_of(zone, huge_page_bytes(size, host), host)
    }

    fn hugetlb_of(zone: &ZoneSpec, page_bytes: u64, host: &Host) -> Result<Self, BackingError> {
        check_huge_pages(zone, page_bytes, host)?;
        // The kernel takes the logarithm of the page size in the upper bits of the flags.
        let flags = libc::MFD_HUGETLB | (page_bytes.trailing_zeros() << libc::MFD_HUGE_SHIFT);
        let file = sized_memfd(zone, flags)?;
        Ok(Self::shared(file, page_bytes, true))
    }

    fn path(
        zone: &ZoneSpec,
        path: &Path,
        host: &Host,
        start: InitialContents,
        locked: Option<&LockedFile>,
    ) -> Result<Self, BackingError> {
        let found = ZoneFile::open(zone, path, locked)?;
        if start.is_to_arrive() && found.kind() == ZoneKind::PrivateFile {
            // The file must stay as it is, and all of its data would be hidden: empty memory with pages
            // of the same size is equivalent to a private mapping of it.
            return match found.hugetlb_page_bytes() {
                Some(page_bytes) => Self::hugetlb_of(zone, page_bytes, host),
                None => Ok(Self::anonymous()),
            };
        }
        let whose = || (zone.id.clone(), path.to_owned());
        match start {
            InitialContents::MustBeEmpty if found.holds_data() => {
                let (zone, path) = whose();
                return Err(BackingError::HoldsData { zone, path });
            }
            InitialContents::MustBeNew => {
                let len_bytes = found.len_bytes(zone)?;
                if len_bytes > 0 {
                    let (zone, path) = whose();
                    return Err(BackingError::NotNew { zone, path, len_bytes });
                }
            }
            _ => {}
        }
        found.size(zone)?;
        let hugetlb = found.hugetlb_page_bytes();
        Ok(Self {
            kind: found.kind(),
            page_bytes: hugetlb.unwrap_or(PAGE_BYTES),
            hugetlb: hugetlb.is_some(),
            holds_data: found.holds_data(),
            prezeroed: false,
            locked: found.is_locked(),
            image_data: None,
            file: Some(found.into_file()),
        })
    }

    /// Discards what the zone's file held before in all of `zone`, which then reads as zero. Only for
    /// memory whose contents are all to arrive, and that only this process uses.
    pub fn empty(&mut self, zone: &ZoneSpec) -> Result<(), BackingError> {
        let (true, Some(file), Backing::File(path)) = (self.holds_data, &self.file, &zone.backing)
        else {
            return Ok(());
        };
        zone_file::empty(file, zone.size_bytes).map_err(|source| BackingError::EmptyFile {
            zone: zone.id.clone(),
            path: path.clone(),
            source,
        })?;
        self.holds_data = false;
        Ok(())
    }

    /// The backing of `zone` from a file that was handed over. It must be of the kind that the zone asks
    /// for, and no process may be able to truncate it, which would cause a SIGBUS later.
    ///
    /// If its contents are known to be zero it is not searched for data, which would take time that
    /// grows with the size.
    pub fn from_provided(
        zone: &ZoneSpec,
        file: Arc<File>,
        content: ProvidedContent,
    ) -> Result<Self, BackingError> {
        let examine = |source| BackingError::ExamineProvidedFile { zone: zone.id.clone(), source };
        let refuse = |what| Err(BackingError::ProvidedFile { zone: zone.id.clone(), what });
        let metadata = file.metadata().map_err(examine)?;
        if !metadata.is_file() {
            return refuse("not a memfd or regular file");
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
        // Checked before the length, which means nothing for a file that can still be truncated. A zone
        // with a file may have one without seals. The configuration alone does not prove that, because
        // it may come from the peer that hands the file over: the file must be the one at that path on
        // this host.
        // SAFETY: takes and returns numbers; the descriptor is open.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let shrinks = seals.max(0) & libc::F_SEAL_SHRINK == 0;
        if shrinks && !matches!(&zone.backing, Backing::File(path) if zone_file::is_of(path, &file))
        {
            return refuse("not sealed against shrinking");
        }
        // A shorter file would cause a SIGBUS later.
        let len_bytes = file.metadata().map_err(examine)?.len();
        if len_bytes < zone.size_bytes {
            return refuse("shorter than the zone");
        }
        if seals.max(0) & (libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE) != 0 {
            return refuse("sealed against writing");
        }
        let locked = match &zone.backing {
            Backing::File(path) => {
                // The same open file description as in the process that handed it over, so this changes
                // nothing if that process has locked it.
                zone_file::lock_for(zone, path, &file, FileUse::Written)?;
                true
            }
            _ => false,
        };
        let prezeroed = content == ProvidedContent::PopulatedZeroes;
        let holds_data =
            !prezeroed && holds_data(&file, zone.size_bytes, hugetlb).map_err(examine)?;
        let file = Some(file);
        let kind = ZoneKind::Shared;
        let image_data = None;
        Ok(Self { kind, file, page_bytes, hugetlb, holds_data, prezeroed, locked, image_data })
    }
}

/// The size of hugetlb pages that a zone gets.
pub(crate) fn huge_page_bytes(size: HugePageSize, host: &Host) -> u64 {
    size.bytes().or_else(|| host.default_huge_page_bytes()).unwrap_or(2 << 20)
}

/// Whether the host has pages of this size, and the zone consists of whole ones.
pub(crate) fn check_huge_pages(
    zone: &ZoneSpec,
    page_bytes: u64,
    host: &Host,
) -> Result<(), BackingError> {
    zone.check_page_size(page_bytes)?;
    if host.hugetlb_pool(page_bytes).is_none() {
        return Err(BackingError::NoSuchHugePages { zone: zone.id.clone(), page_bytes });
    }
    Ok(())
}

/// True when a zone with automatic backing gets private anonymous memory.
pub(crate) fn prefers_private(zone: &ZoneSpec, policy: HugePagePolicy) -> bool {
    if zone.shared {
        return false;
    }
    zone.mergeable || (zone.thp && policy.private && !policy.shared)
}

fn sized_memfd(zone: &ZoneSpec, flags: u32) -> Result<File, BackingError> {
    let (id, size_bytes) = (&zone.id, zone.size_bytes);
    sealed(&format!("ram-{id}"), size_bytes, flags).map_err(|source| BackingError::Memfd {
        zone: id.clone(),
        size_bytes,
        source,
    })
}

/// Memory to be shared with another process, which cannot change its length.
///
/// # Errors
/// The host does not provide it.
pub fn sealed_file(name: &str, len_bytes: u64) -> io::Result<File> {
    sealed(name, len_bytes, 0)
}

fn sealed(name: &str, len_bytes: u64, flags: u32) -> io::Result<File> {
    let file = memfd(name, flags)?;
    file.set_len(len_bytes)?;
    // A process that shares this memory must not be able to truncate it: SIGBUS for all of them.
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: takes and returns numbers; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
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
        // SAFETY: a new descriptor that nothing else owns.
        Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    };
    match create(common | libc::MFD_NOEXEC_SEAL) {
        // Before Linux 6.3 the flag does not exist.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => create(common),
        result => result,
    }
}

#[cfg(all(test, not(loom)))]
#[path = "backing_tests.rs"]
mod tests;
