// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A snapshot while it is written: hidden names first, the manifest's own name last.
//!
//! ```text
//! lock the directory > refuse what is there > .NAME.partial for each file, synced
//!   > rename the others > sync the directory > rename the manifest > sync the directory
//! ```
//!
//! Owns the files until the manifest has its name: dropping a draft before that removes all of them.
//! A draft whose process is killed leaves hidden files. The manifest's was made first and marks the others
//! as unfinished: the next snapshot removes them, and nothing restores them. The marker alone says nothing about a snapshot
//! without a manifest whose files all have their names: that is complete, and is never removed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::error::SnapshotError;
use super::{CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, MEMORY_FILE, STATE_FILE};

/// All files but the manifest.
const CONTENT_FILES: [&str; 4] = [CONFIG_FILE, STATE_FILE, INDEX_FILE, MEMORY_FILE];

/// The files of a snapshot without a manifest.
const WITHOUT_MANIFEST: [&str; 3] = [CONFIG_FILE, STATE_FILE, MEMORY_FILE];

/// A snapshot that is not complete yet.
#[derive(Debug)]
pub(crate) struct Draft {
    path: PathBuf,
    /// Its lock is held as long as the draft exists.
    directory: File,
    whole: bool,
}

/// The name of a file while it is written.
pub(crate) fn partial(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!(".{name}.partial"))
}

fn is_there(path: &Path) -> Result<bool, SnapshotError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(SnapshotError::io("look at", path)(error)),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether there is a snapshot without a manifest that lacks nothing but the removal of its marker. One with a manifest that is
/// not finished has its index, under either name; of one that is being removed the configuration goes first.
fn is_whole_without_manifest(path: &Path) -> Result<bool, SnapshotError> {
    for index in [path.join(INDEX_FILE), partial(path, INDEX_FILE)] {
        if is_there(&index)? {
            return Ok(false);
        }
    }
    for name in WITHOUT_MANIFEST {
        if !is_there(&path.join(name))? || is_there(&partial(path, name))? {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Draft {
    /// Begins a snapshot in an existing directory that has none.
    pub(crate) fn begin(path: &Path) -> Result<Self, SnapshotError> {
        let directory = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(path)
            .map_err(SnapshotError::io("open the directory", path))?;
        match directory.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SnapshotError::Busy(path.to_owned())),
            Err(TryLockError::Error(error)) => {
                log::warn!("{} cannot be locked: {error}", path.display());
            }
        }
        let marker = partial(path, MANIFEST_FILE);
        let finished = path.join(MANIFEST_FILE);
        if is_there(&finished)? {
            return Err(SnapshotError::Exists(finished));
        }
        let is_marked = is_there(&marker)?;
        if is_marked && is_whole_without_manifest(path)? {
            return Err(SnapshotError::Exists(path.join(CONFIG_FILE)));
        }
        if is_marked {
            log::info!("clearing away an unfinished snapshot in {}", path.display());
            clear(path).map_err(SnapshotError::io("clear away what is left in", path))?;
        }
        for name in CONTENT_FILES {
            let file = path.join(name);
            if is_there(&file)? {
                return Err(SnapshotError::Exists(file));
            }
        }
        create(&marker, &[])?;
        Ok(Self { path: path.to_owned(), directory, whole: false })
    }

    /// The path of a file while it is written.
    pub(crate) fn partial(&self, name: &str) -> PathBuf {
        partial(&self.path, name)
    }

    /// Writes a small file and syncs it.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        create(&self.partial(name), bytes)
    }

    /// Completes the snapshot, whose files are all written and synced. `proceed` is called before that and
    /// after the sync; if it fails, the snapshot is not complete.
    pub(crate) fn publish(
        mut self,
        manifest: &[u8],
        proceed: &dyn Fn() -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let marker = self.partial(MANIFEST_FILE);
        let written = OpenOptions::new().write(true).truncate(true).open(&marker);
        written
            .and_then(|mut file| file.write_all(manifest).and_then(|()| file.sync_all()))
            .map_err(SnapshotError::io("write", &marker))?;
        for name in CONTENT_FILES {
            self.name(name)?;
        }
        self.sync()?;
        proceed()?;
        self.name(MANIFEST_FILE)?;
        self.sync()?;
        proceed()?;
        self.whole = true;
        Ok(())
    }

    /// Completes a snapshot without a manifest, as others have it: the file that makes it one is the last of `names`. All are
    /// written and synced. `proceed` is as with [`Self::publish`].
    pub(crate) fn publish_without_manifest(
        mut self,
        names: &[&str],
        proceed: &dyn Fn() -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        proceed()?;
        for name in names {
            self.name(name)?;
            // The next one has its name only if this one has.
            self.sync()?;
        }
        proceed()?;
        // From here on it is a snapshot. A marker that is left, now or after a power failure, changes nothing about it.
        self.whole = true;
        let marker = self.partial(MANIFEST_FILE);
        let removed = remove(&marker).map_err(SnapshotError::io("remove", &marker));
        if let Err(error) = removed.and_then(|()| self.sync()) {
            log::warn!("a mark of an unfinished snapshot may be left beside a whole one: {error}");
        }
        Ok(())
    }

    fn name(&self, name: &str) -> Result<(), SnapshotError> {
        let to = self.path.join(name);
        fs::rename(self.partial(name), &to).map_err(SnapshotError::io("give its name to", &to))
    }

    fn sync(&self) -> Result<(), SnapshotError> {
        self.directory.sync_all().map_err(SnapshotError::io("write to the disk", &self.path))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.whole
            && let Err(error) = clear(&self.path)
        {
            log::warn!("files of a snapshot are left in {}: {error}", self.path.display());
        }
    }
}

/// Removes all files of a snapshot: the manifest first, the marker of an incomplete one last.
fn clear(path: &Path) -> io::Result<()> {
    remove(&path.join(MANIFEST_FILE))?;
    for name in CONTENT_FILES {
        remove(&path.join(name))?;
        remove(&partial(path, name))?;
    }
    remove(&partial(path, MANIFEST_FILE))
}

fn create(path: &Path, bytes: &[u8]) -> Result<(), SnapshotError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = file.map_err(SnapshotError::io("create", path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(SnapshotError::io("write", path))
}
