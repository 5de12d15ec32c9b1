// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests of a session that a guest's move needs: what the back end writes is logged, it gives or takes its own state,
//! and the guest is announced.
//!
//! Owns their order, beside that of [`session`](super::session): the back end has to know guest memory before it is told
//! where to mark pages of it.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Error as ProtocolError, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VringConfigData};

use super::error::VhostUserError;
use super::plain;
use super::running::RunningRing;
use super::session::Session;
use super::write_log::SharedLog;

/// Time to start or stop a log, or to announce a guest, while the rings are served; see `Session::restart` for the
/// others.
const LIMIT: Duration = Duration::from_secs(3);
/// Time for the back end to give its state, or to take it; the guest is stopped.
const STATE_LIMIT: Duration = Duration::from_secs(10);
/// The longest state that is taken: that of a file server with some hundred thousand files that its guest knows. It takes twice as
/// much in the state of the machine, which has a limit of 256 MiB.
const STATE_LEN_BYTES_MAX: u64 = 32 << 20;
/// Of the address of a ring: its used ring is logged (vhost-user, "Vring descriptor indices" and "Migration").
const LOGS_USED_RING: u32 = 1;

/// What is left of the time.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

impl Session {
    /// Whether the back end can log what it writes.
    pub(super) fn can_log(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::LOG_SHMFD)
            && self.features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0
    }

    /// Has the back end mark what it writes from now on in a log, until [`stop_log`](Self::stop_log).
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn start_log(&mut self, log: &Arc<SharedLog>) -> Result<(), VhostUserError> {
        self.log = Some(Arc::clone(log));
        self.knows_log = false;
        self.begin_within(LIMIT);
        if self.knows_memory {
            self.send_log()?;
        }
        self.apply_log()
    }

    /// Ends that.
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn stop_log(&mut self) -> Result<(), VhostUserError> {
        self.log = None;
        if self.is_lost() {
            return Ok(());
        }
        self.begin_within(LIMIT);
        self.apply_log()
    }

    /// Tells the back end where to mark pages, once it knows guest memory.
    pub(super) fn send_log(&mut self) -> Result<(), VhostUserError> {
        let Some(log) = self.log.clone().filter(|_| !self.knows_log) else { return Ok(()) };
        let connection = Arc::clone(&self.connection);
        self.request("SET_LOG_BASE", |_| {
            plain::set_log_base(&connection, log.file(), log.len_bytes())
        })?;
        self.knows_log = true;
        Ok(())
    }

    /// Tells the back end the features that the driver has accepted, and whether to log.
    pub(super) fn send_features(&mut self) -> Result<(), VhostUserError> {
        let log = if self.log.is_some() { VhostUserVirtioFeatures::LOG_ALL.bits() } else { 0 };
        let features = self.accepted | log;
        self.request("SET_FEATURES", |back_end| back_end.set_features(features))
    }

    /// Where a ring is, and whether it is logged.
    pub(super) fn logged(&self, ring: &RunningRing) -> VringConfigData {
        if self.log.is_none() {
            return ring.place;
        }
        VringConfigData { flags: LOGS_USED_RING, log_addr: Some(ring.used_gpa), ..ring.place }
    }

    /// Has rings that are served logged, or not any more.
    fn apply_log(&mut self) -> Result<(), VhostUserError> {
        if self.is_stopped() {
            // With the next start.
            return Ok(());
        }
        if self.must_restart_rings() {
            return self.restart();
        }
        self.send_features()?;
        let rings: Vec<_> =
            self.running.iter().map(|ring| (ring.index, self.logged(ring))).collect();
        for (index, place) in rings {
            self.request("SET_VRING_ADDR", |to| to.set_vring_addr(usize::from(index), &place))?;
        }
        // Back ends built on vhost-user-backend before 0.15 disable rings when they are told features.
        let enabled = self.running.iter().filter(|ring| ring.is_enabled).map(|ring| ring.index);
        for index in enabled.collect::<Vec<_>>() {
            self.enable(index, true)?;
        }
        self.await_done()
    }

    /// Whether the back end can give its state, and take one.
    pub(super) fn can_give_state(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::DEVICE_STATE)
    }

    /// The state of a back end whose rings are stopped.
    ///
    /// # Errors
    /// It does not give it, or not as a whole in time; or it is lost.
    pub(super) fn save_state(&mut self) -> Result<Vec<u8>, VhostUserError> {
        let failed = |source| VhostUserError::State { what: "given", source: Some(source) };
        let until = Instant::now() + self.deadline.at_most(STATE_LIMIT);
        let mut ours = self.begin_transfer(VhostTransferStateDirection::SAVE, "given")?;
        let mut state = Vec::new();
        let mut part = vec![0; 64 << 10];
        loop {
            ours.set_read_timeout(Some(left(until).map_err(failed)?)).map_err(failed)?;
            let len = ours.read(&mut part).map_err(failed)?;
            if len == 0 {
                break;
            }
            state.extend_from_slice(part.get(..len).unwrap_or_default());
            if state.len() as u64 > STATE_LEN_BYTES_MAX {
                return Err(failed(io::Error::other("it is too long")));
            }
        }
        self.end_transfer("given")?;
        Ok(state)
    }

    /// Gives a back end that has not started a ring the state of another.
    ///
    /// # Errors
    /// It does not take it, or not in time; or it is lost.
    pub(super) fn load_state(&mut self, state: &[u8]) -> Result<(), VhostUserError> {
        let failed = |source| VhostUserError::State { what: "taken", source: Some(source) };
        let until = Instant::now() + self.deadline.at_most(STATE_LIMIT);
        let mut ours = self.begin_transfer(VhostTransferStateDirection::LOAD, "taken")?;
        let mut rest = state;
        while !rest.is_empty() {
            ours.set_write_timeout(Some(left(until).map_err(failed)?)).map_err(failed)?;
            let len = ours.write(rest).map_err(failed)?;
            rest = rest.get(len..).unwrap_or_default();
        }
        // By which the back end sees the end.
        drop(ours);
        self.end_transfer("taken")
    }

    fn begin_transfer(
        &mut self,
        direction: VhostTransferStateDirection,
        what: &'static str,
    ) -> Result<UnixStream, VhostUserError> {
        if !self.can_give_state() {
            return Err(VhostUserError::Lacks("VHOST_USER_PROTOCOL_F_DEVICE_STATE"));
        }
        let made = UnixStream::pair();
        let (ours, theirs) =
            made.map_err(|source| VhostUserError::State { what, source: Some(source) })?;
        self.begin_within(STATE_LIMIT);
        let phase = VhostTransferStatePhase::STOPPED;
        // It may refuse that without being lost. One that wants another descriptor to be used is not known.
        let is_begun = self.request("SET_DEVICE_STATE_FD", |back_end| {
            match back_end.set_device_state_fd(direction, phase, theirs.into()) {
                Err(vhost::Error::VhostUserProtocol(ProtocolError::BackendInternalError)) => {
                    Ok(false)
                }
                begun => begun.map(|other| other.is_none()),
            }
        })?;
        if is_begun { Ok(ours) } else { Err(VhostUserError::State { what, source: None }) }
    }

    fn end_transfer(&mut self, what: &'static str) -> Result<(), VhostUserError> {
        let is_done =
            self.request("CHECK_DEVICE_STATE", |back_end| match back_end.check_device_state() {
                Err(vhost::Error::VhostUserProtocol(ProtocolError::BackendInternalError)) => {
                    Ok(false)
                }
                done => done.map(|()| true),
            })?;
        if is_done { Ok(()) } else { Err(VhostUserError::State { what, source: None }) }
    }

    /// Has the back end announce an address on the network, if it can: at once, or when it has the rings.
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn announce(&mut self, mac: [u8; 6]) -> Result<(), VhostUserError> {
        self.announcement = Some(mac);
        if self.is_stopped() {
            return Ok(());
        }
        self.begin_within(LIMIT);
        self.send_announcement()
    }

    /// Sends the announcement that waits for the rings.
    pub(super) fn send_announcement(&mut self) -> Result<(), VhostUserError> {
        let is_known = self.protocol.contains(VhostUserProtocolFeatures::RARP);
        let Some(mac) = self.announcement.take().filter(|_| is_known) else { return Ok(()) };
        let (connection, confirms) = (Arc::clone(&self.connection), self.confirms());
        self.request("SEND_RARP", |_| plain::send_rarp(&*connection, mac, confirms))
    }
}
