// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VMM does with a vhost-user device that the transport has.
//!
//! Owns no device: it moves with its guest, as far as that can be said without stopping its rings.

use std::sync::Arc;

use memory::GuestRam;
use parking_lot::Mutex;

use super::error::VhostUserError;
use super::net_link::NetLink;
use super::session::Session;
use super::write_log::WriteLog;

/// A device, beside its transport.
pub struct VhostUserHandle {
    pub(super) id: String,
    pub(super) session: Arc<Mutex<Session>>,
    /// Of a network.
    pub(super) net: Option<Arc<NetLink>>,
    /// Of a file system: what its back end has given last.
    pub(super) given: Option<Arc<Mutex<Vec<u8>>>>,
}

impl VhostUserHandle {
    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether the back end is lost.
    pub fn is_lost(&self) -> bool {
        self.session.lock().is_lost()
    }

    /// Whether its state can move: that of a network does, another has to be given by the back end.
    pub fn has_state(&self) -> bool {
        self.net.is_some() || (self.given.is_some() && self.session.lock().can_give_state())
    }

    /// Has a back end that has a state give it, for the device to be saved. The device must be paused.
    ///
    /// # Errors
    /// It does not.
    pub fn fetch_state(&self) -> Result<(), VhostUserError> {
        if let Some(given) = &self.given {
            let state = self.session.lock().save_state()?;
            *given.lock() = state;
        }
        Ok(())
    }

    /// Starts to log what the back end writes to guest memory; ends when the log is dropped.
    pub fn watch_writes(&self, ram: &GuestRam) -> WriteLog {
        WriteLog::start(&self.id, &self.session, ram)
    }

    /// Has a guest that has arrived announced on the network, by its driver if that can and by the back end otherwise.
    pub fn announce(&self) {
        let Some(net) = &self.net else { return };
        if !net.ask_to_announce() {
            // A back end that is lost now is noticed by the thread of the device.
            let _ = self.session.lock().announce(net.mac);
        }
    }
}
