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
use virtio_bindings::virtio_net::VIRTIO_NET_F_MTU;
use virtio_queue::QueueT as _;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::accept::accept;
use super::channel::Channel;
use super::deadline::Deadline;
use super::error::VhostUserError;
use super::needs::{AskedQueues, Needs};
use super::plain;
use super::ring::{Ring, RingStage};
use super::running::RunningRing;
use super::write_log::SharedLog;
use crate::unix_connect::{BETWEEN_ATTEMPTS, connect_within};

/// Time to connect and negotiate, to start all queues, and to stop them. All but one of the requests are answered from the
/// back end's memory; before the one that stops a queue is answered, the requests of the guest in flight are completed,
/// and storage may take seconds. A back end that is started together with the VMM listens within moments.
const OPERATION_LIMIT: Duration = Duration::from_secs(10);
/// Regions that each back end takes in one table (vhost-user, "Memory regions description").
const TABLE_REGIONS_MAX: usize = 8;
/// Size of a queue that is named to find out whether the back end has it, which all back ends serve.
const PROBED_QUEUE_SIZE: u16 = 16;

/// A session with a back end.
pub(super) struct Session {
    frontend: Frontend,
    pub(super) connection: Arc<UnixStream>,
    pub(super) deadline: Arc<Deadline>,
    /// Features of the back end, with its bit for protocol features.
    pub(super) features: u64,
    pub(super) protocol: VhostUserProtocolFeatures,
    is_lost: bool,
    is_loss_reported: bool,
    /// The back end has the table of guest memory, which does not change during a session.
    pub(super) knows_memory: bool,
    /// Where the back end makes requests, if it can.
    channel: Option<Channel>,
    /// The MTU of a network that the back end is told, in bytes.
    mtu: Option<u16>,
    /// Features that the back end was told last, and the rings that it has started.
    pub(super) accepted: u64,
    pub(super) running: Vec<RunningRing>,
    /// A ring was started since that was last asked.
    pub(super) has_run: bool,
    /// Where the back end marks what it writes, and whether it has been told.
    pub(super) log: Option<Arc<SharedLog>>,
    pub(super) knows_log: bool,
    /// What is to be announced on the network once the back end has rings.
    pub(super) announcement: Option<[u8; 6]>,
}

impl Session {
    /// Connects to `path`, or has a back end connect there if it `listens`, and negotiates.
    pub(super) fn open(path: &Path, listens: bool, needs: Needs) -> Result<Self, VhostUserError> {
        if listens {
            let limit_ms = OPERATION_LIMIT.as_millis();
            let connection = accept(path, OPERATION_LIMIT).map_err(|source| {
                VhostUserError::Accept { path: path.to_owned(), limit_ms, source }
            })?;
            // A back end that comes late has the time of one that listens at once.
            let mut session = Self::new(connection, needs.count, OPERATION_LIMIT)?;
            session.deadline.begin(Duration::ZERO);
            session.greet()?;
            session.negotiate(needs)?;
            return Ok(session);
        }
        let begun = Instant::now();
        let mut session = loop {
            match Self::open_once(path, needs, begun) {
                // It was queued where a back end that has just ended had listened.
                Err(error) if error.is_hang_up() && begun.elapsed() < OPERATION_LIMIT => {
                    std::thread::sleep(BETWEEN_ATTEMPTS);
                }
                opened => break opened?,
            }
        };
        session.negotiate(needs)?;
        Ok(session)
    }

    /// Connects to a back end that is there, and hears from it, in the time that is left since `begun`.
    fn open_once(path: &Path, needs: Needs, begun: Instant) -> Result<Self, VhostUserError> {
        let limit_ms = OPERATION_LIMIT.as_millis();
        let left = OPERATION_LIMIT.saturating_sub(begun.elapsed());
        let connection = connect_within(path, left, &|| false).map_err(|source| {
            VhostUserError::Connect { path: path.to_owned(), limit_ms, source }
        })?;
        let mut session = Self::new(connection, needs.count, OPERATION_LIMIT)?;
        session.deadline.begin(begun.elapsed());
        session.greet()?;
        Ok(session)
    }

    /// The same over a connection, with a time limit for each operation.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn over(
        connection: UnixStream,
        needs: Needs,
        limit: Duration,
    ) -> Result<Self, VhostUserError> {
        let mut session = Self::new(connection, needs.count, limit)?;
        session.deadline.begin(Duration::ZERO);
        session.greet()?;
        session.negotiate(needs)?;
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
            channel: None,
            mtu: None,
            accepted: 0,
            running: Vec::new(),
            has_run: false,
            log: None,
            knows_log: false,
            announcement: None,
        })
    }

    /// The first requests, by which a back end shows that it serves this connection.
    fn greet(&mut self) -> Result<(), VhostUserError> {
        self.request("SET_OWNER", |back_end| back_end.set_owner())?;
        self.features = self.request("GET_FEATURES", |back_end| back_end.get_features())?;
        if self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            return Err(VhostUserError::Lacks("VHOST_USER_F_PROTOCOL_FEATURES"));
        }
        Ok(())
    }

    fn negotiate(&mut self, needs: Needs) -> Result<(), VhostUserError> {
        let offered =
            self.request("GET_PROTOCOL_FEATURES", VhostUserFrontend::get_protocol_features)?;
        let mut wanted = needs.protocol
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        wanted.set(VhostUserProtocolFeatures::MQ, needs.asked != AskedQueues::No);
        if !offered.contains(VhostUserProtocolFeatures::CONFIG) {
            // There is nothing that could change.
            wanted.remove(VhostUserProtocolFeatures::BACKEND_REQ);
        }
        self.protocol = offered & wanted;
        let protocol = self.protocol;
        self.request("SET_PROTOCOL_FEATURES", |back_end| back_end.set_protocol_features(protocol))?;
        if self.confirms() {
            // From here on the back end says of each request whether it has carried it out.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        self.check_queues(needs)?;
        self.open_channel()
    }

    /// Whether the back end says of each request if it has carried it out.
    pub(super) fn confirms(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    fn check_queues(&mut self, needs: Needs) -> Result<(), VhostUserError> {
        let Needs { count, without_mq, asked, .. } = needs;
        let offered = if self.protocol.contains(VhostUserProtocolFeatures::MQ) {
            let connection = Arc::clone(&self.connection);
            self.request("GET_QUEUE_NUM", |_| plain::get_queue_num(&*connection))?
        } else {
            without_mq as u64
        };
        let needed = count as u64;
        if needed <= offered {
            return Ok(());
        }
        let too_few = VhostUserError::Queues { offered, needed: count };
        let may_be_pairs = asked == AskedQueues::QueuesOrPairs && needed.div_ceil(2) <= offered;
        if !may_be_pairs || !self.protocol.contains(VhostUserProtocolFeatures::MQ) {
            return Err(too_few);
        }
        // If it has said how many queues, it has none of this index. The size is set again before it is used.
        let last = count.saturating_sub(1);
        let probed = self
            .request("SET_VRING_NUM", |to| to.set_vring_num(last, PROBED_QUEUE_SIZE))
            .and_then(|()| self.await_done());
        match probed {
            Err(VhostUserError::Request { .. }) => Err(too_few),
            probed => probed,
        }
    }

    /// Waits until all requests before have been carried out.
    pub(super) fn await_done(&mut self) -> Result<(), VhostUserError> {
        if !self.confirms() {
            self.request("GET_FEATURES", |back_end| back_end.get_features())?;
        }
        Ok(())
    }

    /// Lets the back end make requests.
    fn open_channel(&mut self) -> Result<(), VhostUserError> {
        if !self.protocol.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
            return Ok(());
        }
        let opened = Channel::open(self.confirms());
        let (channel, theirs) = opened.map_err(|source| VhostUserError::Resource {
            what: "open a channel for the back end",
            source,
        })?;
        self.request("SET_BACKEND_REQ_FD", |to| to.set_backend_request_fd(&theirs))?;
        self.channel = Some(channel);
        Ok(())
    }

    /// Where the back end makes requests, if it can.
    pub(super) fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    /// Sets the MTU of a network that the back end is told.
    pub(super) fn set_mtu(&mut self, mtu: Option<u16>) {
        self.mtu = mtu;
    }

    /// An operation begins that may take `limit`.
    pub(super) fn begin_within(&self, limit: Duration) {
        self.deadline.begin_within(limit);
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
        self.request("GET_CONFIG", |_| plain::get_config(&*connection, offset, data))
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

    /// Starts the rings that are wanted with the features that the driver has accepted.
    ///
    /// # Errors
    /// [`VhostUserError::Ring`] if the driver has placed a ring where the back end cannot reach it; nothing has been
    /// sent then.
    pub(super) fn start(
        &mut self,
        features: u64,
        memory: &GuestMemory,
        rings: &mut [Ring],
    ) -> Result<(), VhostUserError> {
        let wanted = |ring: &&mut Ring| ring.is_wanted;
        let rings = placed(rings.iter_mut().filter(wanted), memory)?;
        self.deadline.begin(Duration::ZERO);
        // Not those of fields that the VMM has alone.
        self.accepted =
            features & self.features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.send_features()?;
        if self.mtu.is_some() && features & 1 << VIRTIO_NET_F_MTU != 0 {
            self.send_mtu()?;
        }
        self.send_memory(memory)?;
        self.send_log()?;
        self.run(rings)?;
        self.send_announcement()
    }

    /// Has the back end serve the rings that are wanted and no others, within `limit`, while it works.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub(super) fn serve_wanted(
        &mut self,
        memory: &GuestMemory,
        rings: &mut [Ring],
        limit: Duration,
    ) -> Result<(), VhostUserError> {
        let is_new = |ring: &&mut Ring| ring.is_wanted && ring.stage != RingStage::Enabled;
        placed(rings.iter_mut().filter(is_new), memory)?;
        self.deadline.begin_within(limit);
        for ring in rings.iter_mut().filter(|ring| !ring.is_wanted) {
            self.disable(ring)?;
        }
        let must_restart = self.must_restart_rings();
        for ring in rings.iter_mut().filter(is_new) {
            if ring.stage == RingStage::Disabled && !must_restart {
                // Without a signal, as QEMU does: the back end looks for what has come meanwhile.
                self.enable(ring.index, true)?;
                ring.stage = RingStage::Enabled;
            } else {
                // Started anew, as what the driver notified of meanwhile may have been missed.
                self.stop_one(ring)?;
            }
        }
        let new = placed(rings.iter_mut().filter(is_new), memory)?;
        self.run(new)
    }

    /// Starts and enables rings.
    fn run(&mut self, rings: Vec<(&mut Ring, VringConfigData)>) -> Result<(), VhostUserError> {
        let indexes: Vec<_> = rings.iter().map(|(ring, _)| ring.index).collect();
        for (ring, place) in &rings {
            self.set_up(RunningRing::of(ring, *place)?, ring.queue.next_avail())?;
        }
        self.begin(&indexes)?;
        for (ring, _) in rings {
            ring.stage = RingStage::Enabled;
        }
        Ok(())
    }

    /// Tells the back end the MTU, if it can take one.
    fn send_mtu(&mut self) -> Result<(), VhostUserError> {
        let is_known = self.protocol.contains(VhostUserProtocolFeatures::MTU);
        let Some(mtu) = self.mtu.filter(|_| is_known) else { return Ok(()) };
        let (connection, confirms) = (Arc::clone(&self.connection), self.confirms());
        let is_taken =
            self.request("NET_SET_MTU", |_| plain::set_mtu(&*connection, mtu, confirms))?;
        if is_taken { Ok(()) } else { Err(VhostUserError::Mtu { mtu }) }
    }

    pub(super) fn enable(&mut self, index: u16, enable: bool) -> Result<(), VhostUserError> {
        self.request("SET_VRING_ENABLE", |back_end| {
            back_end.set_vring_enable(usize::from(index), enable)
        })?;
        if let Some(ring) = self.running.iter_mut().find(|ring| ring.index == index) {
            ring.is_enabled = enable;
        }
        Ok(())
    }

    fn disable(&mut self, ring: &mut Ring) -> Result<(), VhostUserError> {
        if ring.stage == RingStage::Enabled {
            self.enable(ring.index, false)?;
            ring.stage = RingStage::Disabled;
        }
        Ok(())
    }

    /// Stops a ring that is not enabled, and notes the index of its next available entry.
    fn stop_one(&mut self, ring: &mut Ring) -> Result<(), VhostUserError> {
        if ring.stage != RingStage::Stopped {
            ring.queue.set_next_avail(self.stop_ring(ring.index)?);
            ring.stage = RingStage::Stopped;
        }
        Ok(())
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
        for ring in rings.iter_mut() {
            self.disable(ring)?;
        }
        for ring in rings {
            self.stop_one(ring)?;
        }
        Ok(())
    }

    pub(super) fn request<T>(
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

    /// Whether the connection is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether the back end has no ring of the guest, so that it writes nothing; or is lost.
    pub(super) fn is_stopped(&self) -> bool {
        self.running.is_empty()
    }

    /// Whether a ring was started since [`take_has_run`](Self::take_has_run).
    pub(super) fn has_run(&self) -> bool {
        self.has_run
    }

    /// The same, once.
    pub(super) fn take_has_run(&mut self) -> bool {
        std::mem::take(&mut self.has_run)
    }

    /// The time limit of the connection, which may be shortened while the session is in use.
    pub(super) fn deadline(&self) -> Arc<Deadline> {
        Arc::clone(&self.deadline)
    }

    /// Whether the loss of the back end is reported for the first time.
    pub(super) fn report_loss(&mut self) -> bool {
        !std::mem::replace(&mut self.is_loss_reported, true)
    }

    /// Ends the connection; every later request fails, and no more come.
    pub(super) fn disconnect(&mut self) {
        self.is_lost = true;
        self.channel = None;
        self.running.clear();
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

/// Rings, with where they are.
fn placed<'a>(
    rings: impl Iterator<Item = &'a mut Ring>,
    memory: &GuestMemory,
) -> Result<Vec<(&'a mut Ring, VringConfigData)>, VhostUserError> {
    rings.map(|ring| ring.place(memory).map(|place| (ring, place))).collect()
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
