// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Safe opening of an output file at an untrusted path.
//!
//! Owns what that may do to an existing file: it is never truncated, no link leads into a file
//! of another owner, and opening never blocks.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use crate::syscalls;

/// Maximum number of attempts to open a path that others create and remove concurrently.
const TRIES_MAX: u32 = 16;

/// Opens a file for output, created or appended to; also a pipe or terminal. A pipe need not have a reader
/// yet.
///
/// # Errors
/// The host's error; or the path is of another file type, or a link to a file of another owner.
pub fn open_output(path: &Path) -> io::Result<File> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for _ in 0..TRIES_MAX {
        match options().create_new(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created,
        }
        match open_existing(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => last = error,
            opened => return opened,
        }
    }
    Err(last)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.append(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_NOFOLLOW);
    options
}

fn open_existing(path: &Path) -> io::Result<File> {
    let file = match options().open(path) {
        // A pipe that has no reader yet.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            options().read(true).open(path)?
        }
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return follow(path),
        opened => opened?,
    };
    check_kind(&file)?;
    Ok(file)
}

/// Opens the target of a link.
fn follow(path: &Path) -> io::Result<File> {
    let link_owner = fs::symlink_metadata(path)?.uid();
    let following = || {
        let mut options = OpenOptions::new();
        options.append(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        options
    };
    let file = match following().open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            following().read(true).open(path)?
        }
        opened => opened?,
    };
    check_kind(&file)?;
    let there = file.metadata()?;
    let ours = syscalls::effective_user();
    if !there.is_file() || may_follow(link_owner, there.uid(), ours) || is_a_stream_of_ours(&file) {
        return Ok(file);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it is a link into a file of another owner; name the file itself",
    ))
}

/// A link is trusted if this user or root owns it, and this user owns the target.
fn may_follow(link_owner: u32, file_owner: u32, ours: u32) -> bool {
    file_owner == ours && (link_owner == ours || link_owner == 0)
}

/// Whether the file is one of the process's standard streams, as with /dev/stdout.
fn is_a_stream_of_ours(file: &File) -> bool {
    let identity = |fd: BorrowedFd<'_>| {
        let data = File::from(fd.try_clone_to_owned()?).metadata()?;
        io::Result::Ok((data.dev(), data.ino()))
    };
    let Ok(there) = identity(file.as_fd()) else { return false };
    [identity(io::stdout().as_fd()), identity(io::stderr().as_fd())]
        .into_iter()
        .any(|stream| stream.is_ok_and(|stream| stream == there))
}

/// Refuses file types other than those for text output.
fn check_kind(file: &File) -> io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() || kind.is_fifo() || kind.is_char_device() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "it is neither a file nor a pipe nor a terminal",
    ))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn what_is_there_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        for text in ["one ", "two ", "three"] {
            open_output(&path).unwrap().write_all(text.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "one two three");
        open_output(Path::new("/dev/null")).unwrap();
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        syscalls::make_fifo(&path).unwrap();
        let mut output = open_output(&path).unwrap();
        output.write_all(b"before there is a reader").unwrap();
        let mut reader =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        let mut text = [0; 24];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"before there is a reader");
        // With a reader, and by a link.
        open_output(&path).unwrap();
        symlink(&path, dir.path().join("link")).unwrap();
        open_output(&dir.path().join("link")).unwrap();
    }

    #[test]
    fn what_takes_no_text_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open_output(dir.path()).is_err());
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(open_output(&socket).is_err());
        assert!(open_output(&dir.path().join("no/such/file")).is_err());
    }

    #[test]
    fn links_lead_into_own_files_only() {
        for (link, file, ours, may) in [
            (5, 5, 5, true),
            (0, 5, 5, true),
            (0, 0, 0, true),
            // A link of another owner, and a link into a file of another owner.
            (7, 5, 5, false),
            (7, 0, 0, false),
            (5, 7, 5, false),
            (7, 7, 0, false),
            (0, 7, 0, false),
        ] {
            assert_eq!(may_follow(link, file, ours), may, "{link} {file} {ours}");
        }
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "kept ").unwrap();
        symlink(&file, &link).unwrap();
        open_output(&link).unwrap().write_all(b"more").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept more");
        symlink(dir.path().join("none"), dir.path().join("dangling")).unwrap();
        assert!(open_output(&dir.path().join("dangling")).is_err());
        assert!(!dir.path().join("none").exists());
        if chown(&file, Some(65534), None).is_ok() && syscalls::effective_user() == 0 {
            let error = open_output(&link).unwrap_err();
            assert!(error.to_string().contains("another owner"), "{error}");
            assert_eq!(fs::read_to_string(&file).unwrap(), "kept more");
        }
    }
}
