// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Back ends that are just enough for a driver to see whether its device works: a file system with an empty root, and a
//! network that sends each frame back.
//!
//! Owns what they answer (virtio 1.3, 5.1 and 5.11; linux/fuse.h). They must never know what the VMM is.

use std::io;
use std::path::Path;
use std::sync::{Arc, RwLock};

use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use vhost_user_backend::{VhostUserBackendMut, VhostUserDaemon, VringRwLock, VringT as _};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net as net;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes as _, GuestAddressSpace as _, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use crate::{Chain, Mapped, Memory, daemon_of, each, finish, invalid, next, of_memory};

const QUEUE_SIZE_MAX: usize = 1024;

const FUSE_HEADER_LEN_BYTES: usize = 40;
const FUSE_GETATTR: u32 = 3;
const FUSE_INIT: u32 = 26;
const FUSE_INIT_OUT_LEN_BYTES: usize = 64;
const FUSE_ATTR_OUT_LEN_BYTES: usize = 104;
const FUSE_MAJOR: u32 = 7;
const FUSE_MINOR: u32 = 31;
const ENOSYS: i32 = 38;
const ROOT: u64 = 1;
const MODE_OF_ROOT: u32 = 0o40_755;

/// What a back end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file system; the name is for VMMs that ask the back end for it.
    Fs,
    /// A network.
    Net,
}

/// A back end.
struct Peer {
    kind: Kind,
    queues: usize,
    /// Can be read and written by the VMM.
    config: Vec<u8>,
    memory: Memory,
}

fn bytes_of(memory: &Mapped, chain: Chain<'_>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    for part in chain.readable() {
        let mut bytes = vec![0; part.len() as usize];
        memory.read_slice(&mut bytes, part.addr()).map_err(of_memory)?;
        all.extend(bytes);
    }
    Ok(all)
}

/// Writes to the writable parts of a chain; returns how much.
fn put(memory: &Mapped, chain: Chain<'_>, bytes: &[u8]) -> io::Result<u32> {
    let mut left = bytes;
    for part in chain.writable() {
        let (now, later) = left.split_at(left.len().min(part.len() as usize));
        memory.write_slice(now, part.addr()).map_err(of_memory)?;
        left = later;
    }
    u32::try_from(bytes.len() - left.len()).map_err(io::Error::other)
}

/// The answer to a FUSE request.
fn fuse(request: &[u8]) -> io::Result<Vec<u8>> {
    let header = request.get(..FUSE_HEADER_LEN_BYTES).ok_or_else(|| invalid("no header"))?;
    let word = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
    let (mut body, error) = match word(4) {
        FUSE_INIT => {
            let mut body = vec![0; FUSE_INIT_OUT_LEN_BYTES];
            body[..4].copy_from_slice(&FUSE_MAJOR.to_le_bytes());
            body[4..8].copy_from_slice(&FUSE_MINOR.to_le_bytes());
            (body, 0)
        }
        FUSE_GETATTR => {
            let mut body = vec![0; FUSE_ATTR_OUT_LEN_BYTES];
            body[16..24].copy_from_slice(&ROOT.to_le_bytes());
            body[76..80].copy_from_slice(&MODE_OF_ROOT.to_le_bytes());
            (body, 0)
        }
        _ => (Vec::new(), -ENOSYS),
    };
    let len_bytes = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
    let mut answer = len_bytes.to_le_bytes().to_vec();
    answer.extend(error.to_le_bytes());
    answer.extend(&header[8..16]);
    answer.append(&mut body);
    Ok(answer)
}

/// Sends one frame back; says whether there was one, and a buffer for it.
///
/// Neither ring can be stopped meanwhile: the driver does not send twice, and the next back end knows nothing of a frame
/// that this one holds.
fn send_back(
    rx: &VringRwLock<Memory>,
    tx: &VringRwLock<Memory>,
    memory: &Mapped,
) -> io::Result<bool> {
    let (mut rx, mut tx) = (rx.get_mut(), tx.get_mut());
    let Some(frame) = next(&mut tx, memory)? else { return Ok(false) };
    let Some(buffer) = next(&mut rx, memory)? else {
        tx.get_queue_mut().go_to_previous_position();
        return Ok(false);
    };
    let (frame_head, buffer_head) = (frame.head_index(), buffer.head_index());
    let written = put(memory, buffer, &bytes_of(memory, frame)?)?;
    finish(&mut tx, frame_head, 0)?;
    finish(&mut rx, buffer_head, written)?;
    Ok(true)
}

/// Sends back each frame for which there is a buffer.
fn echo(rx: &VringRwLock<Memory>, tx: &VringRwLock<Memory>, memory: &Mapped) -> io::Result<()> {
    loop {
        for ring in [rx, tx] {
            ring.disable_notification().map_err(io::Error::other)?;
        }
        while send_back(rx, tx, memory)? {}
        let mut more = true;
        for ring in [rx, tx] {
            more &= ring.get_ref().get_queue().ready()
                && ring.enable_notification().map_err(io::Error::other)?;
        }
        if !more {
            return Ok(());
        }
    }
}

impl VhostUserBackendMut for Peer {
    type Bitmap = BitmapMmapRegion;
    type Vring = VringRwLock<Memory>;

    fn num_queues(&self) -> usize {
        self.queues
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE_MAX
    }

    fn features(&self) -> u64 {
        let own = match self.kind {
            Kind::Fs => 0,
            // Both are the front end's to serve.
            Kind::Net => {
                1 << net::VIRTIO_NET_F_CTRL_VQ
                    | 1 << net::VIRTIO_NET_F_MQ
                    | VhostUserVirtioFeatures::LOG_ALL.bits()
            }
        };
        own | 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.config.iter().skip(offset as usize).take(size as usize).copied().collect()
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let at = offset as usize;
        let to =
            self.config.get_mut(at..at + bytes.len()).ok_or_else(|| invalid("beyond the end"))?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn update_memory(&mut self, memory: Memory) -> io::Result<()> {
        self.memory = memory;
        Ok(())
    }

    fn handle_event(
        &mut self,
        queue: u16,
        _events: EventSet,
        vrings: &[Self::Vring],
        _thread: usize,
    ) -> io::Result<()> {
        let vring = |index: usize| vrings.get(index).ok_or_else(|| invalid("no such queue"));
        let queue = usize::from(queue);
        match self.kind {
            Kind::Fs => {
                let memory = self.memory.memory();
                each(vring(queue)?, &memory, |chain| {
                    let answer = fuse(&bytes_of(&memory, chain.clone())?)?;
                    put(&memory, chain, &answer)
                })
            }
            Kind::Net => echo(vring(queue & !1)?, vring(queue | 1)?, &self.memory.memory()),
        }
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()
    }
}

/// How a back end and its front end find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The back end listens.
    Listens,
    /// The back end listens, and serves several front ends at a time.
    ListensToAll,
    /// The back end connects to a VMM that listens.
    Connects,
}

/// Serves a device at `socket` to one front end, until that ends the connection.
///
/// # Errors
/// The socket cannot be used, or a request broke the protocol.
pub fn serve(socket: &Path, kind: Kind, role: Role, queues: usize) -> io::Result<()> {
    let mut daemon = peer(kind, queues)?;
    let done = match role {
        Role::Listens | Role::ListensToAll => daemon.serve(socket),
        Role::Connects => {
            let started = daemon.start_client(&socket.to_string_lossy());
            started.and_then(|()| daemon.wait())
        }
    };
    done.map_err(|error| io::Error::other(error.to_string()))
}

/// Serves a device of its own at `socket` to each front end, however many there are at a time.
///
/// # Errors
/// The socket cannot be used, or there is no thread.
pub fn serve_all(socket: &Path, kind: Kind, queues: usize) -> io::Result<()> {
    let other = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
    let mut listener = Listener::new(socket, true).map_err(|error| other(&error))?;
    loop {
        let mut daemon = peer(kind, queues)?;
        daemon.start(&mut listener).map_err(|error| other(&error))?;
        std::thread::spawn(move || {
            if let Err(error) = daemon.wait() {
                eprintln!("a connection ends: {error}");
            }
        });
    }
}

fn peer(kind: Kind, queues: usize) -> io::Result<VhostUserDaemon<Arc<RwLock<Peer>>>> {
    let memory = GuestMemoryAtomic::new(Mapped::new());
    let mut config = vec![0; 40];
    config[..5].copy_from_slice(b"there");
    config[36] = 1;
    let peer = Peer { kind, queues, config, memory: memory.clone() };
    daemon_of(Arc::new(RwLock::new(peer)), memory)
}
