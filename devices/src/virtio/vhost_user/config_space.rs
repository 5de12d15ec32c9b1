// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration of a vhost-user device, as far as the VMM has it.
//!
//! Owns the copy that drivers read, and how it is made of what the back end has. It must never be changed by a driver.

use std::time::Duration;

use parking_lot::Mutex;

use super::error::VhostUserError;
use super::kind::{ConfigSource, NET_MTU_OFFSET, VhostUserKind};
use super::session::Session;

/// The configuration; shared by the device and its thread.
pub(super) struct ConfigSpace {
    kind: VhostUserKind,
    source: ConfigSource,
    num_queues: u16,
    features: u64,
    bytes: Mutex<Vec<u8>>,
}

/// What the back end has of it; none if there is nothing, or it has nothing there.
fn of_back_end(
    session: &mut Session,
    source: ConfigSource,
    limit: Duration,
) -> Result<Option<Vec<u8>>, VhostUserError> {
    match source {
        ConfigSource::Vmm | ConfigSource::BackEnd => Ok(None),
        ConfigSource::Needed(len_bytes) => session.config(len_bytes).map(Some),
        ConfigSource::IfPresent(len_bytes) => {
            let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
            let is_there = session.read_config(0, &mut bytes, limit)?;
            Ok(is_there.then_some(bytes))
        }
    }
}

impl ConfigSpace {
    /// The configuration of a device whose back end has a certain time to say what it has of it.
    ///
    /// # Errors
    /// It lacks what the device needs.
    pub(super) fn read(
        kind: VhostUserKind,
        session: &mut Session,
        num_queues: u16,
        limit: Duration,
    ) -> Result<Self, VhostUserError> {
        let source = kind.config_source(session.features());
        let of_back_end = of_back_end(session, source, limit)?;
        let features = kind.features(session.features(), num_queues, of_back_end.as_deref());
        let bytes = Mutex::new(kind.config(of_back_end.as_deref(), num_queues, features));
        Ok(Self { kind, source, num_queues, features, bytes })
    }

    /// The kind of the device.
    pub(super) fn kind(&self) -> &VhostUserKind {
        &self.kind
    }

    /// Features to offer.
    pub(super) fn features(&self) -> u64 {
        self.features
    }

    /// Whether the driver's accesses go to the back end.
    pub(super) fn is_of_back_end(&self) -> bool {
        self.source == ConfigSource::BackEnd
    }

    /// What drivers read.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().clone()
    }

    /// The MTU that drivers of a network are told.
    pub(super) fn mtu(&self) -> Option<u16> {
        if !matches!(self.kind, VhostUserKind::Net { .. }) {
            return None;
        }
        let mtu = self.bytes.lock().get(NET_MTU_OFFSET..)?.first_chunk().copied();
        mtu.map(u16::from_le_bytes).filter(|mtu| *mtu != 0)
    }

    /// Reads it anew, as it has changed. Whether a driver can see that.
    ///
    /// # Errors
    /// The back end is lost.
    pub(super) fn refresh(
        &self,
        session: &mut Session,
        limit: Duration,
    ) -> Result<bool, VhostUserError> {
        if self.is_of_back_end() {
            return Ok(true);
        }
        session.begin_within(limit);
        let Some(of_back_end) = of_back_end(session, self.source, limit)? else { return Ok(false) };
        let new = self.kind.config(Some(&of_back_end), self.num_queues, self.features);
        let is_other = *self.bytes.lock() != new;
        *self.bytes.lock() = new;
        Ok(is_other)
    }
}
