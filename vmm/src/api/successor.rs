// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a process is told that it takes the place of another one: `--successor fd=N,suffix=TEXT`.
//!
//! Owns the option and the paths that follow from it. The descriptor is one end of a pair of sockets; the other end is of
//! the program that has started this process, which ends with it or tells it nothing. The suffix is that of the paths at
//! which the sockets of this process are until it has the guest. It must never accept a suffix that leads to another folder,
//! nor heed what comes from the starter, of which only the end counts.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::io::FdFlags;
use rustix::net::RecvFlags;

use super::socket::SocketError;

/// Variable in which a service manager names the socket that takes notifications (sd_notify(3)).
pub const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// A path with a suffix, in the same folder.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(suffix);
    beside.into()
}

/// Longest suffix: a path of a socket has no more than 107 bytes.
const SUFFIX_BYTES: usize = 32;

/// The value of `--successor`.
#[derive(Debug)]
pub struct SuccessorArgs {
    starter: UnixStream,
    suffix: String,
}

fn bad(text: &str) -> SocketError {
    SocketError::SuccessorSyntax { text: text.to_owned() }
}

/// The number and the suffix in `fd=N,suffix=TEXT`.
fn split(text: &str) -> Option<(RawFd, &str)> {
    let (fd, suffix) = text.strip_prefix("fd=")?.split_once(",suffix=")?;
    let is_plain = suffix.starts_with('.')
        && suffix.len() <= SUFFIX_BYTES
        && suffix.len() > 1
        && suffix.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
    Some((fd.parse().ok().filter(|fd| *fd > 2)?, suffix)).filter(|_| is_plain)
}

impl SuccessorArgs {
    /// The text for [`Self::parse`].
    pub fn text(fd: RawFd, suffix: &str) -> String {
        format!("fd={fd},suffix={suffix}")
    }

    /// A duplicate of the descriptor that the text names, for what is to be told to the starter.
    pub fn starter(text: &str) -> Option<UnixStream> {
        let (fd, _) = split(text)?;
        // SAFETY: takes numbers only; a descriptor that is not open makes it fail.
        let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
        // SAFETY: the descriptor is new, and nothing else knows it.
        (own >= 0).then(|| UnixStream::from(unsafe { OwnedFd::from_raw_fd(own) }))
    }

    /// Parses the option, and takes ownership of the descriptor.
    ///
    /// # Errors
    /// The text is something else, or the descriptor is no connected Unix socket.
    pub fn parse(text: &str) -> Result<Self, SocketError> {
        let (fd, suffix) = split(text).ok_or_else(|| bad(text))?;
        // SAFETY: F_GETFD takes no pointer; a descriptor that is not open makes it fail.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(bad(text));
        }
        // SAFETY: the descriptor is open (fcntl has just succeeded on it); the command line that names its number gives
        // it to this process, and nothing else here knows it.
        let starter = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let is_socket = starter.peer_addr().is_ok();
        rustix::io::fcntl_setfd(&starter, FdFlags::CLOEXEC).map_err(|_| bad(text))?;
        if !is_socket {
            return Err(bad(text));
        }
        Ok(Self { starter, suffix: suffix.to_owned() })
    }

    /// Where the socket for a path is until this process has the guest.
    pub fn beside(&self, path: &Path) -> PathBuf {
        beside(path, &self.suffix)
    }

    /// For polls: readable when the starter has ended.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn to_poll(&self) -> io::Result<UnixStream> {
        self.starter.try_clone()
    }

    /// Whether the starter has ended.
    pub fn is_alone(&self) -> bool {
        let mut unused = [0_u8; 64];
        match rustix::net::recv(&self.starter, &mut unused[..], RecvFlags::DONTWAIT) {
            Ok((_, length)) => length == 0,
            Err(error) => error != rustix::io::Errno::AGAIN && error != rustix::io::Errno::INTR,
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs::File;
    use std::os::fd::IntoRawFd as _;

    use super::*;

    #[test]
    fn an_option_names_a_socket_and_a_suffix() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let text = SuccessorArgs::text(theirs.into_raw_fd(), ".12-new");
        let parsed = SuccessorArgs::parse(&text).unwrap();
        assert_eq!(parsed.beside(Path::new("/run/vm/api")), Path::new("/run/vm/api.12-new"));
        assert!(!parsed.is_alone());
        assert!(SuccessorArgs::starter(&text).unwrap().peer_addr().is_ok());
        drop(ours);
        assert!(parsed.is_alone());
    }

    #[test]
    fn a_path_elsewhere_cannot_be_named() {
        let long = format!("fd=9,suffix=.{}", "x".repeat(SUFFIX_BYTES));
        let others =
            ["", "fd=9", "suffix=.x", "fd=1,suffix=.x", "fd=-1,suffix=.x", "fd=x,suffix=.x"];
        let suffixes =
            ["fd=9,suffix=", "fd=9,suffix=.", "fd=9,suffix=x", "fd=9,suffix=./../y", &long];
        for text in others.into_iter().chain(suffixes) {
            assert_eq!(split(text), None, "{text}");
        }
        assert_eq!(split("fd=9,suffix=.x-1"), Some((9, ".x-1")));
    }

    #[test]
    fn a_descriptor_has_to_be_a_connection() {
        let file = File::open("/dev/null").unwrap().into_raw_fd();
        for fd in [file, 99_999] {
            let error = SuccessorArgs::parse(&SuccessorArgs::text(fd, ".x")).unwrap_err();
            assert!(matches!(error, SocketError::SuccessorSyntax { .. }), "{error}");
        }
    }
}
