// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM's end of the connection to a pool.
//!
//! Owns the connection: the memory that came over it is leased for as long as the connection is open.
//! Must never wait longer than [`PATIENCE`] in all (for a device, [`PATIENCE_PINNED`], with a pool of an earlier version for
//! each): a VM without
//! prezeroed memory starts later, a VM whose pool hangs must start all the same. Must never read an answer
//! as that to another request: answers do not name theirs, so a connection with an answer outstanding is not used again.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pci_address::Bdf;
use socket2::{Domain, SockAddr, Socket, Type};
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
}

impl PoolConnection {
    /// Connects.
    ///
    /// # Errors
    /// Nothing listens, or the listener takes no more connections for now.
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        let stream =
            connect(path).map_err(|source| PoolError::Connect { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), link: Mutex::new(Link { stream, is_unanswered: false }) })
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
        let path = || self.path.clone();
        let misbehaved = |what| PoolError::Misbehaved { path: path(), what };
        let asked = self.ask(&request.encode(), PATIENCE_PINNED);
        let (reply, mut files) = asked.map_err(|error| {
            let is_cut = matches!(&error, PoolError::Io { source, .. } if is_end(source));
            // The devices are still with it.
            if is_cut && self.release_from_earlier(&request.devices).is_ok() {
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

    /// Connects anew, and has a pool release devices that cuts a connection over which it is asked as of this version.
    fn release_from_earlier(&self, devices: &[Bdf]) -> Result<(), PoolError> {
        let path = || self.path.clone();
        let stream =
            connect(&self.path).map_err(|source| PoolError::Connect { path: path(), source })?;
        *self.link.lock() = Link { stream, is_unanswered: false };
        for device in devices {
            let (reply, _) = self.ask(&Request::Release(*device).encode(), PATIENCE_PINNED)?;
            if !matches!(reply, Reply::Refused { .. }) {
                let what = "gave a device that it was to release";
                return Err(PoolError::Misbehaved { path: path(), what });
            }
        }
        Ok(())
    }

    /// Makes a request and waits for its answer.
    fn ask(&self, request: &[u8], patience: Duration) -> Result<(Reply, Vec<File>), PoolError> {
        let mut link = self.link.lock();
        let io_error = |source| PoolError::Io { path: self.path.clone(), source };
        if std::mem::replace(&mut link.is_unanswered, true) {
            return Err(PoolError::Unanswered { path: self.path.clone() });
        }
        let written = io::Write::write_all(&mut &link.stream, request);
        link.stream.set_read_timeout(Some(patience)).map_err(io_error)?;
        let answer = match written {
            Ok(()) => self.receive(&link.stream, patience)?,
            // A pool from which this user may have nothing says so and closes the connection at once.
            Err(error) => self.receive(&link.stream, patience).map_err(|_| io_error(error))?,
        };
        link.is_unanswered = false;
        Ok(answer)
    }

    fn receive(
        &self,
        stream: &UnixStream,
        patience: Duration,
    ) -> Result<(Reply, Vec<File>), PoolError> {
        let path = || self.path.clone();
        let io_error = |source| PoolError::Io { path: path(), source };
        let start = Instant::now();
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
            if start.elapsed() > patience {
                return Err(io_error(io::Error::from(io::ErrorKind::TimedOut)));
            }
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
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::pages::PagesWanted;
    use crate::pinned::{PinnedRegion, PinnedZone, ZoneWanted};

    const REQUEST: Take = Take { size_bytes: 4096, pages: PagesWanted::Small, node: None };

    /// A pool that answers one question like this.
    fn answered(
        answer: impl FnOnce(&mut UnixStream) + Send + 'static,
    ) -> Result<PoolMemory, PoolError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let listener = UnixListener::bind(&path).unwrap();
        let pool = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 32];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(Take::decode(&request), Ok(Some((REQUEST, 32))));
            answer(&mut stream);
        });
        let result = PoolConnection::open(&path).and_then(|pool| pool.take(&REQUEST));
        pool.join().unwrap();
        result
    }

    fn granted(size_bytes: u64, pages: SlotPages) -> Vec<u8> {
        Reply::Granted { size_bytes, pages }.encode()
    }

    #[test]
    fn memory_comes_with_its_message_even_in_pieces() {
        let memory = answered(|stream| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(8192).unwrap();
            let reply = granted(8192, SlotPages::Transparent);
            stream.send_with_fd(&reply[..5], file.as_raw_fd()).unwrap();
            stream.write_all(&reply[5..]).unwrap();
        })
        .unwrap();
        assert_eq!((memory.size_bytes, memory.pages), (8192, SlotPages::Transparent));
        assert_eq!(memory.file.metadata().unwrap().len(), 8192);
    }

    /// The first answer is too late, and would be taken for that to the second request.
    #[test]
    fn a_late_answer_is_none_to_another_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let listener = UnixListener::bind(&path).unwrap();
        let connection = PoolConnection::open(&path).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let late = connection.ask(&REQUEST.encode(), Duration::from_millis(1));
        assert!(matches!(late, Err(PoolError::Io { .. })), "{late:?}");
        let file = tempfile::tempfile().unwrap();
        let reply = granted(8192, SlotPages::Small);
        stream.send_with_fd(&reply[..], file.as_raw_fd()).unwrap();
        let other = Take { size_bytes: 8192, ..REQUEST };
        let answer = connection.take(&other);
        assert!(matches!(answer, Err(PoolError::Unanswered { .. })), "{answer:?}");
        // With the connection goes what was granted late.
        drop(connection);
        let mut request = [0; 32];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(stream.read(&mut request).unwrap_or(0), 0, "nothing more was asked");
    }

    #[test]
    fn a_refusal_says_why() {
        let text = "none is ready";
        let reply = Reply::Refused { reason: Refusal::Empty, text: text.to_owned() }.encode();
        let error = answered(move |stream| stream.write_all(&reply).unwrap()).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }

    #[test]
    fn what_a_pool_must_not_do_is_an_error() {
        let with_file = |reply: Vec<u8>| {
            answered(move |stream| {
                let file = tempfile::tempfile().unwrap();
                stream.send_with_fd(&reply[..], file.as_raw_fd()).unwrap();
            })
        };
        let refused = Reply::Refused { reason: Refusal::Empty, text: String::new() };
        assert!(matches!(with_file(refused.encode()), Err(PoolError::Misbehaved { .. })));
        let small = granted(1, SlotPages::Small);
        assert!(matches!(with_file(small), Err(PoolError::Misbehaved { .. })));
        let huge = granted(1 << 30, SlotPages::Huge1Gib);
        assert!(matches!(with_file(huge), Err(PoolError::Misbehaved { .. })));
        let twice = [granted(4096, SlotPages::Small), granted(4096, SlotPages::Small)].concat();
        assert!(matches!(with_file(twice), Err(PoolError::Misbehaved { .. })));
        let nothing =
            answered(|stream| stream.write_all(&granted(4096, SlotPages::Small)).unwrap());
        assert!(matches!(nothing, Err(PoolError::Misbehaved { .. })));
        let rubbish = answered(|stream| stream.write_all(b"hello").unwrap());
        assert!(matches!(rubbish, Err(PoolError::Protocol { .. })));
        let gone = answered(|_| ());
        assert!(matches!(gone, Err(PoolError::Io { .. })), "{gone:?}");
    }

    /// The same for a device, answered with descriptors that come with the first bytes.
    fn answered_pinned(
        answer: Vec<u8>,
        descriptors: usize,
    ) -> (TakePinned, Result<PinnedMemory, PoolError>) {
        let wanted = TakePinned {
            devices: vec!["0000:64:00.0".parse().unwrap(), "0000:65:00.0".parse().unwrap()],
            zones: vec![ZoneWanted { size_bytes: 8192, pages: PagesWanted::Small, node: None }; 2],
            regions: regions(),
        };
        let (asked, len) = (wanted.clone(), wanted.encode().len());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let listener = UnixListener::bind(&path).unwrap();
        let pool = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; len];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(TakePinned::decode(&request), Ok(Some((asked, len))));
            for (at, byte) in answer.iter().enumerate() {
                let file = tempfile::tempfile().unwrap();
                file.set_len(4096 * (at as u64 + 1)).unwrap();
                let sent = if at < descriptors {
                    stream.send_with_fd(&[*byte][..], file.as_raw_fd()).is_ok()
                } else {
                    stream.write_all(&[*byte]).is_ok()
                };
                // A client that has read enough hangs up.
                if !sent {
                    break;
                }
            }
        });
        let result = PoolConnection::open(&path).and_then(|pool| pool.take_pinned(&wanted));
        let _ = pool.join();
        (wanted, result)
    }

    /// Two zones, the second of which is in two parts.
    fn regions() -> Vec<PinnedRegion> {
        let region = |zone, gpa, offset, len_bytes| PinnedRegion { zone, gpa, len_bytes, offset };
        vec![region(0, 0, 0, 8192), region(1, 8192, 0, 4096), region(1, 1 << 20, 4096, 4096)]
    }

    #[test]
    fn a_device_comes_with_its_memory_or_not_at_all() {
        let grant = PinnedGrant {
            device: "0000:65:00.0".parse().unwrap(),
            zones: vec![PinnedZone { size_bytes: 8192, pages: SlotPages::Small }; 2],
            piece_bytes: 4096,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: regions(),
        };
        let reply = Reply::GrantedPinned(grant.clone()).encode();
        let memory = answered_pinned(reply.clone(), 4).1.unwrap();
        assert_eq!(memory.grant, grant);
        let len = |file: &File| file.metadata().unwrap().len();
        assert_eq!(memory.files.iter().map(len).collect::<Vec<_>>(), [4096, 8192]);
        assert_eq!([&memory.iommufd, &memory.device].map(len), [12288, 16384]);
        for descriptors in [0, 3, 5, DESCRIPTORS_MAX + 1] {
            let result = answered_pinned(reply.clone(), descriptors).1;
            assert!(matches!(result, Err(PoolError::Misbehaved { .. })), "{descriptors}");
        }
        let changes: [fn(&mut PinnedGrant); 4] = [
            |grant| {
                grant.zones.pop();
                grant.regions.truncate(1);
            },
            |grant| grant.zones[1].pages = SlotPages::Huge2Mib,
            |grant| grant.regions[2].gpa += 4096,
            |grant| grant.device = "0000:66:00.0".parse().unwrap(),
        ];
        for change in changes {
            let mut other = grant.clone();
            change(&mut other);
            let descriptors = other.descriptors_count();
            let result = answered_pinned(Reply::GrantedPinned(other).encode(), descriptors).1;
            assert!(matches!(result, Err(PoolError::Misbehaved { .. })), "{result:?}");
        }
        let memory_only = granted(8192, SlotPages::Small);
        assert!(matches!(answered_pinned(memory_only, 1).1, Err(PoolError::Misbehaved { .. })));
        let refused = Reply::Refused { reason: Refusal::NotAllowed, text: String::new() };
        let reason = match answered_pinned(refused.encode(), 0).1 {
            Err(PoolError::Refused { reason, .. }) => Some(reason),
            _ => None,
        };
        assert_eq!(reason, Some(Refusal::NotAllowed));
    }

    /// A pool that takes requests of one zone only, and cuts who asks otherwise.
    #[test]
    fn a_pool_of_an_earlier_version_releases_the_devices() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let listener = UnixListener::bind(&path).unwrap();
        let devices: Vec<Bdf> =
            vec!["0000:64:00.0".parse().unwrap(), "0001:65:1f.7".parse().unwrap()];
        let expected = devices.clone();
        let pool = std::thread::spawn(move || {
            let (mut first, _) = listener.accept().unwrap();
            // It closes with the rest unread.
            first.read_exact(&mut [0; 16]).unwrap();
            drop(first);
            let (mut second, _) = listener.accept().unwrap();
            for device in expected {
                let mut request = [0; 56];
                second.read_exact(&mut request).unwrap();
                // Kind 4, 40 bytes: 4096 bytes of any node, without a hole.
                assert_eq!(request[..16], *b"GPZ1\x04\0\0\0\x28\0\0\0\0\0\0\0");
                assert_eq!(request[16..32], *b"\0\x10\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff");
                assert_eq!(
                    Request::decode(&request),
                    Ok(Some((Request::Release(device), request.len())))
                );
                let refused = Reply::Refused { reason: Refusal::NoSuchSlot, text: String::new() };
                second.write_all(&refused.encode()).unwrap();
            }
        });
        let zones = vec![ZoneWanted { size_bytes: 8192, pages: PagesWanted::Small, node: None }; 2];
        let wanted = TakePinned { devices, zones, regions: regions() };
        let connection = PoolConnection::open(&path).unwrap();
        let error = connection.take_pinned(&wanted).unwrap_err();
        assert!(matches!(error, PoolError::Earlier { .. }), "{error:?}");
        pool.join().unwrap();
        // The pool has ended.
        let error = connection.take_pinned(&wanted).unwrap_err();
        assert!(matches!(error, PoolError::Io { .. }), "{error:?}");
    }

    #[test]
    fn a_pool_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none");
        let error = PoolConnection::open(&path).unwrap_err();
        assert!(error.to_string().contains("none"), "{error}");
        std::fs::write(&path, "").unwrap();
        assert!(matches!(PoolConnection::open(&path), Err(PoolError::Connect { .. })));
    }
}
