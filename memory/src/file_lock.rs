// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The lock on a file that backs guest memory.
//!
//! Two VMs that map one file shared write each other's memory, and emptying the file under a running VM
//! destroys its guest. So a file is locked before it is changed in any way, with an
//! open-file-description lock: it belongs to the description that `open` made and to every duplicate of it, in
//! this process or another (a page server, the destination of a local migration), and lasts until the last
//! of them and the last mapping are gone, however their processes end. Owns taking the lock, and finding
//! out which process has it. Must never wait for a lock.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// How a file is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileUse {
    /// It is mapped shared and written. One user at a time.
    Written,
    /// It is mapped privately, and must not change. Any number of such users.
    Read,
}

/// Why a lock was not taken.
#[derive(Debug)]
pub enum LockError {
    /// Another open file description holds a conflicting one.
    Held,
    /// The file system does not support locks.
    NoLocks,
    /// Another error.
    Other(io::Error),
}

/// Most processes that are named as holders of a lock.
const HOLDERS_MAX: usize = 3;

fn whole(kind: libc::c_int) -> io::Result<libc::flock> {
    let narrow = |value| libc::c_short::try_from(value).map_err(io::Error::other);
    Ok(libc::flock {
        l_type: narrow(kind)?,
        l_whence: narrow(libc::SEEK_SET)?,
        l_start: 0,
        // Up to the end of the file, whatever its length.
        l_len: 0,
        l_pid: 0,
    })
}

fn set(file: &File, kind: libc::c_int) -> io::Result<()> {
    let whole = whole(kind)?;
    // SAFETY: F_OFD_SETLK reads one flock, which lives during the call; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn kind_for(wanted: FileUse) -> libc::c_int {
    match wanted {
        FileUse::Written => libc::F_WRLCK,
        FileUse::Read => libc::F_RDLCK,
    }
}

/// Whether [`lock`] would succeed now; takes no lock. True where the kernel does not say.
pub fn is_free(file: &File, wanted: FileUse) -> bool {
    let Ok(mut range) = whole(kind_for(wanted)) else { return true };
    // SAFETY: F_OFD_GETLK reads and writes one flock, which lives during the call; the descriptor is open.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    answer != 0 || i32::from(range.l_type) == libc::F_UNLCK
}

/// Locks an open file, or converts its lock; never blocks. After a failure an existing lock remains.
pub fn lock(file: &File, wanted: FileUse) -> Result<(), LockError> {
    set(file, kind_for(wanted)).map_err(|error| match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => LockError::Held,
        Some(libc::ENOLCK) => LockError::NoLocks,
        _ => LockError::Other(error),
    })
}

/// Unlocks an open file.
pub fn unlock(file: &File) -> Result<(), LockError> {
    set(file, libc::F_UNLCK).map_err(LockError::Other)
}

/// Names the processes that have a file locked, as far as `/proc` shows them to this process: not one that is not
/// dumpable, as VMMs are, if this one has dropped its capabilities. Then it says how to find it.
pub fn holders(file: &File) -> String {
    let Ok(data) = file.metadata() else { return "another process".to_owned() };
    match holders_of(Path::new("/proc"), data.dev(), data.ino()) {
        found if !found.is_empty() => found.join(" and "),
        _ => format!(
            "another process (root finds it by grep -l 'OFDLCK.*:{} ' /proc/[0-9]*/fdinfo/*)",
            data.ino()
        ),
    }
}

/// Finds the holders in what the kernel reports about each open file. The files themselves are not accessed:
/// a file system that hangs must not block this.
fn holders_of(proc: &Path, device: u64, inode: u64) -> Vec<String> {
    let place = format!("{:02x}:{:02x}:{inode}", libc::major(device), libc::minor(device));
    let mut found = Vec::new();
    for process in fs::read_dir(proc).into_iter().flatten().flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let infos = fs::read_dir(process.path().join("fdinfo")).into_iter().flatten().flatten();
        let mut texts = infos.filter_map(|info| fs::read_to_string(info.path()).ok());
        if texts.any(|text| text.lines().any(|line| is_lock_of(line, &place))) {
            found.push(format!("process {pid} ({})", program(&process.path())));
            if found.len() == HOLDERS_MAX {
                break;
            }
        }
    }
    found
}

/// True for a line like `lock: 1: OFDLCK  ADVISORY  WRITE -1 00:1a:77 0 EOF` of this file.
fn is_lock_of(line: &str, place: &str) -> bool {
    let words = || line.split_ascii_whitespace();
    line.starts_with("lock:") && words().any(|word| word == "OFDLCK") && words().any(|w| w == place)
}

/// Name of a process. The kernel keeps 15 bytes of it; if those begin the name of its executable, that full
/// name is returned.
fn program(process: &Path) -> String {
    let short = fs::read_to_string(process.join("comm")).unwrap_or_default();
    let short = short.trim().to_owned();
    let arguments = fs::read(process.join("cmdline")).unwrap_or_default();
    let first = arguments.split(|byte| *byte == 0).next().unwrap_or_default();
    let first = String::from_utf8_lossy(first);
    let long = Path::new(&*first).file_name().map(|name| name.to_string_lossy().into_owned());
    let whole = long.filter(|long| !short.is_empty() && long.starts_with(&short));
    whole.unwrap_or(short)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn one_writes_or_many_read() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let (one, two, three) = (open(named.path()), open(named.path()), open(named.path()));
        assert!(is_free(&one, FileUse::Written));
        lock(&one, FileUse::Read).unwrap();
        assert!(is_free(&two, FileUse::Read) && !is_free(&two, FileUse::Written));
        assert!(is_free(&one, FileUse::Written), "its own lock is not in its way");
        lock(&two, FileUse::Read).unwrap();
        assert!(matches!(lock(&three, FileUse::Written), Err(LockError::Held)));
        assert!(matches!(lock(&two, FileUse::Written), Err(LockError::Held)));
        drop(one);
        lock(&two, FileUse::Written).unwrap();
        assert!(matches!(lock(&three, FileUse::Read), Err(LockError::Held)));
        unlock(&two).unwrap();
        lock(&three, FileUse::Written).unwrap();
    }

    #[test]
    fn the_lock_is_that_of_all_duplicates() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let (one, other) = (open(named.path()), open(named.path()));
        lock(&one, FileUse::Written).unwrap();
        let duplicate = one.try_clone().unwrap();
        drop(one);
        assert!(matches!(lock(&other, FileUse::Written), Err(LockError::Held)));
        drop(duplicate);
        lock(&other, FileUse::Written).unwrap();
    }

    #[test]
    fn the_process_that_has_it_is_named() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let file = open(named.path());
        let unknown = holders(&file);
        let inode = format!(":{} ' /proc", file.metadata().unwrap().ino());
        assert!(unknown.starts_with("another process (") && unknown.contains(&inode), "{unknown}");
        lock(&file, FileUse::Written).unwrap();
        let here = holders(&file);
        assert!(here.starts_with(&format!("process {} (", std::process::id())), "{here}");
    }

    #[test]
    fn lines_of_other_locks_are_left_out() {
        let line = "lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:1a:77 0 EOF";
        assert!(is_lock_of(line, "00:1a:77"));
        assert!(!is_lock_of(line, "00:1a:7"));
        assert!(!is_lock_of("lock:\t1: FLOCK  ADVISORY  WRITE 5 00:1a:77 0 EOF", "00:1a:77"));
        assert!(!is_lock_of("ino:\t77", "00:1a:77"));
    }
}
