// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A session with a vhost-user back end: the connection, what was negotiated, and the requests.
//!
//! Owns the order of the requests, and the rule that the first one that fails is the last: the
//! connection is shut down, and every later request fails at once, so that a back end that does not answer costs one time
//! limit. So does one that answers each request late: the limit is that of an operation (to open, to start, to stop). What the back end answers is checked here. It must never be used on a thread that may not wait.

use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::GuestMemory;
use socket2::SockRef;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Error as ProtocolError, Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::accept::accept;
use super::deadline::Deadline;
use super::error::VhostUserError;
use super::get_config::get_config;
use crate::unix_connect::connect_within;
use crate::virtio::device::Kicks;

/// Time to connect and negotiate, to start all queues, and to stop them. All but one of the requests are answered from the
/// back end's memory; before the one that stops a queue is answered, the requests of the guest in flight are completed,
/// and storage may take seconds. A back end that is started together with the VMM listens within moments.
const OPERATION_LIMIT: Duration = Duration::from_secs(10);
/// Regions that each back end takes in one table (vhost-user, "Memory regions description").
const TABLE_REGIONS_MAX: usize = 8;

/// A descriptor ring of the device, with its eventfds.
pub(super) struct Ring {
    pub(super) index: u16,
    pub(super) queue: Queue,
    /// Maximum size of the queue.
    pub(super) size_max: u16,
    /// Signalled by notifications that the kernel did not take; the back end does not have it.
    pub(super) trapped: EventFd,
    /// What the driver signals when it notifies the queue; each start has another.
    pub(super) kicks: Arc<dyn Kicks>,
    /// Signalled when the back end has used buffers. It must never be read or written here: the back end may make
    /// that block.
    pub(super) call: EventFd,
}

/// Queues that a back end has to serve.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueNeeds {
    /// Of the device.
    pub(super) count: usize,
    /// Those of a back end that is not asked, or does not say (MQ).
    pub(super) without_mq: usize,
    /// The back end is asked how many it serves, if it can say.
    pub(super) is_asked: bool,
}

/// A session with a back end.
pub(super) struct Session {
    frontend: Frontend,
    connection: Arc<UnixStream>,
    deadline: Arc<Deadline>,
    /// Features of the back end, with its bit for protocol features.
    features: u64,
    protocol: VhostUserProtocolFeatures,
    is_lost: bool,
    is_loss_reported: bool,
    /// The back end has the table of guest memory, which does not change during a session.
    knows_memory: bool,
}

impl Session {
    /// Connects to `path`, or has a back end connect there if it `listens`, and negotiates.
    pub(super) fn open(
        path: &Path,
        listens: bool,
        queues: QueueNeeds,
    ) -> Result<Self, VhostUserError> {
        let begun = Instant::now();
        let (path_text, limit_ms) = (path.to_owned(), OPERATION_LIMIT.as_millis());
        let connection = if listens {
            accept(path, OPERATION_LIMIT).map_err(|source| VhostUserError::Accept {
                path: path_text,
                limit_ms,
                source,
            })?
        } else {
            connect_within(path, OPERATION_LIMIT, &|| false)
                .map_err(|source| VhostUserError::Connect { path: path_text, limit_ms, source })?
        };
        let mut session = Self::new(connection, queues.count, OPERATION_LIMIT)?;
        // A back end that comes late has the time of one that listens at once.
        session.deadline.begin(if listens { Duration::ZERO } else { begun.elapsed() });
        session.negotiate(queues)?;
        Ok(session)
    }

    /// The same over a connection, with a time limit for each operation.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn over(
        connection: UnixStream,
        queues: QueueNeeds,
        limit: Duration,
    ) -> Result<Self, VhostUserError> {
        let mut session = Self::new(connection, queues.count, limit)?;
        session.deadline.begin(Duration::ZERO);
        session.negotiate(queues)?;
        Ok(session)
    }

    fn new(connection: UnixStream, queues: usize, limit: Duration) -> Result<Self, VhostUserError> {
        let resource = |what| move |source| VhostUserError::Resource { what, source };
        let copy = || connection.try_clone().map_err(resource("copy a descriptor"));
        let deadline = Deadline::start(copy()?, limit);
        let deadline = deadline.map_err(resource("start a thread for the back end"))?;
        let frontend = Frontend::from_stream(copy()?, queues as u64);
        Ok(Self {
            frontend,
            connection: Arc::new(connection),
            deadline: Arc::new(deadline),
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            is_lost: false,
            is_loss_reported: false,
            knows_memory: false,
        })
    }

    fn negotiate(&mut self, queues: QueueNeeds) -> Result<(), VhostUserError> {
        let QueueNeeds { count, without_mq, is_asked } = queues;
        self.request("SET_OWNER", |back_end| back_end.set_owner())?;
        self.features = self.request("GET_FEATURES", |back_end| back_end.get_features())?;
        if self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            return Err(VhostUserError::Lacks("VHOST_USER_F_PROTOCOL_FEATURES"));
        }
        let offered =
            self.request("GET_PROTOCOL_FEATURES", VhostUserFrontend::get_protocol_features)?;
        let mut wanted = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        wanted.set(VhostUserProtocolFeatures::MQ, is_asked);
        self.protocol = offered & wanted;
        let protocol = self.protocol;
        self.request("SET_PROTOCOL_FEATURES", |back_end| back_end.set_protocol_features(protocol))?;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            // From here on the back end says of each request whether it has carried it out.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let offered = if protocol.contains(VhostUserProtocolFeatures::MQ) {
            self.request("GET_QUEUE_NUM", VhostUserFrontend::get_queue_num)?
        } else {
            without_mq as u64
        };
        if (count as u64) > offered {
            return Err(VhostUserError::Queues { offered, needed: count });
        }
        Ok(())
    }

    /// Virtio features that the back end offers.
    pub(super) fn features(&self) -> u64 {
        self.features & !VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    /// The first `len_bytes` bytes of the device's configuration.
    pub(super) fn config(&mut self, len_bytes: u32) -> Result<Vec<u8>, VhostUserError> {
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Err(VhostUserError::Lacks("VHOST_USER_PROTOCOL_F_CONFIG"));
        }
        let room = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
        // An answer of another length is an error of the request.
        let (_, config) = self.request("GET_CONFIG", |back_end| {
            back_end.get_config(0, len_bytes, VhostUserConfigFlags::empty(), &room)
        })?;
        Ok(config)
    }

    /// Reads the configuration at `offset` for the driver, within `limit`. False if the back end has none, or does not
    /// have it there; nothing is read then.
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn read_config(
        &mut self,
        offset: u32,
        data: &mut [u8],
        limit: Duration,
    ) -> Result<bool, VhostUserError> {
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Ok(false);
        }
        self.deadline.begin_within(limit);
        let connection = Arc::clone(&self.connection);
        self.request("GET_CONFIG", |_| get_config(&*connection, offset, data))
    }

    /// Writes the configuration at `offset` for the driver, within `limit`. A back end may refuse that.
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn write_config(
        &mut self,
        offset: u32,
        data: &[u8],
        limit: Duration,
    ) -> Result<(), VhostUserError> {
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Ok(());
        }
        self.deadline.begin_within(limit);
        self.request("SET_CONFIG", |back_end| {
            match back_end.set_config(offset, VhostUserConfigFlags::empty(), data) {
                Err(vhost::Error::VhostUserProtocol(ProtocolError::BackendInternalError)) => Ok(()),
                result => result,
            }
        })
    }

    /// Checks that the back end can have guest memory as a whole: shared, and in few enough regions.
    pub(super) fn check_memory(&mut self, memory: &GuestMemory) -> Result<(), VhostUserError> {
        let needed = regions(memory)?.len();
        if needed <= TABLE_REGIONS_MAX {
            return Ok(());
        }
        let offered = if self.protocol.contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS) {
            self.request("GET_MAX_MEM_SLOTS", VhostUserFrontend::get_max_mem_slots)?
        } else {
            TABLE_REGIONS_MAX as u64
        };
        if needed as u64 > offered {
            return Err(VhostUserError::Regions { offered, needed });
        }
        Ok(())
    }

    /// Starts the rings with the features that the driver has accepted.
    ///
    /// # Errors
    /// [`VhostUserError::Ring`] if the driver has placed a ring where the back end cannot reach it; nothing has been
    /// sent then.
    pub(super) fn start(
        &mut self,
        features: u64,
        memory: &GuestMemory,
        rings: &[Ring],
    ) -> Result<(), VhostUserError> {
        let places = rings.iter().map(|ring| place(ring, memory));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        self.deadline.begin(Duration::ZERO);
        // Not those of fields that the VMM has alone.
        let features = features & self.features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.request("SET_FEATURES", |back_end| back_end.set_features(features))?;
        self.send_memory(memory)?;
        for (ring, place) in rings.iter().zip(&places) {
            self.set_up(ring, place)?;
        }
        // Before the eventfds: they are signalled, and back ends built on vhost-user-backend before 0.22 drop a signal
        // for a ring that is not enabled. After them once more: two versions of it disable a ring that gets one.
        self.enable(rings, true)?;
        for ring in rings {
            self.send_kick(ring)?;
        }
        self.enable(rings, true)?;
        if !self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            // The back end answers this one when it has carried out all before.
            self.request("GET_FEATURES", |back_end| back_end.get_features())?;
        }
        Ok(())
    }

    fn set_up(&mut self, ring: &Ring, place: &VringConfigData) -> Result<(), VhostUserError> {
        let (index, queue) = (usize::from(ring.index), &ring.queue);
        self.request("SET_VRING_NUM", |to| to.set_vring_num(index, queue.size()))?;
        self.request("SET_VRING_ADDR", |to| to.set_vring_addr(index, place))?;
        self.request("SET_VRING_BASE", |to| to.set_vring_base(index, queue.next_avail()))?;
        self.request("SET_VRING_CALL", |to| to.set_vring_call(index, &ring.call))
    }

    fn enable(&mut self, rings: &[Ring], enable: bool) -> Result<(), VhostUserError> {
        for ring in rings {
            self.request("SET_VRING_ENABLE", |back_end| {
                back_end.set_vring_enable(usize::from(ring.index), enable)
            })?;
        }
        Ok(())
    }

    fn send_kick(&mut self, ring: &Ring) -> Result<(), VhostUserError> {
        let index = usize::from(ring.index);
        // Signalled already: what the driver has notified of before, or while the ring was stopped.
        let kick = ring.kicks.renew(ring.index);
        let kick = kick.map_err(|source| VhostUserError::Resource {
            what: "make the eventfd of a queue",
            source,
        })?;
        self.request("SET_VRING_KICK", |to| to.set_vring_kick(index, &kick))
    }

    fn send_memory(&mut self, memory: &GuestMemory) -> Result<(), VhostUserError> {
        if self.knows_memory {
            return Ok(());
        }
        let regions = regions(memory)?;
        if regions.len() <= TABLE_REGIONS_MAX {
            self.request("SET_MEM_TABLE", |back_end| back_end.set_mem_table(&regions))?;
        } else {
            for region in &regions {
                self.request("ADD_MEM_REG", |back_end| back_end.add_mem_region(region))?;
            }
        }
        self.knows_memory = true;
        Ok(())
    }

    /// Stops the rings, whose requests in flight are completed then, and notes the indexes of their next available
    /// entries.
    pub(super) fn stop(&mut self, rings: &mut [Ring]) -> Result<(), VhostUserError> {
        self.deadline.begin(Duration::ZERO);
        // A ring that is stopped starts again when it is notified; one that is disabled is not served.
        self.enable(rings, false)?;
        for ring in rings {
            let index = usize::from(ring.index);
            let base = self.request("GET_VRING_BASE", |back_end| back_end.get_vring_base(index))?;
            // The upper half is for packed rings, which are not offered.
            ring.queue.set_next_avail(u16::try_from(base & 0xffff).unwrap_or(0));
        }
        Ok(())
    }

    fn request<T>(
        &mut self,
        request: &'static str,
        send: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> Result<T, VhostUserError> {
        if self.is_lost {
            return Err(VhostUserError::Lost);
        }
        let (deadline, frontend) = (&self.deadline, &mut self.frontend);
        let (result, expired) = deadline.limited(|| send(frontend));
        let error = match (result, expired) {
            (Ok(answer), None) => return Ok(answer),
            (Err(source), None) => VhostUserError::Request { request, source },
            (_, Some(limit)) => VhostUserError::Stalled { request, limit_ms: limit.as_millis() },
        };
        self.disconnect();
        Err(error)
    }

    /// The time limit of the connection, which may be shortened while the session is in use.
    pub(super) fn deadline(&self) -> Arc<Deadline> {
        Arc::clone(&self.deadline)
    }

    /// Whether the loss of the back end is reported for the first time.
    pub(super) fn report_loss(&mut self) -> bool {
        !std::mem::replace(&mut self.is_loss_reported, true)
    }

    /// Ends the connection; every later request fails.
    pub(super) fn disconnect(&mut self) {
        self.is_lost = true;
        // Fails if the back end has closed it.
        let _ = self.connection.shutdown(Shutdown::Both);
    }

    /// Whether the back end has sent something, or closed the connection, while no request is under way.
    pub(super) fn is_spoken_to(&self) -> bool {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let peeked = SockRef::from(&*self.connection).recv_with_flags(&mut byte, flags);
        !peeked.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    /// The connection, to be watched: the back end sends nothing without a request.
    pub(super) fn connection_fd(&self) -> RawFd {
        self.connection.as_raw_fd()
    }
}

/// Where a ring is in this process, as the back end is told.
fn place(ring: &Ring, memory: &GuestMemory) -> Result<VringConfigData, VhostUserError> {
    let Ring { queue, .. } = ring;
    // Contiguous in the back end, so as a whole in one region.
    let host = |gpa: u64, len_bytes: usize| {
        let bytes = memory.get_slice(GuestAddress(gpa), len_bytes);
        bytes.map(|bytes| bytes.ptr_guard().as_ptr().addr() as u64)
    };
    let size = usize::from(queue.size());
    let outside = |_| VhostUserError::Ring { index: ring.index };
    Ok(VringConfigData {
        queue_max_size: ring.size_max,
        queue_size: queue.size(),
        flags: 0,
        desc_table_addr: host(queue.desc_table(), 16 * size).map_err(outside)?,
        used_ring_addr: host(queue.used_ring(), 6 + 8 * size).map_err(outside)?,
        avail_ring_addr: host(queue.avail_ring(), 6 + 2 * size).map_err(outside)?,
        log_addr: None,
    })
}

/// Guest memory as the back end is told of it.
fn regions(memory: &GuestMemory) -> Result<Vec<VhostUserMemoryRegionInfo>, VhostUserError> {
    let region = |region: &vm_memory::GuestRegionMmap<_>| {
        let gpa = region.start_addr().0;
        if region.flags() & libc::MAP_SHARED == 0 || region.file_offset().is_none() {
            return Err(VhostUserError::PrivateMemory { gpa });
        }
        VhostUserMemoryRegionInfo::from_guest_region(region)
            .map_err(|_| VhostUserError::PrivateMemory { gpa })
    };
    memory.iter().map(region).collect()
}
