// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests of a session that a guest's move needs: what the back end writes is logged, and the guest is announced.
//!
//! Owns their order, beside that of [`session`](super::session): the back end has to know guest memory before it is told
//! where to mark pages of it.

use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend as _, VringConfigData};

use super::error::VhostUserError;
use super::plain;
use super::session::{RunningRing, Session};
use super::write_log::SharedLog;

/// Time to start or stop a log, or to announce a guest; the rings are served meanwhile.
const LIMIT: Duration = Duration::from_secs(3);
/// Of the address of a ring: its used ring is logged (vhost-user, "Vring descriptor indices" and "Migration").
const LOGS_USED_RING: u32 = 1;

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

    /// Has the back end announce an address on the network, if it can.
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn announce(&mut self, mac: [u8; 6]) -> Result<(), VhostUserError> {
        if !self.protocol.contains(VhostUserProtocolFeatures::RARP) {
            return Ok(());
        }
        self.begin_within(LIMIT);
        let (connection, confirms) = (Arc::clone(&self.connection), self.confirms());
        self.request("SEND_RARP", |_| plain::send_rarp(&*connection, mac, confirms))
    }
}
