// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM's end of the connection to a pool.
//!
//! Owns the connection: the memory that came over it is leased for as long as the connection is open.
//! Must never wait longer than [`PATIENCE`] in all (for devices, [`PATIENCE_PINNED`], and once more with a pool of an
//! earlier version): a VM without prezeroed memory starts later, a VM whose pool hangs must start all the same. Must never read an answer
//! as that to another request: answers do not name theirs, so a connection with an answer outstanding is not used again.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pci_address::Bdf;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use thiserror::Error;
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use crate::frame::ProtocolError;
use crate::pages::SlotPages;
use crate::pinned::{PinnedGrant, TakePinned, ZONES_MAX};
use crate::protocol::{MESSAGE_BYTES_MAX, Refusal, Reply, Request, Take};

/// A pool answers within a millisecond; one that is stopped or overrun does not hold a VM up.
const PATIENCE: Duration = Duration::from_secs(2);
/// For a device that the pool has at hand while it maps memory: without the answer no other process could have
/// it, and the pool itself gives up before.
const PATIENCE_PINNED: Duration = Duration::from_secs(12);
/// A read waits at least so long: none at all would mean forever.
const READ_TIME_MIN: Duration = Duration::from_millis(1);
/// Descriptors that come with an answer: a memfd for each zone, an iommufd, a device.
const DESCRIPTORS_MAX: usize = ZONES_MAX + 2;

/// Why a pool gave no memory.
#[derive(Debug, Error)]
pub enum PoolError {
    /// There is no daemon.
    #[error("the pool of prezeroed memory at {} cannot be reached", path.display())]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// The host's answer.
        #[source]
        source: io::Error,
    },
    /// It is there and says nothing, or has gone away.
    #[error("the pool of prezeroed memory at {} does not answer", path.display())]
    Io {
        /// Its socket.
        path: PathBuf,
        /// The host's answer.
        #[source]
        source: io::Error,
    },
    /// It says something else.
    #[error("the pool of prezeroed memory at {} sent an invalid message", path.display())]
    Protocol {
        /// Its socket.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: ProtocolError,
    },
    /// An answer is outstanding, or was not understood, and may still come.
    #[error(
        "the pool of prezeroed memory at {} has not answered an earlier request, so nothing more is asked of it",
        path.display()
    )]
    Unanswered {
        /// Its socket.
        path: PathBuf,
    },
    /// It breaks its own rules.
    #[error("the pool of prezeroed memory at {} {what}", path.display())]
    Misbehaved {
        /// Its socket.
        path: PathBuf,
        /// What it did.
        what: &'static str,
    },
    /// It knows no slots of several zones.
    #[error(
        "the pool of prezeroed memory at {} is of an earlier version: it has released the devices of the VM, and has no \
         memory that is mapped for one",
        path.display()
    )]
    Earlier {
        /// Its socket.
        path: PathBuf,
    },
    /// It refuses.
    #[error("the pool of prezeroed memory at {} refuses: {text}", path.display())]
    Refused {
        /// Its socket.
        path: PathBuf,
        /// Why, for programs.
        reason: Refusal,
        /// Why, for messages.
        text: String,
    },
}

/// Memory from a pool.
#[derive(Debug)]
pub struct PoolMemory {
    /// The memfd, with every page present and zero.
    pub file: File,
    /// How long it is.
    pub size_bytes: u64,
    /// What it consists of.
    pub pages: SlotPages,
}

/// Memory from a pool that a device is ready to reach, and the device.
#[derive(Debug)]
pub struct PinnedMemory {
    /// The memfd of each zone, with every page present and zero.
    pub files: Vec<File>,
    /// The iommufd; the pool has none any more.
    pub iommufd: File,
    /// The character device, which is bound to it and attached to nothing.
    pub device: File,
    /// What is mapped where, and the numbers.
    pub grant: PinnedGrant,
}

/// A connection to a pool. What was taken over it goes back when it is closed.
#[derive(Debug)]
pub struct PoolConnection {
    path: PathBuf,
    /// Locked for one request and its answer.
    link: Mutex<Link>,
}

#[derive(Debug)]
struct Link {
    stream: UnixStream,
    /// Whether a request was made whose answer has not been read in full.
    is_unanswered: bool,
    /// The devices that a slot was asked for with: the pool leaves them alone while this is open.
    devices: Vec<Bdf>,
    /// Earlier connections that stay open for as long: for what was told or given over them.
    others: Vec<UnixStream>,
    /// Whether the pool is of an earlier version, which leaves devices alone for a while only.
    is_earlier: bool,
}

impl Link {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            is_unanswered: false,
            devices: Vec::new(),
            others: Vec::new(),
            is_earlier: false,
        }
    }

    /// Takes another connection in place of this one. What was given over this one stays.
    fn replace(&mut self, stream: UnixStream) {
        let old = std::mem::replace(&mut self.stream, stream);
        self.others.push(old);
        self.others.retain(|stream| !has_ended(stream));
        self.is_unanswered = false;
    }
}

impl PoolConnection {
    /// Connects.
    ///
    /// # Errors
    /// Nothing listens, or the listener takes no more connections for now.
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        let stream =
            connect(path).map_err(|source| PoolError::Connect { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), link: Mutex::new(Link::new(stream)) })
    }

    /// The pool's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Asks for memory.
    ///
    /// # Errors
    /// There is none, or the pool does not answer in time; nothing was taken.
    pub fn take(&self, request: &Take) -> Result<PoolMemory, PoolError> {
        let path = || self.path.clone();
        let misbehaved = |what| PoolError::Misbehaved { path: path(), what };
        let (reply, mut files) = self.ask(&request.encode(), PATIENCE)?;
        if files.len() > 1 {
            return Err(misbehaved("sent two descriptors for one"));
        }
        match (reply, files.pop()) {
            (Reply::Granted { size_bytes, .. }, Some(_)) if size_bytes < request.size_bytes => {
                Err(misbehaved("gave less memory than it was asked for"))
            }
            (Reply::Granted { pages, .. }, Some(_)) if !pages.suits(request.pages) => {
                Err(misbehaved("gave memory of another kind than it was asked for"))
            }
            (Reply::Granted { size_bytes, pages }, Some(file)) => {
                Ok(PoolMemory { file, size_bytes, pages })
            }
            (Reply::Granted { .. }, None) => Err(misbehaved("granted memory and sent none")),
            (Reply::GrantedPinned(_), _) => Err(misbehaved("gave a device that was not asked for")),
            (Reply::Refused { .. }, Some(_)) => Err(misbehaved("sent memory that it refused")),
            (Reply::Refused { reason, text }, None) => {
                Err(PoolError::Refused { path: path(), reason, text })
            }
        }
    }

    /// Asks for memory that a device is ready to reach, and for the device. The pool leaves all devices of the request
    /// alone for as long as the connection is open, also if it refuses.
    ///
    /// # Errors
    /// There is none, or the pool does not answer in time; nothing was taken.
    pub fn take_pinned(&self, request: &TakePinned) -> Result<PinnedMemory, PoolError> {
        self.take_pinned_within(request, PATIENCE_PINNED)
    }

    fn take_pinned_within(
        &self,
        request: &TakePinned,
        patience: Duration,
    ) -> Result<PinnedMemory, PoolError> {
        let path = || self.path.clone();
        let misbehaved = |what| PoolError::Misbehaved { path: path(), what };
        self.link.lock().devices.clone_from(&request.devices);
        let asked = self.ask(&request.encode(), patience);
        let (reply, mut files) = asked.map_err(|error| {
            let is_cut = matches!(&error, PoolError::Io { source, .. } if is_end(source));
            // The devices are still with it.
            if is_cut && self.release_from_earlier(&request.devices, patience).is_ok() {
                PoolError::Earlier { path: path() }
            } else {
                error
            }
        })?;
        let grant = match reply {
            Reply::GrantedPinned(grant) => grant,
            Reply::Granted { .. } => return Err(misbehaved("gave memory without the device")),
            Reply::Refused { .. } if !files.is_empty() => {
                return Err(misbehaved("sent memory that it refused"));
            }
            Reply::Refused { reason, text } => {
                return Err(PoolError::Refused { path: path(), reason, text });
            }
        };
        if !is_answer_to(&grant, request) {
            return Err(misbehaved("gave other memory than it was asked for"));
        }
        if grant.regions != request.regions {
            return Err(misbehaved("gave memory at other addresses than it was asked for"));
        }
        if !request.devices.contains(&grant.device) {
            return Err(misbehaved("gave a device that was not asked for"));
        }
        if files.len() != grant.descriptors_count() {
            return Err(misbehaved(
                "granted a device and sent other descriptors than belong to it",
            ));
        }
        let too_few = || misbehaved("granted a device and sent too little");
        let device = files.pop().ok_or_else(too_few)?;
        let iommufd = files.pop().ok_or_else(too_few)?;
        Ok(PinnedMemory { files, iommufd, device, grant })
    }

    /// Has the pool leave the devices alone that a slot was asked for with, if it may not: it has closed the connection, as
    /// it was started anew and knows nothing of them, or is of an earlier version. Otherwise nothing is asked.
    ///
    /// # Errors
    /// The pool is not there, or does not answer within [`PATIENCE`], with an earlier version twice that: it may take the
    /// devices.
    pub fn renew(&self) -> Result<(), PoolError> {
        let path = || self.path.clone();
        let devices = {
            let mut link = self.link.lock();
            let is_sure = !(link.is_earlier || link.is_unanswered || has_ended(&link.stream));
            if is_sure || link.devices.is_empty() {
                return Ok(());
            }
            let stream = connect(&self.path)
                .map_err(|source| PoolError::Connect { path: path(), source })?;
            link.replace(stream);
            link.devices.clone()
        };
        let alone = TakePinned { devices, zones: Vec::new(), regions: Vec::new() };
        match self.take_pinned_within(&alone, PATIENCE) {
            Err(PoolError::Refused { .. } | PoolError::Earlier { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => {
                let what = "gave a device that it was to leave alone";
                Err(PoolError::Misbehaved { path: path(), what })
            }
        }
    }

    /// Connects anew, and has a pool release devices that cuts a connection over which it is asked as of this version. Each
    /// has a connection of its own: to release one takes time, and a pool hears nothing over that connection meanwhile.
    fn release_from_earlier(&self, devices: &[Bdf], patience: Duration) -> Result<(), PoolError> {
        let until = Instant::now() + patience;
        let asked: Vec<_> = devices
            .iter()
            .map(|device| {
                let stream = connect_until(&self.path, until)?;
                // Of a request that could not be sent there is no answer.
                let _ = io::Write::write_all(&mut &stream, &Request::Release(*device).encode());
                Ok(stream)
            })
            .collect();
        let (mut released, mut failed) = (Vec::new(), None);
        for stream in asked {
            let answered = stream
                .map_err(|source| PoolError::Connect { path: self.path.clone(), source })
                .and_then(|stream| Ok((self.receive(&stream, until)?, stream)));
            match answered {
                Ok(((Reply::Refused { .. }, _), stream)) => released.push(stream),
                Ok(_) => {
                    let what = "gave a device that it was to release";
                    failed = Some(PoolError::Misbehaved { path: self.path.clone(), what });
                }
                Err(error) => failed = Some(error),
            }
        }
        if let Some(stream) = released.pop() {
            let mut link = self.link.lock();
            link.replace(stream);
            link.others.append(&mut released);
            link.is_earlier = true;
        }
        failed.map_or(Ok(()), Err)
    }

    /// Makes a request and waits for its answer.
    fn ask(&self, request: &[u8], patience: Duration) -> Result<(Reply, Vec<File>), PoolError> {
        let mut link = self.link.lock();
        let io_error = |source| PoolError::Io { path: self.path.clone(), source };
        if std::mem::replace(&mut link.is_unanswered, true) {
            return Err(PoolError::Unanswered { path: self.path.clone() });
        }
        let until = Instant::now() + patience;
        let answer = match io::Write::write_all(&mut &link.stream, request) {
            Ok(()) => self.receive(&link.stream, until)?,
            // A pool from which this user may have nothing says so and closes the connection at once.
            Err(error) => self.receive(&link.stream, until).map_err(|_| io_error(error))?,
        };
        link.is_unanswered = false;
        Ok(answer)
    }

    fn receive(
        &self,
        stream: &UnixStream,
        until: Instant,
    ) -> Result<(Reply, Vec<File>), PoolError> {
        let path = || self.path.clone();
        let io_error = |source| PoolError::Io { path: path(), source };
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        let (mut filled, mut files) = (0, Vec::new());
        loop {
            let so_far = buffer.get(..filled).unwrap_or_default();
            let decoded = Reply::decode(so_far)
                .map_err(|source| PoolError::Protocol { path: path(), source })?;
            if let Some((reply, len)) = decoded {
                if len < filled {
                    let what = "says more than it was asked";
                    return Err(PoolError::Misbehaved { path: path(), what });
                }
                return Ok((reply, files));
            }
            // What is there already is read also when the time is over.
            let left = until.saturating_duration_since(Instant::now()).max(READ_TIME_MIN);
            stream.set_read_timeout(Some(left)).map_err(io_error)?;
            let room = buffer.get_mut(filled..).unwrap_or_default();
            let (len, received) = stream
                .recv_with_fd(room)
                .map_err(|error| io_error(io::Error::from_raw_os_error(error.errno())))?;
            if len == 0 {
                return Err(io_error(io::Error::from(io::ErrorKind::UnexpectedEof)));
            }
            if received.is_some() && files.len() == DESCRIPTORS_MAX {
                let what = "sent too many descriptors";
                return Err(PoolError::Misbehaved { path: path(), what });
            }
            files.extend(received);
            filled += len;
        }
    }
}

/// Whether what was granted has the zones that were asked for.
fn is_answer_to(grant: &PinnedGrant, request: &TakePinned) -> bool {
    let mut both = grant.zones.iter().zip(&request.zones);
    grant.zones.len() == request.zones.len()
        && both.all(|(granted, wanted)| {
            granted.size_bytes == wanted.size_bytes && granted.pages.suits(wanted.pages)
        })
}

/// Whether the other end was closed.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Whether the other end was closed and nothing is left to be read.
fn has_ended(stream: &UnixStream) -> bool {
    let peek = || {
        stream.set_nonblocking(true)?;
        let peeked = SockRef::from(stream).peek(&mut [MaybeUninit::uninit()]);
        stream.set_nonblocking(false)?;
        peeked
    };
    match peek() {
        Ok(len) => len == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

fn connect_until(path: &Path, until: Instant) -> io::Result<UnixStream> {
    if Instant::now() >= until {
        return Err(io::Error::from(io::ErrorKind::TimedOut));
    }
    connect(path)
}

fn connect(path: &Path) -> io::Result<UnixStream> {
    // A connect to a socket whose queue is full would wait forever but for the time set here.
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    if !path.metadata()?.file_type().is_socket() {
        return Err(io::Error::other("it is not a socket"));
    }
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(UnixStream::from(std::os::fd::OwnedFd::from(socket)))
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
