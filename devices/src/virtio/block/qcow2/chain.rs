// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The chain of files of a qcow2 image: the image itself and its backing files.
//!
//! Owns the backing files: opens them read-only together with the image, and holds a shared lock on each while the
//! image is locked, so that no other VM writes to them. Must never open one unless that is allowed, one that is not a
//! regular file, or one twice, and never detect the format of one: the file in front of it states it.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder as _};

use super::driver::Qcow2Driver;
use super::header::{BackingName, Header, Table};
use super::tables::{self, Purpose};
use crate::virtio::block::formatted::{FormatDriver, FormatError, Unloaded};
use crate::virtio::block::image::{Disk, direct_alignment, file_or_device_len_bytes};
use crate::virtio::block::lock::set_whole_lock;
use crate::virtio::block::store::{Store, StoreFile, Tables};

/// Maximum number of backing files in a chain. Each may use memory for up to 160 clusters of tables.
const BACKING_FILES_MAX: usize = 10;

/// A backing file.
struct Layer {
    file: StoreFile,
    /// `None` for a raw file.
    header: Option<Header>,
}

/// An open image with its backing files.
pub(in super::super) struct Chain {
    image: StoreFile,
    header: Header,
    behind: Vec<Layer>,
}

impl Chain {
    /// Reads the header of an open image, and opens its backing files if `follow` is set.
    pub(in super::super) fn open(disk: &Disk, follow: bool) -> Result<Self, FormatError> {
        let image = StoreFile::of(disk);
        let header = read_header(&image)?;
        let mut chain = Self { image, header, behind: Vec::new() };
        while let Some((front, name)) = chain.next_name() {
            if !follow {
                return Err(FormatError::BackingRefused(name.name));
            }
            if chain.behind.len() == BACKING_FILES_MAX {
                return Err(FormatError::BackingDepth(BACKING_FILES_MAX));
            }
            let layer = chain.open_behind(&front, &name)?;
            chain.behind.push(layer);
        }
        Ok(chain)
    }

    /// The last file, with the name of its backing file if it has one.
    fn next_name(&self) -> Option<(PathBuf, BackingName)> {
        let (file, header) = match self.behind.last() {
            Some(layer) => (&layer.file, layer.header.as_ref()?),
            None => (&self.image, &self.header),
        };
        Some((file.path.clone(), header.backing.clone()?))
    }

    fn open_behind(&self, front: &Path, name: &BackingName) -> Result<Layer, FormatError> {
        let path = path_of(front, &name.name)?;
        let is_qcow2 = match name.format.as_deref() {
            Some("qcow2") => true,
            Some("raw" | "file") => false,
            Some(other) => {
                let format = format!("the format {other}");
                let source = Box::new(FormatError::Unsupported(format));
                return Err(FormatError::Backing { path, source });
            }
            None => return Err(FormatError::BackingFormat(name.name.clone())),
        };
        let failed = |source| FormatError::BackingOpen { path: path.clone(), source };
        // The image chooses the path. To open a device can have effects, and to open a FIFO waits for its other end: the
        // path is only looked up before it is known to be a regular file.
        let found = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path);
        let found = found.map_err(failed)?;
        let metadata = found.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(FormatError::BackingKind(path));
        }
        let is_direct = self.image.is_direct;
        let flags = if is_direct { libc::O_DIRECT } else { 0 };
        let same = format!("/proc/self/fd/{}", found.as_raw_fd());
        let open = OpenOptions::new().read(true).custom_flags(flags).open(same);
        let file = open.map_err(failed)?;
        let others = std::iter::once(&self.image).chain(self.behind.iter().map(|it| &it.file));
        for other in others {
            let other = other.file.metadata().map_err(failed)?;
            if (other.dev(), other.ino()) == (metadata.dev(), metadata.ino()) {
                return Err(FormatError::BackingLoop(path));
            }
        }
        // Its file system may require another alignment than that of the image.
        let (address_align, offset_align) =
            if is_direct { direct_alignment(&file, false) } else { (1, 1) };
        let file = StoreFile {
            path: path.clone(),
            file: Arc::new(file),
            is_writable: false,
            address_align_bytes: usize::try_from(address_align).unwrap_or(4096),
            offset_align_bytes: usize::try_from(offset_align).unwrap_or(4096),
            ..self.image.clone()
        };
        let header = if is_qcow2 {
            let read = read_header(&file);
            Some(read.map_err(|source| FormatError::Backing { path, source: Box::new(source) })?)
        } else {
            None
        };
        Ok(Layer { file, header })
    }

    /// What is done with an image of which the use is `write` if it is writable.
    fn purpose(&self, write: Purpose) -> Purpose {
        if self.image.is_writable { write } else { Purpose::Read }
    }

    /// Reads the headers again and checks all tables. Size, clusters and backing file must not have changed.
    fn check(&self, purpose: Purpose) -> Result<Header, FormatError> {
        let now = check(&self.image, purpose)?;
        let same = now.size_bytes == self.header.size_bytes
            && now.cluster_bits == self.header.cluster_bits
            && now.backing == self.header.backing;
        if !same {
            return super::header::damaged("its header is not the one that it had");
        }
        for layer in self.behind.iter().filter(|layer| layer.header.is_some()) {
            let checked = check(&layer.file, Purpose::Read);
            checked.map_err(|source| FormatError::Backing {
                path: layer.file.path.clone(),
                source: Box::new(source),
            })?;
        }
        Ok(now)
    }
}

impl Unloaded for Chain {
    fn size_bytes(&self) -> u64 {
        self.header.size_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    fn other_paths(&self) -> Vec<PathBuf> {
        self.behind.iter().map(|layer| layer.file.path.clone()).collect()
    }

    fn lock_others(&self, lock: bool) -> Result<(), FormatError> {
        let kind = if lock { libc::F_RDLCK } else { libc::F_UNLCK };
        for (index, layer) in self.behind.iter().enumerate() {
            let Err(error) = set_whole_lock(&layer.file.file, kind) else { continue };
            if lock {
                for layer in self.behind.iter().take(index) {
                    // The first error is returned.
                    let _ = set_whole_lock(&layer.file.file, libc::F_UNLCK);
                }
            }
            return Err(match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => {
                    FormatError::BackingInUse(layer.file.path.clone())
                }
                _ => FormatError::Io(error),
            });
        }
        Ok(())
    }

    fn check(&self) -> Result<(), FormatError> {
        Self::check(self, self.purpose(Purpose::WriteLater)).map(drop)
    }

    fn has_places(&self) -> bool {
        true
    }

    fn load(&self) -> Result<Box<dyn FormatDriver>, FormatError> {
        let now = Self::check(self, self.purpose(Purpose::Write))?;
        let header = Store::new(self.image.clone(), now.cluster_bytes());
        if self.image.is_writable && now.has_autoclear {
            Header::clear_autoclear(&header)?;
        }
        let mut behind = None;
        for layer in self.behind.iter().rev() {
            behind = Some(match &layer.header {
                Some(header) => open_qcow2(&layer.file, header, behind.take(), None)?,
                None => {
                    FormatAccess::new(Raw::open_image(Store::new(layer.file.clone(), 1), false)?)
                }
            });
        }
        let header_area = 0..now.cluster_bytes();
        let areas = [now.l1, now.references].map(Table::area);
        let areas = std::iter::once(header_area).chain(areas).collect();
        let recorded = Arc::new(Tables::new(areas, Header::references_area));
        let image = open_qcow2(&self.image, &self.header, behind, Some(Arc::clone(&recorded)))?;
        let holes = Store::new(self.image.clone(), self.header.cluster_bytes());
        let holes = holes.with_header(Header::MAY_CHANGE);
        let shared = tables::shared(&header, &now)?;
        Ok(Box::new(Qcow2Driver::new(image, holes, header, recorded, &self.header, shared)))
    }
}

fn open_qcow2(
    file: &StoreFile,
    header: &Header,
    behind: Option<FormatAccess<Store>>,
    tables: Option<Arc<Tables>>,
) -> io::Result<FormatAccess<Store>> {
    let mut store =
        Store::new(file.clone(), header.cluster_bytes()).with_header(Header::MAY_CHANGE);
    if let Some(tables) = tables {
        store = store.with_tables(tables);
    }
    let image = Qcow2::<Store>::builder(store)
        .write(file.is_writable)
        .backing(behind)
        .data_file(None)
        .open(DenyImplicitOpenGate::default())?;
    Ok(FormatAccess::new(image))
}

fn read_header(file: &StoreFile) -> Result<Header, FormatError> {
    Header::read(&Store::new(file.clone(), Header::BYTES_MAX))
}

fn check(file: &StoreFile, purpose: Purpose) -> Result<Header, FormatError> {
    let header = read_header(file)?;
    // The host that still writes to an image has it marked.
    if purpose != Purpose::WriteLater {
        header.check_closed()?;
    }
    let store = Store::new(file.clone(), header.cluster_bytes());
    let len_bytes = file_or_device_len_bytes(&file.file)?;
    tables::check(&store, &header, len_bytes, purpose)?;
    Ok(header)
}

/// Path of a backing file; relative names start at the directory of the file that contains them.
fn path_of(front: &Path, name: &str) -> Result<PathBuf, FormatError> {
    let path = name.strip_prefix("file:").unwrap_or(name);
    // `json:{...}`, `nbd://...`: a protocol ends with a colon before the first slash.
    let is_protocol = path.split('/').next().is_some_and(|first| first.contains(':'));
    if is_protocol || path.is_empty() {
        return Err(FormatError::BackingName(name.to_owned()));
    }
    Ok(front.parent().unwrap_or(Path::new("")).join(path))
}
