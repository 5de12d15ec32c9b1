// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vhost-user back ends for tests: a block device whose contents are a file, and those of [`peer`].
//!
//! Owns the block device as virtio 1.3 (5.2) describes it, by the crates that other back ends use, so that a test
//! shows how this VMM works together with them. It must never know what the VMM is.

pub mod peer;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, RwLock};

use vhost::vhost_user::Backend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use vhost_user_backend::{
    VhostUserBackend, VhostUserBackendMut, VhostUserDaemon, VringRwLock, VringState, VringT,
};
use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

/// Guest memory, of which writes are logged while the front end wants that.
type Mapped = GuestMemoryMmap<BitmapMmapRegion>;
type Memory = GuestMemoryAtomic<Mapped>;

const SECTOR_BYTES: u64 = 512;
const CONFIG_LEN_BYTES: usize = 60;
const QUEUE_SIZE_MAX: usize = 1024;
/// Segments of a request that are announced.
const SEGMENTS_MAX: u32 = 64;
/// What the device says it is.
const SERIAL: &[u8] = b"vhost-user-disk";

/// The device.
struct Disk {
    file: File,
    len_bytes: u64,
    queues: usize,
    memory: Memory,
    /// Where it could make requests.
    requests: Option<Backend>,
}

/// A request: the type, the first sector, what is readable after the header, and what is writable.
struct Request {
    kind: u32,
    sector: u64,
    readable: Vec<Descriptor>,
    writable: Vec<Descriptor>,
    status: GuestAddress,
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn of_memory(error: vm_memory::GuestMemoryError) -> io::Error {
    io::Error::other(error)
}

impl Request {
    fn parse(memory: &Mapped, chain: impl Iterator<Item = Descriptor>) -> io::Result<Self> {
        let (mut writable, mut readable): (Vec<_>, Vec<_>) =
            chain.partition(Descriptor::is_write_only);
        if readable.is_empty() {
            return Err(invalid("no header"));
        }
        let header = readable.remove(0);
        let status = writable.pop().ok_or_else(|| invalid("no status"))?;
        let kind = memory.read_obj(header.addr()).map_err(of_memory)?;
        let sector = GuestAddress(header.addr().0 + 8);
        let sector = memory.read_obj(sector).map_err(of_memory)?;
        Ok(Self { kind, sector, readable, writable, status: status.addr() })
    }

    /// Carries it out; returns the bytes written to guest memory.
    fn run(&self, disk: &Disk, memory: &Mapped) -> io::Result<u32> {
        let mut offset = self.sector.saturating_mul(SECTOR_BYTES);
        let mut written = 0;
        match self.kind {
            blk::VIRTIO_BLK_T_IN => {
                for part in &self.writable {
                    let mut bytes = vec![0; part.len() as usize];
                    disk.file.read_exact_at(&mut bytes, offset)?;
                    memory.write_slice(&bytes, part.addr()).map_err(of_memory)?;
                    offset += u64::from(part.len());
                    written += part.len();
                }
            }
            blk::VIRTIO_BLK_T_OUT => {
                for part in &self.readable {
                    let mut bytes = vec![0; part.len() as usize];
                    memory.read_slice(&mut bytes, part.addr()).map_err(of_memory)?;
                    if offset.saturating_add(u64::from(part.len())) > disk.len_bytes {
                        return Err(invalid("beyond the end"));
                    }
                    disk.file.write_all_at(&bytes, offset)?;
                    offset += u64::from(part.len());
                }
            }
            blk::VIRTIO_BLK_T_FLUSH => disk.file.sync_data()?,
            blk::VIRTIO_BLK_T_GET_ID => {
                let part = self.writable.first().ok_or_else(|| invalid("no room"))?;
                memory.write_slice(SERIAL, part.addr()).map_err(of_memory)?;
                written = 20;
            }
            _ => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(written)
    }
}

type Chain<'a> = DescriptorChain<&'a Mapped>;

/// Takes the next chain from a ring that runs.
fn next<'m>(ring: &mut VringState<Memory>, memory: &'m Mapped) -> io::Result<Option<Chain<'m>>> {
    if !ring.get_queue().ready() {
        return Ok(None);
    }
    Ok(ring.get_queue_mut().iter(memory).map_err(io::Error::other)?.next())
}

/// Has a chain used with the bytes that were written to it.
fn finish(ring: &mut VringState<Memory>, head: u16, written: u32) -> io::Result<()> {
    ring.add_used(head, written).map_err(io::Error::other)?;
    if ring.needs_notification().map_err(io::Error::other)? {
        ring.signal_used_queue()?;
    }
    Ok(())
}

/// Takes the available chains of a queue, and has each used with the bytes that `carry_out` has written.
///
/// The ring is not stopped in between: the driver does not ask twice, and the next back end knows nothing of a request
/// that this one holds.
fn each(
    vring: &VringRwLock<Memory>,
    memory: &Mapped,
    mut carry_out: impl FnMut(Chain<'_>) -> io::Result<u32>,
) -> io::Result<()> {
    loop {
        vring.disable_notification().map_err(io::Error::other)?;
        loop {
            let mut ring = vring.get_mut();
            let Some(chain) = next(&mut ring, memory)? else { break };
            let head = chain.head_index();
            let written = carry_out(chain)?;
            finish(&mut ring, head, written)?;
        }
        let mut ring = vring.get_mut();
        if !ring.get_queue().ready() || !ring.enable_notification().map_err(io::Error::other)? {
            return Ok(());
        }
    }
}

impl Disk {
    fn serve(&self, vring: &VringRwLock<Memory>) -> io::Result<()> {
        let memory = self.memory.memory();
        each(vring, &memory, |chain| {
            let request = Request::parse(&memory, chain)?;
            let (status, written) = match request.run(self, &memory) {
                Ok(written) => (blk::VIRTIO_BLK_S_OK, written),
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    (blk::VIRTIO_BLK_S_UNSUPP, 0)
                }
                Err(_) => (blk::VIRTIO_BLK_S_IOERR, 0),
            };
            let status = u8::try_from(status).unwrap_or(u8::MAX);
            memory.write_obj(status, request.status).map_err(of_memory)?;
            Ok(written + 1)
        })
    }
}

impl VhostUserBackendMut for Disk {
    type Bitmap = BitmapMmapRegion;
    type Vring = VringRwLock<Memory>;

    fn num_queues(&self) -> usize {
        self.queues
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE_MAX
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << blk::VIRTIO_BLK_F_SEG_MAX
            | 1 << blk::VIRTIO_BLK_F_FLUSH
            | 1 << blk::VIRTIO_BLK_F_MQ
            | 1 << blk::VIRTIO_BLK_F_CONFIG_WCE
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut config = vec![0; CONFIG_LEN_BYTES];
        config[..8].copy_from_slice(&(self.len_bytes / SECTOR_BYTES).to_le_bytes());
        config[12..16].copy_from_slice(&SEGMENTS_MAX.to_le_bytes());
        config.into_iter().skip(offset as usize).take(size as usize).collect()
    }

    fn set_backend_req_fd(&mut self, requests: Backend) {
        self.requests = Some(requests);
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
        let vring = vrings.get(usize::from(queue)).ok_or_else(|| invalid("no such queue"))?;
        self.serve(vring)
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()
    }
}

/// Serves `image` at `socket` to one front end, until that ends the connection.
///
/// # Errors
/// The image cannot be opened, or the socket cannot be listened at.
pub fn serve(socket: &Path, image: &Path, queues: usize) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(image)?;
    let len_bytes = file.metadata()?.len();
    let memory = GuestMemoryAtomic::new(Mapped::new());
    let disk = Disk { file, len_bytes, queues, memory: memory.clone(), requests: None };
    let disk = Arc::new(RwLock::new(disk));
    daemon_of(disk, memory)?.serve(socket).map_err(|error| io::Error::other(error.to_string()))
}

/// A daemon that serves a device.
fn daemon_of<
    T: VhostUserBackend<Vring = VringRwLock<Memory>, Bitmap = BitmapMmapRegion>
        + Clone
        + Send
        + Sync
        + 'static,
>(
    device: T,
    memory: Memory,
) -> io::Result<VhostUserDaemon<T>> {
    VhostUserDaemon::new("vhost-user-test".to_owned(), device, memory)
        .map_err(|error| io::Error::other(error.to_string()))
}
