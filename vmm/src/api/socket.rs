// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The Unix socket on which the API listens, and that of metrics.
//!
//! Owns taking the path over from a dead process, refusing it to a second live one, and removing
//! it at the end. It must never remove a socket on which another process answers.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;

/// Where the API listens.
#[derive(Debug)]
pub enum ApiSocket {
    /// A path at which a socket is created.
    Path(PathBuf),
    /// An inherited listening socket.
    Fd(OwnedFd),
}

/// Why the API cannot listen.
#[derive(Debug, Error)]
pub enum SocketError {
    /// `--api-socket` cannot be read.
    #[error("--api-socket '{text}' is neither path=<path> nor fd=<number>")]
    Syntax {
        /// The value of the option.
        text: String,
    },
    /// `--metrics` cannot be read.
    #[error("--metrics '{text}' is not unix:<path>")]
    MetricsSyntax {
        /// The value of the option.
        text: String,
    },
    /// `--successor` cannot be read.
    #[error("--successor '{text}' is not fd=<number of a connected socket>,suffix=<text>")]
    SuccessorSyntax {
        /// The value of the option.
        text: String,
    },
    /// The descriptor is not open or not a listening Unix socket.
    #[error("descriptor {fd} of --api-socket is not a listening Unix socket")]
    BadFd {
        /// The descriptor.
        fd: i32,
    },
    /// Another process listens at the path.
    #[error("the socket '{path}' is in use by another process, choose another path")]
    Live {
        /// The path.
        path: PathBuf,
    },
    /// A file that is not a socket exists at the path.
    #[error("'{path}' exists and is not a socket, remove it or choose another path")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The socket cannot be created or bound.
    #[error("the socket '{path}' cannot be made")]
    Bind {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The server cannot be started.
    #[error("the HTTP server cannot be started")]
    Start(#[source] io::Error),
}

impl ApiSocket {
    /// Parses `path=<path>`, `fd=<number>` or a path alone.
    ///
    /// # Errors
    /// The text is none of these, or the descriptor is not a listening Unix socket.
    pub fn parse(text: &str) -> Result<Self, SocketError> {
        let bad = || SocketError::Syntax { text: text.to_owned() };
        if let Some(number) = text.strip_prefix("fd=") {
            return inherited(number.parse().map_err(|_| bad())?).map(Self::Fd);
        }
        let path = text.strip_prefix("path=").unwrap_or(text);
        if path.is_empty() { Err(bad()) } else { Ok(Self::Path(PathBuf::from(path))) }
    }
}

/// Parses the socket of metrics, `unix:<path>`.
///
/// # Errors
/// The text is something else.
pub fn parse_metrics(text: &str) -> Result<PathBuf, SocketError> {
    let path = text.strip_prefix("unix:").filter(|path| !path.is_empty());
    path.map(PathBuf::from).ok_or_else(|| SocketError::MetricsSyntax { text: text.to_owned() })
}

/// Takes ownership of an inherited descriptor.
fn inherited(fd: i32) -> Result<OwnedFd, SocketError> {
    let (mut accepts, mut domain) = (0_i32, 0_i32);
    let check = |option, value: &mut i32| {
        let mut len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or_default();
        // SAFETY: `value` and `len` are valid for writes of their sizes for the whole call.
        fd > 2
            && unsafe {
                libc::getsockopt(
                    fd,
                    libc::SOL_SOCKET,
                    option,
                    std::ptr::from_mut(value).cast(),
                    &raw mut len,
                ) == 0
            }
    };
    let known = check(libc::SO_ACCEPTCONN, &mut accepts) && check(libc::SO_DOMAIN, &mut domain);
    if !known || accepts == 0 || domain != libc::AF_UNIX {
        return Err(SocketError::BadFd { fd });
    }
    // SAFETY: the descriptor is open (getsockopt has just succeeded on it); the command line that names
    // its number gives it to this process, and nothing else here knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A listening socket; its path is removed when this is dropped.
#[derive(Debug)]
pub struct ApiListener {
    listener: UnixListener,
    file: Option<Arc<SocketFile>>,
}

/// A socket file that this process created.
#[derive(Debug)]
pub struct SocketFile {
    /// Changes at most once, when this process takes the place of another.
    path: Mutex<PathBuf>,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.path.lock().clone()
    }

    /// Puts it where the socket of another process is, or was. A client finds that one or this one at the path, and
    /// never nothing.
    ///
    /// # Errors
    /// Those of rename(2); it stays where it is.
    pub fn move_to(&self, path: &Path) -> io::Result<()> {
        let mut own = self.path.lock();
        fs::rename(&*own, path)?;
        path.clone_into(&mut own);
        Ok(())
    }

    /// Removes it, unless another process has put its own socket there in the meantime.
    fn remove(&self) {
        let path = self.path.lock();
        if let Ok(metadata) = fs::symlink_metadata(&*path)
            && (metadata.dev(), metadata.ino()) == (self.device, self.inode)
            && let Err(error) = fs::remove_file(&*path)
        {
            log::warn!("the socket '{}' cannot be removed: {error}", path.display());
        }
    }
}

impl ApiListener {
    /// Starts listening.
    ///
    /// # Errors
    /// The path is in use, is not a socket, or cannot be made.
    pub fn bind(socket: ApiSocket) -> Result<Self, SocketError> {
        match socket {
            ApiSocket::Fd(fd) => Ok(Self { listener: UnixListener::from(fd), file: None }),
            ApiSocket::Path(path) => {
                remove_stale(&path)?;
                let failed = |source| SocketError::Bind { path: path.clone(), source };
                let listener = UnixListener::bind(&path).map_err(failed)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
                let metadata = fs::symlink_metadata(&path).map_err(failed)?;
                let (device, inode) = (metadata.dev(), metadata.ino());
                let file = SocketFile { path: Mutex::new(path), device, inode };
                Ok(Self { listener, file: Some(Arc::new(file)) })
            }
        }
    }

    /// The listening socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Its file, unless the socket was inherited.
    pub fn file(&self) -> Option<Arc<SocketFile>> {
        self.file.clone()
    }
}

impl Drop for ApiListener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// Removes the socket of a process that has ended.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket { path: path.to_owned() });
    }
    match probe(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            log::info!("replacing the stale socket '{}'", path.display());
            fs::remove_file(path).map_err(failed)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Connected, or the backlog of a live listener is full.
        _ => Err(SocketError::Live { path: path.to_owned() }),
    }
}

/// Connects to find out whether a process listens. Non-blocking: `WouldBlock` means a full backlog, and so
/// a live listener.
fn probe(path: &Path) -> io::Result<()> {
    // SAFETY: all zero is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).unwrap_or_default();
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidFilename));
    }
    for (slot, byte) in address.sun_path.iter_mut().zip(bytes) {
        *slot = libc::c_char::from_ne_bytes([*byte]);
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or_default();
    // SAFETY: `address` is an initialised sockaddr_un of `len` bytes that outlives the call.
    let done = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
